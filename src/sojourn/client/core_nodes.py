"""Plans about the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from sojourn.client.core import JSON_TYPE, Plan, Request, act, decode, get, json_body, segment
from sojourn.wire.nodes import CreateNodeToken, NodeInfo, NodeTokenInfo


def nodes() -> Plan[list[NodeInfo]]:
    """All nodes."""
    found: list[NodeInfo] = yield from get("/v1/nodes", list[NodeInfo])
    return found


def set_state(ref: str, verb: str) -> Plan[NodeInfo]:
    """Cordon, uncordon or drain a node."""
    response = yield Request(b"POST", f"/v1/nodes/{segment(ref)}/{verb}", repeatable=True)
    info: NodeInfo = decode(response, NodeInfo)
    return info


def remove(ref: str, *, force: bool) -> Plan[None]:
    """Take a node out of the cluster."""
    yield from act(b"DELETE", f"/v1/nodes/{segment(ref)}", force=force or None)


def create_token(labels: Mapping[str, str]) -> Plan[NodeTokenInfo]:
    """A token that lets one node join."""
    body = CreateNodeToken(labels=dict(labels))
    response = yield Request(b"POST", "/v1/nodes/tokens", (JSON_TYPE,), json_body(body))
    info: NodeTokenInfo = decode(response, NodeTokenInfo)
    return info
