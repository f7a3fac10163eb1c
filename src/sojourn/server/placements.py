"""Where sessions run: starting a sandbox for one, and what happens when it is lost.

Guarantee: a session is committed as running only with a sandbox that answers; a sandbox whose
commit fails is removed; a session whose sandbox died is suspended at its last snapshot, and the
files the dead sandbox had written are kept as a snapshot beside it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from sojourn import faultpoints
from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import AppendEvent, InsertSnapshot, Write
from sojourn.errors import IntegrityError, Interrupted, SandboxLost, SojournError
from sojourn.lifecycle import lifetime_after, settled_deadline
from sojourn.model import Session, SessionState, Snapshot, SnapshotKind, new_id
from sojourn.node import hooks
from sojourn.node.hooks import HookRun
from sojourn.node.records import SandboxRecord, stacked
from sojourn.server.context import Context
from sojourn.server.operations import Run
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots
from sojourn.telemetry import declared, logs, tracing

log = logging.getLogger(__name__)

_MOST_LAYERS = 128
# What the hook that runs inside after a start is told, by the verb that started it.
_REASONS = {
    "resume": "resume",
    "migrate": "resume",
    "rollback": "rollback",
    "promote": "rollback",
    "fork": "fork",
}


def hook_events(active: ActiveSession, runs: list[HookRun], run: Run) -> list[AppendEvent]:
    """The writes that tell how hooks ended."""
    return [
        AppendEvent(
            session=active.id,
            kind=f"hook.{one.hook}",
            actor=run.actor,
            result="ok" if one.ok else "failed",
            details=msgspec.to_builtins(one),
            before=active.session.head,
            operation=run.operation.id,
        )
        for one in runs
    ]


def suspended_changes(session: Session) -> dict[str, Any]:
    """What changes in a session's record when it no longer has a sandbox."""
    now = time.time()
    return {
        "state": SessionState.SUSPENDED,
        "sandbox": None,
        "node": None,
        "idle_deadline": settled_deadline(session, SessionState.SUSPENDED, now),
        "lifetime_deadline": lifetime_after(session, now),
    }


class Placements:
    """Starts and replaces the sandboxes of sessions."""

    def __init__(self, context: Context, snapshots: Snapshots) -> None:
        self._context = context
        self._snapshots = snapshots

    async def place(
        self,
        run: Run,
        active: ActiveSession,
        snapshot: Snapshot,
        changes: dict[str, Any],
        *also: Write,
    ) -> Session:
        """Run a session from a snapshot in a new sandbox, and commit it as running.

        `changes` and `also` go into the same commit. Raises ResumeFailed, IntegrityError,
        StorageFull, StaleEpoch; the session is as before then, no sandbox is left.
        """
        session = active.session
        if active.doomed:
            message = f"session {session.id} is being deleted"
            raise Interrupted(message, next_step="Nothing is left to do.")
        self._context.require_lease()
        self._context.require_room(session.limits, but=session.id)
        layers = snapshot.layers
        if len(layers) > _MOST_LAYERS:
            # Forks of running forks grow the chain without ever being put away.
            layers = await self._snapshots.merged(layers, snapshot.config.base_layers)
        record = SandboxRecord(
            sandbox=new_id("sbx").replace("_", "-"),
            session=session.id,
            epoch=session.epoch + 1,
            driver=session.driver,
            layers=layers,
            memory=snapshot.memory,
            config=snapshot.config,
            limits=session.limits,
            created_at=time.time(),
        )
        verb = run.operation.verb
        faultpoints.reach(f"{verb}.place")
        source = "files" if record.memory is None else "memory"
        with tracing.span("place", sojourn__source=source), declared.PLACE_SECONDS.time(source):
            record = await self._start(session, record)
        faultpoints.reach(f"{verb}.start")
        now = time.time()
        try:
            if verb in _REASONS or record.memory is not None:
                sandbox = self._context.agent.find(record.sandbox, record.epoch)
                runs = await hooks.run(
                    sandbox.guest,
                    hooks.POST_RESUME,
                    _REASONS.get(verb, "fork"),
                    environment=sandbox.environment,
                )
                also = (*also, *hook_events(active, runs, run))
            updated = await self._context.commit(
                active,
                {
                    "state": SessionState.RUNNING,
                    "epoch": record.epoch,
                    "sandbox": record.sandbox,
                    "node": self._context.node_name,
                    "cause": None,
                    "idle_deadline": settled_deadline(session, SessionState.RUNNING, now),
                    **changes,
                },
                *also,
            )
        except BaseException:
            await self._context.agent.remove(record.sandbox)
            raise
        active.over_quota = None
        active.dirty = False
        return updated

    async def _start(self, session: Session, record: SandboxRecord) -> SandboxRecord:
        """Start a sandbox; where this disk has damaged what it is made of and the object store has
        it whole, that is brought first. The record of the one that runs."""
        try:
            await self._context.networks.start(session, record)
            return record
        except IntegrityError as error:
            healed = await asyncio.to_thread(self._heal, record)
            if not healed:
                raise
            log.warning("session %s: replaced after damage: %s", session.id, ", ".join(healed))
            event = AppendEvent(
                session=session.id,
                kind="store.healed",
                result="ok",
                details={"cause": error.message, "replaced": healed},
                before=session.head,
                after=session.head,
            )
            await self._context.database.commit([event])
        again = msgspec.structs.replace(record, sandbox=new_id("sbx").replace("_", "-"))
        await self._context.networks.start(session, again)
        return again

    def _heal(self, record: SandboxRecord) -> list[str]:
        try:
            return self._context.store.heal(record.layers, record.memory)
        except SojournError as error:
            log.error("what is damaged cannot be replaced now: %s", error)
            return []

    async def lost(self, active: ActiveSession, cause: str) -> None:
        """Suspend a session whose sandbox died. The caller holds the gate. Idempotent."""
        session = active.session
        if not session.live:
            return
        sandbox = session.sandbox
        with logs.about(tenant=session.tenant, session=session.id, epoch=session.epoch):
            log.warning("session %s lost its sandbox: %s", session.id, cause)
        async with self._context.guard.publishing():
            writes: list[Write] = []
            salvaged = await self._salvage(session) if sandbox else None
            if salvaged is not None:
                writes.append(InsertSnapshot(salvaged))
            faultpoints.reach("lost.salvage")
            writes.append(
                AppendEvent(
                    session=session.id,
                    kind="sandbox.lost",
                    result="sandbox_lost",
                    details={
                        "cause": cause,
                        "sandbox": sandbox,
                        "salvaged": salvaged.id if salvaged else None,
                    },
                    before=session.head,
                    after=session.head,
                )
            )
            changes = suspended_changes(session) | {"cause": cause}
            await self._context.commit(active, changes, *writes)
        faultpoints.reach("lost.commit")
        if sandbox:
            self._context.agent.destroy_soon(sandbox)

    async def _salvage(self, session: Session) -> SnapshotRecord | None:
        """Keep the files a dead sandbox had written: newer than the head, but without memory."""
        assert session.sandbox is not None
        try:
            await self._context.agent.stop(session.sandbox)
            layer = await self._context.agent.salvage(session.sandbox)
            record = self._context.agent.record(session.sandbox)
            if layer is None or record is None:
                return None
            salvaged = self._snapshots.manifest(
                session,
                record.config,
                stacked(record.layers, layer),
                None,
                SnapshotKind.AUTO,
                label=f"salvaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}",
            )
            return await self._snapshots.publish(salvaged, session.tenant)
        except (SojournError, OSError) as error:
            # The last snapshot is what was promised; this is what can be had beyond it.
            log.error("nothing could be salvaged of sandbox %s: %s", session.sandbox, error)
            return None

    async def check(self, active: ActiveSession) -> bool:
        """Look whether the sandbox lives, and note its loss. The caller must not hold the gate."""
        if not active.session.live:
            return False
        async with active.gate.closed("check"):
            return await self.check_held(active)

    async def check_held(self, active: ActiveSession) -> bool:
        """`check` for a caller that holds the gate."""
        if not active.session.live:
            return False
        try:
            sandbox = self._context.sandbox(active)
        except SandboxLost as error:
            await self.lost(active, error.message)
            return False
        losses = self._context.losses
        status = await asyncio.to_thread(sandbox.status)
        if status.alive:
            return True
        self._context.require_lease()
        if self._context.losses != losses:
            return True  # it stood still while this looked
        await self.lost(active, status.cause or "the sandbox ended")
        return False

    async def require_held(self, active: ActiveSession) -> None:
        """Raise SandboxLost where the sandbox a live session should have is gone, after noting the
        loss. The caller holds the gate."""
        if active.session.live and not await self.check_held(active):
            raise SandboxLost(f"the sandbox had ended: {active.session.cause}")

    async def fail(self, active: ActiveSession, error: SojournError) -> None:
        """After a failed start: where the stored state is bad, the session is `failed`, and says
        which snapshot is the newest good one; otherwise it stays as it was, to be tried again."""
        session = active.session
        if not isinstance(error, IntegrityError):
            return
        good = await self._last_good(session)
        error.details["last_good"] = good
        await self._context.commit(
            active, {"state": SessionState.FAILED, "sandbox": None, "cause": error.message}
        )

    async def _last_good(self, session: Session) -> str | None:
        id = session.head
        while id is not None:
            try:
                await asyncio.to_thread(self._check, await self._snapshots.read(id))
                return id
            except SojournError:
                record = await self._context.database.get_snapshot(None, id, hidden=True)
                id = record.parent
        return None

    def _check(self, snapshot: Snapshot) -> None:
        for layer in snapshot.layers:
            self._context.store.check_layer(layer)
        if snapshot.memory is not None:
            self._context.store.verify_image(snapshot.memory)
