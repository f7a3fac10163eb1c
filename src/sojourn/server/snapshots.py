"""Snapshots of sessions: from what a node captured to a row in the tree, and back out again.

Guarantee: a row appears only after everything it refers to is safe on disk; what a row, a sandbox
or a running capture refers to is never collected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from sojourn import faultpoints
from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import AppendEvent, InsertSnapshot, LinkEvent, SettleEffects, Write
from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    Conflict,
    IntegrityError,
    OutcomeUnknown,
    SessionElsewhere,
    SessionNotFound,
    SnapshotNotFound,
    SojournError,
)
from sojourn.model import (
    LayerRef,
    MemoryRef,
    Session,
    SessionState,
    Snapshot,
    SnapshotKind,
    new_id,
)
from sojourn.model.snapshots import SnapshotConfig
from sojourn.node import captures
from sojourn.node.isolation.base import Capability
from sojourn.server.context import Context
from sojourn.server.registry import ActiveSession
from sojourn.server.retentions import Retentions, recovery_point
from sojourn.store.fingerprints import fingerprint

log = logging.getLogger(__name__)

# Overlay file systems take up to 500 layers and look a name up in each of them in turn.
LONG_CHAIN = 24
_LOOKS_AT_ONCE = 16


class Taking(msgspec.Struct, frozen=True):
    """A snapshot whose content is taken but not yet published; `at` is just before it was."""

    capture: captures.LiveCapture
    kind: SnapshotKind
    memory: bool
    config: SnapshotConfig
    at: float


class Snapshots:
    """Makes, finds, thins and removes snapshots."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._collecting: asyncio.Task[Any] | None = None
        self._collect_again = False
        self.behind = False  # whether the last collection could not remove all it wanted
        self.retentions = Retentions(context, self.collect_soon)

    # -- make -------------------------------------------------------------------------------

    def manifest(
        self,
        session: Session,
        config: SnapshotConfig,
        layers: list[LayerRef],
        memory: MemoryRef | None,
        kind: SnapshotKind,
        *,
        label: str | None = None,
    ) -> Snapshot:
        """The manifest of a new snapshot under the session's head."""
        return Snapshot(
            id=new_id("snp"),
            session=session.id,
            parent=session.head,
            kind=kind,
            label=label,
            created_at=time.time(),
            layers=layers,
            memory=memory,
            config=config,
            fingerprint=fingerprint(layers, memory, config),
        )

    async def publish(self, snapshot: Snapshot, tenant: str) -> SnapshotRecord:
        """Write the manifest durably; the record to be committed comes back.

        Raises StorageFull, CaptureFailed.
        """
        try:
            await asyncio.to_thread(self._context.store.publish_snapshot, snapshot)
        except OSError as error:
            raise CaptureFailed(f"the snapshot cannot be written: {error}") from error
        memory = snapshot.memory
        return SnapshotRecord(
            id=snapshot.id,
            session=snapshot.session,
            tenant=tenant,
            parent=snapshot.parent,
            kind=snapshot.kind,
            label=snapshot.label,
            created_at=snapshot.created_at,
            fingerprint=snapshot.fingerprint,
            has_memory=memory is not None,
            memory_bytes=memory.bytes if memory else 0,
            layer_bytes=sum(
                layer.bytes for layer in snapshot.layers[snapshot.config.base_layers :]
            ),
            layers=[layer.id for layer in snapshot.layers],
            image=memory.id if memory else None,
            node=self._context.holder,
        )

    async def make_head(
        self,
        active: ActiveSession,
        record: SnapshotRecord,
        *also: Write,
        taken_at: float | None = None,
    ) -> None:
        """Commit a published snapshot as the session's head, together with `also`. `taken_at` says
        since when it may lack what the session does: what left it before then comes before it.

        Raises like `Context.commit`; a refused snapshot is withdrawn from the store again.
        """
        try:
            settled = [] if taken_at is None else [SettleEffects(active.id, record.id, taken_at)]
            await self._context.commit(
                active, {"head": record.id}, InsertSnapshot(record), *settled, *also
            )
        except Conflict:
            # The session moved on or went meanwhile: nothing will refer to what was published.
            await self.withdraw([record.id])
            raise

    async def refer(self, writes: Sequence[Write], published: Sequence[str]) -> list[Any]:
        """Commit what refers to published snapshots, which are withdrawn where it is refused.

        Where it may have been made all the same (nobody could tell, or whoever waited gave up) they
        stay: a row without a manifest would be a promise that cannot be kept, and a manifest
        without a row goes at the next start.
        """
        try:
            return await self._context.database.commit(writes)
        except OutcomeUnknown:
            raise
        except SojournError:
            await asyncio.shield(self.withdraw(published))
            raise

    async def withdraw(self, published: Sequence[str]) -> None:
        """Remove manifests that nothing refers to, or ever will."""
        for id in published:
            await asyncio.to_thread(self._context.store.delete_snapshot, id)
        self.collect_soon()

    async def begin(
        self, active: ActiveSession, kind: SnapshotKind, *, memory: bool = True
    ) -> Taking:
        """Take the state of a running or paused session; it goes on at once.

        The caller holds the session's gate. Raises CaptureRefused, StorageFull, SandboxLost.
        """
        sandbox = self._context.sandbox(active)
        memory = memory and sandbox.has(Capability.LIVE_CHECKPOINT)
        at = time.time()
        capture = await captures.begin_live(sandbox, memory=memory)
        active.dirty = False
        return Taking(capture, kind, memory, sandbox.record.config, at)

    async def finish(
        self,
        active: ActiveSession,
        taking: Taking,
        *,
        turn: int | None = None,
        actor: str = "server",
    ) -> Snapshot:
        """Publish what was taken and make it the session's head, in one commit with its event.

        Raises StorageFull; the session is as before then, and counts as changed.
        """
        async with self._context.guard.publishing():
            faultpoints.reach("auto.capture")
            captured = await taking.capture.publish()
            session = active.session
            snapshot = self.manifest(
                session,
                taking.config,
                captured.layers,
                captured.memory,
                taking.kind,
            )
            record = await self.publish(snapshot, session.tenant)
            faultpoints.reach("auto.publish")
            if turn is not None:
                event: Write = LinkEvent(active.id, turn, session.head, snapshot.id)
            else:
                event = AppendEvent(
                    session=active.id,
                    kind="snapshot",
                    actor=actor,
                    result="ok",
                    details={"kind": str(taking.kind), "memory": taking.memory},
                    before=session.head,
                    after=snapshot.id,
                )
            await self.make_head(active, record, event, taken_at=taking.at)
            faultpoints.reach("auto.commit")
        if taking.kind is SnapshotKind.AUTO:
            self._context.soon(self._trim(active), f"thin {active.id}")
        return snapshot

    async def take(self, active: ActiveSession, kind: SnapshotKind, *, actor: str) -> Snapshot:
        """`begin` and `finish` for a caller that holds the gate until it is committed."""
        return await self.finish(active, await self.begin(active, kind), actor=actor)

    async def begin_or_files_only(self, active: ActiveSession) -> Taking:
        """Begin an automatic snapshot; what memory cannot be taken of is at least kept as files."""
        try:
            return await self.begin(active, SnapshotKind.AUTO)
        except CaptureRefused as error:
            await self._context.database.append_event(
                AppendEvent(
                    session=active.id,
                    kind="snapshot.refused",
                    result=error.code,
                    details={"message": error.message, **error.details},
                    before=active.session.head,
                )
            )
            return await self.begin(active, SnapshotKind.AUTO, memory=False)

    async def take_or_files_only(self, active: ActiveSession, *, actor: str) -> Snapshot:
        """An automatic snapshot for a caller that holds the gate until it is committed."""
        return await self.finish(active, await self.begin_or_files_only(active), actor=actor)

    async def own_head(self, active: ActiveSession, actor: str) -> None:
        """Give a session a snapshot of its own where its head is another's: a session that is
        about to leave what it was forked from, or promoted to, must find it in its tree later.

        The caller holds the gate.
        """
        session = active.session
        if session.head is None:
            return
        record = await self._context.database.get_snapshot(None, session.head, hidden=True)
        if record.session == session.id:
            return
        try:
            head = await self.head(session)
        except IntegrityError as error:
            log.error("session %s leaves a head that cannot be read: %s", session.id, error)
            return
        async with self._context.guard.publishing():
            own = self.manifest(session, head.config, head.layers, head.memory, SnapshotKind.AUTO)
            event = AppendEvent(
                session=session.id,
                kind="snapshot",
                actor=actor,
                result="ok",
                details={"kind": "auto", "of": head.id, "memory": head.memory is not None},
                before=head.id,
                after=own.id,
            )
            await self.make_head(active, await self.publish(own, session.tenant), event)

    # -- find -------------------------------------------------------------------------------

    async def tree(self, session: Session) -> list[SnapshotRecord]:
        """The session's snapshots and all they descend from, parents before children."""
        database = self._context.database
        own = await database.list_snapshots(session.id)
        known = {record.id for record in own}
        before: list[SnapshotRecord] = []
        wanted = [record.parent for record in own] + [session.head]
        while wanted:
            id = wanted.pop()
            if id is None or id in known:
                continue
            record = await database.get_snapshot(session.tenant, id, hidden=True)
            known.add(id)
            before.append(record)
            wanted.append(record.parent)
        before.sort(key=lambda record: (record.created_at, record.id))
        return [record for record in before if not record.hidden or record.id == session.head] + own

    async def resolve(self, session: Session, ref: str) -> SnapshotRecord:
        """A snapshot of the session's tree by id or label (the newest with that label).

        Raises SnapshotNotFound.
        """
        tree = await self.tree(session)
        for record in tree:
            if record.id == ref:
                return record
        for record in reversed(tree):
            if record.label == ref:
                return record
        raise SnapshotNotFound(
            f"session {session.name or session.id} has no snapshot {ref!r}", snapshot=ref
        )

    async def read(self, snapshot: str) -> Snapshot:
        """The manifest. Raises SnapshotNotFound, IntegrityError, and what bringing it from the
        object store raises where another node took it."""
        return await self._context.manifests.read(snapshot)

    async def head(self, session: Session) -> Snapshot:
        """The head's manifest. Raises IntegrityError."""
        if session.head is None:
            raise IntegrityError(f"session {session.id} has no snapshot", object=session.id)
        try:
            return await self.read(session.head)
        except SnapshotNotFound as error:
            raise IntegrityError(
                f"the manifest of snapshot {session.head} is gone",
                object=f"snapshot {session.head}",
            ) from error

    # -- long chains ------------------------------------------------------------------------

    def squash_soon(self, active: ActiveSession, snapshot: Snapshot) -> None:
        """Merge a long chain of layers in the background, while the session is put away."""
        if len(snapshot.layers) - min(snapshot.config.base_layers, LONG_CHAIN) >= LONG_CHAIN:
            self._context.soon(self._squash_logged(active, snapshot), f"squash {active.id}")

    async def _squash_logged(self, active: ActiveSession, snapshot: Snapshot) -> None:
        try:
            await self.squash(active, snapshot)
        except (SojournError, OSError) as error:
            log.warning("the layers of session %s stay as they are: %s", active.id, error)

    async def squash(self, active: ActiveSession, snapshot: Snapshot) -> None:
        """Give a suspended session a head of the same content with one layer over the template.

        Only the commit holds the gate: whoever resumes meanwhile takes the long chain.
        """
        # What only the object store has comes first: nobody waits for it with the guard held.
        await asyncio.to_thread(self._bring, snapshot.layers)
        async with self._context.guard.publishing():
            layers = await self.merged(snapshot.layers, snapshot.config.base_layers)
        # The gate comes before the guard, as everywhere: whoever held the guard and waited for the
        # gate would hold up a collection, which holds up whoever has the gate. The store keeps the
        # merged layer meanwhile.
        async with active.gate.closed("squash"), self._context.guard.publishing():
            session = active.session
            if session.head != snapshot.id or session.state is not SessionState.SUSPENDED:
                return
            merged = self.manifest(
                session, snapshot.config, layers, snapshot.memory, SnapshotKind.AUTO
            )
            record = await self.publish(merged, session.tenant)
            await self.make_head(
                active,
                record,
                AppendEvent(
                    session=active.id,
                    kind="squash",
                    result="ok",
                    details={"layers_before": len(snapshot.layers)},
                    before=session.head,
                    after=merged.id,
                ),
            )

    def _bring(self, layers: list[LayerRef]) -> None:
        for layer in layers[1:]:
            self._context.store.layer_path(layer.id)

    async def merged(self, layers: list[LayerRef], base: int) -> list[LayerRef]:
        """The template's layers and one that shows what all others show."""
        below = layers[: min(base, LONG_CHAIN)]
        one = await asyncio.to_thread(self._context.store.squash, layers[len(below) :], below)
        return below if one.entries == 0 else [*below, one]

    # -- thin and remove --------------------------------------------------------------------

    async def _trim(self, active: ActiveSession) -> None:
        """What the policy says about the history, after an automatic snapshot."""
        await self.retentions.after_snapshot(active)
        await self.thin(active)

    async def thin(self, active: ActiveSession) -> None:
        """Drop memory images of the oldest automatic snapshots beyond the policy's bytes."""
        session = active.session
        records = await self._context.database.list_snapshots(session.id)
        # Thinned, it would count as not durable, and the object store might lose it to retention
        # before it has the head.
        spared = {session.head, recovery_point(records, session.head)}
        images = [
            record
            for record in records
            if record.kind is SnapshotKind.AUTO
            and record.label is None
            and record.has_memory
            and record.id not in spared
        ]
        over = sum(record.memory_bytes for record in images) - session.policy.auto_memory_bytes
        for record in images:
            if over <= 0:
                break
            try:
                async with active.gate.closed("thin"):
                    if record.id == active.session.head:
                        continue
                    await self.read(record.id)  # another node may have taken it
                    thinned = await asyncio.to_thread(self._context.store.drop_memory, record.id)
                    faultpoints.reach("thin.drop")
                    await self._note_thinned(thinned)
            except SnapshotNotFound:
                continue  # removed meanwhile
            except SessionElsewhere:
                return  # another node thins it
            over -= record.memory_bytes
            self.collect_soon()

    async def remove(self, record: SnapshotRecord) -> None:
        """Remove a snapshot for the user now; what it shares or carries is freed when it can be."""
        await self._context.database.update_snapshot(record.id, hidden=True)
        self._context.replicator.removed(record.session)
        self.collect_soon()

    def collect_soon(self) -> None:
        """Remove in the background what nothing refers to any more."""
        if self._collecting is not None and not self._collecting.done():
            self._collect_again = True
            return
        self._collecting = self._context.soon(self._collect_logged(), "collect")

    async def _collect_logged(self) -> None:
        while True:
            self._collect_again = False
            try:
                await self.collect()
                self.behind = False
            except (SojournError, OSError) as error:
                # Nothing is lost by keeping too much; it is tried again.
                self.behind = True
                log.error("collection stopped: %s", error)
                return
            if not self._collect_again:
                return

    async def collect(self) -> int:
        """Remove rows, manifests, layers and images that nothing refers to; the bytes freed."""
        context = self._context
        removed = 1
        sessions: set[str] = set()
        while removed:
            removed = 0
            for record in await context.database.removable_snapshots(holder=context.holder):
                # The row goes first: a manifest without a row is unreachable and harmless, a row
                # without a manifest would be a promise that cannot be kept.
                try:
                    await context.database.delete_snapshot(record.id)
                except Conflict:
                    continue  # something began to need it just now
                faultpoints.reach("collect.row")
                await asyncio.to_thread(context.store.delete_snapshot, record.id)
                faultpoints.reach("collect.manifest")
                removed += 1
                sessions.add(record.session)
        for session in sessions:
            context.replicator.removed(session)
        if sessions and context.node is None:
            context.source.forget(await context.database.durable_objects())
        async with context.guard.collecting():
            references = await context.database.references(holder=context.holder)
            live = references.layers | references.images | context.agent.in_use()
            live |= await self._sealed()
            live |= {template.layer.id for template in context.catalog.node.values()}
            freed = await asyncio.to_thread(context.store.collect, live)
            used = context.agent.in_use()
            return freed + await asyncio.to_thread(context.store.discard_damaged, used)

    async def _sealed(self) -> set[str]:
        """What sealed sandboxes are made of whose snapshot is not committed yet. An operation
        taken up again after a crash, or waiting for room on the disk, has nothing else to hold it.
        """
        live: set[str] = set()
        server = self._context.holder
        for operation in await self._context.database.unfinished_operations(server=server):
            plan = operation.data.get("plan")
            if plan is not None:
                snapshot = msgspec.convert(plan["snapshot"], Snapshot)
                live.update(layer.id for layer in snapshot.layers)
                if snapshot.memory is not None:
                    live.add(snapshot.memory.id)
        return live

    async def forget_unrecorded(self) -> None:
        """Remove the manifests that a crash left without a row, which would keep their layers and
        images for ever. Only before anything is published."""
        ids = await asyncio.to_thread(self._context.store.snapshot_ids)
        for start in range(0, len(ids), _LOOKS_AT_ONCE):
            some = ids[start : start + _LOOKS_AT_ONCE]
            await asyncio.gather(*(self._forget_or_finish(id) for id in some))

    async def _forget_or_finish(self, id: str) -> None:
        context = self._context
        try:
            record = await context.database.get_snapshot(None, id, hidden=True)
        except SnapshotNotFound:
            await asyncio.to_thread(context.store.delete_snapshot, id)
            return
        if record.has_memory:
            await self._finish_thinning(record)

    async def _finish_thinning(self, record: SnapshotRecord) -> None:
        """Let a row follow its manifest, where a crash came between the two."""
        try:
            manifest = await self.read(record.id)
        except (SojournError, OSError) as error:
            log.error("snapshot %s cannot be read: %s", record.id, error)
            return
        if manifest.memory is not None:
            return
        if await self._is_anothers(record):
            # What is safe of it is as its node has it.
            await asyncio.to_thread(self._context.store.delete_snapshot, record.id)
            return
        await self._note_thinned(manifest)

    async def _is_anothers(self, record: SnapshotRecord) -> bool:
        """Whether another node may have a snapshot by now."""
        if self._context.node is None or record.durable_at is None:
            return False
        try:
            session = await self._context.database.get_session(None, record.session)
        except SessionNotFound:
            return False
        return session.holder != self._context.holder

    async def _note_thinned(self, manifest: Snapshot) -> None:
        await self._context.database.update_snapshot(
            manifest.id,
            has_memory=False,
            memory_bytes=0,
            image=None,
            thinned=True,
            fingerprint=manifest.fingerprint,
            # What it is now only this disk has.
            **({"node": self._context.holder} if self._context.node is not None else {}),
        )
