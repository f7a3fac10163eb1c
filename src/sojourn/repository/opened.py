"""A repository that was opened: where it is, whose keys open it, and its domains.

Guarantee: nothing is asked of the store but its configuration, and nothing is made unless that was
asked for. What checks, counts, collects and repairs works on this; `repository` adds snapshots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self, TypeVar

from sojourn.repository import cipher, config
from sojourn.repository.backends.base import Backend
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.config import Config
from sojourn.repository.keys import Keyring

if TYPE_CHECKING:
    from sojourn.repository.domains import Domain

T = TypeVar("T")


class OpenedRepository:
    """An opened repository. Methods may be called from many threads."""

    def __init__(self, backend: Backend, settings: Config, keyring: Keyring) -> None:
        self.backend = backend
        self.config = settings
        self.keyring = keyring
        self._domains: dict[str, Domain] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        url: str,
        secret: bytes | None = None,
        *,
        create: bool = False,
        options: Mapping[str, str] | None = None,
        opening: Callable[[Backend], None] | None = None,
    ) -> Self:
        """Open the repository at a URL; with `create` it is made where there is none, and nothing
        is made otherwise, not even a directory. `opening` is given the backend before anything is
        asked of it: closing it ends the waiting.

        Raises ObjectMissing (there is none), StoreKeyInvalid, StoreUnreachable, StoreRefused.
        """
        backend = open_backend(url, create=create, options=options)
        if opening is not None:
            opening(backend)
        try:
            if create:
                settings, keyring = config.create(backend, secret)
            else:
                settings, keyring = config.open_existing(backend, secret)
        except BaseException:
            backend.close()
            raise
        return cls(backend, settings, keyring)

    @classmethod
    def open_beside(cls, url: str, secret: bytes | None, work: Callable[[], T]) -> tuple[Self, T]:
        """`open`, and meanwhile `work`: to make the key from a secret keeps one core busy for a
        tenth of a second, in which a short-lived process can load what it will use."""
        with ThreadPoolExecutor(1) as beside:
            opening = beside.submit(cls.open, url, secret)
            cipher.load()
            done = work()
            return opening.result(), done

    @property
    def url(self) -> str:
        """Where it is, without credentials."""
        return self.backend.url

    def close(self) -> None:
        """Let go of the store. Idempotent."""
        self.backend.close()

    def domain(self, name: str) -> Domain:
        """One domain: a tenant's, or `SHARED`."""
        from sojourn.repository.domains import Domain  # see `open_beside`

        with self._lock:
            found = self._domains.get(name)
            if found is None:
                found = self._domains[name] = Domain(self.backend, self.keyring.domain(name))
            return found
