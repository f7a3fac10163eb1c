"""Opening a database file at the schema the code knows.

Guarantee: a file is either created whole, brought forward migration by migration, each inside a
transaction that also records it, or refused: when it is newer than the code, is empty though it
exists, or is damaged. A new file gets its name only once its schema is safely inside, so an empty
file under the name always means damage, never a fresh start that would hide lost sessions.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from sojourn.database.migrations import numbered
from sojourn.database.sqlite.failures import damaged
from sojourn.errors import HostUnfit

BUSY_SECONDS = 5.0
_CHECK_LIMIT = 256 << 20  # files up to this size are checked at each opening


def migrations() -> list[tuple[int, str, str]]:
    """All known ones in order: number, name, text. They are numbered from 1 without a gap."""
    return numbered("sojourn.database.sqlite")


def connect(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """A connection with the project's settings, in autocommit mode. It may be used from any
    thread, by one at a time."""
    connection = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA trusted_schema = OFF")
        if readonly:
            connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def open_file(path: Path) -> sqlite3.Connection:
    """The writing connection to the file, created or brought forward as needed."""
    if not path.exists():
        _create(path)
    _sweep_drafts(path)
    if path.stat().st_size == 0:
        raise damaged(path, "the file is empty")
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        if path.stat().st_size <= _CHECK_LIMIT:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise damaged(path, " ".join(verdict.split()))
        migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.time_ns()}")
    try:
        # Only the owner may read it: it holds environments of sessions.
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = connect(draft)
        try:
            migrate(connection, draft)
            # WAL is a property of the file; leaving it with one connection merges the log.
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        # Another process that created it meanwhile keeps what it has.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        for leftover in (
            draft,
            Path(f"{draft}-wal"),
            Path(f"{draft}-shm"),
            Path(f"{draft}-journal"),
        ):
            leftover.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sweep_drafts(path: Path) -> None:
    """Remove what a process left that was killed while it made the file."""
    for draft in path.parent.glob(f".{path.name}.*"):
        owner = draft.name.removeprefix(f".{path.name}.").partition(".")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            draft.unlink(missing_ok=True)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Apply what is missing. Of several processes one does it, the others find it done."""
    known = migrations()
    present = _version(connection)
    _refuse_newer(present, known[-1][0], path)
    for number, name, text in known[present:]:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(connection) < number:
                for statement in _statements(text):
                    connection.execute(statement)
                connection.execute(
                    "INSERT INTO migrations (number, name, applied_at) VALUES (?, ?, ?)",
                    (number, name, time.time()),
                )
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    _refuse_newer(_version(connection), known[-1][0], path)


def _version(connection: sqlite3.Connection) -> int:
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(number INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL)"
    )
    return int(connection.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()[0])


def _refuse_newer(present: int, known: int, path: Path) -> None:
    if present > known:
        raise HostUnfit(
            f"the database {path} is at schema {present}, this version of Sojourn knows {known}",
            next_step="Install the newer version of Sojourn again, or use another data directory.",
            present=present,
            known=known,
        )


def _statements(text: str) -> Iterator[str]:
    """The statements of a script; `executescript` would commit the open transaction."""
    statement = ""
    for line in text.splitlines(keepends=True):
        if not statement and line.lstrip().startswith("--"):
            continue
        statement += line
        if sqlite3.complete_statement(statement):
            if statement.strip():
                yield statement
            statement = ""
    if statement.strip():
        raise ValueError(f"a migration ends in the middle of a statement: {statement[:80]!r}")
