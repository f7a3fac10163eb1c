"""What happens by itself: deadlines, watching for lost sandboxes and full sessions, retention.

Guarantee: a deadline that came while no server ran is acted on at the next start; a failed action
is tried again later, with growing pauses, and is in the event log once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from sojourn.errors import SessionBusy, SessionNotFound, SojournError
from sojourn.lifecycle import Verb, expired
from sojourn.model import SessionState
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.operations import Operations
from sojourn.server.placements import Placements
from sojourn.server.quotas import Quotas
from sojourn.server.registry import ActiveSession
from sojourn.server.repeating import repeat
from sojourn.server.snapshots import Snapshots

log = logging.getLogger(__name__)

_DEADLINE_SECONDS = 0.5
_WATCH_SECONDS = 1.0
_TIDY_SECONDS = 30.0
_PRUNE_SECONDS = 600.0
_RETAIN_SECONDS = 300.0
_RETRY_FIRST, _RETRY_MOST = 5.0, 300.0
_SAY_AGAIN = 60.0  # seconds until the same failure of the same session is logged once more


class Timers:
    """The server's clockwork."""

    def __init__(
        self,
        context: Context,
        operations: Operations,
        placements: Placements,
        snapshots: Snapshots,
        quotas: Quotas,
    ) -> None:
        self._context = context
        self._operations = operations
        self._placements = placements
        self._snapshots = snapshots
        self._quotas = quotas
        self._tasks: list[asyncio.Task[None]] = []
        self._not_before: dict[str, tuple[float, float]] = {}
        self._complaints: dict[tuple[str, str], float] = {}  # when each was logged

    def start(self) -> None:
        """Begin."""
        for every, work in (
            (_DEADLINE_SECONDS, self.deadlines),
            (_WATCH_SECONDS, self.watch),
            (_TIDY_SECONDS, self._tidy),
            (_PRUNE_SECONDS, self._prune),
            (_RETAIN_SECONDS, self._snapshots.retentions.round),
        ):
            self._tasks.append(
                asyncio.create_task(repeat(every, self._acting(work), work.__name__))
            )

    async def stop(self) -> None:
        """End, waiting for nothing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _acting(self, work: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """`work`, as long as this server may act."""

        async def round() -> None:
            if self._context.may_act:
                await work()

        return round

    # -- deadlines --------------------------------------------------------------------------

    async def deadlines(self) -> None:
        """Suspend or delete the sessions whose time has come."""
        now = time.time()
        holder = self._context.holder
        for session in await self._context.database.due_sessions(now, holder=holder):
            active = await self._context.registry.still(session)
            if active is None:
                continue
            wait, pause = self._not_before.get(session.id, (0.0, _RETRY_FIRST))
            if wait > now or self._operations.current(session.id) is not None:
                continue
            if expired(session, now, busy=active.busy) is None:
                self._busy(active, now)
                continue
            self._not_before[session.id] = (now + pause, min(pause * 2, _RETRY_MOST))
            self._context.soon(self._expire(active, now), f"deadline {session.id}")

    def _busy(self, active: ActiveSession, now: float) -> None:
        """A session at work is not idle: its deadline moves on with it."""
        timeout = active.session.policy.idle_timeout
        if active.busy and timeout is not None:
            self._context.database.touch_idle(active.id, now + timeout)

    async def _expire(self, active: ActiveSession, now: float) -> None:
        try:
            # The record held here may be older than a deadline that was moved since.
            current = await self._context.database.get_session(None, active.id)
        except SessionNotFound:
            self._not_before.pop(active.id, None)
            return
        verb = expired(current, now, busy=active.busy)
        if verb is None:
            self._not_before.pop(active.id, None)
            return
        lifetime = current.lifetime_deadline
        over = lifetime is not None and lifetime <= now
        who = Principal(tenant=current.tenant, actor="deadline", role="operator")
        request = {"deadline": True, "force": over}
        try:
            if verb is Verb.DELETE:
                operation = await self._operations.begin(
                    who, active, "delete", {}, None, supersede=True
                )
            else:
                operation = await self._operations.begin(who, active, "suspend", request, None)
            await self._operations.complete(operation)
        except SessionBusy:
            return
        except SojournError as error:
            log.warning("session %s could not be put away at its deadline: %s", active.id, error)
            return
        self._not_before.pop(active.id, None)

    # -- watching ---------------------------------------------------------------------------

    async def watch(self) -> None:
        """Notice sandboxes that died and sessions that hold more than they may."""
        for active in self._context.registry.all():
            if not active.session.live:
                continue
            held = not active.gate.is_open
            try:
                sandbox = self._context.sandbox(active)
                status = await asyncio.to_thread(sandbox.status)
                alive = status.alive
                if held and not alive and not status.pids:
                    # Whoever holds the session may be waiting for an answer that cannot come.
                    await sandbox.guest.close()
            except SojournError:
                alive = False
            try:
                if held:
                    continue
                if not alive:
                    await self._placements.check(active)
                elif active.state is SessionState.RUNNING:
                    await self._quotas.check(active, sandbox)
            except (SojournError, OSError) as error:
                # The other sessions are looked at all the same.
                self._complain(active.id, str(error))

    def _complain(self, session: str, cause: str) -> None:
        """Log why a session cannot be looked at; the same again only after a while."""
        now = time.monotonic()
        self._complaints = {
            known: told for known, told in self._complaints.items() if now - told < _SAY_AGAIN
        }
        if (session, cause) not in self._complaints:
            self._complaints[session, cause] = now
            log.error("session %s cannot be looked at: %s", session, cause)

    async def _tidy(self) -> None:
        """Try again to remove what could not be removed."""
        await self._context.agent.retry_removals()
        if self._snapshots.behind:
            self._snapshots.collect_soon()

    async def _prune(self) -> None:
        await self._context.database.prune(time.time())
