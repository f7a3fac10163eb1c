"""What a node does by itself besides serving: operations that were handed to it, giving everything
away when it is drained, making room, keeping its disk free of what is others'.

Guarantee: an operation that was handed over is taken up within LOOK_SECONDS, or at once when a
server says so; a node that drains goes on until it holds nothing, however often something fails;
only sessions that a call wakes again are put away for others.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sojourn.errors import SessionNotFound, SojournError
from sojourn.model import Session, SessionState
from sojourn.model.nodes import NodeState, Resources
from sojourn.server.base import Principal
from sojourn.server.cluster import scheduler
from sojourn.server.context import Context
from sojourn.server.nodes.holding import Holding
from sojourn.server.nodes.identity import NodeIdentity
from sojourn.server.nodes.migration import VERB, Migration
from sojourn.server.operations import Operations
from sojourn.server.pauses import Pauses
from sojourn.server.registry import ActiveSession
from sojourn.server.repeating import repeat
from sojourn.server.snapshots import Snapshots
from sojourn.wire.nodes import Evicted

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
_TIDY_SECONDS = 3600.0
_EXPIRE_SECONDS = 60.0
_MOVES_AT_ONCE = 2
_DRAIN_AGAIN = 5.0
_ENDING = ("delete", VERB)
WHO = Principal(tenant="", actor="cluster", role="operator")


class NodeWork:
    """The clockwork of one node."""

    def __init__(
        self,
        context: Context,
        node: NodeIdentity,
        holding: Holding,
        migration: Migration,
        operations: Operations,
        snapshots: Snapshots,
    ) -> None:
        self._context = context
        self._node = node
        self._holding = holding
        self._migration = migration
        self._operations = operations
        self._snapshots = snapshots
        self._tasks: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None
        self._pauses = Pauses()  # of sessions that cannot be given away yet
        self._fetching: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin."""
        self._context.database.hear_node(self._node.id, self._told)
        self._tasks = [
            asyncio.create_task(self._look(), name="operations handed over"),
            asyncio.create_task(
                repeat(_TIDY_SECONDS, self._tidy, "tidying the disk", at_once=False)
            ),
            asyncio.create_task(
                repeat(_EXPIRE_SECONDS, self._expire, "expired sessions", at_once=False)
            ),
        ]

    async def stop(self) -> None:
        """End; what was begun goes on at the next start."""
        tasks = [*self._tasks, *self._fetching.values()]
        if self._draining is not None:
            tasks.append(self._draining)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- looking ----------------------------------------------------------------------------

    def _told(self, session: str | None) -> None:
        """Another node sends a session here, or something was missed."""
        self._node.hint.set()
        if session is not None:
            self.fetch_soon(session, None)

    async def _look(self) -> None:
        while True:
            try:
                if self._context.may_act:
                    await self._take_up()
                    self._drain_or_not()
            except SojournError as error:
                log.warning("operations handed over cannot be looked for: %s", error)
            except Exception:
                # A fault in one look must not be the end of every later one.
                log.exception("a fault while operations were looked for")
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._node.hint.wait()
            except TimeoutError:
                continue
            self._node.hint.clear()

    async def _take_up(self) -> None:
        """Run what was handed over. Whatever else is unfinished, this process runs already."""
        for one in await self._context.database.unfinished_operations(server=self._node.id):
            if one.verb != VERB or not one.data.get("handed") or self._operations.runs(one.id):
                continue
            try:
                session = await self._context.database.get_session(None, one.session)
                active = await self._context.registry.here(session)
            except SessionNotFound:
                await self._context.database.finish(one.id, None)
                continue
            except SojournError as error:
                # One that is elsewhere, or cannot be had now, holds up no other.
                log.warning("operation %s is not taken up: %s", one.id, error)
                continue
            log.info("operation %s (%s) goes on here", one.id, one.verb)
            self._operations.run(one, active)

    async def _tidy(self) -> None:
        if not self._context.may_act:
            return
        await self._holding.tidy()
        self._snapshots.collect_soon()

    async def _expire(self) -> None:
        """Sessions that nobody holds and whose lifetime is over: one node takes and removes them,
        by its own deadlines."""
        if not self._context.may_act:
            return
        database = self._context.database
        if await database.hold_duty("expire sessions", self._node.id, lease=2 * _EXPIRE_SECONDS):
            for session in await database.due_sessions(time.time(), holder=""):
                try:
                    await self._context.registry.here(session)
                except SojournError as error:
                    log.info("session %s is not removed yet: %s", session.id, error)

    # -- coming sessions --------------------------------------------------------------------

    def fetch_soon(self, session: str, snapshot: str | None) -> None:
        """Bring what a session needs that comes here soon, in the background."""
        if session in self._fetching:
            return
        task = asyncio.create_task(self._fetch(session, snapshot), name=f"fetch {session}")
        self._fetching[session] = task
        task.add_done_callback(lambda _: self._fetching.pop(session, None))

    async def _fetch(self, session: str, snapshot: str | None) -> None:
        try:
            if snapshot is not None:
                await self._migration.prefetch(snapshot)
            else:
                await self._migration.fetch(session)
        except (SojournError, OSError) as error:
            log.warning("nothing of session %s is brought beforehand: %s", session, error)

    # -- draining ---------------------------------------------------------------------------

    def _drain_or_not(self) -> None:
        draining = self._draining is not None and not self._draining.done()
        if self._node.state is NodeState.DRAINING and not draining:
            self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        """Give everything away, until nothing is left or nobody wants that any more."""
        said = False
        self._pauses = Pauses()
        while self._node.state is NodeState.DRAINING and self._context.may_act:
            held = await self._holding.held()
            if not held:
                if not said:
                    log.info("this node holds no session any more")
                said = True
                await asyncio.sleep(_DRAIN_AGAIN)
                continue
            said = False
            at_once = asyncio.Semaphore(_MOVES_AT_ONCE)

            async def move(session: Session, at_once: asyncio.Semaphore = at_once) -> None:
                async with at_once:
                    await self._give_away(session)

            # What runs first: it can be lost, what is put away only has to be sent.
            held.sort(key=lambda session: not session.live)
            await asyncio.gather(*(move(session) for session in held))
            await asyncio.sleep(1.0)

    async def _give_away(self, session: Session) -> None:
        if self._node.state is not NodeState.DRAINING or self._pauses.left(session.id):
            return
        try:
            active = await self._context.registry.still(session)
            if active is None:
                return
            if active.session.live:
                operation = await self._operations.begin(WHO, active, VERB, {}, None)
                await self._operations.wait(operation.id, 3600.0)
                ended = await self._context.database.get_operation(None, operation.id)
                if ended.error is not None:
                    self._stays(session.id, ended.error.message)
            elif active.state is not SessionState.CREATING:
                await self._holding.release(active.id)
        except SojournError as error:
            self._stays(session.id, error.message)

    def _stays(self, session: str, cause: str) -> None:
        self._pauses.put_off(session, cause)
        log.warning("session %s stays for now: %s", session, cause)

    # -- room -------------------------------------------------------------------------------

    def _has_room(self, need: Resources) -> bool:
        """Whether the limits of one more sandbox fit."""
        used = self._context.agent.committed()
        return scheduler.fits(self._node.capacity, used, need, self._node.settings.overcommit)

    async def evict(self, need: Resources, idle: float) -> Evicted:
        """Put away what has been idle for `idle` seconds or more, the longest first, until there
        is room for `need`."""
        gone: list[str] = []
        for active in await self._idle(idle):
            if self._has_room(need):
                break
            try:
                operation = await self._operations.begin(
                    WHO, active, "suspend", {"evicted": True}, None
                )
                await self._operations.complete(operation)
            except SojournError as error:
                log.info("session %s is not put away for another: %s", active.id, error.message)
                continue
            gone.append(active.id)
        return Evicted(self._has_room(need), gone)

    async def _idle(self, seconds: float) -> list[ActiveSession]:
        """Those that may be put away, idle for longest first."""
        now = time.time()
        found: list[tuple[float, ActiveSession]] = []
        for active in self._context.registry.all():
            session = active.session
            timeout = session.policy.idle_timeout
            free = session.live and not active.busy and active.pending is None
            if not free or not session.policy.auto_resume or timeout is None:
                continue
            if self._operations.current(active.id) is not None:
                continue
            newest = await self._context.database.get_session(None, active.id)
            if newest.idle_deadline is None:
                continue
            used = newest.idle_deadline - timeout  # when the last call was
            if now - used >= seconds:
                found.append((used, active))
        return [active for _, active in sorted(found, key=lambda one: one[0])]

    # -- refreshing -------------------------------------------------------------------------

    async def refresh(self, what: str) -> None:
        """Look anew at what another node or server changed. Returns when it is in force."""
        if what == "secrets":
            await self._context.networks.renew_secrets()
