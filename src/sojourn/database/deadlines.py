"""Moving idle deadlines out without a write for every call.

Guarantee: a move is visible to reads through this object at once and is written at most once a
second per session; the first after a quiet second is written at once, so a crash can lose no more
than the last second's movement. Deadlines only move out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from sojourn.errors import SojournError
from sojourn.model.sessions import Session

_log = logging.getLogger(__name__)
INTERVAL = 1.0  # seconds between two writes for one session


class Deadlines:
    """Moves that are not yet written, and when each session was last written."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        write: Callable[[Mapping[str, float]], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._write = write
        self._pending: dict[str, float] = {}
        self._written_at: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writes: set[asyncio.Task[None]] = set()

    def touch(self, session: str, deadline: float) -> None:
        """Remember a move and see that it is written in time."""
        known = self._pending.get(session)
        if known is not None and known >= deadline:
            return
        self._pending[session] = deadline
        if known is not None and self._timer is not None:
            return
        due = max(self._loop.time(), self._written_at.get(session, 0.0) + INTERVAL)
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._flush_in_background)

    def forget(self, session: str) -> None:
        """Drop what is pending: the deadline is being set to another value."""
        self._pending.pop(session, None)

    def seen(self, session: Session) -> Session:
        """The session with its pending move applied."""
        pending = self._pending.get(session.id)
        if pending is None or session.idle_deadline is None or pending <= session.idle_deadline:
            return session
        return msgspec.structs.replace(session, idle_deadline=pending)

    async def flush(self) -> None:
        """Write all that is pending. What fails to be written stays pending and is raised."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moves = dict(self._pending)
        if not moves:
            return
        now = self._loop.time()
        self._written_at = {
            session: at for session, at in self._written_at.items() if at > now - INTERVAL
        }
        self._written_at.update(dict.fromkeys(moves, now))
        try:
            await self._write(moves)
            for session, deadline in moves.items():
                if self._pending.get(session) == deadline:
                    del self._pending[session]
        finally:
            if self._pending and self._timer is None:
                self._timer = self._loop.call_at(now + INTERVAL, self._flush_in_background)

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
