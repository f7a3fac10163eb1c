"""An outside for gateways: real servers in a network namespace of the test's own.

Addresses of the real world are put on the namespace's loopback, so nothing of it is reachable from
elsewhere and nothing of elsewhere from it.
"""

from __future__ import annotations

import asyncio
import ctypes
import datetime
import gzip
import ipaddress
import os
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

T = TypeVar("T")

ALLOWED = "93.184.216.34"
OTHER = "93.184.216.35"
NAMESERVER = "93.184.216.53"
ALLOWED_V6 = "2606:2800:220:1::34"
PRIVATE = "10.9.8.7"
METADATA = "169.254.169.254"
_ADDRESSES = (ALLOWED, OTHER, NAMESERVER, PRIVATE, METADATA, "198.18.0.9", "100.64.3.4")
_CLONE_NEWNET = 0x40000000

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A namespace, a thread inside it, and the servers that run there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.zone: dict[str, list[str]] = {}
        self.answers: dict[str, list[list[str]]] = {}  # one after another, for rebinding
        self.queries: list[str] = []
        self.requests: list[bytes] = []
        self.connections: list[tuple[str, int]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="world", daemon=True)
        self._servers: list[asyncio.AbstractServer] = []
        self._transports: list[asyncio.BaseTransport] = []
        self._descriptor = -1
        self.authority = TestAuthority()
        self.roots = directory / "roots.pem"
        self.roots.write_bytes(self.authority.pem)

    @property
    def namespace(self) -> str:
        """Its path."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __enter__(self) -> World:
        self._thread.start()
        self._ready.wait(30)
        if self._failure is not None:
            raise self._failure
        self.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        os.close(self._descriptor)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the world's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def serve(self, address: str, port: int, handler: Handler, *, tls: str | None = None) -> None:
        """Serve at an address, over TLS as a name where one is given."""
        self.call(self._serve(address, port, handler, tls))

    def _run(self) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(_CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "unshare")
            self._descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            lines = ["link set lo up", f"addr add {ALLOWED_V6}/128 dev lo nodad"]
            lines += [f"addr add {address}/32 dev lo" for address in _ADDRESSES]
            subprocess.run(["ip", "-batch", "-"], input="\n".join(lines).encode(), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, address: str, port: int, handler: Handler, tls: str | None) -> None:
        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections.append((address, port))
            try:
                await handler(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                return
            finally:
                writer.close()

        context = None if tls is None else self.authority.context(tls)
        self._servers.append(
            await asyncio.start_server(counted, address, port, ssl=context, limit=1 << 20)
        )

    async def _start(self) -> None:
        world = self

        class Datagrams(asyncio.DatagramProtocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, addr: Any) -> None:
                self.transport.sendto(world.resolve(data), addr)  # type: ignore[attr-defined]

        transport, _ = await self._loop.create_datagram_endpoint(
            Datagrams, local_addr=(NAMESERVER, 53)
        )
        self._transports.append(transport)

        async def over_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = int.from_bytes(await reader.readexactly(2), "big")
            answer = self.resolve(await reader.readexactly(size))
            writer.write(len(answer).to_bytes(2, "big") + answer)
            await writer.drain()

        await self._serve(NAMESERVER, 53, over_tcp, None)

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for transport in self._transports:
            transport.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    def resolve(self, data: bytes) -> bytes:
        """What the world's name server answers."""
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.queries.append(f"{kind} {name}")
        reply = dns.message.make_response(query)
        found = self.zone.get(name)
        if kind == "A" and self.answers.get(name):
            found = self.answers[name].pop(0)
        if found is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        version = {"A": 4, "AAAA": 6}.get(kind)
        chosen = [text for text in found or [] if ipaddress.ip_address(text).version == version]
        if chosen:
            reply.answer.append(dns.rrset.from_text(question.name, 0, "IN", kind, *chosen))
        return reply.to_wire()

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A small HTTP/1.1 server written by hand, so that it does what no library would."""
        while True:
            head = await _head(reader)
            if not head:
                return
            self.requests.append(head)
            method, path, _ = head.split(b"\r\n", 1)[0].split(b" ")
            headers = _headers(head)
            if b"100-continue" in headers.get(b"expect", b""):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await _body(reader, headers)
            if path.startswith(b"/upgrade"):
                writer.write(
                    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
                    b"Upgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n"
                )
                while data := await reader.read(65536):
                    writer.write(data)
                    await writer.drain()
                return
            self._answer(writer, method, path, head, body)
            await writer.drain()

    def _answer(
        self, writer: asyncio.StreamWriter, method: bytes, path: bytes, head: bytes, body: bytes
    ) -> None:
        if path.startswith(b"/echo-head"):
            _plain(writer, head, b"X-Echo: " + _headers(head).get(b"authorization", b"none"))
        elif path.startswith(b"/echo-gzip"):
            _plain(writer, gzip.compress(head), b"Content-Encoding: gzip")
        elif path.startswith(b"/echo-brotli"):
            _plain(writer, head, b"Content-Encoding: br")
        elif path.startswith(b"/echo-slowly"):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for at in range(0, len(head), 3):
                piece = head[at : at + 3]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\nX-Trailer: end\r\n\r\n")
        elif path.startswith(b"/redirect?"):
            target = path.partition(b"?")[2]
            writer.write(
                b"HTTP/1.1 302 Found\r\nLocation: " + target + b"\r\nContent-Length: 0\r\n\r\n"
            )
        elif path.startswith(b"/bytes?"):
            size = int(path.partition(b"?")[2])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            writer.write(bytes(size))
        elif path.startswith(b"/empty"):
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif path.startswith(b"/hang"):
            return
        elif path.startswith(b"/cut"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            writer.close()
        elif method == b"HEAD":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")
        else:
            _plain(writer, b"%s %d" % (path, len(body)) if body else b"hello")


def _plain(writer: asyncio.StreamWriter, body: bytes, *headers: bytes) -> None:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers, b"", body]
    writer.write(b"\r\n".join(lines))


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _headers(head: bytes) -> dict[bytes, bytes]:
    pairs = [line.partition(b":") for line in head.split(b"\r\n")[1:] if line]
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
    if headers.get(b"transfer-encoding") == b"chunked":
        body = b""
        while True:
            size = int((await reader.readuntil(b"\r\n")).strip(), 16)
            if size == 0:
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass
                return body
            body += await reader.readexactly(size)
            await reader.readexactly(2)
    return await reader.readexactly(int(headers.get(b"content-length", b"0")))


class TestAuthority:
    """Whom the world's servers are signed by."""

    __test__ = False

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the world")])
        self._certificate = self._sign(self._name, self._key, None, True)
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def context(self, name: str) -> ssl.SSLContext:
        """For serving TLS as a name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        leaf = self._sign(subject, key, name, False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        read, write = os.pipe()
        with os.fdopen(write, "wb") as file:
            file.write(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
            file.write(leaf.public_bytes(serialization.Encoding.PEM))
        text = os.read(read, 1 << 16)
        os.close(read)
        memory = os.memfd_create("leaf")
        os.write(memory, text)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
        os.close(memory)
        return context

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, name: str | None, ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if name is not None:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())
