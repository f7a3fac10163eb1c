"""Opening a database at the schema the code knows.

Guarantee: an empty database is brought to it migration by migration, each in a transaction that
also records it; of several processes one does it while the others wait. A database that is newer
than the code, or holds something else under our names, is refused and left as it is.
"""

from __future__ import annotations

import time

import psycopg
from psycopg import errors as pg

from sojourn.database.migrations import numbered
from sojourn.database.postgres.connections import Connection
from sojourn.errors import HostUnfit

_OLDEST = 130_000  # the first version with all that the queries use
_LOCK = 0x736F6A6F75726E00  # one of our own among the advisory locks of the database
_FOREIGN = (pg.DuplicateTable, pg.DuplicateObject, pg.DuplicateFunction, pg.UndefinedColumn)


def migrations() -> list[tuple[int, str, str]]:
    """All known ones in order: number, name, text. They are numbered from 1 without a gap."""
    return numbered("sojourn.database.postgres")


def migrate(connection: Connection, place: str) -> None:
    """Apply what is missing. Raises HostUnfit."""
    _check_server(connection, place)
    known = migrations()
    while True:
        present = _version(connection)
        if present >= len(known):
            break
        _next(connection, known, place)
    if present > len(known):
        raise HostUnfit(
            f"the database {place} is at schema {present}, this version of Sojourn knows"
            f" {len(known)}",
            next_step="Install the newer version of Sojourn again, or use another database.",
            present=present,
            known=len(known),
        )


def _next(connection: Connection, known: list[tuple[int, str, str]], place: str) -> None:
    """The next missing one, unless another process was first."""
    try:
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = 0")
            connection.execute("SET LOCAL statement_timeout = 0")
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            connection.execute(
                "CREATE TABLE IF NOT EXISTS migrations (number integer PRIMARY KEY,"
                " name text NOT NULL, applied_at double precision NOT NULL)"
            )
            present = _version(connection)
            if present >= len(known):
                return
            number, name, text = known[present]
            connection.execute(text.encode(), prepare=False)  # many statements
            connection.execute(
                "INSERT INTO migrations (number, name, applied_at) VALUES (%s, %s, %s)",
                (number, name, time.time()),
            )
    except (
        pg.DuplicateTable,
        pg.DuplicateObject,
        pg.DuplicateFunction,
        pg.UndefinedColumn,
    ) as error:
        raise HostUnfit(
            f"the database {place} holds tables that are not Sojourn's:"
            f" {error.diag.message_primary}",
            next_step="Give it an empty database, or a schema of its own (search_path).",
        ) from None


def _version(connection: Connection) -> int:
    found = connection.execute("SELECT to_regclass('migrations') IS NOT NULL").fetchone()
    if found is None or not found[0]:
        return 0
    row = connection.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()
    return int(row[0]) if row else 0


def _check_server(connection: psycopg.Connection[tuple[object, ...]], place: str) -> None:
    if connection.info.server_version < _OLDEST:
        raise HostUnfit(
            f"the database {place} is served by PostgreSQL {connection.info.server_version}",
            next_step=f"Use PostgreSQL {_OLDEST // 10_000} or newer.",
        )
    row = connection.execute("SHOW server_encoding").fetchone()
    if row is None or row[0] != "UTF8":
        raise HostUnfit(
            f"the database {place} holds text as {row[0] if row else 'unknown'}",
            next_step="Make it anew: CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0.",
        )
