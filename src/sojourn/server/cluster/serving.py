"""A server of a cluster, from its settings to its end.

Guarantee: it keeps nothing that matters: any number of servers serve one cluster, each may end at
any time, and another one takes up what it did. It starts only with the cluster's key. A stop cuts
off streams first, which clients take up at another server, and lets what is short come to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from sojourn.database import open_database
from sojourn.database.base import Database
from sojourn.database.records import Role
from sojourn.errors import (
    Conflict,
    HostUnfit,
    InvalidRequest,
    NameTaken,
    NotFound,
    SojournError,
    Unauthenticated,
)
from sojourn.model.ids import new_id
from sojourn.model.paths import token_file
from sojourn.server.answers import Shutdown
from sojourn.server.app import all_endpoints, published_address, serve_app
from sojourn.server.cluster import pki, scheduler
from sojourn.server.cluster.administration import Administration, joining_app, own_app
from sojourn.server.cluster.callers import Callers
from sojourn.server.cluster.failover import GRACE_SECONDS, Failover
from sojourn.server.cluster.front import Front
from sojourn.server.cluster.joining import Joining
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.observing import observing
from sojourn.server.cluster.ports import ClusterPorts
from sojourn.server.cluster.queueing import PATIENCE_SECONDS, Admissions
from sojourn.server.cluster.rooms import Rooms
from sojourn.server.cluster.targets import Targets
from sojourn.server.cluster.upstream import Upstream
from sojourn.server.cluster.values import ClusterValues, open_values
from sojourn.server.health_listener import health_listener
from sojourn.server.listening import listen
from sojourn.server.nodes.lease import LEASE_SECONDS
from sojourn.server.observed import Observed, by_token
from sojourn.server.port_settings import PortSettings
from sojourn.server.route_patterns import RoutePatterns
from sojourn.store.copying import write_whole

log = logging.getLogger(__name__)

DEFAULT_TENANT = "default"


class ServerSettings(msgspec.Struct, frozen=True):
    """`listen` is where clients ask, over HTTP; `nodes_listen` where machines join, over TLS, and
    `nodes_url` how they reach that. `data` holds the server's address and the operator's token for
    clients of this host, and nothing else; `token_file` the token where it is given."""

    database: str
    store: str
    cluster_key: bytes
    data: Path
    listen: str
    nodes_listen: str
    nodes_url: str | None = None
    store_key: bytes | None = None
    token_file: Path | None = None
    ports: PortSettings = PortSettings()
    placing: scheduler.Settings = scheduler.Settings()
    patience: float = PATIENCE_SECONDS
    lease: float = LEASE_SECONDS
    grace: float = GRACE_SECONDS
    health: str | None = None

    def __repr__(self) -> str:
        return "ServerSettings()"


class _Stopping(Shutdown):
    """A stop that begins at the front."""

    def __init__(self) -> None:
        super().__init__()
        self.front: Front | None = None

    def begin(self) -> None:
        if self.front is not None:
            self.front.begin_stop()
        super().begin()


def run_server(settings: ServerSettings) -> None:
    """Serve in this process until SIGTERM or SIGINT, saying `ready URL` on standard output."""
    import uvloop

    def ready(url: str, nodes_url: str) -> None:
        log.info("nodes join at %s", nodes_url)
        sys.stdout.write(f"ready {url}\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, ready))


async def serve(settings: ServerSettings, ready: Callable[[str, str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `ready` gets the URL of clients and the one of nodes.

    Raises HostUnfit, InvalidRequest, SecretsKeyInvalid, Unreachable."""
    if not settings.database.startswith(("postgresql://", "postgres://")):
        raise InvalidRequest(
            "a cluster needs a PostgreSQL database",
            next_step="Give --database postgresql://USER@HOST/NAME, or use `sojourn up`.",
            field="database",
        )
    async with contextlib.AsyncExitStack() as stack:
        found, url = listen(settings.listen)
        stack.callback(found.close)
        joining, joining_url = listen(settings.nodes_listen)
        stack.callback(joining.close)
        nodes_url = settings.nodes_url or _nodes_url(joining_url)
        database = await open_database(settings.database)
        stack.push_async_callback(database.close)
        values = await open_values(database, settings.cluster_key)
        await operator_token(database, settings.data, settings.token_file)
        name = new_id("srv")
        credentials = values.authority.server_credentials(name)
        upstream_context = pki.upstream_context(credentials)
        tunnel_context = pki.upstream_context(credentials, pki.TUNNEL_PROTOCOL)
        joining_context = pki.joining_context(credentials)
        renewing = asyncio.create_task(
            _renew(values, name, [upstream_context, tunnel_context, joining_context]),
            name="server certificate",
        )
        stack.push_async_callback(_cancel, renewing)
        upstream = Upstream(upstream_context)
        stack.callback(upstream.close)
        members = Members(database)
        rooms = Rooms(database, members, upstream)
        admissions = Admissions(members, settings.placing, rooms.evict, patience=settings.patience)
        stack.push_async_callback(admissions.stop)
        targets = Targets(database, members, admissions)
        rooms.attach(targets, admissions)
        callers = Callers(database)
        administration = Administration(
            database,
            callers,
            members,
            upstream,
            Joining(
                database,
                values,
                database_url=settings.database,
                store=settings.store,
                store_key=settings.store_key,
                url=nodes_url,
            ),
        )
        stopping = _Stopping()
        own = own_app(administration, stopping)
        front = Front(own, callers, targets, members, upstream, rooms)
        stopping.front = front
        await members.start()
        stack.push_async_callback(members.stop)
        ports = ClusterPorts(database, members, targets, upstream, tunnel_context, settings.ports)
        await ports.start()
        stack.push_async_callback(ports.stop)
        front.ports_changed = ports.refresh
        failover = Failover(database, lease=settings.lease, grace=settings.grace)
        failover.start()
        stack.push_async_callback(failover.stop)
        await stack.enter_async_context(
            health_listener(settings.health, lambda: not stopping.stopping)
        )
        publish = stack.enter_context(published_address(settings.data, url))
        stack.enter_context(observing(database, members, admissions))
        patterns = RoutePatterns(one.path for one in all_endpoints())
        observed = Observed(front, by_token(callers.authenticate), patterns.find)

        def answering() -> None:
            publish()
            ready(url, nodes_url)

        server = serve_app(observed, stopping, answering)
        nodes_server = serve_app(
            joining_app(administration, stopping), Shutdown(), context=joining_context
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, number, server, nodes_server)
            stack.callback(loop.remove_signal_handler, number)
        log.info("server %s of the cluster %s", name, values.authority.fingerprint[:16])
        await asyncio.gather(server.serve(sockets=[found]), nodes_server.serve(sockets=[joining]))


def _stop(number: int, *servers: object) -> None:
    for server in servers:
        server.handle_exit(number, None)  # type: ignore[attr-defined]


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _renew(values: ClusterValues, name: str, contexts: list[ssl.SSLContext]) -> None:
    """Certificates of servers are short; connections from then on show the next one."""
    while True:
        await asyncio.sleep(pki.RENEW_SERVER_SECONDS)
        credentials = values.authority.server_credentials(name)
        for context in contexts:
            pki.load_credentials(context, credentials)


def _nodes_url(url: str) -> str:
    """How nodes reach an address that is listened at."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("0.0.0.0", "::"):
        host = socket.getfqdn()
    shown = f"[{host}]" if ":" in host else host
    return f"https://{shown}:{parts.port}"


async def operator_token(database: Database, data: Path, given: Path | None) -> None:
    """Have an operator's token: the one in a file that is given, else one of this server's own
    that is made at its first start. Raises HostUnfit, InvalidRequest."""
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = given or token_file(data)
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        if given is not None:
            raise HostUnfit(
                f"the token file {given} is not there", next_step="Correct SOJOURN_TOKEN_FILE."
            ) from None
        secret = secrets.token_urlsafe(32)
        await _register(database, secret)
        # The token is valid before it can be read: whoever finds the file can use it.
        write_whole(path, f"{secret}\n".encode(), 0o600)
        return
    except OSError as error:
        raise HostUnfit(f"the token file {path} cannot be read: {error.strerror}") from error
    await _register(database, secret)


async def _register(database: Database, secret: str) -> None:
    for _ in range(3):
        try:
            known = await database.verify_token(secret)
        except Unauthenticated:
            pass
        else:
            if known.role is not Role.OPERATOR:
                raise Conflict("the operator's token is another tenant's already")
            return
        try:
            tenant = await database.get_tenant(DEFAULT_TENANT)
        except NotFound:
            with contextlib.suppress(NameTaken):  # another server was first
                await database.create_tenant(DEFAULT_TENANT)
            tenant = await database.get_tenant(DEFAULT_TENANT)
        try:
            await database.create_token(tenant.id, Role.OPERATOR, label="operator", secret=secret)
        except InvalidRequest:
            raise
        except SojournError as error:
            # Another server may just have made it; that is seen at the next look.
            log.info("the operator's token is not made yet: %s", error)
            await asyncio.sleep(0.1)
            continue
        return
    raise HostUnfit("the operator's token cannot be registered", next_step="See the server's log.")


def environment_number(name: str, default: float) -> float:
    """A number from the environment. Raises InvalidRequest."""
    text = os.environ.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 86400:
        raise InvalidRequest(f"{name} is {text!r}, not a number of seconds", field=name)
    return number
