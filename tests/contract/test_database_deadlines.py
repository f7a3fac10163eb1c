"""Deadlines: found when due, moved out cheaply, never moved in by activity."""

from __future__ import annotations

import asyncio

import pytest

from sojourn.database import Database, open_database
from sojourn.database.writes import UpdateSession
from sojourn.errors import SessionBusy, StaleEpoch, Unreachable
from sojourn.model import Policy, SessionState
from support.databases import (
    PAUSED,
    RUNNING,
    SUSPENDED,
    Harness,
    insert_session,
    make_session,
    update_session,
)


async def due(db: Database, now: float) -> set[str]:
    return {session.id for session in await db.due_sessions(now)}


async def earliest(db: Database) -> float | None:
    """When the first session becomes due."""
    for session in await db.due_sessions(1e12):
        deadlines = (session.idle_deadline, session.lifetime_deadline)
        return min(deadline for deadline in deadlines if deadline is not None)
    return None


def test_sessions_with_a_sandbox_become_due_at_their_earliest_deadline(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        idle = await insert_session(db, make_session(idle_deadline=100.0))
        paused = await insert_session(db, make_session(state=PAUSED, idle_deadline=110.0))
        old = await insert_session(db, make_session(idle_deadline=999.0, lifetime_deadline=120.0))
        await insert_session(db, make_session())
        for state in (SUSPENDED, SessionState.CREATING, SessionState.FAILED, SessionState.DELETED):
            await insert_session(db, make_session(state=state, idle_deadline=1.0))
        assert await earliest(db) == 100.0
        assert await due(db, 99.0) == set()
        assert await due(db, 100.0) == {idle.id}
        assert await due(db, 115.0) == {idle.id, paused.id}
        assert [s.id for s in await db.due_sessions(1000.0)] == [idle.id, paused.id, old.id]
        assert [s.id for s in await db.due_sessions(1000.0, limit=1)] == [idle.id]

    database.run(scenario)


def test_a_session_put_away_is_due_only_for_the_end_that_its_policy_names(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        delete = Policy(on_expiry="delete")
        for state in (SUSPENDED, SessionState.FAILED):
            await insert_session(db, make_session(state=state, lifetime_deadline=50.0))
        assert await earliest(db) is None
        doomed = [
            await insert_session(
                db, make_session(state=state, policy=delete, lifetime_deadline=60.0)
            )
            for state in (SUSPENDED, SessionState.FAILED, RUNNING)
        ]
        assert await earliest(db) == 60.0
        assert await due(db, 59.0) == set()
        assert await due(db, 60.0) == {session.id for session in doomed}

    database.run(scenario)


def test_a_touch_is_seen_at_once_by_every_read(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(name="box", idle_deadline=100.0))
        for deadline in (200.0, 300.0, 250.0):
            db.touch_idle(session.id, deadline)
        for key in (session.id, "box"):
            assert (await db.get_session("ten_a", key)).idle_deadline == 300.0
        assert (await db.list_sessions("ten_a")).items[0].idle_deadline == 300.0
        assert await due(db, 299.0) == set()
        assert await due(db, 300.0) == {session.id}
        assert await earliest(db) == 300.0

    database.run(scenario)


def test_a_touch_never_moves_a_deadline_in(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(idle_deadline=500.0))
        db.touch_idle(session.id, 100.0)
        assert (await db.get_session(None, session.id)).idle_deadline == 500.0
        assert await earliest(db) == 500.0

    database.run(scenario)
    assert database.run(earliest) == 500.0


def test_a_touch_gives_no_deadline_to_a_session_that_has_none(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        db.touch_idle(session.id, 100.0)
        db.touch_idle("ses_none", 100.0)
        assert (await db.get_session(None, session.id)).idle_deadline is None
        assert await earliest(db) is None

    database.run(scenario)


def test_the_first_touch_is_written_at_once_and_the_last_when_closing(database: Harness) -> None:
    async def scenario(db: Database) -> str:
        session = await insert_session(db, make_session(idle_deadline=100.0))
        db.touch_idle(session.id, 200.0)
        other = await open_database(database.location)
        try:
            async with asyncio.timeout(20):
                while (await other.get_session(None, session.id)).idle_deadline != 200.0:
                    await asyncio.sleep(0.01)
        finally:
            await other.close()
        for deadline in range(201, 300):
            db.touch_idle(session.id, float(deadline))
        return session.id

    id = database.run(scenario)
    assert database.run(lambda db: db.get_session(None, id)).idle_deadline == 299.0


def test_touches_that_follow_each_other_are_written_without_another_call(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(idle_deadline=100.0))
        other = await open_database(database.location)
        try:
            async with asyncio.timeout(20):
                for deadline in (200.0, 201.0, 202.0):
                    db.touch_idle(session.id, deadline)
                    await asyncio.sleep(0.02)
                while (await other.get_session(None, session.id)).idle_deadline != 202.0:
                    await asyncio.sleep(0.05)
        finally:
            await other.close()

    database.run(scenario)


def test_a_deadline_set_on_purpose_is_not_undone_by_an_earlier_touch(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(idle_deadline=100.0))
        db.touch_idle(session.id, 200.0)
        await earliest(db)
        db.touch_idle(session.id, 900.0)
        set_to = await update_session(
            db, session.id, expect_state={RUNNING}, expect_epoch=1, idle_deadline=300.0
        )
        assert set_to.idle_deadline == 300.0
        assert await earliest(db) == 300.0
        db.touch_idle(session.id, 400.0)
        assert await earliest(db) == 400.0
        await update_session(
            db, session.id, expect_state={RUNNING}, expect_epoch=1, idle_deadline=None
        )
        assert await earliest(db) is None

    database.run(scenario)


def test_a_session_touched_while_the_due_ones_are_read_is_not_due(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(idle_deadline=100.0))
        for _ in range(20):
            reading = asyncio.ensure_future(db.due_sessions(150.0))
            await asyncio.sleep(0)
            db.touch_idle(session.id, 200.0)
            assert await reading == []
            await update_session(
                db, session.id, expect_state={RUNNING}, expect_epoch=1, idle_deadline=100.0
            )
        assert await due(db, 150.0) == {session.id}

    database.run(scenario)


def test_a_touch_stays_seen_while_it_is_being_written(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(idle_deadline=100.0))
        for n in range(200):
            deadline = 200.0 + n
            db.touch_idle(session.id, deadline)
            readings = [asyncio.ensure_future(db.list_sessions("ten_a")) for _ in range(2)]
            writing = asyncio.ensure_future(earliest(db))
            for reading in readings:
                assert (await reading).items[0].idle_deadline == deadline
            assert await writing == deadline

    database.run(scenario)


def test_a_touch_survives_a_change_that_was_refused(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(idle_deadline=100.0))
        db.touch_idle(session.id, 900.0)
        with pytest.raises(StaleEpoch):
            await update_session(
                db, session.id, expect_state={RUNNING}, expect_epoch=7, idle_deadline=300.0
            )
        assert (await db.get_session(None, session.id)).idle_deadline == 900.0
        change = UpdateSession(session.id, {RUNNING}, 1, {"idle_deadline": 300.0})
        await db.begin(tenant="ten_a", session=session.id, verb="x", request={}, server="s")
        with pytest.raises(SessionBusy):
            await db.begin(
                tenant="ten_a", session=session.id, verb="y", request={}, server="s", also=[change]
            )
        assert await earliest(db) == 900.0

    database.run(scenario)


def test_many_sessions_touched_at_once_are_all_moved(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        sessions = [await insert_session(db, make_session(idle_deadline=1.0)) for _ in range(30)]
        for session in sessions:
            db.touch_idle(session.id, 100.0)
        assert await due(db, 99.0) == set()
        assert await due(db, 100.0) == {session.id for session in sessions}

    database.run(scenario)


def test_touching_after_closing_says_so(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await db.close()
        with pytest.raises(Unreachable):
            db.touch_idle("ses_1", 1.0)
        with pytest.raises(Unreachable):
            await db.get_session(None, "ses_1")
        with pytest.raises(Unreachable):
            await insert_session(db, make_session())
        await db.close()

    database.run(scenario)


def test_many_sessions_may_move_at_once(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        sessions = [await insert_session(db, make_session(idle_deadline=1.0)) for _ in range(3)]
        for number, session in enumerate(sessions):
            db.touch_idle(session.id, 100.0 + number)
        for number, session in enumerate(sessions):
            assert (await db.get_session(None, session.id)).idle_deadline == 100.0 + number

    database.run(scenario)
