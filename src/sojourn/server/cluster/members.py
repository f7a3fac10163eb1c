"""The nodes as a server knows them.

Guarantee: what is said of a node is never older than POLL_SECONDS and the time one read takes, by
this machine's clock; a lease is counted from before it was read, so a node never seems to have more
of it than it has. What was placed on a node lately counts as used until the node tells of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from sojourn.database.base import Database
from sojourn.model.nodes import Node, Resources
from sojourn.server.cluster import scheduler
from sojourn.server.repeating import repeat

POLL_SECONDS = 1.0
_RESERVED_SECONDS = 8.0
"""Longer than a node takes to tell of a sandbox by its next renewal."""


class Members:
    """Reads the nodes again and again. `gone` is told of a node that was lost, removed or started
    anew, and until when (by the monotonic clock) what was sent went to the one that is gone."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._nodes: dict[str, Node] = {}
        self._read_at = 0.0
        self._reserved: dict[Reservation, None] = {}
        self._reading: asyncio.Task[None] | None = None
        self._loop: asyncio.Task[None] | None = None
        self.changed = asyncio.Condition()
        self.gone: Callable[[Node, float], None] = lambda node, until: None

    # -- reading ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Read them, and go on doing so."""
        await self.refresh()
        self._loop = asyncio.create_task(
            repeat(POLL_SECONDS, self.refresh, "reading the nodes", at_once=False), name="nodes"
        )

    async def stop(self) -> None:
        """Idempotent."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    async def refresh(self) -> None:
        """Read them now; many that ask at once share one read. Raises what the database raises."""
        reading = self._reading
        if reading is None or reading.done():
            reading = self._reading = asyncio.create_task(self._read(), name="read nodes")
        await asyncio.shield(reading)

    async def _read(self) -> None:
        began = time.monotonic()
        found = {node.id: node for node in await self._database.list_nodes()}
        earlier = self._read_at
        before, self._nodes, self._read_at = self._nodes, found, began
        for node in before.values():
            now = found.get(node.id)
            ended = now is None or now.lost or now.incarnation != node.incarnation
            if ended and node.seen_at is not None and (now is None or not node.lost):
                # One that started anew may be answering already; before it was read it was not.
                self.gone(node, math.inf if now is None or now.lost else earlier)
        async with self.changed:
            self.changed.notify_all()

    # -- looking ----------------------------------------------------------------------------

    def all(self) -> list[Node]:
        """All, as they are now."""
        passed = time.monotonic() - self._read_at
        return [
            msgspec.structs.replace(node, lease_left=node.lease_left - passed)
            for node in self._nodes.values()
        ]

    def find(self, id: str) -> Node | None:
        """One, as it was read."""
        return self._nodes.get(id)

    def alive(self, id: str) -> bool:
        """Whether its lease is valid."""
        node = self._nodes.get(id)
        return (
            node is not None
            and not node.lost
            and node.lease_left > time.monotonic() - self._read_at
        )

    def living(self) -> list[Node]:
        """Those whose lease is valid, whatever may be placed on them."""
        return [node for node in self._nodes.values() if self.alive(node.id)]

    def placeable(self) -> list[Node]:
        """All, with what was placed on them lately."""
        now = time.monotonic()
        nodes = {node.id: node for node in self.all()}
        for one in list(self._reserved):
            node = nodes.get(one.node.id)
            if node is None or one.told(node, now):
                self._drop(one)
            else:
                nodes[node.id] = scheduler.add(node, one.resources)
        return list(nodes.values())

    def reserve(self, node: Node, resources: Resources) -> Reservation:
        """Count something as used that is about to be placed on a node."""
        one = Reservation(self, node, resources)
        self._reserved[one] = None
        return one

    def _drop(self, one: Reservation) -> None:
        self._reserved.pop(one, None)


class Reservation:
    """Room on a node, until it is settled or given up."""

    __slots__ = ("_members", "_renewals", "_seen_at", "_until", "node", "resources")

    def __init__(self, members: Members, node: Node, resources: Resources) -> None:
        self._members = members
        self.node = node
        self.resources = resources
        self._until: float | None = None
        self._seen_at: float | None = None
        self._renewals = 0

    def settle(self) -> None:
        """It was placed: the node will tell of it."""
        self._until = time.monotonic() + _RESERVED_SECONDS
        node = self._members.find(self.node.id)
        self._seen_at = None if node is None else node.seen_at

    def told(self, node: Node, now: float) -> bool:
        """Whether the node, as it is known now, has told of it."""
        if self._until is None:
            return False
        if node.seen_at != self._seen_at:
            self._seen_at = node.seen_at
            self._renewals += 1
        # The first renewal that is seen may have been made just before it was placed.
        return self._renewals >= 2 or now >= self._until

    def cancel(self) -> None:
        """It was not placed. Without effect once it is settled."""
        if self._until is None:
            self._members._drop(self)
