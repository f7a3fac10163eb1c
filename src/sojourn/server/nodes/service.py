"""The parts of the session service that only a node of several has, joined.

Guarantee: each is wired here once; without a node none of them is there.
"""

from __future__ import annotations

import contextlib

from sojourn.errors import NodeFenced
from sojourn.server.context import Context
from sojourn.server.nodes.holding import Holding
from sojourn.server.nodes.identity import NodeIdentity
from sojourn.server.nodes.migration import VERB, Migration
from sojourn.server.nodes.starting import end_all
from sojourn.server.nodes.work import NodeWork
from sojourn.server.operations import Body, Operations
from sojourn.server.placements import Placements
from sojourn.server.snapshots import Snapshots
from sojourn.server.turns import Turns
from sojourn.server.verbs import Verbs


class NodeService:
    """What servers ask of a node besides the API, and what it does by itself."""

    def __init__(
        self,
        context: Context,
        node: NodeIdentity,
        verbs: Verbs,
        snapshots: Snapshots,
        placements: Placements,
        operations: Operations,
        turns: Turns,
    ) -> None:
        self._context = context
        self.identity = node
        self.holding = Holding(context, node, turns)
        self.migration = Migration(
            context, node, self.holding, verbs, snapshots, placements, operations
        )
        self.work = NodeWork(context, node, self.holding, self.migration, operations, snapshots)
        context.registry.taker = self.holding
        # Servers do not wait for a node without its lease when secrets are changed.
        node.lease.returning = context.networks.renew_secrets

    @property
    def bodies(self) -> dict[str, Body]:
        """Its operations."""
        return {VERB: self.migration.migrate}

    async def leave(self) -> None:
        """At a clean stop: where nothing is here that only this node has, its lease ends now, so
        that nobody waits for it."""
        database = self._context.database
        if self._context.agent.count:
            return
        if not await database.undurable_snapshots(limit=1, node=self.identity.id):
            await self.identity.lease.stop()
            with contextlib.suppress(NodeFenced):
                await database.stop_node(self.identity.fence)

    async def end_if_fenced(self) -> bool:
        """Whether the node was fenced; then every sandbox is ended, as it stands."""
        if not self.identity.gone.is_set():
            return False
        await end_all(self.identity)
        return True
