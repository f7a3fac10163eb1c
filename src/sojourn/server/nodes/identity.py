"""Who this node is, for the parts of the session service.

Guarantee: with it a service changes only sessions that it holds, and nothing without a lease;
without it (one machine) all of that is absent and no session has a holder.
"""

from __future__ import annotations

import asyncio

import msgspec

from sojourn.errors import CapacityExhausted
from sojourn.model import Limits
from sojourn.model.nodes import Fence, Node, NodeState, Resources, summed
from sojourn.node.isolation.cgroups import CgroupTree
from sojourn.node.watchdog import Watchdog
from sojourn.server.cluster import scheduler
from sojourn.server.nodes.lease import LEASE_SECONDS, Lease


class NodeSettings(msgspec.Struct, frozen=True):
    """How a node takes part. `address` is where servers reach it, `capacity` what of the machine
    sessions may use (the limits of those that run, added up, up to `overcommit` times)."""

    id: str
    address: str
    lease: float = LEASE_SECONDS
    capacity: Resources | None = None
    labels: dict[str, str] = {}
    taints: list[str] = []
    overcommit: scheduler.Settings = scheduler.Settings()


class NodeIdentity:
    """This node, in one of its incarnations. `gone` is set when it was fenced, `hint` when there
    may be something to do for it, `state` is what the operator wants of it."""

    def __init__(
        self,
        settings: NodeSettings,
        capacity: Resources,
        lease: Lease,
        tree: CgroupTree,
        watchdog: Watchdog,
    ) -> None:
        self.settings = settings
        self.capacity = capacity
        self.lease = lease
        self.tree = tree
        self.watchdog = watchdog
        self.gone = asyncio.Event()
        self.hint = asyncio.Event()
        self.state = NodeState.READY
        lease.fenced = self._fenced
        lease.renewed = self._renewed

    @property
    def id(self) -> str:
        """The node's id: the holder of its sessions, and who runs their operations."""
        return self.settings.id

    @property
    def fence(self) -> Fence:
        """In whose name it writes."""
        return self.lease.fence

    def require_room(self, used: Resources, wanted: Limits) -> None:
        """Raise CapacityExhausted where one more sandbox does not fit beside what is in use. Who
        places sessions knows only what was in use at the last renewal."""
        if not scheduler.fits(self.capacity, used, summed([wanted]), self.settings.overcommit):
            raise CapacityExhausted(f"node {self.id} has no room for the session", node=self.id)

    def _fenced(self) -> None:
        self.gone.set()

    def _renewed(self, node: Node) -> None:
        if node.state is not self.state:
            self.state = node.state
            self.hint.set()

    async def close(self) -> None:
        """Renew the lease no more. What runs stays so until its end, and is frozen then."""
        await self.lease.stop()
        await asyncio.to_thread(self.watchdog.close)
