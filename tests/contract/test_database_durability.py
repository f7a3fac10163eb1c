"""What the object store has and lacks, as the database knows it."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from sojourn.database import Database, DurableObjects, ObjectStore, SnapshotRecord
from sojourn.database.sqlite import migrate
from sojourn.database.writes import InsertSnapshot, UpdateSession, UpdateSnapshot
from sojourn.errors import Conflict, NameTaken, SessionNotFound
from sojourn.model import Session, SessionState
from support.databases import (
    RUNNING,
    Harness,
    SqliteHarness,
    flaws,
    insert_session,
    insert_snapshot,
    make_session,
    make_snapshot,
)

DELETED = {"state": SessionState.DELETED}


async def session_with(db: Database, *snapshots: SnapshotRecord, session: Session) -> None:
    """A session whose head is the last of these."""
    await db.commit(
        [
            *[InsertSnapshot(snapshot) for snapshot in snapshots],
            UpdateSession(session.id, {RUNNING}, 1, {"head": snapshots[-1].id}),
        ]
    )


async def undurable(db: Database, limit: int = 100) -> list[str]:
    return [record.id for record in await db.undurable_snapshots(limit=limit)]


# -- what is not durable yet --------------------------------------------------------------------


def test_heads_come_first_then_the_oldest(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        one = await insert_session(db, make_session())
        two = await insert_session(db, make_session())
        first = make_snapshot(one, created_at=300.0)
        head = make_snapshot(one, created_at=400.0, parent=first.id)
        other = make_snapshot(two, created_at=100.0)
        other_head = make_snapshot(two, created_at=500.0, parent=other.id)
        await session_with(db, first, head, session=one)
        await session_with(db, other, other_head, session=two)
        order = [head.id, other_head.id, other.id, first.id]
        assert await undurable(db) == order
        for limit in range(1, 5):
            assert await undurable(db, limit) == order[:limit]

    database.run(scenario)


def test_parents_come_before_children_whatever_the_clock_did(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        root = make_snapshot(session, created_at=300.0)
        child = make_snapshot(session, created_at=100.0, parent=root.id)
        grandchild = make_snapshot(session, created_at=200.0, parent=child.id)
        head = make_snapshot(session, created_at=400.0, parent=grandchild.id)
        await session_with(db, root, child, grandchild, head, session=session)
        assert await undurable(db) == [head.id, root.id, child.id, grandchild.id]

    database.run(scenario)


def test_what_nobody_needs_is_not_asked_for(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        seen = make_snapshot(session)
        hidden = make_snapshot(session, parent=seen.id, hidden=True)
        head = make_snapshot(session, parent=hidden.id, hidden=True)
        await session_with(db, seen, hidden, head, session=session)
        assert await undurable(db) == [head.id, seen.id]
        await db.commit([UpdateSession(session.id, {RUNNING}, 1, DELETED)])
        assert await undurable(db) == []

    database.run(scenario)


def test_the_head_of_a_fork_is_needed_when_its_parent_session_is_deleted(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        parent = await insert_session(db, make_session())
        point = make_snapshot(parent)
        later = make_snapshot(parent, parent=point.id)
        await session_with(db, point, later, session=parent)
        await insert_session(
            db, make_session(parent_session=parent.id, forked_from=point.id, head=point.id)
        )
        await db.commit([UpdateSession(parent.id, {RUNNING}, 1, DELETED)])
        assert await undurable(db) == [point.id]

    database.run(scenario)


def test_durable_ones_are_asked_for_no_more_until_they_are_thinned(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        await session_with(db, snapshot, session=session)
        assert (await db.get_snapshot(None, snapshot.id)).durable_at is None
        assert await db.mark_durable(snapshot.id, fingerprint=snapshot.fingerprint, at=12.5)
        assert (await db.get_snapshot(None, snapshot.id)).durable_at == 12.5
        assert await undurable(db) == []
        assert (await db.update_snapshot(snapshot.id, label="x")).durable_at == 12.5
        thinned = await db.update_snapshot(
            snapshot.id, has_memory=False, image=None, fingerprint="ee", thinned=True
        )
        assert thinned.durable_at is None
        assert await undurable(db) == [snapshot.id]
        assert (await db.update_snapshot(snapshot.id, durable_at=13.0)).durable_at == 13.0

    database.run(scenario)


@pytest.mark.parametrize("change", [{"image": None}, {"has_memory": False}, {"fingerprint": "ee"}])
def test_a_thinned_snapshot_is_durable_only_when_that_is_said(
    database: Harness, change: dict[str, object]
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session, durable_at=1.0)
        await insert_snapshot(db, snapshot)
        kept, lost = await db.commit(
            [
                UpdateSnapshot(snapshot.id, {**change, "durable_at": 2.0}),
                UpdateSnapshot(snapshot.id, change),
            ]
        )
        assert (kept.durable_at, lost.durable_at) == (2.0, None)

    database.run(scenario)


def test_a_snapshot_that_changed_while_it_was_sent_is_not_durable(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        await session_with(db, snapshot, session=session)
        await db.update_snapshot(snapshot.id, image=None, has_memory=False, fingerprint="ee")
        assert not await db.mark_durable(snapshot.id, fingerprint=snapshot.fingerprint, at=1.0)
        assert not await db.mark_durable("snp_none", fingerprint="ff", at=1.0)
        assert await undurable(db) == [snapshot.id]

    database.run(scenario)


def test_durable_objects_are_those_of_durable_snapshots_by_tenant(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        assert await db.durable_objects() == DurableObjects({}, {}, set())
        mine = await insert_session(db, make_session())
        other = await insert_session(db, make_session(tenant="ten_b"))
        for session, fields in (
            (mine, {"layers": ["base", "a"], "image": "i1", "durable_at": 1.0}),
            (mine, {"layers": ["base", "a", "b"], "image": None, "durable_at": 1.0}),
            (mine, {"layers": ["base", "c"], "image": "i2"}),
            (other, {"layers": ["base", "a"], "image": "i1", "durable_at": 1.0, "hidden": True}),
            (other, {"layers": ["other"], "image": None, "durable_at": 1.0}),
        ):
            await insert_snapshot(db, make_snapshot(session, **fields))
        found = await db.durable_objects()
        assert found.layers == {"a": {"ten_a", "ten_b"}, "b": {"ten_a"}}
        assert found.images == {"i1": {"ten_a", "ten_b"}}
        assert found.templates == {"base", "other"}

    database.run(scenario)


# -- what is removed ----------------------------------------------------------------------------


def test_removals_are_remembered_in_order_until_they_are_forgotten(database: Harness) -> None:
    session = make_session()
    snapshots = [make_snapshot(session) for _ in range(2)]

    async def remove(db: Database) -> None:
        await insert_session(db, session)
        await db.commit([InsertSnapshot(snapshot) for snapshot in snapshots])
        await db.update_snapshot(snapshots[0].id, hidden=True)
        assert await db.store_removals() == []
        await db.delete_snapshot(snapshots[0].id)
        await db.commit([UpdateSession(session.id, {RUNNING}, 1, DELETED)])
        await db.delete_snapshot(snapshots[1].id)

    async def forget(db: Database) -> None:
        removals = await db.store_removals()
        assert [(r.kind, r.tenant, r.object) for r in removals] == [
            ("snapshot", "ten_a", snapshots[0].id),
            ("session", "ten_a", session.id),
            ("snapshot", "ten_a", snapshots[1].id),
        ]
        assert await db.store_removals(limit=1) == removals[:1]
        await db.forget_removals([])
        await db.forget_removals([removals[0].id, removals[2].id, 999])
        assert await db.store_removals() == [removals[1]]
        await db.forget_removals([removals[1].id])
        assert await db.store_removals() == []
        # Numbers are not used again: who forgets late does not forget another's.
        later = make_session()
        await insert_session(db, later)
        await db.commit([UpdateSession(later.id, {RUNNING}, 1, DELETED)])
        assert (await db.store_removals())[0].id > removals[2].id

    database.run(remove)
    database.run(forget)


def test_a_removal_that_is_rolled_back_is_not_remembered(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        with pytest.raises(SessionNotFound):
            await db.commit(
                [
                    UpdateSession(session.id, {RUNNING}, 1, DELETED),
                    UpdateSession("ses_none", {RUNNING}, 1, DELETED),
                ]
            )
        assert await db.store_removals() == []

    database.run(scenario)


# -- session records ----------------------------------------------------------------------------


def test_the_record_of_a_session_is_remembered_as_long_as_its_row(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        assert await db.record_digest(session.id) is None
        await db.note_record(session.id, "one")
        await db.note_record(session.id, "two")
        assert await db.record_digest(session.id) == "two"
        with pytest.raises(SessionNotFound):
            await db.note_record("ses_none", "x")
        await db.commit([UpdateSession(session.id, {RUNNING}, 1, DELETED)])
        assert await db.record_digest(session.id) == "two"
        assert (await db.prune(time.time() + 3600, sessions_after=0.0)).sessions == 1
        assert await db.record_digest(session.id) is None

    database.run(scenario)
    assert database.flaws() == []


# -- how far each session is --------------------------------------------------------------------


def test_durability_tells_how_far_each_session_is(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await insert_session(db, make_session())  # without a snapshot: nothing to tell
        session = await insert_session(db, make_session(created_at=1.0))
        root = make_snapshot(session, created_at=100.0, durable_at=101.0)
        hidden = make_snapshot(session, created_at=200.0, parent=root.id, hidden=True)
        middle = make_snapshot(session, created_at=300.0, parent=hidden.id)
        head = make_snapshot(session, created_at=400.0, parent=middle.id)
        await session_with(db, root, hidden, middle, head, session=session)
        fork = await insert_session(
            db, make_session(tenant="ten_b", created_at=2.0, head=head.id, forked_from=head.id)
        )

        async def told(tenant: str | None) -> list[tuple[object, ...]]:
            return [
                (d.session, d.head, d.head_durable, d.waiting, d.oldest_waiting, d.durable_head_at)
                for d in await db.durability(tenant)
            ]

        mine = (session.id, head.id, False, 2, 300.0, 100.0)
        forks = (fork.id, head.id, False, 1, 400.0, 100.0)
        assert await told(None) == [mine, forks]
        assert await told("ten_a") == [mine]
        assert await told("ten_b") == [forks]
        assert await told("ten_none") == []

        async def asked(**which: object) -> list[str]:
            return [d.session for d in await db.durability(None, **which)]  # type: ignore[arg-type]

        assert await asked(waiting=True) == [session.id, fork.id]
        assert await asked(session=fork.id) == [fork.id]
        await db.mark_durable(head.id, fingerprint="ff", at=500.0)
        assert await told("ten_a") == [(session.id, head.id, True, 1, 300.0, 400.0)]
        assert await told("ten_b") == [(fork.id, head.id, True, 0, None, 400.0)]
        assert await asked(waiting=True) == [session.id]
        await db.commit([UpdateSession(session.id, {RUNNING}, 1, DELETED)])
        assert await told("ten_a") == []

    database.run(scenario)


def test_a_session_that_was_never_sent_has_nothing_to_go_back_to(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        await session_with(db, make_snapshot(session, created_at=7.0), session=session)
        (told,) = await db.durability(None)
        assert (told.head_durable, told.waiting) == (False, 1)
        assert (told.oldest_waiting, told.durable_head_at) == (7.0, None)

    database.run(scenario)


# -- tenants, and files of before ---------------------------------------------------------------


def test_a_tenant_is_restored_under_its_id(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        tenant = await db.create_tenant("acme", id="ten_restored")
        assert tenant.id == "ten_restored"
        assert await db.get_tenant("ten_restored") == tenant
        with pytest.raises(Conflict):
            await db.create_tenant("other", id="ten_restored")
        with pytest.raises(NameTaken):
            await db.create_tenant("acme", id="ten_another")

    database.run(scenario)


def test_a_file_of_before_is_brought_forward_with_nothing_durable(tmp_path: Path) -> None:
    path = tmp_path / "sojourn.db"
    known = migrate.migrations()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "migrations", lambda: known[:1])
        migrate.open_file(path).close()
    before = sqlite3.connect(path)
    columns = [row[1] for row in before.execute("PRAGMA table_info(snapshots)")]
    assert "durable_at" not in columns
    session = make_session(head="snp_1")
    values = {
        "id": "snp_1",
        "session": session.id,
        "tenant": session.tenant,
        "kind": "auto",
        "layers": "[]",
        "fingerprint": "ff",
    }
    before.execute(
        "INSERT INTO sessions VALUES ('ses_old', 'ten_a', NULL, '{}', 'base', '{}', '{}', ?,"
        " 'gvisor', 'suspended', 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1.0, 1.0)",
        ('{"auto_snapshot":"turn","idle_timeout":5.0}',),
    )
    row = [values.get(column, 0) for column in columns]
    row[columns.index("parent")] = row[columns.index("image")] = None
    before.execute(f"INSERT INTO snapshots VALUES ({', '.join('?' * len(row))})", row)
    before.commit()
    before.close()

    async def scenario(db: Database) -> None:
        await insert_session(db, session)
        old = await db.get_session(None, "ses_old")
        assert (old.policy.retention, old.policy.idle_timeout) == (None, 5.0)
        (record,) = await db.undurable_snapshots()
        assert (record.id, record.durable_at) == ("snp_1", None)

    SqliteHarness(tmp_path).run(scenario)
    assert flaws(path) == []


# -- which object store -------------------------------------------------------------------------


def test_in_another_object_store_nothing_is_durable(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        head = make_snapshot(session)
        await session_with(db, head, session=session)
        assert await db.object_store() is None
        first = ObjectStore("file:///one", "a")
        assert await db.use_object_store(first)
        assert await db.mark_durable(head.id, fingerprint=head.fingerprint, at=5.0)
        await db.note_record(session.id, "digest")

        moved = ObjectStore("file:///moved", "a")
        assert not await db.use_object_store(moved)
        assert await db.object_store() == moved
        assert await undurable(db) == [] and await db.record_digest(session.id) == "digest"

        assert await db.use_object_store(ObjectStore("file:///moved", "b"))
        assert await undurable(db) == [head.id]
        assert await db.record_digest(session.id) is None
        assert await db.store_removals() == []

    database.run(scenario)
