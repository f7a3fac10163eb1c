"""A node's lease: until when it may act.

Guarantee: `held` is true only while the database's clock grants the lease, also when this process
was stopped or the machine slept: the deadline counts from before the renewal was sent, on a clock
that goes on meanwhile, and stands in the watchdog's file before anything relies on it. A node that
is told that it was fenced never acts again under this incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from sojourn.database.base import Database
from sojourn.errors import NodeFenced, NodeUnavailable, SojournError
from sojourn.model.nodes import Fence, Node, Resources
from sojourn.telemetry import declared
from sojourn.wire.lease_file import now

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
_PARTS = 5  # a lease is renewed when so many parts of it are left over but one
_MOST_PAUSE = 1.0  # between two tries while the database does not answer


class Guard(Protocol):
    """What freezes the sandboxes when nobody else does; see `sojourn.node.watchdog.Watchdog`."""

    def hold(self, deadline: int) -> None:
        """The node may act until then."""

    def thaw(self) -> None:
        """Sandboxes go on, where the deadline allows it."""


class Lease:
    """Renews the lease of one incarnation of a node.

    `lost` is called when it is over, `returning` awaited before it is held again (nothing goes on
    yet), `regained` called when it is (what was frozen goes on),
    `fenced` when another incarnation, or another node, may have the sessions: after it nothing is
    renewed any more. `renewed` is told what the database says of the node at each renewal.
    """

    def __init__(
        self,
        database: Database,
        fence: Fence,
        seconds: float,
        guard: Guard | None,
        used: Callable[[], Resources],
    ) -> None:
        self.fence = fence
        self.losses = 0
        """How often it was over: who began something compares, to know that it was not since."""
        self.lost: Callable[[], None] = lambda: None
        self.returning: Callable[[], Awaitable[None]] = _nothing
        self.regained: Callable[[], None] = lambda: None
        self.fenced: Callable[[], None] = lambda: None
        self.renewed: Callable[[Node], None] = lambda node: None
        self._database = database
        self._seconds = seconds
        self._guard = guard
        self._used = used
        self._deadline = 0
        self._over = True
        self._fenced = False
        self._moved = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "lease")
        self._tasks: list[asyncio.Task[None]] = []
        self._untell: Callable[[], None] = lambda: None

    @property
    def held(self) -> bool:
        """Whether the node may act now."""
        return not self._fenced and now() < self._deadline

    @property
    def left(self) -> float:
        """For how many seconds it may."""
        return max(0.0, (self._deadline - now()) / 1e9) if not self._fenced else 0.0

    @property
    def is_fenced(self) -> bool:
        """Whether it is over for good."""
        return self._fenced

    def require(self) -> None:
        """Raise NodeUnavailable where the node may not act."""
        if self.held:
            return
        why = "was fenced" if self._fenced else "has no lease: it does not reach the database"
        raise NodeUnavailable(f"node {self.fence.node} {why}", node=self.fence.node)

    async def begin(self, sent: int) -> None:
        """Hold the lease that was asked for at `sent` and granted, and go on renewing it."""
        await self._hold(sent)
        self._untell = declared.LEASE_LEFT_SECONDS.tell(lambda: {(): self.left})
        self._tasks = [
            asyncio.create_task(self._renew(), name="renew the lease"),
            asyncio.create_task(self._watch(), name="watch the lease"),
        ]

    async def stop(self) -> None:
        """Renew it no more; what is held stays held until its end. Idempotent."""
        self._untell()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=False)

    # -- renewing ---------------------------------------------------------------------------

    async def _renew(self) -> None:
        every = self._seconds / _PARTS
        pause = every
        while True:
            await asyncio.sleep(pause)
            sent = now()
            try:
                # Whoever waits longer than this for an answer does better to ask again.
                async with asyncio.timeout(2 * every):
                    node = await self._database.renew_node(
                        self.fence, lease=self._seconds, used=self._used()
                    )
                await self._hold(sent)
            except NodeFenced as error:
                declared.LEASE_RENEWALS.add(error.code)
                self._end(error)
                return
            except (SojournError, OSError) as error:  # a time-out is one of these
                code = error.code if isinstance(error, SojournError) else "unreachable"
                declared.LEASE_RENEWALS.add(code)
                log.warning("the lease is not renewed: %s", str(error) or "no answer in time")
                pause = min(every, _MOST_PAUSE)
            except Exception:
                # Nothing else would ever learn that the node was fenced.
                declared.LEASE_RENEWALS.add("internal")
                log.exception("a fault while the lease was renewed")
                pause = min(every, _MOST_PAUSE)
            else:
                pause = every
                declared.LEASE_RENEWALS.add("ok")
                self.renewed(node)

    async def _hold(self, sent: int) -> None:
        deadline = sent + int(self._seconds * 1e9)
        if deadline <= self._deadline or now() >= deadline:
            return
        if 0 < self._deadline <= now():
            # Nobody waited for this node to learn of what was changed meanwhile.
            async with asyncio.timeout(self._seconds / 2):
                await self.returning()
            if now() >= deadline:
                return
        if self._guard is not None:
            # Before it counts: what is frozen by this file must not be relied on.
            await self._apart(self._guard.hold, deadline)
        self._deadline = deadline
        if self._over:
            if self._guard is not None:
                await self._apart(self._guard.thaw)
            self._over = False
            if self.losses:
                log.warning("the lease is held again")
            self.regained()
        self._moved.set()

    async def _apart(self, work: Callable[..., None], *arguments: int) -> None:
        """In a thread of its own: all others may wait for an object store that does not answer."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, work, *arguments)

    async def _watch(self) -> None:
        """Notice the end of the lease when it comes, whatever a renewal is waiting for."""
        while not self._fenced:
            left = (self._deadline - now()) / 1e9
            if left > 0:
                await asyncio.sleep(left)
                continue
            if not self._over:
                self._over = True
                self.losses += 1
                declared.LEASE_LOSSES.add()
                log.error("the lease is over: everything stands still until it is renewed")
                self.lost()
            self._moved.clear()
            await self._moved.wait()

    def _end(self, error: NodeFenced) -> None:
        log.error("this node was fenced: %s", error.message)
        self._fenced = True
        self._moved.set()
        self.fenced()


async def _nothing() -> None:
    """Nothing is to be done."""
