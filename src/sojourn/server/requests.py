"""Verbs as callers ask for them: looked up and checked, then begun as operations.

Guarantee: tenant, names, bounds and states are checked here before an operation begins, so a
refused request has changed nothing; a verb waits for the snapshot of the turn before it.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from sojourn.database.records import Operation, OperationState
from sojourn.database.writes import InsertSession
from sojourn.errors import (
    Conflict,
    InvalidRequest,
    NameTaken,
    SessionElsewhere,
    SessionNotFound,
    Unsupported,
    WrongState,
)
from sojourn.lifecycle import first_deadlines
from sojourn.model import Limits, Policy, Session, SessionState, new_id
from sojourn.model.network import NetworkPolicy
from sojourn.server.base import Principal
from sojourn.server.checks import (
    check_label,
    check_limits,
    check_map,
    check_name,
    check_place,
    check_policy,
)
from sojourn.server.context import Context
from sojourn.server.operations import Operations
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots
from sojourn.server.templates import Templates
from sojourn.server.turns import Turns
from sojourn.server.views import operation_info, session_info
from sojourn.wire.api import (
    CreateSession,
    EffectsLeft,
    ForkRequest,
    OperationInfo,
    SessionInfo,
    SnapshotRequest,
    SuspendRequest,
    TemplateRequest,
)

MAX_FORKS = 100
_SESSION_VERBS = {"create", "pause", "suspend", "resume", "rollback", "promote", "migrate"}
_MOVING_VERBS = {"rollback", "promote", "fork"}


class Requests:
    """Begins operations and tells how they stand."""

    def __init__(
        self,
        context: Context,
        operations: Operations,
        snapshots: Snapshots,
        turns: Turns,
        templates: Templates,
    ) -> None:
        self._context = context
        self._operations = operations
        self._snapshots = snapshots
        self._turns = turns
        self._templates = templates

    async def create(
        self, who: Principal, request: CreateSession, key: str | None
    ) -> OperationInfo:
        """Make a session and start it."""
        template = await self._context.catalog.find(who.tenant, request.template)
        memory = template.memory
        own = memory.driver if memory is not None else self._context.agent.default_driver
        driver = request.driver or own
        self._context.agent.driver(driver)
        if memory is not None and driver != memory.driver:
            raise InvalidRequest(
                f"template {template.name} holds the memory of processes, which only driver"
                f" {memory.driver} can start",
                next_step="Leave the driver out, or make a template of the files alone (--cold).",
                field="driver",
            )
        env = (template.config.env if template.config else {}) | request.env
        limits = check_limits(request.limits or Limits())
        policy = check_policy(request.policy or Policy())
        network = await self._context.networks.check(who.tenant, request.network or NetworkPolicy())
        if request.name is not None:
            check_name(request.name)
        check_map("labels", request.labels, env=False)
        check_map("env", env, env=True)
        check_place(request.cwd, request.user)
        # Before it has a name, which it would keep: a server asks another node then.
        self._context.require_room(limits)
        now = time.time()
        idle, lifetime = first_deadlines(policy, now)
        session = Session(
            id=new_id("ses"),
            tenant=who.tenant,
            name=request.name,
            labels=request.labels,
            template=template.name,
            env=env,
            limits=limits,
            policy=policy,
            driver=driver,
            state=SessionState.CREATING,
            epoch=0,
            head=None,
            parent_session=None,
            forked_from=None,
            sandbox=None,
            node=None,
            idle_deadline=idle,
            lifetime_deadline=lifetime,
            cause=None,
            created_at=now,
            updated_at=now,
            network=network,
            holder=self._context.holder,
        )
        active = ActiveSession(session)
        body = msgspec.to_builtins(request)
        if request.network is None:
            del body["network"]  # what was asked before there was one is the same request still
        operation = await self._operations.begin(
            who,
            active,
            "create",
            body,
            key,
            creates=True,
            also=[InsertSession(session)],
        )
        return await self._operation_info(operation)

    async def _verb(
        self, who: Principal, ref: str, verb: str, request: dict[str, Any], key: str | None
    ) -> OperationInfo:
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        operation = await self._operations.begin(who, active, verb, request, key)
        return await self._operation_info(operation)

    async def pause(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Freeze in memory."""
        return await self._verb(who, ref, "pause", {}, key)

    async def suspend(
        self, who: Principal, ref: str, request: SuspendRequest, key: str | None
    ) -> OperationInfo:
        """Put away to storage."""
        return await self._verb(who, ref, "suspend", {"memory": request.memory}, key)

    async def resume(
        self, who: Principal, ref: str, key: str | None, *, memory: bool = True
    ) -> OperationInfo:
        """Go on; without `memory` from files alone."""
        return await self._verb(who, ref, "resume", {} if memory else {"memory": False}, key)

    async def snapshot(
        self, who: Principal, ref: str, request: SnapshotRequest, key: str | None
    ) -> OperationInfo:
        """Take a snapshot now."""
        check_label(request.label)
        return await self._verb(
            who, ref, "snapshot", {"label": request.label, "memory": request.memory}, key
        )

    async def template(
        self, who: Principal, ref: str, request: TemplateRequest, key: str | None
    ) -> OperationInfo:
        """Make a template of the present state."""
        self._templates.check(request)
        return await self._verb(who, ref, "template", msgspec.to_builtins(request), key)

    async def rollback(
        self, who: Principal, ref: str, snapshot: str, key: str | None, *, force: bool = False
    ) -> OperationInfo:
        """Continue from another snapshot of the tree."""
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        target = await self._snapshots.resolve(active.session, snapshot)
        request = {"snapshot": target.id} | ({"force": True} if force else {})
        return await self._verb(who, ref, "rollback", request, key)

    async def fork(
        self, who: Principal, ref: str, request: ForkRequest, key: str | None
    ) -> OperationInfo:
        """Start children from now or from a snapshot."""
        if not 1 <= request.n <= MAX_FORKS:
            raise InvalidRequest(f"n must be 1 to {MAX_FORKS}, not {request.n}", field="n")
        names = request.names
        if names is not None:
            if len(names) != request.n or len(set(names)) != len(names):
                raise InvalidRequest("give as many different names as children", field="names")
            for name in names:
                check_name(name)
                await self._check_free(who, name, key)
        check_map("labels", request.labels, env=False)
        active = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(active)
        point = None
        if request.snapshot is not None:
            point = (await self._snapshots.resolve(active.session, request.snapshot)).id
        body = msgspec.to_builtins(request) | {"snapshot": point}
        if not request.force:
            del body["force"]  # what was asked before there was one is the same request still
        operation = await self._operations.begin(who, active, "fork", body, key)
        return await self._operation_info(operation)

    async def _check_free(self, who: Principal, name: str, key: str | None) -> None:
        """Refuse a taken name before anything is done; the database decides when it is used."""
        with contextlib.suppress(SessionNotFound):
            await self._context.registry.look(who.tenant, name)
            if key and await self._context.database.keyed_operation(who.tenant, key):
                return  # taken by this very request when it came first: it is answered again
            raise NameTaken(f"another session is called {name!r}", name=name)

    async def promote(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Make this fork's state its parent's."""
        child = await self._context.registry.find(who.tenant, ref)
        await self._turns.settle(child)
        if child.session.parent_session is None:
            raise WrongState(
                f"session {child.session.name or child.id} is not a fork",
                next_step="Only a fork can be promoted.",
            )
        try:
            parent = await self._context.registry.find(who.tenant, child.session.parent_session)
        except SessionNotFound as error:
            raise Conflict(
                f"the session it was forked from ({child.session.parent_session}) was deleted",
                next_step="Keep the fork as it is.",
            ) from error
        except SessionElsewhere as error:
            raise Conflict(
                f"the session it was forked from ({child.session.parent_session}) is on another"
                f" node ({error.details.get('holder')})",
                next_step="Move one of the two to the other's node first (`sojourn session migrate"
                " SESSION --node NODE`).",
            ) from error
        await self._turns.settle(parent)
        operation = await self._operations.begin(who, parent, "promote", {"child": child.id}, key)
        return await self._operation_info(operation)

    async def migrate(
        self, who: Principal, ref: str, node: str | None, key: str | None
    ) -> OperationInfo:
        """Move to another node. Raises Unsupported where there is none."""
        if self._context.node is None:
            await self._context.registry.find(who.tenant, ref)  # of others nothing is told
            raise Unsupported(
                "this server is the only node",
                next_step="docs/cluster.md tells how to run several.",
            )
        return await self._verb(who, ref, "migrate", {"node": node}, key)

    async def delete(self, who: Principal, ref: str, key: str | None) -> OperationInfo:
        """Remove, from whatever state."""
        try:
            active = await self._context.registry.find(who.tenant, ref)
        except SessionNotFound:
            known = await self._operations.repeated(who, "delete", ref, key)
            if known is None:
                raise
            return await self._operation_info(known)
        operation = await self._operations.begin(
            who, active, "delete", {"ref": ref}, key, supersede=True
        )
        return await self._operation_info(operation)

    async def _operation_info(self, operation: Operation) -> OperationInfo:
        if operation.state is not OperationState.SUCCEEDED:
            return operation_info(operation)
        info = await self._finished_info(operation)
        effects = operation.result.get("effects") if isinstance(operation.result, dict) else None
        if operation.verb not in _MOVING_VERBS or effects is None:
            return info
        return msgspec.structs.replace(info, effects=msgspec.convert(effects, EffectsLeft))

    async def _finished_info(self, operation: Operation) -> OperationInfo:
        result: Any = None
        if operation.verb == "fork":
            ids = operation.result["sessions"] if operation.result else []
            sessions = []
            for id in ids:
                try:
                    sessions.append(
                        await self.newest(await self._context.registry.look(operation.tenant, id))
                    )
                except SessionNotFound:
                    continue  # deleted since
            return msgspec.structs.replace(operation_info(operation), result=sessions)
        if operation.verb in _SESSION_VERBS:
            try:
                result = await self.newest(
                    await self._context.registry.look(operation.tenant, operation.session)
                )
            except SessionNotFound:
                result = None
            return msgspec.structs.replace(operation_info(operation), result=result)
        return operation_info(operation, result)

    async def operation(self, who: Principal, operation: str) -> OperationInfo:
        """One operation."""
        return await self._operation_info(
            await self._context.database.get_operation(who.tenant, operation)
        )

    async def wait(self, who: Principal, operation: str, timeout: float) -> OperationInfo:
        """Wait for it, at most `timeout` seconds."""
        await self._context.database.get_operation(who.tenant, operation)
        await self._operations.wait(operation, timeout)
        return await self.operation(who, operation)

    async def newest(self, session: Session) -> SessionInfo:
        """The session with its deadline as calls have moved it, which no commit tells of."""
        newest = await self._context.database.get_session(None, session.id)
        return session_info(newest, self._operations.current(session.id))
