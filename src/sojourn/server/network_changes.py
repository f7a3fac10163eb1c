"""Changes of a network policy by what they name; pure.

Guarantee: what a change does not name stays as it is; what it denies and is not there, or what
something else still allows, is refused, so that nobody believes something closed that is open.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import msgspec

from sojourn.errors import InvalidRequest
from sojourn.gateway.addresses import Class, classify
from sojourn.gateway.names import HostRefused, covers, read_host
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule
from sojourn.wire.networks import NetworkChange

_WEB = (80, 443)


def changed(policy: NetworkPolicy, change: NetworkChange) -> NetworkPolicy:
    """The policy with the change. Raises InvalidRequest."""
    mode, rules = policy.mode, list(policy.rules)
    told = {rule.name for rule in rules}
    for target in change.deny:
        rules = _denied(mode, rules, target)
    for target in change.deny:
        if target not in told:  # who names a rule means no more than that rule
            _require_closed(mode if change.mode is msgspec.UNSET else change.mode, rules, target)
    for rule in change.allow:
        if not any(_same(rule, known) for known in rules):
            names = {known.name for known in rules}
            rules.append(msgspec.structs.replace(rule, name=_free_name(rule.name, names)))
    if change.allow and mode is NetworkMode.NONE:
        mode = NetworkMode.ALLOWLIST
    if change.mode is not msgspec.UNSET:
        mode = change.mode
        if mode is NetworkMode.NONE:
            rules = []
    return msgspec.structs.replace(
        policy, mode=mode, rules=rules, secrets=_secrets(policy.secrets, change)
    )


def _secrets(granted: list[str], change: NetworkChange) -> list[str]:
    for name in change.revoke:
        if name not in granted:
            told = ", ".join(granted) or "none"
            raise InvalidRequest(
                f"the session has no secret {name!r} (it has: {told})", field="revoke"
            )
    kept = [name for name in granted if name not in change.revoke]
    return list(dict.fromkeys([*kept, *change.grant]))


# -- rules --------------------------------------------------------------------------------------


def _same(one: NetworkRule, other: NetworkRule) -> bool:
    """Whether two rules let the same through, whatever they are called."""
    return _content(one) == _content(other)


def _content(rule: NetworkRule) -> tuple[object, ...]:
    names = frozenset(_kept_form(name) for name in (*rule.domains, *rule.cidrs))
    return names, frozenset(rule.ports), rule.inspect


def _kept_form(name: str) -> str:
    """A domain or network as policies keep it; what is none, as it is."""
    network = _network(name)
    if network is not None:
        return str(network)
    below = name.startswith("*.")
    try:
        host = read_host(name[2:] if below else name)
    except HostRefused:
        return name
    return f"*.{host}" if below else str(host)


def _free_name(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name[:55]}-{number}"
    return found


def _denied(mode: NetworkMode, rules: list[NetworkRule], target: str) -> list[NetworkRule]:
    """The rules without what `target` names."""
    if any(rule.name == target for rule in rules):
        return [rule for rule in rules if rule.name != target]
    host, port = _split(target)
    name = _kept_form(host)
    left: list[NetworkRule] = []
    found = False
    for rule in rules:
        named = name in rule.domains or name in rule.cidrs
        if named and (port is None or port in _ports(rule, target)):
            found = True
            names = {known.name for known in (*rules, *left)}
            left += _without(rule, name, port, names)
        else:
            left.append(rule)
    if not found:
        raise _not_there(mode, rules, target, name)
    return left


def _split(target: str) -> tuple[str, int | None]:
    host, colon, port = target.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        return target.strip("[]"), None
    return host.strip("[]"), int(port)


def _ports(rule: NetworkRule, target: str) -> Iterable[int]:
    if rule.ports:
        return rule.ports
    if rule.cidrs:
        raise InvalidRequest(
            f"{target!r}: rule {rule.name!r} allows every port, and none of them can be left out",
            next_step=f"Deny the rule ({rule.name}), and allow the ports that are wanted.",
            field="deny",
        )
    return _WEB


def _without(rule: NetworkRule, name: str, port: int | None, names: set[str]) -> list[NetworkRule]:
    """A rule without a name, or without a port of it: then it stands in a rule of its own."""
    domains = [one for one in rule.domains if one != name]
    cidrs = [one for one in rule.cidrs if one != name]
    left = []
    if domains or cidrs:
        left.append(msgspec.structs.replace(rule, domains=domains, cidrs=cidrs))
    others = [] if port is None else [one for one in rule.ports or _WEB if one != port]
    if others:
        left.append(
            msgspec.structs.replace(
                rule,
                name=_free_name(rule.name, names) if left else rule.name,
                domains=[name] if name in rule.domains else [],
                cidrs=[name] if name in rule.cidrs else [],
                ports=others,
            )
        )
    return left


def _not_there(
    mode: NetworkMode, rules: list[NetworkRule], target: str, name: str
) -> InvalidRequest:
    if mode is NetworkMode.OPEN:
        return InvalidRequest(
            f"no rule names {target!r}: the session's network is open to every public address",
            next_step="Have it reach a list only (mode allowlist), or nothing (mode none).",
            field="deny",
        )
    wider = _wider(rules, name, None)
    if wider is not None:
        return InvalidRequest(
            f"no rule names {target!r} by itself: rule {wider[0]!r} allows {wider[1]}",
            next_step=f"Deny {wider[1]}, and allow what is wanted of it.",
            field="deny",
        )
    told = ", ".join(one for rule in rules for one in (*rule.domains, *rule.cidrs)) or "nothing"
    return InvalidRequest(
        f"no rule names {target!r} (allowed: {told[:300]})",
        next_step="Name a domain or network as it stands in a rule, or the rule.",
        field="deny",
    )


def _require_closed(mode: NetworkMode, rules: list[NetworkRule], target: str) -> None:
    """Raise InvalidRequest where what was taken out of the rules is reached all the same."""
    host, port = _split(target)
    name = _kept_form(host)
    if mode is NetworkMode.OPEN and not _is_private(name):
        raise InvalidRequest(
            f"{target!r} would still be reached: the network is open to every public address",
            next_step="Have it reach a list only (mode allowlist), or deny the rule by its name.",
            field="deny",
        )
    wider = _wider(rules, name, port)
    if mode is not NetworkMode.NONE and wider is not None:
        raise InvalidRequest(
            f"{target!r} would still be reached: rule {wider[0]!r} allows {wider[1]}",
            next_step=f"Deny {wider[1]}, too, and allow what is wanted of it.",
            field="deny",
        )


def _wider(rules: list[NetworkRule], name: str, port: int | None) -> tuple[str, str] | None:
    """A rule that allows a name or network by what holds more, and what that is; at any port where
    none is given."""
    for rule in rules:
        for one in (*rule.domains, *rule.cidrs):
            ports = rule.ports or (_WEB if one in rule.domains else ())
            if _covers(one, name) and (port is None or not ports or port in ports):
                return rule.name, one
    return None


def _network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(name)
    except ValueError:
        return None


def _is_private(name: str) -> bool:
    """Whether it is a network that is reached by a rule alone, also where all else is open."""
    network = _network(name)
    ends = () if network is None else (network[0], network[-1])
    return bool(ends) and all(classify(end) is Class.PRIVATE for end in ends)


def _covers(wide: str, name: str) -> bool:
    if name == wide:
        return False
    outer, inner = _network(wide), _network(name)
    if outer is None or inner is None:
        return outer is inner and covers(wide, name)
    return outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]
