"""A node's own addresses, who asks at all others, and the bytes of exposed ports."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import msgspec
import pytest

from sojourn.errors import ErrorBody, SandboxLost, Unauthenticated, WrongState
from sojourn.model.nodes import Fence, NodeState
from sojourn.server.base import Principal
from sojourn.server.cluster.callers import HEADER, encode_principal
from sojourn.server.endpoints import PRINCIPAL, caller
from sojourn.server.nodes.routes import NodeApp
from sojourn.server.nodes.tunnels import Tunnels
from sojourn.wire.nodes import Evicted

WHO = Principal("ten_1", "somebody", "tenant")


class FakeNode:
    """What the routes ask of a node, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.failure: Exception | None = None
        self.held = True
        lease = types.SimpleNamespace(held=True)
        self.identity = types.SimpleNamespace(
            id="nod_1",
            lease=lease,
            fence=Fence("nod_1", 3),
            state=NodeState.READY,
            hint=asyncio.Event(),
        )
        self.work = self
        self.holding = self

    async def hold(self, id: str) -> None:
        self.asked.append(("take", id))

    async def release(self, ref: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.asked.append(("release", ref))

    def fetch_soon(self, session: str, snapshot: str | None) -> None:
        self.asked.append(("prefetch", session, snapshot))

    async def evict(self, need: Any, idle: float) -> Evicted:
        self.asked.append(("evict", need.memory_bytes, idle))
        return Evicted(True, ["ses_1"])

    async def refresh(self, what: str) -> None:
        self.asked.append(("refresh", what))


def ask(
    app: Any, method: str, path: str, body: bytes = b"", headers: Any = ()
) -> tuple[int, bytes]:
    """One request; status and body."""

    async def whole() -> tuple[int, bytes]:
        sent: list[Any] = []
        pieces = [body[:1], body[1:]] if body else [b""]
        messages = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1}
            for number, piece in enumerate(pieces)
        ]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        await app(scope, receive, send)
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent[1:])

    return asyncio.run(whole())


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("it was passed on")


def node_app(inner: Any = nothing) -> tuple[NodeApp, FakeNode]:
    made = FakeNode()
    return NodeApp(inner, made), made  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "asked"),
    [
        ("POST", "/node/sessions/ses_1/take", b"", 204, ("take", "ses_1")),
        ("POST", "/node/sessions/ses_1/release", b"", 204, ("release", "ses_1")),
        ("POST", "/node/sessions/ses_1/prefetch", b"{}", 202, ("prefetch", "ses_1", None)),
        (
            "POST",
            "/node/sessions/ses_1/prefetch",
            b'{"snapshot":"snp_1"}',
            202,
            ("prefetch", "ses_1", "snp_1"),
        ),
        (
            "POST",
            "/node/evict",
            b'{"need":{"memory_bytes":5},"idle":60.0}',
            200,
            ("evict", 5, 60.0),
        ),
        ("POST", "/node/refresh", b'{"what":"secrets"}', 204, ("refresh", "secrets")),
    ],
)
def test_what_servers_ask_of_a_node(
    method: str, path: str, body: bytes, status: int, asked: Any
) -> None:
    app, node = node_app()
    assert ask(app, method, path, body)[0] == status
    assert node.asked == [asked]


def test_a_hint_wakes_the_node_and_health_tells_of_the_lease() -> None:
    app, node = node_app()
    assert ask(app, "POST", "/node/operations")[0] == 202
    assert node.identity.hint.is_set()
    status, body = ask(app, "GET", "/node/health")
    assert (status, msgspec.json.decode(body)["incarnation"]) == (200, 3)
    node.identity.lease.held = False
    assert ask(app, "GET", "/node/health")[0] == 503


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/node/evict"),
        ("POST", "/node/release"),
        ("POST", "/node/take"),
        ("POST", "/node/sessions/ses_1/evict"),
        ("POST", "/node/"),
        ("POST", "/node/sessions/ses_1/release/more"),
    ],
)
def test_nothing_else_is_answered_below_node(method: str, path: str) -> None:
    app, node = node_app()
    assert ask(app, method, path)[0] == 404
    assert node.asked == []


def test_a_failure_is_an_error_body() -> None:
    app, node = node_app()
    node.failure = WrongState("it runs")
    status, body = ask(app, "POST", "/node/sessions/ses_1/release")
    assert (status, msgspec.json.decode(body, type=ErrorBody).code) == (409, "wrong_state")
    node.failure = RuntimeError("secret")
    status, body = ask(app, "POST", "/node/sessions/ses_1/release")
    assert status == 500 and b"secret" not in body
    status, _ = ask(app, "POST", "/node/evict", b"{}")
    assert status == 400


def told_who(headers: Any) -> Any:
    """Who the application behind is told that asks."""
    seen: list[Any] = []

    class Service:
        async def authenticate(self, token: str | None) -> Principal:
            raise AssertionError("a node looks up no tokens")

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        try:
            seen.append(await caller(scope, Service()))  # type: ignore[arg-type]
        except Unauthenticated as error:
            seen.append(error.code)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    ask(node_app(inner)[0], "GET", "/v1/sessions", headers=headers)
    return seen[0] if seen else None


def test_who_asks_is_who_the_server_says() -> None:
    assert told_who([(HEADER, encode_principal(WHO))]) == WHO
    assert told_who([(b"authorization", b"Bearer some-token")]) == Unauthenticated.code
    assert told_who([(HEADER, b"garbage")]) is None  # refused at once


def test_without_servers_in_front_the_header_means_nothing() -> None:
    async def whole() -> None:
        asked: list[str | None] = []

        class Service:
            async def authenticate(self, token: str | None) -> Principal:
                asked.append(token)
                return WHO

        scope = {"headers": [(HEADER, encode_principal(WHO)), (b"authorization", b"Bearer abc")]}
        assert PRINCIPAL not in scope
        await caller(scope, Service())  # type: ignore[arg-type]
        assert asked == ["abc"]

    asyncio.run(whole())


# -- tunnels ---------------------------------------------------------------------------------------


async def tunnelled(line: bytes, port: int) -> tuple[bytes, list[Any]]:
    """What comes back through a tunnel that begins so, and which ports were looked for."""
    looked: list[Any] = []

    async def find(session: str | None, number: int) -> tuple[str, int] | None:
        looked.append((session, number))
        return ("127.0.0.1", port) if session != "ses_" + "0" * 24 else None

    tunnels = Tunnels(find)

    class Front(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            tunnels.accept(transport)  # type: ignore[arg-type]

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Front, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(line)
    got = bytearray()
    try:
        async with asyncio.timeout(10):
            while len(got) < 5:
                piece = await reader.read(100)
                if not piece:
                    break
                got += piece
    except ConnectionError:
        got += b"reset"
    writer.close()
    await tunnels.close()
    server.close()
    return bytes(got), looked


def test_a_tunnel_carries_to_the_port_it_names_and_nowhere_else() -> None:
    session = "ses_" + "a" * 24

    async def whole() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write((await reader.read(5)).upper())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await tunnelled(b"http\nhello", port) == (b"HELLO", [(None, 0)])
        line = f"tcp {session}:8080\nhello".encode()
        assert await tunnelled(line, port) == (b"HELLO", [(session, 8080)])
        nowhere = f"tcp ses_{'0' * 24}:8080\nhello".encode()
        assert (await tunnelled(nowhere, port))[0] in (b"", b"reset")
        for bad in (b"tcp 127.0.0.1:22\nhello", b"x" * 300 + b"\nhello", b"\xff\nhello"):
            got, looked = await tunnelled(bad, port)
            assert got in (b"", b"reset") and looked == []
        server.close()

    asyncio.run(whole())


def test_a_lost_sandbox_is_no_reason_to_ask_another_node() -> None:
    from sojourn.server.cluster.forwarding import _NOT_BEGUN

    assert not isinstance(SandboxLost("it ended"), _NOT_BEGUN)
