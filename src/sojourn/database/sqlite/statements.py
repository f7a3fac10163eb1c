"""Named queries on a connection to SQLite.

Guarantee: whatever a query gives is fetched before the next one runs, so that no read stays open
across the end of its transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from sojourn.database.engine import Duplicate, Parameters
from sojourn.database.queries import Queries

# With the fractions of a second that `unixepoch` leaves out.
_CLOCK = "((julianday('now') - 2440587.5) * 86400.0)"
QUERIES = Queries("sojourn.database.sqlite", clock=_CLOCK)
_UNIQUE = "UNIQUE constraint failed: "


class SqliteStatements:
    """See `sojourn.database.engine.Statements`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(
        self, query: str, parameters: Parameters | None = None, *, assignments: str = ""
    ) -> list[Any]:
        text = QUERIES[query]
        if assignments:
            text = text.replace("{assignments}", assignments)
        try:
            return self._connection.execute(text, parameters or {}).fetchall()
        except sqlite3.IntegrityError as error:
            if str(error).startswith(_UNIQUE):
                raise Duplicate(str(error).rpartition(", ")[2].removeprefix(_UNIQUE)) from error
            raise

    def stream(self, query: str, parameters: Parameters | None = None) -> Iterable[Any]:
        return self._connection.execute(QUERIES[query], parameters or {})

    def count(self, query: str, parameters: Parameters) -> int:
        return self._connection.execute(QUERIES[query], parameters).rowcount

    def many(self, query: str, parameters: Sequence[Parameters]) -> None:
        self._connection.executemany(QUERIES[query], parameters)
