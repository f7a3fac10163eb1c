"""Nodes, their leases and fences, and whose a session is.

Guarantee: a session is one node's at a time, or nobody's, and every change of that grows its epoch,
so a node that acts on what it knew before is refused by the swap as well as by its fence. A lease
is judged by the database's clock as it was when the transaction began, before anything was waited
for: a node is never taken for lost because the question had to wait.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sojourn.database.apply import apply
from sojourn.database.begin import elsewhere
from sojourn.database.engine import Duplicate, Reader, Statements, Writer, touched
from sojourn.database.failover import take_over
from sojourn.database.fences import fenced
from sojourn.database.rows import NODES, OPERATIONS, SESSIONS, SNAPSHOTS, decode_labels, encode_json
from sojourn.database.writes import FinishOperation
from sojourn.errors import (
    Conflict,
    NameTaken,
    NodeFenced,
    NodeNotFound,
    SessionBusy,
    SessionNotFound,
    StaleEpoch,
    Unauthenticated,
    WrongState,
)
from sojourn.model.nodes import FailedOver, Fence, Node, NodeState, Resources
from sojourn.model.sessions import Session, SessionState


class NodeRows:
    """A part of `SqlDatabase`."""

    _reader: Reader
    _writer: Writer

    def _tell(self, grown: Collection[str]) -> None:
        raise NotImplementedError

    # -- nodes ------------------------------------------------------------------------------
    async def add_node(
        self,
        id: str,
        name: str,
        *,
        address: str = "",
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] = (),
    ) -> Node:
        parameters = {
            "id": id,
            "name": name,
            "address": address,
            "labels": encode_json(dict(labels or {})),
            "taints": encode_json(list(taints)),
        }

        def work(statements: Statements) -> Node:
            try:
                statements.run("insert_node", parameters)
            except Duplicate as error:
                if error.column == "nodes.name":
                    raise NameTaken(f"another node is named {name!r}", name=name) from error
                raise Conflict(f"node {id} exists already", node=id) from error
            statements.run("insert_fence", {"node": id})
            return _node(statements, id)

        return await self._writer.submit(work, durable=True, fence=None)

    async def start_node(
        self,
        id: str,
        *,
        address: str,
        capacity: Resources,
        runtime: str | None,
        cpu: Sequence[str],
        version: str,
        lease: float,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[str] | None = None,
    ) -> Node:
        parameters = {
            "id": id,
            "address": address,
            "capacity": encode_json(capacity),
            "runtime": runtime,
            "cpu": encode_json(list(cpu)),
            "version": version,
            "lease": float(lease),
            "labels": None if labels is None else encode_json(dict(labels)),
            "taints": None if taints is None else encode_json(list(taints)),
        }

        def work(statements: Statements) -> Node:
            rows = statements.run("start_node", parameters)
            if not rows:
                raise _no_node(id)
            statements.run("set_fence", {"node": id, "incarnation": rows[0][0]})
            return _node(statements, id)

        return await self._writer.submit(work, durable=True, fence=None)

    async def renew_node(
        self, fence: Fence, *, lease: float, used: Resources | None = None
    ) -> Node:
        parameters = {
            "id": fence.node,
            "incarnation": fence.incarnation,
            "lease": float(lease),
            "used": None if used is None else encode_json(used),
        }

        def work(statements: Statements) -> Node:
            if not statements.run("renew_node", parameters):
                raise fenced(fence)
            return _node(statements, fence.node)

        try:
            return await self._writer.submit(work, durable=True, fence=None, apart=True)
        except NodeFenced:
            self._writer.fences.note(fence)
            raise

    async def stop_node(self, fence: Fence) -> None:
        parameters = {"id": fence.node, "incarnation": fence.incarnation}

        def work(statements: Statements) -> None:
            if not statements.run("stop_node", parameters):
                raise fenced(fence)

        await self._writer.submit(work, durable=True, fence=None)

    async def list_nodes(self) -> list[Node]:
        return [NODES.read(row) for row in await self._reader.select("list_nodes", {})]

    async def get_node(self, id_or_name: str) -> Node:
        rows = await self._reader.lookup("find_node", {"key": id_or_name})
        if not rows:
            raise _no_node(id_or_name)
        return NODES.read(rows[0])

    async def set_node_state(self, id_or_name: str, state: NodeState) -> Node:
        id = (await self.get_node(id_or_name)).id

        def work(statements: Statements) -> Node:
            if not statements.run("set_node_state", {"id": id, "state": str(state)}):
                raise _no_node(id_or_name)
            if state is NodeState.REMOVED:
                _fence(statements, id)
            return _node(statements, id)

        return await self._writer.submit(work, durable=True)

    # -- joining and what all share ---------------------------------------------------------
    async def add_node_token(
        self, id: str, digest: str, *, expires_at: float, labels: Mapping[str, str] | None = None
    ) -> None:
        parameters = {
            "id": id,
            "digest": digest,
            "expires_at": float(expires_at),
            "labels": encode_json(dict(labels or {})),
        }

        def work(statements: Statements) -> None:
            statements.run("prune_node_tokens")
            statements.run("insert_node_token", parameters)

        await self._writer.submit(work, durable=True)

    async def use_node_token(self, id: str, digest: str) -> dict[str, str]:
        def work(statements: Statements) -> dict[str, str]:
            rows = statements.run("use_node_token", {"id": id, "digest": digest})
            if not rows:
                raise Unauthenticated(
                    "the token to join is unknown, used or too old",
                    next_step="Make another one with `sojourn node token`.",
                )
            return decode_labels(rows[0][0])

        return await self._writer.submit(work, durable=True)

    async def cluster_value(self, name: str) -> bytes | None:
        rows = await self._reader.lookup("cluster_value", {"name": name})
        return bytes(rows[0][0]) if rows else None

    async def replace_cluster_value(self, name: str, value: bytes) -> None:
        def work(statements: Statements) -> None:
            statements.run("replace_cluster_value", {"name": name, "value": value})

        await self._writer.submit(work, durable=True)

    async def put_cluster_value(self, name: str, value: bytes) -> bytes:
        def work(statements: Statements) -> bytes:
            statements.run("put_cluster_value", {"name": name, "value": value})
            return bytes(statements.run("cluster_value", {"name": name})[0][0])

        return await self._writer.submit(work, durable=True)

    async def hold_duty(self, name: str, node: str, *, lease: float) -> bool:
        parameters = {"name": name, "node": node, "lease": float(lease)}

        def work(statements: Statements) -> bool:
            return bool(statements.run("hold_duty", parameters))

        return bool(await self._writer.submit(work, durable=True))

    # -- whose a session is -----------------------------------------------------------------
    async def take_session(self, id: str, fence: Fence, epoch: int) -> Session:
        swap = {"id": id, "holder": fence.node, "epoch": epoch, "now": time.time()}

        def work(statements: Statements) -> Session:
            rows = statements.run("take_session", swap)
            if rows:
                return SESSIONS.read(rows[0])
            found = _session(statements, id)
            if found.holder == fence.node and found.epoch in (epoch, epoch + 1):
                return found  # it was taken before, and the answer was lost
            if found.holder is not None:
                raise elsewhere(id, found.holder)
            raise _not_so(found, epoch)

        touches = touched((), sessions=[id])
        return await self._writer.submit(work, durable=True, touches=touches, fence=fence)

    async def release_session(
        self, id: str, fence: Fence, epoch: int, *, within: str | None = None
    ) -> Session:
        swap = {"id": id, "holder": fence.node, "epoch": epoch, "now": time.time()}

        def work(statements: Statements) -> Session:
            return _release(statements, fence, swap, within)

        touches = touched([] if within is None else [FinishOperation(within)], sessions=[id])
        return await self._writer.submit(work, durable=True, touches=touches, fence=fence)

    # -- lost nodes -------------------------------------------------------------------------
    async def lose_node(self, grace: float, *, within: float | None = None) -> Node | None:
        asked = _boottime()
        # Mostly there is none, which needs no transaction that is synced.
        if not await self._reader.select("nodes_to_lose", {"grace": float(grace)}):
            return None

        def work(statements: Statements) -> Node | None:
            # Looked at after the transaction began, which is when leases are judged, and anew
            # where it is tried again.
            if within is not None and _boottime() - asked > within:
                return None
            rows = statements.run("late_node", {"grace": float(grace)})
            if rows:
                _fence(statements, rows[0][0])
            else:
                rows = statements.run("lost_node_with_work")
            return _node(statements, rows[0][0]) if rows else None

        return await self._writer.submit(work, durable=True)

    async def fail_over(self, node: str, limit: int = 100) -> list[FailedOver]:
        def told(moved: list[FailedOver]) -> None:
            self._tell([one.session for one in moved])

        def work(statements: Statements) -> list[FailedOver]:
            return take_over(statements, node, limit)

        return await self._writer.submit(work, durable=True, then=told)


def _boottime() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _no_node(id_or_name: str) -> NodeNotFound:
    return NodeNotFound(f"node {id_or_name!r} does not exist", node=id_or_name)


def _node(statements: Statements, id: str) -> Node:
    return NODES.read(statements.run("node_row", {"id": id})[0])


def _fence(statements: Statements, id: str) -> None:
    """The node is lost. Waits for what it has under way; what comes later is refused."""
    incarnation = statements.run("mark_lost", {"id": id})[0][0]
    statements.run("set_fence", {"node": id, "incarnation": incarnation})


def _session(statements: Statements, id: str) -> Session:
    rows = statements.run("session_row", {"id": id})
    found = SESSIONS.read(rows[0]) if rows else None
    if found is None or found.state is SessionState.DELETED:
        raise SessionNotFound(f"session {id!r} does not exist", session=id)
    return found


def _not_so(found: Session, epoch: int) -> StaleEpoch | WrongState:
    if found.epoch != epoch:
        return StaleEpoch(
            f"session {found.id} is at epoch {found.epoch}, not {epoch}",
            session=found.id,
            epoch=found.epoch,
            expected=epoch,
        )
    return WrongState(
        f"session {found.id} is {found.state}, not suspended or failed",
        session=found.id,
        state=str(found.state),
    )


def _release(
    statements: Statements, fence: Fence, swap: dict[str, Any], within: str | None
) -> Session:
    found = _session(statements, swap["id"])
    if found.holder != fence.node:
        raise elsewhere(found.id, found.holder)
    if within is not None:
        apply(statements, [FinishOperation(within)])
    unfinished = statements.run(
        "operations_of_session", {"server": fence.node, "session": found.id}
    )
    if unfinished:
        operation = OPERATIONS.read(unfinished[0])
        raise SessionBusy(
            f"session {found.id} is held by {operation.verb} ({operation.id})",
            session=found.id,
            operation=operation.id,
            verb=operation.verb,
        )
    if found.head is not None:
        head = SNAPSHOTS.read(statements.run("snapshot_row", {"id": found.head})[0])
        if head.durable_at is None:
            raise Conflict(
                f"the object store does not have the head of session {found.id} yet",
                next_step="Wait until it is durable.",
                session=found.id,
                snapshot=found.head,
            )
    rows = statements.run("release_session", swap)
    if not rows:
        raise _not_so(found, swap["epoch"])
    return SESSIONS.read(rows[0])
