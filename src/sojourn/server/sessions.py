"""The session service: what the routes call, joined from its parts.

Guarantee: that of `sojourn.server.base.SessionService`; each part is wired here once, and a stop
leaves every session to the next server as its policy says.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import msgspec

from sojourn.database.records import Role
from sojourn.database.writes import AppendEvent, UpdateSession
from sojourn.errors import (
    InvalidRequest,
    SnapshotNotFound,
    SojournError,
    StorageFull,
)
from sojourn.lifecycle import (
    Command,
    Verb,
    decide,
    kept_alive,
    policy_deadlines,
)
from sojourn.model import Limits, SessionState
from sojourn.server.accounts import Accounts
from sojourn.server.base import Principal, Usage
from sojourn.server.branches import Branches
from sojourn.server.checks import (
    MAX_SECONDS,
    check_limits,
    check_map,
    check_name,
    check_policy,
)
from sojourn.server.commands import Commands
from sojourn.server.context import Context
from sojourn.server.exports import Export, Exports
from sojourn.server.files import FileTurn
from sojourn.server.history import History
from sojourn.server.imports import Imports
from sojourn.server.operations import Operations
from sojourn.server.placements import Placements
from sojourn.server.ports import Ports
from sojourn.server.quotas import Quotas, allocated_bytes
from sojourn.server.reconciler import Reconciler
from sojourn.server.registry import ActiveSession
from sojourn.server.requests import Requests
from sojourn.server.secrets import Secrets
from sojourn.server.snapshots import Snapshots
from sojourn.server.templates import Templates
from sojourn.server.timers import Timers
from sojourn.server.turns import Turns
from sojourn.server.usages import usage
from sojourn.server.verbs import Verbs
from sojourn.server.views import durability_info, lies_in, session_info, snapshot_info
from sojourn.server.wakes import Wakes
from sojourn.wire.api import (
    CodeRequest,
    CreateSession,
    DiffInfo,
    DurabilityInfo,
    EffectPage,
    EventInfo,
    ExecRequest,
    ExecResult,
    ForkRequest,
    ObjectStoreInfo,
    OperationInfo,
    SessionInfo,
    SessionPage,
    SnapshotInfo,
    SnapshotRequest,
    SpawnRequest,
    StatusInfo,
    SuspendRequest,
    TemplateInfo,
    TemplateRequest,
    TokenInfo,
    VerifyReport,
)
from sojourn.wire.api import (
    UpdateSession as UpdateRequest,
)
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import Output, ProcessState

log = logging.getLogger(__name__)

# A stop waits no longer than this for each session to be put away; the next server goes on.
_SUSPEND_SECONDS = 120.0


class Sessions:
    """Implements `sojourn.server.base.SessionService`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._accounts = Accounts(context)
        self._snapshots = Snapshots(context)
        self._placements = Placements(context, self._snapshots)
        self._verbs = Verbs(context, self._snapshots, self._placements)
        self._branches = Branches(context, self._snapshots, self._placements)
        self._templates = Templates(context, self._snapshots, self._placements)
        self._operations = Operations(
            context,
            {
                "create": self._verbs.create,
                "pause": self._verbs.pause,
                "resume": self._verbs.resume,
                "snapshot": self._verbs.snapshot,
                "suspend": self._verbs.suspend,
                "delete": self._verbs.delete,
                "rollback": self._branches.rollback,
                "fork": self._branches.fork,
                "promote": self._branches.promote,
                "template": self._templates.from_session,
            },
        )
        self._turns = Turns(context, self._operations, self._snapshots, self._placements)
        self._requests = Requests(
            context, self._operations, self._snapshots, self._turns, self._templates
        )
        self._commands = Commands(self._turns)
        self._history = History(context, self._snapshots, self._turns)
        self._exports = Exports(context, self._snapshots, self._turns, self._requests)
        self._imports = Imports(context, self._snapshots)
        self._wakes = Wakes(context.database, context.ports, context.registry, self._turns)
        self._timers = Timers(
            context, self._operations, self._placements, self._snapshots, Quotas(context)
        )

    @property
    def secrets(self) -> Secrets:
        """Secrets of tenants."""
        return self._context.secrets

    @property
    def ports(self) -> Ports:
        """Exposed ports of sessions."""
        return self._context.ports

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Recover what an earlier server left, then begin the clockwork."""
        reconciler = Reconciler(self._context, self._operations, self._placements, self._snapshots)
        await self._context.networks.recover()
        await self._context.ports.load()
        await reconciler.recover()
        self._snapshots.collect_soon()
        await self._context.replicator.start()
        await self._context.ports.start(self._wakes.received)
        self._timers.start()

    async def stop(self) -> None:
        """Finish what runs, put away the sessions whose policy says so, leave the others be."""
        await self._wakes.stop()
        await self._timers.stop()
        who = Principal(tenant="", actor="server stop", role="operator")
        for active in self._context.registry.all():
            session = active.session
            if session.policy.on_stop != "suspend" or not session.live:
                continue
            try:
                operation = await self._operations.begin(who, active, "suspend", {}, None)
                async with asyncio.timeout(_SUSPEND_SECONDS):
                    await self._operations.complete(operation)
            except TimeoutError:
                log.error("session %s is not put away yet; the next server goes on", session.id)
            except SojournError as error:
                # It runs on and is adopted by the next server: nothing is lost.
                log.warning("session %s is not put away: %s", session.id, error)
                with contextlib.suppress(StorageFull):
                    await self._context.database.append_event(
                        AppendEvent(
                            session=session.id,
                            kind="server.stop",
                            result=error.code,
                            details={"message": error.message},
                            before=session.head,
                            after=session.head,
                        )
                    )
        await self._turns.stop()
        await self._context.replicator.stop()

    async def authenticate(self, token: str | None) -> Principal:
        """Who a token stands for. Raises Unauthenticated."""
        return await self._accounts.authenticate(token)

    # -- sessions ---------------------------------------------------------------------------

    def _info(self, active: ActiveSession) -> SessionInfo:
        return session_info(active.session, self._operations.current(active.id))

    async def create(
        self, who: Principal, request: CreateSession, key: str | None
    ) -> OperationInfo:
        """Make a session and start it."""
        return await self._requests.create(who, request, key)

    async def get(self, who: Principal, ref: str) -> SessionInfo:
        """One session."""
        return await self._requests.newest(await self._context.registry.find(who.tenant, ref))

    async def list(
        self,
        who: Principal,
        *,
        state: str | None,
        labels: dict[str, str],
        limit: int,
        cursor: str | None,
    ) -> SessionPage:
        """A page of sessions, newest first."""
        states = None
        if state is not None:
            try:
                states = {SessionState(word) for word in state.split(",")}
            except ValueError:
                known = ", ".join(SessionState)
                raise InvalidRequest(
                    f"unknown state {state!r} (one of {known})", field="state"
                ) from None
        page = await self._context.database.list_sessions(
            who.tenant, states=states, labels=labels or None, limit=limit, after=cursor
        )
        return SessionPage(
            items=[
                session_info(session, self._operations.current(session.id))
                for session in page.items
            ],
            next=page.next,
        )

    async def every(self) -> builtins.list[tuple[str, str]]:
        """Tenant and id of every session there is."""
        found: builtins.list[tuple[str, str]] = []
        cursor = None
        while True:
            page = await self._context.database.list_sessions(None, limit=1000, after=cursor)
            found += [(session.tenant, session.id) for session in page.items]
            cursor = page.next
            if cursor is None:
                return found

    async def standing(self, who: Principal, ref: str) -> tuple[str, int]:
        """State and epoch of a session."""
        active = await self._context.registry.find(who.tenant, ref)
        return str(active.state), active.session.epoch

    async def usage(self, who: Principal, ref: str) -> Usage:
        """What a running session uses."""
        active = await self._context.registry.find(who.tenant, ref)
        return await usage(self._context.sandbox(active))

    async def update(self, who: Principal, ref: str, request: UpdateRequest) -> SessionInfo:
        """Change name, labels, limits, policy or network."""
        active = await self._context.registry.find(who.tenant, ref)
        changes: dict[str, Any] = {}
        if request.name is not msgspec.UNSET:
            changes["name"] = None if request.name is None else check_name(request.name)
        if request.labels is not msgspec.UNSET:
            changes["labels"] = check_map("labels", request.labels, env=False)
        if request.limits is not msgspec.UNSET:
            changes["limits"] = check_limits(request.limits)
        if request.network is not msgspec.UNSET:
            tenant = active.session.tenant
            changes["network"] = await self._context.networks.check(tenant, request.network)
        async with active.gate.closed("update"):
            decide(active.session, Command(Verb.UPDATE))
            if request.policy is not msgspec.UNSET:
                policy = check_policy(request.policy)
                idle, lifetime = policy_deadlines(active.session, policy, time.time())
                changes |= {"policy": policy, "idle_deadline": idle, "lifetime_deadline": lifetime}
            if not changes:
                return self._info(active)
            event = AppendEvent(
                session=active.id,
                kind="update",
                actor=who.actor,
                result="ok",
                details={"fields": sorted(changes)} | _network_details(changes),
                before=active.session.head,
                after=active.session.head,
            )
            async with self._limited(active, changes.get("limits")):
                await self._context.commit(active, changes, event)
            if "network" in changes:
                await self._context.networks.apply(active)
        return self._info(active)

    @contextlib.asynccontextmanager
    async def _limited(self, active: ActiveSession, limits: Limits | None) -> AsyncIterator[None]:
        """Other limits of the sandbox, if it has one; taken back when what goes with them fails."""
        if limits is None or not active.session.live:
            yield
            return
        sandbox = self._context.sandbox(active)
        update = self._context.agent.update_limits
        await asyncio.to_thread(update, sandbox, limits)
        try:
            yield
        except SojournError:
            await asyncio.to_thread(update, sandbox, active.session.limits)
            raise

    async def keep_alive(self, who: Principal, ref: str, seconds: float) -> SessionInfo:
        """Push the idle deadline out; never in."""
        if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
            raise InvalidRequest("seconds must be a positive number", field="seconds")
        active = await self._context.registry.find(who.tenant, ref)
        async with active.gate.closed("keep-alive"):
            decide(active.session, Command(Verb.KEEP_ALIVE))
            # Deadlines move without passing this object: read the newest.
            current = await self._context.database.get_session(who.tenant, active.id)
            deadline = kept_alive(current, time.time(), seconds)
            if deadline is not None:
                results = await self._context.database.commit(
                    [
                        UpdateSession(
                            id=active.id,
                            expect_state={active.state},
                            expect_epoch=active.session.epoch,
                            changes={"idle_deadline": deadline},
                        )
                    ]
                )
                self._context.registry.update(results[0])
        return self._info(active)

    # -- verbs ------------------------------------------------------------------------------

    async def pause(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Freeze in memory."""
        return await self._requests.pause(who, ref, key)

    async def suspend(
        self, who: Principal, ref: str, request: SuspendRequest, key: str | None
    ) -> OperationInfo:
        """Put away to storage."""
        return await self._requests.suspend(who, ref, request, key)

    async def resume(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Go on."""
        return await self._requests.resume(who, ref, key)

    async def snapshot(
        self, who: Principal, ref: str, request: SnapshotRequest, key: str | None
    ) -> OperationInfo:
        """Take a snapshot now."""
        return await self._requests.snapshot(who, ref, request, key)

    async def rollback(
        self, who: Principal, ref: str, snapshot: str, key: str | None, *, force: bool = False
    ) -> OperationInfo:
        """Continue from another snapshot of the tree."""
        return await self._requests.rollback(who, ref, snapshot, key, force=force)

    async def fork(
        self, who: Principal, ref: str, request: ForkRequest, key: str | None
    ) -> OperationInfo:
        """Start children from now or from a snapshot."""
        return await self._requests.fork(who, ref, request, key)

    async def promote(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Make this fork's state its parent's."""
        return await self._requests.promote(who, ref, key)

    async def delete(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Remove, from whatever state."""
        return await self._requests.delete(who, ref, key)

    async def operation(self, who: Principal, operation: str) -> OperationInfo:
        """One operation."""
        return await self._requests.operation(who, operation)

    async def wait(self, who: Principal, operation: str, timeout: float) -> OperationInfo:
        """Wait for it, at most `timeout` seconds."""
        return await self._requests.wait(who, operation, timeout)

    # -- templates --------------------------------------------------------------------------

    async def templates(self, who: Principal) -> builtins.list[TemplateInfo]:
        """What sessions can start from."""
        return await self._context.catalog.list(who.tenant)

    async def template(self, who: Principal, ref: str) -> TemplateInfo:
        """One template's version."""
        return await self._context.catalog.show(who.tenant, ref)

    async def build_template(
        self,
        who: Principal,
        name: str,
        chunks: AsyncIterator[bytes],
        *,
        tag: str | None,
        source: str | None,
        start: bool,
    ) -> TemplateInfo:
        """Make a version of an image that comes as a tar."""
        return await self._templates.build(who, name, chunks, tag=tag, source=source, start=start)

    async def remove_template(self, who: Principal, ref: str) -> None:
        """Remove a version, or all of a template."""
        await self._templates.remove(who, ref)

    async def make_template(
        self, who: Principal, ref: str, request: TemplateRequest, key: str | None
    ) -> OperationInfo:
        """Make a template of a session's present state."""
        return await self._requests.template(who, ref, request, key)

    # -- history ----------------------------------------------------------------------------

    async def history(self, who: Principal, ref: str) -> builtins.list[SnapshotInfo]:
        """The tree."""
        return await self._history.list(who, ref)

    async def diff(
        self, who: Principal, ref: str, a: str | None, b: str | None, *, text: bool, limit: int
    ) -> DiffInfo:
        """What differs between two snapshots."""
        return await self._history.diff(who, ref, a, b, text=text, limit=limit)

    async def delete_snapshot(self, who: Principal, ref: str, snapshot: str) -> None:
        """Hide a snapshot now, free it when nothing needs it."""
        await self._history.remove(who, ref, snapshot)

    async def verify(self, who: Principal, ref: str, snapshot: str | None) -> VerifyReport:
        """Read and compare every byte."""
        return await self._history.verify(who, ref, snapshot)

    async def events(
        self, who: Principal, ref: str, *, after: int, limit: int
    ) -> builtins.list[EventInfo]:
        """The event log."""
        return await self._history.events(who, ref, after=after, limit=limit)

    async def effects(
        self,
        who: Principal,
        ref: str,
        *,
        all: bool,
        cursor: str | None,
        limit: int,
    ) -> EffectPage:
        """A page of what left the session."""
        active = await self._context.registry.find(who.tenant, ref)
        effects = self._context.networks.effects
        return await effects.page(active.session, all=all, cursor=cursor, limit=limit)

    def follow_events(self, who: Principal, ref: str, *, after: int) -> AsyncIterator[EventInfo]:
        """The event log as it grows."""
        return self._history.follow(who, ref, after=after)

    # -- archives ---------------------------------------------------------------------------

    async def export(
        self, who: Principal, ref: str, snapshot: str | None, secret: bytes | None
    ) -> Export:
        """An archive of a session or snapshot."""
        return await self._exports.export(who, ref, snapshot, secret)

    async def import_(
        self,
        who: Principal,
        chunks: AsyncIterator[bytes],
        *,
        name: str | None,
        expect: str | None,
        secret: bytes | None,
    ) -> SessionInfo:
        """A session from an archive."""
        return await self._imports.import_(who, chunks, name=name, expect=expect, secret=secret)

    # -- commands ---------------------------------------------------------------------------

    async def exec(self, who: Principal, ref: str, request: ExecRequest) -> ExecResult:
        """Run a command to its end."""
        return await self._commands.exec(who, ref, request)

    def exec_stream(
        self, who: Principal, ref: str, request: ExecRequest
    ) -> AsyncIterator[ProcessState | Output]:
        """Run a command, output as it comes."""
        return self._commands.exec_stream(who, ref, request)

    async def spawn(
        self, who: Principal, ref: str, request: SpawnRequest, *, tag: str = "spawn"
    ) -> ProcessState:
        """Start a process that goes on by itself."""
        return await self._commands.spawn(who, ref, request, tag=tag)

    async def processes(self, who: Principal, ref: str) -> builtins.list[ProcessState]:
        """All processes the supervisor knows."""
        return await self._commands.processes(who, ref)

    async def process(self, who: Principal, ref: str, process: int) -> ProcessState:
        """One process."""
        return await self._commands.process(who, ref, process)

    async def wait_process(
        self, who: Principal, ref: str, process: int, timeout: float
    ) -> ProcessState:
        """Wait for its end."""
        return await self._commands.wait(who, ref, process, timeout)

    def output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> AsyncIterator[Output]:
        """Its output."""
        return self._commands.output(who, ref, process, offsets)

    async def write_stdin(self, who: Principal, ref: str, process: int, data: bytes) -> None:
        """Write to its input."""
        await self._commands.write_stdin(who, ref, process, data)

    async def close_stdin(self, who: Principal, ref: str, process: int) -> None:
        """End its input."""
        await self._commands.close_stdin(who, ref, process)

    async def signal(
        self, who: Principal, ref: str, process: int, signal: int, group: bool
    ) -> None:
        """Send a signal."""
        await self._commands.signal(who, ref, process, signal, group)

    async def resize(self, who: Principal, ref: str, process: int, rows: int, columns: int) -> None:
        """Resize its terminal."""
        await self._commands.resize(who, ref, process, rows, columns)

    async def run_code(self, who: Principal, ref: str, request: CodeRequest) -> CodeResult:
        """Run code in the persistent interpreter."""
        return await self._commands.run_code(who, ref, request)

    def files(self, who: Principal, ref: str, what: str, *, mutates: bool) -> FileTurn:
        """Access to files as one turn."""
        return FileTurn(self._turns, who, ref, what, mutates)

    async def begin_turn(self, who: Principal, ref: str, label: str | None) -> str:
        """Begin a group of calls that is one turn."""
        return await self._turns.begin(who, ref, label)

    async def end_turn(self, who: Principal, ref: str, turn: str) -> SnapshotInfo | None:
        """End it; the snapshot that was taken."""
        head = await self._turns.end(who, ref, turn)
        if head is None:
            return None
        try:
            return snapshot_info(await self._context.database.get_snapshot(who.tenant, head), head)
        except SnapshotNotFound:
            return None  # removed since

    # -- service ----------------------------------------------------------------------------

    async def create_token(self, who: Principal, tenant: str) -> TokenInfo:
        """A token for a tenant, which is made when it is new."""
        return await self._accounts.create(who, tenant)

    async def tokens(self, who: Principal) -> builtins.list[TokenInfo]:
        """All valid tokens, without their secrets."""
        return await self._accounts.list(who)

    async def revoke_token(self, who: Principal, token: str) -> None:
        """End a token's validity at once."""
        await self._accounts.revoke(who, token)

    async def status(self, who: Principal) -> StatusInfo:
        """The server at a glance."""
        context = self._context
        tenant = None if who.role == Role.OPERATOR else who.tenant
        counts = await context.database.count_sessions(tenant)
        directory = context.agent.directory
        usage = shutil.disk_usage(directory)
        return StatusInfo(
            version=version("sojourn"),
            node=context.node,
            drivers={
                name: sorted(driver.capabilities) for name, driver in context.agent.drivers.items()
            },
            sessions={str(state): count for state, count in counts.items()},
            sandboxes=context.agent.count,
            disk_free_bytes=usage.free,
            store_bytes=await asyncio.to_thread(allocated_bytes, context.store.root),
            objects=await self._objects(tenant),
            gateway=context.networks.gateway.info() if tenant is None else None,
        )

    async def _objects(self, tenant: str | None) -> ObjectStoreInfo | None:
        replicator = self._context.replicator
        if replicator.settings.url is None:
            return None
        status = replicator.status()
        now = time.time()
        behind = [
            durability_info(one, now)
            for one in await self._context.database.durability(tenant)
            if one.waiting
        ]
        return ObjectStoreInfo(
            # The operator's business, as are other tenants' sessions.
            url=(status.url or "") if tenant is None else "",
            waiting=sum(one.waiting for one in behind),
            lag=max((one.lag for one in behind), default=0.0),
            sent_bytes=status.sent_bytes if tenant is None else 0,
            error=status.error if tenant is None else status.error and "the store is behind",
            sessions=behind,
            in_data=lies_in(status.url, self._context.store.root.parent),
        )

    async def durable(
        self, who: Principal, ref: str, snapshot: str | None, timeout: float
    ) -> DurabilityInfo:
        """Wait until a session's head (or another of its snapshots) is in the object store; 0
        seconds only look. Raises StoreUnreachable when it is not in time."""
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        name = snapshot if snapshot is not None else active.session.head
        durable_at = None
        if timeout > 0 and name is not None:
            record = await self._snapshots.resolve(active.session, name)
            record = await self._context.replicator.durable(record.id, timeout)
            durable_at = record.durable_at
        now = time.time()
        for found in await self._context.database.durability(active.session.tenant):
            if found.session == active.id:
                shown = durability_info(found, now)
                return msgspec.structs.replace(shown, durable_at=durable_at)
        return DurabilityInfo(active.id, active.session.head, False, 0, 0.0, None)


def _network_details(changes: dict[str, Any]) -> dict[str, Any]:
    """What an event tells of a new network policy."""
    policy = changes.get("network")
    return {} if policy is None else {"network": msgspec.to_builtins(policy)}
