"""Waking those who follow a session's events.

Guarantee: a follower that subscribed before it read is woken for everything appended after that
read. A notice is only a hint to read again: what is delivered comes from the database, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator


class Notices:
    """Who waits for which session."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def subscribe(self, session: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the session's log has grown; the follower clears it."""
        grown = asyncio.Event()
        self._waiting.setdefault(session, set()).add(grown)
        try:
            yield grown
        finally:
            waiting = self._waiting[session]
            waiting.discard(grown)
            if not waiting:
                del self._waiting[session]

    def publish(self, sessions: Iterable[str]) -> None:
        """Wake the followers of these sessions."""
        for session in sessions:
            for grown in self._waiting.get(session, ()):
                grown.set()

    def publish_all(self) -> None:
        """Wake everybody (the database is closing)."""
        self.publish(list(self._waiting))
