"""HTTP to exposed ports through a server: one client's connection, sessions on several nodes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h11
import pytest

from sojourn.errors import NodeUnavailable, PortNotFound
from sojourn.server.cluster.relays import Relay
from sojourn.server.splicing import Streams

ONE, TWO = "ses_" + "1" * 24, "ses_" + "2" * 24
DOMAIN = "ports.test"


class Gateway:
    """What answers at a node: it says who it is, what it got, and how many connections it had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.heads: list[h11.Request] = []
        self.bodies: list[bytes] = []
        self.does: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = (
            self.answer
        )
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def connect(self) -> Streams:
        assert self._server is not None
        return await asyncio.open_connection(*self._server.sockets[0].getsockname()[:2])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.does(reader, writer)
        except (ConnectionError, h11.RemoteProtocolError):
            pass
        finally:
            writer.close()

    async def request(self, http: h11.Connection, reader: asyncio.StreamReader) -> bool:
        """Read one; whether there was one."""
        body = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                self.heads.append(event)
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.bodies.append(body)
                return True
            else:
                return False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        while await self.request(http, reader):
            told = f"{self.name} {hashlib.sha256(self.bodies[-1]).hexdigest()}".encode()
            for event in (
                h11.Response(status_code=200, headers=[("keep", "this"), ("te", "x")]),
                h11.Data(data=told),
                h11.EndOfMessage(),
            ):
                writer.write(http.send(event) or b"")
            http.start_next_cycle()


class Rig:
    def __init__(self) -> None:
        self.nodes = {"n1": Gateway("n1"), "n2": Gateway("n2")}
        self.held = {ONE: "n1", TWO: "n2"}
        self.address = ("", 0)

    async def dial(self, session: str) -> tuple[str, Callable[[], Awaitable[Streams]]]:
        if session not in self.held:
            raise PortNotFound("nothing is here")
        if self.held[session] == "gone":
            raise NodeUnavailable("no node")
        node = self.nodes[self.held[session]]
        return node.name, node.connect

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Relay((reader, writer), "192.0.2.7", DOMAIN, self.dial).serve()


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    found = Rig()
    for node in found.nodes.values():
        await node.start()
    server = await asyncio.start_server(found.accept, "127.0.0.1", 0)
    found.address = server.sockets[0].getsockname()[:2]
    try:
        yield found
    finally:
        server.close()
        for node in found.nodes.values():
            await node.stop()


def run(work: Callable[[Rig], Awaitable[None]]) -> None:
    async def inner() -> None:
        async with asyncio.timeout(30), rig() as found:
            await work(found)

    asyncio.run(inner())


class Client:
    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams
        self.http = h11.Connection(h11.CLIENT)

    async def event(self):  # type: ignore[no-untyped-def]
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(65536))
        return event

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        body = b""
        status, headers = 0, {}
        while True:
            event = await self.event()
            if isinstance(event, h11.Response):
                status, headers = event.status_code, dict(event.headers)
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.http.start_next_cycle()
                return status, headers, body

    async def ask(
        self, target: str, body: bytes = b"", method: str = "GET", **headers: str
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        named = {"host": "x", **{key.replace("_", "-"): value for key, value in headers.items()}}
        if body:
            named["content-length"] = str(len(body))
        request = h11.Request(method=method, target=target, headers=list(named.items()))
        self.writer.write(self.http.send(request) or b"")
        if body:
            self.writer.write(self.http.send(h11.Data(data=body)) or b"")
        self.writer.write(self.http.send(h11.EndOfMessage()) or b"")
        return await self.answer()


async def client(found: Rig) -> Client:
    return Client(await asyncio.open_connection(*found.address))


def path(session: str, port: int = 8000) -> str:
    return f"/s/{session}/{port}/x?a=1"


def test_one_connection_reaches_sessions_on_several_nodes() -> None:
    async def work(found: Rig) -> None:
        one = await client(found)
        for session, node in ((ONE, b"n1"), (TWO, b"n2"), (ONE, b"n1"), (ONE, b"n1")):
            status, headers, body = await one.ask(path(session))
            assert (status, body.split()[0]) == (200, node)
            assert headers[b"keep"] == b"this" and b"te" not in headers
        # By host, too; and what moved meanwhile is found where it is now.
        host = f"8000-{TWO.replace('_', '-')}.{DOMAIN}:80"
        assert (await one.ask("/", host=host))[2].split()[0] == b"n2"
        found.held[TWO] = "n1"
        assert (await one.ask("/", host=host))[2].split()[0] == b"n1"
        # A connection to a node is used again while the next request is for the same one.
        assert found.nodes["n1"].connections == 3

    run(work)


def test_the_client_is_told_as_it_is_seen_and_hop_by_hop_headers_stay() -> None:
    async def work(found: Rig) -> None:
        one = await client(found)
        await one.ask(
            path(ONE), sojourn_client="10.0.0.1", connection="x-mine", x_mine="1", other="kept"
        )
        headers = found.nodes["n1"].heads[0].headers
        assert [value for key, value in headers if key == b"sojourn-client"] == [b"192.0.2.7"]
        assert {b"x-mine", b"connection"}.isdisjoint(key for key, _ in headers)
        assert (b"other", b"kept") in list(headers)
        assert found.nodes["n1"].heads[0].target == path(ONE).encode()

    run(work)


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_bodies_pass_whole(size: int) -> None:
    async def work(found: Rig) -> None:
        one = await client(found)
        body = b"ab" * size
        expected = hashlib.sha256(body).hexdigest().encode()
        assert (await one.ask(path(ONE), body, "POST"))[2] == b"n1 " + expected
        # In pieces of unknown number, and with the client waiting to be told to go on.
        request = h11.Request(
            method="POST",
            target=path(TWO),
            headers=[("host", "x"), ("transfer-encoding", "chunked"), ("expect", "100-continue")],
        )
        one.writer.write(one.http.send(request) or b"")
        event = await one.event()
        assert isinstance(event, h11.InformationalResponse) and event.status_code == 100
        for at in range(0, len(body), 100_000):
            one.writer.write(one.http.send(h11.Data(data=body[at : at + 100_000])) or b"")
            await one.writer.drain()
        one.writer.write(one.http.send(h11.EndOfMessage()) or b"")
        assert (await one.answer())[2] == b"n2 " + expected

    run(work)


def test_what_names_nothing_is_refused_and_the_connection_goes_on() -> None:
    async def work(found: Rig) -> None:
        found.held[TWO] = "gone"
        one = await client(found)
        for target, code in (
            ("/", 404),
            ("/s/ses_x/8000/", 404),
            (path("ses_" + "3" * 24), 404),
            (path(TWO), 503),
        ):
            status, _, body = await one.ask(target)
            assert status == code, (target, body)
        assert (await one.ask(path(ONE)))[0] == 200

    run(work)


def test_a_node_that_does_not_answer_is_waited_for_until_another_one_has_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuses() -> Streams:
        raise ConnectionRefusedError

    async def work(found: Rig) -> None:
        monkeypatch.setattr(found.nodes["n1"], "connect", refuses)
        one = await client(found)
        asking = asyncio.create_task(one.ask(path(ONE)))
        await asyncio.sleep(0.3)
        assert not asking.done()
        found.held[ONE] = "n2"
        assert (await asking)[0] == 200
        assert found.nodes["n2"].connections == 1
        # Not for ever.
        monkeypatch.setattr("sojourn.server.cluster.relays.REACH_SECONDS", 0.1)
        found.held[ONE] = "n1"
        status, headers, body = await one.ask(path(ONE))
        assert (status, headers[b"retry-after"]) == (503, b"1"), body

    run(work)


def test_a_kept_connection_that_was_closed_is_no_ones_failure() -> None:
    async def work(found: Rig) -> None:
        node = found.nodes["n1"]

        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            http = h11.Connection(h11.SERVER)
            if await node.request(http, reader):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        node.does = once
        one = await client(found)
        for _ in range(3):
            assert (await one.ask(path(ONE)))[2] == b"ok"
        # What is not safe never goes over one that may have been closed.
        for _ in range(3):
            assert (await one.ask(path(ONE), b"x", "POST"))[2] == b"ok"
        assert len(node.bodies) == 6

    run(work)


def test_an_answer_that_breaks_off_is_cut_off() -> None:
    async def work(found: Rig) -> None:
        node = found.nodes["n1"]

        async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await node.request(h11.Connection(h11.SERVER), reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n")
            await writer.drain()
            writer.transport.abort()

        node.does = breaks
        one = await client(found)
        one.writer.write(f"GET {path(ONE)} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        try:
            got = await one.reader.read(-1)
        except ConnectionError:
            got = b""
        assert not got.endswith(b"0\r\n\r\n")

    run(work)


def test_half_a_body_does_not_pass_for_a_whole_one() -> None:
    async def work(found: Rig) -> None:
        node = found.nodes["n1"]
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                ended.set_result(await node.request(h11.Connection(h11.SERVER), reader))
            except (ConnectionError, h11.RemoteProtocolError):
                ended.set_result(False)

        node.does = reads
        one = await client(found)
        head = f"POST {path(ONE)} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf."
        one.writer.write(head.encode())
        await one.writer.drain()
        await asyncio.sleep(0.1)
        one.writer.close()
        assert await ended is False

    run(work)


def test_another_protocol_is_bytes_from_then_on() -> None:
    async def work(found: Rig) -> None:
        node = found.nodes["n1"]

        async def switches(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n"
                b"upgrade: websocket\r\n\r\nearly"
            )
            while data := await reader.read(100):
                writer.write(data.upper())

        node.does = switches
        one = await client(found)
        head = f"GET {path(ONE)} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n"
        one.writer.write(head.encode() + b"upgrade: websocket\r\n\r\n")
        got = await one.reader.readuntil(b"early")
        assert got.startswith(b"HTTP/1.1 101") and b"upgrade: websocket" in got.lower()
        one.writer.write(b"hello")
        assert await one.reader.readexactly(5) == b"HELLO"
        one.writer.write_eof()
        assert await one.reader.read() == b""

    run(work)


@pytest.mark.parametrize(
    "head",
    [
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000,
    ],
)
def test_what_is_no_http_is_refused(head: bytes) -> None:
    async def work(found: Rig) -> None:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(head)
        got = await reader.read()
        assert got.startswith(b"HTTP/1.1 4")
        assert all(node.connections == 0 for node in found.nodes.values())
        writer.close()

    run(work)
