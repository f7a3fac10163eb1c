"""What every place for objects promises.

Guarantee: an object that was put and acknowledged is read back whole by every later get, head and
listing, and survives a crash; a put that failed left the old object or none. Transient failures
(throttling, 5xx, timeouts, broken connections) are retried with back-off inside; what is raised
after that is final for the call. All methods block, release the GIL while they wait, and may be
called from many threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec


class ObjectInfo(msgspec.Struct, frozen=True):
    """An object as listed. `modified` is in seconds since 1970 by the store's own clock; `version`
    changes with every write of the key and is what `put(replaces=...)` compares."""

    key: str
    size: int
    modified: float
    version: str


class Backend(Protocol):
    """A flat space of objects. Keys are relative paths of letters, digits and `._-/`."""

    @property
    def url(self) -> str:
        """Where it is, without credentials."""

    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        """Write an object; answers its version. With `create` only where none is, with `replaces`
        only over that version: otherwise Conflict, and nothing is changed. A create whose answer
        was lost and which finds the same bytes there counts as done.
        Raises StoreUnreachable, StorageFull, Conflict, StoreRefused."""

    def get(self, key: str, *, limit: int | None = None) -> tuple[bytes, str]:
        """The whole object and its version. Raises ObjectMissing, StoreUnreachable, and
        IntegrityError when it is larger than `limit` bytes (nothing that large is read then)."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Pieces (offset, length) of an object, in order; near ones are fetched together.
        Raises ObjectMissing, StoreUnreachable, and IntegrityError where the object is too short."""

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        """The last `length` bytes (or all there are) and the object's size."""

    def head(self, key: str) -> ObjectInfo:
        """Raises ObjectMissing, StoreUnreachable."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix` (which ends with `/`, or is empty), page by
        page. Raises StoreUnreachable, also half-way: an incomplete listing never looks complete."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are no error."""

    def now(self) -> float:
        """The store's own clock, seconds since 1970."""

    def close(self) -> None:
        """Let go of connections. Idempotent."""
