"""Exposed ports: which ports of sessions are reached from outside, and at which addresses.

Guarantee: an exposed port has one address as long as it is exposed, over suspension, rollback and
restarts; it is its session's alone, not its forks'; when its session is deleted it is gone, and no
later session ever gets its address. The server holds the listening sockets: a request that comes
while the gateway process is started again waits, and is not refused.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import hashlib
import ipaddress
import logging
import os
import secrets as random
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from sojourn.database.base import Database
from sojourn.database.writes import AppendEvent
from sojourn.errors import (
    Conflict,
    HostUnfit,
    InvalidRequest,
    PortNotFound,
    QuotaExceeded,
    SessionNotFound,
    SojournError,
)
from sojourn.gateway import ports_channel as channel
from sojourn.gateway.port_requests import host_label, path_prefix
from sojourn.model import Session, SessionState
from sojourn.model.ports import ExposedPort, PortKind
from sojourn.server.base import Principal
from sojourn.server.host_ports import HostPorts, listening
from sojourn.server.networks import Networks
from sojourn.server.port_settings import PortSettings
from sojourn.server.registry import ActiveSession, Registry
from sojourn.server.secrets import Secrets
from sojourn.wire.networks import ExposePort, PortInfo

log = logging.getLogger(__name__)

MAX_PORTS = 64
MAX_SOURCES = 64
_ADDRESS_FILE = "ports.address"
_NUMBERS_FILE = "ports.numbers"
_KIND = "port"
_AGAIN_SECONDS = 5.0
_NUMBER_TRIES = 50

CLUSTER_NUMBERS = range(20_000, 30_000)
"""Numbers of exposed TCP ports where servers listen, who cannot be asked which are free."""


class Ports:
    """The exposed ports of all sessions."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        secrets: Secrets,
        data: Path,
        settings: PortSettings,
        networks: Networks,
    ) -> None:
        self._database = database
        self._registry = registry
        self._secrets = secrets
        self._data = data
        self._public = settings.public()
        self._host, self._port = settings.split()
        self._networks = networks
        self._outside = settings.outside
        self._exposed: dict[str, dict[int, ExposedPort]] = {}
        self._tokens: dict[str, str] = {}  # by id; of those that are not public
        self._sockets: dict[str, socket.socket] = {}  # "" is the one that all HTTP ports share
        self._channel: channel.Channel | None = None
        self._received: Callable[[channel.Message], None] = lambda message: None
        self._complaints: dict[str, str] = {}  # why a port is not served, as it was logged
        self._numbers = HostPorts(data / _NUMBERS_FILE)
        self._changing = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._decide: Callable[[str, int], Awaitable[Principal | None]] | None = None

    # -- start and stop ---------------------------------------------------------------------

    async def load(self) -> None:
        """Know what an earlier server exposed, before its sandboxes are taken over."""
        taker = self._registry.taker
        holder = taker.id if taker is not None else None
        for port in await self._database.list_ports(holder=holder):
            self._exposed.setdefault(port.session, {})[port.port] = port

    async def arrived(self, session: str) -> None:
        """Serve what a session exposes that came to this node. Idempotent."""
        ports = await self._database.list_ports(session)
        if not ports:
            return
        async with self._changing:
            self._exposed[session] = {port.port: port for port in ports}
            missing = await self._listen_to_all()
        if missing and (self._again is None or self._again.done()):
            self._again = asyncio.create_task(self._listen_again(), name="exposed ports")
        self._starting = asyncio.create_task(self._started(), name="gateway for ports")

    def left(self, session: str) -> None:
        """Serve nothing more of a session that went to another node."""
        for port in self._exposed.pop(session, {}).values():
            self._withdraw(port)

    async def start(self, received: Callable[[channel.Message], None]) -> None:
        """Listen for what is exposed. `received` gets what the gateway tells."""
        self._received = received
        missing = await self._listen_to_all()
        if missing:
            self._again = asyncio.create_task(self._listen_again(), name="exposed ports")
        if self._exposed:
            try:
                await self._networks.gateway.need()
            except SojournError as error:
                log.error("exposed ports are not served for now: %s", error)

    async def close(self) -> None:
        """Serve nothing more. Idempotent."""
        for task in (self._again, self._starting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        for one in self._sockets.values():
            one.close()
        self._sockets.clear()

    async def _listen_to_all(self) -> bool:
        """Open what is not open yet; whether something could not be."""
        missing = False
        for ports in list(self._exposed.values()):
            for port in list(ports.values()):
                try:
                    await self._open(port)
                except (SojournError, OSError) as error:
                    missing = True
                    said = str(error)
                    if self._complaints.get(port.id) != said:  # not every five seconds
                        self._complaints[port.id] = said
                        log.error("port %d of %s is not served: %s", port.port, port.session, said)
                else:
                    self._complaints.pop(port.id, None)
        return missing

    async def _listen_again(self) -> None:
        """What another program holds may be free later."""
        missing = True
        while missing:
            await asyncio.sleep(_AGAIN_SECONDS)
            async with self._changing:
                missing = await self._listen_to_all()

    async def _open(self, port: ExposedPort) -> None:
        """Have the gateway serve a port, if it does not yet. Raises OSError, SojournError."""
        if not port.public and port.id not in self._tokens:
            sealed = base64.b64decode(port.token)
            store = await self._secrets.store()
            opened = store.open(sealed, _KIND, port.tenant, port.session, str(port.port))
            self._tokens[port.id] = opened.decode()
        if port.kind is PortKind.TCP:
            if port.id in self._sockets:
                return
            assert port.listens_at is not None
            # Of several nodes the servers listen there, and this one wherever it can.
            number = port.listens_at if self._registry.taker is None else 0
            self._sockets[port.id] = listening(self._host, number)
        elif "" not in self._sockets:
            self._sockets[""] = self._listen_for_http()
            self._send_listener()
        self._send(port)

    def _listen_for_http(self) -> socket.socket:
        """The shared listening socket, at the number it had before. Raises OSError."""
        if self._port:
            return listening(self._host, self._port)
        place = self._data / _ADDRESS_FILE
        known = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            known = int(place.read_text())
        made = listening(self._host, known if 0 < known < 65536 else 0)
        number = made.getsockname()[1]
        if number != known:
            fresh = place.with_name(f"{place.name}.new")
            try:
                fresh.write_text(f"{number}\n")
                fresh.replace(place)
            except OSError:
                made.close()
                raise
        return made

    # -- the gateway ------------------------------------------------------------------------

    def new_channel(self) -> socket.socket:
        """The end of a new channel for a gateway process, which is told of all that is exposed."""
        if self._channel is not None:
            self._channel.close()
        ours, its = channel.channel_pair()
        self._channel = channel.Channel(ours, self._told, lambda: None)
        if "" in self._sockets:
            self._send_listener()
        for ports in self._exposed.values():
            for port in ports.values():
                self._send(port)
        return its

    def answer(self, message: channel.Message) -> None:
        """Tell the gateway process of now, if there is one."""
        if self._channel is not None:
            self._channel.send(message)

    def _told(self, message: channel.Message, descriptors: builtins.list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self._received(message)

    def _send_listener(self) -> None:
        if self._channel is not None:
            relayed = self._registry.taker is not None
            serve = channel.Serve(self._public.domain, self._public.scheme, relayed)
            self._channel.send(serve, self._sockets[""].fileno())

    def _send(self, port: ExposedPort) -> None:
        token = self._tokens.get(port.id)
        listening = self._sockets.get(port.id)
        if self._channel is None or (not port.public and token is None):
            return
        if port.kind is PortKind.TCP and listening is None:
            return
        told = channel.Expose(
            id=port.id,
            session=port.session,
            port=port.port,
            kind=port.kind,
            digest=b"" if token is None else hashlib.sha256(token.encode()).digest(),
            sources=port.sources,
        )
        self._channel.send(told, None if listening is None else listening.fileno())

    # -- what others ask --------------------------------------------------------------------

    def find(self, id: str) -> ExposedPort | None:
        """An exposed port by its id."""
        session, _, port = id.rpartition(":")
        return self._exposed.get(session, {}).get(int(port)) if port.isdigit() else None

    def any_of(self, session: str) -> bool:
        """Whether a session has an exposed port, so that its sandbox needs the gateway."""
        return session in self._exposed

    def committed(self, session: Session) -> None:
        """A session's record changed: of a deleted one nothing is exposed, as the database has it
        already."""
        if session.state is SessionState.DELETED:
            for port in self._exposed.pop(session.id, {}).values():
                self._withdraw(port)

    def _withdraw(self, port: ExposedPort) -> None:
        self.answer(channel.Unexpose(port.id))
        self._tokens.pop(port.id, None)
        self._complaints.pop(port.id, None)
        listening = self._sockets.pop(port.id, None)
        if listening is not None:
            listening.close()

    async def listener(self, session: str | None, port: int) -> tuple[str, int] | None:
        """Where an exposed TCP port of a session is listened for on this machine; with None where
        all HTTP ports are. None: nowhere."""
        if session is None:
            await self.serve()
        made = self._sockets.get("" if session is None else f"{session}:{port}")
        if made is None:
            return None
        host, number = made.getsockname()[:2]
        unspecified = ipaddress.ip_address(host).is_unspecified
        return ("127.0.0.1" if unspecified else host), number

    # -- ports nobody exposed ---------------------------------------------------------------

    def on_request(self, decide: Callable[[str, int], Awaitable[Principal | None]]) -> None:
        """Have `decide` asked who exposes a port that a request names by its host; None: nobody.
        What is exposed so is public."""
        self._decide = decide

    async def asked_for(self, session: str, port: int) -> None:
        """A request names a port that is not exposed. Raises what exposing it raises."""
        if self._decide is None or port in self._exposed.get(session, {}):
            return
        who = await self._decide(session, port)
        if who is not None:
            await self.expose(who, session, ExposePort(port=port, public=True))

    async def serve(self) -> str:
        """HOST:PORT below which ports have their names, answered from now on; for whoever exposes
        ports only as requests come. Raises HostUnfit."""
        async with self._changing:
            if "" not in self._sockets:
                try:
                    self._sockets[""] = self._listen_for_http()
                except OSError as error:
                    raise self._deaf(error) from error
                self._send_listener()
                self._starting = asyncio.create_task(self._started(), name="gateway for ports")
        suffix = self._public.suffix(self._http_address()[1])
        return f"{self._public.domain}{suffix}"

    def _http_address(self) -> tuple[str, int]:
        """Host and port where HTTP ports are reached, which is listened at."""
        if self._outside is not None:
            return self._outside.host, self._outside.port
        return self._host, int(self._sockets[""].getsockname()[1])

    async def _started(self) -> None:
        """Requests wait in the listening socket until there is a gateway process."""
        try:
            await self._networks.gateway.need()
        except SojournError as error:
            log.error("ports are not served for now: %s", error)

    def _deaf(self, error: OSError) -> HostUnfit:
        return HostUnfit(
            f"cannot listen on {self._host}: {error.strerror or error}",
            next_step="Correct SOJOURN_PORTS_ADDRESS, or free what holds the address.",
        )

    # -- requests ---------------------------------------------------------------------------

    async def expose(self, who: Principal, ref: str, request: ExposePort) -> PortInfo:
        """Expose a port of a session; as it is where it is exposed so already.

        Raises InvalidRequest, SessionNotFound, Conflict (it is exposed otherwise), QuotaExceeded,
        HostUnfit (nothing can be listened on), Unreachable (no gateway)."""
        sources = check_port(request)
        active = await self._registry.find(who.tenant, ref)
        session = active.session
        async with self._changing:
            known = self._exposed.get(session.id, {})
            there = known.get(request.port)
            if there is not None:
                if (there.kind, there.public) != (request.kind, request.public) or (
                    there.sources != sources
                ):
                    raise Conflict(
                        f"port {request.port} of {session.id} is exposed otherwise already",
                        next_step="Unexpose it first.",
                    )
                return self._info(there)
            if len(known) >= MAX_PORTS:
                raise QuotaExceeded(
                    f"session {session.id} exposes {MAX_PORTS} ports", next_step="Unexpose one."
                )
            await self._networks.gateway.need()
            port = await self._expose(session, request, sources)
        await self._note(who, session, "port.exposed", port)
        await self._apply(active)
        return self._info(port)

    async def _apply(self, active: ActiveSession) -> None:
        """Have a sandbox served that was not, or no longer. Also one that is only starting: what
        was exposed when its start began is all that it knows of."""
        async with active.gate.closed("exposed ports"):
            await self._networks.apply(active)

    async def _expose(
        self, session: Session, request: ExposePort, sources: builtins.list[str]
    ) -> ExposedPort:
        id = f"{session.id}:{request.port}"
        token = sealed = ""
        if not request.public:
            token = random.token_urlsafe(24)
            store = await self._secrets.store()
            box = store.seal(token.encode(), _KIND, session.tenant, session.id, str(request.port))
            sealed = base64.b64encode(box).decode()
        listens_at = None
        try:
            if request.kind is PortKind.TCP and self._registry.taker is not None:
                self._sockets[id] = listening(self._host, 0)
                listens_at = random.choice(CLUSTER_NUMBERS)
            elif request.kind is PortKind.TCP:
                self._sockets[id] = await asyncio.to_thread(self._numbers.listen, self._host)
                listens_at = self._sockets[id].getsockname()[1]
            elif "" not in self._sockets:
                self._sockets[""] = self._listen_for_http()
                self._send_listener()
        except OSError as error:
            raise self._deaf(error) from error
        port = ExposedPort(
            session=session.id,
            port=request.port,
            tenant=session.tenant,
            kind=request.kind,
            public=request.public,
            token=sealed,
            sources=sources,
            listens_at=listens_at,
            created_at=time.time(),
        )
        try:
            port = await self._put(port)
        except BaseException:
            made = self._sockets.pop(id, None)
            if made is not None:
                made.close()
            raise
        if token:
            self._tokens[id] = token
        self._exposed.setdefault(session.id, {})[port.port] = port
        held = self._registry.held(session.id)
        if held is None or held.state is SessionState.DELETED:
            # It went while its port was written down; so did what was written.
            self.committed(msgspec.structs.replace(session, state=SessionState.DELETED))
            raise SessionNotFound(f"session {session.id!r} was deleted")
        self._send(port)
        return port

    async def _put(self, port: ExposedPort) -> ExposedPort:
        """Write a port down; where servers listen, with a number that no other one has."""
        for _ in range(_NUMBER_TRIES):
            try:
                await self._database.put_port(port)
                return port
            except Conflict:
                if port.listens_at is None or self._registry.taker is None:
                    raise
            port = msgspec.structs.replace(port, listens_at=random.choice(CLUSTER_NUMBERS))
        raise HostUnfit(
            "no number is free for another TCP port", next_step="Unexpose some that are not used."
        )

    async def list(self, who: Principal, ref: str) -> builtins.list[PortInfo]:
        """The exposed ports of a session."""
        session = (await self._registry.find(who.tenant, ref)).session
        found = self._exposed.get(session.id, {})
        return [self._info(found[number]) for number in sorted(found)]

    async def unexpose(self, who: Principal, ref: str, number: int) -> None:
        """Expose a port no longer; its open connections end. Raises PortNotFound."""
        active = await self._registry.find(who.tenant, ref)
        session = active.session
        async with self._changing:
            port = self._exposed.get(session.id, {}).get(number)
            if port is None:
                raise PortNotFound(f"session {session.id} does not expose port {number}")
            await self._database.delete_port(session.id, number)
            left = self._exposed.get(session.id, {})
            left.pop(number, None)
            if not left:
                self._exposed.pop(session.id, None)
            self._withdraw(port)
        await self._note(who, session, "port.unexposed", port)
        await self._apply(active)

    async def _note(self, who: Principal, session: Session, kind: str, port: ExposedPort) -> None:
        await self._database.append_event(
            AppendEvent(
                session=session.id,
                kind=kind,
                actor=who.actor,
                result="ok",
                details={"port": port.port, "kind": str(port.kind), "public": port.public},
                before=session.head,
                after=session.head,
            )
        )

    def _info(self, port: ExposedPort) -> PortInfo:
        url = path_url = address = None
        host = self._host if self._outside is None else self._outside.host
        shown = f"[{host}]" if ":" in host else host
        if ipaddress.ip_address(host).is_unspecified:
            # Every address of this host: which one is reached is known outside only.
            domain = self._public.domain
            shown = domain if domain != "localhost" else "127.0.0.1"
        if port.kind is PortKind.TCP:
            address = f"{shown}:{port.listens_at}"
        elif "" in self._sockets:
            number = self._http_address()[1]
            public = self._public
            at = f"{public.domain}{public.suffix(number)}"
            url = f"{public.scheme}://{host_label(port.session, port.port)}.{at}/"
            by_path = at if public.port is not None else f"{shown}:{number}"
            path_url = f"{public.scheme}://{by_path}{path_prefix(port.session, port.port)}/"
        return PortInfo(
            session=port.session,
            port=port.port,
            kind=port.kind,
            public=port.public,
            url=url,
            path_url=path_url,
            address=address,
            token=self._tokens.get(port.id),
            sources=port.sources,
            created_at=port.created_at,
        )


def check_port(request: ExposePort) -> list[str]:
    """The sources of a request in one form. Raises InvalidRequest."""
    if not 1 <= request.port <= 65535:
        raise InvalidRequest(f"{request.port} is no port", field="port")
    if request.kind is PortKind.HTTP:
        if request.sources:
            raise InvalidRequest(
                "sources are for ports of kind tcp; an HTTP port has its token", field="sources"
            )
        return []
    if not request.public:
        raise InvalidRequest(
            "a port of kind tcp has no place for a token",
            next_step="Expose it with public=true, and with `sources` to say to whom.",
            field="public",
        )
    if len(request.sources) > MAX_SOURCES:
        raise InvalidRequest(f"at most {MAX_SOURCES} sources", field="sources")
    try:
        return [str(ipaddress.ip_network(source)) for source in request.sources]
    except ValueError as error:
        raise InvalidRequest(f"no network: {error}", field="sources") from None
