"""Making room: nodes put away what is idle, or give a session away that has no room with them.

Guarantee: of all nodes that could take a session, one whose sessions have been idle for longest is
asked first, and only sessions whose policy lets calls wake them are put away. What a node has not
answered it has not done, as far as placing is concerned.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from sojourn.database.base import Database
from sojourn.errors import CapacityExhausted
from sojourn.model.nodes import Node
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.queueing import Admissions
from sojourn.server.cluster.scheduler import Need
from sojourn.server.cluster.targets import Target, Targets
from sojourn.server.cluster.upstream import Broken, NotSent, Upstream
from sojourn.wire.nodes import Evicted, EvictRequest, RefreshRequest

log = logging.getLogger(__name__)

_behind: set[asyncio.Task[None]] = set()  # nodes that are still to learn of a change

_EVICT_SECONDS = 60.0
_RELEASE_SECONDS = 120.0
IDLE_STEPS = (300.0, 60.0, 5.0)
"""Seconds without a call after which a session may be put away for another: the longest first, at
all nodes, before the next shorter one."""


class Rooms:
    """Asks nodes for room."""

    def __init__(self, database: Database, members: Members, upstream: Upstream) -> None:
        self._database = database
        self._members = members
        self._upstream = upstream
        self._parts: tuple[Targets, Admissions] | None = None

    def attach(self, targets: Targets, admissions: Admissions) -> None:
        """Know what places sessions."""
        self._parts = (targets, admissions)

    async def evict(self, nodes: list[str], need: Need) -> str | None:
        """The node of these that has room now."""
        for idle in IDLE_STEPS:
            body = msgspec.json.encode(EvictRequest(need.resources, idle))
            for id in nodes:
                node = self._members.find(id)
                if node is None or not self._members.alive(id):
                    continue
                try:
                    status, said = await self._upstream.call(
                        node, b"POST", b"/node/evict", body, timeout=_EVICT_SECONDS
                    )
                    evicted = msgspec.json.decode(said, type=Evicted) if status == 200 else None
                except (NotSent, Broken, msgspec.MsgspecError) as error:
                    log.warning("node %s cannot be asked for room: %s", node.name, error)
                    continue
                if evicted is not None and evicted.room:
                    log.info("node %s put away %s", node.name, ", ".join(evicted.sessions))
                    return id
        return None

    async def elsewhere(self, tenant: str | None, ref: str, full: Node) -> Target:
        """Where a session goes whose holder has no room for it: there, when room was made, else to
        another node, to which it is given. Raises CapacityExhausted."""
        assert self._parts is not None
        targets, admissions = self._parts
        session = await self._database.get_session(tenant, ref)
        need = await targets.need(session)
        need = msgspec.structs.replace(need, affinity=full.id, avoid=frozenset())
        reservation = await admissions.place(session.tenant, need)
        if reservation.node.id != full.id:
            try:
                await self._release(session.id, full)
            except BaseException:
                reservation.cancel()
                raise
            targets.forget(tenant, ref)
        return Target(reservation.node, reservation, session)

    async def _release(self, session: str, node: Node) -> None:
        path = f"/node/sessions/{session}/release".encode()
        try:
            status, said = await self._upstream.call(node, b"POST", path, timeout=_RELEASE_SECONDS)
        except (NotSent, Broken) as error:
            raise CapacityExhausted(
                f"the session's node is full and does not answer: {error}", retry_after=5
            ) from error
        if status >= 300:
            raise CapacityExhausted(
                "the session's node is full and cannot give it away yet:"
                f" {said[:300].decode(errors='replace')}",
                retry_after=10,
            )


async def refresh_all(
    members: Members, upstream: Upstream, what: str, but: str | None, *, seconds: float
) -> list[str]:
    """Have all nodes that serve, but one, look anew at what was changed; which of them have not
    answered in time. They are asked on, for as long as they serve."""
    body = msgspec.json.encode(RefreshRequest(what))

    async def one(node: Node) -> None:
        pause = 0.1
        while members.alive(node.id):
            try:
                status, _ = await upstream.call(node, b"POST", b"/node/refresh", body, timeout=10.0)
                if status < 300:
                    return
            except (NotSent, Broken) as error:
                log.warning("node %s is not told of changed %s yet: %s", node.name, what, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)
        # Without a lease it lets nothing out, and looks by itself before it has one again.

    asked = {
        asyncio.create_task(one(node), name=f"tell {node.name}"): node.name
        for node in members.living()
        if node.id != but
    }
    if not asked:
        return []
    for task in asked:  # also when whoever changed it leaves
        _behind.add(task)
        task.add_done_callback(_behind.discard)
    _, late = await asyncio.wait(asked, timeout=seconds)
    return [asked[task] for task in late]
