"""Tunnels that were asked for: from a request outside to a port inside a session.

Guarantee: a tunnel is given to whoever asked for it, once, or to nobody: it is known by a token of
16 random bytes that only the server, the gateway and the one supervisor that was asked ever saw.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Protocol

from sojourn.gateway.streams import Stream
from sojourn.wire.tunnels import Refusal

TOKEN_BYTES = 16


class Offered(Stream, Protocol):
    """A tunnel that came from inside and is not answered yet."""

    async def accept(self) -> None:
        """Say that it stands. Raises ConnectionError."""

    def refuse(self, reason: Refusal) -> None:
        """Say why there is none."""


class Dialled:
    """A tunnel in the hands of who asked for it, until it is let go."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.released = asyncio.Event()

    def close(self) -> None:
        """Done with it: where both directions have ended it closes, else it is reset."""
        self.released.set()


class Inbound:
    """The tunnels that are waited for."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Future[Dialled]] = {}

    def expect(self) -> tuple[bytes, asyncio.Future[Dialled]]:
        """A new token, and where the tunnel that bears it arrives."""
        token = secrets.token_bytes(TOKEN_BYTES)
        future: asyncio.Future[Dialled] = asyncio.get_running_loop().create_future()
        self._expected[token] = future
        return token, future

    def forget(self, token: bytes, *, taken: bool) -> None:
        """The token stands for nothing any more. Unless it was taken, a tunnel that came meanwhile
        is given up."""
        future = self._expected.pop(token)
        if taken:
            return
        if future.done() and not future.cancelled():
            future.result().close()
        future.cancel()

    async def serve(self, token: bytes, tunnel: Offered) -> None:
        """A tunnel of kind INBOUND, from its arrival until whoever asked for it is done; refused
        when nobody asked. Raises ConnectionError."""
        future = self._expected.get(token)
        if future is None or future.done():
            tunnel.refuse(Refusal.UNKNOWN)
            return
        dialled = Dialled(tunnel)
        future.set_result(dialled)
        await tunnel.accept()
        await dialled.released.wait()
