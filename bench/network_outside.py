"""The outside of the network's measure: HTTP, HTTPS and names, in the namespace it is started in.

    python -m bench.network_outside ADDRESS NAME CERTIFICATE KEY

It writes `ready` when it answers. GET /N gives N bytes; connections are kept.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import cast

import dns.message
import dns.rrset

_PIECE = bytes(1 << 20)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            left = int(head.split(b" ", 2)[1].strip(b"/") or 0)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left)
            while left:
                piece = _PIECE[:left]
                writer.write(piece)
                await writer.drain()
                left -= len(piece)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()  # the client is done


class Names(asyncio.DatagramProtocol):
    """Answers every question about the one name with the one address."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._address = address
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = dns.message.make_response(dns.message.from_wire(data))
        if answer.question[0].rdtype == dns.rdatatype.A:
            answer.answer.append(
                dns.rrset.from_text(f"{self._name}.", 60, "IN", "A", self._address)
            )
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), addr)


async def main() -> None:
    """Serve until ended."""
    address, name, certificate, key = sys.argv[1:]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: Names(name, address), local_addr=(address, 53))
    await asyncio.start_server(_serve, address, 443, ssl=context)
    server = await asyncio.start_server(_serve, address, 80)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
