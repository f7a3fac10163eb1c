"""Opening a database on PostgreSQL: what is refused, what is told of it, and whose it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.cli.databases import database_location
from sojourn.database import Database, open_database
from sojourn.database.postgres import connections, migrate, place, signals
from sojourn.database.writes import AppendEvent
from sojourn.errors import HostUnfit, InvalidRequest, SojournError, StorageFull, Unreachable
from sojourn.model import SessionState
from support.databases import PostgresHarness, insert_session, make_session, update_session
from support.postgres import PostgresServer, postgres_server

PASSWORD = "hunter2-very-secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture
def harness(server: PostgresServer) -> Iterator[PostgresHarness]:
    name = server.create()
    yield PostgresHarness(server, name)
    server.drop(name)


async def nothing(db: Database) -> None:
    assert await db.unfinished_operations() == []


# -- the schema ---------------------------------------------------------------------------------


def test_many_that_open_an_empty_database_at_once_all_find_it_made(
    harness: PostgresHarness,
) -> None:
    async def scenario() -> None:
        opened = await asyncio.gather(*[open_database(harness.location) for _ in range(5)])
        try:
            ids = await asyncio.gather(*[db.server_id() for db in opened])
            assert len(set(ids)) == 1
        finally:
            for db in opened:
                await db.close()

    asyncio.run(scenario())
    with harness.server.connect(harness.name) as connection:
        applied = connection.execute("SELECT number, name FROM migrations ORDER BY 1").fetchall()
    assert applied == [(number, name) for number, name, _ in migrate.migrations()]


def test_a_database_of_before_is_brought_forward(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.migrations()
    monkeypatch.setattr(migrate, "migrations", lambda: known[:1])
    where = place.read_place(harness.location)
    with connections.connect(where) as connection:
        migrate.migrate(connection, where.shown)
        connection.execute(
            "INSERT INTO tenants (id, name, created_at) VALUES ('ten_1', 'kept', 1.0)"
        )
    monkeypatch.undo()

    async def check(db: Database) -> None:
        assert [tenant.name for tenant in await db.list_tenants()] == ["kept"]
        await insert_session(db, make_session())

    harness.run(check)


def test_a_newer_database_is_refused_and_left_as_it_is(harness: PostgresHarness) -> None:
    harness.run(nothing)
    with harness.server.connect(harness.name) as connection:
        connection.execute("INSERT INTO migrations VALUES (99, 'later', 1.0)")
    with pytest.raises(HostUnfit, match="at schema 99") as refused:
        harness.run(nothing)
    assert refused.value.details["present"] == 99
    assert "newer version" in refused.value.next_step


def test_tables_of_somebody_else_are_left_alone(harness: PostgresHarness) -> None:
    with harness.server.connect(harness.name) as connection:
        connection.execute("CREATE TABLE sessions (mine text)")
    with pytest.raises(HostUnfit, match="not Sojourn's"):
        harness.run(nothing)
    with harness.server.connect(harness.name) as connection:
        tables = connection.execute(
            "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
    assert tables == [("sessions",)]


def test_a_migration_that_was_cut_off_leaves_nothing(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.migrations()
    broken = [*known, (len(known) + 1, "broken", "CREATE TABLE half (n int); SELECT 1 / 0")]
    monkeypatch.setattr(migrate, "migrations", lambda: broken)
    with pytest.raises(SojournError):
        harness.run(nothing)
    monkeypatch.undo()
    harness.run(nothing)
    with harness.server.connect(harness.name) as connection:
        assert connection.execute("SELECT to_regclass('half')").fetchone() == (None,)


def test_text_is_kept_as_utf8_or_not_at_all(server: PostgresServer) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(HostUnfit, match="LATIN1"):
        PostgresHarness(server, "latin").run(nothing)
    server.drop("latin")


# -- what is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{PASSWORD}@127.0.0.1:1/d",
        f"postgresql://u:{PASSWORD}%zz@127.0.0.1/d",
        f"postgresql://u:{PASSWORD}@[127.0.0.1/d",
        f"postgresql://u@127.0.0.1:1/d?password={PASSWORD}",
        f"postgresql://u@127.0.0.1:1/d?passwort={PASSWORD}",
    ],
)
def test_a_password_is_in_no_error_and_in_no_log(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_DATABASE_PATIENCE", "0.0")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SojournError) as refused:
        asyncio.run(open_database(url))
    chain: BaseException | None = refused.value
    told = caplog.text
    while chain is not None:
        told += f"{chain!r} {chain} {getattr(chain, 'details', '')}"
        chain = None if chain.__suppress_context__ else chain.__cause__ or chain.__context__
    assert PASSWORD not in told


def test_a_failing_row_is_not_quoted(harness: PostgresHarness) -> None:
    async def scenario(db: Database) -> None:
        session = make_session(env={"TOKEN": PASSWORD}, epoch=-1)
        with pytest.raises(SojournError) as refused:
            await insert_session(db, session)
        assert refused.value.code == "conflict"
        assert PASSWORD not in str(refused.value)

    harness.run(scenario)


def test_a_password_on_the_command_line_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path
    with pytest.raises(InvalidRequest, match="seen by every user") as refused:
        database_location(f"postgresql://u:{PASSWORD}@h/d", data)
    assert PASSWORD not in str(refused.value)
    assert database_location("postgresql://u@h/d", data) == "postgresql://u@h/d"
    monkeypatch.setenv("SOJOURN_DATABASE", f"postgresql://u:{PASSWORD}@h/d")
    assert database_location(None, data).endswith("@h/d")
    monkeypatch.delenv("SOJOURN_DATABASE")
    assert database_location(None, data) == str(data / "sojourn.db")


def test_a_url_is_shown_without_what_is_secret_in_it() -> None:
    shown = place.read_place(f"postgresql://u:{PASSWORD}@h:6000/d?sslmode=require").shown
    assert shown == "postgresql://u@h:6000/d"
    shown = place.read_place("postgresql://u@/d?host=/run/pg").shown
    assert shown == "postgresql://u@/d?host=/run/pg"


@pytest.mark.parametrize(
    ("url", "says"), [("postgresql://nobody@/{}", "nobody"), ("postgresql://sojourn@/none", "none")]
)
def test_what_waiting_does_not_help_is_refused_at_once(
    harness: PostgresHarness, url: str, says: str
) -> None:
    began = time.monotonic()
    where = f"{url.format(harness.name)}?host={harness.server.sockets}"
    with pytest.raises(HostUnfit, match=says):
        asyncio.run(open_database(where))
    assert time.monotonic() - began < place.PATIENCE_SECONDS


def test_a_server_that_is_not_there_is_waited_for_and_then_told(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_DATABASE_PATIENCE", "0.3")
    with pytest.raises(Unreachable, match="does not answer"):
        asyncio.run(open_database(f"postgresql://sojourn@/d?host={harness.server.sockets}/no"))


def test_a_full_disk_is_told_as_such(harness: PostgresHarness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        with harness.server.connect(harness.name) as connection:
            connection.execute(
                "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
            )
            connection.execute(
                "CREATE TRIGGER full_disk BEFORE INSERT ON events FOR EACH ROW"
                " EXECUTE FUNCTION full_disk()"
            )
        with pytest.raises(StorageFull, match="could not extend"):
            await db.append_event(AppendEvent(session.id, "turn"))
        assert await db.list_events(session.id) == []

    harness.run(scenario)


# -- what it cannot hold ------------------------------------------------------------------------


def test_a_text_with_a_nul_keeps_no_session_from_its_state(harness: PostgresHarness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        failed = await update_session(
            db,
            session.id,
            expect_state={session.state},
            expect_epoch=1,
            state=SessionState.FAILED,
            cause="it said \0",
        )
        assert failed.cause == "it said \N{REPLACEMENT CHARACTER}"
        await db.append_event(AppendEvent(session.id, "turn", details={"out": "\0"}))
        assert (await db.list_events(session.id))[0].details == {"out": "\0"}
        with pytest.raises(InvalidRequest):
            await insert_session(db, make_session(name="a\0b"))
        with pytest.raises(InvalidRequest):
            await insert_session(db, make_session(labels={"a": "\0"}))
        for key in ("a\0b", "\udcff"):
            with pytest.raises(SojournError) as missing:
                await db.get_session("ten_a", key)
            assert missing.value.code == "session_not_found"

    harness.run(scenario)


# -- whose it is --------------------------------------------------------------------------------


def test_a_second_server_is_refused_until_the_first_one_is_gone(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_OWN_SECONDS", 0.3)

    async def scenario(one: Database) -> None:
        await one.own()
        two = await open_database(harness.location)
        try:
            with pytest.raises(HostUnfit, match="another server"):
                await two.own()
        finally:
            await two.close()
        await one.close()
        three = await open_database(harness.location)
        try:
            await three.own()
            await insert_session(three, make_session())
        finally:
            await three.close()

    harness.run(scenario)


def test_a_server_that_lost_the_database_to_another_changes_nothing_any_more(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_OWN_SECONDS", 0.3)
    # It gets no chance to be first.
    monkeypatch.setattr(signals, "_PAUSES", (1.0,))

    async def scenario(one: Database) -> None:
        await one.own()
        session = await insert_session(one, make_session())
        two = await open_database(harness.location)
        try:
            with harness.server.connect() as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
                )
            await two.own()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await one.append_event(AppendEvent(session.id, "turn"))
                    except HostUnfit:
                        break
                    await asyncio.sleep(0.05)
            before = await two.list_events(session.id)
            with pytest.raises(HostUnfit, match="another server"):
                await one.append_event(AppendEvent(session.id, "turn"))
            assert await two.list_events(session.id) == before
            await two.append_event(AppendEvent(session.id, "turn"))
        finally:
            await two.close()

    harness.run(scenario)


def test_a_server_keeps_its_database_over_a_restart(
    harness: PostgresHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_OWN_SECONDS", 0.3)
    monkeypatch.setattr("sojourn.database.sql_database._POLL", 600.0)

    async def scenario(one: Database) -> None:
        await one.own()
        session = await insert_session(one, make_session())
        stream = one.follow_events(session.id)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(harness.server.stop)
        await asyncio.to_thread(harness.server.start)
        two = await open_database(harness.location)
        try:
            # Heard although the listening connection was lost: by a notice, or by reading again.
            await two.append_event(AppendEvent(session.id, "turn"))
            assert (await asyncio.wait_for(waiting, 30)).sequence == 1
            with pytest.raises(HostUnfit):
                await two.own()
        finally:
            await two.close()
        await one.append_event(AppendEvent(session.id, "turn"))

    harness.run(scenario)
