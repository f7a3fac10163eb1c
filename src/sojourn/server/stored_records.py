"""What the object store knows of sessions and tenants, kept as the database has it.

Guarantee: a record is written before a snapshot that it names counts as durable, and again whenever
what it tells has changed. Where several nodes write, each reads what is stored first, then the
database, and replaces only what it read: so a record of before never replaces a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable

import msgspec
from blake3 import blake3

from sojourn import faultpoints
from sojourn.database.base import Database
from sojourn.errors import (
    Conflict,
    IntegrityError,
    Interrupted,
    ObjectMissing,
    SessionNotFound,
    SojournError,
    StaleEpoch,
    StoreKeyInvalid,
    StoreUnreachable,
)
from sojourn.model import Session, SessionState
from sojourn.repository.marking import each
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord, SnapshotNote, TenantRecord
from sojourn.server.pauses import Pauses
from sojourn.server.sender import Sender

log = logging.getLogger(__name__)

_TRIES = 20


class StoredRecords:
    """Writes records. `holder` is this node where there are several; `sender` gives who sends."""

    def __init__(
        self, database: Database, sender: Callable[[], Sender], holder: str | None
    ) -> None:
        self._database = database
        self._sender = sender
        self._holder = holder
        self._changed: set[str] = set()
        self._unread: set[str] = set()  # sessions whose records were not looked at since the start
        self._lost: set[str] = set()  # sessions whose records the store has not, or not whole
        self._tenants: set[str] = set()
        self.pauses = Pauses()
        """Of sessions whose records cannot be written."""

    def changed(self, session: str) -> None:
        """What is told of a session may be another than what was written."""
        self._changed.add(session)

    async def note_all(self) -> None:
        """At the start: look at the record of every session of this server once."""
        cursor: str | None = None
        while True:
            page = await self._database.list_sessions(
                None, limit=500, after=cursor, kind=None, holder=self._holder
            )
            self._changed.update(session.id for session in page.items)
            self._unread.update(session.id for session in page.items)
            cursor = page.next
            if cursor is None:
                return

    # -- what was lost ----------------------------------------------------------------------

    async def look_for_lost(self, repository: Repository, stopping: Callable[[], bool]) -> None:
        """Once after a start: the records that were written and cannot be read any more are to be
        written again, or a recovery would miss their sessions."""
        if not self._unread:
            return
        found: set[str] = set()
        for tenant in await self._database.list_tenants():
            # Of many nodes each reads the records of its own sessions.
            ids = self._unread if self._holder is not None else None
            found.update(await asyncio.to_thread(_readable, repository, tenant.id, ids, stopping))
            if stopping():
                return
        self._lost = self._unread - found
        self._unread = set()

    # -- writing ----------------------------------------------------------------------------

    async def tenant(self, tenant: str) -> None:
        """Write a tenant's name down, once."""
        if tenant not in self._tenants:
            found = await self._database.get_tenant(tenant)
            record = TenantRecord(found.id, found.name, found.created_at)
            await self._sender().put_tenant(record)
            self._tenants.add(tenant)

    async def announce(self, session: str, repository: Repository) -> None:
        """A session's record is there before its first snapshot: snapshots without a record are
        those of a deleted session."""
        if await self._database.record_digest(session) is None:
            await self.write(session, repository)

    async def round(self, repository: Repository, stopping: Callable[[], bool]) -> None:
        """Write what has changed."""
        self._changed.update(self.pauses.over())
        while self._changed and not stopping():
            session = self._changed.pop()
            try:
                await self.write(session, repository)
            except StaleEpoch:
                continue
            except (StoreUnreachable, StoreKeyInvalid, Interrupted):
                self._changed.add(session)
                raise
            except SojournError as error:
                # One record that cannot be written must not hold up the others.
                self.pauses.put_off(session, str(error))
                log.error("the record of session %s cannot be written: %s", session, error)
            except BaseException:
                self._changed.add(session)
                raise

    async def write(self, id: str, repository: Repository, *, sent: str | None = None) -> None:
        """Write a session's record when it differs from what was written last. `sent` is a
        snapshot that the store has though its row does not say so yet. Raises StaleEpoch when the
        session is another server's now; it is left alone from then on."""
        for _ in range(_TRIES):
            try:
                await self._write(id, repository, sent)
                return
            except Conflict as error:
                if isinstance(error, StaleEpoch) or self._holder is None:
                    raise
        raise Conflict(f"the record of session {id} is being written by others")

    async def _write(self, id: str, repository: Repository, sent: str | None) -> None:
        database = self._database
        try:
            session = await database.get_session(None, id)
            stored, version = None, None
            if self._holder is not None:
                if sent is None and session.holder not in (None, self._holder):
                    return  # the other node does it
                stored, version = await asyncio.to_thread(
                    repository.stored_session, session.tenant, id
                )
                session = await database.get_session(None, id)
        except SessionNotFound:
            self.pauses.clear(id)
            return  # deleted: on the list of removals
        record = await self._record(session, sent)
        if record is None:
            return
        digest = blake3(msgspec.msgpack.encode(record)).hexdigest()
        if digest == await database.record_digest(id) and id not in self._lost:
            if not math.isinf(self.pauses.left(id)):
                self.pauses.clear(id)
            return
        await self.tenant(session.tenant)
        stamped = msgspec.structs.replace(record, written_at=time.time())
        try:
            if self._holder is None:
                await self._sender().put_session(stamped)
            else:
                _require_ours(stored, stamped)
                await self._sender().replace_session(stamped, version)
        except StaleEpoch as error:
            self.pauses.give_up(id, error.message)
            log.error("%s", error)
            raise
        self.pauses.clear(id)
        self._lost.discard(id)
        faultpoints.reach("replicate.record")
        with contextlib.suppress(SessionNotFound):
            await database.note_record(id, digest)

    async def _record(self, session: Session, sent: str | None) -> SessionRecord | None:
        """What is to be told of a session; None: nothing yet."""
        database = self._database
        notes = [
            SnapshotNote(one.id, one.label, one.thinned, one.turn, one.parent)
            for one in await database.list_snapshots(session.id)
            if one.durable_at is not None or one.id == sent
        ]
        head = session.head
        if head is not None:
            found = await database.get_snapshot(None, head, hidden=True)
            while found.durable_at is None and found.id != sent and found.parent is not None:
                found = await database.get_snapshot(None, found.parent, hidden=True)
            head = found.id if found.durable_at is not None or found.id == sent else None
        if session.state is SessionState.CREATING and head is None:
            return None
        settled = msgspec.structs.replace(
            session,
            head=head,
            state=SessionState.SUSPENDED,
            sandbox=None,
            node=None,
            holder=None,
            idle_deadline=None,
            cause=None,
            updated_at=session.created_at,
        )
        return SessionRecord(settled, notes, 0.0, await database.server_id())


def _require_ours(stored: SessionRecord | None, record: SessionRecord) -> None:
    """Raise StaleEpoch where what is stored is not this database's, or says that the session is
    gone."""
    if stored is None:
        return
    gone = stored.session.state is SessionState.DELETED
    if gone or stored.owner != record.owner or stored.session.epoch > record.session.epoch:
        raise StaleEpoch(
            f"session {record.session.id} was deleted or taken over by another database",
            next_step="Delete it here, or stop this cluster: the other one has it now.",
            session=record.session.id,
            epoch=stored.session.epoch,
            expected=record.session.epoch,
        )


def _readable(
    repository: Repository,
    tenant: str,
    ids: Iterable[str] | None,
    stopping: Callable[[], bool],
) -> set[str]:
    """The sessions of a tenant with a record that can be read; of these, or of all there are."""
    found: set[str] = set()

    def read(id: str) -> None:
        if stopping():
            return
        with contextlib.suppress(IntegrityError, ObjectMissing):
            repository.read_session(tenant, id)
            found.add(id)

    each(repository.session_ids(tenant) if ids is None else sorted(ids), read)
    return found
