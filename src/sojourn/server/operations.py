"""Operations: verbs as durable, resumable work that no client has to stay for.

Guarantee: an operation is on disk before its first effect, every step is on disk before the next
begins, and whatever ends the server, the next one takes the operation up again by its verb
(`bodies`) until it succeeded or failed. A client that goes away changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from sojourn import faultpoints
from sojourn.database.records import Operation
from sojourn.database.writes import AppendEvent, FinishOperation, Write
from sojourn.errors import (
    CapacityExhausted,
    Conflict,
    HostUnfit,
    IdempotencyMismatch,
    Interrupted,
    SessionBusy,
    SessionElsewhere,
    SojournError,
    StorageFull,
    Unreachable,
    from_body,
    to_body,
)
from sojourn.server import observing
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.registry import GATE_SECONDS, ActiveSession

log = logging.getLogger(__name__)

_PLACING = frozenset({"create", "resume"})
_RETRY_SECONDS = 2.0
_LOOK_FIRST, _LOOK_MOST = 0.05, 1.0  # at an operation that another node runs


class Run:
    """One execution of an operation: what its body sees.

    `data` is what earlier executions recorded; a body must be able to begin again from it.
    """

    def __init__(self, context: Context, operation: Operation, active: ActiveSession) -> None:
        self.context = context
        self.operation = operation
        self.active = active
        self.data: dict[str, Any] = dict(operation.data)
        self.done = False
        self.elsewhere = False  # another node goes on with it
        self.actor = str(operation.request.get("actor", "server"))

    @property
    def request(self) -> dict[str, Any]:
        """The verb's arguments as they were recorded."""
        return self.operation.request

    async def step(self, step: str, **data: Any) -> None:
        """Record that a step is done (durably), before the next begins."""
        faultpoints.reach(f"{self.operation.verb}.{step}.before")
        self.data.update(data)
        self.operation = await self.context.database.set_step(self.operation.id, step, data)
        observing.step(self.operation.verb, step)
        faultpoints.reach(f"{self.operation.verb}.{step}")

    def finish(self, result: Any) -> FinishOperation:
        """The write that ends the operation; commit it together with what it did."""
        self.done = True
        return FinishOperation(self.operation.id, result=result)

    def event(
        self,
        *,
        result: str = "ok",
        before: str | None = None,
        after: str | None = None,
        **details: Any,
    ) -> AppendEvent:
        """The write that puts it into the event log."""
        return AppendEvent(
            session=self.active.id,
            kind=self.operation.verb,
            actor=self.actor,
            result=result,
            details=details,
            before=before,
            after=after,
            operation=self.operation.id,
        )


def _refused_by_host(verb: str, error: OSError) -> SojournError:
    """What a failure of the host's disk or kernel means to the caller."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room on the node: {error}")
    return HostUnfit(f"{verb} failed because the host refused: {error}")


Body = Callable[[Run], Awaitable[None]]


class Operations:
    """Begins operations, runs them, and lets callers wait for them."""

    def __init__(self, context: Context, bodies: dict[str, Body]) -> None:
        self._context = context
        self._bodies = dict(bodies)
        self._tasks: dict[str, asyncio.Task[Operation]] = {}
        self._of_session: dict[str, str] = {}

    def know(self, bodies: dict[str, Body]) -> None:
        """More verbs."""
        self._bodies.update(bodies)

    async def _require_room(self, active: ActiveSession, key: str | None) -> None:
        """Refuse what would fail for want of room before it is on record: elsewhere it may yet be
        done, under the same key. Raises CapacityExhausted."""
        session = active.session
        try:
            self._context.require_room(session.limits, but=session.id)
        except CapacityExhausted:
            if key is None or not await self._context.database.keyed_operation(session.tenant, key):
                raise

    async def begin(
        self,
        who: Principal,
        active: ActiveSession,
        verb: str,
        request: dict[str, Any],
        key: str | None,
        *,
        supersede: bool = False,
        creates: bool = False,
        also: Sequence[Write] = (),
    ) -> Operation:
        """Begin a verb and run it in the background. A key seen before answers its operation.

        Verbs on one session are serialised: this waits for the one before.
        Raises SessionBusy when that takes longer than a minute, IdempotencyMismatch,
        SessionElsewhere, NodeUnavailable, CapacityExhausted.
        """
        self._context.require_lease()
        if verb in _PLACING:
            await self._require_room(active, key)
        deadline = asyncio.get_running_loop().time() + GATE_SECONDS
        while True:
            try:
                operation, new = await self._context.database.begin(
                    tenant=active.session.tenant,
                    session=active.id,
                    verb=verb,
                    request=request | {"actor": who.actor},
                    server=self._context.server,
                    key=key,
                    supersede=supersede,
                    creates=creates,
                    also=also,
                    holder=self._context.holder,
                )
                break
            except SessionElsewhere:
                await self._context.refresh(active)
                raise
            except SessionBusy:
                if self._context.node is not None:
                    self._context.node.hint.set()  # it may have been handed over just now
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not await self.join(active.id, left):
                    raise
                # Its task ends a moment after its record does; another caller may be first.
                await asyncio.sleep(0.01)
        if new:
            if creates:
                # Others find the session from now on; all of them must mean the same object.
                active = self._context.registry.hold(active.session)
            faultpoints.reach(f"{verb}.begin")
            self.run(operation, active)
        return operation

    async def repeated(
        self, who: Principal, verb: str, ref: str, key: str | None
    ) -> Operation | None:
        """The operation that an earlier request with this key began, for a session that cannot be
        found any more. `ref` is compared with the `ref` the request recorded.

        Raises IdempotencyMismatch when the key belongs to another request.
        """
        known = await self._context.database.keyed_operation(who.tenant, key) if key else None
        if known is None:
            return None
        if known.verb != verb or ref not in (known.session, known.request.get("ref")):
            raise IdempotencyMismatch(
                f"the idempotency key was used for another request ({known.verb})",
                operation=known.id,
                verb=known.verb,
            )
        return known

    def run(self, operation: Operation, active: ActiveSession) -> asyncio.Task[Operation]:
        """Run (or take up again) an operation in the background."""
        work = observing.observed(
            operation, active.session.epoch, lambda: self._execute(operation, active)
        )
        task = self._context.soon(work, f"operation {operation.id}")
        self._tasks[operation.id] = task
        self._of_session[active.id] = operation.id
        task.add_done_callback(lambda _: self._forget(operation.id, active.id))
        return task

    def _forget(self, operation: str, session: str) -> None:
        self._tasks.pop(operation, None)
        if self._of_session.get(session) == operation:
            del self._of_session[session]

    def current(self, session: str) -> str | None:
        """The operation under way on a session."""
        return self._of_session.get(session)

    async def _execute(self, operation: Operation, active: ActiveSession) -> Operation:
        run = Run(self._context, operation, active)
        try:
            await self._bodies[operation.verb](run)
            faultpoints.reach(f"{operation.verb}.end")
            if not run.done and not run.elsewhere:
                raise SojournError(f"the operation {operation.verb} ended without a result")
        except SojournError as error:
            return await self._fail(run, error)
        except OSError as error:
            log.exception("operation %s (%s) failed", operation.id, operation.verb)
            return await self._fail(run, _refused_by_host(operation.verb, error))
        except Exception as error:
            log.exception("operation %s (%s) failed", operation.id, operation.verb)
            return await self._fail(run, SojournError(f"{operation.verb} failed: {error!r}"))
        return await self._context.database.get_operation(None, operation.id)

    async def _fail(self, run: Run, error: SojournError) -> Operation:
        database = self._context.database
        event = msgspec.structs.replace(
            run.event(result=error.code, before=run.active.session.head),
            details=error.details | {"message": error.message},
        )
        id = run.operation.id
        writes: list[Write] = [FinishOperation(id, error=to_body(error)), event]
        while True:
            try:
                await database.commit(writes)
                break
            except Conflict:
                # It is ended already: by a delete that took it over, or by a commit of its own
                # whose outcome was not known.
                log.info("operation %s was superseded: %s", id, error.message)
                break
            except Unreachable as failure:
                # Left unfinished it would hold its session until the next start.
                log.error("operation %s: its failure is not recorded: %s", id, failure)
                await asyncio.sleep(_RETRY_SECONDS)
            except SojournError as failure:
                # The disk may be full: it stays unfinished and the next start takes it up.
                log.error("operation %s: its failure is not recorded: %s", id, failure)
                break
        return await database.get_operation(None, id)

    async def wait(self, operation: str, timeout: float) -> None:
        """Wait until it is finished or the time is over."""
        end = asyncio.get_running_loop().time() + timeout
        task = self._tasks.get(operation)
        if task is not None:
            await asyncio.wait({task}, timeout=timeout)
        if self._context.node is not None:
            await self._wait_elsewhere(operation, end - asyncio.get_running_loop().time())

    async def _wait_elsewhere(self, operation: str, timeout: float) -> None:
        """Wait for one that another node runs, or goes on with."""
        pause = _LOOK_FIRST
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (await self._context.database.get_operation(None, operation)).finished:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LOOK_MOST)

    def runs(self, operation: str) -> bool:
        """Whether an operation is under way here."""
        return operation in self._tasks

    async def join(self, session: str, timeout: float) -> bool:
        """Wait for the session's operation under way; whether it ended."""
        operation = self._of_session.get(session)
        task = self._tasks.get(operation) if operation else None
        if task is None:
            return True
        done, _ = await asyncio.wait({task}, timeout=timeout)
        return bool(done)

    async def complete(self, operation: Operation) -> Operation:
        """Wait for an operation and raise its error, if it failed."""
        task = self._tasks.get(operation.id)
        if task is not None:
            operation = await asyncio.shield(task)
        else:
            operation = await self._context.database.get_operation(None, operation.id)
        if operation.error is not None:
            raise from_body(operation.error)
        if not operation.finished:
            raise Interrupted(f"operation {operation.id} was left unfinished")
        return operation
