"""Changes of what a session is set to: name, labels, limits, policy, network and idle deadline.

Guarantee: all fields of a request change in one commit, or none does; limits and network are in
force in the sandbox when the change is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sojourn.database.writes import AppendEvent
from sojourn.errors import InvalidRequest, SojournError, Unreachable
from sojourn.lifecycle import Command, Verb, decide, kept_alive, policy_deadlines
from sojourn.model import Limits
from sojourn.model.network import NetworkMode
from sojourn.server.base import Principal
from sojourn.server.checks import MAX_SECONDS, check_limits, check_map, check_name, check_policy
from sojourn.server.context import Context
from sojourn.server.network_changes import changed
from sojourn.server.registry import ActiveSession
from sojourn.wire.api import UpdateSession
from sojourn.wire.networks import NetworkChange


class Updates:
    """Changes sessions, whatever they are doing."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def update(self, who: Principal, ref: str, request: UpdateSession) -> ActiveSession:
        """Change name, labels, limits, policy or network."""
        active = await self._context.registry.find(who.tenant, ref)
        changes: dict[str, Any] = {}
        if request.name is not msgspec.UNSET:
            changes["name"] = None if request.name is None else check_name(request.name)
        if request.labels is not msgspec.UNSET:
            changes["labels"] = check_map("labels", request.labels, env=False)
        if request.limits is not msgspec.UNSET:
            changes["limits"] = check_limits(request.limits)
        if request.network is not msgspec.UNSET:
            tenant = active.session.tenant
            changes["network"] = await self._context.networks.check(tenant, request.network)
        async with active.gate.closed("update"):
            decide(active.session, Command(Verb.UPDATE))
            if request.policy is not msgspec.UNSET:
                policy = check_policy(request.policy)
                idle, lifetime = policy_deadlines(active.session, policy, time.time())
                changes |= {"policy": policy, "idle_deadline": idle, "lifetime_deadline": lifetime}
            await self._commit(who, active, changes)
        return active

    async def change_network(
        self, who: Principal, ref: str, change: NetworkChange
    ) -> ActiveSession:
        """Change of the network what is named. Raises InvalidRequest."""
        active = await self._context.registry.find(who.tenant, ref)
        async with active.gate.closed("update"):
            decide(active.session, Command(Verb.UPDATE))
            # Only here: two that come at the same time would undo each other.
            present = active.session.network
            policy = await self._context.networks.check(
                active.session.tenant, changed(present, change), had=present.secrets
            )
            await self._commit(who, active, {"network": policy})
        return active

    async def _commit(self, who: Principal, active: ActiveSession, changes: dict[str, Any]) -> None:
        """Keep changes and put them in force. The caller holds the gate."""
        if not changes:
            return
        event = AppendEvent(
            session=active.id,
            kind="update",
            actor=who.actor,
            result="ok",
            details={"fields": sorted(changes)} | _network_details(changes),
            before=active.session.head,
            after=active.session.head,
        )
        async with self._limited(active, changes.get("limits")):
            await self._context.commit(active, changes, event)
        if "network" in changes:
            failed = await self._context.networks.apply(active)
            if failed is not None and active.session.network.mode is not NetworkMode.NONE:
                raise Unreachable(
                    f"the policy is kept, and nothing is reached for now: {failed.message}",
                    next_step="It is in force as soon as the gateway process runs, which is tried"
                    " again by itself; `sojourn status` tells how it is.",
                    session=active.id,
                )

    @contextlib.asynccontextmanager
    async def _limited(self, active: ActiveSession, limits: Limits | None) -> AsyncIterator[None]:
        """Other limits of the sandbox, if it has one; taken back when what goes with them fails."""
        if limits is None or not active.session.live:
            yield
            return
        sandbox = self._context.sandbox(active)
        update = self._context.agent.update_limits
        await asyncio.to_thread(update, sandbox, limits)
        try:
            yield
        except SojournError:
            await asyncio.to_thread(update, sandbox, active.session.limits)
            raise

    async def keep_alive(self, who: Principal, ref: str, seconds: float) -> ActiveSession:
        """Push the idle deadline out; never in."""
        if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
            raise InvalidRequest("seconds must be a positive number", field="seconds")
        active = await self._context.registry.find(who.tenant, ref)
        async with active.gate.closed("keep-alive"):
            decide(active.session, Command(Verb.KEEP_ALIVE))
            # Deadlines move without passing this object: read the newest.
            current = await self._context.database.get_session(who.tenant, active.id)
            deadline = kept_alive(current, time.time(), seconds)
            if deadline is not None:
                await self._context.commit(active, {"idle_deadline": deadline})
        return active


def _network_details(changes: dict[str, Any]) -> dict[str, Any]:
    """What an event tells of a new network policy."""
    policy = changes.get("network")
    return {} if policy is None else {"network": msgspec.to_builtins(policy)}
