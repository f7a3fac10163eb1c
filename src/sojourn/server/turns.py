"""Turns: commands and file operations, between which automatic snapshots are taken.

Guarantee: a turn enters only a running session (resuming it first where that is allowed), is in
the event log when it is acknowledged, and when it changed something the next turn begins only
after its snapshot was taken, so that each turn has its own point to go back to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from sojourn.database.writes import AppendEvent
from sojourn.errors import (
    Conflict,
    DiskQuotaExceeded,
    Interrupted,
    NodeFenced,
    SandboxLost,
    SessionBusy,
    SessionElsewhere,
    SojournError,
    WrongState,
)
from sojourn.lifecycle import Command, Verb, decide, idle_deadline
from sojourn.model import AutoSnapshot, SessionState, new_id
from sojourn.node.sandboxes import Sandbox
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.operations import Operations
from sojourn.server.placements import Placements
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots, Taking
from sojourn.telemetry import declared, logs, tracing

log = logging.getLogger(__name__)

# How long an automatic snapshot waits for commands that run beside the one that ended.
_SETTLE_SECONDS = 1.0
_ENTER_TRIES = 20
_EXPLAIN_SECONDS = 5.0
# With the policy `idle`: the pause that counts as one, and the longest wait for it.
_QUIET_SECONDS = 0.25
_QUIET_MOST_SECONDS = 10.0


class Turn:
    """One turn under way. `details` and `result` go into its event."""

    def __init__(self, active: ActiveSession, sandbox: Sandbox, kind: str, actor: str) -> None:
        self.active = active
        self.sandbox = sandbox
        self.kind = kind
        self.actor = actor
        self.details: dict[str, Any] = {}
        self.result = "ok"
        self.changes = True
        self.started = time.time()


class Turns:
    """Lets turns in, and takes the automatic snapshots after them."""

    def __init__(
        self,
        context: Context,
        operations: Operations,
        snapshots: Snapshots,
        placements: Placements,
    ) -> None:
        self._context = context
        self._operations = operations
        self._snapshots = snapshots
        self._placements = placements
        self._following: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Follow no process any more; what was seen to end is still looked at."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)

    # -- enter ------------------------------------------------------------------------------

    async def running(
        self, who: Principal, ref: str, *, beside: bool = False
    ) -> tuple[ActiveSession, Sandbox]:
        """The session with its sandbox, resumed first when it sleeps and its policy allows it.
        `beside` does not wait for the snapshot of the turns before.

        Raises SessionNotFound, WrongState, SessionBusy and what a failed resume raises.
        """
        active = await self._context.registry.find(who.tenant, ref)
        logs.note(tenant=who.tenant, session=active.id)
        waited: float | None = None
        before = active.ended
        for _ in range(_ENTER_TRIES):
            await active.gate.passed()
            self._context.require_lease()
            strict = active.session.policy.auto_snapshot is AutoSnapshot.TURN
            waits = strict and not beside and active.turns == 0 and active.looked < before
            if waits and active.pending is not None:
                # The snapshot of the turns before comes first.
                active.hurry.set()
                await asyncio.wait({active.pending})
                continue
            if active.state is SessionState.RUNNING:
                try:
                    sandbox = self._context.sandbox(active)
                except SandboxLost:
                    await self._placements.check(active)
                    continue
                self._touch(active)
                if waited is not None:
                    declared.FIRST_COMMAND_SECONDS.observe(time.perf_counter() - waited)
                return active, sandbox
            waited = waited or time.perf_counter()
            await self._wake(who, active)
        raise SessionBusy(f"session {active.id} does not come to rest", state=str(active.state))

    async def _wake(self, who: Principal, active: ActiveSession) -> None:
        if self._operations.current(active.id) is not None:
            # Whatever is under way may well leave it running.
            await self._operations.join(active.id, 60.0)
            if active.state is SessionState.RUNNING:
                return
        decide(active.session, Command(Verb.EXEC))
        try:
            operation = await self._operations.begin(who, active, "resume", {"auto": True}, None)
        except SessionBusy:
            return  # another verb came first; look again
        await self._operations.complete(operation)

    def _touch(self, active: ActiveSession) -> None:
        deadline = idle_deadline(active.session.policy, active.session.idle_deadline, time.time())
        if deadline is not None:
            self._context.database.touch_idle(active.id, deadline)

    @contextlib.asynccontextmanager
    async def turn(
        self, who: Principal, ref: str, kind: str, *, frees: bool = False, **details: Any
    ) -> AsyncIterator[Turn]:
        """Around one turn. `frees` lets it in although the session is over its disk limit."""
        active, sandbox = await self.running(who, ref)
        if active.over_quota is not None and not frees:
            raise DiskQuotaExceeded(
                f"the session holds {active.over_quota} bytes of files, its limit is"
                f" {active.session.limits.disk_bytes}",
                used=active.over_quota,
                limit=active.session.limits.disk_bytes,
            )
        turn = Turn(active, sandbox, kind, who.actor)
        turn.details.update(details)
        active.turns += 1
        active.entered += 1
        what = details.get("command", kind)
        active.commands.append(what)
        try:
            yield turn
        except SojournError as error:
            turn.result = error.code
            if isinstance(error, SandboxLost):
                await self._explain(active, sandbox, error)
            raise
        except BaseException:
            turn.result = "interrupted"
            raise
        finally:
            active.turns -= 1
            active.commands.remove(what)
            await self._ended(turn)

    @contextlib.asynccontextmanager
    async def call(self, who: Principal, ref: str) -> AsyncIterator[Sandbox]:
        """Around a call that changes nothing (reading, looking): the session is not idle as long
        as it lasts."""
        async with self._called(who, ref, beside=False) as (_, sandbox):
            yield sandbox

    def process_call(
        self, who: Principal, ref: str
    ) -> contextlib.AbstractAsyncContextManager[tuple[ActiveSession, Sandbox]]:
        """The same for calls to a process that goes on by itself (waiting, input, output), which
        `follow`, `end_seen` or `note` what it may have changed. They are no turns of their own:
        pieces of one long input do not wait for a snapshot after each."""
        return self._called(who, ref, beside=True)

    @contextlib.asynccontextmanager
    async def _called(
        self, who: Principal, ref: str, *, beside: bool
    ) -> AsyncIterator[tuple[ActiveSession, Sandbox]]:
        active, sandbox = await self.running(who, ref, beside=beside)
        active.calls += 1
        try:
            yield active, sandbox
        except SandboxLost as error:
            await self._explain(active, sandbox, error)
            raise
        finally:
            active.calls -= 1

    async def check_alive(self, turn: Turn) -> None:
        """Tell a command that failed from one that took its sandbox along: where the memory limit
        ended a part of a sandbox, the rest may answer for a moment. Raises SandboxLost."""
        status = await asyncio.to_thread(turn.sandbox.status)
        if not status.alive:
            raise SandboxLost(f"the sandbox ended: {status.cause or 'its kernel is gone'}")

    async def _explain(self, active: ActiveSession, sandbox: Sandbox, error: SandboxLost) -> None:
        """Say why the sandbox died: as the host tells it, or as whoever noticed it recorded it."""
        if active.doomed:
            # Its sandbox was ended on purpose: what the caller has to know is why.
            raise Interrupted(f"session {active.id} was deleted") from error
        noting = self._context.soon(self._placements.check(active), f"check {active.id}")
        if "cause" in error.details:
            return  # what the host shows by now may be what was done about it
        status = await asyncio.to_thread(sandbox.status)
        cause = None if status.alive else status.cause
        if cause is None:
            await asyncio.wait({noting}, timeout=_EXPLAIN_SECONDS)
            if active.session.sandbox != sandbox.record.sandbox:
                cause = active.session.cause
        if cause is not None:
            error.message = f"the sandbox ended: {cause}"
            error.details["cause"] = cause

    # -- leave ------------------------------------------------------------------------------

    async def _ended(self, turn: Turn) -> None:
        active = turn.active
        declared.TURNS.add(turn.kind, turn.result)
        tracing.past(f"turn {turn.kind}", int(turn.started * 1e9), sojourn__session=active.id)
        self._touch(active)
        event = self._context.database.append_event(
            AppendEvent(
                session=active.id,
                kind=turn.kind,
                actor=turn.actor,
                result=turn.result,
                details=turn.details | {"seconds": round(time.time() - turn.started, 6)},
                before=active.session.head,
                after=active.session.head,
            )
        )
        if turn.changes:
            self._look_later(active, event)
        try:
            await event
        except NodeFenced as error:
            # It was done, here, and is gone with this node: nobody may take it for not begun.
            raise Interrupted(
                "the node was taken for lost while this was under way",
                next_step="Look whether it was done, and ask again; the session goes on elsewhere.",
                node=error.details.get("node"),
            ) from error

    def note(self, active: ActiveSession, *, later: bool = False) -> None:
        """Something outside a turn may have changed the session: a process that ended, input that
        was given to one (`later`: what comes of it takes a moment to show)."""
        self._look_later(active, None, later=later)

    def follow(self, active: ActiveSession, sandbox: Sandbox, process: int) -> None:
        """Have the end of a process that goes on by itself noted, whoever waits for it or not."""
        key = (sandbox.record.sandbox, process)
        if key not in active.followed:
            active.followed.add(key)
            task = asyncio.create_task(self._follow(active, sandbox, process))
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    async def _follow(self, active: ActiveSession, sandbox: Sandbox, process: int) -> None:
        key = (sandbox.record.sandbox, process)
        try:
            while True:
                try:
                    await sandbox.guest.wait(process)
                    break
                except Interrupted:
                    continue  # a pause; after anything else the next wait says so
            if key in active.followed:
                self.note(active)
        except SojournError as error:
            log.debug("the end of process %d of %s is not seen: %s", process, active.id, error)
        finally:
            active.followed.discard(key)

    def end_seen(self, active: ActiveSession, sandbox: Sandbox, process: int) -> None:
        """A caller learned of the end of a process: what it did is looked for before the caller's
        next turn."""
        active.followed.discard((sandbox.record.sandbox, process))
        self.note(active)

    def _look_later(
        self, active: ActiveSession, event: asyncio.Future[int] | None, *, later: bool = False
    ) -> None:
        active.ended += 1
        wanted = (
            active.session.policy.auto_snapshot is not AutoSnapshot.OFF
            and active.bracket is None
            and active.state is SessionState.RUNNING
        )
        if wanted and active.pending is None:
            active.pending = self._context.soon(
                self._after_turn(active, event, later), f"automatic snapshot {active.id}"
            )

    async def _after_turn(
        self, active: ActiveSession, event: asyncio.Future[int] | None, later: bool
    ) -> None:
        seen = active.ended
        try:
            if later or active.session.policy.auto_snapshot is AutoSnapshot.IDLE:
                await self._quiet(active)
            elif active.turns:
                await self._settled(active)
            turn = None if event is None else await event
            async with active.gate.closed("automatic snapshot"):
                seen = active.ended
                await self.snapshot_if_changed(active, turn)
        except SessionElsewhere as error:
            log.info("no automatic snapshot of %s, which went with its state: %s", active.id, error)
        except (SandboxLost, Conflict) as error:
            log.info("no automatic snapshot of %s: %s", active.id, error)
            if not active.doomed:  # what a deletion ends is no loss
                self._context.soon(self._placements.check(active), f"check {active.id}")
        except SojournError as error:
            await self._failed(active, error)
        finally:
            active.pending = None
            active.looked = max(active.looked, seen)
            active.hurry.clear()
            if active.ended != seen:
                # What ended while this look was under way may be missing in it.
                active.ended -= 1
                self._look_later(active, None)

    async def _failed(self, active: ActiveSession, error: SojournError) -> None:
        log.warning("no automatic snapshot of %s: %s", active.id, error)
        active.dirty = True
        with contextlib.suppress(SojournError):
            await self._context.database.append_event(
                AppendEvent(
                    session=active.id,
                    kind="snapshot.failed",
                    result=error.code,
                    details={"message": error.message, **error.details},
                    before=active.session.head,
                    after=active.session.head,
                )
            )

    async def _settled(self, active: ActiveSession) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while active.turns and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    async def _quiet(self, active: ActiveSession) -> None:
        """Wait for a pause between turns, but not for ever."""
        deadline = time.monotonic() + _QUIET_MOST_SECONDS
        while time.monotonic() < deadline and not active.hurry.is_set():
            seen = (active.entered, active.ended)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_SECONDS):
                    await active.hurry.wait()
            if not active.turns and (active.entered, active.ended) == seen:
                return

    async def snapshot_if_changed(self, active: ActiveSession, turn: int | None) -> bool:
        """Take an automatic snapshot when something changed. The caller holds the gate."""
        if active.state is not SessionState.RUNNING:
            return False
        sandbox = self._context.sandbox(active)
        if not active.dirty and not await sandbox.changed():
            return False
        taking = await self._snapshots.begin_or_files_only(active)
        # The session goes on while the snapshot is hashed, synced and committed; whoever closes
        # the gate next waits for that.
        active.gate.settling = self._context.soon(
            self._finish(active, taking, turn), f"snapshot {active.id}"
        )
        return True

    async def _finish(self, active: ActiveSession, taking: Taking, turn: int | None) -> None:
        try:
            await self._snapshots.finish(active, taking, turn=turn)
        except SojournError as error:
            await self._failed(active, error)

    async def settle(self, active: ActiveSession) -> None:
        """Wait for the automatic snapshot of the last turn, so that the head is the present."""
        while active.pending is not None:
            active.hurry.set()
            await asyncio.wait({active.pending})
        await active.gate.settled()

    # -- bracketed groups -------------------------------------------------------------------

    async def begin(self, who: Principal, ref: str, label: str | None) -> str:
        """Begin a group of calls that counts as one turn. Raises Conflict inside another."""
        active, _ = await self.running(who, ref)
        if active.bracket is not None:
            raise Conflict(
                f"session {active.id} is inside turn {active.bracket}",
                next_step="End that turn first.",
            )
        turn = active.bracket = new_id("trn")
        try:
            await self._context.database.append_event(
                AppendEvent(
                    session=active.id,
                    kind="turn.begin",
                    actor=who.actor,
                    result="ok",
                    details={"turn": turn, "label": label},
                    before=active.session.head,
                )
            )
        except BaseException:
            active.bracket = None  # nobody was told of it, so nobody could end it
            raise
        return turn

    async def end(self, who: Principal, ref: str, turn: str) -> str | None:
        """End a group; the snapshot taken, or None when nothing had changed."""
        active = await self._context.registry.find(who.tenant, ref)
        if active.bracket != turn:
            raise WrongState(f"session {active.id} is not inside turn {turn}")
        active.bracket = None
        before = active.session.head
        sequence = await self._context.database.append_event(
            AppendEvent(
                session=active.id,
                kind="turn.end",
                actor=who.actor,
                result="ok",
                details={"turn": turn},
                before=before,
                after=before,
            )
        )
        if active.session.policy.auto_snapshot is AutoSnapshot.OFF:
            return None
        async with active.gate.closed("automatic snapshot"):
            taken = await self.snapshot_if_changed(active, sequence)
        await active.gate.settled()
        head = active.session.head
        return head if taken and head != before else None
