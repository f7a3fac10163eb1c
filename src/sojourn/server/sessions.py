"""The session service: what the routes call, joined from its parts.

Guarantee: that of `sojourn.server.base.SessionService`; each part is wired here once, and a stop
leaves every session to the next server as its policy says.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
from collections.abc import AsyncIterator, Collection

from sojourn.database.writes import AppendEvent
from sojourn.errors import (
    InvalidRequest,
    SnapshotNotFound,
    SojournError,
    StorageFull,
)
from sojourn.model import SessionState
from sojourn.server.accounts import Accounts
from sojourn.server.base import Principal, Usage
from sojourn.server.branches import Branches
from sojourn.server.commands import Commands
from sojourn.server.context import Context
from sojourn.server.exports import Export, Exports
from sojourn.server.files import FileTurn
from sojourn.server.history import History
from sojourn.server.imports import Imports
from sojourn.server.nodes.service import NodeService
from sojourn.server.observing import Observing
from sojourn.server.operations import Operations
from sojourn.server.placements import Placements
from sojourn.server.ports import Ports
from sojourn.server.quotas import Quotas
from sojourn.server.reconciler import Reconciler
from sojourn.server.registry import ActiveSession
from sojourn.server.requests import Requests
from sojourn.server.secrets import Secrets
from sojourn.server.snapshots import Snapshots
from sojourn.server.statuses import Statuses
from sojourn.server.templates import Templates
from sojourn.server.timers import Timers
from sojourn.server.turns import Turns
from sojourn.server.updates import Updates
from sojourn.server.usages import usage
from sojourn.server.verbs import Verbs
from sojourn.server.views import session_info, snapshot_info
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
    UpdateSession,
    VerifyReport,
)
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import Output, ProcessState
from sojourn.wire.networks import NetworkChange

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
        self.node: NodeService | None = None
        """What this service is besides, where there are several nodes."""
        if context.node is not None:
            self.node = NodeService(
                context,
                context.node,
                self._verbs,
                self._snapshots,
                self._placements,
                self._operations,
                self._turns,
            )
            self._operations.know(self.node.bodies)
        self._requests = Requests(
            context, self._operations, self._snapshots, self._turns, self._templates
        )
        self._updates = Updates(context)
        self._statuses = Statuses(context, self._snapshots, self._turns)
        self._commands = Commands(self._turns)
        self._history = History(context, self._snapshots, self._turns)
        self._exports = Exports(context, self._snapshots, self._turns, self._requests)
        self._imports = Imports(context, self._snapshots)
        self._wakes = Wakes(context.database, context.ports, context.registry, self._turns)
        self._observing = Observing(context)
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
        self._observing.start()
        if self.node is not None:
            self.node.work.start()

    async def stop(self) -> None:
        """Finish what runs, put away the sessions whose policy says so, leave the others be. A
        node that was fenced ends its sandboxes: the sessions are others' by now."""
        self._observing.stop()
        await self._wakes.stop()
        await self._timers.stop()
        if self.node is not None:
            await self.node.work.stop()
            if await self.node.end_if_fenced():
                await self._turns.stop()
                await self._context.replicator.stop()
                return
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
        return await self._requests.newest(await self._context.registry.look(who.tenant, ref))

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
        """Tenant and id of every session there is; on a node of several, of those it holds."""
        found: builtins.list[tuple[str, str]] = []
        cursor = None
        holder = self._context.holder
        while True:
            page = await self._context.database.list_sessions(
                None, limit=1000, after=cursor, holder=holder
            )
            found += [(session.tenant, session.id) for session in page.items]
            cursor = page.next
            if cursor is None:
                return found

    async def standing(self, who: Principal, ref: str) -> tuple[str, int]:
        """State and epoch of a session."""
        session = await self._context.registry.look(who.tenant, ref)
        return str(session.state), session.epoch

    async def usage(self, who: Principal, ref: str) -> Usage:
        """What a running session uses."""
        active = await self._context.registry.find(who.tenant, ref)
        return await usage(self._context.sandbox(active))

    async def update(self, who: Principal, ref: str, request: UpdateSession) -> SessionInfo:
        """Change name, labels, limits, policy or network."""
        return self._info(await self._updates.update(who, ref, request))

    async def change_network(self, who: Principal, ref: str, change: NetworkChange) -> SessionInfo:
        """Change of the network what is named."""
        return self._info(await self._updates.change_network(who, ref, change))

    async def keep_alive(self, who: Principal, ref: str, seconds: float) -> SessionInfo:
        """Push the idle deadline out; never in."""
        return self._info(await self._updates.keep_alive(who, ref, seconds))

    # -- verbs ------------------------------------------------------------------------------

    async def pause(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Freeze in memory."""
        return await self._requests.pause(who, ref, key)

    async def suspend(
        self, who: Principal, ref: str, request: SuspendRequest, key: str | None
    ) -> OperationInfo:
        """Put away to storage."""
        return await self._requests.suspend(who, ref, request, key)

    async def resume(
        self, who: Principal, ref: str, key: str | None, *, memory: bool = True
    ) -> OperationInfo:
        """Go on; without `memory` from files alone."""
        return await self._requests.resume(who, ref, key, memory=memory)

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

    async def migrate(
        self, who: Principal, ref: str, node: str | None, key: str | None
    ) -> OperationInfo:
        """Move to another node."""
        return await self._requests.migrate(who, ref, node, key)

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
        self, who: Principal, ref: str, *, after: int, limit: int, kinds: Collection[str] = ()
    ) -> builtins.list[EventInfo]:
        """The event log."""
        return await self._history.events(who, ref, after=after, limit=limit, kinds=kinds)

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

    async def discard_output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> None:
        """Read output that nobody wants."""
        active = await self._context.registry.find(who.tenant, ref)
        if active.state is SessionState.RUNNING:
            async for _ in self._context.sandbox(active).guest.output(process, offsets):
                pass

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
        return await self._statuses.status(who)

    async def durable(
        self, who: Principal, ref: str, snapshot: str | None, timeout: float
    ) -> DurabilityInfo:
        """Wait until a snapshot is in the object store."""
        return await self._statuses.durable(who, ref, snapshot, timeout)
