"""Taking sessions from nodes that are lost. Every server does this, and the database shares the
work among them.

Guarantee: a node is declared lost only by the database's clock, and by a server that has reached
the database without a gap for longer than a lease lasts: after an outage of the database every
lease is over at once, and nobody is lost for that. What a server that died had begun, another one
ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sojourn.database.base import Database
from sojourn.errors import SojournError
from sojourn.model.nodes import FailedOver, Node
from sojourn.model.sessions import SessionState
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
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._run(), name="failover"),
            asyncio.create_task(self._sweep(), name="sweep"),
        ]

    async def stop(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.once()
            except SojournError as error:
                self._guard.failed()
                log.warning("lost nodes cannot be looked for: %s", error)
            await asyncio.sleep(_EVERY_SECONDS)

    async def once(self) -> int:
        """Look once; how many sessions were taken."""
        if self._guard.holds:
            self._guard.begin()
            await self._database.list_nodes()
            self._guard.answered()
            return 0
        self._guard.begin()
        node = await self._database.lose_node(self._grace)
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
                    "session %s of node %s: %s at %s (%.1f s lost)",
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
        """Say of sessions that nobody holds and that should be held: the protocol leaves none."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                page = await self._database.list_sessions(
                    None, states=_ODD, holder="", limit=20, kind=None
                )
            except SojournError as error:
                log.debug("odd sessions cannot be looked for: %s", error)
                continue
            for session in page.items:
                log.error("session %s is %s and no node holds it", session.id, session.state)
