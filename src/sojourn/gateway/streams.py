"""Streams of bytes with bounds: what a tunnel, a connection outside and TLS have in common.

Guarantee: no stream holds more than its bound in each direction, so a peer that does not read holds
up its own sender and nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from sojourn.gateway.leases import UNBOUNDED, AnyLease

# What is read ahead of whoever takes it. Together with what transports hold, and one read that is
# under way, a tunnel stays below 256 KiB in each direction.
READ_AHEAD = 64 << 10
WRITE_AHEAD = 64 << 10
PIECE = 64 << 10


class Reset(ConnectionError):
    """The stream is over; what was under way is lost."""


class Stream(Protocol):
    """Bytes in both directions."""

    async def read(self) -> bytes:
        """The next bytes; b"" when no more come. Raises ConnectionError when it was reset."""

    def unread(self, data: bytes) -> None:
        """Put bytes back in front."""

    async def write(self, data: bytes) -> None:
        """Send, waiting while the other end takes no more. Raises ConnectionError."""

    async def end(self) -> None:
        """Send no more. Idempotent. Raises ConnectionError when it was reset."""

    def reset(self) -> None:
        """Give it up at once, in both directions. Idempotent, also after its end."""


class Incoming:
    """What has arrived and waits to be read. `hold` is called when it is enough, `more` when there
    is room again."""

    __slots__ = ("_data", "_ended", "_error", "_held", "_hold", "_more", "_waiter", "size")

    def __init__(self, hold: Callable[[], None], more: Callable[[], None]) -> None:
        self._data: deque[bytes] = deque()
        self._hold, self._more = hold, more
        self._held = self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.size = 0

    @property
    def held(self) -> bool:
        """Whether enough has arrived."""
        return self._held

    @property
    def over(self) -> bool:
        """Whether nothing more will arrive, whatever was read of it."""
        return self._ended or self._error is not None

    def feed(self, data: bytes) -> None:
        """Bytes arrived."""
        self._data.append(data)
        self.size += len(data)
        if self.size >= READ_AHEAD and not self._held:
            self._held = True
            self._hold()
        self._wake()

    def end(self) -> None:
        """No more arrive."""
        self._ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """It was reset; what has not been read is dropped."""
        if self._error is None:
            self._error = error
            self._data.clear()
            self.size = 0
            self._wake()

    def unread(self, data: bytes) -> None:
        """Put bytes back in front."""
        if data:
            self._data.appendleft(data)
            self.size += len(data)

    async def read(self) -> bytes:
        """The next bytes, b"" at the end. Raises what it failed with."""
        while True:
            if self._data:
                data = self._data.popleft()
                self.size -= len(data)
                if self._held and self.size < READ_AHEAD // 2:
                    self._held = False
                    self._more()
                return data
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Room:
    """Whether a transport takes more, to be waited for by any number of writers."""

    __slots__ = ("_error", "_full", "_waiters")

    def __init__(self) -> None:
        self._full = False
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def full(self) -> None:
        """No more for now."""
        self._full = True

    def free(self) -> None:
        """There is room."""
        self._full = False
        self._wake()

    def fail(self, error: Exception) -> None:
        """There never will be."""
        if self._error is None:
            self._error = error
        self._wake()

    def check(self) -> None:
        """Raises what it failed with."""
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Until there is room. Raises what it failed with."""
        self.check()
        while self._full:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
            self.check()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """A connection outside, plain or over TLS."""

    # One buffer serves all connections: it is read into and copied from within one call.
    _scratch = bytearray(PIECE)

    def __init__(self, *, secure: bool = False, lease: AnyLease = UNBOUNDED) -> None:
        self._lease = lease
        self._transport: asyncio.Transport | None = None
        self._incoming = Incoming(self._hold, self._more)
        self._room = Room()
        self._ended = False
        self._secure = secure

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_AHEAD)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.feed(bytes(memoryview(self._scratch)[:nbytes]))

    def eof_received(self) -> bool:
        self._incoming.end()
        # Stay open for writing; TLS has no half-open state.
        return not self._secure

    def connection_lost(self, exc: Exception | None) -> None:
        error = Reset("the connection is closed")
        if exc is None:
            self._incoming.end()
        else:
            self._incoming.fail(error)
        self._room.fail(error)

    def pause_writing(self) -> None:
        self._room.full()

    def resume_writing(self) -> None:
        self._room.free()

    @property
    def over(self) -> bool:
        """Whether the other end sends no more."""
        return self._incoming.over

    @property
    def quiet(self) -> bool:
        """Whether nothing has arrived that was not read."""
        return self._incoming.size == 0

    async def read(self) -> bytes:
        return await self._incoming.read()

    def unread(self, data: bytes) -> None:
        self._incoming.unread(data)

    async def write(self, data: bytes) -> None:
        self._room.check()
        if not self._lease.valid():
            self.reset()
            raise Reset("the node has no lease")
        assert self._transport is not None
        self._transport.write(data)
        await self._room.wait()

    async def end(self) -> None:
        if self._ended or self._transport is None:
            return
        self._ended = True
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            # TLS here has no half-open state: what was written is sent, then it closes.
            self._transport.close()

    def reset(self) -> None:
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                with contextlib.suppress(OSError):
                    # A reset, not an end: the peer must not take what it has for all.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self._transport.abort()
        self._incoming.fail(Reset("the connection was reset"))

    def close(self) -> None:
        """Let go when what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    def _hold(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _more(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class Secured:
    """TLS over a stream, as its server."""

    def __init__(self, inner: Stream, context: ssl.SSLContext) -> None:
        self._inner = inner
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._sending = asyncio.Lock()
        self._back: list[bytes] = []
        self._ended = False

    async def greet(self) -> None:
        """Shake hands. Raises ssl.SSLError, ConnectionError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLError:
                # The alert that says why goes out before it ends.
                await self._flush()
                raise
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        if self._back:
            return self._back.pop()
        while True:
            try:
                data = self._tls.read(PIECE)
                if not data:
                    return b""
                return data
            except ssl.SSLWantReadError:
                await self._flush()
                if self._in.eof:
                    # An end without its alert may be a cut: no whole end.
                    raise Reset("TLS was cut off") from None
                await self._receive()
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                raise Reset(f"TLS failed: {error.reason}") from error

    def unread(self, data: bytes) -> None:
        if data:
            self._back.append(data)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                sent = self._tls.write(view[:PIECE])
            except ssl.SSLError as error:
                raise Reset(f"TLS failed: {error.reason}") from error
            view = view[sent:]
            await self._flush()

    async def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ssl.SSLError):
            # Returns WantRead until the other end has closed too, which is not waited for.
            self._tls.unwrap()
        await self._flush()
        await self._inner.end()

    def reset(self) -> None:
        self._inner.reset()

    async def _receive(self) -> None:
        data = await self._inner.read()
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self) -> None:
        if not self._out.pending:
            return
        async with self._sending:
            data = self._out.read()
            if data:
                await self._inner.write(data)


class Metered:
    """A stream that knows when bytes last moved, and passes them on no faster than its pace: what
    each function is told of, it answers with the seconds to wait."""

    def __init__(
        self,
        inner: Stream,
        read_pace: Callable[[int], float],
        write_pace: Callable[[int], float],
    ) -> None:
        self._inner = inner
        self._read_pace, self._write_pace = read_pace, write_pace
        self.moved_at = time.monotonic()

    async def read(self) -> bytes:
        data = await self._inner.read()
        self.moved_at = time.monotonic()
        wait = self._read_pace(len(data))
        if wait > 0:
            try:
                await asyncio.sleep(wait)
            except asyncio.CancelledError:
                self._inner.unread(data)
                raise
        return data

    def unread(self, data: bytes) -> None:
        self._inner.unread(data)

    async def write(self, data: bytes) -> None:
        wait = self._write_pace(len(data))
        if wait > 0:
            await asyncio.sleep(wait)
        await self._inner.write(data)
        self.moved_at = time.monotonic()

    async def end(self) -> None:
        await self._inner.end()

    def reset(self) -> None:
        self._inner.reset()
