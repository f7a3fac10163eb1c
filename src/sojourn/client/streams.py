"""Network streams that send a request's head together with the first piece of its body.

Guarantee: the bytes on the wire are those that httpcore wrote, in one packet where they fit. A head
that travels alone wakes the server for nothing; together they save about a tenth of a millisecond,
which is a good part of what a short command costs.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

JOINED_BYTES = 64 * 1024
"""A longer piece is sent by itself: copying it would cost more than a packet."""


class Head:
    """The head of a request that waits for its body."""

    def __init__(self) -> None:
        self._held = b""
        self._fresh = True

    def before_write(self, data: bytes) -> tuple[bytes, ...]:
        """What to send when `data` is written."""
        if self._fresh:
            self._fresh = False
            self._held = data
            return ()
        held, self._held = self._held, b""
        if held and len(data) <= JOINED_BYTES:
            return (held + data,)
        return (held, data) if held else (data,)

    def before_read(self) -> bytes:
        """What to send before an answer can be expected."""
        held, self._held = self._held, b""
        self._fresh = True
        return held


class JoiningStream(httpcore.NetworkStream):
    """A blocking stream."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        self._head = Head()

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        held = self._head.before_read()
        if held:
            self._inner.write(held, timeout)
        return self._inner.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for piece in self._head.before_write(buffer):
            self._inner.write(piece, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return JoiningStream(self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class JoiningBackend(httpcore.NetworkBackend):
    """Blocking connections."""

    def __init__(self) -> None:
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return JoiningStream(
            self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        )


class AsyncJoiningStream(httpcore.AsyncNetworkStream):
    """An asynchronous stream."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        self._head = Head()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        held = self._head.before_read()
        if held:
            await self._inner.write(held, timeout)
        return await self._inner.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for piece in self._head.before_write(buffer):
            await self._inner.write(piece, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._inner.start_tls(ssl_context, server_hostname, timeout)
        return AsyncJoiningStream(inner)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class AsyncJoiningBackend(httpcore.AsyncNetworkBackend):
    """Asynchronous connections."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        inner = await self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return AsyncJoiningStream(inner)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
