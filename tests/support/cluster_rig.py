"""A server's front with its real parts, before nodes that answer as a test says.

Everything is in one process and one loop: a real database, real TLS, real HTTP on both sides. Only
what a node does with a request is the test's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpcore
import msgspec

from sojourn.database import open_database
from sojourn.database.base import Database
from sojourn.database.records import Role
from sojourn.database.writes import InsertSession
from sojourn.errors import SojournError, to_body
from sojourn.model import Limits, Session, SessionState, new_id
from sojourn.model.nodes import Node, NodeState, Resources
from sojourn.server.answers import Shutdown
from sojourn.server.app import serve_app
from sojourn.server.cluster import pki, scheduler
from sojourn.server.cluster.administration import Administration, own_app
from sojourn.server.cluster.callers import HEADER, Callers, decode_principal
from sojourn.server.cluster.front import Front
from sojourn.server.cluster.joining import Joining
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.pki import ClusterAuthority, Credentials
from sojourn.server.cluster.queueing import Admissions
from sojourn.server.cluster.rooms import Rooms
from sojourn.server.cluster.targets import Targets
from sojourn.server.cluster.upstream import Upstream
from sojourn.server.cluster.values import ClusterValues
from sojourn.server.listening import listen
from support.databases import make_session

GIB = 1 << 30


class Asked:
    """A request as a node got it, with what answers it."""

    def __init__(self, node: FakeNode, scope: Any, receive: Any, send: Any) -> None:
        self.node = node
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.client: tuple[str, int] = scope["client"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.receive = receive
        self.send = send

    @property
    def who(self) -> Any:
        value = self.headers.get(HEADER)
        return None if value is None else decode_principal(value)

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the other side left")
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def start(self, status: int = 200, **headers: str) -> None:
        told = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": told})

    async def write(self, piece: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": more})

    async def answer(self, body: bytes = b"", status: int = 200, **headers: str) -> None:
        await self.start(status, content_length=str(len(body)), **headers)
        await self.write(body, more=False)

    async def fail(self, error: SojournError) -> None:
        await self.answer(msgspec.json.encode(to_body(error)), error.status)


Does = Callable[[Asked], Awaitable[None]]


async def says_its_name(asked: Asked) -> None:
    await asked.answer(asked.node.id.encode())


class FakeNode:
    """A node: `does` answers what comes; `got` is all that came."""

    def __init__(self, id: str, authority: ClusterAuthority) -> None:
        self.id = id
        self.got: list[Asked] = []
        self.does: Does = says_its_name
        key, request = pki.make_request()
        self._credentials = Credentials(
            key, authority.sign_node(request, id), authority.certificate
        )
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self.address = "127.0.0.1:0"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for answer in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{answer}.complete"})
            return
        asked = Asked(self, scope, receive, send)
        self.got.append(asked)
        await self.does(asked)

    async def start(self) -> None:
        if self._task is not None:
            return
        sock, url = listen(self.address)
        self.address = url.removeprefix("http://")
        ready = asyncio.Event()
        context = pki.node_context(self._credentials)
        self._server = serve_app(self, Shutdown(), ready.set, context=context)
        self._server.config.timeout_graceful_shutdown = 1
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        await ready.wait()

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None

    def abort(self) -> None:
        """Break all its connections at once, as the end of its machine does."""
        for protocol in list(self._server.server_state.connections):
            protocol.transport.abort()


class Cluster:
    """What a test works with."""

    def __init__(self, database: Database, nodes: list[FakeNode]) -> None:
        self.database = database
        self.nodes = nodes
        self.tenant = self.token = self.tenant_token = self.url = ""
        self.front: Any = None
        self.members: Any = None
        self.admissions: Any = None
        self.address = ("127.0.0.1", 0)
        self._pool = httpcore.AsyncConnectionPool()

    def node(self, id: str) -> FakeNode:
        return next(node for node in self.nodes if node.id == id)

    async def request(
        self,
        method: str,
        path: str,
        content: Any = b"",
        *,
        token: str | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """A request of the operator's, and its whole answer."""
        shown = {"authorization": f"Bearer {token or self.token}"}
        shown |= {name.replace("_", "-"): text for name, text in headers.items()}
        if not isinstance(content, bytes):
            shown["transfer-encoding"] = "chunked"
        answer = await self._pool.request(
            method, self.url + path, headers=shown, content=content or None
        )
        found = {name.decode().lower(): value.decode() for name, value in answer.headers}
        return answer.status, found, answer.content

    async def session(
        self, holder: str | None, *, state: str = "suspended", **facts: Any
    ) -> Session:
        """A session in the database."""
        limits = Limits(cpus=1.0, memory_bytes=GIB, disk_bytes=GIB)
        told = {"tenant": self.tenant, "limits": limits, "template": "debian"} | facts
        session = make_session(state=SessionState(state), holder=holder, **told)
        await self.database.commit([InsertSession(session)])
        return session

    async def reset(self, patience: float) -> None:
        """As if it had just begun, but for what is in the database."""
        self.admissions._patience = patience
        self.front._stopping = False
        for node in self.nodes:
            node.does = says_its_name
            node.got.clear()
            await node.start()
            await lease(self.database, node)
            await self.database.set_node_state(node.id, NodeState.READY)
        self.members._reserved.clear()
        await self.members.refresh()

    async def close(self) -> None:
        await self._pool.aclose()


async def lease(database: Database, node: FakeNode, seconds: float = 60.0, **facts: Any) -> Node:
    """Have a node start, with a lease."""
    return await database.start_node(
        node.id,
        address=node.address,
        capacity=facts.pop("capacity", Resources(8, 16 * GIB, 100 * GIB, 0)),
        runtime="runsc 1",
        cpu=[],
        version="0",
        lease=seconds,
        **facts,
    )


@contextlib.asynccontextmanager
async def cluster(place: Path, count: int = 2, *, patience: float = 2.0) -> AsyncIterator[Cluster]:
    """A front before so many nodes, all with a lease."""
    async with contextlib.AsyncExitStack() as stack:
        database = await open_database(place / "cluster.db")
        stack.push_async_callback(database.close)
        authority = ClusterAuthority.make()
        nodes = [FakeNode(new_id("nod"), authority) for _ in range(count)]
        found = Cluster(database, nodes)
        stack.push_async_callback(found.close)
        for at, node in enumerate(nodes):
            await node.start()
            stack.push_async_callback(node.stop)
            await database.add_node(node.id, f"n{at}")
            await lease(database, node)
        tenant = await database.create_tenant("default")
        found.tenant = tenant.id
        _, found.token = await database.create_token(tenant.id, Role.OPERATOR)
        _, found.tenant_token = await database.create_token(tenant.id, Role.TENANT)
        upstream = Upstream(pki.upstream_context(authority.server_credentials("srv")))
        stack.callback(upstream.close)
        members = found.members = Members(database)
        rooms = Rooms(database, members, upstream)
        settings = scheduler.Settings(1.0, 1.0, 1.0)
        found.admissions = Admissions(members, settings, rooms.evict, patience=patience)
        stack.push_async_callback(found.admissions.stop)
        targets = Targets(database, members, found.admissions)
        rooms.attach(targets, found.admissions)
        callers = Callers(database)
        joining = Joining(
            database,
            ClusterValues(authority, {}),
            database_url="postgresql://db/sojourn",
            store="s3://bucket",
            store_key=None,
            url="https://127.0.0.1:1",
        )
        administration = Administration(database, callers, members, upstream, joining)
        shutdown = Shutdown()
        found.front = Front(
            own_app(administration, shutdown), callers, targets, members, upstream, rooms
        )
        await members.start()
        stack.push_async_callback(members.stop)
        sock, found.url = listen("127.0.0.1:0")
        found.address = sock.getsockname()
        ready = asyncio.Event()
        server = serve_app(found.front, shutdown, ready.set)
        server.config.timeout_graceful_shutdown = 1
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await ready.wait()
        try:
            yield found
        finally:
            server.should_exit = True
            await task
