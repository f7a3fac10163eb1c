"""Forks of sandboxes, and snapshots that outlive the sandbox they were taken of.

Guarantee: a snapshot is a session of its own that never runs: it is there until it is deleted,
whatever happens to the sandbox, and sandboxes made from it are its forks. It is acknowledged only
once no deadline of its source can end it.
"""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import msgspec

from sojourn.errors import InvalidRequest, SojournError
from sojourn.server.base import Principal
from sojourn.server.e2b import ids
from sojourn.server.e2b.sandboxes import SNAPSHOT, SOURCE, Sandboxes, on_timeout
from sojourn.server.e2b.schemas import ForkSandbox, SnapshotSandbox
from sojourn.wire.api import (
    ForkRequest,
    SessionInfo,
    SnapshotRequest,
    UpdateSession,
)

_MAX_NAME = 200


class Snapshots:
    """Takes, lists and forks."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._service = sandboxes.service

    async def take(self, who: Principal, info: SessionInfo, asked: SnapshotSandbox) -> SessionInfo:
        """A snapshot of a sandbox, which goes on."""
        name = asked.name or ""
        if len(name) > _MAX_NAME or not name.isprintable() or ":" in name:
            raise InvalidRequest(f"a snapshot's name is at most {_MAX_NAME} characters, no colon")
        point: str | None = None
        if not asked.memory:
            operation = await self._service.snapshot(
                who, info.id, SnapshotRequest(memory=False), None
            )
            taken: dict[str, Any] = await self._sandboxes.finish(who, operation)
            point = str(taken["id"])
        # Until it has its own name it is a sandbox that sleeps, which its owner can see and end.
        operation = await self._service.fork(
            who, info.id, ForkRequest(start=False, snapshot=point), None
        )
        child: SessionInfo = (await self._sandboxes.finish(who, operation))[0]
        labels = child.labels | {
            SNAPSHOT: name or ids.sandbox_id(child.id),
            SOURCE: ids.sandbox_id(info.id),
        }
        policy = msgspec.structs.replace(child.policy, max_lifetime=None, on_expiry="suspend")
        return await self._service.update(
            who, child.id, UpdateSession(labels=labels, policy=policy)
        )

    async def list(
        self, who: Principal, source: str | None, name: str | None
    ) -> builtins.list[SessionInfo]:
        """The caller's snapshots, newest first."""
        labels = {}
        if source is not None:
            labels[SOURCE] = source
        if name is not None:
            labels[SNAPSHOT] = name.partition(":")[0]
        return [
            info async for info in self._sandboxes.every(who, labels) if info.labels.get(SNAPSHOT)
        ]

    def shown(self, info: SessionInfo) -> dict[str, Any]:
        """A snapshot as E2B shows one."""
        own = ids.sandbox_id(info.id)
        name = info.labels[SNAPSHOT]
        return {"snapshotID": own, "names": [] if name == own else [name]}

    async def fork(
        self, who: Principal, info: SessionInfo, asked: ForkSandbox
    ) -> builtins.list[SessionInfo | SojournError]:
        """Copies that run, each for the time asked for; all of them or none."""
        operation = await self._service.fork(who, info.id, ForkRequest(n=asked.count), None)
        children: builtins.list[SessionInfo] = await self._sandboxes.finish(who, operation)
        return list(
            await asyncio.gather(*(self._timed(who, child, asked.timeout) for child in children))
        )

    async def _timed(
        self, who: Principal, child: SessionInfo, seconds: int
    ) -> SessionInfo | SojournError:
        policy = msgspec.structs.replace(
            child.policy,
            max_lifetime=float(seconds),
            on_expiry="delete" if on_timeout(child) == "kill" else "suspend",
        )
        try:
            return await self._service.update(who, child.id, UpdateSession(policy=policy))
        except SojournError as error:
            return error
