"""A data directory made anew for a database that was not lost with it.

Guarantee: what the object store had of a session is there again, under the same tree; what only the
lost disk had is taken out of the tree, so that nothing refers to it, and each session says so. A
session goes on from the newest snapshot on its line that is left. It all is one commit, after the
manifests are in place, so it may be repeated when it was cut off.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from sojourn.database import Database, SnapshotRecord
from sojourn.database.writes import (
    AppendEvent,
    DeleteSnapshot,
    FinishOperation,
    UpdateSession,
    UpdateSnapshot,
    Write,
)
from sojourn.errors import Conflict, Interrupted, SojournError, to_body
from sojourn.model.sessions import Session, SessionKind, SessionState
from sojourn.repository.repository import Repository
from sojourn.server.sources import RepositorySource
from sojourn.store.local import LocalStore

_PAGE = 1000
_NOTHING_LEFT = "no snapshot of it had reached the object store"


class Rejoined(msgspec.Struct, frozen=True):
    """What came back, and what could not be read."""

    tenants: int
    sessions: int
    snapshots: int
    faults: list[str]


async def rejoin(
    database: Database, store: LocalStore, source: RepositorySource, repository: Repository
) -> Rejoined:
    """Bring a node's store to what a database says. Raises Conflict when the database speaks of
    another object store, and the errors of this one."""
    known = await database.object_store()
    if known is None or known.repository != repository.config.id:
        raise Conflict(
            "the database's sessions are not in this object store",
            next_step="Name the store they were sent to (--store), or use an empty database.",
        )
    sessions = await _sessions(database)
    records = await _records(database, sessions)
    faults: list[str] = []
    left: set[str] = set()
    for record in records.values():
        if record.durable_at is None:
            continue
        try:
            manifest = await asyncio.to_thread(repository.read_snapshot, record.tenant, record.id)
        except SojournError as error:
            faults.append(str(error))
            continue
        source.note(record)  # what it names is in the object store
        await asyncio.to_thread(store.publish_snapshot, manifest)
        left.add(record.id)
    now = time.time()
    writes: list[Write] = []
    for operation in await database.unfinished_operations():
        interrupted = Interrupted(
            f"the machine was lost while {operation.verb} was under way",
            next_step="Read the session's state and decide again.",
            operation=operation.id,
        )
        writes.append(FinishOperation(operation.id, error=to_body(interrupted)))
    for session in sessions:
        writes += _settled(session, _newest_left(session.head, records, left), now)
    for id in records.keys() - left:
        # Hidden, its children become its parent's when it goes.
        writes += [UpdateSnapshot(id, {"hidden": True}), DeleteSnapshot(id)]
    await database.commit(writes)
    shown = [session for session in sessions if session.kind is SessionKind.SESSION]
    tenants = await database.list_tenants()
    return Rejoined(len(tenants), len(shown), len(left), faults)


async def _sessions(database: Database) -> list[Session]:
    found: list[Session] = []
    after = None
    while True:
        page = await database.list_sessions(None, limit=_PAGE, after=after, kind=None)
        found += page.items
        after = page.next
        if after is None:
            return found


async def _records(database: Database, sessions: list[Session]) -> dict[str, SnapshotRecord]:
    """What sessions show, and what they stand on or descend from, whosever it was."""
    found: dict[str, SnapshotRecord] = {}
    wanted: list[str] = []
    for session in sessions:
        for record in await database.list_snapshots(session.id):
            found[record.id] = record
        wanted += [session.head] if session.head is not None else []
    wanted += [record.parent for record in found.values() if record.parent is not None]
    while wanted:
        id = wanted.pop()
        if id not in found:
            record = await database.get_snapshot(None, id, hidden=True)
            found[id] = record
            wanted += [record.parent] if record.parent is not None else []
    return found


def _newest_left(
    head: str | None, records: dict[str, SnapshotRecord], left: set[str]
) -> str | None:
    while head is not None and head not in left:
        head = records[head].parent
    return head


def _settled(session: Session, head: str | None, now: float) -> list[Write]:
    """A session without its sandbox, at what is left of it."""
    cause = None
    if head is None:
        cause = _NOTHING_LEFT
    elif head != session.head or session.live:
        cause = "the machine was lost; what came after this snapshot went with it"
    changes = {
        "state": SessionState.FAILED if head is None else SessionState.SUSPENDED,
        "head": head,
        "epoch": session.epoch + 1,
        "sandbox": None,
        "node": None,
        "idle_deadline": None,
        "cause": cause,
    }
    details: dict[str, object] = {"epoch": session.epoch + 1, "head_before": session.head}
    event = AppendEvent(
        session.id,
        "recovered",
        result="failed" if head is None else "ok",
        details=details,
        after=head,
        at=now,
    )
    return [UpdateSession(session.id, {session.state}, session.epoch, changes), event]
