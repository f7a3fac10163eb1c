"""Schemas of the HTTP API about what sessions reach and how they are reached: network policies,
secrets, exposed ports.

As in `sojourn.wire.api` every request type refuses unknown fields.
"""

from __future__ import annotations

import msgspec

from sojourn.model.network import NetworkMode, NetworkRule, SecretUse
from sojourn.model.ports import PortKind


class NetworkChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What changes of a session's network policy; all the rest of it stays as it is.

    `deny` takes out of its rules what it names: a domain or network as it stands there, with
    `:PORT` for that port alone, or all of a rule by its name. `allow` adds rules, and makes an
    allowlist of mode none. `mode` none also drops the rules. `grant` and `revoke` name secrets.
    They are done in this order.
    """

    deny: list[str] = []
    allow: list[NetworkRule] = []
    mode: NetworkMode | msgspec.UnsetType = msgspec.UNSET
    grant: list[str] = []
    revoke: list[str] = []


class SetSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A secret's value, and for which domains and how it is put into requests."""

    value: str
    uses: list[SecretUse]

    def __repr__(self) -> str:
        return f"SetSecret(uses={self.uses!r})"


class SecretInfo(msgspec.Struct, frozen=True):
    """A secret as it may be shown: never with its value."""

    name: str
    uses: list[SecretUse]
    created_at: float
    updated_at: float


class ExposePort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A port of a session to be reached from outside. One that is not `public` needs the token of
    the answer; one of kind tcp is public, to the networks in `sources` (empty: all)."""

    port: int
    kind: PortKind = PortKind.HTTP
    public: bool = False
    sources: list[str] = []


class PortInfo(msgspec.Struct, frozen=True):
    """An exposed port and its addresses, which stay the same as long as it is exposed.

    `url` names the port and the session by its host; `path_url` does by its path, for programs
    that cannot look up such names. Those of kind tcp have `address`, HOST:PORT, alone. `token`
    opens one that is not public: as `Authorization: Bearer`, or as `sojourn_token` in the query.
    """

    session: str
    port: int
    kind: PortKind
    public: bool
    url: str | None
    path_url: str | None
    address: str | None
    token: str | None
    sources: list[str]
    created_at: float
