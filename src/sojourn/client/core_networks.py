"""Plans about the networks of sessions, and how policies are written down.

Guarantee: what is given in any of its forms becomes one policy or an error that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sojourn.client.core import (
    JSON_TYPE,
    Plan,
    Request,
    convert,
    decode,
    get,
    json_body,
    session_path,
    verb,
)
from sojourn.errors import InvalidRequest, SojournError
from sojourn.model.network import Denial, NetworkMode, NetworkPolicy, NetworkRule
from sojourn.wire.api import EffectInfo, EffectPage, EffectsLeft, EventInfo, SessionInfo
from sojourn.wire.networks import NetworkChange

NetworkLike = NetworkPolicy | Mapping[str, Any] | str
PAGE = 1000
_DENIED = "network.denied"


def allow(*targets: str, inspect: bool = True, **policy: Any) -> NetworkPolicy:
    """A policy that lets these through and nothing else: domains (`api.example.com`,
    `*.example.com`), networks (`203.0.113.0/24`), each with `:PORT` for another port than those of
    the web. `policy` are further fields of NetworkPolicy. Raises InvalidRequest.

        client.sessions.create(network=allow("api.example.com", "*.pypi.example"))
    """
    rules: list[NetworkRule] = []
    for target in targets:
        host, port = _split(target)
        rules.append(
            NetworkRule(
                name=_rule_name(target, {rule.name for rule in rules}),
                domains=[] if _is_network(host) else [host],
                cidrs=[host] if _is_network(host) else [],
                ports=[] if port is None else [port],
                inspect=inspect,
            )
        )
    fields = {"mode": NetworkMode.ALLOWLIST, "rules": rules} | policy
    return convert(fields | {"rules": msgspec.to_builtins(rules)}, NetworkPolicy, "network")


def _split(target: str) -> tuple[str, int | None]:
    host, colon, port = target.rpartition(":")
    if not colon or "]" in port or (host.count(":") and not host.endswith("]")):
        host, port = target, ""  # no port: a plain name, or an address of many colons
    if port and not (port.isascii() and port.isdigit()):
        raise InvalidRequest(
            f"{target!r}: {port!r} is no port",
            next_step="Give a domain or a network, with :PORT where it is another one; no URL.",
            field="network",
        )
    return host.strip().removeprefix("[").removesuffix("]"), int(port) if port else None


def _is_network(host: str) -> bool:
    return "/" in host or ":" in host or host.replace(".", "").isdigit()


def _rule_name(target: str, taken: set[str]) -> str:
    letters = "".join(one if one.isascii() and one.isalnum() else "-" for one in target)
    name = letters.strip("-")[:50].strip("-") or "rule"
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


def network_of(value: NetworkLike | None) -> NetworkPolicy | None:
    """A policy from what a caller gives: a policy, its fields, or in words `none`, `open` or
    `allow=TARGET[,TARGET...]`. Raises InvalidRequest."""
    if value is None or isinstance(value, NetworkPolicy):
        return value
    if not isinstance(value, str):
        return convert(value, NetworkPolicy, "network")
    if value in (NetworkMode.NONE, NetworkMode.OPEN):
        return NetworkPolicy(mode=NetworkMode(value))
    kind, equals, targets = value.partition("=")
    if kind != "allow" or not equals or not targets.strip(" ,"):
        raise InvalidRequest(
            f"network {value!r} is not none, open or allow=DOMAIN[:PORT][,...]", field="network"
        )
    return allow(*(one.strip() for one in targets.split(",") if one.strip()))


def effects(ref: str, *, all: bool) -> Plan[list[EffectInfo]]:
    """What left a session, all pages."""
    found: list[EffectInfo] = []
    cursor: str | None = None
    while True:
        page: EffectPage = yield from get(
            f"{session_path(ref)}/effects", EffectPage, all=all, limit=PAGE, cursor=cursor
        )
        found += page.items
        cursor = page.next
        if cursor is None:
            return found


def denials(ref: str) -> Plan[list[Denial]]:
    """What a session's policy did not let out, all pages."""
    found: list[Denial] = []
    after = 0
    while True:
        page: list[EventInfo] = yield from get(
            f"{session_path(ref)}/events",
            list[EventInfo],
            kind=_DENIED,
            after=after,
            limit=PAGE,
        )
        found += (convert(event.details, Denial, "details") for event in page)
        if len(page) < PAGE:
            return found
        after = page[-1].seq


def change(
    ref: str,
    *,
    allow: Iterable[str | NetworkRule],
    deny: Iterable[str],
    mode: NetworkMode | str | None,
    grant: Iterable[str],
    revoke: Iterable[str],
) -> Plan[SessionInfo]:
    """Change of the policy what is named."""
    content = json_body(
        NetworkChange(
            allow=_rules(allow),
            deny=list(deny),
            mode=msgspec.UNSET if mode is None else convert(mode, NetworkMode, "mode"),
            grant=list(grant),
            revoke=list(revoke),
        )
    )
    response = yield Request(b"PATCH", f"{session_path(ref)}/network", (JSON_TYPE,), content)
    info: SessionInfo = decode(response, SessionInfo)
    return info


def _rules(allowed: Iterable[str | NetworkRule]) -> list[NetworkRule]:
    rules: list[NetworkRule] = []
    for one in allowed:
        rules += [one] if isinstance(one, NetworkRule) else allow(one).rules
    return rules


def moved(
    kind: Any, path: str, value: Any = None, *, key: str | None = None, wait: str | None = None
) -> Plan[tuple[Any, EffectsLeft | None]]:
    """Do a verb that moves in the tree: its result as a type, and what it left behind."""
    operation = yield from verb(b"POST", path, value, key=key, wait=wait)
    try:
        result = msgspec.convert(operation.result if operation else None, kind)
    except msgspec.ValidationError as error:
        raise SojournError(f"the operation's result was not understood: {error}") from error
    return result, operation.effects if operation else None
