"""Until when a gateway may carry anything: as long as its node has its lease.

Guarantee: past the deadline no byte is sent on in either direction, no connection opened or
accepted and no name looked up, whatever the node's own process does; what is open is reset. What
the kernel was given before is not taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from sojourn.wire.lease_file import LeaseFile, now

_LOOK_SECONDS = 0.25


class Lease:
    """The node's lease, by its file. Raises OSError when that is not there."""

    def __init__(self, path: Path) -> None:
        self._file = LeaseFile(path)
        self._deadline = self._file.deadline()

    def valid(self) -> bool:
        """Whether anything may be carried now. Cheap: asked for each piece."""
        clock = now()
        if clock < self._deadline:
            return True
        self._deadline = self._file.deadline()
        return clock < self._deadline

    async def watch(self, cut: Callable[[], None]) -> None:
        """Call `cut` each time the lease comes to its end. Also one that ends before its time is
        seen, a moment late."""
        was = True
        while True:
            self._deadline = self._file.deadline()
            left = (self._deadline - now()) / 1e9
            if was and left <= 0:
                cut()
            was = left > 0
            await asyncio.sleep(min(left, _LOOK_SECONDS) if was else _LOOK_SECONDS)


class Unbounded:
    """Of a gateway that belongs to no node of many."""

    def valid(self) -> bool:
        return True


AnyLease = Lease | Unbounded
UNBOUNDED = Unbounded()


def lease_of(path: str | None) -> AnyLease:
    """The lease by its file's path; without one there is no bound."""
    return UNBOUNDED if path is None else Lease(Path(path))
