"""Joining a client's connection to a tunnel, byte for byte.

Guarantee: what ends on one side ends on the other, in that direction alone; what breaks on one
side breaks the whole, so that half a stream never passes for a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sojourn.gateway.streams import Stream


async def splice(client: Stream, inside: Stream, moved: Callable[[], None]) -> None:
    """Pass bytes both ways until both directions have ended. Raises ConnectionError when one of
    them broke; the tunnel is reset then, and the client's connection is the caller's."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(client, inside, moved))
            both.create_task(_copy(inside, client, moved))
    except* ConnectionError as broken:
        inside.reset()
        raise ConnectionError(str(broken.exceptions[0])) from None


async def _copy(source: Stream, target: Stream, moved: Callable[[], None]) -> None:
    while data := await source.read():
        moved()
        await target.write(data)
        moved()
    await target.end()
