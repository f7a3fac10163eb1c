"""Schemas of the HTTP API about the networks of sessions, beside `sojourn.wire.api`."""

from __future__ import annotations

import msgspec

from sojourn.model.network import NetworkMode, NetworkRule


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
