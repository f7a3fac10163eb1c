"""What PostgreSQL's errors mean for a caller.

Guarantee: no psycopg error leaves the package; what may pass by itself (the server is away or
starting), what was lost while it was committed, and what needs a person are told apart, because
each wants another cure. Details of the server are left out: they quote rows, which hold secrets.
"""

from __future__ import annotations

import psycopg
from psycopg import errors as pg

from sojourn.errors import (
    Conflict,
    HostUnfit,
    IntegrityError,
    InvalidRequest,
    OutcomeUnknown,
    SojournError,
    StorageFull,
    Unreachable,
)

_AWAY = {
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
    "57P05",  # idle_session_timeout
    "25P03",  # idle_in_transaction_session_timeout
    "25006",  # read_only_sql_transaction: it became a standby
    "53300",  # too_many_connections
}
_AGAIN = {
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "23505",  # unique_violation: another was first; read again, it is refused by name
    "23503",  # foreign_key_violation: likewise
}
_PASSING = (
    "starting up",
    "shutting down",
    "recovery",
    "too many clients",
    "connection slots",
    "read-only",
)
"""In the message of a refused connection, which carries no code."""


def is_lost(error: BaseException, connection: psycopg.Connection[object] | None) -> bool:
    """Whether the connection is gone with it (or cannot be had now), so that another may do."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    if error.sqlstate is not None:
        return error.sqlstate in _AWAY or error.sqlstate.startswith("08")
    if connection is not None:
        return connection.closed or connection.broken
    text = str(error)
    return "FATAL" not in text or any(word in text for word in _PASSING)


def is_passing(error: psycopg.Error) -> bool:
    """Whether the same transaction, begun again, meets something else."""
    return error.sqlstate in _AGAIN


def _cause(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error)
    return " ".join(text.split())


def away(place: str, error: BaseException) -> Unreachable:
    """The error for a server that did not come back in time. Nothing was changed."""
    cause = _cause(error) if isinstance(error, psycopg.Error) else str(error)
    return Unreachable(
        f"the database {place} does not answer: {cause}",
        next_step="Start it, or find out why it cannot be reached; nothing was changed.",
        database=place,
    )


def unknown(place: str) -> OutcomeUnknown:
    """The error for a change that was committing when the server went, and did not come back."""
    return OutcomeUnknown(
        f"the database {place} went away while a change was committed",
        database=place,
    )


def closed(place: str) -> Unreachable:
    """The error for a call after `close`."""
    return Unreachable(
        f"the database {place} is closed", next_step="The server is stopping; try again later."
    )


def translate(error: psycopg.Error, place: str) -> SojournError:
    """The typed error for one of PostgreSQL's that is not passing."""
    state = error.sqlstate or ""
    cause = _cause(error)
    if state == "53100":
        return StorageFull(f"no room for the database {place}: {cause}", database=place)
    if state.startswith("XX00") and state != "XX000":
        return IntegrityError(
            f"the database {place} is damaged: {cause}",
            next_step="Stop the server and put back a backup of it. Snapshots are whole.",
            object="database",
        )
    if isinstance(error, pg.QueryCanceled | pg.LockNotAvailable):
        return Unreachable(
            f"the database {place} took too long: {cause}",
            next_step="Find out what holds it up (pg_stat_activity); nothing was changed.",
            database=place,
        )
    if state.startswith(("28", "3D", "42501")) or (not state and "FATAL" in str(error)):
        return HostUnfit(
            f"the database {place} refuses: {cause}",
            next_step="Check the URL's user, password and database, and the rights it has there.",
        )
    if state.startswith("23"):
        return Conflict(f"the database refused the change: {cause}")
    if state.startswith("22") or isinstance(error, psycopg.DataError):
        return InvalidRequest(f"the database cannot hold this: {cause}")
    if isinstance(error, psycopg.OperationalError):
        return away(place, error)
    return SojournError(f"the database {place} failed: {cause} ({state or type(error).__name__})")
