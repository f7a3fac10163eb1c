"""Which sessions this node has: taking those that nobody holds, and letting go of its own.

Guarantee: a session is taken by one node alone, and released only when everything of it is in the
object store, so that whoever takes it next misses nothing; what another node changed meanwhile is
never shown from this disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from sojourn.database.records import SnapshotRecord
from sojourn.errors import (
    SessionNotFound,
    SnapshotNotFound,
    StaleEpoch,
    StoreUnreachable,
    WrongState,
)
from sojourn.model import Session, SessionKind
from sojourn.server.context import Context
from sojourn.server.nodes.identity import NodeIdentity
from sojourn.server.registry import ActiveSession, elsewhere
from sojourn.server.turns import Turns

log = logging.getLogger(__name__)

_TRIES = 3
RELEASE_SECONDS = 120.0


class Holding:
    """Implements `sojourn.server.registry.Taker`, and releases sessions."""

    def __init__(self, context: Context, node: NodeIdentity, turns: Turns) -> None:
        self._context = context
        self._node = node
        self._turns = turns

    @property
    def id(self) -> str:
        """The holder of its sessions."""
        return self._node.id

    # -- coming -----------------------------------------------------------------------------

    async def take(self, session: Session) -> Session:
        """Hold a session that nobody holds. Raises SessionElsewhere, WrongState, SessionNotFound,
        NodeUnavailable."""
        database = self._context.database
        for _ in range(_TRIES):
            self._context.require_lease()
            try:
                taken = await database.take_session(session.id, self._node.fence, session.epoch)
            except StaleEpoch:
                session = await database.get_session(None, session.id)
                if session.holder is not None:
                    break
                continue
            log.info("session %s is this node's now, epoch %d", taken.id, taken.epoch)
            self._context.replicator.changed(taken)
            return taken
        raise elsewhere(session)

    async def arrived(self, session: Session) -> None:
        """Serve what it exposes; show nothing of it that is older than its rows."""
        await self._forget_outdated(session)
        await self._context.ports.arrived(session.id)

    async def _forget_outdated(self, session: Session) -> None:
        """Another node may have taken the memory out of a snapshot that this disk still has with
        it: only manifests change, layers and images never."""
        store = self._context.store
        for record in await self._context.database.list_snapshots(session.id):
            if not record.thinned or record.node == self.id:
                continue
            with contextlib.suppress(SnapshotNotFound):
                manifest = await asyncio.to_thread(store.read_snapshot, record.id)
                if manifest.fingerprint != record.fingerprint:
                    await asyncio.to_thread(store.delete_snapshot, record.id)

    # -- going ------------------------------------------------------------------------------

    def left(self, session: Session) -> None:
        """It is no longer this node's."""
        self._context.ports.left(session.id)

    async def release(self, ref: str, timeout: float = RELEASE_SECONDS) -> Session:
        """Let any node take a session, which is put away; once all of it is in the object store.

        Raises WrongState (it is live), SessionBusy, SessionElsewhere, StoreUnreachable."""
        active = await self.mine(ref)
        await self._turns.settle(active)
        await self.make_durable(active, timeout)
        async with active.gate.closed("release"):
            session = active.session
            if session.live:
                raise WrongState(
                    f"session {session.id} is {session.state} and stays with its node",
                    next_step="Suspend it first, or migrate it.",
                    session=session.id,
                    state=str(session.state),
                )
            released = await self._context.database.release_session(
                session.id, self._node.fence, session.epoch
            )
            self._context.registry.leave(active, released)
        log.info("session %s is released", session.id)
        return released

    async def make_durable(self, active: ActiveSession, timeout: float) -> None:
        """Wait until the object store has every snapshot of a session that only this disk has.
        Raises StoreUnreachable, and what keeps a snapshot from being sent."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        database = self._context.database
        records = await database.list_snapshots(active.id)
        # What lies on another disk comes from there, or never.
        own = [record for record in records if record.node in (None, self.id)]
        wanted = [record.id for record in own if record.durable_at is None]
        if active.session.head is not None and active.session.head not in wanted:
            wanted.append(active.session.head)
        for id in wanted:
            left = end - loop.time()
            if left <= 0:
                raise StoreUnreachable(
                    f"session {active.id} is not in the object store after {timeout:g} s",
                    session=active.id,
                )
            with contextlib.suppress(SnapshotNotFound):  # removed meanwhile
                await self._context.replicator.durable(id, left)

    async def hold(self, id: str) -> None:
        """Hold a session that nobody holds; one that this node holds stays. Raises
        SessionNotFound, SessionElsewhere."""
        await self._context.registry.find(None, id)

    async def mine(self, ref: str) -> ActiveSession:
        """A session that this node holds already. Raises SessionNotFound, SessionElsewhere."""
        session = await self._context.registry.look(None, ref)
        if session.holder != self.id:
            raise elsewhere(session)
        return await self._context.registry.here(session)

    async def held(self) -> list[Session]:
        """Every session that this node holds, as the database has them."""
        found: list[Session] = []
        cursor: str | None = None
        while True:
            page = await self._context.database.list_sessions(
                None, limit=500, after=cursor, holder=self.id
            )
            found += page.items
            cursor = page.next
            if cursor is None:
                return found

    async def tidy(self) -> None:
        """Drop the manifests of sessions that are other nodes' and safe, and of snapshots that are
        gone: they would keep their layers and images on this disk for ever."""
        context = self._context
        heads = {active.session.head for active in context.registry.all()}
        unrecorded: list[str] = []
        for id in await asyncio.to_thread(context.store.snapshot_ids):
            try:
                record = await context.database.get_snapshot(None, id, hidden=True)
            except SnapshotNotFound:
                unrecorded.append(id)
                continue
            safe = record.durable_at is not None and id not in heads
            if not safe or await self._needs(record):
                continue
            await asyncio.to_thread(context.store.delete_snapshot, id)
        if not unrecorded:
            return
        async with context.guard.collecting():
            for id in unrecorded:
                # One that was just being published has its row by now.
                with contextlib.suppress(SnapshotNotFound):
                    await context.database.get_snapshot(None, id, hidden=True)
                    continue
                await asyncio.to_thread(context.store.delete_snapshot, id)

    async def _needs(self, record: SnapshotRecord) -> bool:
        """Whether a session of this node may need a snapshot's manifest soon."""
        try:
            session = await self._context.database.get_session(None, record.session)
        except SessionNotFound:
            return True  # deleted: the collection removes row and manifest together
        return session.kind is SessionKind.TEMPLATE or session.holder == self.id
