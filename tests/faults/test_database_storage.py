"""A disk that is full, a file that is damaged, newer than the code, or held by another process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sojourn.database import Database, open_database
from sojourn.database.sqlite import migrate, reserve
from sojourn.database.writes import AppendEvent, FinishOperation, UpdateSession
from sojourn.errors import HostUnfit, IntegrityError, StorageFull, Unreachable, Unsupported
from sojourn.model import Session, SessionState
from support import databases
from support.databases import flaws, insert_session


def make_session(name: str, **fields: Any) -> Session:
    return databases.make_session(**({"name": name, "idle_deadline": 100.0} | fields))


def run(path: Path, scenario: Callable[[Database], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        db = await open_database(path)
        try:
            return await scenario(db)
        finally:
            await db.close()

    return asyncio.run(whole())


async def opened(db: Database) -> None:
    """A scenario that only opens and closes."""


# -- full ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def small(disk: Path) -> Iterator[Path]:
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small(tmp_path / "disk") as disk:
        yield disk


def take_all_room(disk: Path) -> Path:
    ballast = disk / "ballast"
    descriptor = os.open(ballast, os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(descriptor, b"x" * 4096)
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(descriptor)
    return ballast


@pytest.mark.privileged
def test_a_full_disk_refuses_changes_and_keeps_what_was_acknowledged(small_disk: Path) -> None:
    path = small_disk / "sojourn.db"
    held = small_disk / "held"  # what is left of a full disk by chance may not be room for one page
    held.write_bytes(b"x" * (256 << 10))

    async def fill(db: Database) -> tuple[str, int]:
        session = await insert_session(db, make_session("box"))
        acknowledged = 0
        with pytest.raises(StorageFull) as full:
            for _ in range(10_000):
                await db.commit(
                    [
                        UpdateSession(
                            session.id, {SessionState.RUNNING}, session.epoch, {"cause": "x"}
                        ),
                        AppendEvent(session.id, "turn", details={"output": "y" * 5000}),
                    ]
                )
                acknowledged += 1
        assert full.value.next_step
        ballast = take_all_room(small_disk)
        # Many at once, and what needs no sync, are refused alike, and reads go on.
        refused = await asyncio.gather(
            *[insert_session(db, make_session(f"n{n}", env={"X": "z" * 9000})) for n in range(20)],
            db.append_event(AppendEvent(session.id, "turn", details={"output": "y" * 9000})),
            return_exceptions=True,
        )
        assert {type(error) for error in refused} == {StorageFull}
        assert (await db.get_session("ten_a", "box")).cause == "x"
        assert len(await db.list_events(session.id, limit=10_000)) == acknowledged
        page = await db.list_sessions("ten_a")
        assert [found.name for found in page.items] == ["box"]
        ballast.unlink()
        held.unlink()
        # With room again, the same database goes on.
        await db.append_event(AppendEvent(session.id, "turn"))
        return session.id, acknowledged + 1

    id, acknowledged = run(path, fill)

    async def read(db: Database) -> None:
        assert flaws(path) == []
        events = await db.list_events(id, limit=10_000)
        assert [event.sequence for event in events] == list(range(1, acknowledged + 1))

    run(path, read)


@pytest.mark.privileged
def test_a_database_is_not_half_made_on_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "sojourn.db"
    ballast = take_all_room(small_disk)
    with pytest.raises(StorageFull):
        run(path, opened)
    assert [entry.name for entry in small_disk.iterdir()] == ["ballast"]
    ballast.unlink()
    run(path, opened)


@pytest.mark.privileged
def test_touches_that_found_no_room_are_written_when_there_is_some(small_disk: Path) -> None:
    path = small_disk / "sojourn.db"

    async def scenario(db: Database) -> str:
        session = await insert_session(db, make_session("box"))
        room = small_disk / "room"
        room.write_bytes(b"x" * (256 << 10))
        padding = "y" * 4000
        with pytest.raises(StorageFull):
            for _ in range(10_000):
                await db.append_event(AppendEvent(session.id, "turn", details={"o": padding}))
        take_all_room(small_disk)
        db.touch_idle(session.id, 500.0)
        assert (await db.get_session(None, "box")).idle_deadline == 500.0
        room.unlink()
        return session.id

    run(path, scenario)

    async def read(db: Database) -> float | None:
        return (await db.get_session(None, "box")).idle_deadline

    assert run(path, read) == 500.0


@pytest.mark.privileged
def test_on_a_full_disk_sessions_can_still_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "SIZE", 256 << 10)
    monkeypatch.setattr(reserve, "RETRY_SECONDS", 0.0)

    async def scenario(db: Database) -> None:
        disk = tmp_path / "disk"
        session = await insert_session(db, make_session("box"))
        kept = disk / "sojourn.db.reserve"
        assert kept.stat().st_size == 256 << 10
        ballast = take_all_room(disk)
        with pytest.raises(StorageFull):
            for n in range(1000):
                await insert_session(db, make_session(f"n{n}", env={"X": "z" * 9000}))
        assert kept.exists(), "what needs new space must not use the reserve"
        hanging, _ = await db.begin(
            tenant="ten_a",
            session=session.id,
            verb="delete",
            request={},
            server="s",
            supersede=True,
        )
        await db.set_step(hanging.id, "stop")
        await db.commit(
            [
                UpdateSession(
                    session.id, {SessionState.RUNNING}, 1, {"state": SessionState.DELETED}
                ),
                FinishOperation(hanging.id),
            ]
        )
        assert not kept.exists()
        ballast.unlink()
        await insert_session(db, make_session("box"))
        await insert_session(db, make_session("written after the reserve was renewed"))
        assert kept.stat().st_blocks * 512 >= 256 << 10

    with small(tmp_path / "disk") as disk:
        run(disk / "sojourn.db", scenario)


# -- damaged ------------------------------------------------------------------------------------


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A closed database with some content in one file."""
    path = tmp_path / "sojourn.db"

    async def fill(db: Database) -> None:
        for n in range(20):
            session = await insert_session(db, make_session(f"n{n}", env={"X": "x" * 2000}))
            await db.append_event(AppendEvent(session.id, "turn"))

    run(path, fill)
    assert not Path(f"{path}-wal").exists()
    return path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def lose_rows(path: Path) -> None:
    """Have the last leaf of a table say that it holds no rows: every statement still works."""
    pages = range(2, path.stat().st_size // 4096 + 1)
    data = path.read_bytes()
    leaf = max(page for page in pages if data[(page - 1) * 4096] == 13)
    overwrite(path, (leaf - 1) * 4096 + 3, b"\0\0")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lose_rows, id="rows lost"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"not a database\n" * 1000), id="other file"),
        pytest.param(lambda path: overwrite(path, 0, os.urandom(100)), id="header"),
        pytest.param(lambda path: overwrite(path, 4096, b"\xa5" * 4096 * 4), id="pages"),
        pytest.param(lambda path: os.truncate(path, path.stat().st_size // 2), id="cut"),
        pytest.param(lambda path: os.truncate(path, path.stat().st_size - 4096), id="last page"),
    ],
)
def test_a_damaged_file_is_refused_with_a_way_on_and_left_alone(
    sound: Path, damage: Callable[[Path], object]
) -> None:
    damage(sound)
    before = sound.read_bytes()
    with pytest.raises(IntegrityError) as refused:
        run(sound, opened)
    assert refused.value.details["object"] == "database"
    assert str(sound) in refused.value.message
    assert "backup" in refused.value.next_step
    assert sound.read_bytes() == before


def test_damage_that_appears_while_it_is_open_is_reported_not_served(sound: Path) -> None:
    async def scenario(db: Database) -> None:
        size = sound.stat().st_size
        overwrite(sound, 4096, b"\xa5" * (size - 4096))
        with pytest.raises(IntegrityError):
            for n in range(20):
                await db.get_session("ten_a", f"n{n}")
        with pytest.raises(IntegrityError):
            await db.list_sessions("ten_a")

    run(sound, scenario)


def test_a_log_cut_short_loses_only_what_it_no_longer_holds(tmp_path: Path) -> None:
    path = tmp_path / "sojourn.db"

    async def fill(db: Database) -> None:
        session = await insert_session(db, make_session("box"))
        for _ in range(50):
            await db.append_event(AppendEvent(session.id, "turn"))
        # As a power cut would leave it: the log with a torn end, nothing merged.
        for name in (path, Path(f"{path}-wal")):
            shutil.copy(name, tmp_path / f"copy{name.name.removeprefix(path.name)}")

    run(path, fill)
    log = tmp_path / "copy-wal"
    os.truncate(log, log.stat().st_size - 1000)

    async def read(db: Database) -> None:
        assert flaws(tmp_path / "copy") == []
        session = await db.get_session("ten_a", "box")
        events = await db.list_events(session.id)
        assert 40 <= len(events) < 50
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))

    run(tmp_path / "copy", read)


# -- versions -----------------------------------------------------------------------------------


def test_a_database_newer_than_the_code_is_refused_and_left_alone(sound: Path) -> None:
    connection = sqlite3.connect(sound)
    connection.execute("INSERT INTO migrations VALUES (999, 'from_the_future', 0)")
    connection.commit()
    connection.close()
    before = sound.read_bytes()
    with pytest.raises(HostUnfit, match="999") as refused:
        run(sound, opened)
    assert "newer version" in refused.value.next_step
    assert sound.read_bytes() == before


def test_migrations_are_applied_in_order_and_once(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.migrations()
    more = [
        (len(known) + 1, "add_notes", "CREATE TABLE notes (text TEXT);\n"),
        (len(known) + 2, "fill_notes", "INSERT INTO notes VALUES ('a;b');\n-- done\n"),
    ]
    monkeypatch.setattr(migrate, "migrations", lambda: known + more)
    run(sound, opened)
    run(sound, opened)
    connection = sqlite3.connect(sound)
    assert connection.execute("SELECT text FROM notes").fetchall() == [("a;b",)]
    names = [row[0] for row in connection.execute("SELECT name FROM migrations ORDER BY number")]
    connection.close()
    assert names == [name for _, name, _ in known + more]


def test_a_migration_that_fails_changes_nothing(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.migrations()
    broken = "CREATE TABLE notes (text TEXT);\nINSERT INTO no_such_table VALUES (1);\n"
    monkeypatch.setattr(migrate, "migrations", lambda: [*known, (len(known) + 1, "broken", broken)])
    with pytest.raises(Exception, match="no_such_table"):
        run(sound, opened)
    monkeypatch.undo()

    async def read(db: Database) -> None:
        assert flaws(sound) == []
        assert len((await db.list_sessions("ten_a")).items) == 20

    run(sound, read)
    connection = sqlite3.connect(sound)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert "notes" not in tables


# -- locked -------------------------------------------------------------------------------------


def test_a_lock_that_another_process_does_not_give_back_is_reported(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "BUSY_SECONDS", 0.05)

    async def scenario(db: Database) -> None:
        other = sqlite3.connect(sound, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            refused = await asyncio.gather(
                *[insert_session(db, make_session(f"new{n}")) for n in range(5)],
                return_exceptions=True,
            )
            assert {type(error) for error in refused} == {Unreachable}
            # Reads go on.
            assert (await db.get_session("ten_a", "n1")).name == "n1"
        finally:
            other.execute("ROLLBACK")
            other.close()
        await insert_session(db, make_session("new"))

    run(sound, scenario)


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HostUnfit):
        run(tmp_path / "file" / "sojourn.db", opened)
    with pytest.raises(HostUnfit):
        (tmp_path / "directory.db").mkdir()
        run(tmp_path / "directory.db", opened)
    with pytest.raises(Unsupported):
        asyncio.run(open_database("mysql://host/db"))
