"""Bringing sessions back to rest after whatever ended the server.

Guarantee: when `recover` returns, every session is in a stable state or held by an operation that
runs again; every living sandbox that a session needs is taken over; everything else of this node
on the machine is gone. It may itself be interrupted and run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from sojourn.database.records import Operation
from sojourn.errors import SandboxLost, SessionNotFound, SojournError
from sojourn.lifecycle import Action, Found, Host, Verb, reconcile
from sojourn.model import Session, SessionState
from sojourn.server.context import Context
from sojourn.server.operations import Operations
from sojourn.server.placements import Placements
from sojourn.server.snapshots import Snapshots

log = logging.getLogger(__name__)

_AT_ONCE = 8


class Reconciler:
    """Runs once, before the server answers."""

    def __init__(
        self,
        context: Context,
        operations: Operations,
        placements: Placements,
        snapshots: Snapshots,
    ) -> None:
        self._context = context
        self._snapshots = snapshots
        self._operations = operations
        self._placements = placements

    async def recover(self) -> None:
        """Adopt, finish, reap. Raises only when the database or the host cannot be used at all."""
        database = self._context.database
        holder = self._context.holder
        found = await database.unfinished_operations(server=holder)
        unfinished = {op.session: op for op in found}
        forking = {op.session for op in unfinished.values() if op.verb == Verb.FORK}
        sessions: list[Session] = []
        cursor: str | None = None
        states = {SessionState.CREATING, SessionState.RUNNING, SessionState.PAUSED}
        while True:
            page = await database.list_sessions(
                None, states=states, limit=500, after=cursor, holder=holder
            )
            sessions += page.items
            cursor = page.next
            if cursor is None:
                break
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def settle(session: Session) -> None:
            async with at_once:
                await self._settle(session, unfinished.get(session.id), forking)

        await asyncio.gather(*(settle(session) for session in sessions))
        keep = {
            active.session.sandbox
            for active in self._context.registry.all()
            if active.session.sandbox is not None
        }
        reaped = await self._context.agent.reap(keep)
        if reaped:
            log.info("removed what %d sandboxes had left: %s", len(reaped), ", ".join(reaped[:10]))
        await self._snapshots.forget_unrecorded()
        for operation in await database.unfinished_operations(server=holder):
            # Read again: what settling recorded in them counts.
            await self._again(operation)

    async def _settle(
        self, session: Session, operation: Operation | None, forking: set[str]
    ) -> None:
        active = self._context.registry.hold(session)
        sealed = operation is not None and operation.data.get("plan") is not None
        found = await self._look(session)
        verb = operation.verb if operation else None
        if verb is None and session.parent_session in forking:
            verb = Verb.FORK
        decision = reconcile(session, verb, sealed, found)
        log.info("session %s (%s, %s): %s", session.id, session.state, found.host, decision.action)
        match decision.action:
            case Action.NONE | Action.LEAVE:
                return
            case Action.UNSEAL_AND_ADOPT:
                assert operation is not None
                await self._context.database.set_step(operation.id, "unsealed", {"plan": None})
                await self._adopt(session, decision.action)
            case Action.ADOPT | Action.THAW_AND_ADOPT | Action.FREEZE_AND_ADOPT:
                await self._adopt(session, decision.action)
            case Action.TO_SUSPENDED:
                async with active.gate.closed("recovery"):
                    await self._placements.lost(active, decision.cause or "")
            case Action.TO_FAILED:
                async with active.gate.closed("recovery"):
                    await self._context.commit(
                        active,
                        {
                            "state": SessionState.FAILED,
                            "sandbox": None,
                            "cause": decision.cause,
                        },
                    )

    async def _look(self, session: Session) -> Found:
        if session.sandbox is None:
            return Found(Host.GONE)
        record = self._context.agent.record(session.sandbox)
        if record is None or record.driver not in self._context.agent.drivers:
            return Found(Host.GONE, cause="its sandbox is not on this machine")
        status = await asyncio.to_thread(self._context.agent.look, record)
        if not status.alive:
            return Found(Host.GONE, cause=status.cause)
        return Found(Host.FROZEN if status.frozen else Host.ALIVE)

    async def _adopt(self, session: Session, action: Action) -> None:
        active = self._context.registry.hold(session)
        agent = self._context.agent
        assert session.sandbox is not None
        record = agent.record(session.sandbox)
        assert record is not None
        try:
            sandbox = await agent.adopt(record, session.state)
            if action is Action.FREEZE_AND_ADOPT:
                await sandbox.freeze()
            await self._context.networks.adopted(session)
        except SojournError as error:
            log.warning("session %s cannot be taken over: %s", session.id, error)
            async with active.gate.closed("recovery"):
                with contextlib.suppress(SandboxLost):
                    await agent.stop(session.sandbox)
                await self._placements.lost(active, error.message)

    async def _again(self, operation: Operation) -> None:
        """Take an unfinished operation up again; each body goes on from what its steps recorded."""
        try:
            active = await self._context.registry.find(None, operation.session)
        except SessionNotFound:
            # Deleted: the operation's own record was all that was left to do.
            await self._context.database.finish(operation.id, None)
            return
        log.info("operation %s (%s) goes on", operation.id, operation.verb)
        self._operations.run(operation, active)
