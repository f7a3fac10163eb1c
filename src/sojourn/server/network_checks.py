"""What a network policy may say; pure.

Guarantee: a policy that is set means what it says: its names and networks are in the one form that
is compared later, none of them covers what belongs to everybody, and what nothing could ever match
is refused with the field that is wrong, before anything begins.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import msgspec

from sojourn.errors import InvalidRequest
from sojourn.gateway.addresses import Class, Network, classify, parse_network
from sojourn.gateway.names import HostRefused, read_host
from sojourn.model.network import NetworkPolicy, NetworkRule

MAX_RULES = 200
MAX_NAMES = 2000  # domains and networks of all rules together
MAX_PORTS = 64
MAX_SECRETS = 64
MAX_CONNECTIONS = 1024
_MAX_RATE = 2**53
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

# Below these anybody gets a name, so that all of them together are nobody's. The registries of
# countries have theirs by the words of the second list.
_SHARED = frozenset(
    {
        *("amazonaws.com", "appspot.com", "azurewebsites.net", "blogspot.com", "cloudapp.net"),
        *("cloudfront.net", "deno.dev", "fly.dev", "github.io", "gitlab.io", "herokuapp.com"),
        *("netlify.app", "ngrok.io", "ngrok-free.app", "onrender.com", "pages.dev", "r2.dev"),
        *("run.app", "s3.amazonaws.com", "vercel.app", "web.app", "windows.net", "workers.dev"),
    }
)
_REGISTRIES = frozenset(
    {
        *("ac", "ad", "asn", "biz", "co", "com", "ed", "edu", "firm", "gen", "go", "gob", "gov"),
        *("govt", "id", "ind", "info", "ltd", "me", "mil", "mod", "muni", "ne", "net", "nhs"),
        *("nic", "nom", "or", "org", "plc", "police", "sch", "school", "web"),
    }
)


def check_network(policy: NetworkPolicy, *, private: Sequence[str] = ()) -> NetworkPolicy:
    """The policy in the form it is kept in. `private` are the networks that the operator lets
    policies name although they are private. Raises InvalidRequest."""
    if len(policy.rules) > MAX_RULES:
        raise _wrong("rules", f"at most {MAX_RULES} rules, not {len(policy.rules)}")
    if sum(len(rule.domains) + len(rule.cidrs) for rule in policy.rules) > MAX_NAMES:
        raise _wrong("rules", f"at most {MAX_NAMES} domains and networks in all rules together")
    allowed = [parse_network(text) for text in private]
    rules = [
        _check_rule(rule, f"rules[{number}]", allowed) for number, rule in enumerate(policy.rules)
    ]
    names = [rule.name for rule in rules]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _wrong("rules", f"two rules have the name {twice!r}")
    if len(policy.secrets) > MAX_SECRETS:
        raise _wrong("secrets", f"at most {MAX_SECRETS} secrets")
    if not 1 <= policy.connections <= MAX_CONNECTIONS:
        raise _wrong("connections", f"must be between 1 and {MAX_CONNECTIONS}")
    for field in ("requests_per_minute", "bytes_per_second"):
        if not 0 <= getattr(policy, field) <= _MAX_RATE:
            raise _wrong(field, "must be a number that is not negative; 0 sets no bound")
    return msgspec.structs.replace(policy, rules=rules, secrets=list(dict.fromkeys(policy.secrets)))


def _wrong(field: str, cause: str) -> InvalidRequest:
    return InvalidRequest(f"network.{field}: {cause}", field=f"network.{field}")


def _check_rule(rule: NetworkRule, where: str, private: Sequence[Network]) -> NetworkRule:
    if not _NAME.fullmatch(rule.name):
        raise _wrong(
            f"{where}.name",
            f"{rule.name!r} must be 1 to 63 letters, digits, dots, dashes or underscores",
        )
    if not rule.domains and not rule.cidrs:
        raise _wrong(where, f"rule {rule.name!r} names neither a domain nor a network")
    if len(rule.ports) > MAX_PORTS:
        raise _wrong(f"{where}.ports", f"at most {MAX_PORTS} ports")
    for port in rule.ports:
        if not 1 <= port <= 65535:
            raise _wrong(f"{where}.ports", f"{port} is no port")
    return msgspec.structs.replace(
        rule,
        domains=[_check_domain(domain, f"{where}.domains") for domain in rule.domains],
        cidrs=[_check_network(text, f"{where}.cidrs", private) for text in rule.cidrs],
    )


def _check_domain(domain: str, field: str) -> str:
    wildcard = domain.startswith("*.")
    try:
        host = read_host(domain[2:] if wildcard else domain)
    except HostRefused:
        raise _wrong(
            field,
            f"{domain!r} is no domain; write a name (example.com) or all names below one"
            " (*.example.com)",
        ) from None
    if host.name is None:
        raise _wrong(field, f"{domain!r} is an address; write it as a network in `cidrs`")
    labels = host.name.split(".")
    if len(labels) < 2 and not wildcard:
        raise _wrong(field, f"{domain!r} is no full name: it has no dot")
    if wildcard and is_shared(host.name):
        raise _wrong(
            field,
            f"{domain!r} covers names of everybody; name the one below {host.name} that is meant",
        )
    return f"*.{host.name}" if wildcard else host.name


def is_shared(name: str) -> bool:
    """Whether anybody can have names below this one: a top-level domain, the part of one that its
    registry sells, a host of other people's programs."""
    labels = name.split(".")
    if len(labels) < 2 or name in _SHARED:
        return True
    country = len(labels) == 2 and len(labels[1]) == 2
    return country and labels[0] in _REGISTRIES


def _check_network(text: str, field: str, private: Sequence[Network]) -> str:
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise _wrong(field, f"{text!r} is no network ({error}); write ADDRESS/BITS") from None
    first, last = network[0], network[-1]
    kinds = {classify(first), classify(last)}
    if network.num_addresses > 1 and kinds == {Class.NEVER} and not _spans(network):
        raise _wrong(field, f"{network} is no network of the outside")
    if network.num_addresses == 1 and kinds == {Class.NEVER}:
        raise _wrong(field, f"{network} is no address of the outside")
    if kinds == {Class.PRIVATE} and not any(_inside(network, one) for one in private):
        raise InvalidRequest(
            f"network.{field}: {network} is private, and the operator lets no policy name it",
            next_step="Have it allowed on the server (SOJOURN_EGRESS_PRIVATE).",
            field=f"network.{field}",
        )
    return str(network)


def _spans(network: Network) -> bool:
    """Whether public addresses may lie between a network's special ends (0.0.0.0/0)."""
    return network.prefixlen < (4 if network.version == 4 else 3)


def _inside(network: Network, outer: Network) -> bool:
    if isinstance(network, ipaddress.IPv4Network) and isinstance(outer, ipaddress.IPv4Network):
        return network.subnet_of(outer)
    if isinstance(network, ipaddress.IPv6Network) and isinstance(outer, ipaddress.IPv6Network):
        return network.subnet_of(outer)
    return False
