"""Manifests of snapshots, also of those that another node took.

Guarantee: a manifest that is not on this disk is brought from the object store when it is asked
for and its snapshot is durable, proven, and kept; from then on its layers and image can be brought,
too. One that only another node's disk has is named as such, and never taken for lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from sojourn.database.base import Database
from sojourn.database.records import SnapshotRecord
from sojourn.errors import NodeUnavailable, SnapshotNotFound
from sojourn.model import Snapshot
from sojourn.server.replication import Replicator
from sojourn.server.sources import RepositorySource
from sojourn.store.base import Store

WAIT_SECONDS = 20.0
_LOOK_SECONDS = 0.1


class Manifests:
    """Reads manifests through the node's own store; `several` says that there are other nodes."""

    def __init__(
        self,
        database: Database,
        store: Store,
        source: RepositorySource,
        replicator: Replicator,
        *,
        several: bool,
    ) -> None:
        self._database = database
        self._store = store
        self._source = source
        self._replicator = replicator
        self._several = several

    async def read(self, snapshot: str) -> Snapshot:
        """A manifest. Raises SnapshotNotFound, IntegrityError, NodeUnavailable (another node has
        not sent it yet), StoreUnreachable."""
        try:
            return await asyncio.to_thread(self._store.read_snapshot, snapshot)
        except SnapshotNotFound:
            if not self._several:
                raise
        return await self.bring(await self._database.get_snapshot(None, snapshot, hidden=True))

    async def bring(self, record: SnapshotRecord) -> Snapshot:
        """Have a snapshot that may be another node's here: its manifest, and the way to the rest.
        One that is just being sent is waited for. Raises as `read`."""
        until = time.monotonic() + WAIT_SECONDS
        while record.durable_at is None:
            with contextlib.suppress(SnapshotNotFound):
                return await asyncio.to_thread(self._store.read_snapshot, record.id)
            if time.monotonic() > until:
                raise NodeUnavailable(
                    f"snapshot {record.id} is only on node {record.node} so far",
                    next_step="Try again when it is durable.",
                    snapshot=record.id,
                    node=record.node,
                )
            await asyncio.sleep(_LOOK_SECONDS)
            record = await self._database.get_snapshot(None, record.id, hidden=True)
        self._source.note(record)
        with contextlib.suppress(SnapshotNotFound):
            return await asyncio.to_thread(self._store.read_snapshot, record.id)
        return await asyncio.to_thread(self._fetch, record)

    def _fetch(self, record: SnapshotRecord) -> Snapshot:
        repository = self._replicator.open_repository()
        found = repository.read_snapshot(record.tenant, record.id)
        self._store.publish_snapshot(found)
        return found
