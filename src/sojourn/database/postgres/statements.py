"""Named queries on a connection to PostgreSQL.

Guarantee: a query runs as a prepared statement with its parameters apart from its text; one whose
conditions depend on whether a parameter is given is planned each time, since a plan for all cases
would use no index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg import errors as pg

from sojourn.database.engine import Duplicate, Parameters
from sojourn.database.postgres.connections import Connection
from sojourn.database.queries import Queries

# Of the beginning of the transaction: earlier than anything it waits for.
_CLOCK = "CAST(extract(epoch FROM now()) AS double precision)"
QUERIES = Queries("sojourn.database.postgres", clock=_CLOCK)

_PARAMETER = re.compile(r"(?<![:\w]):([a-z]\w*)")
_OPTIONAL = re.compile(r"IS NULL\s+OR\b|= '\{\}' OR")
_FREE = frozenset({"actor", "cause", "label", "result"})
"""Texts that may come from inside a session. PostgreSQL holds no NUL in a text: it is replaced
there, so that no session can keep its own state from being written."""

_KEYS = {
    "session_names": "sessions.name",
    "sessions_pkey": "sessions.id",
    "snapshots_pkey": "snapshots.id",
    "tenants_pkey": "tenants.id",
    "tenants_name_key": "tenants.name",
    "nodes_pkey": "nodes.id",
    "node_names": "nodes.name",
}
"""Constraints whose violation says what the caller did; those of others say that another one was
first, and the transaction is begun again."""


class Text:
    """A query as psycopg takes it."""

    __slots__ = ("prepare", "text")

    def __init__(self, text: str) -> None:
        self.text = _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))
        self.prepare = _OPTIONAL.search(text) is None


_TEXTS = {name: Text(QUERIES[name]) for name in QUERIES.names()}
_CHANGES: dict[tuple[str, str], Text] = {}


def text_of(query: str, assignments: str = "") -> Text:
    """The text of a named query; those with assignments are few and remembered."""
    if not assignments:
        return _TEXTS[query]
    known = _CHANGES.get((query, assignments))
    if known is None:
        known = Text(QUERIES[query].replace("{assignments}", assignments))
        _CHANGES[(query, assignments)] = known
    return known


def _clean(parameters: Parameters) -> Parameters:
    for name in _FREE & parameters.keys():
        value = parameters[name]
        if isinstance(value, str) and "\0" in value:
            parameters = {**parameters, name: value.replace("\0", "\N{REPLACEMENT CHARACTER}")}
    return parameters


class PostgresStatements:
    """See `sojourn.database.engine.Statements`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _execute(
        self, query: str, parameters: Parameters | None, assignments: str = ""
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        text = text_of(query, assignments)
        try:
            return self._connection.execute(
                text.text, _clean(parameters or {}), prepare=text.prepare
            )
        except pg.UniqueViolation as error:
            column = _KEYS.get(error.diag.constraint_name or "")
            if column is None:
                raise
            raise Duplicate(column) from error

    def run(
        self, query: str, parameters: Parameters | None = None, *, assignments: str = ""
    ) -> list[Any]:
        cursor = self._execute(query, parameters, assignments)
        return cursor.fetchall() if cursor.description is not None else []

    def stream(self, query: str, parameters: Parameters | None = None) -> Iterable[Any]:
        # In portions, so that neither side holds all of it.
        with self._connection.cursor(f"stream_{query}") as cursor:
            cursor.itersize = 5000
            cursor.execute(text_of(query).text, parameters)
            yield from cursor

    def count(self, query: str, parameters: Parameters) -> int:
        return self._execute(query, parameters).rowcount

    def many(self, query: str, parameters: Sequence[Parameters]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(text_of(query).text, parameters)
