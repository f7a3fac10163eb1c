"""Ports of a session that can be reached from outside.

Guarantee: a value, without I/O; what is exposed is exposed by its session alone, never by a fork
of it.
"""

from __future__ import annotations

import enum

import msgspec


class PortKind(enum.StrEnum):
    """What is spoken at an exposed port."""

    HTTP = "http"  # HTTP/1.1 and what it upgrades to, by the address all HTTP ports share
    TCP = "tcp"  # bytes, by a listening socket of its own


class ExposedPort(msgspec.Struct, frozen=True):
    """A port of a session that can be reached from outside.

    `token` is what opens one that is not public, sealed with the key of secrets; empty for a public
    one. `listens_at` is the number of the host's port that a TCP one has, for good; `sources` are
    the networks that may connect to it (empty: all).
    """

    session: str
    port: int
    tenant: str
    kind: PortKind
    public: bool
    token: str
    sources: list[str]
    listens_at: int | None
    created_at: float

    @property
    def id(self) -> str:
        """Which one it is, among those of all sessions."""
        return f"{self.session}:{self.port}"
