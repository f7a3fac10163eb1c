"""Taking sessions from nodes that are lost. Every server does this, and the database shares the
work among them.

Guarantee: a node is declared lost only by the database's clock, and by a server that has reached
the database without a gap for longer than a lease lasts: after an outage of the database every
lease is over at once, and nobody is lost for that. What a server that died had begun, another one
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from sojourn.database.base import Database
from sojourn.database.writes import AppendEvent, UpdateSession
from sojourn.errors import (
    SessionNotFound,
    SnapshotNotFound,
    StaleEpoch,
    WrongState,
)
from sojourn.model.nodes import FailedOver, Node
from sojourn.model.sessions import Session, SessionState
from sojourn.server.repeating import repeat
from sojourn.telemetry import declared

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.0
"""After its lease has ended, before a node is declared lost: time for a renewal that is under way,
and for the watchdog to have frozen everything."""
_EVERY_SECONDS = 1.0
_SLOW_SECONDS = 2.0
_BATCH = 100
_SWEEP_SECONDS = 60.0
_ODD = frozenset({SessionState.CREATING, SessionState.RUNNING, SessionState.PAUSED})


class Guard:
    """When nodes may be declared lost; `clock` goes on while the machine sleeps."""

    def __init__(
        self,
        lease: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._lease = lease
        self._clock = clock
        self._began: float | None = None  # of the look under way
        self._seen: float | None = None  # the last time the database answered
        self._since: float | None = None  # and since when without a gap

    def begin(self) -> None:
        """The database is asked."""
        self._began = self._clock()

    def answered(self) -> None:
        """It has answered."""
        now = self._clock()
        quick = self._began is not None and now - self._began <= _SLOW_SECONDS
        went_on = (
            self._seen is not None
            and self._began is not None
            and self._began - self._seen <= _EVERY_SECONDS + _SLOW_SECONDS
        )
        if self._since is None or not quick or not went_on:
            self._since = now
        self._seen = now

    def failed(self) -> None:
        """It has not."""
        self._since = None

    @property
    def holds(self) -> bool:
        """Whether nobody may be declared lost yet."""
        return self._since is None or self._clock() - self._since < self._lease


class Failover:
    """One server's part. `moved` is told of every session that was taken from a node."""

    def __init__(
        self,
        database: Database,
        *,
        lease: float,
        grace: float = GRACE_SECONDS,
        moved: Callable[[Node, FailedOver], None] = lambda node, one: None,
    ) -> None:
        self._database = database
        self._grace = grace
        self._guard = Guard(lease)
        self._moved = moved
        self._unheld: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(
                repeat(_EVERY_SECONDS, self.once, "looking for lost nodes"), name="failover"
            ),
            asyncio.create_task(
                repeat(_SWEEP_SECONDS, self._sweep, "looking after sessions that nobody holds"),
                name="sweep",
            ),
        ]

    async def stop(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def once(self) -> int:
        """Look once; how many sessions were taken."""
        try:
            return await self._once()
        except Exception:
            self._guard.failed()
            raise

    async def _once(self) -> int:
        if self._guard.holds:
            self._guard.begin()
            await self._database.list_nodes()
            self._guard.answered()
            return 0
        self._guard.begin()
        node = await self._database.lose_node(self._grace, within=_SLOW_SECONDS)
        self._guard.answered()
        if node is None:
            return 0
        log.warning("node %s (%s) is lost", node.name, node.id)
        declared.FAILOVERS.add()
        return await self._take(node)

    async def _take(self, node: Node) -> int:
        count = 0
        while moved := await self._database.fail_over(node.id, _BATCH):
            for one in moved:
                log.warning(
                    "session %s of node %s: %s at %s (at most %.1f s lost)",
                    one.session,
                    node.name,
                    one.state,
                    one.head,
                    one.lost_seconds,
                )
                declared.FAILED_OVER_SESSIONS.add(str(one.state))
                self._moved(node, one)
            count += len(moved)
        return count

    async def _sweep(self) -> None:
        """Look after sessions that run as far as the database knows, and that no node holds. The
        protocol leaves none; a database that was one machine's before may have some."""
        self._unheld = await self.sweep(self._unheld)

    async def sweep(self, seen: Mapping[str, int]) -> dict[str, int]:
        """Put those away that were seen before, at the same epoch; what is seen now."""
        page = await self._database.list_sessions(
            None, states=_ODD, holder="", limit=_BATCH, kind=None
        )
        for session in page.items:
            if seen.get(session.id) == session.epoch:
                with contextlib.suppress(StaleEpoch, WrongState, SessionNotFound):
                    await self._put_away(session)
        return {session.id: session.epoch for session in page.items}

    async def _put_away(self, session: Session) -> None:
        """Have it be where the object store has it, so that any node takes it."""
        head = await self._durable(session.head)
        cause = f"no node held it while it was {session.state}"
        state = SessionState.SUSPENDED if head is not None else SessionState.FAILED
        changes = {
            "state": state,
            "head": head or session.head,
            "sandbox": None,
            "node": None,
            "cause": cause,
            "epoch": session.epoch + 1,
        }
        update = UpdateSession(session.id, {session.state}, session.epoch, changes)
        event = AppendEvent(
            session=session.id,
            kind="session.unheld",
            result=str(state),
            details={"head_before": session.head, "head": head},
            before=session.head,
            after=head or session.head,
        )
        await self._database.commit([update, event])
        log.error("session %s: %s; it is %s now", session.id, cause, state)

    async def _durable(self, head: str | None) -> str | None:
        """The newest snapshot on a line that the object store has."""
        while head is not None:
            try:
                record = await self._database.get_snapshot(None, head, hidden=True)
            except SnapshotNotFound:
                return None
            if record.durable_at is not None:
                return head
            head = record.parent
        return None
