"""What an engine gives: statements in a transaction, a writer of jobs, and reads beside it.

Guarantee: everything that decides (`apply`, `begin`, `sql_database`) is written once, against these
interfaces, so that all engines decide alike; an engine adds how its transactions are kept apart,
made durable and repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from sojourn.database import writes
from sojourn.database.fences import Fences
from sojourn.errors import SojournError
from sojourn.model.nodes import Fence

T = TypeVar("T")
Parameters = Mapping[str, Any]


class Duplicate(Exception):
    """A unique column would hold a value twice. `column` is `table.column`, of several the last."""

    def __init__(self, column: str) -> None:
        super().__init__(f"{column} would hold a value twice")
        self.column = column


class Statements(Protocol):
    """Named queries, run inside the open transaction of whoever holds it."""

    def run(
        self, query: str, parameters: Parameters | None = None, *, assignments: str = ""
    ) -> list[Any]:
        """All rows it gives. `assignments` takes the place of that name in its text. Raises
        Duplicate; the transaction is of no more use then."""

    def stream(self, query: str, parameters: Parameters | None = None) -> Iterable[Any]:
        """The rows of a query that may give very many, one after the other."""

    def count(self, query: str, parameters: Parameters) -> int:
        """How many rows it changed."""

    def many(self, query: str, parameters: Sequence[Parameters]) -> None:
        """Run it once for each, in order."""


class Touched(msgspec.Struct, frozen=True):
    """What a job changes, by id, so that an engine with several writers can keep those of one
    thing in order. Rows that are made by the job itself need not be named."""

    sessions: frozenset[str] = frozenset()
    snapshots: frozenset[str] = frozenset()
    operations: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()

    def names(self) -> Iterator[str]:
        """All, as names that are different for different things."""
        yield from self.sessions
        yield from self.snapshots
        yield from self.operations
        for key in self.keys:
            yield f"key {key}"


NOTHING = Touched()


def touched(
    items: Iterable[writes.Write], *, sessions: Iterable[str] = (), keys: Iterable[str] = ()
) -> Touched:
    """What some writes change, and what is given besides."""
    named: dict[str, set[str]] = {
        "sessions": set(sessions),
        "snapshots": set(),
        "operations": set(),
    }
    for item in items:
        match item:
            case writes.InsertSession():
                named["sessions"].add(item.session.id)
            case writes.UpdateSession():
                named["sessions"].add(item.id)
            case writes.InsertSnapshot():
                named["sessions"].add(item.snapshot.session)
            case writes.UpdateSnapshot() | writes.DeleteSnapshot():
                named["snapshots"].add(item.id)
            case writes.SetStep() | writes.FinishOperation():
                named["operations"].add(item.operation)
            case writes.PutEffect():
                named["sessions"].add(item.effect.session)
            case writes.AppendEvent() | writes.LinkEvent() | writes.SettleEffects():
                named["sessions"].add(item.session)
    return Touched(keys=frozenset(keys), **{kind: frozenset(ids) for kind, ids in named.items()})


class Writer(Protocol):
    """Runs jobs, each in a transaction."""

    fences: Fences

    def submit(
        self,
        work: Callable[[Statements], T],
        *,
        durable: bool,
        touches: Touched = NOTHING,
        urgent: bool = False,
        fence: Fence | msgspec.UnsetType | None = msgspec.UNSET,
        apart: bool = False,
        then: Callable[[T], None] | None = None,
    ) -> asyncio.Future[T]:
        """Queue a job; of those that touch the same the earlier one comes first. `then` is called
        on the loop with the result once it is committed, even when the one who waited for the
        future is gone. The job runs even if that is cancelled, and may be run several times until
        one run is committed. An `urgent` one may use what is kept back for a full disk. It is done
        in the name of the writer's `fences`, or of the given fence; None: in nobody's. One that is
        done `apart` waits for no other and fails soon where the database does not answer."""

    async def close(self) -> None:
        """Finish what is queued and let go. Idempotent."""


class Reader(Protocol):
    """Reads, each of one instant."""

    async def lookup(self, query: str, parameters: Parameters) -> list[Any]:
        """Rows of a named query that finds at most a few by key."""

    async def select(self, query: str, parameters: Parameters) -> list[Any]:
        """Rows of a named query."""

    async def call(self, work: Callable[[Statements], T]) -> T:
        """Run some reading work in one transaction."""

    async def close(self) -> None:
        """Finish what is queued and let go. Idempotent."""


class Signals(Protocol):
    """What processes that have the same database open tell each other."""

    def announce(self, sessions: Collection[str]) -> None:
        """Tell others that the logs of these sessions have grown. A hint: it may be lost."""

    def listen(self, heard: Callable[[Collection[str] | None], None]) -> None:
        """From now on call `heard` on the loop with what others tell; None: with anything that may
        have been missed."""

    def tell_node(self, node: str, session: str) -> None:
        """See `Database.tell_node`."""

    def hear_node(self, node: str, heard: Callable[[str | None], None]) -> None:
        """See `Database.hear_node`."""

    async def own(self) -> None:
        """See `Database.own`."""

    async def close(self) -> None:
        """Idempotent."""


class Engine(msgspec.Struct, frozen=True):
    """One open database's parts. `closed` makes the error for a call after the end. Without
    `signals` the database is its server's own, by where it lies."""

    writer: Writer
    reader: Reader
    closed: Callable[[], SojournError]
    signals: Signals | None = None
