"""Plans about exposed ports and secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sojourn.client.core import (
    JSON_TYPE,
    Plan,
    Request,
    act,
    convert,
    decode,
    get,
    json_body,
    segment,
    session_path,
)
from sojourn.errors import InvalidRequest
from sojourn.model.network import SecretPlace, SecretUse
from sojourn.model.ports import PortKind
from sojourn.wire.networks import ExposePort, PortInfo, SecretInfo, SetSecret

UseLike = SecretUse | Mapping[str, Any]

# -- exposed ports ------------------------------------------------------------------------------


def expose(
    ref: str, port: int, *, public: bool, kind: str, sources: Sequence[str]
) -> Plan[PortInfo]:
    """Expose a port."""
    body = ExposePort(
        port=port,
        kind=convert(kind, PortKind, "kind"),
        public=public,
        sources=list(sources),
    )
    response = yield Request(
        b"POST", f"{session_path(ref)}/ports", (JSON_TYPE,), json_body(body), repeatable=True
    )
    info: PortInfo = decode(response, PortInfo)
    return info


def ports(ref: str) -> Plan[list[PortInfo]]:
    """The exposed ports."""
    found: list[PortInfo] = yield from get(f"{session_path(ref)}/ports", list[PortInfo])
    return found


def unexpose(ref: str, port: int) -> Plan[None]:
    """Expose a port no longer."""
    yield from act(b"DELETE", f"{session_path(ref)}/ports/{segment(port)}")


# -- secrets ------------------------------------------------------------------------------------


def secret_uses(
    domains: Iterable[str],
    *,
    header: str | None,
    query: str | None,
    basic: str | None,
    template: str | None,
) -> list[SecretUse]:
    """The use of a secret that the arguments of `set` describe. Raises InvalidRequest."""
    if isinstance(domains, str):
        domains = [domains]
    named = [one for one in (header, query, basic) if one is not None]
    if len(named) > 1:
        raise InvalidRequest("give one of header, query and basic", field="uses")
    if template is not None and (query is not None or basic is not None):
        raise InvalidRequest("a template is for a header", field="uses")
    names = list(domains)
    if query is not None:
        use = SecretUse(names, SecretPlace.QUERY, query)
    elif basic is not None:
        use = SecretUse(names, SecretPlace.BASIC, basic)
    elif template is not None:
        use = SecretUse(names, SecretPlace.TEMPLATE, header or "Authorization", template)
    else:
        use = SecretUse(names, SecretPlace.HEADER, header or "Authorization")
    return [use]


def set_secret(name: str, value: str, uses: Sequence[UseLike]) -> Plan[SecretInfo]:
    """Make or change a secret."""
    body = SetSecret(value=value, uses=[convert(use, SecretUse, "uses") for use in uses])
    response = yield Request(
        b"PUT",
        f"/v1/secrets/{segment(name)}",
        (JSON_TYPE,),
        msgspec.json.encode(body),
        repeatable=True,
    )
    info: SecretInfo = decode(response, SecretInfo)
    return info


def secrets() -> Plan[list[SecretInfo]]:
    """The tenant's secrets."""
    found: list[SecretInfo] = yield from get("/v1/secrets", list[SecretInfo])
    return found


def delete_secret(name: str) -> Plan[None]:
    """Remove a secret."""
    yield from act(b"DELETE", f"/v1/secrets/{segment(name)}")
