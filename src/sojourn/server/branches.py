"""The verbs that move in the tree or grow it: rollback, fork, promote.

Guarantee: nothing that was in a session is given up before what replaces it answers; the state a
rollback or promote leaves behind stays in the tree; a fork is all of its children or none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from sojourn import faultpoints
from sojourn.database.writes import AppendEvent, InsertSession, SettleEffects, Write
from sojourn.errors import Interrupted, SessionNotFound, SojournError
from sojourn.lifecycle import Command, Verb, decide, first_deadlines
from sojourn.model import (
    AutoSnapshot,
    Session,
    SessionState,
    Snapshot,
    SnapshotKind,
    derived_id,
)
from sojourn.model.network import NetworkMode
from sojourn.node.isolation.base import Capability
from sojourn.server.context import Context
from sojourn.server.effects import require_none, told
from sojourn.server.networks import inherited
from sojourn.server.operations import Run
from sojourn.server.placements import Placements
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots

log = logging.getLogger(__name__)

# Restores are bound by the processor; more at once only make each one slower.
_STARTS_AT_ONCE = 2


class Branches:
    """Bodies of operations on a session's tree."""

    def __init__(self, context: Context, snapshots: Snapshots, placements: Placements) -> None:
        self._context = context
        self._snapshots = snapshots
        self._placements = placements

    # -- rollback ---------------------------------------------------------------------------

    async def rollback(self, run: Run) -> None:
        """Make the session continue from another snapshot of its tree, under the same id."""
        active = run.active
        async with active.gate.closed("rollback"):
            target = await self._snapshots.read(run.request["snapshot"])
            await self._leave(run, active, target.id)
            try:
                await self._keep_present(run, active)
                await self._switch(run, active, target)
            except (SojournError, OSError):
                await self._context.networks.apply(active)  # the old sandbox goes on
                raise

    async def _leave(self, run: Run, active: ActiveSession, base: str) -> None:
        """See that nothing more leaves what a rollback gives up, so that what it leaves behind is
        known when it is refused or told. Raises EffectsInTheWay; the session goes on then."""
        networks = self._context.networks
        force = bool(run.request.get("force"))
        left = await networks.effects.left(active.session, base)
        require_none(active.session, run.operation.verb, left, force=force)
        if active.session.network.mode is NetworkMode.NONE:
            return
        await networks.cut(active.session)
        try:
            left = await networks.effects.left(active.session, base)
            require_none(active.session, run.operation.verb, left, force=force)
        except SojournError:
            await networks.apply(active)
            raise

    async def _keep_present(self, run: Run, active: ActiveSession) -> None:
        """Put what the session is about to leave into the tree, if it is not there yet."""
        if run.data.get("kept"):
            return
        if await self._placements.check_held(active):
            sandbox = self._context.sandbox(active)
            automatic = active.session.policy.auto_snapshot is not AutoSnapshot.OFF
            if automatic and (sandbox.frozen or active.dirty or await sandbox.changed()):
                await self._snapshots.take_or_files_only(active, actor=run.actor)
        await self._snapshots.own_head(active, run.actor)
        await run.step("kept", kept=True)

    async def _switch(
        self, run: Run, active: ActiveSession, target: Snapshot, *also: Write, **details: Any
    ) -> None:
        """Go on from `target` and finish the operation, in one commit with `also`."""
        verb = run.operation.verb
        session = active.session
        old = session.sandbox
        left = await self._context.networks.effects.left(session, target.id)
        result = {"effects": msgspec.to_builtins(left)} if left.count else None
        writes = (
            run.finish(result),
            run.event(before=session.head, after=target.id, **details, **told(left)),
            SettleEffects(session.id, None, time.time()),
            *also,
        )
        if not session.live:
            decide(session, Command(Verb.ROLLBACK))
            await self._context.commit(
                active,
                {"state": SessionState.SUSPENDED, "head": target.id, "cause": None},
                *writes,
            )
            return
        await self._placements.place(run, active, target, {"head": target.id}, *writes)
        faultpoints.reach(f"{verb}.commit")
        if old:
            agent = self._context.agent
            if agent.has(old):
                await agent.find(old, session.epoch).guest.interrupt(f"the session had a {verb}")
            agent.destroy_soon(old)

    # -- fork -------------------------------------------------------------------------------

    async def fork(self, run: Run) -> None:
        """Start children from a snapshot, or from now while the source runs on."""
        source = run.active
        snapshot = await self._fork_point(run, source)
        left = None
        if run.request.get("snapshot"):
            left = await self._context.networks.effects.left(source.session, snapshot.id)
            require_none(source.session, "fork", left, force=bool(run.request.get("force")))
        names = run.request.get("names") or [None] * run.request["n"]
        children = [
            {"id": derived_id("ses", run.operation.id, number), "name": name}
            for number, name in enumerate(names)
        ]
        try:
            starts = asyncio.Semaphore(_STARTS_AT_ONCE)
            async with asyncio.TaskGroup() as tasks:
                for child in children:
                    tasks.create_task(self._child(run, source.session, snapshot, child, starts))
            faultpoints.reach("fork.children")
        except ExceptionGroup as group:
            await self._undo(run, children)
            raise group.exceptions[0] from None
        try:
            await self._context.database.commit(
                [
                    run.finish(
                        {"sessions": [child["id"] for child in children]}
                        | ({"effects": msgspec.to_builtins(left)} if left and left.count else {})
                    ),
                    run.event(
                        before=source.session.head,
                        after=snapshot.id,
                        children=[child["id"] for child in children],
                        **told(left),
                    ),
                ]
            )
        except SojournError:
            # The source was deleted meanwhile: its caller was told that there are no children.
            await self._undo(run, children)
            raise

    async def _fork_point(self, run: Run, source: ActiveSession) -> Snapshot:
        named = run.request.get("snapshot")
        known = run.data.get("point") or named
        if known:
            if named:
                decide(source.session, Command(Verb.FORK, snapshot=True))
            return await self._snapshots.read(known)
        async with source.gate.closed("fork"):
            decide(source.session, Command(Verb.FORK))
            await self._placements.require_held(source)
            point = await self._present(source, SnapshotKind.FORK, run.actor)
        await run.step("point", point=point.id)
        return point

    async def _present(self, active: ActiveSession, kind: SnapshotKind, actor: str) -> Snapshot:
        """A snapshot of the present state: the head where it still is that, else one taken now.

        The caller holds the gate and has looked whether the sandbox lives.
        """
        if not active.session.live:
            return await self._snapshots.head(active.session)
        head = await self._head_if_now(active)
        return head or await self._snapshots.take(active, kind, actor=actor)

    async def _head_if_now(self, active: ActiveSession) -> Snapshot | None:
        """The head snapshot where it still is the present state and need not be taken again.

        Only where no process can have moved on by itself since.
        """
        sandbox = self._context.sandbox(active)
        if active.dirty or sandbox.frozen:
            return None
        if sandbox.baseline is None or sandbox.baseline.alive > 0:
            return None
        head = await self._snapshots.head(active.session)
        if head.kind is SnapshotKind.BASE:
            return None
        if head.memory is None and sandbox.has(Capability.LIVE_CHECKPOINT):
            return None  # what is in memory is in no snapshot
        return None if await sandbox.changed() else head

    async def _child(
        self,
        run: Run,
        parent: Session,
        snapshot: Snapshot,
        child: dict[str, Any],
        starts: asyncio.Semaphore,
    ) -> None:
        now = time.time()
        idle, lifetime = first_deadlines(parent.policy, now)
        session = Session(
            id=child["id"],
            tenant=parent.tenant,
            name=child.get("name"),
            labels=parent.labels | run.request.get("labels", {}),
            template=parent.template,
            env=parent.env,
            limits=parent.limits,
            policy=parent.policy,
            driver=parent.driver,
            state=SessionState.CREATING,
            epoch=0,
            head=snapshot.id,
            parent_session=parent.id,
            forked_from=snapshot.id,
            sandbox=None,
            node=None,
            idle_deadline=idle if run.request.get("start", True) else None,
            lifetime_deadline=lifetime,
            cause=None,
            created_at=now,
            updated_at=now,
            network=inherited(parent.network),
            holder=self._context.holder,
        )
        active = await self._insert(session)
        async with active.gate.closed("fork"):
            if active.state is not SessionState.CREATING:
                return  # an earlier execution of this operation finished it
            event = AppendEvent(
                session=session.id,
                kind="fork.child",
                actor=run.actor,
                result="ok",
                details={"parent": parent.id},
                after=snapshot.id,
                operation=run.operation.id,
            )
            if not run.request.get("start", True):
                await self._context.commit(active, {"state": SessionState.SUSPENDED}, event)
                faultpoints.reach("fork.shelved")
                return
            async with starts:
                if run.active.doomed:
                    message = f"session {run.active.id} is being deleted"
                    raise Interrupted(message, next_step="Nothing is left to do.")
                await self._placements.place(run, active, snapshot, {}, event)
            faultpoints.reach("fork.child")

    async def _insert(self, session: Session) -> ActiveSession:
        registry = self._context.registry
        try:
            return await registry.find(session.tenant, session.id)
        except SessionNotFound:
            await self._context.database.commit([InsertSession(session)])
            return registry.hold(session)

    async def _undo(self, run: Run, children: list[dict[str, Any]]) -> None:
        for child in children:
            try:
                active = await self._context.registry.find(run.operation.tenant, child["id"])
            except SessionNotFound:
                continue  # it was never made, or is deleted already
            async with active.gate.closed("fork"):
                sandbox = active.session.sandbox
                await self._context.commit(
                    active, {"state": SessionState.DELETED, "sandbox": None, "node": None}
                )
            if sandbox:
                await self._context.agent.remove(sandbox)

    # -- promote ----------------------------------------------------------------------------

    async def promote(self, run: Run) -> None:
        """Make a fork's present state the head of the session it came from."""
        parent = run.active
        child = await self._context.registry.find(run.operation.tenant, run.request["child"])
        if run.data.get("point"):
            point = await self._snapshots.read(run.data["point"])
        else:
            point = await self._child_point(run, child)
            await run.step("point", point=point.id)
        async with parent.gate.closed("promote"):
            await self._keep_present(run, parent)
            told = AppendEvent(
                session=child.id,
                kind="promoted",
                actor=run.actor,
                result="ok",
                details={"into": parent.id},
                before=point.id,
                after=point.id,
                operation=run.operation.id,
            )
            await self._switch(run, parent, point, told, child=child.id)

    async def _child_point(self, run: Run, child: ActiveSession) -> Snapshot:
        async with child.gate.closed("promote"):
            decide(child.session, Command(Verb.PROMOTE))
            # Of a child whose sandbox is found gone, the last snapshot is what there is.
            await self._placements.check_held(child)
            return await self._present(child, SnapshotKind.EXPLICIT, run.actor)
