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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import msgspec
from blake3 import blake3

from sojourn import faultpoints
from sojourn.database.base import Database
from sojourn.database.records import ObjectStore, SnapshotRecord
from sojourn.errors import (
    Interrupted,
    ObjectMissing,
    SessionNotFound,
    SnapshotNotFound,
    SojournError,
    StaleEpoch,
    StoreKeyInvalid,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
)
from sojourn.model import Session, SessionState, SnapshotKind
from sojourn.repository.backends.base import Backend
from sojourn.repository.copies import StoredCopies
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord, SnapshotNote, TenantRecord
from sojourn.server.guards import StoreGuard
from sojourn.server.sender import Sender
from sojourn.server.sources import RepositorySource
from sojourn.store.local import LocalStore

log = logging.getLogger(__name__)

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0
_LOOK_SECONDS = 30.0
_OPEN_SECONDS = 10.0  # a start waits so long for a store that does not answer
_BATCH = 50

T = TypeVar("T")


class StoreSettings(msgspec.Struct, frozen=True):
    """Where and how snapshots become durable. `url` None: nowhere. `delay` seconds an automatic
    snapshot waits for a newer one to take its place; `cache_bytes` bounds the node's own store."""

    url: str | None = None
    secret: bytes | None = None
    cache_bytes: int | None = None
    delay: float = 2.0

    def __repr__(self) -> str:
        return f"StoreSettings(url={self.url!r}, encrypted={self.secret is not None})"


class ReplicationStatus(msgspec.Struct, frozen=True):
    """How far the object store is behind. `lag` is the age in seconds of the oldest snapshot that
    waits, `error` what stopped the last round."""

    url: str | None
    waiting: int
    lag: float
    sent_bytes: int
    error: str | None


class Replicator:
    """The worker of one server. Without a URL it does nothing and says so."""

    def __init__(self, database: Database, settings: StoreSettings, root: Path) -> None:
        self._database = database
        self._root = root
        self.settings = settings
        self._repository: Repository | None = None
        self._known: ObjectStore | None = None
        self._opening = threading.Lock()
        self._backend: Backend | None = None  # of a repository that is just being opened
        self._wake = asyncio.Event()
        self._hurry: set[str] = set()
        self._changed: set[str] = set()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._meeting: asyncio.Task[None] | None = None  # an opening that takes long
        self._tenants: set[str] = set()
        self._skip: dict[str, tuple[float, float, str]] = {}
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
        if self.settings.url is not None:
            self._sender = Sender(self.settings.url, self.settings.secret, store.root)
        self._source = source
        self._guard = guard
        self._in_use = in_use

    # -- life -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the repository. Raises StoreKeyInvalid, and StoreRefused when it is not the one this
        database speaks of; any failure when it is opened for the first time, but for one that
        cannot be reached. A known one that fails does not keep the sessions from their users: it
        is tried again, and told meanwhile."""
        if self.settings.url is None:
            return
        self._known = await self._database.object_store()
        opening = asyncio.create_task(self._meet(), name="open the object store")
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await asyncio.shield(opening)
        except TimeoutError:
            # Whoever waits for the server does not wait for a store that does not answer.
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._meeting = opening
            self._error = f"the object store has not answered within {_OPEN_SECONDS:g} s"
            log.warning("%s; it is waited for in the background", self._error)
        except StoreKeyInvalid:
            raise
        except SojournError as error:
            passing = isinstance(error, StoreUnreachable)
            if not passing and (self._known is None or "repository" in error.details):
                raise
            self._error = error.message
            log.warning("the object store does not serve yet: %s", error)

    async def _meet(self) -> None:
        await self._greet(await self.repository())

    async def _greet(self, repository: Repository) -> None:
        """Say when the store holds sessions that this server's database has never heard of."""
        known = {tenant.id for tenant in await self._database.list_tenants()}
        stored = await asyncio.to_thread(lambda: [one.id for one in repository.tenants()])
        if strangers := set(stored) - known:
            log.warning(
                "the object store holds sessions of %d tenants that this server does not know;"
                " `sojourn recover` brings them into a new data directory",
                len(strangers),
            )

    def open_repository(self) -> Repository:
        """The opened repository. Blocks. Raises Unsupported when the server has none,
        StoreUnreachable."""
        settings = self.settings
        if settings.url is None:
            raise _nowhere()
        while not self._opening.acquire(timeout=0.2):
            self._check_stopping()  # who opens it may have to wait for long
        try:
            self._check_stopping()
            if self._repository is not None:
                return self._repository
            known = self._known if self._known and self._known.url == settings.url else None
            try:
                found = Repository.open(
                    settings.url, settings.secret, create=known is None, opening=self._note_backend
                )
            except ObjectMissing as error:
                raise _another(known, "there is no repository any more") from error
            if known is not None and found.config.id != known.repository:
                found.close()
                raise _another(known, "another repository stands there now")
            self._repository = found
            return found
        finally:
            self._backend = None
            self._opening.release()

    def _note_backend(self, backend: Backend) -> None:
        self._backend = backend
        if self._stopping:
            backend.close()

    def _check_stopping(self) -> None:
        if self._stopping and self._repository is None:
            raise Interrupted("the server stops", next_step="")

    async def repository(self) -> Repository:
        """`open_repository` for coroutines."""
        if self._repository is not None:
            return self._repository
        self._known = await self._database.object_store()
        found = await _in_daemon(self.open_repository)
        assert self.settings.url is not None
        store = ObjectStore(self.settings.url, found.config.id)
        if self._known is not None and self._known.repository != store.repository:
            await self._all_here(self._known)
        if store != self._known and await self._database.use_object_store(store) and self._known:
            log.warning("another object store than before: everything is sent to it anew")
        self._known = store
        return found

    async def _all_here(self, known: ObjectStore) -> None:
        """Refuse to leave an object store that alone holds something."""
        objects = await self._database.durable_objects()
        here = StoredCopies(self._root)
        gone = await asyncio.to_thread(
            lambda: [id for id in (*objects.layers, *objects.images) if not here.has(id)]
        )
        if gone:
            self._repository = None
            raise StoreRefused(
                f"{len(gone)} layers and memory images are only in the object store {known.url}",
                next_step="Start with that one again, or delete the sessions that need them.",
                repository=known.repository,
            )

    async def start(self) -> None:
        """Begin to replicate; every live session's record is looked at once."""
        if self.settings.url is None:
            return
        cursor: str | None = None
        while True:
            page = await self._database.list_sessions(None, limit=500, after=cursor)
            self._changed.update(session.id for session in page.items)
            cursor = page.next
            if cursor is None:
                break
        self._task = asyncio.create_task(self._work(), name="replication")

    async def stop(self) -> None:
        """Stop after what is being sent; the next server goes on from there."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await self._sender.close()
        if self._meeting is not None:
            self._meeting.cancel()
        if (backend := self._backend) is not None:
            backend.close()  # it is being opened: no further try
        if self._task is not None:
            if self._repository is None:
                self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(Interrupted("the server stops", next_step=""))
        self._waiting.clear()

    async def close(self) -> None:
        """Let go of the object store, after everything that may read through it. Idempotent."""
        if self._repository is not None:
            await asyncio.to_thread(self._repository.close)

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
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(snapshot, []).append(future)
        self._hurry.add(snapshot)
        self._skip.pop(snapshot, None)  # whoever asks may know that the cause is gone
        self._wake.set()
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            later = self._skip.get(record.session)
            cause = later[2] if later is not None else self._error
            raise StoreUnreachable(
                f"snapshot {snapshot} is not in the object store after {timeout:g} s"
                + (f": {cause}" if cause else ""),
                snapshot=snapshot,
            ) from None
        finally:
            with contextlib.suppress(KeyError, ValueError):
                self._waiting[snapshot].remove(future)
                if not self._waiting[snapshot]:
                    del self._waiting[snapshot]
        return await database.get_snapshot(None, snapshot, hidden=True)

    async def status(self) -> ReplicationStatus:
        """How far the store is behind."""
        behind = await self._database.durability(None)
        oldest = min((one.oldest_waiting for one in behind if one.oldest_waiting), default=None)
        repository = self._repository
        return ReplicationStatus(
            url=repository.url if repository else self.settings.url,
            waiting=sum(one.waiting for one in behind),
            lag=0.0 if oldest is None else max(0.0, time.time() - oldest),
            sent_bytes=self._sent,
            error=self._error or next((cause for _, _, cause in self._skip.values()), None),
        )

    # -- working ----------------------------------------------------------------------------

    async def _work(self) -> None:
        pause = _RETRY_FIRST
        while not self._stopping:
            self._wake.clear()
            try:
                due = await self._round()
                self._error, pause = None, _RETRY_FIRST
            except StoreKeyInvalid as error:
                self._error = error.message
                log.error("replication stops: %s", error)
                return
            except (SojournError, OSError) as error:
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

    async def _round(self) -> float:
        """All that is to be done now; answers after how many seconds there may be more."""
        self._sender.expect((await self.repository()).config.id)
        due = await self._send()
        await self._record()
        await self._evict()
        return due

    async def _remove(self) -> None:
        database = self._database
        while removals := await database.store_removals(limit=200):
            for removal in removals:
                await self._sender.remove(removal.kind, removal.tenant, removal.object)
            faultpoints.reach("replicate.remove")
            await database.forget_removals([removal.id for removal in removals])

    async def _send(self) -> float:
        """Send what is due. Heads come first, and are looked for again after each snapshot."""
        database = self._database
        while not self._stopping:
            # What was removed before a snapshot was taken is gone once that one is durable.
            await self._remove()
            now = time.time()
            due = _LOOK_SECONDS
            chosen = None
            for record in await database.undurable_snapshots(limit=_BATCH):
                wait = self._wait(record, now)
                if wait <= 0:
                    chosen = record
                    break
                due = min(due, wait)
            if chosen is None:
                return max(due, 0.02)
            await self._send_one(chosen)
        return _LOOK_SECONDS

    def _wait(self, record: SnapshotRecord, now: float) -> float:
        """Seconds until a snapshot should be sent."""
        later = self._skip.get(record.session) or self._skip.get(record.id)
        if later is not None and later[0] > now:
            return later[0] - now
        if record.id in self._hurry or record.kind is not SnapshotKind.AUTO:
            return 0.0
        # A clock set back must not make a snapshot wait for long.
        return min(record.created_at + self.settings.delay - now, self.settings.delay)

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
                return  # thinned or removed while it was sent: looked at again
            faultpoints.reach("replicate.mark")
        except SnapshotNotFound:
            # Removed meanwhile; its removal is on the list and comes after this.
            self._done(record.id)
            return
        except (StoreUnreachable, Interrupted):
            raise
        except (SojournError, OSError) as error:
            if not await self._there(record.id):
                self._done(record.id)
                return
            # One bad snapshot must not hold up the others.
            pause = self._skip.get(record.id, (0.0, _RETRY_FIRST, ""))[1]
            self._skip[record.id] = (time.time() + pause, min(pause * 2, 600.0), str(error))
            log.error("snapshot %s cannot be sent to the object store: %s", record.id, error)
            self._failed(record.id, error)
            return
        self._skip.pop(record.id, None)
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
        while self._changed and not self._stopping:
            session = self._changed.pop()
            try:
                await self._record_one(session)
            except BaseException:
                self._changed.add(session)
                raise

    async def _record_one(self, id: str, *, sent: str | None = None) -> None:
        """Write a session's record when it differs from what was written last. `sent` is a
        snapshot that the store has though its row does not say so yet."""
        database = self._database
        try:
            session = await database.get_session(None, id)
        except SessionNotFound:
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
        if digest == await database.record_digest(id):
            return
        await self._tenant(session.tenant)
        stamped = msgspec.structs.replace(record, written_at=time.time())
        try:
            await self._sender.put_session(stamped)
        except StaleEpoch as error:
            # Not ours any more: say so, and let the other sessions go on.
            self._skip[id] = (math.inf, math.inf, error.message)
            log.error("%s", error)
            return
        self._skip.pop(id, None)
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


async def _in_daemon(call: Callable[[], T]) -> T:
    """A call in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="open the object store", daemon=True).start()
    return await future


def _another(known: ObjectStore | None, cause: str) -> StoreRefused:
    assert known is not None  # without it any repository is taken
    return StoreRefused(
        f"{known.url} was this server's object store, and {cause}",
        next_step="Bring it back (is its file system mounted?), or give another place (--store),"
        " to which everything is sent anew.",
        repository=known.repository,
    )


def _nowhere() -> Unsupported:
    return Unsupported(
        "this server keeps snapshots on its own disk only",
        next_step="Start it with an object store (--store URL).",
    )
