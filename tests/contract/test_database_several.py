"""Several processes with one database open: nothing is lost or done twice between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from sojourn.database import Database, Operation, open_database
from sojourn.database.writes import (
    AppendEvent,
    DeleteSnapshot,
    InsertSession,
    InsertSnapshot,
    UpdateSession,
    UpdateSnapshot,
)
from sojourn.errors import Conflict, NameTaken, SessionBusy, SnapshotNotFound, StaleEpoch
from sojourn.model import Session
from support.databases import (
    RUNNING,
    Harness,
    insert_session,
    insert_snapshot,
    make_session,
    make_snapshot,
)

Scenario = Callable[[Database, Database], Awaitable[None]]


def run_two(database: Harness, scenario: Scenario) -> None:
    """Each has connections, queues and memories of its own, as two processes would."""

    async def both(one: Database) -> None:
        two = await open_database(database.location)
        try:
            await scenario(one, two)
        finally:
            await two.close()

    database.run(both)
    assert database.flaws() == []


def test_swaps_of_one_session_are_never_lost(database: Harness) -> None:
    async def swap(db: Database, id: str) -> int:
        won = 0
        for _ in range(15):
            session = await db.get_session(None, id)
            try:
                await db.commit(
                    [
                        UpdateSession(id, {RUNNING}, session.epoch, {"epoch": session.epoch + 1}),
                        AppendEvent(id, "swap", details={"epoch": session.epoch + 1}),
                    ]
                )
                won += 1
            except StaleEpoch:
                continue
        return won

    async def scenario(one: Database, two: Database) -> None:
        session = await insert_session(one, make_session())
        won = sum(await asyncio.gather(*[swap(db, session.id) for db in (one, two, one, two)]))
        found = await two.get_session(None, session.id)
        events = await one.list_events(session.id)
        assert found.epoch == won + 1
        assert [event.details["epoch"] for event in events] == list(range(2, won + 2))

    run_two(database, scenario)


def test_events_of_one_session_have_no_gap(database: Harness) -> None:
    async def scenario(one: Database, two: Database) -> None:
        session = await insert_session(one, make_session())
        numbers = await asyncio.gather(
            *[db.append_event(AppendEvent(session.id, "x")) for _ in range(30) for db in (one, two)]
        )
        assert sorted(numbers) == list(range(1, 61))
        # Of each process those it appended first come first.
        assert list(numbers[0::2]) == sorted(numbers[0::2])
        assert list(numbers[1::2]) == sorted(numbers[1::2])

    run_two(database, scenario)


def begin_made(db: Database, number: int, session: Session) -> Awaitable[tuple[Operation, bool]]:
    new = make_session(name=f"made-{number}")
    return db.begin(
        tenant="ten_a",
        session=new.id,
        verb="create",
        request={"n": number},
        server="s",
        key=f"key-{number}",
        creates=True,
        also=[InsertSession(new), AppendEvent(session.id, "asked")],
    )


def test_one_key_begins_one_operation(database: Harness) -> None:
    async def scenario(one: Database, two: Database) -> None:
        for number in range(8):
            session = await insert_session(one, make_session())
            begun = await asyncio.gather(
                *[begin_made(db, number, session) for db in (one, two, one, two)]
            )
            operations = {operation.id for operation, _ in begun}
            assert len(operations) == 1
            assert sum(new for _, new in begun) == 1
            assert len(await two.list_events(session.id)) == 1

    run_two(database, scenario)


def test_one_of_many_gets_the_session_and_one_the_name(database: Harness) -> None:
    async def scenario(one: Database, two: Database) -> None:
        for number in range(8):
            session = await insert_session(one, make_session())
            begun = await asyncio.gather(
                *[
                    db.begin(tenant="ten_a", session=session.id, verb=verb, request={}, server="s")
                    for db, verb in ((one, "pause"), (two, "fork"), (one, "suspend"))
                ],
                return_exceptions=True,
            )
            assert sum(isinstance(result, SessionBusy) for result in begun) == 2
            named = await asyncio.gather(
                *[insert_session(db, make_session(name=f"n{number}")) for db in (one, two)],
                return_exceptions=True,
            )
            assert sum(isinstance(result, NameTaken) for result in named) == 1

    run_two(database, scenario)


def test_no_head_is_lost_to_a_removal_at_the_same_time(database: Harness) -> None:
    async def scenario(one: Database, two: Database) -> None:
        moved = 0
        for _ in range(25):
            session = await insert_session(one, make_session())
            snapshot = make_snapshot(session, hidden=True)
            await insert_snapshot(one, snapshot)
            change = UpdateSession(session.id, {RUNNING}, 1, {"head": snapshot.id})
            head, removed = await asyncio.gather(
                two.commit([change]),
                one.commit([DeleteSnapshot(snapshot.id)]),
                return_exceptions=True,
            )
            found = await one.get_session(None, session.id)
            if isinstance(head, SnapshotNotFound):
                assert removed == [True] and found.head is None
            else:
                assert isinstance(removed, Conflict) and found.head == snapshot.id
                moved += 1
        assert moved <= 25

    run_two(database, scenario)


def test_no_child_is_lost_to_the_removal_of_its_parent(database: Harness) -> None:
    async def scenario(one: Database, two: Database) -> None:
        for _ in range(20):
            session = await insert_session(one, make_session())
            first = make_snapshot(session)
            middle = make_snapshot(session, parent=first.id)
            for snapshot in (first, middle):
                await insert_snapshot(one, snapshot)
            await one.commit([UpdateSnapshot(middle.id, {"hidden": True})])
            child = make_snapshot(session, parent=middle.id)
            inserted, removed = await asyncio.gather(
                two.commit([InsertSnapshot(child)]),
                one.commit([DeleteSnapshot(middle.id)]),
                return_exceptions=True,
            )
            tree = {one.id: one.parent for one in await two.list_snapshots(session.id)}
            assert removed == [True]
            if isinstance(inserted, SnapshotNotFound):
                assert tree == {first.id: None}
            else:
                assert tree == {first.id: None, child.id: first.id}

    run_two(database, scenario)


def test_several_that_prune_at_once_remove_everything_once(
    database: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.database.sql_database._PRUNED", 3)

    async def scenario(one: Database, two: Database) -> None:
        session = await insert_session(one, make_session())
        for number in range(11):
            operation, _ = await begin_made(one, number, session)
            await one.finish(operation.id)
        now = time.time() + 30 * 86400.0
        kept = await begin_made(one, 11, session)
        pruned = await asyncio.gather(*[db.prune(now) for db in (one, two, one)])
        again = await one.prune(now)
        assert sum(one.keys for one in [*pruned, again]) == 11
        assert sum(one.operations for one in [*pruned, again]) == 11
        assert await one.unfinished_operations() == [kept[0]]

    run_two(database, scenario)


def test_a_follower_is_woken_by_what_another_process_appends(
    database: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.database.sql_database._POLL", 0.5)

    async def scenario(one: Database, two: Database) -> None:
        session = await insert_session(one, make_session())
        stream = one.follow_events(session.id)
        for number in range(1, 4):
            waiting = asyncio.ensure_future(anext(stream))
            await two.append_event(AppendEvent(session.id, "turn"))
            assert (await asyncio.wait_for(waiting, 20)).sequence == number

    run_two(database, scenario)
