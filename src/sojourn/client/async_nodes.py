"""The nodes of a cluster, for the asynchronous client."""

from __future__ import annotations

import builtins
from collections.abc import Mapping

from sojourn.client import core_nodes
from sojourn.client.async_transport import AsyncTransport
from sojourn.wire.nodes import NodeInfo, NodeTokenInfo


class AsyncNodes:
    """The nodes of a cluster; for the operator. A server of one machine has none (NotFound)."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[NodeInfo]:
        """All nodes, as they stand. Raises Forbidden."""
        return await self._transport.run(core_nodes.nodes())

    async def cordon(self, id_or_name: str) -> NodeInfo:
        """Place nothing new on a node; it keeps what it has. Raises NodeNotFound, Forbidden."""
        return await self._transport.run(core_nodes.set_state(id_or_name, "cordon"))

    async def uncordon(self, id_or_name: str) -> NodeInfo:
        """Place sessions on a node again. Raises NodeNotFound, Forbidden."""
        return await self._transport.run(core_nodes.set_state(id_or_name, "uncordon"))

    async def drain(self, id_or_name: str) -> NodeInfo:
        """Have a node give all its sessions to others; live ones go on running. It goes on after
        this returns: `list` shows what is left. Raises NodeNotFound, Forbidden."""
        return await self._transport.run(core_nodes.set_state(id_or_name, "drain"))

    async def remove(self, id_or_name: str, *, force: bool = False) -> None:
        """Take a node out of the cluster; with `force` also while it holds sessions, which then go
        on from what the object store has. Raises NodeNotFound, Conflict, Forbidden."""
        await self._transport.run(core_nodes.remove(id_or_name, force=force))

    async def token(self, labels: Mapping[str, str] | None = None) -> NodeTokenInfo:
        """A token that lets one machine join within an hour; it gets `labels`. Raises Forbidden."""
        return await self._transport.run(core_nodes.create_token(labels or {}))
