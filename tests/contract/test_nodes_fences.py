"""A node that was taken for lost changes nothing any more, whatever it is in the middle of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sojourn.database import Database, ObjectStore
from sojourn.database.engine import Statements, touched
from sojourn.database.sql_database import SqlDatabase
from sojourn.database.writes import (
    AppendEvent,
    InsertSession,
    InsertSnapshot,
    PutEffect,
    UpdateSession,
)
from sojourn.errors import NodeFenced, SojournError
from sojourn.model.network import Effect
from sojourn.model.nodes import Fence, Node
from support.databases import (
    RUNNING,
    SUSPENDED,
    Harness,
    PostgresHarness,
    SqliteHarness,
    make_session,
    make_snapshot,
)
from support.nodes import LONG, held, joined, line, lose, opened, start


def effect(session: str) -> Effect:
    return Effect(
        id="eff_1",
        session=session,
        sandbox="sbx",
        epoch=1,
        kind="http",
        method="POST",
        scheme="https",
        host="h",
        port=443,
        path="/",
        idempotent=False,
        rule="r",
        secrets=[],
        began_at=1.0,
    )


def changes(session: str, snapshot: str) -> dict[str, Callable[[Database], Awaitable[Any]]]:
    """Each kind of change a node makes, on a session of its own."""
    row = make_snapshot(make_session(id=session), parent=snapshot)
    return {
        "commit": lambda db: db.commit([UpdateSession(session, {RUNNING}, 1, {"labels": {}})]),
        "create": lambda db: db.commit([InsertSession(make_session(holder="nod_a"))]),
        "snapshot": lambda db: db.commit([InsertSnapshot(row)]),
        "event": lambda db: db.append_event(AppendEvent(session, "turn")),
        "effect": lambda db: db.commit([PutEffect(effect(session), True)], durable=False),
        "begin": lambda db: db.begin(
            tenant="ten_a", session=session, verb="pause", request={}, server="nod_a"
        ),
        "mark": lambda db: db.mark_durable(snapshot, fingerprint="ff", at=1.0),
        "record": lambda db: db.note_record(session, "digest"),
        "store": lambda db: db.use_object_store(ObjectStore("file:///x", "repo")),
        "removals": lambda db: db.forget_removals([1]),
        "prune": lambda db: db.prune(time.time()),
        "duty": lambda db: db.hold_duty("collect", "nod_a", lease=LONG),
    }


def test_every_change_of_a_fenced_node_is_refused(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        (snapshot,) = await line(db, session, [False])
        await lose(db, node)
        for name, change in changes(session.id, snapshot.id).items():
            # Each through a database of its own: one refusal is remembered.
            async with opened(database, node.fence) as old:
                with pytest.raises(NodeFenced):
                    await change(old)
                    pytest.fail(f"{name} was done")
        assert await db.list_events(session.id) == []
        assert len(await db.list_snapshots(session.id)) == 1
        assert await db.list_effects(session.id, all=True) == []
        assert await db.unfinished_operations() == []
        assert (await db.get_snapshot(None, snapshot.id)).durable_at is None
        assert await db.object_store() is None
        assert (await db.get_session(None, session.id)).epoch == 1
        again = await start(db, "nod_a")
        async with opened(database, again.fence) as new:
            for change in changes(session.id, snapshot.id).values():
                await change(new)

    database.run(scenario)


def test_a_refusal_is_for_ever_and_a_new_fence_counts_at_once(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        async with opened(database, node.fence) as old:
            await old.append_event(AppendEvent(session.id, "turn"))
            await lose(db, node)
            again = await start(db, "nod_a")
            for _ in range(2):
                with pytest.raises(NodeFenced):
                    await old.append_event(AppendEvent(session.id, "turn"))
            # What is asked of nobody's name is answered all the same.
            assert (await old.get_session(None, session.id)).id == session.id
            assert (await old.renew_node(again.fence, lease=LONG)).incarnation == 3
            old.fence(again.fence)
            assert await old.append_event(AppendEvent(session.id, "turn")) == 2

    database.run(scenario)


def test_a_renewal_that_is_refused_ends_all_changes(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        async with opened(database, node.fence) as old:
            await lose(db, node)
            with pytest.raises(NodeFenced):
                await old.renew_node(node.fence, lease=LONG)
            assert isinstance(old, SqlDatabase)
            asked = old.append_event(AppendEvent(session.id, "turn"))
            assert isinstance(asked.exception(), NodeFenced)  # without asking the database

    database.run(scenario)


def test_what_waits_in_a_queue_is_done_in_the_name_it_was_asked_in(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        async with opened(database, node.fence) as old:
            assert isinstance(old, SqlDatabase)
            going, go = threading.Event(), threading.Event()

            def slow(_: Statements) -> None:
                going.set()
                go.wait(30)

            touches = touched((), sessions=[session.id])
            first = old._writer.submit(slow, durable=False, touches=touches)
            late = old.append_event(AppendEvent(session.id, "turn"))
            await asyncio.to_thread(going.wait, 30)
            losing = asyncio.ensure_future(lose(db, node))
            go.set()
            await first
            await losing
            again = await start(db, "nod_a")
            old.fence(again.fence)
            # Before the loss or not at all: never in the name of the later incarnation.
            try:
                await late
            except NodeFenced as error:
                assert error.details["incarnation"] == 1

    database.run(scenario)


def test_idle_deadlines_of_a_fenced_node_are_given_up(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a", idle_deadline=100.0)
        async with opened(database, node.fence) as old:
            await lose(db, node)
            old.touch_idle(session.id, 1e9)
            assert [one.id for one in await old.due_sessions(1e6)] == [session.id]
            old.touch_idle(session.id, 1e9)
        # Closing it raised nothing, and nothing was moved.
        assert (await db.get_session(None, session.id)).idle_deadline == 100.0

    database.run(scenario)


def test_the_loss_of_a_node_waits_for_what_it_has_under_way(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        (old_head, new_head) = await line(db, session, [True, False])
        async with opened(database, node.fence) as mine:
            assert isinstance(mine, SqlDatabase)
            going, go = threading.Event(), threading.Event()

            def commit(statements: Statements) -> None:
                going.set()
                go.wait(30)
                statements.run("mark_durable", {"id": new_head.id, "fingerprint": "ff", "at": 1.0})

            await db.stop_node(node.fence)
            under_way = mine._writer.submit(commit, durable=True)
            await asyncio.to_thread(going.wait, 30)
            await asyncio.sleep(0.02)
            losing = asyncio.ensure_future(db.lose_node(0.0))
            done, _ = await asyncio.wait([losing], timeout=0.3)
            assert not done
            go.set()
            await under_way
            assert await losing is not None
            # It was acknowledged before the loss, so the failover knows of it.
            (moved,) = await db.fail_over("nod_a")
            assert (moved.head, moved.head_before) == (new_head.id, new_head.id)
            assert old_head.durable_at is not None
            with pytest.raises(NodeFenced):
                await mine.append_event(AppendEvent(session.id, "late"))

    database.run(scenario)


def waiting(harness: PostgresHarness) -> int:
    """How many transactions wait for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with harness.server.connect(harness.name) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(str(row[0]))


def test_a_transaction_that_was_open_while_the_node_was_fenced_is_refused(
    postgres: PostgresHarness,
) -> None:
    """It has begun and waits for the fence, which another connection has changed and not yet
    committed; what it then reads is the new one."""
    postgres.server.empty(postgres.name)

    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        with postgres.server.connect(postgres.name) as raw:
            raw.execute("BEGIN")
            raw.execute("UPDATE nodes SET incarnation = 2, lost = TRUE")
            raw.execute("UPDATE node_fences SET incarnation = 2")
            async with opened(postgres, node.fence) as mine:
                change = UpdateSession(session.id, {RUNNING}, 1, {"state": SUSPENDED})
                late = asyncio.ensure_future(mine.commit([change]))
                renewal = asyncio.ensure_future(mine.renew_node(node.fence, lease=LONG))
                while await asyncio.to_thread(waiting, postgres) < 2:
                    await asyncio.sleep(0.02)
                assert not late.done() and not renewal.done()
                raw.execute("COMMIT")
                for asked in (late, renewal):
                    with pytest.raises(NodeFenced):
                        await asked
        assert (await db.get_session(None, session.id)).state is RUNNING

    postgres.run(scenario)


def test_a_node_that_starts_again_waits_for_its_old_incarnation(tmp_path: Any) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        results: list[int | SojournError] = []
        async with opened(harness, node.fence) as mine:

            async def turns() -> None:
                for _ in range(50):
                    try:
                        results.append(await mine.append_event(AppendEvent(session.id, "turn")))
                    except SojournError as error:
                        results.append(error)

            async def restart() -> Node:
                await asyncio.sleep(0.01)
                return await start(db, "nod_a")

            _, again = await asyncio.gather(turns(), restart())
        done = [one for one in results if isinstance(one, int)]
        refused = [one for one in results if not isinstance(one, int)]
        # Once it is refused it stays refused, and what was acknowledged is there.
        assert results == [*done, *refused]
        assert all(isinstance(one, NodeFenced) for one in refused)
        assert [event.sequence for event in await db.list_events(session.id)] == done
        assert again.fence == Fence("nod_a", 2)

    harness = SqliteHarness(tmp_path)
    harness.run(scenario)
