"""Connections from a server to nodes.

Guarantee: a request goes to the very node that is meant, proven by its certificate, or nowhere; a
connection is used for one request at a time and again only after its answer was read to the end.
Whoever asks learns whether the node can have seen the request (`NotSent`) or not.

HTTP/1.1, one request on a connection at a time, because streams of commands are long: on shared
connections one slow reader would hold back others (docs/design.md has the figures). The pool is
our own, since that of httpcore looks at every connection at every request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any

import httpcore

from sojourn.model.nodes import Node
from sojourn.server.cluster import pki

Headers = list[tuple[bytes, bytes]]

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 700.0
"""How long a node may say nothing: a verb is waited for up to 600 s. A node that is gone is known
by its lease, long before."""
_KEEP_SECONDS = 50.0  # nodes close idle connections after 75
_KEEP_MOST = 256
_JOINED_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024


class NotSent(ConnectionError):
    """The node cannot have seen the request."""


class Broken(ConnectionError):
    """The connection ended before the answer did; what was asked may have been done."""


_FAILURES = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError)


class _Stream(httpcore.AsyncNetworkStream):
    """asyncio's streams as httpcore takes them; a request's head travels with what follows it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._held = b""
        self._fresh = True

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        await self._flush()
        self._fresh = True
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except (OSError, ssl.SSLError) as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._fresh:
            self._fresh = False
            self._held = buffer
            return
        if self._held and len(buffer) <= _JOINED_BYTES:
            buffer, self._held = self._held + buffer, b""
        await self._flush()
        await self._write(buffer)

    async def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            await self._write(held)

    async def _write(self, buffer: bytes) -> None:
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except (OSError, ssl.SSLError) as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """End it at once."""
        self._writer.transport.abort()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            # Between requests a node says nothing but good-bye.
            return self._reader.at_eof() or self._writer.is_closing()
        return None


class _Line:
    """A connection with its stream."""

    __slots__ = ("connection", "stream")

    def __init__(self, origin: httpcore.Origin, stream: _Stream) -> None:
        self.stream = stream
        self.connection = httpcore.AsyncHTTP11Connection(
            origin=origin, stream=stream, keepalive_expiry=_KEEP_SECONDS
        )


class Answer:
    """A node's answer; `close` it when it was read, or is not wanted any more."""

    def __init__(self, pool: _Pool, line: _Line, got: Any) -> None:
        self.status: int = got.status
        self.headers: Headers = [(name.lower(), value) for name, value in got.headers]
        self._pool = pool
        self._line = line
        self._got = got

    def header(self, name: bytes) -> bytes | None:
        """A header's value."""
        return next((value for key, value in self.headers if key == name), None)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Broken."""
        try:
            async for piece in self._got.stream:
                yield piece
        except _FAILURES as error:
            raise Broken(str(error) or type(error).__name__) from error

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises Broken, also when it is larger."""
        read = bytearray()
        async for piece in self.pieces():
            read += piece
            if len(read) > limit:
                raise Broken(f"an answer of more than {limit} bytes")
        return bytes(read)

    async def close(self) -> None:
        """Give the connection back, or end it where the answer was not read to its end."""
        try:
            await self._got.aclose()
        except BaseException:
            self._line.stream.abort()
            raise
        self._pool.give(self._line)


class _Pool:
    """Connections to one node."""

    def __init__(self, node: str, address: str, context: ssl.SSLContext) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._name = pki.node_host(node)
        self._context = context
        self._idle: list[_Line] = []
        self._origin = httpcore.Origin(b"https", self._host.encode(), self._port)
        self._closed = False

    def url(self, target: bytes) -> httpcore.URL:
        return httpcore.URL(
            scheme=b"https", host=self._host.encode(), port=self._port, target=target
        )

    async def take(self) -> _Line:
        """One that is free, the one used last, or a new one. Raises NotSent."""
        while self._idle:
            line = self._idle.pop()
            if line.connection.is_available() and not line.connection.has_expired():
                return line
            line.stream.abort()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    self._host,
                    self._port,
                    ssl=self._context,
                    server_hostname=self._name,
                    limit=_READ_BYTES,
                )
        except (OSError, TimeoutError) as error:
            said = "no answer" if isinstance(error, TimeoutError) else str(error)
            raise NotSent(f"{self.address}: {said}") from error
        _notice_silence(writer)
        return _Line(self._origin, _Stream(reader, writer))

    def give(self, line: _Line) -> None:
        """Keep a connection for the next request, where it can take one."""
        if self._closed or len(self._idle) >= _KEEP_MOST or not line.connection.is_available():
            line.stream.abort()
        else:
            self._idle.append(line)

    def close(self) -> None:
        self._closed = True
        for line in self._idle:
            line.stream.abort()
        self._idle.clear()


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """A machine that vanished without a word is noticed within half a minute, also while an answer
    is waited for."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 30_000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Upstream:
    """Sends requests to nodes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._pools: dict[str, _Pool] = {}

    def close(self) -> None:
        """End all idle connections. Idempotent."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def forget(self, node: str) -> None:
        """A node is gone: no connection of before is used again."""
        pool = self._pools.pop(node, None)
        if pool is not None:
            pool.close()

    def _pool(self, node: Node) -> _Pool:
        pool = self._pools.get(node.id)
        if pool is None or pool.address != node.address:
            self.forget(node.id)
            pool = self._pools[node.id] = _Pool(node.id, node.address, self._context)
        return pool

    async def send(
        self,
        node: Node,
        method: bytes,
        target: bytes,
        headers: Headers,
        content: bytes | AsyncIterable[bytes] = b"",
        *,
        timeout: float = ANSWER_SECONDS,
        connected: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Send a request; its answer's head. `connected` is called when it is about to be sent.
        Raises NotSent, Broken, and what `content` raises."""
        pool = self._pool(node)
        line = await pool.take()
        connected()
        request = httpcore.Request(
            method,
            pool.url(target),
            headers=_framed(headers, content, method),
            content=content,
            extensions={"timeout": {"read": timeout}},
        )
        try:
            got = await line.connection.handle_async_request(request)
        except _FAILURES as error:
            raise Broken(str(error) or type(error).__name__) from error
        return Answer(pool, line, got)

    async def call(
        self,
        node: Node,
        method: bytes,
        target: bytes,
        body: bytes = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        timeout: float = 30.0,
    ) -> tuple[int, bytes]:
        """A small request and its whole answer. Raises NotSent, Broken."""
        sent = [(b"host", b"node"), *headers]
        if body:
            sent.append((b"content-type", b"application/json"))
        answer = await self.send(node, method, target, sent, body, timeout=timeout)
        try:
            return answer.status, await answer.read(8 << 20)
        finally:
            await answer.close()


def _framed(
    headers: Headers, content: bytes | AsyncIterable[bytes], method: bytes
) -> list[tuple[bytes, bytes]]:
    """Headers with what says how long the body is, where they do not."""
    if any(name == b"content-length" for name, _ in headers):
        return headers
    if not isinstance(content, bytes):
        return [*headers, (b"transfer-encoding", b"chunked")]
    if content or method not in (b"GET", b"HEAD"):
        return [*headers, (b"content-length", b"%d" % len(content))]
    return headers
