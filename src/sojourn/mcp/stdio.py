"""Serving one client over standard input and output.

Guarantee: standard output carries the protocol and nothing else. When the client closes the
connection, or on SIGTERM, SIGINT or SIGHUP, its session is suspended before this process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from mcp.server.stdio import stdio_server

from sojourn.mcp.own_sessions import OwnSession, Server, Sessions, Settings, new_connection
from sojourn.mcp.server import Context, client_name, protocol_server

_log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def serve(settings: Settings) -> None:
    """Serve until the client leaves. Raises Unreachable when there is no server."""
    server = Server()
    await server.check()
    sessions = Sessions(server, settings)
    connection = new_connection()

    def own_of(context: Context) -> OwnSession:
        return sessions.of_call(None, connection, client_name(context))

    protocol = protocol_server(sessions, own_of)

    async def connected() -> None:
        async with stdio_server() as (incoming, outgoing):
            await protocol.run(incoming, outgoing, protocol.create_initialization_options())

    serving = asyncio.create_task(connected())
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        serving.cancel()  # calls under way end, and what they started with them
        await sessions.close()
    if stopped.is_set():
        # A thread waits for the next line of standard input and cannot be interrupted: an ordinary
        # exit would wait for it, for as long as the client keeps the pipe open.
        logging.shutdown()
        os._exit(0)
    stopping.cancel()
