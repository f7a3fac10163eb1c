"""Exposed ports of all sessions, at the servers.

Guarantee: an exposed port has one address, whichever node has its session, and over every move: the
servers listen, and carry what comes to the node that holds the session then, over mutual TLS. A
session that nobody holds is taken by a node first. Where the cluster's ports are reached is kept
in the database, and is what every node tells of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from sojourn.database.base import Database
from sojourn.errors import NodeUnavailable, PortNotFound, SessionNotFound, SojournError
from sojourn.model.nodes import Node
from sojourn.model.ports import ExposedPort, PortKind
from sojourn.server.cluster import pki
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.relays import Relay
from sojourn.server.cluster.targets import PATIENCE_SECONDS, Targets
from sojourn.server.cluster.upstream import CONNECT_SECONDS, Broken, NotSent, Upstream
from sojourn.server.host_ports import listening
from sojourn.server.port_settings import OUTSIDE, Outside, PortSettings
from sojourn.server.repeating import repeat
from sojourn.server.splicing import Streams, splice

log = logging.getLogger(__name__)

MAX_CLIENTS = 4096
_LOOK_SECONDS = 2.0
_TAKE_SECONDS = 60.0
_READ_AHEAD = 128 << 10


class ClusterPorts:
    """What one server listens to for exposed ports."""

    def __init__(
        self,
        database: Database,
        members: Members,
        targets: Targets,
        upstream: Upstream,
        context: ssl.SSLContext,
        settings: PortSettings,
    ) -> None:
        self._database = database
        self._members = members
        self._targets = targets
        self._upstream = upstream
        self._context = context
        self._settings = settings
        self._public = settings.public()
        self._host, self._port = settings.split()
        self._http: asyncio.Server | None = None
        self._tcp: dict[str, tuple[ExposedPort, asyncio.Server]] = {}
        self._deaf: dict[str, str] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._one_look = asyncio.Lock()

    # -- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, and tell the cluster where."""
        kept = await self._database.cluster_value(OUTSIDE)
        known = None if kept is None else msgspec.json.decode(kept, type=Outside)
        try:
            sock = self._listen(known)
        except OSError as error:
            # Another server of this machine has it; the sessions are served all the same.
            log.error("exposed ports are not served by this server: %s", error.strerror or error)
            return
        number = sock.getsockname()[1]
        self._http = await asyncio.start_server(self._accept_http, sock=sock, limit=_READ_AHEAD)
        outside = Outside(self._settings.domain, self._host, number)
        if outside != known:
            await self._database.replace_cluster_value(OUTSIDE, msgspec.json.encode(outside))
        self._looking = asyncio.create_task(
            repeat(_LOOK_SECONDS, self.once, "looking at exposed ports"), name="exposed TCP ports"
        )

    async def stop(self) -> None:
        """Serve nothing more. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for server in [self._http, *(one for _, one in self._tcp.values())]:
            if server is not None:
                server.close()
        for client in list(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def refresh(self) -> None:
        """Something was exposed, or is no longer: listen accordingly when this returns, where the
        database answers."""
        if self._http is None:
            return
        try:
            await self.once()
        except SojournError as error:
            log.warning("exposed ports cannot be looked at: %s", error)

    def _listen(self, known: Outside | None) -> socket.socket:
        """At the address that was given, else where the cluster's ports were before."""
        if self._port == 0 and known is not None and known.host == self._host:
            with contextlib.suppress(OSError):
                return listening(self._host, known.port)
        return listening(self._host, self._port)

    async def once(self) -> None:
        """Listen to the TCP ports that are exposed now, and to no others."""
        async with self._one_look:
            await self._listen_to_exposed()

    async def _listen_to_exposed(self) -> None:
        wanted = {
            port.id: port
            for port in await self._database.list_ports()
            if port.kind is PortKind.TCP and port.listens_at is not None
        }
        for id in [id for id, (port, _) in self._tcp.items() if wanted.get(id) != port]:
            self._tcp.pop(id)[1].close()
        for id, port in wanted.items():
            if id in self._tcp:
                continue
            try:
                sock = listening(self._host, port.listens_at or 0)
            except OSError as error:
                said = str(error)
                if self._deaf.get(id) != said:
                    self._deaf[id] = said
                    log.error("port %d of %s is not served: %s", port.port, port.session, said)
                continue
            self._deaf.pop(id, None)
            accept = functools.partial(self._accept_tcp, port)
            server = await asyncio.start_server(accept, sock=sock, limit=_READ_AHEAD)
            self._tcp[id] = (port, server)

    # -- clients ----------------------------------------------------------------------------

    async def _accept_http(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._admit(writer):
            relay = Relay((reader, writer), _peer(writer), self._public.domain, self._dial)
            await self._carry(relay.serve())

    async def _accept_tcp(
        self, port: ExposedPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._admit(writer):
            if _lets_in(port, _peer(writer)):
                await self._carry(self._tcp_through((reader, writer), port))
            else:
                writer.transport.abort()

    def _admit(self, writer: asyncio.StreamWriter) -> bool:
        if len(self._clients) >= MAX_CLIENTS:
            writer.transport.abort()
            return False
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return True

    async def _carry(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a fault while serving an exposed port")
        finally:
            self._clients.discard(task)

    async def _tcp_through(self, streams: Streams, port: ExposedPort) -> None:
        try:
            node = await self._node_of(port.session)
            tunnel = await self._connect(node, f"tcp {port.id}")
        except (SojournError, OSError, TimeoutError) as error:
            # There is no way to say why; a reset at least is no whole answer.
            log.info("port %d of %s: %s", port.port, port.session, error)
            streams[1].transport.abort()
            return
        await splice(streams, tunnel)

    # -- the way to nodes -------------------------------------------------------------------

    async def _dial(self, session: str) -> tuple[str, Callable[[], Awaitable[Streams]]]:
        node = await self._node_of(session)
        return node.id, lambda: self._connect(node, "http")

    async def _node_of(self, session: str) -> Node:
        """The node that holds a session, which takes it where nobody does. Raises PortNotFound,
        NodeUnavailable, CapacityExhausted."""
        try:
            found = await self._database.get_session(None, session)
        except SessionNotFound:
            raise PortNotFound(
                "nothing is exposed at this address, or not to you",
                next_step="Check the address and its token.",
            ) from None
        if found.holder is not None and self._members.alive(found.holder):
            node = self._members.find(found.holder)
            if node is not None:
                return node
        self._targets.forget(None, session)
        deadline = time.monotonic() + PATIENCE_SECONDS
        target = await self._targets.holder(
            None, session, wakes=True, deadline=deadline, avoid=frozenset()
        )
        reservation = target.reservation
        if reservation is None:
            return target.node
        try:
            await self._take(target.node, session)
        except BaseException:
            reservation.cancel()
            raise
        reservation.settle()
        return target.node

    async def _take(self, node: Node, session: str) -> None:
        """Have a node take a session that nobody holds."""
        path = f"/node/sessions/{session}/take".encode()
        try:
            status, _ = await self._upstream.call(node, b"POST", path, timeout=_TAKE_SECONDS)
        except (NotSent, Broken) as error:
            raise NodeUnavailable(f"the session's node cannot be reached: {error}") from error
        if status >= 300:
            raise NodeUnavailable(f"the session moves between nodes (HTTP {status})")

    async def _connect(self, node: Node, carries: str) -> Streams:
        """A tunnel to a node. Raises OSError, TimeoutError."""
        host, _, port = node.address.rpartition(":")
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"),
                int(port),
                ssl=self._context,
                server_hostname=pki.node_host(node.id),
                limit=_READ_AHEAD,
            )
        writer.write(f"{carries}\n".encode("ascii"))
        return reader, writer


def _peer(writer: asyncio.StreamWriter) -> str:
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""


def _lets_in(port: ExposedPort, address: str) -> bool:
    """Whether a client at this address may connect."""
    if not port.sources:
        return True
    try:
        client = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(client, ipaddress.IPv6Address) and client.ipv4_mapped is not None:
        client = client.ipv4_mapped
    return any(client in ipaddress.ip_network(source) for source in port.sources)
