"""Tunnels that were asked for: from a request outside to a port inside a session.

Guarantee: a tunnel is given to whoever asked for it, once, or to nobody: it is known by a token of
16 random bytes that only the server, the gateway and the one supervisor that was asked ever saw.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Protocol

TOKEN_BYTES = 16


class Tunnel(Protocol):
    """One stream of bytes to a program inside a session, and back."""

    async def read(self) -> bytes:
        """The next bytes; b"" when no more come. Raises ConnectionError when it was reset."""

    async def write(self, data: bytes) -> None:
        """Send, waiting while the other end takes no more. Raises ConnectionError."""

    async def end(self) -> None:
        """Send no more. Idempotent. Raises ConnectionError when it was reset."""

    def reset(self) -> None:
        """Give it up at once, in both directions. Idempotent, also after its end."""


class Inbound:
    """The tunnels that are waited for."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Future[Tunnel]] = {}

    def expect(self) -> tuple[bytes, asyncio.Future[Tunnel]]:
        """A new token, and where the tunnel that bears it arrives."""
        token = secrets.token_bytes(TOKEN_BYTES)
        future: asyncio.Future[Tunnel] = asyncio.get_running_loop().create_future()
        self._expected[token] = future
        return token, future

    def forget(self, token: bytes) -> None:
        """Wait no more: a tunnel that arrived meanwhile, or arrives later, is given up."""
        future = self._expected.pop(token, None)
        if future is None:
            return
        if future.done() and not future.cancelled():
            future.result().reset()
        future.cancel()

    def take(self, token: bytes) -> None:
        """Its tunnel has arrived and is in use: the token stands for nothing any more."""
        self._expected.pop(token, None)

    def arrived(self, token: bytes, tunnel: Tunnel) -> bool:
        """A tunnel of kind INBOUND came from a sandbox; whether anybody waits for it. It is to be
        refused (as UNKNOWN) when nobody does."""
        future = self._expected.get(token)
        if future is None or future.done():
            return False
        future.set_result(tunnel)
        return True
