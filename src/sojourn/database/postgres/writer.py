"""Writing side by side: a few threads, each with a connection.

Guarantee: a job's future is resolved only after its transaction is committed, and a job that
raises changes nothing. Jobs that touch the same thing run in the order they were submitted; others
do not wait for each other, and what they sync at the same time the server syncs at once.

A job that is not durable is flushed too, but does not wait for standbys: it is to survive the end
of the server that asked, and here also the end of the database's, which is another program.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from sojourn.database.engine import NOTHING, Statements, Touched
from sojourn.database.fences import Fences
from sojourn.database.postgres.connections import Connections
from sojourn.database.postgres.failures import closed
from sojourn.database.postgres.lanes import Lanes
from sojourn.database.postgres.place import Place, impatient
from sojourn.database.postgres.transactions import Task, Transactions, forget_marks
from sojourn.errors import NodeFenced, SojournError
from sojourn.model.nodes import Fence

log = logging.getLogger(__name__)

THREADS = 8
_FORGET_SECONDS = 600.0
_APART_SECONDS = 4.0  # a transaction apart takes no longer


class _Job:
    __slots__ = ("apart", "future", "task", "then")

    def __init__(
        self,
        task: Task,
        future: asyncio.Future[Any],
        then: Callable[[Any], None] | None,
        apart: bool,
    ) -> None:
        self.task = task
        self.future = future
        self.then = then
        self.apart = apart


class PostgresWriter:
    """See `sojourn.database.engine.Writer`."""

    def __init__(self, place: Place, loop: asyncio.AbstractEventLoop) -> None:
        self.fences = Fences()
        self._place = place
        self._loop = loop
        self._connections = Connections(place)
        self._stopped = threading.Event()
        self._transactions = Transactions(self._connections, self._stopped)
        self._threads = ThreadPoolExecutor(THREADS, "sojourn-database")
        # A lease must not wait until the others have the connections they want, nor as long as
        # they wait for a server that is away.
        self._near = Connections(impatient(place))
        self._near_transactions = Transactions(self._near, self._stopped, _APART_SECONDS)
        self._near_thread = ThreadPoolExecutor(1, "sojourn-database-lease")
        self._lanes: Lanes[_Job] = Lanes(self._start)
        self._idle = asyncio.Event()
        self._closing = False
        self._refusal: SojournError | None = None
        self._forget_at = time.monotonic()

    def submit(
        self,
        work: Callable[[Statements], Any],
        *,
        durable: bool,
        touches: Touched = NOTHING,
        urgent: bool = False,
        fence: Fence | msgspec.UnsetType | None = msgspec.UNSET,
        apart: bool = False,
        then: Callable[[Any], None] | None = None,
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        name = self.fences.current if fence is msgspec.UNSET else fence
        refusal = closed(self._place.shown) if self._closing else self._refusal
        refusal = refusal or self.fences.refusal(name)
        if refusal is not None:
            future.set_exception(refusal)
            return future
        task = Task(work, touches, "on" if durable else "local", name)
        job = _Job(task, future, then, apart)
        if apart:
            self._near_thread.submit(self._perform, job)
        else:
            self._lanes.add(job, touches.names())
        return future

    def refuse(self, error: SojournError) -> None:
        """Take no more jobs."""
        self._refusal = error

    def _start(self, job: _Job) -> None:
        self._threads.submit(self._perform, job)

    async def close(self) -> None:
        """Finish what is queued and let go. Idempotent."""
        self._closing = True
        while len(self._lanes):
            self._idle.clear()
            await self._idle.wait()
        self._stopped.set()
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._near_thread.shutdown)
        self._connections.close()
        self._near.close()

    # -- in a thread ------------------------------------------------------------------------
    def _perform(self, job: _Job) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            runner = self._near_transactions if job.apart else self._transactions
            result = runner.run(job.task)
        except Exception as caught:  # noqa: BLE001 - whatever it is belongs to the job's caller
            error = caught
        try:
            self._loop.call_soon_threadsafe(self._deliver, job, result, error)
        except RuntimeError:
            # The loop was closed without closing the database; nobody is left to be told.
            log.warning("a result of %s has no receiver", self._place.shown)
        if not job.apart:
            self._forget()

    def _forget(self) -> None:
        """Now and then remove old marks; of the threads one does it, after it has answered."""
        now = time.monotonic()
        if now < self._forget_at or self._stopped.is_set():
            return
        self._forget_at = now + _FORGET_SECONDS
        try:
            self._transactions.read(forget_marks)
        except Exception:
            log.warning("old marks of commits could not be removed", exc_info=True)

    # -- on the loop ------------------------------------------------------------------------
    def _deliver(self, job: _Job, result: Any, error: BaseException | None) -> None:
        if isinstance(error, NodeFenced):
            self.fences.note(job.task.fence)
        if error is None and job.then is not None:
            job.then(result)
        if not job.future.done():
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
        if job.apart:
            return
        self._lanes.finished(job)
        if not len(self._lanes):
            self._idle.set()
