"""The sandbox's end of tunnels, for tests of the gateway."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from sojourn.wire.tunnels import HEADER, OPEN, OPENED, RESUME, Frame, Kind, Refusal, frame


class TunnelRefused(Exception):
    """The gateway said no."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.name)
        self.reason = reason


class TunnelReset(ConnectionError):
    """The gateway reset the tunnel, or let its connection go."""


class GuestTunnel:
    """One tunnel, spoken frame by frame."""

    _next = 1

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = GuestTunnel._next
        GuestTunnel._next += 1
        self.received = self.sent = 0
        self.ended = False
        self.kept: list[bytes] = []
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    @classmethod
    async def open(
        cls, path: Path, host: bytes | str, port: int, kind: Kind = Kind.CONNECT
    ) -> GuestTunnel:
        """Raises TunnelRefused."""
        tunnel = cls(path)
        name = host.encode() if isinstance(host, str) else host
        await tunnel.connect()
        tunnel.send(Frame.OPEN, OPEN.pack(tunnel.number, kind, port, len(name)) + name)
        await tunnel._answered()
        return tunnel

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(str(self.path))

    def send(self, kind: int, body: bytes = b"") -> None:
        self.writer.write(HEADER.pack(len(body), kind) + body)

    async def frame(self) -> tuple[int, bytes]:
        try:
            length, kind = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            return kind, await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise TunnelReset("the gateway let go") from error

    async def _answered(self) -> int:
        kind, body = await self.frame()
        if kind == Frame.REFUSED:
            self.writer.close()
            raise TunnelRefused(Refusal(body[0]))
        if kind == Frame.RESET:
            raise TunnelReset("reset")
        assert kind == Frame.OPENED, kind
        return int(OPENED.unpack(body)[0])

    async def read(self) -> bytes:
        if self.kept:
            return self.kept.pop(0)
        if self.ended:
            return b""
        kind, body = await self.frame()
        if kind == Frame.DATA:
            self.received += len(body)
            return body
        if kind == Frame.END:
            self.ended = True
            return b""
        raise TunnelReset(f"frame {kind}")

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), 60000):
            piece = data[at : at + 60000]
            self.writer.write(frame(Frame.DATA, piece))
            self.sent += len(piece)
            await self.writer.drain()

    async def end(self) -> None:
        self.send(Frame.END)

    async def park(self) -> None:
        """As before a freeze: the last frame goes out, what still comes is kept."""
        self.send(Frame.DETACH)
        while True:
            kind, body = await self.frame()
            if kind == Frame.DETACH:
                break
            if kind == Frame.DATA:
                self.received += len(body)
                self.kept.append(body)
            elif kind == Frame.END:
                self.ended = True
            else:
                raise TunnelReset(f"frame {kind}")
        self.writer.close()

    async def resume(self) -> None:
        await self.connect()
        self.send(Frame.RESUME, RESUME.pack(self.number, self.received, self.sent))
        assert await self._answered() == self.sent

    def close(self) -> None:
        self.writer.close()

    async def all(self) -> bytes:
        """Everything until the end."""
        found = b""
        while data := await self.read():
            found += data
        return found

    async def until(self, mark: bytes) -> bytes:
        """Everything up to a mark that is known to come."""
        found = b""
        while mark not in found:
            data = await self.read()
            if not data:
                raise TunnelReset(f"ended after {found!r}")
            found += data
        return found


class GuestTls:
    """TLS over a tunnel, as a program inside speaks it."""

    def __init__(self, tunnel: GuestTunnel, cafile: Path | None, sni: str | None) -> None:
        self.tunnel = tunnel
        context = ssl.create_default_context()
        if cafile is not None:
            context.load_verify_locations(cafile=str(cafile))
        if sni is None:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname=sni)

    async def _step(self) -> None:
        await self._flush()
        data = await self.tunnel.read()
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self) -> None:
        if self._out.pending:
            await self.tunnel.write(self._out.read())

    async def greet(self) -> GuestTls:
        while True:
            try:
                self.tls.do_handshake()
                await self._flush()
                return self
            except ssl.SSLWantReadError:
                await self._step()

    async def write(self, data: bytes) -> None:
        self.tls.write(data)
        await self._flush()

    async def read(self) -> bytes:
        while True:
            try:
                return self.tls.read(65536)
            except ssl.SSLWantReadError:
                await self._step()
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLEOFError as error:
                raise TunnelReset("cut off") from error

    async def until(self, mark: bytes) -> bytes:
        found = b""
        while mark not in found:
            data = await self.read()
            if not data:
                raise TunnelReset(f"ended after {found!r}")
            found += data
        return found

    async def all(self) -> bytes:
        found = b""
        while data := await self.read():
            found += data
        return found
