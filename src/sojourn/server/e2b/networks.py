"""What E2B's network options mean as a session's network policy; pure.

Guarantee: a sandbox reaches no more than was asked for. E2B lists what is denied and makes
exceptions; here what is allowed is listed. So "everything denied but these" is served exactly,
"everything" is every public address, and a list of single denials is refused.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from sojourn.errors import InvalidRequest, Unsupported
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule

_ALL = frozenset({"0.0.0.0/0", "::/0"})
_UNKNOWN = ("egressProxy", "rules", "maskRequestHost", "httpsPorts")


def wanted(
    network: dict[str, Any] | None, internet: bool | None, *, default: bool
) -> NetworkPolicy | None:
    """The policy that is asked for; None for the server's own (no network). Raises InvalidRequest,
    Unsupported."""
    network = network or {}
    for field in _UNKNOWN:
        if network.get(field):
            raise Unsupported(
                f"network.{field} is not served here",
                next_step="Use network policies and secrets of Sojourn for that.",
            )
    allowed, denied = _texts(network, "allowOut"), _texts(network, "denyOut")
    if not set(denied) <= _ALL:
        raise Unsupported(
            "single addresses cannot be denied here",
            next_step="Deny all traffic (0.0.0.0/0) and list in allow_out what may be reached.",
        )
    open_to_all = internet if internet is not None else default
    if open_to_all and not denied:
        return NetworkPolicy(mode=NetworkMode.OPEN)
    if not allowed or internet is False:
        return None
    if set(allowed) & _ALL:
        return NetworkPolicy(mode=NetworkMode.OPEN)
    domains = [entry for entry in allowed if not _is_address(entry)]
    addresses = [entry for entry in allowed if _is_address(entry)]
    rules = [NetworkRule(name="allow-out", domains=domains, cidrs=addresses)]
    return NetworkPolicy(mode=NetworkMode.ALLOWLIST, rules=rules)


def shown(policy: NetworkPolicy) -> dict[str, Any]:
    """A policy as E2B shows one."""
    if policy.mode is NetworkMode.OPEN:
        return {"allowOut": [], "denyOut": []}
    allowed = [entry for rule in policy.rules for entry in [*rule.domains, *rule.cidrs]]
    return {"allowOut": allowed, "denyOut": ["0.0.0.0/0"]}


def _is_address(entry: str) -> bool:
    try:
        ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
    return True


def _texts(network: dict[str, Any], field: str) -> list[str]:
    found = network.get(field) or []
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise InvalidRequest(f"network.{field} is not a list of names and addresses", field=field)
    return found
