"""The tools for what a session reaches.

Guarantee: a model widens no session's network by itself: that takes `sojourn mcp --allow-network`,
since what runs in a session, or is read there, may have asked it to. Secrets and bounds of a policy
stay as the user set them.
"""

from __future__ import annotations

import msgspec

from sojourn.client.core_networks import network_of
from sojourn.errors import Forbidden, InvalidRequest
from sojourn.mcp import arguments, results
from sojourn.mcp.calls import Call
from sojourn.mcp.texts import clipped
from sojourn.model.network import NetworkMode, NetworkPolicy
from sojourn.wire.api import EffectInfo, EffectsLeft

EFFECTS_TOLD = 20


async def get(call: Call, given: arguments.Own) -> results.NetworkResult:
    """network_get."""
    session = await call.session(given.session)
    return _told(session.id, session.network)


async def change(call: Call, given: arguments.NetworkSet) -> results.NetworkResult:
    """network_set."""
    session = await call.session(given.session)
    wanted = network_of(given.network)
    if wanted is None:
        raise InvalidRequest("no network is given", field="network")
    if wanted.mode is not NetworkMode.NONE and not call.settings.allow_network:
        raise Forbidden(
            "the user has not allowed that the network is opened from here",
            next_step="Ask the user: `sojourn session network` sets it, and `sojourn mcp"
            " --allow-network` allows it here.",
        )
    policy = msgspec.structs.replace(session.network, mode=wanted.mode, rules=wanted.rules)
    await session.set_network(policy)
    return _told(session.id, session.network)


def _told(session: str, policy: NetworkPolicy) -> results.NetworkResult:
    return results.NetworkResult(
        session=session,
        mode=str(policy.mode),
        allowed=[
            results.AllowedResult(
                targets=[*rule.domains, *rule.cidrs], ports=list(rule.ports), name=rule.name
            )
            for rule in policy.rules
        ],
        secrets=list(policy.secrets),
    )


def _line(one: EffectInfo) -> str:
    began = results.moment(one.began_at)
    return clipped(f"{one.method or one.kind} {one.host}:{one.port}{one.path} at {began}", 300)


def left_behind(left: EffectsLeft | None) -> list[str]:
    """Requests that a rollback does not take back, a line for each, the oldest first."""
    if left is None:
        return []
    lines = [_line(one) for one in left.effects[:EFFECTS_TOLD]]
    more = left.count - len(lines)
    return [*lines, f"and {more} more"] if more else lines
