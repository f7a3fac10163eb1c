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

from sojourn import faultpoints
from sojourn.database.base import Database
from sojourn.database.records import SnapshotRecord
from sojourn.errors import (
    Interrupted,
    SnapshotNotFound,
    SojournError,
    StaleEpoch,
    StorageFull,
    StoreKeyInvalid,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
)
from sojourn.model import Session, SnapshotKind
from sojourn.repository.repository import Repository
from sojourn.server.guards import StoreGuard
from sojourn.server.opening import StoreOpening
from sojourn.server.pauses import Pauses
from sojourn.server.sender import Sender
from sojourn.server.sources import RepositorySource
from sojourn.server.stored_records import StoredRecords
from sojourn.store.local import LocalStore
from sojourn.telemetry import declared, tracing

log = logging.getLogger(__name__)

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0
_LOOK_SECONDS = 30.0
_GONE_SECONDS = 1.0  # between looks whether what is waited for is still there
_ELSEWHERE_SECONDS = 0.5  # between looks at what another node sends: only its row tells
_AT_ONCE = 0.02
_BATCH = 50
_COLLECT_FIRST = 900.0  # seconds after the start that the object store is collected at the latest
_COLLECT_GRACE = 3600.0  # seconds that what nothing needs is kept
_SLOW_SECONDS = 300.0
_DUTY_SECONDS = 120.0


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

    def __init__(
        self,
        database: Database,
        settings: StoreSettings,
        root: Path,
        holder: str | None = None,
    ) -> None:
        self._database = database
        self._holder = holder
        self.settings = settings
        self._opening: StoreOpening | None = None
        if settings.url is not None:
            self._opening = StoreOpening(
                database, settings.url, settings.secret, root, several=holder is not None
            )
            self._sender = Sender(settings.url, root)
            self._collector = Sender(settings.url, root)
        self._wake = asyncio.Event()
        self._hurry: set[str] = set()
        self._records = StoredRecords(database, lambda: self._sender, holder)
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._snapshots, self._sessions = Pauses(), self._records.pauses
        self._duties: dict[str, tuple[float, bool]] = {}
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
        await self._records.note_all()
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
            self._records.changed(session.id)
            self._wake.set()

    def removed(self, session: str) -> None:
        """A snapshot of a session is given up: its record is another, and what the store has of
        the snapshot may go once its row is gone."""
        if self.settings.url is not None:
            self._records.changed(session)
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
                    if math.isinf(self._sessions.left(record.session)):
                        # It was found out before anybody waited.
                        raise StaleEpoch(self._sessions.cause(record.session) or "", next_step="")
                    elsewhere = record.node is not None and record.node != self._holder
                    await self._tried(snapshot, _ELSEWHERE_SECONDS if elsewhere else None)
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

    async def _tried(self, snapshot: str, seconds: float | None) -> None:
        """Wait until a snapshot was sent, is gone, or cannot be sent, which is raised; at most for
        so long, where another node sends it."""
        if self._stopping:
            raise Interrupted("the server stops", next_step="")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(snapshot, [])
        waiting.append(future)
        self._hurry.add(snapshot)
        self._wake.set()
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=_GONE_SECONDS if seconds is None else seconds)
                if seconds is not None or await self._gone(snapshot):
                    break  # deleted before its turn it is never tried
            if future.done():
                future.result()
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
        due = await self._send(repository)
        await self._records.look_for_lost(repository, self._is_stopping)
        await self._records.round(repository, self._is_stopping)
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

    def _is_stopping(self) -> bool:
        return self._stopping

    async def _has_duty(self, duty: str, seconds: float) -> bool:
        """Whether this server does what one of several does for all of them. Asked again only when
        half of the time is over for which the answer holds."""
        if self._holder is None:
            return True
        now = time.monotonic()
        until, has = self._duties.get(duty, (0.0, False))
        if now >= until:
            has = await self._database.hold_duty(duty, self._holder, lease=seconds)
            self._duties[duty] = (now + seconds / 2, has)
        return has

    async def _collect(self) -> None:
        try:
            # Two at once would lose nothing, and only do the same work twice.
            if not await self._has_duty("collect objects", self.settings.collect_every):
                return
            freed = await self._collector.collect(_COLLECT_GRACE)
        except (SojournError, OSError) as error:
            if not self._stopping:
                log.error("the object store was not collected: %s", error)
            return
        log.info("the object store was collected and gave %d bytes back", freed)

    async def _remove(self) -> None:
        database = self._database
        if not await self._has_duty("remove objects", _DUTY_SECONDS):
            return
        while removals := await database.store_removals(limit=200):
            # Before the store may lose it: what no row refers to any more is not counted on. Nodes
            # of several keep by themselves what a snapshot that is not durable needs (`_evict`).
            if self._holder is None:
                self._source.forget(await database.durable_objects())
            for removal in removals:
                await self._sender.remove(removal.kind, removal.tenant, removal.object)
            faultpoints.reach("replicate.remove")
            await database.forget_removals([removal.id for removal in removals])

    async def _send(self, repository: Repository) -> float:
        """Send what is due. Heads come first, and are looked for again after each snapshot. It ends
        at times also where there is always more: what comes after it must have its turn."""
        end = time.monotonic() + _LOOK_SECONDS
        while not self._stopping and time.monotonic() < end:
            # What was removed before a snapshot was taken is gone once that one is durable.
            await self._remove()
            chosen, due = await self._choose()
            if chosen is None:
                return due
            await self._send_one(chosen, repository)
        return _AT_ONCE

    async def _choose(self) -> tuple[SnapshotRecord | None, float]:
        """What is to be sent now; else after how many seconds there may be something."""
        limit = _BATCH
        while True:
            due = _LOOK_SECONDS
            records = await self._database.undurable_snapshots(limit=limit, node=self._holder)
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

    async def _send_one(self, record: SnapshotRecord, repository: Repository) -> None:
        try:
            snapshot = await asyncio.to_thread(self._store.read_snapshot, record.id)
            parent = None
            if record.parent is not None:
                with contextlib.suppress(SojournError):
                    parent = await asyncio.to_thread(self._store.read_snapshot, record.parent)
            await self._records.tenant(record.tenant)
            await self._records.announce(record.session, repository)
            with tracing.span("store push", sojourn__snapshot=record.id) as span:
                sent = await self._sender.push(record.tenant, snapshot, parent)
                span.set(sojourn__bytes=sent)
            self._sent += sent
            declared.STORE_SENT_BYTES.add(amount=sent)
            faultpoints.reach("replicate.push")
            # The record first: what counts as durable is what a recovery would find.
            await self._records.write(record.session, repository, sent=record.id)
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
        self._records.changed(record.session)
        self._source.note(record)
        self._done(record.id)

    async def _there(self, snapshot: str) -> bool:
        try:
            await self._database.get_snapshot(None, snapshot, hidden=True)
        except SnapshotNotFound:
            return False
        return True

    async def _gone(self, snapshot: str) -> bool:
        try:
            return not await self._there(snapshot)
        except SojournError:
            return False  # it is not known: whoever waits goes on

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

    # -- cache ------------------------------------------------------------------------------

    async def _evict(self) -> None:
        """Keep the node's own store within its limit, where the object store has what goes."""
        limit = self.settings.cache_bytes
        if limit is None:
            return
        if await asyncio.to_thread(self._store.usage) <= limit:
            return
        async with self._guard.collecting():
            keep = self._in_use() | await self._needed_here()
            freed = await asyncio.to_thread(
                self._store.evict, limit, keep=keep, durable=self._source.has
            )
        if freed:
            log.info("the local cache gave %d bytes back", freed)

    async def _needed_here(self) -> set[str]:
        """What snapshots of this disk need that the object store does not have yet: where other
        nodes remove snapshots, an object may go from the store that was durable by those alone."""
        if self._holder is None:
            return set()
        limit = 1000
        while True:
            records = await self._database.undurable_snapshots(limit=limit, node=self._holder)
            if len(records) < limit:
                break
            limit *= 4
        images = {record.image for record in records if record.image is not None}
        return images.union(*(record.layers for record in records))


def _nowhere() -> Unsupported:
    return Unsupported(
        "this server keeps snapshots on its own disk only",
        next_step="Start it with an object store (--store URL).",
    )
