"""Exposed ports: what is reached from outside, over which sockets, and how a session is woken.

Guarantee: what the server has not exposed is not reached. A client waits for a session that is put
away, and many that wait for one cause one resume, which is the server's business. Open connections
alone keep no session awake: only bytes that move, and requests that wait for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterator

from sojourn.errors import Interrupted, PortSilent, QuotaExceeded, SojournError, from_body
from sojourn.gateway import ports_channel as channel
from sojourn.gateway.inbound import Dialled, Inbound
from sojourn.gateway.leases import UNBOUNDED, AnyLease
from sojourn.gateway.port_http import IDLE_SECONDS, HttpClient
from sojourn.gateway.port_streams import splice
from sojourn.gateway.streams import Connection
from sojourn.model.ports import PortKind

log = logging.getLogger(__name__)

MAX_CLIENTS = 4096
MAX_CLIENTS_OF_PORT = 1024
# The server's own bound is a minute; this one is for a server that says nothing.
_DIAL_SECONDS = 75.0
_ARRIVE_SECONDS = 5.0
MAX_ASKS = 256
_ASK_SECONDS = 15.0
_TICK_SECONDS = 0.5

Networks = list[ipaddress.IPv4Network | ipaddress.IPv6Network]


class Exposed:
    """One exposed port, and what is going on at it."""

    def __init__(self, told: channel.Expose) -> None:
        self.told = told
        self.id = told.id
        self.session = told.session
        self.port = told.port
        self.kind = told.kind
        self.digest = told.digest
        self.sources: Networks = [ipaddress.ip_network(text) for text in told.sources]
        self.clients: set[Client] = set()
        self.active = False
        self._moved = False
        self._unanswered: set[Client] = set()

    def moved(self) -> None:
        """Bytes went through it."""
        self._moved = True

    @contextlib.contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Around a request or connection; until it is `answered` it keeps the session awake.
        Raises QuotaExceeded with too many."""
        if len(self.clients) >= MAX_CLIENTS_OF_PORT:
            raise QuotaExceeded(f"port {self.port} has {MAX_CLIENTS_OF_PORT} connections")
        self.clients.add(client)
        self._unanswered.add(client)
        try:
            yield
        finally:
            self.clients.discard(client)
            self._unanswered.discard(client)

    def answered(self, client: Client) -> None:
        """Its answer has begun."""
        self._unanswered.discard(client)

    def went_on(self) -> bool:
        """Whether something has gone on since the last time this was asked."""
        moved = self._moved or bool(self._unanswered)
        self._moved = False
        return moved

    def lets_in(self, address: str) -> bool:
        """Whether a client at this address may connect."""
        if not self.sources:
            return True
        try:
            client = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(client, ipaddress.IPv6Address) and client.ipv4_mapped is not None:
            client = client.ipv4_mapped
        return any(client in network for network in self.sources)


class Client(Connection):
    """A client's connection, served from its first moment on."""

    def __init__(self, ports: Ports, exposed: Exposed | None) -> None:
        super().__init__(lease=ports.lease)
        self._ports = ports
        self.exposed = exposed
        self.address = ""
        self.http: HttpClient | None = None
        self.deadline = time.monotonic() + IDLE_SECONDS
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        self.address = str(name[0]) if name else ""
        self._ports.connected(self)

    def expire(self) -> None:
        """Give it up at once."""
        if self.http is not None:
            self.http.expire()
        else:
            self.reset()
        if self.task is not None:
            self.task.cancel()

    @property
    def due(self) -> float:
        """When it is given up."""
        return self.deadline if self.http is None else self.http.deadline


class Ports:
    """All exposed ports of a server."""

    def __init__(self, inbound: Inbound, descriptor: int, lease: AnyLease = UNBOUNDED) -> None:
        self.lease = lease
        self.domain = "localhost"
        self.scheme = "http"
        self.relayed = False
        self._inbound = inbound
        self._exposed: dict[str, Exposed] = {}
        self._listeners: dict[str, asyncio.Server] = {}
        self._listening: set[asyncio.Task[None]] = set()
        self._dials: dict[bytes, asyncio.Future[SojournError | None]] = {}
        self._asks: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        self._clients: dict[Client, None] = {}  # in the order they came
        end = socket.socket(fileno=descriptor)
        self._channel = channel.Channel(end, self._received, self.close)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def close(self) -> None:
        """End everything. Idempotent."""
        self._channel.close()
        self._ticking.cancel()
        for server in self._listeners.values():
            server.close()
        self.cut()

    def cut(self) -> None:
        """End what goes on at every port; the ports stay."""
        for client in list(self._clients):
            client.expire()

    def find(self, session: str, port: int) -> Exposed | None:
        """The HTTP port that is exposed, if it is."""
        exposed = self._exposed.get(f"{session}:{port}")
        return exposed if exposed is not None and exposed.kind is PortKind.HTTP else None

    async def ask(self, session: str, port: int) -> Exposed | None:
        """The port, where the server exposes it for being asked for; None where it does not."""
        if len(self._asks) >= MAX_ASKS:
            return None
        self._number += 1
        number = self._number
        answer = self._asks[number] = asyncio.get_running_loop().create_future()
        self._channel.send(channel.Ask(number, session, port))
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                await answer
        except TimeoutError:
            return None
        finally:
            del self._asks[number]
        return self.find(session, port)

    # -- what the server says ---------------------------------------------------------------

    def _received(self, message: channel.Message, descriptors: list[int]) -> None:
        listener = socket.socket(fileno=descriptors[0]) if descriptors else None
        match message:
            case channel.Serve():
                self.domain, self.scheme = message.domain, message.scheme
                self.relayed = message.relayed
                assert listener is not None
                self._listen("", listener, None)
            case channel.Expose():
                known = self._exposed.get(message.id)
                if known is not None and known.told == message and listener is None:
                    return  # told again; what is under way there goes on
                exposed = self._exposed[message.id] = Exposed(message)
                if listener is not None:
                    self._listen(message.id, listener, exposed)
            case channel.Unexpose():
                self._unexpose(message.id)
            case channel.Dialed():
                waiter = self._dials.get(message.token)
                if waiter is not None and not waiter.done():
                    error = message.error
                    waiter.set_result(None if error is None else from_body(error))
            case channel.Asked():
                asked = self._asks.get(message.number)
                if asked is not None and not asked.done():
                    asked.set_result(None)
            case _:
                log.error("the server sent a message that is the gateway's to send")

    def _listen(self, id: str, listener: socket.socket, exposed: Exposed | None) -> None:
        listener.setblocking(False)

        async def begin() -> None:
            server = await asyncio.get_running_loop().create_server(
                lambda: Client(self, exposed), sock=listener, backlog=1024
            )
            if exposed is not None and self._exposed.get(id) is not exposed:
                server.close()  # exposed no more, meanwhile
            else:
                self._listeners[id] = server

        task = asyncio.get_running_loop().create_task(begin())
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    def _unexpose(self, id: str) -> None:
        exposed = self._exposed.pop(id, None)
        server = self._listeners.pop(id, None)
        if server is not None:
            server.close()
        if exposed is not None:
            for client in list(exposed.clients):
                client.expire()

    # -- clients ----------------------------------------------------------------------------

    def connected(self, client: Client) -> None:
        """A client connected; with too many, the one that has said nothing for longest goes."""
        full = len(self._clients) >= MAX_CLIENTS and not self._make_room()
        if full or not self.lease.valid():
            client.reset()
            return
        exposed = client.exposed
        if exposed is not None and not exposed.lets_in(client.address):
            client.reset()
            return
        self._clients[client] = None
        work = self._serve_http(client) if exposed is None else self._serve_tcp(client, exposed)
        client.task = asyncio.get_running_loop().create_task(work)
        client.task.add_done_callback(lambda task: self._ended(client, task))

    def _make_room(self) -> bool:
        for client in self._clients:
            if client.http is not None and client.http.waiting:
                client.expire()
                return True
        return False

    def _ended(self, client: Client, task: asyncio.Task[None]) -> None:
        self._clients.pop(client, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("a fault while serving an exposed port", exc_info=task.exception())
            client.reset()

    async def _serve_http(self, client: Client) -> None:
        client.http = HttpClient(self, client, client.address)
        await client.http.serve()

    async def _serve_tcp(self, client: Client, exposed: Exposed) -> None:
        def moved() -> None:
            exposed.moved()
            client.deadline = time.monotonic() + IDLE_SECONDS

        try:
            with exposed.serving(client):
                dialled = await self.dial(exposed)
                exposed.answered(client)
                try:
                    await splice(client, dialled.stream, moved)
                finally:
                    dialled.close()
                client.close()
        except (ConnectionError, SojournError) as error:
            # There is no way to say why; a reset at least is no whole answer.
            log.info("port %d of %s: %s", exposed.port, exposed.session, error)
            client.reset()

    # -- the way inside ---------------------------------------------------------------------

    async def dial(self, exposed: Exposed) -> Dialled:
        """A tunnel to the port inside; its session is woken for it. Raises what the server says:
        WrongState, SessionBusy, PortSilent, ...; Interrupted when the tunnel did not come."""
        if self._exposed.get(exposed.id) is not exposed:
            raise Interrupted("the port is no longer exposed")
        if len(self._dials) >= MAX_CLIENTS:
            raise QuotaExceeded("too many requests wait for sessions")
        token, arriving = self._inbound.expect()
        answer: asyncio.Future[SojournError | None] = asyncio.get_running_loop().create_future()
        self._dials[token] = answer
        taken = answered = False
        self._channel.send(channel.Dial(exposed.id, token))
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                error = await answer
            answered = True
            if error is not None:
                raise error
            # It was opened before the answer, but comes another way.
            async with asyncio.timeout(_ARRIVE_SECONDS):
                dialled = await asyncio.shield(arriving)
            taken = True
            return dialled
        except TimeoutError:
            if answered:
                raise Interrupted("the connection into the session did not come") from None
            raise PortSilent("the session did not come up in time") from None
        finally:
            del self._dials[token]
            if not answered:
                self._channel.send(channel.GiveUp(token))
            self._inbound.forget(token, taken=taken)

    # -- the clock --------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Say where something goes on, and give up what takes too long."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            for client in list(self._clients):
                if client.due <= now:
                    client.expire()
            on, quiet = [], []
            for exposed in self._exposed.values():
                if exposed.went_on():
                    exposed.active = True
                    on.append(exposed.id)
                elif exposed.active:
                    exposed.active = False
                    quiet.append(exposed.id)
            for at in range(0, max(len(on), len(quiet)), 500):
                self._channel.send(channel.Moved(on[at : at + 500], quiet[at : at + 500]))


def serve_ports(inbound: Inbound, descriptor: int, lease: AnyLease = UNBOUNDED) -> Ports | None:
    """The exposed ports behind the descriptor that the server gave; None where it gave none."""
    if descriptor < 0:
        return None
    os.set_inheritable(descriptor, False)
    return Ports(inbound, descriptor, lease)
