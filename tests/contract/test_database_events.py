"""Events: numbered without a gap, in order, and followed without missing one."""

from __future__ import annotations

import asyncio

import pytest

from sojourn.database import Database, Event
from sojourn.database.writes import AppendEvent, LinkEvent
from sojourn.errors import NotFound, SessionNotFound, Unreachable
from support.databases import Harness, insert_session, make_session


def test_events_are_numbered_per_session_in_the_order_of_the_calls(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        one = await insert_session(db, make_session())
        two = await insert_session(db, make_session())
        futures = []
        for n in range(50):
            durable = n % 7 == 0
            futures.append(
                db.append_event(AppendEvent(one.id, "turn", details={"n": n}), durable=durable)
            )
            futures.append(db.append_event(AppendEvent(two.id, "turn", details={"n": n})))
        assert await asyncio.gather(*futures) == [n // 2 + 1 for n in range(100)]
        for session in (one, two):
            events = await db.list_events(session.id)
            assert [(e.sequence, e.details["n"]) for e in events] == [(n + 1, n) for n in range(50)]

    database.run(scenario)


def test_an_event_reads_back_equal_after_reopening(database: Harness) -> None:
    session = make_session()
    expected = Event(
        session=session.id,
        sequence=1,
        at=12.5,
        actor="tok_1",
        kind="exec",
        result="ok",
        details={"argv": ["a", "\N{SNOWMAN}"], "exit": 0, "none": None},
        before="snp_a",
        after="snp_b",
        operation="opr_1",
    )

    async def write(db: Database) -> None:
        await insert_session(db, session)
        await db.append_event(
            AppendEvent(
                session.id,
                "exec",
                actor="tok_1",
                result="ok",
                details=expected.details,
                before="snp_a",
                after="snp_b",
                operation="opr_1",
                at=12.5,
            )
        )

    async def read(db: Database) -> None:
        assert await db.list_events(session.id) == [expected]

    database.run(write)
    database.run(read)


def test_events_are_read_in_parts_and_by_kind(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        for n in range(10):
            await db.append_event(AppendEvent(session.id, "turn" if n % 2 else "files"))
        part = await db.list_events(session.id, after=3, limit=4)
        assert [event.sequence for event in part] == [4, 5, 6, 7]
        turns = await db.list_events(session.id, kinds={"turn"})
        assert [event.sequence for event in turns] == [2, 4, 6, 8, 10]
        assert await db.list_events(session.id, after=10) == []

    database.run(scenario)


def test_an_event_needs_its_session(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        with pytest.raises(SessionNotFound):
            await db.append_event(AppendEvent("ses_none", "turn"))

    database.run(scenario)


def test_snapshots_are_named_on_an_event_later(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        sequence = await db.append_event(AppendEvent(session.id, "turn", before="snp_a"))
        await db.commit([LinkEvent(session.id, sequence, after="snp_b")])
        (event,) = await db.list_events(session.id)
        assert (event.before, event.after) == ("snp_a", "snp_b")
        with pytest.raises(NotFound):
            await db.commit([LinkEvent(session.id, 99, after="snp_b")])

    database.run(scenario)


def test_followers_get_everything_once_and_in_order(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        other = await insert_session(db, make_session())
        for _ in range(3):
            await db.append_event(AppendEvent(session.id, "turn"))

        async def follow(after: int) -> list[int]:
            seen: list[int] = []
            async for event in db.follow_events(session.id, after=after):
                seen.append(event.sequence)
                if event.sequence == 60:
                    return seen
            return seen

        followers = [asyncio.create_task(follow(after)) for after in (0, 2, 3, 40)]
        for n in range(57):
            db.append_event(AppendEvent(session.id, "turn"))
            db.append_event(AppendEvent(other.id, "turn"))
            if n % 10 == 0:
                await asyncio.sleep(0)
        # Appended together with other writes is seen too.
        seen = await asyncio.wait_for(asyncio.gather(*followers), 30)
        assert seen == [list(range(after + 1, 61)) for after in (0, 2, 3, 40)]

    database.run(scenario)


def test_followers_are_woken_by_events_of_a_commit_and_ended_by_closing(
    database: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.database.sql_database._POLL", 600.0)  # only a notice wakes

    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        stream = db.follow_events(session.id)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        assert not first.done()
        await db.commit([AppendEvent(session.id, "pause")])
        assert (await asyncio.wait_for(first, 30)).kind == "pause"
        second = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        await db.close()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(second, 30)

    database.run(scenario)


def test_a_follower_with_nothing_to_follow_does_not_read_again_and_again(
    database: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        reads = 0
        read = db.list_events

        async def counted(*args: object, **more: object) -> list[Event]:
            nonlocal reads
            reads += 1
            return await read(*args, **more)

        monkeypatch.setattr(db, "list_events", counted)
        stream = db.follow_events(session.id)
        first = asyncio.ensure_future(anext(stream))
        while not reads:
            await asyncio.sleep(0)
        await db.append_event(AppendEvent(session.id, "turn"))
        assert (await first).sequence == 1
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        assert reads < 5
        await db.append_event(AppendEvent(session.id, "turn"))
        assert (await waiting).sequence == 2

    database.run(scenario)
