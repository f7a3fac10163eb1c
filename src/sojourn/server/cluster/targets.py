"""Which node a request goes to.

Guarantee: a request for a session goes to the node that holds it, as the database says it, or to
one that was chosen to take it; what a server remembers of holders only saves looking, since a node
refuses what it does not hold. While the holder is gone and nobody has its sessions yet, requests
wait, for PATIENCE_SECONDS at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from sojourn.database.base import Database
from sojourn.errors import (
    NodeUnavailable,
    OperationNotFound,
    SessionNotFound,
    SnapshotNotFound,
)
from sojourn.model.nodes import Node
from sojourn.model.sessions import Limits, Session
from sojourn.server.cluster import scheduler
from sojourn.server.cluster.members import Members, Reservation
from sojourn.server.cluster.queueing import Admissions
from sojourn.server.cluster.scheduler import Need, Settings

PATIENCE_SECONDS = 45.0
_LOOK_SECONDS = 0.25
_MOST = 100_000
_FINISHED = ("succeeded", "failed")
_WITHOUT_BOUND = Settings(cpus=1e9, memory=1e9, disk=1e9)


class Target(msgspec.Struct, frozen=True):
    """A node; with a reservation where something is placed there, with the session it is about
    where that is known."""

    node: Node
    reservation: Reservation | None = None
    session: Session | None = None


class Targets:
    """Finds nodes for requests."""

    def __init__(self, database: Database, members: Members, admissions: Admissions) -> None:
        self._database = database
        self._members = members
        self._admissions = admissions
        self._holders: dict[tuple[str | None, str], str] = {}
        self._turn = 0

    # -- any node ---------------------------------------------------------------------------

    def any(self, avoid: Iterable[str] = ()) -> Node:
        """A node that serves, another one each time. Raises NodeUnavailable."""
        living = self._members.living()
        usable = [node for node in living if node.id not in avoid] or living
        if not usable:
            raise NodeUnavailable("no node of the cluster serves")
        self._turn += 1
        return sorted(usable, key=lambda node: node.id)[self._turn % len(usable)]

    def others(self, asked: Iterable[str]) -> bool:
        """Whether there are nodes that serve and were not asked."""
        return any(node.id not in asked for node in self._members.living())

    # -- new sessions -----------------------------------------------------------------------

    async def place(self, tenant: str, need: Need) -> Target:
        """A node for a new session. Raises CapacityExhausted."""
        reservation = await self._admissions.place(tenant, need)
        return Target(reservation.node, reservation)

    # -- sessions there are -----------------------------------------------------------------

    def forget(self, tenant: str | None, ref: str) -> None:
        """The holder that was remembered is another one by now."""
        self._holders.pop((tenant, ref), None)

    async def holder(
        self, tenant: str | None, ref: str, *, wakes: bool, deadline: float, avoid: frozenset[str]
    ) -> Target:
        """The node for a request about a session; `wakes`: it may need room there. Raises
        NodeUnavailable when the holder is gone for too long, CapacityExhausted."""
        known = self._holders.get((tenant, ref))
        if known is not None and self._members.alive(known):
            node = self._members.find(known)
            if node is not None:
                return Target(node)
        while True:
            try:
                session = await self._database.get_session(tenant, ref)
            except SessionNotFound:
                # Also deleted ones, of which nodes know how they ended.
                return Target(self.any(avoid))
            holder = session.holder
            if holder is None:
                return await self._taker(session, wakes=wakes, avoid=avoid)
            if not self._members.alive(holder):
                await self._members.refresh()
            node = self._members.find(holder)
            if node is not None and self._members.alive(holder):
                self._remember(tenant, ref, holder)
                return Target(node, session=session)
            if time.monotonic() >= deadline:
                raise NodeUnavailable(
                    f"the node of session {session.id} does not answer", node=holder, retry_after=5
                )
            await asyncio.sleep(_LOOK_SECONDS)

    def _remember(self, tenant: str | None, ref: str, holder: str) -> None:
        if len(self._holders) >= _MOST:
            self._holders.clear()
        self._holders[(tenant, ref)] = holder

    async def _taker(self, session: Session, *, wakes: bool, avoid: frozenset[str]) -> Target:
        need = await self.need(session, avoid)
        if not wakes:
            # Looking at a session, or removing it, takes no room.
            found = scheduler.choose(self._members.all(), need, _WITHOUT_BOUND)
            if isinstance(found, Node):
                return Target(found, session=session)
        reservation = await self._admissions.place(session.tenant, need)
        return Target(reservation.node, reservation, session)

    async def need(self, session: Session, avoid: frozenset[str] = frozenset()) -> Need:
        """What a session that nobody holds asks of a node."""
        affinity = runtime = None
        cpu: frozenset[str] = frozenset()
        if session.head is not None:
            try:
                head = await self._database.get_snapshot(None, session.head, hidden=True)
            except SnapshotNotFound:
                head = None
            if head is not None and head.node is not None:
                affinity = head.node
                before = self._members.find(head.node)
                if head.has_memory and before is not None:
                    # Memory runs where it was taken, and where the machine is no less.
                    runtime, cpu = before.runtime, frozenset(before.cpu)
        need = scheduler.need_of(session.limits, session.labels, affinity=affinity, avoid=avoid)
        strict = msgspec.structs.replace(need, runtime=runtime, cpu=cpu)
        if any(scheduler.unfit(node, strict) is None for node in self._members.all()):
            return strict
        return need  # whichever node takes it says what it lacks

    # -- operations -------------------------------------------------------------------------

    async def runner(self, tenant: str | None, operation: str, *, deadline: float) -> Target:
        """The node that runs an operation; any one for one that is over. Raises
        NodeUnavailable."""
        while True:
            try:
                found = await self._database.get_operation(tenant, operation)
            except OperationNotFound:
                return Target(self.any())
            if str(found.state) in _FINISHED:
                return Target(self.any())
            if not self._members.alive(found.server):
                await self._members.refresh()
            node = self._members.find(found.server)
            if node is not None and self._members.alive(found.server):
                return Target(node)
            if time.monotonic() >= deadline:
                raise NodeUnavailable(
                    f"the node of operation {operation} does not answer",
                    node=found.server,
                    retry_after=5,
                )
            await asyncio.sleep(_LOOK_SECONDS)


def new_need(
    limits: Limits | None, labels: dict[str, str], avoid: frozenset[str] = frozenset()
) -> Need:
    """The need of a session that is to be made."""
    return scheduler.need_of(limits or Limits(), labels, avoid=avoid)
