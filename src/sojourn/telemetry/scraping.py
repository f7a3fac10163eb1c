"""A scrape: whoever knows something is asked, then all metrics are rendered.

Guarantee: who cannot answer now keeps nobody from the rest, and no scrape waits for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sojourn.telemetry import exposition

log = logging.getLogger(__name__)

_ASK_SECONDS = 5.0

_before: list[Callable[[], Awaitable[None]]] = []


def before(look: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Have `look` awaited before each scrape, until the answer is called."""
    _before.append(look)

    def stop() -> None:
        if look in _before:
            _before.remove(look)

    return stop


async def scrape(accept: str) -> tuple[bytes, str]:
    """All metrics in the form that an `Accept` header asks for, and its content type."""
    for look in list(_before):
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                await look()
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest is told
            # The database may be away, which is when the other metrics are wanted most.
            log.warning("a scrape goes without what cannot be asked now: %s", error)
    return await asyncio.to_thread(exposition.render, accept)
