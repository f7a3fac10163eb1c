"""Connections lost in the middle of a commit, and a server that is killed, restarted or away: what
was acknowledged is there, once, and what failed did not happen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from sojourn.database import Database, open_database
from sojourn.database.engine import Statements
from sojourn.database.postgres import connections, transactions
from sojourn.database.postgres.writer import THREADS
from sojourn.database.sql_database import SqlDatabase
from sojourn.database.writes import AppendEvent, UpdateSession
from sojourn.errors import OutcomeUnknown, SojournError, Unreachable
from sojourn.model import Session
from support.databases import (
    RUNNING,
    PostgresHarness,
    insert_session,
    make_session,
    update_session,
)
from support.nodes import LONG, joined
from support.postgres import PostgresServer, postgres_server
from support.postgres_proxy import Moment, Proxy, cutting


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """One that syncs, since it is killed."""
    with postgres_server(tmp_path_factory.mktemp("postgres"), durable=True) as server:
        yield server


@pytest.fixture
def harness(server: PostgresServer) -> Iterator[PostgresHarness]:
    name = server.create()
    yield PostgresHarness(server, name)
    server.drop(name)


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    with cutting(server) as proxy:
        yield proxy


async def step(db: Database, session: Session) -> Session:
    """The next epoch, with an event that tells it."""
    epoch = session.epoch + 1
    changes = {"epoch": epoch}
    results = await db.commit(
        [
            UpdateSession(session.id, {RUNNING}, session.epoch, changes),
            AppendEvent(session.id, "step", details={"epoch": epoch}),
        ]
    )
    moved: Session = results[0]
    return moved


async def check_steps(db: Database, session: str, acknowledged: int) -> None:
    """Each epoch was told once, without a gap, and no acknowledged one is missing."""
    found = await db.get_session(None, session)
    events = await db.list_events(session, limit=100_000)
    assert [event.details["epoch"] for event in events] == list(range(2, found.epoch + 1))
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert acknowledged <= found.epoch


@pytest.mark.parametrize("moment", ["unsent", "unanswered"])
def test_a_commit_whose_connection_is_cut_happens_once(
    harness: PostgresHarness, proxy: Proxy, moment: Moment
) -> None:
    async def scenario() -> None:
        db = await open_database(proxy.url(harness.name))
        try:
            session = await insert_session(db, make_session())
            for count in range(1, 4):
                proxy.cut = moment
                session = await step(db, session)
                assert proxy.cuts == count
            await check_steps(db, session.id, session.epoch)
            assert session.epoch == 4
        finally:
            await db.close()

    asyncio.run(scenario())


def test_a_commit_that_reaches_the_server_long_after_its_caller_asked_again_does_not_happen(
    harness: PostgresHarness, proxy: Proxy
) -> None:
    async def scenario() -> None:
        db = await open_database(proxy.url(harness.name))
        try:
            session = await insert_session(db, make_session())
            other = await insert_session(db, make_session())
            proxy.cut = "late"
            moving = asyncio.ensure_future(step(db, session))
            while not proxy.cuts:
                await asyncio.sleep(0.01)
            # The lost transaction is open and holds its row; nobody else is held up by it.
            other = await asyncio.wait_for(step(db, other), 20)
            await asyncio.sleep(0.2)
            assert not moving.done()
            proxy.deliver()
            session = await asyncio.wait_for(moving, 30)
            assert (session.epoch, other.epoch) == (2, 2)
            await check_steps(db, session.id, 2)
        finally:
            await db.close()

    asyncio.run(scenario())


def test_a_server_that_never_answers_holds_up_nobody_for_ever(
    harness: PostgresHarness, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "LONGEST", 0.3)
    monkeypatch.setattr(connections, "WATCH_SECONDS", 0.1)

    async def scenario() -> None:
        db = await open_database(proxy.url(harness.name))
        try:
            session = await insert_session(db, make_session())
            proxy.cut = "silent"
            session = await asyncio.wait_for(step(db, session), 20)
            assert (session.epoch, proxy.cuts) == (2, 1)
            await check_steps(db, session.id, 2)
        finally:
            await db.close()

    asyncio.run(scenario())


def test_a_lease_is_not_kept_waiting_by_a_server_that_is_away(
    harness: PostgresHarness, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the server waits long; a lease that came that late would be of no use."""
    monkeypatch.setattr(connections, "WATCH_SECONDS", 0.1)

    async def scenario() -> None:
        db = await open_database(proxy.url(harness.name))
        try:
            node = await joined(db, "nod_a")
            session = await insert_session(db, make_session())
            await db.renew_node(node.fence, lease=LONG)
            # All that others use is taken, and nobody answers the lease's own connection.
            busy, done = threading.Semaphore(0), threading.Event()

            def wait(_: Statements) -> None:
                busy.release()
                done.wait(60)

            assert isinstance(db, SqlDatabase)
            held = [db._writer.submit(wait, durable=False) for _ in range(THREADS)]
            for _ in range(THREADS):
                await asyncio.to_thread(busy.acquire, timeout=30)
            assert (await db.renew_node(node.fence, lease=LONG)).lease_left > 0
            harness.server.kill()
            with pytest.raises(Unreachable):
                await asyncio.wait_for(db.renew_node(node.fence, lease=LONG), 20)
            assert not any(job.done() for job in held)
            harness.server.start()
            done.set()
            await asyncio.gather(*held, return_exceptions=True)
            assert (await db.renew_node(node.fence, lease=LONG)).lease_left > 0
            await step(db, session)
        finally:
            await db.close()

    asyncio.run(scenario())


def test_begun_once_though_the_answer_was_lost(harness: PostgresHarness, proxy: Proxy) -> None:
    async def scenario() -> None:
        db = await open_database(proxy.url(harness.name))
        try:
            session = await insert_session(db, make_session())
            facts = {"tenant": "ten_a", "session": session.id, "request": {}, "server": "s"}
            proxy.cut = "unanswered"
            first, new = await db.begin(verb="suspend", key="k", **facts)
            assert new and proxy.cuts == 1
            assert await db.begin(verb="suspend", key="k", **facts) == (first, False)
            assert [one.id for one in await db.unfinished_operations()] == [first.id]
        finally:
            await db.close()

    asyncio.run(scenario())


def test_an_outcome_nobody_can_tell_is_said_to_be_unknown(
    harness: PostgresHarness,
    proxy: Proxy,
    server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOJOURN_DATABASE_PATIENCE", "0.5")

    async def scenario() -> None:
        db = await open_database(proxy.url(harness.name))
        try:
            session = await insert_session(db, make_session())
            proxy.cut = "late"
            moving = asyncio.ensure_future(step(db, session))
            while not proxy.cuts:
                await asyncio.sleep(0.01)
            server.kill()
            with pytest.raises(OutcomeUnknown):
                await moving
            with pytest.raises(Unreachable) as refused:
                await step(db, session)
            assert not isinstance(refused.value, OutcomeUnknown)
            server.start()
            proxy.deliver()
            found = await db.get_session(None, session.id)
            await check_steps(db, session.id, found.epoch)
            assert (await step(db, found)).epoch == found.epoch + 1
        finally:
            await db.close()

    try:
        asyncio.run(scenario())
    finally:
        server.kill()
        server.start()


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_acknowledged_commits_are_there_after_the_server_ended_amid_them(
    harness: PostgresHarness, server: PostgresServer, ending: str
) -> None:
    """Callers are not told: they wait until it is back."""
    rounds = 3

    async def work(db: Database, acknowledged: dict[str, int], done: asyncio.Event) -> None:
        session = await insert_session(db, make_session())
        while not done.is_set():
            session = await step(db, session)
            acknowledged[session.id] = session.epoch
            await db.append_event(AppendEvent(session.id, "turn"))

    def restart() -> None:
        getattr(server, ending)()
        server.start()

    async def scenario() -> dict[str, int]:
        acknowledged: dict[str, int] = {}
        done = asyncio.Event()
        db = await open_database(harness.location)
        try:
            workers = [asyncio.ensure_future(work(db, acknowledged, done)) for _ in range(4)]
            for _ in range(rounds):
                before = sum(acknowledged.values())
                while sum(acknowledged.values()) < before + 20:
                    await asyncio.sleep(0.01)
                    assert not any(worker.done() for worker in workers)
                await asyncio.to_thread(restart)
            done.set()
            await asyncio.gather(*workers)
        finally:
            await db.close()
        return acknowledged

    acknowledged = asyncio.run(scenario())
    assert len(acknowledged) == 4

    async def check(db: Database) -> None:
        for id, epoch in acknowledged.items():
            session = await db.get_session(None, id)
            assert session.epoch == epoch
            steps = await db.list_events(id, limit=100_000, kinds=["step"])
            assert [event.details["epoch"] for event in steps] == list(range(2, epoch + 1))
            turns = await db.list_events(id, limit=100_000, kinds=["turn"])
            assert len(turns) == len(steps)

    harness.run(check)
    assert harness.flaws() == []


def test_reads_wait_for_a_server_that_comes_back_and_fail_for_one_that_does_not(
    harness: PostgresHarness, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        server.kill()
        later = threading.Timer(0.3, server.start)
        later.start()
        try:
            assert await db.get_session(None, session.id) == session
        finally:
            later.join()
        monkeypatch.setenv("SOJOURN_DATABASE_PATIENCE", "0.3")
        hasty = await open_database(harness.location)
        server.kill()
        try:
            with pytest.raises(Unreachable) as refused:
                await hasty.get_session(None, session.id)
            assert "does not answer" in refused.value.message
        finally:
            server.start()
        assert await hasty.get_session(None, session.id) == session
        await hasty.close()

    harness.run(scenario)


def test_a_row_that_is_held_elsewhere_holds_up_its_own_writers_only(
    harness: PostgresHarness, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.3)

    async def scenario(db: Database) -> None:
        held, free = [await insert_session(db, make_session()) for _ in range(2)]
        with server.connect(harness.name) as other, other.transaction():
            other.execute("SELECT 1 FROM sessions WHERE id = %s FOR UPDATE", (held.id,))
            waiting = asyncio.ensure_future(step(db, held))
            assert (await step(db, free)).epoch == 2
            assert await db.get_session(None, held.id) == held
            with pytest.raises(Unreachable, match="took too long"):
                await waiting
        assert (await step(db, held)).epoch == 2

    harness.run(scenario)


def test_a_transaction_chosen_to_end_a_deadlock_is_done_anew(
    harness: PostgresHarness, server: PostgresServer
) -> None:
    """Somebody else's statements take two sessions in the other order."""

    async def scenario(db: Database) -> None:
        one, two = sorted(
            [await insert_session(db, make_session()) for _ in range(2)], key=lambda s: s.id
        )
        with server.connect(harness.name) as other:
            other.execute("SET deadlock_timeout = '60s'")  # it is not the one that notices
            other.execute("BEGIN")
            other.execute("UPDATE sessions SET cause = 'x' WHERE id = %s", (two.id,))
            both = asyncio.ensure_future(
                db.commit(
                    [UpdateSession(each.id, {RUNNING}, 1, {"epoch": 2}) for each in (one, two)]
                )
            )
            await wait_until_blocked(server)
            meets = asyncio.to_thread(
                other.execute, "UPDATE sessions SET cause = 'x' WHERE id = %s", (one.id,)
            )
            await asyncio.wait_for(meets, 30)
            other.execute("COMMIT")
            moved = await asyncio.wait_for(both, 30)
        assert [session.epoch for session in moved] == [2, 2]
        assert [session.cause for session in moved] == ["x", "x"]

    harness.run(scenario)


async def wait_until_blocked(server: PostgresServer) -> None:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with server.connect() as connection:
            row = connection.execute(query).fetchone()
        if row is not None and row[0]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nothing waits")


def test_closing_waits_for_what_was_asked_before(harness: PostgresHarness) -> None:
    async def scenario() -> str:
        db = await open_database(harness.location)
        session = await insert_session(db, make_session())
        events = [db.append_event(AppendEvent(session.id, "turn")) for _ in range(50)]
        change = asyncio.ensure_future(
            update_session(db, session.id, expect_state={RUNNING}, expect_epoch=1, cause="x")
        )
        await asyncio.sleep(0)
        await db.close()
        assert [await event for event in events] == list(range(1, 51))
        await change
        with pytest.raises(SojournError):
            await db.append_event(AppendEvent(session.id, "turn"))
        return session.id

    id = asyncio.run(scenario())

    async def check(db: Database) -> None:
        assert (await db.get_session(None, id)).cause == "x"
        assert len(await db.list_events(id)) == 50

    harness.run(check)
