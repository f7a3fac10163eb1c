"""Making a lost database anew from the object store alone.

Guarantee: every session whose record the store holds comes back under its id and name, suspended
at its last durable snapshot, with its tree; a record, manifest or tenant that cannot be read is
named and nothing of it is made up. The epochs grow, and the store is told first who has the
sessions now, so a server that still lives with the old database cannot write over what is
recovered. The database gets all of it in one commit: there is everything, or nothing yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from sojourn.database import open_database
from sojourn.database.base import Database
from sojourn.database.records import ObjectStore, SnapshotRecord
from sojourn.database.writes import AppendEvent, InsertSession, InsertSnapshot, Write
from sojourn.errors import Conflict, IntegrityError, ObjectMissing, SojournError
from sojourn.model import Session, SessionKind, SessionState, Snapshot, without_sandbox
from sojourn.repository.inventory import survey
from sojourn.repository.repository import SHARED, Repository
from sojourn.repository.session_records import SessionRecord, SnapshotNote, TenantRecord
from sojourn.server.data import data_lock
from sojourn.server.rejoining import rejoin
from sojourn.server.sources import RepositorySource
from sojourn.store.local import LocalStore

log = logging.getLogger(__name__)

_LONGEST_NAME = 63
_GRACE = 86400.0  # seconds a session whose lifetime is over is kept after it was recovered


class Recovered(msgspec.Struct, frozen=True):
    """What came back, and what could not be read."""

    tenants: int
    sessions: int
    snapshots: int
    faults: list[str]


async def recover(
    data: Path, repository: Repository, *, database_at: str | None = None
) -> Recovered:
    """Make database and manifests in an empty data directory. A database that lies elsewhere and
    was not lost is kept, and what it speaks of is brought back.

    Raises Conflict when it holds sessions already, HostUnfit when a server uses it, and the
    errors of the store. It may be repeated after it was cut off.
    """
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with data_lock(data):
        database = await open_database(database_at or data / "sojourn.db")
        try:
            await database.own()
            page = await database.list_sessions(None, limit=1, kind=None)
            if page.items and database_at is not None and _outlived(database_at, data):
                source = RepositorySource(repository)
                store = await asyncio.to_thread(LocalStore, data / "store", source=source)
                found = await rejoin(database, store, source, repository)
                return Recovered(found.tenants, found.sessions, found.snapshots, found.faults)
            if page.items:
                raise Conflict(
                    "the database holds sessions already",
                    next_step="Recover into an empty data directory and an empty database.",
                )
            await database.use_object_store(ObjectStore(repository.url, repository.config.id))
            source = RepositorySource(repository)
            store = await asyncio.to_thread(LocalStore, data / "store", source=source)
            return await _Recovery(database, store, source, repository).run()
        finally:
            await database.close()


def _outlived(database_at: str, data: Path) -> bool:
    """Whether the data directory is new, and the database another place than it."""
    elsewhere = "://" in database_at or not Path(database_at).absolute().is_relative_to(data)
    return elsewhere and not (data / "token").exists()


class _Recovery:
    def __init__(
        self,
        database: Database,
        store: LocalStore,
        source: RepositorySource,
        repository: Repository,
    ) -> None:
        self._database = database
        self._store = store
        self._source = source
        self._repository = repository
        self._faults: list[str] = []
        self._deleted: set[str] = set()

    async def run(self) -> Recovered:
        writes: list[Write] = []
        tenants = await asyncio.to_thread(self._read_tenants)
        existing = await self._database.list_tenants()
        known, names = {one.id for one in existing}, {one.name for one in existing}
        for tenant in sorted(tenants, key=lambda one: one.created_at):
            if tenant.id not in known:
                # Two servers that shared a store may both have had a tenant of this name.
                name = tenant.name if tenant.name not in names else f"{tenant.name}-{tenant.id}"
                names.add(name)
                await self._database.create_tenant(name, id=tenant.id)
            writes += await self._tenant(tenant.id)
        # At last, and for all tenants at once: until here it can be repeated.
        await self._database.commit(writes)
        sessions = [write.session for write in writes if isinstance(write, InsertSession)]
        live = sum(
            session.state is not SessionState.DELETED and session.kind is SessionKind.SESSION
            for session in sessions
        )
        snapshots = sum(isinstance(write, InsertSnapshot) for write in writes)
        return Recovered(len(tenants), live, snapshots, self._faults)

    async def _tenant(self, tenant: str) -> list[Write]:
        """What of a tenant is to be written down; the store knows already who has it."""
        records = await asyncio.to_thread(self._read_records, tenant)
        manifests = await asyncio.to_thread(self._read_manifests, tenant)
        await asyncio.to_thread(self._read_damages, tenant)
        for id, record in _without_record(tenant, records, manifests, self._deleted).items():
            self._faults.append(
                f"the record of session {id} is lost: it comes back without its name, labels and"
                " settings"
            )
            records[id] = record
        for id, record in records.items():
            if _head(record, manifests) is None:
                self._faults.append(f"session {id}: no snapshot of it had reached the object store")
        writes = _rows(tenant, records, manifests, time.time())
        kept = [write.snapshot for write in writes if isinstance(write, InsertSnapshot)]
        for row in kept:
            self._source.note(row)
        await asyncio.to_thread(self._write_manifests, [manifests[row.id] for row in kept])
        sessions = [write.session for write in writes if isinstance(write, InsertSession)]
        owner = await self._database.server_id()
        for session in sessions:
            if session.state is SessionState.DELETED:
                continue
            # The store first: from here on an older server's word is refused there.
            found = records[session.id]
            record = SessionRecord(
                msgspec.structs.replace(session, cause=None), found.snapshots, time.time(), owner
            )
            await asyncio.to_thread(self._repository.put_session, record, take_over=True)
        return writes

    def _read_tenants(self) -> list[TenantRecord]:
        """Every tenant that has something. One whose record cannot be read keeps its id for a
        name: its sessions are not lost with it."""
        stored = self._repository.tenant_ids()
        lying = survey(self._repository.backend)
        others = {id for id, found in lying.items() if found.snapshots} - {SHARED}
        found = []
        for id in dict.fromkeys([*stored, *sorted(others)]):
            try:
                found.append(self._repository.read_tenant(id))
            except (IntegrityError, ObjectMissing) as error:
                self._faults.append(f"the name of tenant {id}: {error.message}")
                found.append(TenantRecord(id, id, 0.0))
        return found

    def _read_records(self, tenant: str) -> dict[str, SessionRecord]:
        found = {}
        for id in self._repository.session_ids(tenant):
            try:
                record = self._repository.read_session(tenant, id)
                if record.session.state is SessionState.DELETED:
                    self._deleted.add(id)
                else:
                    found[id] = record
            except ObjectMissing:
                continue  # deleted just now, by a server that still lives
            except IntegrityError as error:
                self._faults.append(str(error))
        return found

    def _read_damages(self, tenant: str) -> None:
        try:
            for id, lost in self._repository.damages(tenant).items():
                self._faults.append(f"snapshot {id} has lost {', '.join(lost)}")
        except IntegrityError as error:
            self._faults.append(str(error))

    def _read_manifests(self, tenant: str) -> dict[str, Snapshot]:
        found = {}
        for id in self._repository.snapshot_ids(tenant):
            try:
                found[id] = self._repository.read_snapshot(tenant, id)
            except SojournError as error:
                self._faults.append(str(error))
        return found

    def _write_manifests(self, manifests: list[Snapshot]) -> None:
        for manifest in manifests:
            self._store.publish_snapshot(manifest)


def _rows(
    tenant: str,
    records: dict[str, SessionRecord],
    manifests: dict[str, Snapshot],
    now: float,
) -> list[Write]:
    """The rows of a tenant, sessions before snapshots, parents before children. Only snapshots
    that a recovered session shows, stands on or descends from."""
    writes: list[Write] = []
    notes = {note.id: note for record in records.values() for note in record.snapshots}
    heads = {id: _head(record, manifests) for id, record in records.items()}
    needed = _needed(records, manifests)
    names = _names(records)
    for id, record in records.items():
        session = msgspec.structs.replace(record.session, name=names[id])
        writes.append(InsertSession(_revived(session, heads[id], now)))
    owners = {manifests[id].session for id in needed}
    for owner in sorted(owners - records.keys()):
        one = min((manifests[id] for id in needed if manifests[id].session == owner), key=_age)
        writes.append(InsertSession(_gone(tenant, one, now)))
    for manifest in sorted((manifests[id] for id in needed), key=_age):
        note = notes.get(manifest.id)
        parent = _parent(manifest, notes)
        parent = parent if parent in needed else None
        writes.append(InsertSnapshot(_row(tenant, manifest, note, parent, now)))
    for id, record in records.items():
        head = heads[id]
        details: dict[str, object] = {"epoch": record.session.epoch + 1}
        if head is None:
            details["cause"] = "no snapshot of it had reached the object store"
        if names[id] != record.session.name:
            details["name_before"] = record.session.name
        result = "ok" if head else "failed"
        writes.append(AppendEvent(id, "recovered", result=result, details=details, after=head))
    return writes


def _names(records: dict[str, SessionRecord]) -> dict[str, str | None]:
    """The names sessions come back under. One was renamed or deleted and another got its name, and
    the store was told of that one first: then two records claim it, and the newer has it."""
    found: dict[str, str | None] = {}
    taken: set[tuple[SessionKind, str | None]] = set()
    for id, record in sorted(records.items(), key=lambda item: -item[1].written_at):
        name, kind = record.session.name, record.session.kind
        if name is not None and (kind, name) in taken:
            name = f"{name[: _LONGEST_NAME - len(id) - 1]}-{id}"
        if name is not None:
            taken.add((kind, name))
        found[id] = name
    return found


def _without_record(
    tenant: str,
    records: dict[str, SessionRecord],
    manifests: dict[str, Snapshot],
    deleted: set[str],
) -> dict[str, SessionRecord]:
    """Records made up for sessions that have snapshots and no record, not even one that says that
    they were deleted."""
    needed = _needed(records, manifests)
    found: dict[str, list[Snapshot]] = {}
    for manifest in manifests.values():
        known = manifest.session in records or manifest.session in deleted
        if not known and manifest.id not in needed:
            found.setdefault(manifest.session, []).append(manifest)
    made = {}
    for id, own in found.items():
        newest = max(own, key=_age)
        session = msgspec.structs.replace(
            _gone(tenant, newest, newest.created_at),
            state=SessionState.SUSPENDED,
            env=newest.config.env,
            head=newest.id,
        )
        notes = [SnapshotNote(one.id, one.label) for one in sorted(own, key=_age)]
        made[id] = SessionRecord(session, notes, newest.created_at, "")
    return made


def _needed(records: dict[str, SessionRecord], manifests: dict[str, Snapshot]) -> set[str]:
    """The snapshots that sessions with a record show, stand on or descend from."""
    notes = {note.id: note for record in records.values() for note in record.snapshots}
    heads = (_head(record, manifests) for record in records.values())
    wanted = [id for id in (*notes, *heads) if id is not None and id in manifests]
    needed: set[str] = set()
    while wanted:
        id = wanted.pop()
        if id in needed:
            continue
        needed.add(id)
        parent = _parent(manifests[id], notes)
        if parent is not None and parent in manifests:
            wanted.append(parent)
    return needed


def _parent(manifest: Snapshot, notes: dict[str, SnapshotNote]) -> str | None:
    """Where a snapshot hangs in the tree."""
    note = notes.get(manifest.id)
    if note is None or isinstance(note.parent, msgspec.UnsetType):
        return manifest.parent
    return note.parent


def _age(manifest: Snapshot) -> tuple[float, str]:
    return manifest.created_at, manifest.id


def _head(record: SessionRecord, manifests: dict[str, Snapshot]) -> str | None:
    """The head a session comes back at: its record's, else the newest of its own snapshots."""
    head = record.session.head
    if head is not None and head in manifests:
        return head
    own = [one for one in manifests.values() if one.session == record.session.id]
    return max(own, key=_age).id if own else None


def _revived(session: Session, head: str | None, now: float) -> Session:
    lifetime = session.lifetime_deadline
    return msgspec.structs.replace(
        session,
        state=SessionState.SUSPENDED if head else SessionState.FAILED,
        head=head,
        epoch=session.epoch + 1,
        sandbox=None,
        node=None,
        idle_deadline=None,
        lifetime_deadline=None if lifetime is None else max(lifetime, now + _GRACE),
        cause=None if head else "no snapshot of it had reached the object store",
        updated_at=now,
    )


def _gone(tenant: str, manifest: Snapshot, now: float) -> Session:
    """The row of a deleted session whose snapshots others stand on."""
    return without_sandbox(
        manifest.session,
        tenant,
        template=manifest.config.template,
        driver=manifest.memory.driver if manifest.memory else "gvisor",
        state=SessionState.DELETED,
        created_at=manifest.created_at,
        updated_at=now,
    )


def _row(
    tenant: str,
    manifest: Snapshot,
    note: SnapshotNote | None,
    parent: str | None,
    now: float,
) -> SnapshotRecord:
    memory = manifest.memory
    return SnapshotRecord(
        id=manifest.id,
        session=manifest.session,
        tenant=tenant,
        parent=parent,
        kind=manifest.kind,
        label=note.label if note else manifest.label,
        created_at=manifest.created_at,
        fingerprint=manifest.fingerprint,
        has_memory=memory is not None,
        memory_bytes=memory.bytes if memory else 0,
        layer_bytes=sum(layer.bytes for layer in manifest.layers[manifest.config.base_layers :]),
        layers=[layer.id for layer in manifest.layers],
        image=memory.id if memory else None,
        turn=note.turn if note else None,
        hidden=note is None,
        thinned=note.thinned if note else False,
        durable_at=now,
    )
