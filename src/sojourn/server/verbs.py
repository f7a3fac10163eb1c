"""The verbs of one session: create, pause, suspend, resume, snapshot, delete.

Guarantee: each body can begin again after a crash from what its steps recorded, and ends in one
commit that changes the session, the tree, the operation and the event log together. A suspend
that was not sealed leaves the session running; one that was sealed is finished, not undone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from sojourn import faultpoints
from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import AppendEvent, InsertSnapshot, SettleEffects, Write
from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    SandboxLost,
    SojournError,
    StorageFull,
    Unreachable,
    Unsupported,
)
from sojourn.lifecycle import Command, Verb, decide, expired, settled_deadline
from sojourn.model import LayerRef, Session, SessionState, Snapshot, SnapshotKind
from sojourn.model.snapshots import SnapshotConfig
from sojourn.node import captures, hooks
from sojourn.node.isolation.base import Capability
from sojourn.server.context import Context
from sojourn.server.operations import Run
from sojourn.server.placements import Placements, hook_events, suspended_changes
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots
from sojourn.server.views import snapshot_info
from sojourn.wire.guest import ProcessSpec

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_ABORT_SECONDS = 0.2


class SealPlan(msgspec.Struct, frozen=True):
    """What is left to do of a sealed sandbox: recorded before it is ended. `taken_at` is when it
    still ran."""

    sandbox: str
    snapshot: Snapshot
    layer: LayerRef | None
    taken_at: float | None = None


class Verbs:
    """Bodies of operations on a single session."""

    def __init__(self, context: Context, snapshots: Snapshots, placements: Placements) -> None:
        self._context = context
        self._snapshots = snapshots
        self._placements = placements

    # -- create -----------------------------------------------------------------------------

    async def create(self, run: Run) -> None:
        """Start a session from its template; its first snapshot is the template itself."""
        active = run.active
        async with active.gate.closed("create"):
            session = active.session
            decide(session, Command(Verb.CREATE))
            record: SnapshotRecord | None = None
            try:
                base = await self._base(run, session)
                record = await self._snapshots.publish(base, session.tenant)
                await self._placements.place(
                    run,
                    active,
                    base,
                    {"head": base.id},
                    InsertSnapshot(record),
                    run.finish(None),
                    run.event(after=base.id, template=session.template, name=session.name),
                )
                await self._start_command(active, base)
            except Exception as error:
                # Whatever it was, the session must not stay `creating` with nobody at work on it.
                cause = error.message if isinstance(error, SojournError) else repr(error)
                kept = {"head": record.id} if record is not None else {}
                await self._context.commit(
                    active,
                    {"state": SessionState.FAILED, "cause": cause, "sandbox": None, **kept},
                    *([InsertSnapshot(record)] if record is not None else []),
                )
                raise

    async def _start_command(self, active: ActiveSession, base: Snapshot) -> None:
        """Start what a template's image is for, where the template says so. The session is there
        whether it starts or not; the event log tells."""
        image = base.config.image
        argv = [*image.entrypoint, *image.cmd] if image is not None and image.start else []
        if not argv or base.memory is not None:
            return  # with memory it runs already, or was ended by whoever made the template
        details: dict[str, Any] = {"argv": argv}
        result = "ok"
        try:
            sandbox = self._context.sandbox(active)
            cwd = base.config.cwd
            state = await sandbox.guest.start(
                ProcessSpec(
                    argv=[os.fsencode(word) for word in argv],
                    env={
                        os.fsencode(name): os.fsencode(value)
                        for name, value in sandbox.environment.items()
                    },
                    cwd=os.fsencode(cwd) if cwd else None,
                    user=base.config.user,
                    tag="command",
                )
            )
            details["process"] = state.id
        except SojournError as error:
            result = error.code
            details["message"] = error.message
            log.warning("session %s: its template's command: %s", active.id, error.message)
        await self._context.database.append_event(
            AppendEvent(
                session=active.id,
                kind="command.start",
                result=result,
                details=details,
                before=base.id,
                after=base.id,
            )
        )

    async def _base(self, run: Run, session: Session) -> Snapshot:
        """The first snapshot of a session: what its template holds, running processes too."""
        template = await self._context.catalog.find(session.tenant, session.template)
        told = template.config
        config = SnapshotConfig(
            template=template.name,
            env=session.env,
            user=run.request.get("user") or (told.user if told else "root"),
            # Without one: the home of whoever runs a command.
            cwd=run.request.get("cwd") or (told.cwd if told else ""),
            hostname=session.name or "sandbox",
            base_layers=len(template.layers) or 1,
            image=told.image if told else None,
        )
        layers = template.layers or [template.layer]
        for layer in layers:
            self._context.agent.know_template(layer)
        return self._snapshots.manifest(session, config, layers, template.memory, SnapshotKind.BASE)

    # -- pause and resume -------------------------------------------------------------------

    async def pause(self, run: Run) -> None:
        """Freeze in memory. What streams ends typed, to be attached again."""
        active = run.active
        async with active.gate.closed("pause"):
            if active.state is SessionState.PAUSED:
                await self._done(run, {})
                return
            decide(active.session, Command(Verb.PAUSE))
            await self._placements.require_held(active)
            sandbox = self._context.sandbox(active)
            if not sandbox.has(Capability.FREEZE):
                raise Unsupported(f"driver {sandbox.driver.name} cannot freeze on this host")
            await captures.pause(sandbox)
            faultpoints.reach("pause.freeze")
            try:
                await self._done(run, {"state": SessionState.PAUSED})
            except SojournError:
                await sandbox.thaw()
                raise
            await sandbox.guest.interrupt("the session was paused")

    async def resume(self, run: Run) -> None:
        """Go on where the session stopped: thaw, or start from the head snapshot."""
        active = run.active
        async with active.gate.closed("resume"):
            if active.state is SessionState.RUNNING and await self._placements.check_held(active):
                await self._done(run, {})
                return
            if active.state is SessionState.PAUSED and await self._placements.check_held(active):
                try:
                    await self._context.sandbox(active).thaw()
                    await self._context.networks.thawed(active.session)
                except SandboxLost as error:
                    await self._placements.lost(active, error.message)
                else:
                    faultpoints.reach("resume.thaw")
                    now = time.time()
                    deadline = settled_deadline(active.session, SessionState.RUNNING, now)
                    await self._done(
                        run, {"state": SessionState.RUNNING, "idle_deadline": deadline}
                    )
                    return
            decide(active.session, Command(Verb.RESUME))
            session = active.session
            try:
                head = await self._snapshots.head(session)
                files_only = head.memory is not None and not run.request.get("memory", True)
                told: dict[str, Any] = {}
                if files_only:
                    told = {"memory": False}
                    head = msgspec.structs.replace(head, memory=None)
                await self._placements.place(
                    run,
                    active,
                    head,
                    {},
                    run.finish(None),
                    run.event(before=session.head, after=session.head, **told),
                )
                # It is not what its head says: a snapshot or fork of now is taken anew.
                active.dirty = files_only
            except SojournError as error:
                await self._placements.fail(active, error)
                raise

    async def _done(self, run: Run, changes: dict[str, Any]) -> None:
        """Finish a verb that keeps the head."""
        head = run.active.session.head
        await self._context.commit(
            run.active,
            changes or {"updated_at": time.time()},
            run.finish(None),
            run.event(before=head, after=head),
        )

    # -- snapshot ---------------------------------------------------------------------------

    async def snapshot(self, run: Run) -> None:
        """Take a snapshot now; of a suspended session, give its state another label."""
        active = run.active
        label = run.request.get("label")
        memory = bool(run.request.get("memory", True))
        async with active.gate.closed("snapshot"):
            decide(active.session, Command(Verb.SNAPSHOT))
            await self._placements.require_held(active)
            if active.session.live:
                sandbox = self._context.sandbox(active)
                if memory and not sandbox.has(Capability.LIVE_CHECKPOINT):
                    memory = False
                async with self._context.guard.publishing():
                    taken_at = time.time()
                    captured = await captures.capture_live(sandbox, memory=memory)
                    faultpoints.reach("snapshot.capture")
                    await self._add(
                        run,
                        captured.layers,
                        captured.memory,
                        label,
                        sandbox.record.config,
                        taken_at=taken_at,
                    )
            else:
                async with self._context.guard.publishing():
                    head = await self._snapshots.head(active.session)
                    kept = head.memory if memory else None
                    await self._add(run, head.layers, kept, label, head.config)
            # Of what is in memory, files alone keep nothing.
            active.dirty = (
                active.session.live
                and not memory
                and self._context.sandbox(active).has(Capability.LIVE_CHECKPOINT)
            )

    async def _add(
        self,
        run: Run,
        layers: list[LayerRef],
        memory: Any,
        label: str | None,
        config: SnapshotConfig,
        *,
        taken_at: float | None = None,
    ) -> None:
        active = run.active
        session = active.session
        snapshot = self._snapshots.manifest(
            session, config, layers, memory, SnapshotKind.EXPLICIT, label=label
        )
        record = await self._snapshots.publish(snapshot, session.tenant)
        faultpoints.reach("snapshot.publish")
        await self._snapshots.make_head(
            active,
            record,
            run.finish(snapshot_info(record, snapshot.id)),
            run.event(
                before=session.head, after=snapshot.id, label=label, memory=memory is not None
            ),
            taken_at=taken_at,
        )

    # -- suspend ----------------------------------------------------------------------------

    async def suspend(self, run: Run) -> None:
        """Put the session away: no process of it is left on the machine."""
        active = run.active
        async with active.gate.closed("suspend"):
            if run.data.get("plan") is not None:
                await self._finish_seal(run)
                return
            if active.state is SessionState.SUSPENDED or not await self._due(run):
                await self._done(run, {})
                return
            decide(active.session, Command(Verb.SUSPEND))
            if not await self._placements.check_held(active):
                await self._done(run, {})
                return
            memory = bool(run.request.get("memory", True))
            sandbox = self._context.sandbox(active)
            if not sandbox.has(Capability.MEMORY):
                memory = False
            if not sandbox.frozen:  # nothing runs in a paused one
                runs = await hooks.run(
                    sandbox.guest,
                    hooks.PRE_SUSPEND,
                    "suspend",
                    environment=sandbox.environment,
                )
                if events := hook_events(active, runs, run):
                    await self._context.database.commit(events, durable=False)
            try:
                await self.seal(run, memory)
            except CaptureRefused:
                if not run.request.get("force"):
                    raise
                await self.seal(run, False)
            await self._finish_seal(run)

    async def _due(self, run: Run) -> bool:
        """Whether a suspension for a deadline still is: it may have been moved out meanwhile, and
        what was moved out and acknowledged must hold."""
        if not run.request.get("deadline"):
            return True
        newest = await self._context.database.get_session(None, run.active.id)
        return expired(newest, time.time(), busy=run.active.busy) is not None

    async def seal(self, run: Run, memory: bool) -> None:
        """Capture everything of a sandbox and record durably how to end it; it stays frozen.

        Raises like `captures.capture_final`; the session runs on then.
        """
        active = run.active
        sandbox = self._context.sandbox(active)
        was_paused = sandbox.frozen
        async with self._context.guard.publishing():
            faultpoints.reach("suspend.capture.before")
            taken_at = time.time()
            sealed = await captures.capture_final(sandbox, memory=memory)
            faultpoints.reach("suspend.capture")
            plan = SealPlan(
                sandbox=sandbox.record.sandbox,
                snapshot=self._snapshots.manifest(
                    active.session,
                    sandbox.record.config,
                    sealed.layers,
                    sealed.memory,
                    SnapshotKind.SUSPEND,
                ),
                layer=sealed.layer,
                taken_at=taken_at,
            )
            try:
                await run.step("seal", plan=msgspec.to_builtins(plan))
            except BaseException:
                if not was_paused:
                    await sandbox.thaw()
                raise

    async def _finish_seal(self, run: Run) -> None:
        """End what was sealed, and with it the operation."""
        plan = msgspec.convert(run.data["plan"], SealPlan)
        session = run.active.session
        await self.put_away(
            run,
            "the session was suspended",
            run.finish(None),
            run.event(
                before=session.head,
                after=plan.snapshot.id,
                memory=plan.snapshot.memory is not None,
            ),
        )
        self._snapshots.squash_soon(run.active, plan.snapshot)

    async def put_away(self, run: Run, why: str, *also: Write, moved: bool = False) -> None:
        """End the sealed sandbox, move its files into the store, commit together with `also`.
        Repeats until it is done: from here on the only way is forward. Streams end with `why`;
        `moved` tells their readers to take them up again."""
        active = run.active
        plan = msgspec.convert(run.data["plan"], SealPlan)
        while True:
            try:
                async with self._context.guard.publishing():
                    await self._put_away_once(active, plan, why, moved, also)
                break
            except (StorageFull, CaptureFailed, Unreachable, OSError) as error:
                # The sandbox has ended: what is not written yet must not be given up for a disk
                # that is full or refuses a write, or for a database that is away.
                if active.doomed:
                    raise
                log.error("session %s cannot be put away yet: %s", active.id, error)
                await asyncio.sleep(_RETRY_SECONDS)
                await active.gate.settled()
                if active.session.head == plan.snapshot.id:
                    break  # it was committed, though that could not be told
        self._context.agent.destroy_soon(plan.sandbox)

    async def _put_away_once(
        self, active: ActiveSession, plan: SealPlan, why: str, moved: bool, also: Sequence[Write]
    ) -> None:
        agent = self._context.agent
        if agent.has(plan.sandbox):
            sandbox = agent.find(plan.sandbox, active.session.epoch)
            await sandbox.guest.interrupt(why, moved=moved)
        await agent.stop(plan.sandbox)
        faultpoints.reach("suspend.kill")
        await agent.take(plan.sandbox, plan.layer)
        faultpoints.reach("suspend.take")
        session = active.session
        record = await self._snapshots.publish(plan.snapshot, session.tenant)
        faultpoints.reach("suspend.publish")
        await self._context.commit(
            active,
            suspended_changes(session) | {"head": plan.snapshot.id, "cause": None},
            InsertSnapshot(record),
            SettleEffects(session.id, plan.snapshot.id, plan.taken_at or plan.snapshot.created_at),
            *also,
        )

    # -- delete -----------------------------------------------------------------------------

    async def delete(self, run: Run) -> None:
        """Remove a session from whatever state. What its forks need stays until they go."""
        active = run.active
        if active.state is SessionState.DELETED:
            await self._context.database.commit([run.finish(None)])
            return
        active.doomed = True
        ending: asyncio.Task[None] | None = None
        try:
            await self._end_holders(active)
            faultpoints.reach("delete.abort")
            self._context.soon(self._end_children(active), f"children of {active.id}")
            ending = asyncio.create_task(self._keep_ending_holders(active))
            await self._delete_held(run, active, ending)
        except BaseException:
            active.doomed = False
            raise
        finally:
            if ending is not None:
                ending.cancel()

    async def _end_holders(self, active: ActiveSession) -> None:
        """Whoever holds the gate works on a sandbox of the session; without it that ends soon."""
        agent = self._context.agent
        session = active.session
        if session.sandbox and agent.has(session.sandbox):
            sandbox = agent.find(session.sandbox, session.epoch)
            await sandbox.guest.interrupt("the session was deleted")
        await agent.abort(session.id)

    async def _keep_ending_holders(self, active: ActiveSession) -> None:
        """A start that was between two steps when its sandbox was ended goes on to the next one."""
        while True:
            await asyncio.sleep(_ABORT_SECONDS)
            await self._end_holders(active)

    async def _end_children(self, active: ActiveSession) -> None:
        """A fork under way is given up with its source; children that were made stay."""
        while True:
            starting = [
                child.id
                for child in self._context.registry.all()
                if child.session.parent_session == active.id
                and child.state is SessionState.CREATING
            ]
            if not starting or not active.doomed:
                return
            for child in starting:
                await self._context.agent.abort(child)
            await asyncio.sleep(_ABORT_SECONDS)

    async def _delete_held(
        self, run: Run, active: ActiveSession, ending: asyncio.Task[None]
    ) -> None:
        async with active.gate.closed("delete"):
            ending.cancel()
            session = active.session
            head = session.head
            await self._context.commit(
                active,
                {"state": SessionState.DELETED, "sandbox": None, "node": None},
                run.finish(None),
                run.event(before=head),
            )
            faultpoints.reach("delete.commit")
        if session.sandbox:
            await self._context.agent.remove(session.sandbox)
        faultpoints.reach("delete.destroy")
        self._snapshots.collect_soon()
