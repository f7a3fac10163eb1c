"""The single writer: one thread, one connection, jobs in order.

Guarantee: a job's future is resolved only after the transaction it ran in is committed, and a job
that raises changes nothing. Jobs that wait at the same time share one transaction (each inside a
savepoint) and so one sync; when such a shared transaction cannot be committed, each job is run
again on its own, so that no job fails for another's sake. A durable commit is synced before it is
acknowledged; one that is not is handed to the kernel, which keeps it when the process is killed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sojourn.database.engine import NOTHING, Duplicate, Statements, Touched
from sojourn.database.fences import Fences, fenced
from sojourn.database.sqlite.failures import busy, closed, translate
from sojourn.database.sqlite.migrate import open_file
from sojourn.database.sqlite.reserve import Reserve
from sojourn.database.sqlite.statements import SqliteStatements
from sojourn.errors import Conflict, NodeFenced, SojournError, StorageFull
from sojourn.model.nodes import Fence

_log = logging.getLogger(__name__)
_BATCH = 64

Work = Callable[[Statements], Any]
_Outcome = tuple[Any, BaseException | None]


class _Job:
    __slots__ = ("durable", "fence", "future", "then", "urgent", "work")

    def __init__(
        self,
        work: Work,
        durable: bool,
        urgent: bool,
        fence: Fence | None,
        future: asyncio.Future[Any],
        then: Callable[[Any], None] | None,
    ) -> None:
        self.work = work
        self.durable = durable
        self.urgent = urgent
        self.fence = fence
        self.future = future
        self.then = then


class SqliteWriter:
    """Takes jobs from one event loop."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.fences = Fences()
        self._path = path
        self._loop = loop
        self._connection = open_file(path)
        try:
            self._reserve = Reserve(path)
        except OSError:
            self._connection.close()
            raise
        self._synchronous = True
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sojourn-database", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Work,
        *,
        durable: bool,
        touches: Touched = NOTHING,
        urgent: bool = False,
        fence: Fence | msgspec.UnsetType | None = msgspec.UNSET,
        apart: bool = False,
        then: Callable[[Any], None] | None = None,
    ) -> asyncio.Future[Any]:
        """See `sojourn.database.engine.Writer`. All are in order here, whatever they touch."""
        future: asyncio.Future[Any] = self._loop.create_future()
        name = self.fences.current if fence is msgspec.UNSET else fence
        refusal: SojournError | None
        refusal = closed(self._path) if self._closing else self.fences.refusal(name)
        if refusal is not None:
            future.set_exception(refusal)
        else:
            self._jobs.put(_Job(work, durable, urgent, name, future, then))
        return future

    async def close(self) -> None:
        """Finish what is queued and close the file. Idempotent."""
        if not self._closing:
            self._closing = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- in the thread ----------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while True:
                batch, last = self._take()
                if batch:
                    self._report(self._perform(batch))
                    self._renew_reserve()
                if last:
                    return
        finally:
            self._connection.close()

    def _take(self) -> tuple[list[_Job], bool]:
        """All that waits, at least one; and whether it is the end."""
        batch: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == _BATCH or self._jobs.empty():
                return batch, False
            job = self._jobs.get()
        return batch, True

    def _perform(self, batch: list[_Job]) -> list[tuple[_Job, _Outcome]]:
        outcomes = self._transaction(batch)
        if outcomes is None:
            outcomes = []
            for job in batch:
                outcomes.extend(self._transaction([job]) or [])
        for index, (job, (_, error)) in enumerate(outcomes):
            if job.urgent and isinstance(error, StorageFull):
                self._reserve.release()
                outcomes[index : index + 1] = self._transaction([job]) or []
        return outcomes

    def _transaction(self, batch: list[_Job]) -> list[tuple[_Job, _Outcome]] | None:
        """Run jobs in one transaction; None when it was lost and there are several to retry."""
        connection = self._connection
        outcomes: list[tuple[_Job, _Outcome]] = []
        try:
            self._set_synchronous(any(job.durable for job in batch))
            connection.execute("BEGIN IMMEDIATE")
            for job in batch:
                outcome = self._run_job(job)
                if not connection.in_transaction:
                    # SQLite gave up the whole transaction, with all jobs before this one.
                    if len(batch) > 1:
                        return None
                    return [(job, outcome)]
                outcomes.append((job, outcome))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            if len(batch) > 1 and not busy(error):
                return None
            return [(job, (None, translate(error, self._path))) for job in batch]
        except Exception as error:  # noqa: BLE001 - the thread must live and every caller be told
            self._roll_back()
            _log.exception("writing to %s failed", self._path)
            return [(job, (None, error)) for job in batch]
        return outcomes

    def _run_job(self, job: _Job) -> _Outcome:
        connection = self._connection
        connection.execute("SAVEPOINT job")
        statements = SqliteStatements(connection)
        try:
            if job.fence is not None and not statements.run(
                "check_fence", {"node": job.fence.node, "incarnation": job.fence.incarnation}
            ):
                raise fenced(job.fence)
            result = job.work(statements)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the job's caller
            if connection.in_transaction:
                connection.execute("ROLLBACK TO job")
                connection.execute("RELEASE job")
            if isinstance(error, sqlite3.Error):
                return None, translate(error, self._path)
            if isinstance(error, Duplicate):
                return None, Conflict(f"the database refused the change: {error}")
            return None, error
        connection.execute("RELEASE job")
        return result, None

    def _renew_reserve(self) -> None:
        try:
            self._reserve.renew()
        except OSError:
            _log.exception("the reserve of %s cannot be renewed", self._path)

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error:
                _log.exception("rolling back in %s failed", self._path)

    def _set_synchronous(self, durable: bool) -> None:
        if durable is not self._synchronous:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._synchronous = durable

    def _report(self, outcomes: list[tuple[_Job, _Outcome]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, outcomes)
        except RuntimeError:
            # The loop was closed without closing the database; nobody is left to be told.
            _log.warning("%d results of %s have no receiver", len(outcomes), self._path)

    # -- on the loop ------------------------------------------------------------------------
    def _deliver(self, outcomes: list[tuple[_Job, _Outcome]]) -> None:
        for job, (result, error) in outcomes:
            if isinstance(error, NodeFenced):
                self.fences.note(job.fence)
            if error is None and job.then is not None:
                job.then(result)
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
