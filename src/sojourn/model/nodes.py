"""The node: a machine that runs sessions and has their newest state on its disk.

Guarantee: a node is told by values read at one instant of the database's clock; that its lease was
valid then does not make it valid now. Who may change what is decided by the fence alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from sojourn.model.sessions import Limits, SessionState


class NodeState(enum.StrEnum):
    """What may be placed on a node. `cordoned` ones keep what they have and get nothing new,
    `draining` ones give away what they have, `removed` ones are not of the cluster any more."""

    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    REMOVED = "removed"


class Resources(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node has, or what of it is in use."""

    cpus: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    sessions: int = 0


def summed(limits: Iterable[Limits]) -> Resources:
    """What the limits of several sandboxes add up to."""
    found = list(limits)
    return Resources(
        cpus=sum(one.cpus for one in found),
        memory_bytes=sum(one.memory_bytes for one in found),
        disk_bytes=sum(one.disk_bytes for one in found),
        sessions=len(found),
    )


class Fence(msgspec.Struct, frozen=True):
    """In whose name a node writes: with another incarnation in the database it is refused."""

    node: str
    incarnation: int


class Node(msgspec.Struct, frozen=True):
    """A node as the database holds it. Times are seconds since 1970 (UTC) by the database's clock.

    `incarnation` grows with each start and each loss. `lease_left` are the seconds its lease was
    valid from the moment this was read, below zero since when it is not; a node that never started
    has 0. `lost` since it was fenced for a lease that ended, until it starts again. `seen_at` is
    when it renewed last. `runtime` and `cpu` say which memory images it can run.
    """

    id: str
    name: str
    address: str
    state: NodeState
    incarnation: int
    lease_left: float
    lost: bool
    labels: dict[str, str]
    taints: list[str]
    capacity: Resources
    used: Resources
    runtime: str | None
    cpu: list[str]
    version: str
    joined_at: float
    seen_at: float | None

    @property
    def fence(self) -> Fence:
        """In whose name this incarnation writes."""
        return Fence(self.id, self.incarnation)


class FailedOver(msgspec.Struct, frozen=True):
    """A session taken from a lost node: now at `head`, the newest snapshot on its line that the
    object store has, or still at `head_before` where there is none. `lost_seconds` of its work lie
    between `head` and the end of the node's lease, or its last snapshot where it was not live."""

    session: str
    head_before: str | None
    head: str | None
    state: SessionState
    lost_seconds: float
