"""Copying what is safe on this node to the object store, behind the sessions' backs.

Guarantee: a snapshot's row says `durable_at` only after the object store acknowledged everything
the snapshot needs; what a crash cuts off is taken up at the next start and not sent twice; a store
that cannot be reached costs nothing but lag, which is told; nothing is removed from the store
before its row is gone.

One task does all of it in order: removals, then snapshots (heads of live sessions first), then
the sessions' own records, then the local cache's limit. The order of two objects that depend on
one another is therefore never in doubt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from blake3 import blake3

from sojourn import faultpoints
from sojourn.database.base import Database
from sojourn.database.records import SnapshotRecord
from sojourn.errors import (
    IntegrityError,
    Interrupted,
    ObjectMissing,
    SessionNotFound,
    SnapshotNotFound,
    SojournError,
    StaleEpoch,
    StorageFull,
    StoreKeyInvalid,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
)
from sojourn.model import Session, SessionState, SnapshotKind
from sojourn.repository.marking import each
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord, SnapshotNote, TenantRecord
from sojourn.server.guards import StoreGuard
from sojourn.server.opening import StoreOpening
from sojourn.server.pauses import Pauses
from sojourn.server.sender import Sender
from sojourn.server.sources import RepositorySource
from sojourn.store.local import LocalStore

log = logging.getLogger(__name__)

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0
_LOOK_SECONDS = 30.0
_AT_ONCE = 0.02
_BATCH = 50
_COLLECT_FIRST = 900.0  # seconds after the start that the object store is collected at the latest
_COLLECT_GRACE = 3600.0  # seconds that what nothing needs is kept
_SLOW_SECONDS = 300.0


class StoreSettings(msgspec.Struct, frozen=True):
    """Where and how snapshots become durable. `url` None: nowhere. `delay` seconds an automatic
    snapshot waits for a newer one to take its place; `cache_bytes` bounds the node's own store;
    the object store is collected all `collect_every` seconds, with 0 never."""

    url: str | None = None
    secret: bytes | None = None
    cache_bytes: int | None = None
    delay: float = 2.0
    collect_every: float = 6 * 3600.0

    def __repr__(self) -> str:
        return f"StoreSettings(url={self.url!r}, encrypted={self.secret is not None})"


class ReplicationStatus(msgspec.Struct, frozen=True):
    """Where copies go. `error` is what holds them up; their lag is told by the database."""

    url: str | None
    sent_bytes: int
    error: str | None


class Replicator:
    """The worker of one server. Without a URL it does nothing and says so."""

    def __init__(self, database: Database, settings: StoreSettings, root: Path) -> None:
        self._database = database
        self.settings = settings
        self._opening: StoreOpening | None = None
        if settings.url is not None:
            self._opening = StoreOpening(database, settings.url, settings.secret, root)
            self._sender = Sender(settings.url, root)
            self._collector = Sender(settings.url, root)
        self._wake = asyncio.Event()
        self._hurry: set[str] = set()
        self._changed: set[str] = set()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._unread: set[str] = set()  # sessions whose records were not looked at since the start
        self._lost: set[str] = set()  # sessions whose records the store has not, or not whole
        self._tenants: set[str] = set()
        self._snapshots, self._sessions = Pauses(), Pauses()
        self._collecting: asyncio.Task[None] | None = None
        self._collect_at = time.monotonic() + min(_COLLECT_FIRST, settings.collect_every)
        self._error: str | None = None
        self._sent = 0
        self._stopping = False

    def attach(
        self,
        store: LocalStore,
        source: RepositorySource,
        guard: StoreGuard,
        in_use: Callable[[], set[str]],
    ) -> None:
        """Say where snapshots come from. `in_use` gives the layers and images of sandboxes."""
        self._store = store
        if self._opening is not None:
            self._opening.on_change = source.forget
        self._source = source
        self._guard = guard
        self._in_use = in_use

    # -- life -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the repository, as `StoreOpening.start`. What fails and does not keep the sessions
        from their users is tried again, and told meanwhile."""
        if self._opening is not None:
            self._error = await self._opening.start()

    def open_repository(self) -> Repository:
        """The repository, for who reads. Blocks. Raises Unsupported when the server has none,
        StoreUnreachable."""
        if self._opening is None:
            raise _nowhere()
        return self._opening.read()

    async def start(self) -> None:
        """Begin to replicate; every live session's record is looked at once."""
        if self.settings.url is None:
            return
        cursor: str | None = None
        while True:
            page = await self._database.list_sessions(None, limit=500, after=cursor, kind=None)
            self._changed.update(session.id for session in page.items)
            self._unread.update(session.id for session in page.items)
            cursor = page.next
            if cursor is None:
                break
        self._task = asyncio.create_task(self._work(), name="replication")

    async def stop(self) -> None:
        """Stop after what is being sent; the next server goes on from there."""
        self._stopping = True
        self._wake.set()
        if self._opening is not None:
            self._opening.stop()
        if self._task is not None and self._opening is not None:
            await self._sender.close()
            await self._collector.close()
            if self._collecting is not None:
                await asyncio.wait({self._collecting})
            if self._opening.accepted is None:
                self._task.cancel()  # there is nothing that it could be sending
            await asyncio.wait({self._task})
            self._task = None
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(Interrupted("the server stops", next_step=""))
        self._waiting.clear()

    async def close(self) -> None:
        """Let go of the object store, after everything that may read through it. Idempotent."""
        if self._opening is not None:
            await self._opening.close()

    # -- asking -----------------------------------------------------------------------------

    def changed(self, session: Session) -> None:
        """A session's record was committed: there may be something to copy."""
        if self.settings.url is not None:
            self._changed.add(session.id)
            self._wake.set()

    def removed(self, session: str) -> None:
        """A snapshot of a session is given up: its record is another, and what the store has of
        the snapshot may go once its row is gone."""
        if self.settings.url is not None:
            self._changed.add(session)
            self._wake.set()

    async def durable(self, snapshot: str, timeout: float) -> SnapshotRecord:
        """Wait until a snapshot is in the object store.

        Raises SnapshotNotFound, Unsupported, StoreUnreachable when it is not in time, and what
        stops this very snapshot (StorageFull, StoreRefused, IntegrityError): it is safe on this
        node all the same, and tried again later.
        """
        database = self._database
        record = await database.get_snapshot(None, snapshot, hidden=True)
        if record.durable_at is not None:
            return record
        if self.settings.url is None:
            raise _nowhere()
        self._snapshots.clear(snapshot)  # whoever asks may know that the cause is gone
        try:
            async with asyncio.timeout(timeout):
                while record.durable_at is None:
                    await self._tried(snapshot)
                    record = await database.get_snapshot(None, snapshot, hidden=True)
        except TimeoutError:
            cause = self._sessions.cause(record.session) or self._error
            raise StoreUnreachable(
                f"snapshot {snapshot} is not in the object store after {timeout:g} s"
                + (f": {cause}" if cause else ""),
                snapshot=snapshot,
            ) from None
        finally:
            if snapshot not in self._waiting:
                self._hurry.discard(snapshot)
        return record

    async def _tried(self, snapshot: str) -> None:
        """Wait until a snapshot was sent, is gone, or cannot be sent, which is raised."""
        if self._stopping:
            raise Interrupted("the server stops", next_step="")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(snapshot, [])
        waiting.append(future)
        self._hurry.add(snapshot)
        self._wake.set()
        try:
            await future
        finally:
            waiting.remove(future)
            if not waiting and self._waiting.get(snapshot) is waiting:
                del self._waiting[snapshot]

    def status(self) -> ReplicationStatus:
        """Where copies go, and what holds them up."""
        repository = self._opening.accepted if self._opening is not None else None
        return ReplicationStatus(
            url=repository.url if repository else self.settings.url,
            sent_bytes=self._sent,
            error=self._error
            or self._snapshots.any_cause()
            or self._sessions.any_cause()
            or self._slow(),
        )

    def _slow(self) -> str | None:
        """Whether one thing that is being sent takes so long that somebody should look."""
        busy = self._sender.busy if self._opening is not None else 0.0
        return f"one request has taken {busy:.0f} s so far" if busy > _SLOW_SECONDS else None

    # -- working ----------------------------------------------------------------------------

    async def _work(self) -> None:
        pause = _RETRY_FIRST
        while not self._stopping:
            self._wake.clear()
            try:
                due = await self._round()
                self._error, pause = None, _RETRY_FIRST
            except (SojournError, OSError) as error:
                if isinstance(error, StoreKeyInvalid | StoreRefused):
                    self._refuse_all(error)  # it does not pass by waiting
                if self._error is None and not self._stopping:
                    log.warning("replication waits: %s", error)
                self._error = str(error)
                due = pause * random.uniform(0.5, 1.0)
                pause = min(pause * 2, _RETRY_MOST)
                self._wake.clear()  # what is new does not make an unreachable store reachable
            except Exception as error:
                # A fault in one round must not be the end of every copy.
                log.exception("a fault in replication")
                self._error, due = f"a fault: {error!r}", _RETRY_MOST
            if self._stopping:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due):
                    await self._wake.wait()

    def _refuse_all(self, error: SojournError) -> None:
        for waiting in list(self._waiting.values()):
            for future in waiting:
                if not future.done():
                    future.set_exception(error)

    async def _round(self) -> float:
        """All that is to be done now; answers after how many seconds there may be more."""
        assert self._opening is not None
        repository = await self._opening.repository()
        self._sender.expect(repository)
        due = await self._send()
        if self._unread:
            await self._look_for_lost(repository)
        await self._record()
        await self._evict()
        self._collect_now_and_then(repository)
        return min(due, _LOOK_SECONDS)

    def _collect_now_and_then(self, repository: Repository) -> None:
        """Free in the object store what nothing needs, beside everything else and in a process of
        its own: what is sent does not wait for it."""
        now = time.monotonic()
        if self._collecting is not None and not self._collecting.done():
            return
        every = self.settings.collect_every
        if now < self._collect_at or not every:
            return
        self._collect_at = now + every
        self._collector.expect(repository)
        self._collecting = asyncio.create_task(self._collect(), name="collect objects")

    async def _collect(self) -> None:
        try:
            freed = await self._collector.collect(_COLLECT_GRACE)
        except (SojournError, OSError) as error:
            if not self._stopping:
                log.error("the object store was not collected: %s", error)
            return
        log.info("the object store was collected and gave %d bytes back", freed)

    async def _look_for_lost(self, repository: Repository) -> None:
        """Once after a start: the records that were written and cannot be read any more are to be
        written again, or a recovery would miss their sessions."""
        found: set[str] = set()
        for tenant in await self._database.list_tenants():
            found.update(await asyncio.to_thread(self._readable, repository, tenant.id))
            if self._stopping:
                return
        self._lost = self._unread - found
        self._unread = set()

    def _readable(self, repository: Repository, tenant: str) -> set[str]:
        """The sessions of a tenant with a record that can be read."""
        found: set[str] = set()

        def read(id: str) -> None:
            if self._stopping:
                return
            with contextlib.suppress(IntegrityError, ObjectMissing):
                repository.read_session(tenant, id)
                found.add(id)

        each(repository.session_ids(tenant), read)
        return found

    async def _remove(self) -> None:
        database = self._database
        while removals := await database.store_removals(limit=200):
            # Before the store may lose it: what no row refers to any more is not counted on.
            self._source.forget(await database.durable_objects())
            for removal in removals:
                await self._sender.remove(removal.kind, removal.tenant, removal.object)
            faultpoints.reach("replicate.remove")
            await database.forget_removals([removal.id for removal in removals])

    async def _send(self) -> float:
        """Send what is due. Heads come first, and are looked for again after each snapshot. It ends
        at times also where there is always more: what comes after it must have its turn."""
        end = time.monotonic() + _LOOK_SECONDS
        while not self._stopping and time.monotonic() < end:
            # What was removed before a snapshot was taken is gone once that one is durable.
            await self._remove()
            chosen, due = await self._choose()
            if chosen is None:
                return due
            await self._send_one(chosen)
        return _AT_ONCE

    async def _choose(self) -> tuple[SnapshotRecord | None, float]:
        """What is to be sent now; else after how many seconds there may be something."""
        limit = _BATCH
        while True:
            due = _LOOK_SECONDS
            records = await self._database.undurable_snapshots(limit=limit)
            for record in records:
                wait = self._wait(record)
                if wait <= 0:
                    return record, 0.0
                due = min(due, wait)
            if len(records) < limit:
                self._snapshots.keep({record.id for record in records})
                return None, max(due, _AT_ONCE)
            limit *= 4  # what cannot be sent now hides nothing that can

    def _wait(self, record: SnapshotRecord) -> float:
        """Seconds until a snapshot should be sent."""
        put_off = max(self._sessions.left(record.session), self._snapshots.left(record.id))
        if put_off or record.id in self._hurry or record.kind is not SnapshotKind.AUTO:
            return put_off
        # A clock set back must not make a snapshot wait for long.
        return min(record.created_at + self.settings.delay - time.time(), self.settings.delay)

    async def _send_one(self, record: SnapshotRecord) -> None:
        try:
            snapshot = await asyncio.to_thread(self._store.read_snapshot, record.id)
            parent = None
            if record.parent is not None:
                with contextlib.suppress(SojournError):
                    parent = await asyncio.to_thread(self._store.read_snapshot, record.parent)
            await self._tenant(record.tenant)
            await self._announce(record.session)
            sent = await self._sender.push(record.tenant, snapshot, parent)
            self._sent += sent
            faultpoints.reach("replicate.push")
            # The record first: what counts as durable is what a recovery would find.
            await self._record_one(record.session, sent=record.id)
            if not await self._database.mark_durable(
                record.id, fingerprint=snapshot.fingerprint, at=time.time()
            ):
                # Thinned while it was sent, or being thinned: later it is of one mind.
                self._snapshots.put_off(record.id, f"snapshot {record.id} is being changed")
                return
            faultpoints.reach("replicate.mark")
        except (StoreUnreachable, StoreKeyInvalid):
            raise
        except Interrupted as error:
            if not self._stopping:
                # The process may end over this very snapshot each time: others come first.
                self._snapshots.put_off(record.id, str(error))
            raise
        except StaleEpoch as error:
            self._failed(record.id, error)  # what concerns the session is noted already
            return
        except (SojournError, OSError) as error:
            if not await self._there(record.id):
                self._done(record.id)  # its removal is on the list and comes after this
                return
            # One bad snapshot must not hold up the others.
            self._snapshots.put_off(record.id, str(error))
            log.error("snapshot %s cannot be sent to the object store: %s", record.id, error)
            self._failed(record.id, error)
            if isinstance(error, (StorageFull, StoreRefused)):
                raise  # nor will the store take the next one
            return
        except Exception as error:
            self._snapshots.put_off(record.id, repr(error))  # a fault over this one alone, maybe
            raise
        self._snapshots.clear(record.id)
        self._changed.add(record.session)
        self._source.note(record)
        self._done(record.id)

    async def _there(self, snapshot: str) -> bool:
        try:
            await self._database.get_snapshot(None, snapshot, hidden=True)
        except SnapshotNotFound:
            return False
        return True

    def _done(self, snapshot: str) -> None:
        self._hurry.discard(snapshot)
        for future in self._waiting.pop(snapshot, []):
            if not future.done():
                future.set_result(None)

    def _failed(self, snapshot: str, error: SojournError | OSError) -> None:
        """Who waits for it learns why it is not there, instead of waiting for their time to end."""
        told = error if isinstance(error, SojournError) else SojournError(str(error))
        for future in self._waiting.pop(snapshot, []):
            if not future.done():
                future.set_exception(told)

    # -- records ----------------------------------------------------------------------------

    async def _tenant(self, tenant: str) -> None:
        if tenant not in self._tenants:
            found = await self._database.get_tenant(tenant)
            record = TenantRecord(found.id, found.name, found.created_at)
            await self._sender.put_tenant(record)
            self._tenants.add(tenant)

    async def _announce(self, session: str) -> None:
        """A session's record is there before its first snapshot: snapshots without a record are
        those of a deleted session."""
        if await self._database.record_digest(session) is None:
            await self._record_one(session)

    async def _record(self) -> None:
        self._changed.update(self._sessions.over())
        while self._changed and not self._stopping:
            session = self._changed.pop()
            try:
                await self._record_one(session)
            except StaleEpoch:
                continue
            except (StoreUnreachable, StoreKeyInvalid, Interrupted):
                self._changed.add(session)
                raise
            except SojournError as error:
                # One record that cannot be written must not hold up the others.
                self._sessions.put_off(session, str(error))
                log.error("the record of session %s cannot be written: %s", session, error)
            except BaseException:
                self._changed.add(session)
                raise

    async def _record_one(self, id: str, *, sent: str | None = None) -> None:
        """Write a session's record when it differs from what was written last. `sent` is a
        snapshot that the store has though its row does not say so yet. Raises StaleEpoch when the
        session is another server's now; it is left alone from then on."""
        database = self._database
        try:
            session = await database.get_session(None, id)
        except SessionNotFound:
            self._sessions.clear(id)
            return  # deleted: on the list of removals
        notes = [
            SnapshotNote(one.id, one.label, one.thinned, one.turn, one.parent)
            for one in await database.list_snapshots(id)
            if one.durable_at is not None or one.id == sent
        ]
        head = session.head
        if head is not None:
            found = await database.get_snapshot(None, head, hidden=True)
            while found.durable_at is None and found.id != sent and found.parent is not None:
                found = await database.get_snapshot(None, found.parent, hidden=True)
            head = found.id if found.durable_at is not None or found.id == sent else None
        if session.state is SessionState.CREATING and head is None:
            return
        settled = msgspec.structs.replace(
            session,
            head=head,
            state=SessionState.SUSPENDED,
            sandbox=None,
            node=None,
            idle_deadline=None,
            cause=None,
            updated_at=session.created_at,
        )
        owner = await database.server_id()
        record = SessionRecord(settled, notes, 0.0, owner)
        digest = blake3(msgspec.msgpack.encode(record)).hexdigest()
        if digest == await database.record_digest(id) and id not in self._lost:
            if not math.isinf(self._sessions.left(id)):
                self._sessions.clear(id)
            return
        await self._tenant(session.tenant)
        stamped = msgspec.structs.replace(record, written_at=time.time())
        try:
            await self._sender.put_session(stamped)
        except StaleEpoch as error:
            self._sessions.give_up(id, error.message)
            log.error("%s", error)
            raise
        self._sessions.clear(id)
        self._lost.discard(id)
        faultpoints.reach("replicate.record")
        with contextlib.suppress(SessionNotFound):
            await database.note_record(id, digest)

    # -- cache ------------------------------------------------------------------------------

    async def _evict(self) -> None:
        """Keep the node's own store within its limit, where the object store has what goes."""
        limit = self.settings.cache_bytes
        if limit is None:
            return
        if await asyncio.to_thread(self._store.usage) <= limit:
            return
        async with self._guard.collecting():
            keep = self._in_use()
            freed = await asyncio.to_thread(
                self._store.evict, limit, keep=keep, durable=self._source.has
            )
        if freed:
            log.info("the local cache gave %d bytes back", freed)


def _nowhere() -> Unsupported:
    return Unsupported(
        "this server keeps snapshots on its own disk only",
        next_step="Start it with an object store (--store URL).",
    )
