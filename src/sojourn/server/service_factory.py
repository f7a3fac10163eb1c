"""Wiring: from a data directory to a running session service.

Guarantee: one server at a time owns a data directory (a lock that a killed process cannot leave
behind); what is opened is closed again in reverse, also when a later part fails to open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from sojourn.database import database_place, open_database
from sojourn.database.base import Database
from sojourn.database.records import Role
from sojourn.errors import HostUnfit, NotFound
from sojourn.node import tools
from sojourn.node.agent import NodeAgent
from sojourn.node.isolation.base import Driver
from sojourn.node.isolation.bubblewrap import BubblewrapDriver
from sojourn.node.isolation.gvisor import GVisorDriver
from sojourn.server.catalog import Template
from sojourn.server.context import Context
from sojourn.server.data import data_lock
from sojourn.server.gateways import EgressSettings
from sojourn.server.nodes.identity import NodeIdentity, NodeSettings
from sojourn.server.nodes.starting import start_node
from sojourn.server.port_settings import PortSettings, of_cluster
from sojourn.server.replication import Replicator, StoreSettings
from sojourn.server.secrets import Secrets
from sojourn.server.sessions import Sessions
from sojourn.server.sources import RepositorySource
from sojourn.store.local import LocalStore

log = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
# A stop waits so long for what runs in the background; the next server takes up what did not end.
_STOP_SECONDS = 10.0
# Threads for what blocks. Many may wait for an object store that does not answer, minutes each; by
# the usual number, a few more than processors, they would hold up all other sessions.
_THREADS = 64


def scope_of(data: Path) -> str:
    """What two servers on one machine, which share cgroups and runtime directories, are kept apart
    by; the same after a restart."""
    return hashlib.blake2b(os.fsencode(data.resolve()), digest_size=6).hexdigest()


def make_drivers(data: Path) -> dict[str, Driver]:
    """The drivers this host can run, the default one first. Raises HostUnfit when there is none."""
    scope = scope_of(data)
    drivers: dict[str, Driver] = {}
    reasons = []
    try:
        drivers["gvisor"] = GVisorDriver(tools.runsc_path(), data / "gvisor", scope)
    except HostUnfit as error:
        reasons.append(error.message)
    bwrap = shutil.which("bwrap")
    if bwrap is not None:
        drivers["bubblewrap"] = BubblewrapDriver(Path(bwrap), data / "bubblewrap", scope)
    if not drivers:
        raise HostUnfit(f"no isolation driver works here: {'; '.join(reasons)}")
    return drivers


def _templates(store: LocalStore) -> list[Template]:
    found = []
    for name in tools.template_names():
        root = tools.template_root(name)
        layer = store.adopt_template(root, name)
        found.append(Template(name=name, layer=layer, created_at=root.stat().st_mtime))
    if not found:
        raise HostUnfit("there is no template", next_step="Run `sojourn setup`.")
    return found


@contextlib.asynccontextmanager
async def open_service(
    data: Path,
    objects: StoreSettings | None = None,
    egress: EgressSettings | None = None,
    ports: PortSettings | None = None,
    database_at: str | None = None,
    node: NodeSettings | None = None,
    stop_seconds: float = _STOP_SECONDS,
) -> AsyncIterator[Sessions]:
    """A running session service over a data directory, which is made when it is new. `objects` is
    the object store that makes snapshots durable; None: snapshots stay on this disk only. `egress`
    says how connections of sessions leave, `ports` where exposed ports are reached. `database_at`
    is the path or URL of a database that does not lie in the data directory. `node` says that it is
    one of several nodes with this database and object store. Its end waits for what runs in
    the background, for `stop_seconds` at most.

    Raises HostUnfit, IntegrityError, StorageFull, StoreKeyInvalid, StoreRefused, NodeNotFound.
    """
    if os.geteuid() != 0:
        raise HostUnfit("the node agent must run as root", next_step="Run it as root.")
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    data = data.resolve()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "sojourn"))
    async with contextlib.AsyncExitStack() as opened:
        opened.enter_context(data_lock(data))
        database = await open_database(database_at or data / "sojourn.db")
        opened.push_async_callback(database.close)
        if node is None:
            await database.own()
            await _token(database, data)
        holder = node.id if node is not None else None
        port_settings = ports or PortSettings()
        if node is not None:
            port_settings = await of_cluster(database, port_settings)
        replicator = Replicator(database, objects or StoreSettings(), data / "store", holder)
        opened.push_async_callback(replicator.close)
        await replicator.open()
        _announce(data, replicator)
        source = RepositorySource(replicator.open_repository)
        source.learn(await database.durable_objects(holder=holder))
        store = await asyncio.to_thread(LocalStore, data / "store", source=source)
        templates = await asyncio.to_thread(_templates, store)
        drivers = await asyncio.to_thread(make_drivers, data)
        agent = NodeAgent(
            data / "sandboxes",
            store,
            drivers,
            tools.supervisor_path(),
            default_driver=next(iter(drivers)),
        )
        opened.push_async_callback(agent.close)
        for template in templates:
            agent.trust_template(template.layer)
        identity: NodeIdentity | None = None
        if node is not None:
            identity = await start_node(
                database, data, scope_of(data), node, drivers, agent.committed
            )
            opened.push_async_callback(identity.close)
        context = Context(
            database=database,
            store=store,
            agent=agent,
            templates=templates,
            server=holder or await database.server_id(),
            replicator=replicator,
            source=source,
            secrets=Secrets(database, data),
            egress=egress or EgressSettings(),
            authority=data / "authority",
            data=data,
            port_settings=port_settings,
            node=identity,
        )
        context.database_place = database_place(database_at or data / "sojourn.db")
        opened.push_async_callback(context.ports.close)
        opened.push_async_callback(context.networks.close)
        replicator.attach(store, source, context.guard, agent.in_use)
        # Also what a start that fails half-way has begun.
        opened.push_async_callback(context.settle, stop_seconds)
        service = Sessions(context)
        await service.start()
        opened.push_async_callback(service.stop)
        yield service


def _announce(data: Path, replicator: Replicator) -> None:
    """One line that tells, in a log, which server this is and where its snapshots go."""
    url = replicator.status().url  # one with credentials in it was refused by now
    kind = "encrypted" if replicator.settings.secret is not None else "not encrypted"
    place = "none" if url is None else f"{url} ({kind})"
    log.info("sojourn %s, data in %s, object store: %s", version("sojourn"), data, place)


async def _token(database: Database, data: Path) -> None:
    """Make the operator's token on the first start, readable by the owner alone."""
    path = data / "token"
    if path.exists():
        return
    try:
        tenant = await database.get_tenant(DEFAULT_TENANT)
    except NotFound:
        tenant = await database.create_tenant(DEFAULT_TENANT)
    secret = secrets.token_urlsafe(32)
    temporary = data / ".token.new"
    descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    # The token is valid before it can be read: whoever finds the file can use it.
    await database.create_token(tenant.id, Role.OPERATOR, label="operator", secret=secret)
    temporary.rename(path)
