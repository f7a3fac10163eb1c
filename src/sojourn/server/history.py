"""Looking at a session's past: tree, differences, proof, events."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
from collections.abc import AsyncIterator, Collection

import msgspec

from sojourn.database.records import SnapshotRecord
from sojourn.errors import (
    Conflict,
    InvalidRequest,
    SessionElsewhere,
    SessionNotFound,
    SnapshotNotFound,
    SojournError,
)
from sojourn.model import Snapshot
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.snapshots import Snapshots
from sojourn.server.turns import Turns
from sojourn.server.views import change_info, event_info, show, snapshot_info
from sojourn.store.base import Change, Fault
from sojourn.wire.api import DiffInfo, EventInfo, FaultInfo, SnapshotInfo, VerifyReport

_TEXT_FILES = 200


class History:
    """Reads; nothing here changes a session, but for hiding a snapshot."""

    def __init__(self, context: Context, snapshots: Snapshots, turns: Turns) -> None:
        self._context = context
        self._snapshots = snapshots
        self._turns = turns

    async def list(self, who: Principal, ref: str) -> builtins.list[SnapshotInfo]:
        """The tree, parents before children; the last turn's snapshot is waited for."""
        session = await self._context.registry.look(who.tenant, ref)
        active = self._context.registry.held(session.id)
        if active is not None:
            await self._turns.settle(active)
            session = active.session
        return [
            snapshot_info(record, session.head) for record in await self._snapshots.tree(session)
        ]

    async def diff(
        self, who: Principal, ref: str, a: str | None, b: str | None, *, text: bool, limit: int
    ) -> DiffInfo:
        """Differences from `a` (the parent of `b`) to `b` (the head)."""
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        session = active.session
        if b is None and session.head is None:
            raise InvalidRequest(f"session {session.id} has no snapshot yet", field="b")
        end = await self._snapshots.resolve(session, b if b is not None else str(session.head))
        if a is None and end.parent is None:
            raise InvalidRequest(f"snapshot {end.id} has no parent to differ from", field="a")
        start = await self._snapshots.resolve(session, a if a is not None else str(end.parent))
        before, after = await self._snapshots.read(start.id), await self._snapshots.read(end.id)
        left = await self._context.networks.effects.left(session, start.id, end.id)
        found = await asyncio.to_thread(self._compare, before, after, text, limit)
        return msgspec.structs.replace(found, effects=left if left.count else None)

    def _compare(self, before: Snapshot, after: Snapshot, text: bool, limit: int) -> DiffInfo:
        store = self._context.store
        changes: builtins.list[Change] = []
        truncated = False
        for change in store.diff(before, after):
            if len(changes) == limit:
                truncated = True
                break
            changes.append(change)
        texts: dict[str, str | None] = {}
        if text:
            for change in changes:
                entry = change.after or change.before
                if entry is None or entry.type != "file":
                    continue
                if change.kind == "changed" and "content" not in change.what:
                    continue
                if len(texts) == _TEXT_FILES:
                    truncated = True
                    break
                texts[show(change.path)[0]] = store.text_diff(before, after, change.path)
        return DiffInfo(
            a=before.id,
            b=after.id,
            changes=[change_info(change) for change in changes],
            text=texts,
            truncated=truncated,
        )

    async def remove(self, who: Principal, ref: str, snapshot: str) -> None:
        """Delete a snapshot for the user. Raises Conflict for the head."""
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        async with active.gate.closed("snapshot removal"):
            record = await self._snapshots.resolve(active.session, snapshot)
            if record.id == active.session.head:
                raise Conflict(
                    f"snapshot {record.id} is the head of the session",
                    next_step="Roll back to another snapshot first.",
                )
            if record.session != active.id:
                raise Conflict(
                    f"snapshot {record.id} belongs to session {record.session}",
                    next_step="Delete it there.",
                )
            await self._snapshots.remove(record)

    async def verify(self, who: Principal, ref: str, snapshot: str | None) -> VerifyReport:
        """Read every byte of one snapshot, or of the whole tree."""
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        session = active.session
        if snapshot is not None:
            records = [await self._snapshots.resolve(session, snapshot)]
        else:
            records = await self._snapshots.tree(session)
        faults: builtins.list[FaultInfo] = []
        objects: dict[str, int] = {}
        seen: dict[str, builtins.list[Fault]] = {}
        for record in records:
            try:
                manifest = await self._snapshots.read(record.id)
            except SojournError as error:
                faults.append(
                    FaultInfo(
                        object=str(error.details.get("object", f"snapshot {record.id}")),
                        path=None,
                        cause=error.message,
                        snapshot=record.id,
                    )
                )
                continue
            if manifest.fingerprint != record.fingerprint:
                try:
                    record, manifest = await self._again(record)
                except SnapshotNotFound:
                    continue  # removed meanwhile
            if manifest.fingerprint != record.fingerprint:
                faults.append(
                    FaultInfo(
                        object=f"snapshot {record.id}",
                        path=None,
                        cause="its fingerprint is not the one that was committed",
                        snapshot=record.id,
                    )
                )
            for layer in manifest.layers:
                objects[f"layer {layer.id}"] = layer.bytes
            if manifest.memory is not None:
                objects[f"memory {manifest.memory.id}"] = manifest.memory.bytes
            found = await asyncio.to_thread(self._verify_one, manifest, seen)
            if found:
                # An image that was dropped while it was read is no fault.
                try:
                    _, now = await self._again(record)
                except SnapshotNotFound:
                    continue
                if now != manifest:
                    found = await asyncio.to_thread(self._verify_one, now, {})
            faults.extend(
                FaultInfo(
                    object=fault.object,
                    path=None
                    if fault.path is None
                    else os.fsencode(fault.path).decode(errors="replace"),
                    cause=fault.cause,
                    snapshot=record.id,
                )
                for fault in found
            )
        return VerifyReport(
            session=session.id,
            ok=not faults,
            snapshots=len(records),
            objects=len(objects) + len(records),
            bytes=sum(objects.values()),
            faults=faults,
        )

    async def _again(self, record: SnapshotRecord) -> tuple[SnapshotRecord, Snapshot]:
        """Row and manifest at rest: thinning changes one after the other, holding the gate."""
        gate: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        with contextlib.suppress(SessionNotFound, SessionElsewhere):
            gate = (await self._context.registry.find(None, record.session)).gate.closed("verify")
        async with gate:
            found = await self._context.database.get_snapshot(None, record.id, hidden=True)
            return found, await self._snapshots.read(record.id)

    def _verify_one(
        self, manifest: Snapshot, seen: dict[str, builtins.list[Fault]]
    ) -> builtins.list[Fault]:
        """Verify a snapshot, reading no layer or image twice in one report."""
        found: builtins.list[Fault] = []
        for layer in manifest.layers:
            name = f"layer {layer.id}"
            if name not in seen:
                seen[name] = list(self._context.store.verify_layer(layer))
            found.extend(seen[name])
        if manifest.memory is not None:
            name = f"memory {manifest.memory.id}"
            if name not in seen:
                seen[name] = list(self._context.store.verify_memory(manifest.memory))
            found.extend(seen[name])
        return found

    async def events(
        self, who: Principal, ref: str, *, after: int, limit: int, kinds: Collection[str]
    ) -> builtins.list[EventInfo]:
        """Events after a sequence number, of some kinds or all."""
        session = await self._context.registry.look(who.tenant, ref)
        await self._context.networks.effects.flush()
        events = await self._context.database.list_events(
            session.id, after=after, limit=limit, kinds=kinds
        )
        return [event_info(event) for event in events]

    async def follow(self, who: Principal, ref: str, *, after: int) -> AsyncIterator[EventInfo]:
        """Events after a sequence number, and new ones as they happen."""
        session = await self._context.registry.look(who.tenant, ref)
        async for event in self._context.database.follow_events(session.id, after=after):
            yield event_info(event)
            if event.kind == "delete" and event.result == "ok":
                return  # nothing can come after it
