"""Snapshots: the tree, what may be removed from it, and what the store must keep."""

from __future__ import annotations

import pytest

from sojourn.database import Database
from sojourn.database.writes import InsertSnapshot, UpdateSession, UpdateSnapshot
from sojourn.errors import Conflict, InvalidRequest, SessionNotFound, SnapshotNotFound
from sojourn.model import SessionState, SnapshotKind
from support.databases import (
    RUNNING,
    Harness,
    insert_session,
    insert_snapshot,
    make_session,
    make_snapshot,
    update_session,
)


async def ids(db: Database) -> set[str]:
    return {snapshot.id for snapshot in await db.removable_snapshots()}


def test_a_snapshot_reads_back_equal(database: Harness) -> None:
    session = make_session()
    snapshot = make_snapshot(
        session,
        kind=SnapshotKind.EXPLICIT,
        label="before",
        has_memory=False,
        memory_bytes=2**40,
        image=None,
        layers=[],
        turn=7,
        hidden=True,
        thinned=True,
    )

    async def write(db: Database) -> None:
        await insert_session(db, session)
        await insert_snapshot(db, snapshot)

    async def read(db: Database) -> None:
        assert await db.get_snapshot("ten_a", snapshot.id, hidden=True) == snapshot
        for tenant, hidden in (("ten_b", True), ("ten_a", False)):
            with pytest.raises(SnapshotNotFound):
                await db.get_snapshot(tenant, snapshot.id, hidden=hidden)

    database.run(write)
    database.run(read)


def test_a_snapshot_needs_its_session_and_parent_and_exists_once(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = make_session()
        with pytest.raises(SessionNotFound):
            await insert_snapshot(db, make_snapshot(session))
        await insert_session(db, session)
        with pytest.raises(SnapshotNotFound):
            await insert_snapshot(db, make_snapshot(session, parent="snp_none"))
        snapshot = make_snapshot(session)
        await insert_snapshot(db, snapshot)
        with pytest.raises(Conflict):
            await insert_snapshot(db, snapshot)
        assert await db.list_snapshots(session.id) == [snapshot]

    database.run(scenario)


def test_the_tree_is_listed_with_parents_before_children(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        root = make_snapshot(session, created_at=100.0)
        # The clock went back between these two.
        child = make_snapshot(session, parent=root.id, created_at=50.0)
        grandchild = make_snapshot(session, parent=child.id, created_at=200.0)
        branch = make_snapshot(session, parent=root.id, created_at=150.0)
        await db.commit([InsertSnapshot(s) for s in (root, child, grandchild, branch)])
        listed = await db.list_snapshots(session.id)
        assert {s.id for s in listed} == {root.id, child.id, grandchild.id, branch.id}
        order = [s.id for s in listed]
        for snapshot in listed:
            if snapshot.parent:
                assert order.index(snapshot.parent) < order.index(snapshot.id)

    database.run(scenario)


def test_hidden_ones_are_found_only_when_asked_for(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        await insert_snapshot(db, snapshot)
        await db.update_snapshot(snapshot.id, hidden=True)
        assert await db.list_snapshots(session.id) == []
        with pytest.raises(SnapshotNotFound):
            await db.get_snapshot(None, snapshot.id)
        assert (await db.get_snapshot(None, snapshot.id, hidden=True)).hidden

    database.run(scenario)


def test_labels_and_thinning_change_and_nothing_else_can(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        await insert_snapshot(db, snapshot)
        thinned = await db.update_snapshot(
            snapshot.id,
            label="x",
            thinned=True,
            has_memory=False,
            memory_bytes=0,
            image=None,
            fingerprint="ee",
        )
        assert thinned == await db.get_snapshot(None, snapshot.id)
        assert (thinned.label, thinned.thinned, thinned.image) == ("x", True, None)
        assert thinned.layers == snapshot.layers
        for field in ("id", "session", "tenant", "parent", "layers", "nothing"):
            with pytest.raises(InvalidRequest):
                await db.commit([UpdateSnapshot(snapshot.id, {field: "y"})])
        with pytest.raises(SnapshotNotFound):
            await db.update_snapshot("snp_none", label="y")

    database.run(scenario)


def test_what_is_needed_cannot_be_deleted_and_becomes_removable_later(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        root = make_snapshot(session)
        child = make_snapshot(session, parent=root.id)
        await db.commit(
            [
                InsertSnapshot(root),
                InsertSnapshot(child),
                UpdateSession(session.id, {RUNNING}, 1, {"head": child.id}),
            ]
        )
        assert await ids(db) == set()
        for needed in (root, child):
            with pytest.raises(Conflict, match="needed by"):
                await db.delete_snapshot(needed.id)
        await db.update_snapshot(child.id, hidden=True)
        assert await ids(db) == set()
        with pytest.raises(Conflict, match="needed by"):
            await db.delete_snapshot(child.id)
        await db.update_snapshot(root.id, hidden=True)
        assert await ids(db) == {root.id}
        await update_session(db, session.id, expect_state={RUNNING}, expect_epoch=1, head=None)
        assert await ids(db) == {root.id, child.id}
        for removed in (root, child):
            assert await db.delete_snapshot(removed.id)
            assert not await db.delete_snapshot(removed.id)
        assert await ids(db) == set()
        for gone in (root, child):
            with pytest.raises(SnapshotNotFound):
                await db.get_snapshot(None, gone.id, hidden=True)

    database.run(scenario)


def test_the_children_of_a_hidden_one_that_is_deleted_become_its_parents(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        root = make_snapshot(session, hidden=True)
        middle = make_snapshot(session, parent=root.id, hidden=True)
        last = [make_snapshot(session, parent=middle.id) for _ in range(2)]
        await db.commit([InsertSnapshot(s) for s in (root, middle, *last)])
        assert await ids(db) == {root.id, middle.id}
        assert await db.delete_snapshot(middle.id)
        assert {s.parent for s in await db.list_snapshots(session.id)} == {root.id}
        assert await db.delete_snapshot(root.id)
        assert {s.parent for s in await db.list_snapshots(session.id)} == {None}

    database.run(scenario)
    assert database.flaws() == []


def test_the_last_durable_one_stays_until_the_head_is_durable(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        old = make_snapshot(session, hidden=True, durable_at=1.0)
        last = make_snapshot(session, parent=old.id, hidden=True, durable_at=1.0)
        between = make_snapshot(session, parent=last.id, hidden=True)
        head = make_snapshot(session, parent=between.id)
        aside = make_snapshot(session, parent=last.id)
        await db.commit(
            [
                *[InsertSnapshot(s) for s in (old, last, between, head, aside)],
                UpdateSession(session.id, {RUNNING}, 1, {"head": head.id}),
            ]
        )
        assert await ids(db) == {old.id, between.id}
        await db.delete_snapshot(between.id)
        assert await ids(db) == {old.id}
        await db.mark_durable(head.id, fingerprint=head.fingerprint, at=2.0)
        assert await ids(db) == {old.id, last.id}

    database.run(scenario)


def test_what_live_sessions_stand_on_is_anchored(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        point = make_snapshot(session, hidden=True)
        other = make_snapshot(session, parent=point.id)
        head = make_snapshot(session, parent=other.id)
        await db.commit(
            [
                *[InsertSnapshot(s) for s in (point, other, head)],
                UpdateSession(session.id, {RUNNING}, 1, {"head": head.id}),
            ]
        )
        child = await insert_session(
            db, make_session(parent_session=session.id, forked_from=point.id, head=other.id)
        )
        own = make_snapshot(child, parent=other.id)
        assert await db.anchored_snapshots(session.id) == {point.id, other.id, head.id}
        moved = {"head": own.id}
        await db.commit([InsertSnapshot(own), UpdateSession(child.id, {RUNNING}, 1, moved)])
        assert await db.anchored_snapshots(session.id) == {point.id, head.id}
        assert await db.anchored_snapshots(child.id) == {own.id}
        deleted = {"state": SessionState.DELETED}
        await db.commit([UpdateSession(child.id, {RUNNING}, 1, deleted)])
        assert await db.anchored_snapshots(session.id) == {head.id}

    database.run(scenario)


def test_a_live_fork_keeps_the_snapshots_of_its_deleted_parent(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        parent = await insert_session(db, make_session())
        root = make_snapshot(parent)
        point = make_snapshot(parent, parent=root.id)
        aside = make_snapshot(parent, parent=root.id)
        await db.commit(
            [
                *[InsertSnapshot(s) for s in (root, point, aside)],
                UpdateSession(parent.id, {RUNNING}, 1, {"head": aside.id}),
            ]
        )
        child = await insert_session(
            db, make_session(parent_session=parent.id, forked_from=point.id, head=point.id)
        )
        assert await ids(db) == set()
        deleted = {"state": SessionState.DELETED}
        await db.commit([UpdateSession(parent.id, {RUNNING}, 1, deleted)])
        assert await ids(db) == {aside.id}
        await db.delete_snapshot(aside.id)
        own = make_snapshot(child, parent=point.id)
        await db.commit(
            [InsertSnapshot(own), UpdateSession(child.id, {RUNNING}, 1, {"head": own.id})]
        )
        assert await ids(db) == set()
        await db.commit([UpdateSession(child.id, {RUNNING}, 1, deleted)])
        removed = []
        while found := await db.removable_snapshots():
            for snapshot in found:
                assert await db.delete_snapshot(snapshot.id)
                removed.append(snapshot.id)
        assert removed == [own.id, point.id, root.id]
        pruned = await db.prune(child.created_at + 3600, sessions_after=0.0)
        assert pruned.sessions == 2

    database.run(scenario)


def test_a_deleted_session_is_kept_as_long_as_its_snapshots(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        await insert_snapshot(db, snapshot)
        await db.commit([UpdateSession(session.id, {RUNNING}, 1, {"state": SessionState.DELETED})])
        assert (await db.prune(session.created_at + 3600, sessions_after=0.0)).sessions == 0
        await db.delete_snapshot(snapshot.id)
        assert (await db.prune(session.created_at, sessions_after=0.0)).sessions == 0
        assert (await db.prune(session.created_at + 3600, sessions_after=0.0)).sessions == 1

    database.run(scenario)


def test_references_name_every_layer_and_image_of_every_snapshot(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        one = make_snapshot(session, layers=["base", "a"], image="i1")
        two = make_snapshot(session, layers=["base", "a", "b"], image=None)
        hidden = make_snapshot(session, layers=["c"], image="i2", hidden=True)
        for snapshot in (one, two, hidden):
            await insert_snapshot(db, snapshot)
        found = await db.references()
        assert (found.layers, found.images) == ({"base", "a", "b", "c"}, {"i1", "i2"})
        await db.delete_snapshot(hidden.id)
        found = await db.references()
        assert (found.layers, found.images) == ({"base", "a", "b"}, {"i1"})

    database.run(scenario)
