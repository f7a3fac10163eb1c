"""Connections of exposed ports, carried to this node by a server.

Guarantee: only what a server opened over TLS gets here (the listener takes no other); it reaches
the listeners of exposed ports on this machine and nothing else. What ends on one side ends on the
other, after all bytes that were under way.

A server opens a connection with the protocol `sojourn-tunnel/1` (ALPN) and says in one line what it
carries: `http` for the listener that all HTTP ports of sessions share, or `tcp SESSION:PORT`. What
follows are the bytes of the connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from sojourn.server.splicing import splice

log = logging.getLogger(__name__)

MOST_LINE = 200
_LINE_SECONDS = 10.0
_READ_BYTES = 256 * 1024
_TCP = re.compile(r"tcp (ses_[0-9a-z]{24}):([0-9]{1,5})")

Place = tuple[str, int]
Find = Callable[[str | None, int], Awaitable[Place | None]]
"""Where a TCP port of a session is listened for on this machine, or with None all HTTP ports."""


class Tunnels:
    """The tunnels of one node."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, transport: asyncio.Transport) -> asyncio.BaseProtocol:
        """Take over a connection that was just made; its protocol from now on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_READ_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, self._begin, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return protocol

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="tunnel")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            place = await self._where(reader)
            if place is not None:
                inner = await asyncio.open_connection(*place, limit=_READ_BYTES)
                await splice((reader, writer), inner)
        except (OSError, EOFError, ValueError) as error:  # a time-out and a half line, too
            log.info("a tunnel ends: %s", error or type(error).__name__)
        finally:
            writer.transport.abort()

    async def _where(self, reader: asyncio.StreamReader) -> Place | None:
        async with asyncio.timeout(_LINE_SECONDS):
            line = await reader.readuntil(b"\n")
        if len(line) > MOST_LINE:
            raise ValueError("a line that is too long")
        said = line.decode("ascii").strip()
        if said == "http":
            return await self._find(None, 0)
        found = _TCP.fullmatch(said)
        if found is None:
            raise ValueError("it does not say what it carries")
        return await self._find(found[1], int(found[2]))
