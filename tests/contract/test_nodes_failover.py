"""What becomes of the sessions of a lost node: each goes once to what the object store has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sojourn.database import Database, OperationState
from sojourn.database.writes import AppendEvent, InsertSession, PutEffect, UpdateSession
from sojourn.errors import NodeFenced, StaleEpoch
from sojourn.model import Session, SessionState
from sojourn.model.network import Effect
from sojourn.model.nodes import FailedOver
from support.databases import PAUSED, RUNNING, SUSPENDED, Harness, make_session
from support.nodes import held, joined, line, lose, opened, start

FAILED, CREATING, DELETED = SessionState.FAILED, SessionState.CREATING, SessionState.DELETED


async def begin(db: Database, session: Session, verb: str, **more: Any) -> str:
    operation, _ = await db.begin(
        tenant=session.tenant, session=session.id, verb=verb, request={}, server="nod_a", **more
    )
    return operation.id


async def all_moved(db: Database, node: str = "nod_a", limit: int = 100) -> dict[str, FailedOver]:
    moved = {}
    while found := await db.fail_over(node, limit=limit):
        for one in found:
            assert one.session not in moved
            moved[one.session] = one
    return moved


def test_a_look_that_waited_for_the_database_declares_nobody_lost(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await joined(db, "nod_a", lease=0.001)
        await asyncio.sleep(0.01)
        assert await db.lose_node(0.0, within=0.0) is None
        assert not (await db.get_node("nod_a")).lost
        found = await db.lose_node(0.0, within=60.0)
        assert found is not None and found.lost

    database.run(scenario)


def test_sessions_go_to_the_newest_snapshot_on_their_line_that_is_durable(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        live = await held(db, "nod_a", sandbox="sbx", node="nod_a", idle_deadline=9e9)
        _, durable, *lost = await line(db, live, [True, True, False, False])
        paused = await held(db, "nod_a", state=PAUSED)
        await db.commit([UpdateSession(paused.id, {PAUSED}, 1, {"head": durable.id})])
        away = await held(db, "nod_a", state=SUSPENDED)
        (kept,) = await line(db, away, [True])
        behind = await held(db, "nod_a", state=SUSPENDED, created_at=100.0)
        older, newer = await line(db, behind, [True, False])
        broken = await held(db, "nod_a", state=FAILED, cause="damaged")
        other = await held(db, "nod_b")
        await lose(db, node)

        moved = await all_moved(db)
        assert set(moved) == {live.id, paused.id, away.id, behind.id, broken.id}
        assert moved[live.id].head == durable.id and moved[live.id].head_before == lost[-1].id
        assert moved[live.id].lost_seconds >= 0
        assert moved[behind.id] == FailedOver(behind.id, newer.id, older.id, SUSPENDED, 1.0)
        assert moved[away.id] == FailedOver(away.id, kept.id, kept.id, SUSPENDED, 0.0)
        found = await db.get_session(None, live.id)
        assert (found.state, found.head, found.holder) == (SUSPENDED, durable.id, None)
        assert (found.sandbox, found.node, found.idle_deadline) == (None, None, None)
        assert found.epoch == 2 and found.cause == "node name-nod_a was lost"
        assert (await db.get_session(None, paused.id)).state is SUSPENDED
        assert (await db.get_session(None, away.id)).cause is None
        failed = await db.get_session(None, broken.id)
        assert (failed.state, failed.cause, failed.holder) == (FAILED, "damaged", None)
        assert (await db.get_session(None, other.id)) == other
        (event,) = await db.list_events(live.id)
        assert (event.kind, event.result) == ("node.lost", "suspended")
        assert (event.before, event.after) == (lost[-1].id, durable.id)
        assert event.details["node"] == "nod_a" and event.details["undurable"] == 2
        assert event.details["head"] == durable.id and event.details["head_before"] == event.before
        # What only the lost disk has stays on record, and is sent when it is back.
        waiting = {one.id for one in await db.undurable_snapshots(node="nod_a")}
        assert waiting == {lost[0].id, lost[1].id, newer.id}

    database.run(scenario)


def test_a_session_the_object_store_has_nothing_of_is_failed(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        sent_nothing = await held(db, "nod_a")
        (_, head) = await line(db, sent_nothing, [False, False])
        no_snapshot = await held(db, "nod_a")
        made = make_session(holder="nod_a", state=CREATING)
        create = await begin(db, made, "create", creates=True, also=[InsertSession(made)])
        fork = await held(db, "nod_a", state=CREATING)
        (base,) = await line(db, await held(db, "nod_b"), [True])
        await db.commit([UpdateSession(fork.id, {CREATING}, 1, {"head": base.id})])
        template = await held(db, "nod_a", state=SUSPENDED)
        await lose(db, node)

        moved = await all_moved(db)
        assert moved[sent_nothing.id].state is FAILED
        assert moved[sent_nothing.id].head == head.id
        assert moved[no_snapshot.id].state is FAILED
        assert moved[made.id].state is FAILED
        assert moved[fork.id].state is SUSPENDED and moved[fork.id].head == base.id
        # It never had anything, and has lost nothing.
        assert moved[template.id] == FailedOver(template.id, None, None, SUSPENDED, 0.0)
        found = await db.get_session(None, sent_nothing.id)
        assert found.cause is not None and "no snapshot" in found.cause
        operation = await db.get_operation(None, create)
        assert operation.state is OperationState.FAILED
        assert operation.error is not None and operation.error.code == "interrupted"

    database.run(scenario)


def test_what_was_under_way_ends_and_a_deletion_is_completed(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        busy = await held(db, "nod_a")
        await line(db, busy, [True])
        suspend = await begin(db, busy, "suspend")
        beside = await begin(db, busy, "export", exclusive=False)
        doomed = await held(db, "nod_a", name="doomed")
        await line(db, doomed, [True])
        delete = await begin(db, doomed, "delete")
        stray = await held(db, "nod_b")
        left = await begin(db, stray, "fork")
        await lose(db, node)

        moved = await all_moved(db)
        assert moved[doomed.id].state is DELETED
        assert moved[busy.id].state is SUSPENDED
        for id in (suspend, beside, left):
            ended = await db.get_operation(None, id)
            assert ended.state is OperationState.FAILED and ended.error is not None
            assert ended.error.code == "interrupted" and ended.error.details["node"] == "nod_a"
        assert (await db.get_operation(None, delete)).state is OperationState.SUCCEEDED
        assert await db.unfinished_operations() == []
        assert await db.lose_node(0.0) is None
        assert [event.kind for event in await db.list_events(doomed.id)] == ["delete"]
        # Its name is free, and what is left of it anybody removes.
        await held(db, None, name="doomed")
        assert len(await db.removable_snapshots(holder="nod_b")) == 1
        assert [one.kind for one in await db.store_removals()] == ["session"]
        await begin(db, busy, "resume")

    database.run(scenario)


def test_requests_that_were_under_way_are_interrupted(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        effect = Effect(
            *("eff_1", session.id, "sbx", 1, "tcp", "", "", "h", 1, "", False, "r", [], 1.0)
        )
        await db.commit([PutEffect(effect, True)])
        await lose(db, node)
        await db.fail_over("nod_a")
        (ended,) = await db.list_effects(session.id)
        assert ended.effect.outcome == "interrupted" and ended.effect.ended_at is not None
        assert await db.open_effects() == []

    database.run(scenario)


def test_live_sessions_come_before_suspended_ones(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        for state in (SUSPENDED, RUNNING, SUSPENDED, PAUSED):
            await held(db, "nod_a", state=state)
        await lose(db, node)
        first = {one.session for one in await db.fail_over("nod_a", limit=2)}
        left = await db.list_sessions(None, holder="nod_a")
        assert {one.state for one in left.items} == {SUSPENDED}
        assert len(first) == 2 and len(left.items) == 2

    database.run(scenario)


def test_servers_that_do_it_at_once_share_the_work(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        sessions = [make_session(holder="nod_a") for _ in range(60)]
        await db.commit([InsertSession(session) for session in sessions])
        await lose(db, node)
        done: list[list[str]] = [[], [], []]

        async def work(each: Database, mine: list[str]) -> None:
            # An empty answer may mean that others are at the rest.
            while await each.lose_node(0.0) is not None:
                mine += [one.session for one in await each.fail_over("nod_a", limit=3)]

        async with opened(database) as two, opened(database) as three:
            await asyncio.gather(work(db, done[0]), work(two, done[1]), work(three, done[2]))
        found = [id for mine in done for id in mine]
        assert sorted(found) == sorted(session.id for session in sessions)
        for session in sessions:
            assert (await db.get_session(None, session.id)).epoch == 2
            assert [one.sequence for one in await db.list_events(session.id)] == [1]

    database.run(scenario)


def test_a_node_that_starts_again_keeps_what_was_not_taken_yet(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        for _ in range(6):
            await held(db, "nod_a")
        assert await db.fail_over("nod_a") == []  # it lives
        await lose(db, node)
        taken = {one.session for one in await db.fail_over("nod_a", limit=2)}
        again = await start(db, "nod_a")
        assert await db.fail_over("nod_a") == []
        mine = (await db.list_sessions(None, holder="nod_a")).items
        assert len(mine) == 4 and not taken & {one.id for one in mine}
        async with opened(database, again.fence) as new:
            change = UpdateSession(mine[0].id, {RUNNING}, 1, {"labels": {"a": "1"}})
            await new.commit([change])

    database.run(scenario)


def test_a_session_that_was_taken_is_the_new_holders_alone(database: Harness) -> None:
    """The late writer is refused by its fence, and, were it not for that, by the epoch."""

    async def scenario(db: Database) -> None:
        node, other = await joined(db, "nod_a"), await joined(db, "nod_b")
        session = await held(db, "nod_a")
        await line(db, session, [True])
        async with opened(database, node.fence) as old, opened(database, other.fence) as new:
            await lose(db, node)
            (moved,) = await db.fail_over("nod_a")
            taken = await new.take_session(session.id, other.fence, 2)
            change = UpdateSession(session.id, {RUNNING}, 1, {"labels": {"late": "1"}})
            with pytest.raises(NodeFenced):
                await old.commit([change, AppendEvent(session.id, "late")])
            with pytest.raises(StaleEpoch):
                await db.commit([change])
            assert moved.state is SUSPENDED
            assert await db.get_session(None, session.id) == taken
            assert (taken.holder, taken.epoch) == ("nod_b", 3)

    database.run(scenario)
