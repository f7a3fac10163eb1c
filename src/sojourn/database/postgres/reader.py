"""Reading beside the writers.

Guarantee: a read sees everything acknowledged before it began and waits for no writer. Reads run in
threads of their own, so that writers that wait for a lock hold up no reader; one whose connection
was lost is done again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sojourn.database.engine import Parameters, Statements
from sojourn.database.postgres.connections import Connection, Connections
from sojourn.database.postgres.failures import closed
from sojourn.database.postgres.place import Place
from sojourn.database.postgres.statements import PostgresStatements
from sojourn.database.postgres.transactions import Transactions

T = TypeVar("T")

THREADS = 4
_WHOLE_SECONDS = 600  # for work that reads a whole table, portion by portion


class PostgresReader:
    """See `sojourn.database.engine.Reader`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._connections = Connections(place)
        self._stopped = threading.Event()
        self._transactions = Transactions(self._connections, self._stopped)
        self._threads = ThreadPoolExecutor(THREADS, "sojourn-database-reader")
        self._closed = False

    async def lookup(self, query: str, parameters: Parameters) -> list[Any]:
        if any(isinstance(value, str) and not _storable(value) for value in parameters.values()):
            return []  # no text in the database is equal to it
        return await self.select(query, parameters)

    async def select(self, query: str, parameters: Parameters) -> list[Any]:
        # One statement is of one instant by itself.
        rows: list[Any] = await self.run(
            lambda connection: PostgresStatements(connection).run(query, parameters)
        )
        return rows

    async def call(self, work: Callable[[Statements], T]) -> T:
        def whole(connection: Connection) -> T:
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                connection.execute(f"SET LOCAL statement_timeout = '{_WHOLE_SECONDS}s'")
                return work(PostgresStatements(connection))

        found: T = await self.run(whole, 2 * _WHOLE_SECONDS)
        return found

    async def run(self, work: Callable[[Connection], Any], longest: float | None = None) -> Any:
        """Run something that changes nothing, in a thread, on its connection."""
        if self._closed:
            raise closed(self._place.shown)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._transactions.read, work, longest)

    async def close(self) -> None:
        """Finish what is queued and let go. Idempotent."""
        self._closed = True
        self._stopped.set()
        await asyncio.to_thread(self._threads.shutdown)
        self._connections.close()


def _storable(text: str) -> bool:
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
