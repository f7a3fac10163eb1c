"""Which sandboxes a signed address may be of, when it does not name one.

Guarantee: a sandbox that is there is found within RENEW_SECONDS of the first question for it; the
database is asked no more often than that, however many wrong signatures come.
"""

from __future__ import annotations

import time

from sojourn.server.base import SessionService

RENEW_SECONDS = 1.0


class Known:
    """Tenant and id of every session, as of not long ago."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._found: list[tuple[str, str]] = []
        self._at = -RENEW_SECONDS

    async def all(self) -> list[tuple[str, str]]:
        """Newest first."""
        now = time.monotonic()
        if now - self._at >= RENEW_SECONDS:
            self._at = now
            self._found = await self._service.every()
        return self._found
