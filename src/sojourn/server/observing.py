"""What is counted and traced of a session service: operations and their steps, and how it stands.

Guarantee: watching changes nothing: what goes wrong in here is logged, and neither an operation nor
a scrape fails by it. What needs the database is asked at a scrape, at most once in a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from sojourn.database.base import Database
from sojourn.database.records import Operation
from sojourn.errors import SojournError
from sojourn.server.context import Context
from sojourn.telemetry import declared, logs, scraping, tracing

log = logging.getLogger(__name__)

_COUNT_SECONDS = 60.0
_COUNT_SHARE = 1000  # what counts for a second counts again after so many
_LAG_SECONDS = 10.0

_step_began: ContextVar[int] = ContextVar("step_began", default=0)
_running: dict[str, int] = {}


async def observed(
    operation: Operation, epoch: int, execute: Callable[[], Awaitable[Operation]]
) -> Operation:
    """An operation's execution, to its end: counted, timed, traced, and named in the log."""
    verb = operation.verb
    logs.note(
        tenant=operation.tenant, session=operation.session, epoch=epoch, operation=operation.id
    )
    began = time.perf_counter()
    _running[verb] = _running.get(verb, 0) + 1
    result = "interrupted"
    with tracing.span(
        f"operation {verb}",
        sojourn__verb=verb,
        sojourn__operation=operation.id,
        sojourn__session=operation.session,
        sojourn__tenant=operation.tenant,
        sojourn__epoch=epoch,
    ) as span:
        _step_began.set(time.time_ns())
        try:
            ended = await execute()
            result = _result(ended)
            if ended.error is not None:
                span.fail(result)
            return ended
        except SojournError as error:
            result = error.code
            raise
        finally:
            _running[verb] -= 1
            declared.OPERATION_SECONDS.observe(time.perf_counter() - began, verb)
            declared.OPERATIONS.add(verb, result)


def _result(operation: Operation) -> str:
    if operation.error is not None:
        return operation.error.code
    return "ok" if operation.finished else "elsewhere"  # another node goes on with it


def step(verb: str, name: str) -> None:
    """A step of the operation under way is done: it began where the one before ended."""
    if tracing.active():
        tracing.past(f"{verb} {name}", _step_began.get())
        _step_began.set(time.time_ns())


class SessionCounts:
    """How many sessions there are of each state. Counting reads an index of all of them, so it is
    done at most once in a while, and the less often the longer it takes."""

    def __init__(self, database: Database, holder: str | None = None) -> None:
        self._database, self._holder = database, holder
        self._again_at = float("-inf")
        self.values: dict[tuple[str, ...], float] = {}

    async def look(self) -> None:
        """Count, if it is time."""
        began = time.monotonic()
        if began < self._again_at:
            return
        self._again_at = began + _COUNT_SECONDS
        counts = await self._database.count_sessions(None, holder=self._holder)
        self.values = {(str(state),): float(count) for state, count in counts.items()}
        took = time.monotonic() - began
        self._again_at = began + max(_COUNT_SECONDS, took * _COUNT_SHARE)


class Observing:
    """How a service stands, for as long as it serves."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counts = SessionCounts(context.database, context.holder)
        self._waiting = self._lag = 0.0
        self._looked_at = float("-inf")
        self._stops: list[Callable[[], None]] = []

    def start(self) -> None:
        """Be asked at scrapes from now on."""
        objects = self._context.replicator.settings.url is not None
        self._stops = [
            scraping.before(self._look),
            declared.SESSIONS.tell(lambda: self._counts.values),
            declared.SANDBOXES.tell(lambda: {(): float(self._context.agent.count)}),
            declared.OPERATIONS_RUNNING.tell(
                lambda: {(verb,): float(count) for verb, count in _running.items()}
            ),
        ]
        if objects:
            self._stops += [
                declared.STORE_LAG_SECONDS.tell(lambda: {(): self._lag}),
                declared.STORE_WAITING.tell(lambda: {(): self._waiting}),
                declared.STORE_FAILING.tell(
                    lambda: {(): float(self._context.replicator.status().error is not None)}
                ),
            ]

    def stop(self) -> None:
        """Be asked no more. Idempotent."""
        for stop in self._stops:
            stop()
        self._stops = []

    async def _look(self) -> None:
        await self._counts.look()
        now = time.monotonic()
        database, holder = self._context.database, self._context.holder
        objects = self._context.replicator.settings.url is not None
        if objects and now - self._looked_at > _LAG_SECONDS:
            self._looked_at = now
            behind = await database.durability(None, holder=holder, waiting=True)
            self._waiting = float(sum(one.waiting for one in behind))
            oldest = [one.oldest_waiting for one in behind if one.oldest_waiting is not None]
            self._lag = max(0.0, time.time() - min(oldest)) if oldest else 0.0
