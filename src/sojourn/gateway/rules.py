"""Decisions: what a policy lets through, as pure functions.

Guarantee: what no rule allows is refused, and each verdict names what decided it. Addresses are
judged after resolution, so a name cannot lead where an address may not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from sojourn.gateway.addresses import (
    Address,
    Class,
    Network,
    classify,
    meant,
    parse_network,
    within,
)
from sojourn.gateway.names import Host, covers
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule

HTTP_PORT = 80
TLS_PORT = 443
OPEN_RULE = "open"


class Verdict(msgspec.Struct, frozen=True):
    """Whether something may be done. `rule` is the rule that allows it, or the built-in one that
    refuses. `raw` lets through what is neither HTTP nor TLS."""

    allowed: bool
    rule: str
    reason: str = ""
    inspect: bool = True
    raw: bool = False


def _refuse(rule: str, reason: str) -> Verdict:
    return Verdict(False, rule, reason)


def judge_host(policy: NetworkPolicy, host: Host, port: int) -> Verdict:
    """Whether a policy lets a session reach a host at a port, by its name or address alone."""
    if policy.mode is NetworkMode.NONE:
        return _refuse("network-none", "the session has no network")
    if host.address is not None:
        return _judge_address(policy, host.address, port)
    assert host.name is not None
    wrong_port: str | None = None
    for rule in policy.rules:
        if any(covers(domain, host.name) for domain in rule.domains):
            if port in (rule.ports or (HTTP_PORT, TLS_PORT)):
                return _by_domain(rule, port)
            wrong_port = rule.name
    if policy.mode is NetworkMode.OPEN:
        if "." not in host.name or host.name.endswith((".localhost", ".local")):
            return _refuse("local-name", f"{host.name} is a name of the local network")
        return Verdict(True, OPEN_RULE, inspect=port == TLS_PORT, raw=True)
    if wrong_port is not None:
        return _refuse("port", f"rule {wrong_port!r} does not allow port {port} of {host.name}")
    return _refuse("no-rule", f"no rule allows {host.name}")


_WEB = (HTTP_PORT, TLS_PORT)


def _by_domain(rule: NetworkRule, port: int) -> Verdict:
    # On the ports of the web, what is no HTTP would pass by the check of its host.
    return Verdict(True, rule.name, inspect=rule.inspect, raw=bool(rule.ports) and port not in _WEB)


def _judge_address(policy: NetworkPolicy, address: Address, port: int) -> Verdict:
    kind = classify(address)
    if kind is Class.NEVER:
        return _refuse("special-address", f"{address} is no outside address")
    for rule in policy.rules:
        if _rule_holds(rule, address, port):
            return Verdict(True, rule.name, inspect=rule.inspect, raw=True)
    if kind is Class.PRIVATE:
        return _refuse("private-address", f"{address} is private and no rule names it")
    if policy.mode is NetworkMode.OPEN:
        return Verdict(True, OPEN_RULE, inspect=port == TLS_PORT, raw=True)
    return _refuse("no-rule", f"no rule allows the address {address}")


def _rule_holds(rule: NetworkRule, address: Address, port: int) -> bool:
    return (not rule.ports or port in rule.ports) and within(address, _networks(rule.cidrs))


def _networks(texts: Sequence[str]) -> list[Network]:
    found = []
    for text in texts:
        try:
            found.append(parse_network(text))
        except ValueError:
            # A policy is checked when it is set; what slipped through allows nothing.
            continue
    return found


def judge_addresses(
    policy: NetworkPolicy,
    port: int,
    addresses: Sequence[Address],
    *,
    own: Collection[Address],
    private: Sequence[Network],
) -> tuple[list[Address], Verdict | None]:
    """Which of a host's addresses may be connected to, and when none may: why. `own` are the
    addresses of this host, `private` the networks the operator lets policies name."""
    taken: list[Address] = []
    refused: Verdict | None = None
    for address in addresses:
        verdict = _judge_resolved(policy, port, address, own, private)
        if verdict is None:
            taken.append(address)
        else:
            refused = verdict
    if taken:
        return taken, None
    return [], refused or _refuse("no-address", "the name has no address")


def _judge_resolved(
    policy: NetworkPolicy,
    port: int,
    address: Address,
    own: Collection[Address],
    private: Sequence[Network],
) -> Verdict | None:
    kind = classify(address)
    if kind is Class.NEVER:
        return _refuse("special-address", f"{address} is no outside address")
    if meant(address) in own:
        return _refuse("host-address", f"{address} is an address of the host")
    if kind is Class.PRIVATE:
        if not any(_rule_holds(rule, address, port) for rule in policy.rules):
            return _refuse("private-address", f"{address} is private and no rule names it")
        if not within(address, private):
            return _refuse(
                "private-address", f"{address} is private and the operator does not allow it"
            )
    return None


def judge_greeting(said: Host, sni: Host | None) -> Verdict | None:
    """Why the name in a TLS greeting does not fit the host that was said; None when it does."""
    if said.name is not None:
        if sni is not None and sni.name != said.name:
            return _refuse("name-mismatch", f"TLS for {sni} on a connection to {said}")
        return None
    return None


def judge_request(said: Host, said_port: int, host: Host, port: int) -> Verdict | None:
    """Why a request's host does not fit the connection it came on; None when it does."""
    if (host, port) == (said, said_port):
        return None
    return _refuse(
        "host-mismatch", f"a request for {host}:{port} on a connection to {said}:{said_port}"
    )
