"""Waiting for room.

Guarantee: requests of one tenant are admitted in the order they came (those that no node would do
for, were it empty, in an order of their own), tenants take turns, so that one with many requests
holds up nobody else; the queue is bounded, and whoever cannot wait in it or has waited long enough
is refused with the time after which to ask again. Nobody waits while there is room for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from sojourn.errors import CapacityExhausted, SojournError
from sojourn.model.nodes import NodeState, Resources
from sojourn.server.cluster import scheduler
from sojourn.server.cluster.members import Members, Reservation
from sojourn.server.cluster.scheduler import Need, Refusal, Settings
from sojourn.telemetry import declared

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_WAITING = 1000
PATIENCE_SECONDS = 30.0
RETRY_AFTER_SECONDS = 10
_FOR_A_NODE = "\0"
"""After a tenant: the queue of those needs that no node would do for."""


class TenantQueue(Generic[T]):
    """What waits, by tenant."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # in the order of turns

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def add(self, tenant: str, item: T) -> None:
        """Wait behind the tenant's others."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def remove(self, tenant: str, item: T) -> None:
        """Wait no more. Idempotent."""
        queue = self._waiting.get(tenant)
        if queue is not None:
            with contextlib.suppress(ValueError):
                queue.remove(item)
            if not queue:
                del self._waiting[tenant]

    def waits(self, tenant: str) -> bool:
        """Whether the tenant has something waiting."""
        return tenant in self._waiting

    def first(self) -> list[T]:
        """The first one of each tenant, in the order of turns."""
        return [queue[0] for queue in self._waiting.values()]

    def admit(self, fits: Callable[[T], bool]) -> None:
        """Take out what `fits`, tenants in turn, each one's first before its next."""
        going = True
        while going:
            going = False
            for tenant in list(self._waiting):
                queue = self._waiting[tenant]
                if not fits(queue[0]):
                    continue
                going = True
                queue.popleft()
                del self._waiting[tenant]
                if queue:  # the others' turn first
                    self._waiting[tenant] = queue


class _Waiting:
    __slots__ = ("need", "placed")

    def __init__(self, need: Need, placed: asyncio.Future[Reservation]) -> None:
        self.need = need
        self.placed = placed


class Admissions:
    """Chooses nodes, now or when there is room. `evict` has one of these nodes, the least full
    first, put away what is idle; it answers which one did."""

    def __init__(
        self,
        members: Members,
        settings: Settings,
        evict: Callable[[list[str], Need], Awaitable[str | None]],
        *,
        patience: float = PATIENCE_SECONDS,
        most: int = MOST_WAITING,
    ) -> None:
        self._members = members
        self._settings = settings
        self._evict = evict
        self._patience = patience
        self._most = most
        self._queue: TenantQueue[_Waiting] = TenantQueue()
        self._evicting = asyncio.Lock()
        self._pump: asyncio.Task[None] | None = None
        self._clearing: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def stop(self) -> None:
        """Idempotent."""
        for task in (self._pump, self._clearing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def place(self, tenant: str, need: Need) -> Reservation:
        """Room for a need. Raises CapacityExhausted."""
        # Who waits for a node that is not there holds up nobody who waits for room.
        tenant += _FOR_A_NODE if self._no_node_would_do(need) else ""
        if not self._queue.waits(tenant):
            found = self._choose(need)
            if isinstance(found, Refusal):
                with contextlib.suppress(SojournError):
                    await self._members.refresh()  # what is known may be a second old
                found = self._choose(need)
            if isinstance(found, Refusal) and found.full:
                found = await self._make_room(found, need)
            if isinstance(found, Reservation):
                return found
        return await self._wait(tenant, need)

    def _choose(self, need: Need) -> Reservation | Refusal:
        found = scheduler.choose(self._members.placeable(), need, self._settings)
        if isinstance(found, Refusal):
            return found
        return self._members.reserve(found, need.resources)

    def _no_node_would_do(self, need: Need) -> bool:
        """Whether no node that sessions are placed on could take it, had it nothing else."""
        settings = self._settings
        placing = [
            node
            for node in self._members.all()
            if node.state is NodeState.READY and not node.lost and node.lease_left > 0
        ]
        return bool(placing) and not any(
            scheduler.unfit(node, need) is None
            and scheduler.fits(node.capacity, Resources(), need.resources, settings)
            for node in placing
        )

    async def _make_room(self, refusal: Refusal, need: Need) -> Reservation | Refusal:
        async with self._evicting:  # one after the other: the first may make room for all
            found = self._choose(need)
            if isinstance(found, Reservation):
                return found
            evicted = await self._evict(refusal.full, need)
            node = None if evicted is None else self._members.find(evicted)
            # The node has the room now, although it has not told of it yet.
            return refusal if node is None else self._members.reserve(node, need.resources)

    async def _wait(self, tenant: str, need: Need) -> Reservation:
        if len(self._queue) >= self._most:
            raise self._exhausted(need, "too many requests wait for room")
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="admissions")
        item = _Waiting(need, asyncio.get_running_loop().create_future())
        self._queue.add(tenant, item)
        try:
            async with asyncio.timeout(self._patience):
                return await item.placed
        except BaseException as error:
            if item.placed.done() and not item.placed.cancelled():
                item.placed.result().cancel()  # it came in the same moment
            if isinstance(error, TimeoutError):
                why = f"none came free in {self._patience:g} s"
                raise self._exhausted(need, why) from None
            raise
        finally:
            self._queue.remove(tenant, item)

    def _exhausted(self, need: Need, why: str) -> CapacityExhausted:
        found = scheduler.choose(self._members.placeable(), need, self._settings)
        said = found.cause if isinstance(found, Refusal) else "room came too late"
        declared.QUEUE_REFUSALS.add()
        return CapacityExhausted(
            f"no node has room for the session, and {why} (of the nodes {said})",
            retry_after=RETRY_AFTER_SECONDS,
        )

    async def _run(self) -> None:
        while True:
            async with self._members.changed:
                await self._members.changed.wait()
            self._queue.admit(self._admit)
            if self._queue.first() and not self._evicting.locked():
                self._clearing = asyncio.create_task(self._clear(), name="make room")

    async def _clear(self) -> None:
        """Make room for those whose turn it is: what was in use when they came may be idle now."""
        for item in self._queue.first():
            found = self._choose(item.need)
            if isinstance(found, Refusal) and found.full:
                found = await self._make_room(found, item.need)
            if isinstance(found, Refusal):
                continue
            if item.placed.done():
                found.cancel()
            else:
                item.placed.set_result(found)

    def _admit(self, item: _Waiting) -> bool:
        if item.placed.done():
            return True  # nobody waits for it any more
        found = self._choose(item.need)
        if isinstance(found, Refusal):
            return False
        item.placed.set_result(found)
        return True
