"""Schemas of nodes: what operators see of them, how one joins, how it renews its certificate, and
what servers ask of it.

Binary values are base64 strings, certificates and signing requests PEM texts.
"""

from __future__ import annotations

import msgspec

from sojourn.model.nodes import Resources
from sojourn.wire.api import Request


class NodeResources(msgspec.Struct, frozen=True):
    """What a node has, or what the limits of the sandboxes on it add up to."""

    cpus: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    sessions: int = 0


class NodeInfo(msgspec.Struct, frozen=True):
    """A node. `state` is what the operator wants (ready, cordoned, draining, removed), and
    "drained" once one that drains holds no session; `ready` says that it takes sessions now.
    `lease_left` are the seconds until it counts as gone; `lost` that its sessions were taken from
    it."""

    id: str
    name: str
    address: str
    state: str
    ready: bool
    lost: bool
    lease_left: float
    labels: dict[str, str]
    taints: list[str]
    capacity: NodeResources
    used: NodeResources
    runtime: str | None
    version: str
    joined_at: float
    seen_at: float | None


class CreateNodeToken(Request, frozen=True):
    """`labels` are given to the node that joins with it."""

    labels: dict[str, str] = msgspec.field(default_factory=dict)


class NodeTokenInfo(msgspec.Struct, frozen=True):
    """`token` lets one node join, once, until `expires_at`. `url` is where it joins."""

    id: str
    token: str
    expires_at: float
    url: str


class JoinRequest(Request, frozen=True):
    """`request` is the signing request for the key that the node made."""

    token: str
    name: str
    request: str


class JoinAnswer(msgspec.Struct, frozen=True):
    """What a node needs from then on. `keys` are the deployment's, by the file each lies in."""

    node: str
    certificate: str
    authority: str
    database: str
    store: str | None
    store_key: bytes | None
    keys: dict[str, bytes]
    labels: dict[str, str]

    def __repr__(self) -> str:
        return f"JoinAnswer({self.node})"


class RenewRequest(Request, frozen=True):
    """`signature` is made over the new request with the key of the certificate of now."""

    certificate: str
    request: str
    signature: bytes


class RenewAnswer(msgspec.Struct, frozen=True):
    """The next certificate."""

    certificate: str


class AuthorityInfo(msgspec.Struct, frozen=True):
    """The certificate of the cluster's authority, which a token's fingerprint proves."""

    authority: str


class MigrateRequest(Request, frozen=True):
    """Where to; None: the cluster chooses."""

    node: str | None = None


# -- what servers ask of nodes ------------------------------------------------------------------


class EvictRequest(msgspec.Struct, frozen=True):
    """Put away the session that has been idle for longest, when that is at least `idle` seconds,
    and others as long as there is not room for `need`."""

    need: Resources
    idle: float = 0.0


class Evicted(msgspec.Struct, frozen=True):
    """Whether there is room now, and what was put away for that."""

    room: bool
    sessions: list[str] = []


class PrefetchRequest(msgspec.Struct, frozen=True):
    """Bring a snapshot; without one: what a migration to this node sends."""

    snapshot: str | None = None


class RefreshRequest(msgspec.Struct, frozen=True):
    """What was changed elsewhere: secrets, templates or tokens."""

    what: str = ""
