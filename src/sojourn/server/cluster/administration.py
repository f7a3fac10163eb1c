"""What a server answers itself: nodes, and the cluster at a glance.

Guarantee: only the operator sees or changes nodes. What is to be placed on a node holds at every
server when the change is answered. A node that still holds sessions is not removed
unless that is said expressly, since what the object store does not have of them would be lost.
"""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version
from typing import cast

import msgspec
from litestar import Litestar
from litestar.types import ASGIApp

from sojourn.database.base import Database
from sojourn.database.records import Role
from sojourn.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NameTaken,
    NodeNotFound,
    Unauthenticated,
)
from sojourn.model.nodes import Node, NodeState, Resources
from sojourn.server.answers import Shutdown, empty_answer, json_answer
from sojourn.server.app import all_endpoints, endpoint_app
from sojourn.server.base import Principal, SessionService
from sojourn.server.cluster import callers
from sojourn.server.cluster.callers import Callers
from sojourn.server.cluster.joining import Joining
from sojourn.server.cluster.members import POLL_SECONDS, Members
from sojourn.server.cluster.upstream import Broken, NotSent, Upstream
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.openapi import openapi_handler
from sojourn.server.queries import Query
from sojourn.server.routes import service as service_routes
from sojourn.wire.api import StatusInfo
from sojourn.wire.nodes import (
    AuthorityInfo,
    CreateNodeToken,
    JoinAnswer,
    JoinRequest,
    NodeInfo,
    NodeResources,
    NodeTokenInfo,
    RenewAnswer,
    RenewRequest,
)

log = logging.getLogger(__name__)

_STATUS_SECONDS = 3.0
_MAX_LABELS = 64


class Administration:
    """The nodes of a cluster, for its operator."""

    def __init__(
        self,
        database: Database,
        callers: Callers,
        members: Members,
        upstream: Upstream,
        joining: Joining,
    ) -> None:
        self._database = database
        self._callers = callers
        self._members = members
        self._upstream = upstream
        self.joining = joining

    async def authenticate(self, token: str | None) -> Principal:
        """Who a token stands for. Raises Unauthenticated."""
        return await self._callers.authenticate(token)

    def _operator(self, who: Principal) -> None:
        if who.role != Role.OPERATOR:
            raise Forbidden("only the operator manages nodes")

    async def list(self, who: Principal) -> list[NodeInfo]:
        """All nodes."""
        self._operator(who)
        await self._members.refresh()
        return [await self._told(node) for node in self._members.all()]

    async def _told(self, node: Node) -> NodeInfo:
        told = node_info(node)
        if node.state is not NodeState.DRAINING:
            return told
        # What is put away counts, too: it may not be in the object store yet.
        held = await self._database.list_sessions(None, holder=node.id, limit=1)
        return told if held.items else msgspec.structs.replace(told, state="drained")

    async def set_state(self, who: Principal, ref: str, state: NodeState) -> NodeInfo:
        """Have a node take sessions, none, or give away those it has."""
        self._operator(who)
        node = await self._database.set_node_state(ref, state)
        await self._hint(node)
        # Then every server has read it: none places anything there that should not be.
        await asyncio.sleep(1.5 * POLL_SECONDS)
        await self._members.refresh()
        return node_info(node)

    async def remove(self, who: Principal, ref: str, *, force: bool) -> None:
        """Take a node out of the cluster."""
        self._operator(who)
        node = await self._database.get_node(ref)
        counts = await self._database.count_sessions(holder=node.id)
        held = sum(counts.values())
        if held and not force:
            raise Conflict(
                f"node {node.name} holds {held} sessions",
                next_step="Drain it first (`sojourn node drain`), or remove it with --force: its"
                " sessions then go on elsewhere from what the object store has of them.",
                sessions=held,
            )
        await self._database.set_node_state(node.id, NodeState.REMOVED)
        await self._members.refresh()

    async def make_token(self, who: Principal, labels: dict[str, str]) -> NodeTokenInfo:
        """A token that lets one node join."""
        self._operator(who)
        if len(labels) > _MAX_LABELS:
            raise InvalidRequest(f"at most {_MAX_LABELS} labels", field="labels")
        return await self.joining.make_token(labels)

    async def _hint(self, node: Node) -> None:
        """Have a node look at its state now; it does so by itself at its next renewal."""
        if not self._members.alive(node.id):
            return
        try:
            await self._upstream.call(node, b"POST", b"/node/operations", timeout=3.0)
        except (NotSent, Broken) as error:
            log.info("node %s is not told yet: %s", node.name, error)

    async def status(self, who: Principal) -> StatusInfo:
        """The cluster at a glance: what its nodes tell, added up."""
        header = [(callers.HEADER, callers.encode_principal(who))]

        async def ask(node: Node) -> StatusInfo | None:
            try:
                status, body = await self._upstream.call(
                    node, b"GET", b"/v1/status", headers=header, timeout=_STATUS_SECONDS
                )
                return msgspec.json.decode(body, type=StatusInfo) if status == 200 else None
            except (NotSent, Broken, msgspec.MsgspecError) as error:
                log.warning("node %s does not tell its status: %s", node.name, error)
                return None

        living = self._members.living()
        told = [one for one in await asyncio.gather(*map(ask, living)) if one is not None]
        tenant = None if who.role == Role.OPERATOR else who.tenant
        counts = await self._database.count_sessions(tenant)
        objects = next((one.objects for one in told if one.objects is not None), None)
        if objects is not None:
            sent = sum(one.objects.sent_bytes for one in told if one.objects is not None)
            objects = msgspec.structs.replace(objects, sent_bytes=sent, in_data=False)
        drivers: dict[str, set[str]] = {}
        for one in told:
            for name, capabilities in one.drivers.items():
                drivers.setdefault(name, set()).update(capabilities)
        return StatusInfo(
            version=version("sojourn"),
            node=f"{len(living)} of {len(self._members.all())} nodes serve",
            drivers={name: sorted(found) for name, found in drivers.items()},
            sessions={str(state): count for state, count in counts.items()},
            sandboxes=sum(one.sandboxes for one in told),
            disk_free_bytes=sum(one.disk_free_bytes for one in told),
            store_bytes=sum(one.store_bytes for one in told),
            objects=objects,
            database=next((one.database for one in told if one.database is not None), None),
        )


def node_info(node: Node) -> NodeInfo:
    """A node as the API shows it."""
    return NodeInfo(
        id=node.id,
        name=node.name,
        address=node.address,
        state=str(node.state),
        ready=node.state is NodeState.READY and not node.lost and node.lease_left > 0,
        lost=node.lost,
        lease_left=round(max(node.lease_left, 0.0), 3),
        labels=node.labels,
        taints=list(node.taints),
        capacity=_resources(node.capacity),
        used=_resources(node.used),
        runtime=node.runtime,
        version=node.version,
        joined_at=node.joined_at,
        seen_at=node.seen_at,
    )


def _resources(found: Resources) -> NodeResources:
    return NodeResources(found.cpus, found.memory_bytes, found.disk_bytes, found.sessions)


# -- endpoints ----------------------------------------------------------------------------------


def _service(call: Call) -> Administration:
    return cast(Administration, call.service)


@endpoint(
    "GET",
    "/v1/nodes",
    "List the nodes (operator)",
    answers={200: list[NodeInfo]},
    errors=(Forbidden,),
)
async def nodes(call: Call) -> ASGIApp:
    return json_answer(await _service(call).list(call.who))


def _state_endpoint(verb: str, state: NodeState, summary: str) -> Endpoint:
    async def change(call: Call) -> ASGIApp:
        ref = str(call.parameters["node"])
        return json_answer(await _service(call).set_state(call.who, ref, state))

    change.__name__ = verb
    return endpoint(
        "POST",
        f"/v1/nodes/{{node}}/{verb}",
        summary,
        answers={200: NodeInfo},
        errors=(Forbidden, NodeNotFound),
    )(change)


cordon = _state_endpoint(
    "cordon", NodeState.CORDONED, "Place nothing new on a node; it keeps what it has (operator)"
)
uncordon = _state_endpoint("uncordon", NodeState.READY, "Place sessions on a node again (operator)")
drain = _state_endpoint(
    "drain", NodeState.DRAINING, "Have a node give all its sessions to others (operator)"
)


@endpoint(
    "DELETE",
    "/v1/nodes/{node}",
    "Remove a node from the cluster (operator)",
    answers={204: None},
    query={
        "force": Query("bool", "Also while it holds sessions.", default=False),
    },
    errors=(Forbidden, NodeNotFound, Conflict),
)
async def remove(call: Call) -> ASGIApp:
    ref = str(call.parameters["node"])
    await _service(call).remove(call.who, ref, force=call.query["force"])
    return empty_answer()


@endpoint(
    "POST",
    "/v1/nodes/tokens",
    "Make a token that lets one node join (operator)",
    body=CreateNodeToken,
    answers={201: NodeTokenInfo},
    errors=(Forbidden, InvalidRequest),
    example={"labels": {"zone": "a"}},
)
async def create_token(call: Call, body: CreateNodeToken) -> ASGIApp:
    return json_answer(await _service(call).make_token(call.who, dict(body.labels)), 201)


@endpoint(
    "GET",
    "/v1/nodes/authority",
    "The certificate of the cluster's authority; where nodes join",
    answers={200: AuthorityInfo},
    public=True,
)
async def authority(call: Call) -> ASGIApp:
    return json_answer(_service(call).joining.authority())


@endpoint(
    "POST",
    "/v1/nodes/join",
    "Become a node; where nodes join",
    body=JoinRequest,
    answers={201: JoinAnswer},
    errors=(InvalidRequest, NameTaken, Unauthenticated),
    public=True,
)
async def join(call: Call, body: JoinRequest) -> ASGIApp:
    return json_answer(await _service(call).joining.join(body), 201)


@endpoint(
    "POST",
    "/v1/nodes/renew",
    "Renew a node's certificate; where nodes join",
    body=RenewRequest,
    answers={200: RenewAnswer},
    errors=(InvalidRequest, Unauthenticated),
    public=True,
)
async def renew(call: Call, body: RenewRequest) -> ASGIApp:
    return json_answer(await _service(call).joining.renew(body))


NODE_ENDPOINTS: list[Endpoint] = [nodes, cordon, uncordon, drain, remove, create_token]
"""What an operator asks of a server."""
JOIN_ENDPOINTS: list[Endpoint] = [authority, join, renew]
"""What nodes ask, over TLS alone."""


def own_app(service: Administration, shutdown: Shutdown) -> Litestar:
    """What a server answers itself."""
    declared = [service_routes.health, service_routes.status, *NODE_ENDPOINTS]
    document = openapi_handler([*all_endpoints(), *NODE_ENDPOINTS])
    return endpoint_app(cast(SessionService, service), declared, shutdown, document)


def joining_app(service: Administration, shutdown: Shutdown) -> Litestar:
    """What is answered where nodes join."""
    declared = [service_routes.health, *JOIN_ENDPOINTS]
    return endpoint_app(cast(SessionService, service), declared, shutdown)
