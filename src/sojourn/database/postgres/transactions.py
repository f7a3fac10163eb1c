"""One transaction, done once, whatever becomes of the connection.

Guarantee: work is committed once, or not at all and raised as an error that says so. A connection
lost before the commit changed nothing, and the work is done anew. One lost while it was committing
leaves the outcome open: each transaction therefore inserts a mark of its own, and the next
connection inserts the same mark. Either it is there (committed), or the insertion succeeds and the
lost transaction can never commit, however late the server gets to it; while the server is at it,
the insertion waits. When the database does not come back in time, OutcomeUnknown is raised.

Isolation is READ COMMITTED with the rows of the sessions a transaction names locked first, in one
order: what a session's transition depends on hangs on its row, so transitions of one session queue
up instead of failing and being repeated, as they would under SERIALIZABLE, and those of different
sessions never meet. What no row lock can guard (a name or a key that two would take) a unique
index decides, and what is removed while it is being referred to a foreign key; the one that loses
is begun anew, reads what the other committed, and is refused by its proper name.

A transaction in the name of a node's incarnation locks the row of the node's fence, with others of
the node, in its first statement: whoever fences the node changes that row, so waits for those that
are under way, and later ones find another incarnation there and change nothing.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg

from sojourn.database.engine import Duplicate, Statements, Touched
from sojourn.database.fences import fenced
from sojourn.database.postgres.connections import Connection, Connections
from sojourn.database.postgres.failures import away, is_lost, is_passing, translate, unknown
from sojourn.database.postgres.statements import PostgresStatements, text_of
from sojourn.errors import Conflict, SojournError
from sojourn.model.nodes import Fence

log = logging.getLogger(__name__)

LONGEST = 90.0  # seconds a transaction may take; each of its statements has a limit of its own
_ATTEMPTS = 8  # of a transaction that meets others
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)
MARKS_KEPT = 3600.0  # seconds, far more than any open question takes


class Lost(Exception):
    """The connection went while it was committing."""


class Task(msgspec.Struct, frozen=True):
    """What to do in a transaction. `level` is PostgreSQL's synchronous_commit."""

    work: Callable[[Statements], Any]
    touches: Touched
    level: str
    fence: Fence | None = None


def new_mark() -> str:
    """A mark that sorts by time."""
    return f"{time.time_ns():020d}-{secrets.token_hex(8)}"


def marks_before(seconds: float) -> str:
    """What all marks older than that sort before."""
    return f"{time.time_ns() - int(seconds * 1e9):020d}"


class Transactions:
    """Runs tasks, each in the thread it is called in."""

    def __init__(
        self, connections: Connections, closing: threading.Event, longest: float | None = None
    ) -> None:
        self._connections = connections
        self._closing = closing
        self._longest = LONGEST if longest is None else longest
        self._shown = connections.place.shown
        self._patience = connections.place.patience

    def run(self, task: Task) -> Any:
        """The work's result, committed. Raises what the work raises, and SojournErrors."""
        given_up = time.monotonic() + self._patience
        losses = meetings = 0
        while True:
            mark = new_mark()
            result: list[Any] = []
            connection: Connection | None = None
            try:
                connection = self._connections.get()
                with self._connections.watched(connection, self._longest):
                    _attempt(connection, task, mark, result)
                return result[0]
            except Lost as error:
                log.warning("the database went away while a change was committed: %s", error)
                self._connections.give_up()
                if self._committed(mark):
                    return result[0]
            except Duplicate as error:
                raise Conflict(f"the database refused the change: {error}") from None
            except psycopg.Error as error:
                if is_lost(error, connection):
                    self._connections.give_up()
                    losses = self._lost(error, losses, given_up)
                elif is_passing(error):
                    meetings = self._met(error, meetings)
                else:
                    raise translate(error, self._shown) from None

    def read(self, work: Callable[[Connection], Any], longest: float | None = None) -> Any:
        """The result of work that changes nothing, done anew where a connection was lost."""
        given_up = time.monotonic() + self._patience
        losses = 0
        while True:
            connection: Connection | None = None
            try:
                connection = self._connections.get()
                with self._connections.watched(connection, longest or self._longest):
                    return work(connection)
            except psycopg.Error as error:
                if not is_lost(error, connection):
                    raise translate(error, self._shown) from None
                self._connections.give_up()
                losses = self._lost(error, losses, given_up)

    def _lost(self, error: psycopg.Error, losses: int, given_up: float) -> int:
        """Wait before the next try, the first time not at all. Raises Unreachable at last."""
        if self._closing.is_set() or time.monotonic() >= given_up:
            raise away(self._shown, error) from None
        if losses:
            self._closing.wait(_PAUSES[min(losses - 1, len(_PAUSES) - 1)])
        return losses + 1

    def _met(self, error: psycopg.Error, meetings: int) -> int:
        if meetings + 1 >= _ATTEMPTS:
            raise translate(error, self._shown) from None
        if meetings:
            self._closing.wait(random.uniform(0, 0.01 * 2**meetings))
        return meetings + 1

    def _committed(self, mark: str) -> bool:
        """Whether the transaction of a mark is committed; where not, it never will be. Not cut
        short by closing: the answer is worth the wait."""
        given_up = time.monotonic() + self._patience
        pauses = iter(_PAUSES)
        while True:
            connection: Connection | None = None
            try:
                connection = self._connections.get()
                with self._connections.watched(connection, self._longest):
                    return not PostgresStatements(connection).run("settle_commit", {"commit": mark})
            except psycopg.Error as error:
                if connection is None or is_lost(error, connection):
                    self._connections.give_up()
                if time.monotonic() >= given_up:
                    raise unknown(self._shown) from None
            time.sleep(next(pauses, _PAUSES[-1]))


def _attempt(connection: Connection, task: Task, mark: str, result: list[Any]) -> None:
    """Begin, work and commit. `result` gets the work's, before the commit. Raises Lost when the
    connection went after the commit was sent."""
    statements = PostgresStatements(connection)
    connection.execute("BEGIN", prepare=False)
    try:
        parameters: dict[str, Any] = {
            "commit": mark,
            "level": task.level,
            "sessions": sorted(task.touches.sessions),
        }
        if task.fence is None:
            statements.run("open_transaction", parameters)
        else:
            parameters["node"] = task.fence.node
            parameters["incarnation"] = task.fence.incarnation
            ((counts, _),) = statements.run("open_fenced_transaction", parameters)
            if not counts:
                raise fenced(task.fence)
        if task.touches.snapshots:
            statements.run("lock_snapshots", {"snapshots": sorted(task.touches.snapshots)})
        result.append(task.work(statements))
    except BaseException:
        _roll_back(connection)
        raise
    try:
        done = connection.execute("COMMIT", prepare=False)
    except psycopg.Error as error:
        # Also where the server still said why: it may have committed before.
        if is_lost(error, connection) or connection.closed:
            raise Lost(str(error)) from None
        raise
    if done.statusmessage != "COMMIT":
        raise SojournError("a transaction was rolled back that should have been committed")


def _roll_back(connection: Connection) -> None:
    if not connection.closed:
        try:
            connection.execute("ROLLBACK", prepare=False)
        except psycopg.Error as error:
            # The server ends what its client cannot end; the connection is of no more use.
            log.info("a transaction was left to the database to end: %s", error)
            connection.close()


def forget_marks(connection: Connection) -> None:
    """Remove marks that nobody asks for any more."""
    text = text_of("forget_commits")
    connection.execute(text.text, {"before": marks_before(MARKS_KEPT)})
