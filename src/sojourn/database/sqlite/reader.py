"""Reading beside the writer.

Guarantee: a read sees everything acknowledged before it began and never waits for the writer
(WAL). Reads of single rows by key run where they are called: they take some microseconds, less
than handing them to a thread would cost the event loop. Reads whose length depends on the data run
in a thread of their own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sojourn.database.engine import Parameters, Statements
from sojourn.database.sqlite.failures import closed, translate
from sojourn.database.sqlite.migrate import connect
from sojourn.database.sqlite.statements import SqliteStatements

T = TypeVar("T")


class SqliteReader:
    """Two read-only connections: one for the loop, one for the thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._near = connect(path, readonly=True)
        try:
            self._far = connect(path, readonly=True)
        except BaseException:
            self._near.close()
            raise
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "sojourn-database-reader")
        self._closed = False

    async def lookup(self, query: str, parameters: Parameters) -> list[Any]:
        """Rows of a named query that finds at most a few by key; blocks for microseconds."""
        if self._closed:
            raise closed(self._path)
        try:
            return SqliteStatements(self._near).run(query, parameters)
        except sqlite3.Error as error:
            raise translate(error, self._path) from error

    async def select(self, query: str, parameters: Parameters) -> list[Any]:
        """Rows of a named query, read in the thread."""
        return await self.call(lambda statements: statements.run(query, parameters))

    async def call(self, work: Callable[[Statements], T]) -> T:
        """Run some reading work in the thread, in one transaction."""
        if self._closed:
            raise closed(self._path)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guard, work)

    def _guard(self, work: Callable[[Statements], T]) -> T:
        try:
            self._far.execute("BEGIN")
            try:
                return work(SqliteStatements(self._far))
            finally:
                self._far.execute("COMMIT")
        except sqlite3.Error as error:
            raise translate(error, self._path) from error

    async def close(self) -> None:
        """Finish what is queued and close. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown)
        self._near.close()
        self._far.close()
