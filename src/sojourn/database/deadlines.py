"""Moving idle deadlines out without a write for every call.

Guarantee: a move is visible to reads through this object at once and is written at most once a
second per session; the first after a quiet second is written at once, so a crash can lose no more
than the last second's movement. Deadlines only move out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from sojourn.errors import NodeFenced, SojournError
from sojourn.model.sessions import Session

_log = logging.getLogger(__name__)
INTERVAL = 1.0  # seconds between two writes for one session
_KEPT = 60.0  # longer than any read takes


class Deadlines:
    """Moves that are not yet written, and those written lately.

    The latter are kept for a while because a read that began before the write may end after it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        write: Callable[[Mapping[str, float]], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._write = write
        self._pending: dict[str, float] = {}
        self._written: dict[str, tuple[float, float]] = {}  # deadline, time of the write
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._writes: set[asyncio.Task[None]] = set()

    def touch(self, session: str, deadline: float) -> None:
        """Remember a move and see that it is written in time."""
        known = self._pending.get(session)
        if known is not None and known >= deadline:
            return
        self._pending[session] = deadline
        if known is not None and self._timer is not None:
            return
        _, written_at = self._written.get(session, (0.0, float("-inf")))
        due = max(self._loop.time(), written_at + INTERVAL)
        if self._timer is None or due < self._due:
            self._set_timer(due)

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Kept here: not every loop's handle can be asked (uvloop's of a time that has come cannot).
        self._due = due
        self._timer = self._loop.call_at(due, self._flush_in_background)

    def take(self, sessions: Iterable[str]) -> dict[str, float]:
        """Set aside what is known of these sessions: their deadlines are being set to other
        values. When that fails, `restore` it."""
        taken = {}
        for session in sessions:
            self._written.pop(session, None)
            if session in self._pending:
                taken[session] = self._pending.pop(session)
        return taken

    def restore(self, taken: Mapping[str, float]) -> None:
        """Put back what `take` gave."""
        for session, deadline in taken.items():
            self.touch(session, deadline)

    def seen(self, session: Session) -> Session:
        """The session with the moves applied that its row may not show yet."""
        if session.idle_deadline is None:
            return session
        moved = max(
            session.idle_deadline,
            self._pending.get(session.id, session.idle_deadline),
            self._written.get(session.id, (session.idle_deadline,))[0],
        )
        if moved == session.idle_deadline:
            return session
        return msgspec.structs.replace(session, idle_deadline=moved)

    async def flush(self) -> None:
        """Write all that is pending. What fails to be written stays pending and is raised."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moves = dict(self._pending)
        if not moves:
            return
        now = self._loop.time()
        self._written = {
            session: move for session, move in self._written.items() if move[1] > now - _KEPT
        }
        self._written.update({session: (deadline, now) for session, deadline in moves.items()})
        try:
            await self._write(moves)
            for session, deadline in moves.items():
                if self._pending.get(session) == deadline:
                    del self._pending[session]
        except NodeFenced as error:
            # Whoever has these sessions by now, their time is not this node's to measure.
            _log.info("%d idle deadlines are given up: %s", len(moves), error.message)
            self._pending.clear()
            self._written.clear()
        finally:
            if self._pending and self._timer is None:
                self._set_timer(now + INTERVAL)

    def _flush_in_background(self) -> None:
        self._timer = None
        task = self._loop.create_task(self._flush_or_retry())
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _flush_or_retry(self) -> None:
        try:
            await self.flush()
        except SojournError as error:
            _log.warning("idle deadlines could not be written, trying again: %s", error)

    async def close(self) -> None:
        """Write the rest."""
        for task in list(self._writes):
            await task
        try:
            await self.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
