"""How the server stands, and how far the object store is behind.

Guarantee: a tenant is told of its own sessions alone; what is the operator's business (the object
store's address and errors, the gateway process) is told to the operator only.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from importlib.metadata import version

import msgspec

from sojourn.database.records import Role
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.quotas import allocated_bytes
from sojourn.server.snapshots import Snapshots
from sojourn.server.turns import Turns
from sojourn.server.views import durability_info, lies_in
from sojourn.wire.api import DurabilityInfo, ObjectStoreInfo, StatusInfo


class Statuses:
    """Looks at the server as a whole."""

    def __init__(self, context: Context, snapshots: Snapshots, turns: Turns) -> None:
        self._context = context
        self._snapshots = snapshots
        self._turns = turns

    async def status(self, who: Principal) -> StatusInfo:
        """The server at a glance."""
        context = self._context
        tenant = None if who.role == Role.OPERATOR else who.tenant
        counts = await context.database.count_sessions(tenant)
        usage = shutil.disk_usage(context.agent.directory)
        return StatusInfo(
            version=version("sojourn"),
            node=context.node_name,
            drivers={
                name: sorted(driver.capabilities) for name, driver in context.agent.drivers.items()
            },
            sessions={str(state): count for state, count in counts.items()},
            sandboxes=context.agent.count,
            disk_free_bytes=usage.free,
            store_bytes=await asyncio.to_thread(allocated_bytes, context.store.root),
            objects=await self._objects(tenant),
            gateway=context.networks.gateway.info() if tenant is None else None,
            database=context.database_place if tenant is None else None,
        )

    async def _objects(self, tenant: str | None) -> ObjectStoreInfo | None:
        replicator = self._context.replicator
        if replicator.settings.url is None:
            return None
        status = replicator.status()
        now = time.time()
        behind = [
            durability_info(one, now)
            for one in await self._context.database.durability(tenant, waiting=True)
            if one.waiting
        ]
        return ObjectStoreInfo(
            # The operator's business, as are other tenants' sessions.
            url=(status.url or "") if tenant is None else "",
            waiting=sum(one.waiting for one in behind),
            lag=max((one.lag for one in behind), default=0.0),
            sent_bytes=status.sent_bytes if tenant is None else 0,
            error=status.error if tenant is None else status.error and "the store is behind",
            sessions=behind,
            in_data=lies_in(status.url, self._context.store.root.parent),
        )

    async def durable(
        self, who: Principal, ref: str, snapshot: str | None, timeout: float
    ) -> DurabilityInfo:
        """Wait until a session's head (or another of its snapshots) is in the object store; 0
        seconds only look. Raises StoreUnreachable when it is not in time."""
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        name = snapshot if snapshot is not None else active.session.head
        durable_at = None
        if timeout > 0 and name is not None:
            record = await self._snapshots.resolve(active.session, name)
            record = await self._context.replicator.durable(record.id, timeout)
            durable_at = record.durable_at
        now = time.time()
        mine = self._context.database.durability(active.session.tenant, session=active.id)
        for found in await mine:
            shown = durability_info(found, now)
            return msgspec.structs.replace(shown, durable_at=durable_at)
        return DurabilityInfo(active.id, active.session.head, False, 0, 0.0, None)
