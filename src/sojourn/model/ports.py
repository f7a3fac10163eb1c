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

    `token` is the sealed access token of one that is not public (None: it is public); `digest` is
    its SHA-256, in hex. `listen` is the number of the host's port that a TCP one has, for good;
    `sources` are the networks that may connect to it (empty: all).
    """

    id: str
    session: str
    tenant: str
    port: int
    kind: PortKind
    token: bytes | None
    digest: str | None
    listen: int | None
    sources: list[str]
    created_at: float

    @property
    def public(self) -> bool:
        """Whether it needs no token."""
        return self.digest is None
