"""Which sandboxes there are, for requests that do not say whose they are.

Guarantee: a sandbox whose tokens were given out since the start is found at once, any other within
RENEW_SECONDS; the database is asked no more often than that, however many wrong requests come.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from sojourn.server.base import SessionService

RENEW_SECONDS = 1.0
_REMEMBERED = 10_000


class Known:
    """Whose sessions are."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._found: dict[str, str] = {}
        self._given: dict[str, str] = {}
        self._at = -RENEW_SECONDS

    def add(self, tenant: str, session: str) -> None:
        """Its tokens are given out."""
        if len(self._given) >= _REMEMBERED:
            self._given.clear()
        self._given[session] = tenant

    async def tenant(self, session: str) -> str | None:
        """Whose a session is; None when there is none."""
        return self._given.get(session) or (await self._all()).get(session)

    async def each(self) -> AsyncIterator[tuple[str, str]]:
        """Tenant and session, those whose tokens were given out first."""
        for session, tenant in list(self._given.items()):
            yield tenant, session
        for session, tenant in (await self._all()).items():
            if session not in self._given:
                yield tenant, session

    async def _all(self) -> dict[str, str]:
        now = time.monotonic()
        if now - self._at >= RENEW_SECONDS:
            self._at = now
            self._found = {session: tenant for tenant, session in await self._service.every()}
        return self._found
