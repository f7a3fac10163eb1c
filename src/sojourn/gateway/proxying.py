"""The start of a SOCKS connection: what a program asks a proxy for.

Guarantee: a request is read within its bounds and for one host; whatever else comes is refused in
the protocol's own words where it has any. Only connections are made: nothing listens, no datagrams.
"""

from __future__ import annotations

import enum
import ipaddress

from sojourn.gateway.names import Host, HostRefused, read_host
from sojourn.gateway.streams import Stream
from sojourn.wire.tunnels import Refusal

SOCKS4, SOCKS5 = 4, 5
_LONGEST = 512


class SocksRefused(Exception):
    """It is no request that can be granted; it was answered."""


class _Code(enum.IntEnum):
    """What SOCKS5 says of a failure."""

    FAILURE = 1
    POLICY = 2
    UNREACHABLE = 4
    REFUSED = 5
    TIMEOUT = 6
    COMMAND = 7
    ADDRESS = 8


_CODES = {
    Refusal.POLICY: _Code.POLICY,
    Refusal.UNREACHABLE: _Code.UNREACHABLE,
    Refusal.NAME: _Code.UNREACHABLE,
    Refusal.REFUSED: _Code.REFUSED,
    Refusal.TIMEOUT: _Code.TIMEOUT,
    Refusal.QUOTA: _Code.FAILURE,
}


class Socks:
    """One request, read and answered."""

    def __init__(self, stream: Stream, version: int) -> None:
        self._stream = stream
        self._version = version
        self._data = b""

    async def read(self) -> tuple[Host, int]:
        """The host and port that are asked for. Raises SocksRefused, ConnectionError."""
        try:
            asked = await (self._read5() if self._version == SOCKS5 else self._read4())
        except HostRefused as error:
            await self.refuse(Refusal.POLICY)
            raise SocksRefused from error
        self._stream.unread(self._data)
        self._data = b""
        return asked

    async def grant(self) -> None:
        """Say that the connection stands."""
        if self._version == SOCKS5:
            await self._stream.write(b"\x05\0\0\x01\0\0\0\0\0\0")
        else:
            await self._stream.write(b"\0\x5a\0\0\0\0\0\0")

    async def refuse(self, reason: Refusal) -> None:
        """Say why there is none."""
        await self._answer(_CODES.get(reason, _Code.FAILURE))

    async def _answer(self, code: _Code) -> None:
        if self._version == SOCKS5:
            await self._stream.write(bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0)))
        else:
            await self._stream.write(b"\0\x5b\0\0\0\0\0\0")
        await self._stream.end()

    async def _read5(self) -> tuple[Host, int]:
        _, count = await self._take(2)
        methods = await self._take(count)
        if 0 not in methods:
            await self._stream.write(b"\x05\xff")
            await self._stream.end()
            raise SocksRefused
        await self._stream.write(b"\x05\0")
        version, command, _, kind = await self._take(4)
        if version != SOCKS5 or command != 1:
            await self._answer(_Code.COMMAND)
            raise SocksRefused
        if kind == 1:
            host = Host(address=ipaddress.IPv4Address(await self._take(4)))
        elif kind == 4:
            host = Host(address=ipaddress.IPv6Address(await self._take(16)))
        elif kind == 3:
            (length,) = await self._take(1)
            host = read_host(await self._take(length))
        else:
            await self._answer(_Code.ADDRESS)
            raise SocksRefused
        return host, await self._port()

    async def _read4(self) -> tuple[Host, int]:
        _, command = await self._take(2)
        port = await self._port()
        address = await self._take(4)
        await self._text()  # the user
        if command != 1:
            await self.refuse(Refusal.POLICY)
            raise SocksRefused
        if address[:3] == b"\0\0\0" and address[3]:
            return read_host(await self._text()), port
        return Host(address=ipaddress.IPv4Address(address)), port

    async def _port(self) -> int:
        port = int.from_bytes(await self._take(2), "big")
        if port == 0:
            raise HostRefused("a port is 0")
        return port

    async def _text(self) -> bytes:
        while b"\0" not in self._data:
            if len(self._data) > _LONGEST:
                raise HostRefused("a host is too long")
            await self._more()
        text, _, self._data = self._data.partition(b"\0")
        return text

    async def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            await self._more()
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    async def _more(self) -> None:
        data = await self._stream.read()
        if not data:
            raise ConnectionResetError("a request to the proxy broke off")
        self._data += data
