"""What the parts of the session service share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sojourn.database.base import Database
from sojourn.database.writes import UpdateSession, Write
from sojourn.errors import (
    OutcomeUnknown,
    SandboxLost,
    SessionNotFound,
    SojournError,
    StaleEpoch,
    WrongState,
)
from sojourn.model import Limits, Session, SessionState
from sojourn.model.nodes import summed
from sojourn.node.agent import NodeAgent
from sojourn.node.sandboxes import Sandbox
from sojourn.server.catalog import Catalog, Template
from sojourn.server.gateways import EgressSettings
from sojourn.server.guards import StoreGuard
from sojourn.server.manifests import Manifests
from sojourn.server.networks import Networks
from sojourn.server.nodes.identity import NodeIdentity
from sojourn.server.port_settings import PortSettings
from sojourn.server.ports import Ports
from sojourn.server.registry import ActiveSession, Registry
from sojourn.server.replication import Replicator
from sojourn.server.secrets import Secrets
from sojourn.server.sources import RepositorySource
from sojourn.store.base import Store

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0


class Context:
    """The server's parts, wired once by `service_factory`. `node` is who this server is where there
    are several nodes; None: it is alone."""

    node: NodeIdentity | None = None
    database_place: str | None = None
    """Where the database is, as the operator is told."""

    def __init__(
        self,
        *,
        database: Database,
        store: Store,
        agent: NodeAgent,
        templates: Sequence[Template],
        server: str,
        replicator: Replicator,
        source: RepositorySource,
        secrets: Secrets,
        egress: EgressSettings,
        authority: Path,
        data: Path,
        port_settings: PortSettings,
        node: NodeIdentity | None = None,
    ) -> None:
        self.database = database
        self.store = store
        self.agent = agent
        self.manifests = Manifests(database, store, source, replicator, several=node is not None)
        self.catalog = Catalog(database, self.manifests, templates)
        self.server = server
        self.replicator = replicator
        self.source = source
        self.node = node
        self.registry = Registry(database, replicator.changed)
        self.secrets = secrets
        self.networks = Networks(
            agent=agent,
            registry=self.registry,
            database=database,
            secrets=secrets,
            settings=egress,
            authority=authority,
        )
        self.ports = Ports(database, self.registry, secrets, data, port_settings, self.networks)
        self.networks.exposed = self.ports.any_of
        self.networks.gateway.channel = self.ports.new_channel
        if node is not None:
            self.networks.gateway.lease = node.watchdog.path
        self.registry.watch(self.ports.committed)
        self.guard = StoreGuard()
        agent.standing = lambda: not self.may_act
        self._chores: set[asyncio.Task[Any]] = set()

    @property
    def holder(self) -> str | None:
        """Who holds the sessions of this server; None where it is alone."""
        return self.node.id if self.node is not None else None

    @property
    def node_name(self) -> str:
        """The machine, as sessions and the status name it."""
        return self.node.id if self.node is not None else "local"

    def require_lease(self) -> None:
        """Raise NodeUnavailable where this node may not act now."""
        if self.node is not None:
            self.node.lease.require()

    def require_room(self, wanted: Limits, but: str | None = None) -> None:
        """Raise CapacityExhausted where this node has no room for one more sandbox, beside those of
        all sessions that run or are being created but one. Of those that are being created the
        first ones get what there is: they must not keep each other out."""
        if self.node is None:
            return
        own = self.registry.held(but) if but is not None else None
        creating = own is not None and own.state is SessionState.CREATING

        def counts(active: ActiveSession) -> bool:
            if active is own:
                return False
            if active.state is not SessionState.CREATING:
                return active.session.live
            return own is None or not creating or _came(active) < _came(own)

        running = [active.session.limits for active in self.registry.all() if counts(active)]
        self.node.require_room(summed(running), wanted)

    @property
    def losses(self) -> int:
        """How often the lease was over: what was seen of a sandbox while it was says nothing."""
        return self.node.lease.losses if self.node is not None else 0

    @property
    def may_act(self) -> bool:
        """Whether this server may act: it is alone, or holds its lease."""
        return self.node is None or self.node.lease.held

    def sandbox(self, active: ActiveSession) -> Sandbox:
        """The running sandbox of a session. Raises WrongState, SandboxLost."""
        session = active.session
        if session.sandbox is None:
            raise WrongState(f"session {session.id} is {session.state} and has no sandbox")
        found = self.agent.find(session.sandbox, session.epoch)
        if not found.frozen and found.guest.lost is not None:
            # Its kernel may live, but nobody can use it.
            raise SandboxLost(found.guest.lost)
        return found

    async def commit(
        self, active: ActiveSession, changes: dict[str, Any], *also: Write, durable: bool = True
    ) -> Session:
        """Change a session's record by compare-and-swap on its present state and epoch, together
        with other writes. Raises StaleEpoch, WrongState; nothing is changed then.
        OutcomeUnknown: it may be."""
        session = active.session
        update = UpdateSession(
            id=session.id,
            expect_state={session.state},
            expect_epoch=session.epoch,
            changes=changes,
        )
        try:
            results = await self.database.commit([*also, update], durable=durable)
        except OutcomeUnknown:
            # Whoever takes hold of the session next waits until it is known what it is now.
            before, name = active.gate.settling, f"what became of {session.id}"
            active.gate.settling = self.soon(self._settle_record(session, before), name)
            raise
        except StaleEpoch:
            if self.node is not None:
                await self.refresh(active)
            raise
        updated = results[-1]
        assert isinstance(updated, Session)
        self.registry.update(updated)
        return updated

    async def refresh(self, active: ActiveSession) -> None:
        """Read a session's record again that somebody else changed: it may be another node's by
        now."""
        try:
            session = await self.database.get_session(None, active.id)
        except SessionNotFound:
            self.registry.drop(active)
            return
        if session.holder == self.holder:
            self.registry.update(session)
        else:
            self.registry.leave(active, session)

    async def _settle_record(self, held: Session, before: asyncio.Task[Any] | None) -> None:
        """Hold what the database has of a session, as soon as that can be read."""
        if before is not None:
            await asyncio.wait({before})
        try:
            session = await self.recorded(held.id)
        except SessionNotFound:
            gone = {"state": SessionState.DELETED, "sandbox": None, "node": None}
            self.registry.update(msgspec.structs.replace(held, **gone))
            if held.sandbox is not None:
                self.agent.destroy_soon(held.sandbox)
            return
        active = self.registry.held(held.id)
        if session.holder == self.holder:
            self.registry.update(session)
        elif active is not None:
            self.registry.leave(active, session)

    async def recorded(self, id: str) -> Session:
        """What the database has of a session, as soon as that can be read. Raises
        SessionNotFound."""
        while True:
            try:
                return await self.database.get_session(None, id)
            except SessionNotFound:
                raise
            except SojournError as error:
                log.warning("session %s: what it is now is not known: %s", id, error)
                await asyncio.sleep(_AGAIN_SECONDS)

    def soon(self, work: Any, name: str) -> asyncio.Task[Any]:
        """Run a coroutine in the background; the server waits for it when it stops."""
        task: asyncio.Task[Any] = asyncio.create_task(work, name=name)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def settle(self, seconds: float) -> None:
        """Wait for what runs in the background; what takes longer is cancelled."""
        try:
            async with asyncio.timeout(seconds):
                while self._chores:
                    await asyncio.wait(list(self._chores))
        except TimeoutError:
            for chore in list(self._chores):
                chore.cancel()
            await asyncio.gather(*list(self._chores), return_exceptions=True)


def _came(active: ActiveSession) -> tuple[float, str]:
    """The order in which sessions were made."""
    return active.session.created_at, active.id
