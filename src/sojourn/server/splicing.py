"""Passing bytes between two connections.

Guarantee: what ends on one side ends on the other, after all bytes that were under way; what breaks
on one side breaks on the other, so that nothing that was cut off looks whole. Of a peer that says
nothing for IDLE_SECONDS nothing is kept.
"""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

IDLE_SECONDS = 3600.0
_PIECE = 256 << 10

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def splice(one: Streams, other: Streams) -> None:
    """Pass bytes both ways until one side breaks, or both have ended. Both are closed then."""
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(one[0], other[1]))
            both.create_task(_copy(other[0], one[1]))
    except* (OSError, TimeoutError) as broken:
        log.debug("a connection broke: %s", broken.exceptions[0])
        for _, writer in (one, other):
            writer.transport.abort()
    finally:
        for _, writer in (one, other):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        async with asyncio.timeout(IDLE_SECONDS):
            data = await reader.read(_PIECE)
        if not data:
            break
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:
        # TLS has no half-closed connections: the other side's end is the end of both then.
        await writer.drain()
        writer.close()
