"""Moving a session to another node: same id, same address, same processes.

Guarantee: the session is one node's at every moment. It is handed over only when the object store
has its newest state, in the commit that also hands over the operation; before that commit whatever
fails leaves it where it was, running if it ran; after it the other node goes on from there, and
gives it to whichever node can run it where it cannot. A crash on either side at any step converges.

Most of the state is sent while the session still runs. Then it is put away as by a suspension, what
changed since is sent, and it is handed over: only that keeps its users waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from sojourn import faultpoints
from sojourn.database.records import Operation
from sojourn.database.writes import FinishOperation, SetStep, UpdateSession, Write
from sojourn.errors import (
    Conflict,
    Interrupted,
    OutcomeUnknown,
    SojournError,
    StaleEpoch,
    StoreUnreachable,
    to_body,
)
from sojourn.lifecycle import Command, Verb, decide
from sojourn.model import Session, SessionState
from sojourn.model.nodes import Node
from sojourn.node import captures, hooks
from sojourn.node.isolation.base import Capability
from sojourn.server.cluster import scheduler
from sojourn.server.context import Context
from sojourn.server.nodes.holding import Holding
from sojourn.server.nodes.identity import NodeIdentity
from sojourn.server.operations import Operations, Run
from sojourn.server.placements import Placements, hook_events
from sojourn.server.registry import ActiveSession
from sojourn.server.snapshots import Snapshots
from sojourn.server.verbs import Verbs

log = logging.getLogger(__name__)

VERB = "migrate"
_COPY_SECONDS = 900.0  # for what is sent while the session runs
_STOP_SECONDS = 60.0  # for what is sent while it does not; then it goes on where it was
_FETCH_SECONDS = 30.0  # that the other node is given to bring what was sent, while it runs
_LOOK_SECONDS = 0.1


class Migration:
    """The body of the operation, on both nodes."""

    def __init__(
        self,
        context: Context,
        node: NodeIdentity,
        holding: Holding,
        verbs: Verbs,
        snapshots: Snapshots,
        placements: Placements,
        operations: Operations,
    ) -> None:
        self._context = context
        self._node = node
        self._holding = holding
        self._verbs = verbs
        self._snapshots = snapshots
        self._placements = placements
        self._operations = operations

    async def migrate(self, run: Run) -> None:
        """Give the session away; on the other node: take it up."""
        if run.data.get("handed"):
            await self._land(run)
            return
        target = await self._choose(run)
        if target is None:
            await self._context.database.commit([run.finish({"node": self._node.id})])
            return
        if run.data.get("plan") is None and not run.data.get("away"):
            await self._copy(run)
        await self._hand_over(run, target)

    # -- where to ---------------------------------------------------------------------------

    async def _choose(self, run: Run) -> str | None:
        """The node it goes to, from now on; None: it is there. Raises Conflict, NodeNotFound."""
        known = run.data.get("target")
        if known is not None:
            return str(known)
        session = run.active.session
        if session.state is SessionState.CREATING:
            decide(session, Command(Verb.SUSPEND))
        wanted = run.request.get("node")
        if wanted is not None:
            node = await self._context.database.get_node(wanted)
            if node.id == self._node.id:
                return None
            await self._require_fit(node, session)
        else:
            node = await self.pick(session)
        await run.step("target", target=node.id, was=str(session.state), began=time.time())
        # It may bring what is sent meanwhile.
        self._context.database.tell_node(node.id, session.id)
        return node.id

    async def pick(self, session: Session) -> Node:
        """The best node for a session but this one. Raises Conflict."""
        need = await self._need(session)
        nodes = await self._context.database.list_nodes()
        found = scheduler.choose(nodes, need, self._node.settings.overcommit)
        if isinstance(found, scheduler.Refusal):
            raise Conflict(
                f"no other node can take the session: {found.cause}",
                next_step="`sojourn node ls` shows the nodes and what is in use.",
            )
        return found

    async def _need(self, session: Session) -> scheduler.Need:
        driver = self._context.agent.drivers.get(session.driver)
        with_memory = driver is not None and Capability.MEMORY in driver.capabilities
        own = await self._context.database.get_node(self._node.id)
        return scheduler.need_of(
            session.limits,
            session.labels,
            runtime=driver.runtime if driver is not None and with_memory else None,
            # Programs chose their code by what this processor has.
            cpu=frozenset(own.cpu) if with_memory else frozenset(),
            avoid=frozenset([self._node.id]),
        )

    async def _require_fit(self, node: Node, session: Session) -> None:
        need = await self._need(session)
        cause = scheduler.unfit(node, need)
        overcommit = self._node.settings.overcommit
        if cause is None and not scheduler.has_room(node, need.resources, overcommit):
            cause = "is full"
        if cause is not None:
            raise Conflict(
                f"node {node.name} {cause}",
                next_step="`sojourn node ls` shows the nodes; without a node one is chosen.",
                node=node.id,
            )

    # -- while it runs ----------------------------------------------------------------------

    async def _copy(self, run: Run) -> None:
        """Send what there is, while the session goes on. Raises CaptureRefused, StoreUnreachable
        and what else a snapshot raises; nothing was changed then."""
        active = run.active
        if active.state is SessionState.RUNNING:
            async with active.gate.closed(VERB):
                decide(active.session, Command(Verb.SNAPSHOT))
                await self._placements.require_held(active)
                taking = await self._snapshots.begin_or_files_only(active)
                active.gate.settling = self._context.soon(
                    self._snapshots.finish(active, taking, actor=run.actor), f"copy {active.id}"
                )
            await active.gate.settling
        await self._holding.make_durable(active, _COPY_SECONDS)
        if active.session.head is not None:
            await run.step("copied", copied=active.session.head)
            await self._let_fetch(run)

    async def _let_fetch(self, run: Run) -> None:
        """Give the other node time to bring what was sent, where it has begun to."""
        database = self._context.database
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not run.active.doomed:
            found = await database.get_operation(None, run.operation.id)
            if found.finished or found.data.get("fetched"):
                return
            if found.data.get("fetching"):
                until = max(until, time.monotonic() + 1.0)
                if time.time() - found.data["fetching"] > _FETCH_SECONDS:
                    return
            await asyncio.sleep(_LOOK_SECONDS)

    # -- while it does not ------------------------------------------------------------------

    async def _hand_over(self, run: Run, target: str) -> None:
        active = run.active
        async with active.gate.closed(VERB):
            if run.data.get("plan") is not None and active.session.live:
                await self._put_away(run)
            elif active.session.live and await self._placements.check_held(active):
                decide(active.session, Command(Verb.SUSPEND))
                await self._seal(run)
                await self._put_away(run)
            try:
                await self._send_head(active)
                await self._require_there(target)
                faultpoints.reach("migrate.hand.before")
                await self._hand(run, target)
            except SojournError as error:
                await self._stay(run, error)
                raise
            faultpoints.reach("migrate.hand")

    async def _seal(self, run: Run) -> None:
        active = run.active
        sandbox = self._context.sandbox(active)
        if not sandbox.frozen:  # nothing runs in a paused one
            runs = await hooks.run(
                sandbox.guest, hooks.PRE_SUSPEND, "suspend", environment=sandbox.environment
            )
            if events := hook_events(active, runs, run):
                await self._context.database.commit(events, durable=False)
        await self._verbs.seal(run, sandbox.has(Capability.MEMORY))

    async def _put_away(self, run: Run) -> None:
        await self._verbs.put_away(
            run,
            "the session moves to another node",
            SetStep(run.operation.id, "away", {"away": True, "plan": None}),
            moved=True,
        )
        run.data.update(away=True, plan=None)

    async def _send_head(self, active: ActiveSession) -> None:
        """Have the newest state in the object store. Raises StoreUnreachable, Interrupted."""
        head = active.session.head
        if head is None:
            return
        sending = asyncio.ensure_future(self._context.replicator.durable(head, _STOP_SECONDS))
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=_LOOK_SECONDS)
                if active.doomed:
                    raise Interrupted(f"session {active.id} is being deleted", next_step="")
            sending.result()
        finally:
            sending.cancel()

    async def _require_there(self, target: str) -> None:
        """Raise Conflict where nobody would go on with it."""
        node = await self._context.database.get_node(target)
        if node.lost or node.lease_left <= 0:
            raise Conflict(
                f"node {node.name} does not answer", next_step="Try again.", node=node.id
            )

    async def _hand(self, run: Run, target: str) -> None:
        active = run.active
        session = active.session
        self._context.require_lease()
        handing: list[Write] = [
            SetStep(run.operation.id, "handed", {"handed": True}, server=target),
            UpdateSession(
                id=session.id,
                expect_state={session.state},
                expect_epoch=session.epoch,
                changes={"holder": target, "epoch": session.epoch + 1},
            ),
        ]
        try:
            handed = (await self._context.database.commit(handing))[-1]
        except OutcomeUnknown:
            # Two nodes must not go on with it: whose it is comes before anything else.
            handed = await self._context.recorded(session.id)
            if handed.holder == self._node.id:
                raise
        run.elsewhere = True
        assert isinstance(handed, Session)
        self._context.registry.leave(active, handed)
        self._context.database.tell_node(target, session.id)
        log.info("session %s is handed over to node %s", session.id, target)

    async def _stay(self, run: Run, error: SojournError) -> None:
        """The session cannot leave: where it ran before, it goes on here, and the operation ends
        with the error in the same commit."""
        active = run.active
        was = run.data.get("was")
        if isinstance(error, StaleEpoch) or active.doomed or active.session.live:
            return
        if not run.data.get("away") or was not in (SessionState.RUNNING, SessionState.PAUSED):
            return
        log.warning("session %s stays: %s", active.id, error.message)
        try:
            head = await self._snapshots.head(active.session)
            await self._placements.place(
                run,
                active,
                head,
                {},
                FinishOperation(run.operation.id, error=to_body(error)),
                run.event(
                    result=error.code,
                    before=active.session.head,
                    after=active.session.head,
                    message=error.message,
                ),
            )
            run.done = True
            if was == SessionState.PAUSED:
                await self._pause(active)
        except SojournError as failure:
            # Its state is safe; the next call tries again.
            log.error("session %s is suspended: %s", active.id, failure)

    async def _pause(self, active: ActiveSession, *also: Write) -> None:
        sandbox = self._context.sandbox(active)
        await captures.pause(sandbox)
        try:
            await self._context.commit(active, {"state": SessionState.PAUSED}, *also)
        except SojournError:
            await sandbox.thaw()
            raise

    # -- on the other node ------------------------------------------------------------------

    async def _land(self, run: Run) -> None:
        active = run.active
        try:
            async with active.gate.closed(VERB):
                await self._place(run)
        except SojournError:
            # All of it is in the object store: let a node have it that can run it.
            self._context.soon(self._give_up(active), f"give up {active.id}")
            raise

    async def _place(self, run: Run) -> None:
        active = run.active
        was = run.data.get("was")
        details: dict[str, Any] = {"node": self._node.id}
        result = {"node": self._node.id}
        if was not in (SessionState.RUNNING, SessionState.PAUSED) or active.session.live:
            await self._context.database.commit([run.finish(result), self._told(run, details)])
            return
        head = await self._snapshots.head(active.session)
        if was == SessionState.PAUSED:
            await self._placements.place(run, active, head, {})
            faultpoints.reach("migrate.land")
            await self._pause(active, run.finish(result), self._told(run, details))
            return
        await self._placements.place(
            run, active, head, {}, run.finish(result), self._told(run, details)
        )
        faultpoints.reach("migrate.land")

    def _told(self, run: Run, details: dict[str, Any]) -> Write:
        head = run.active.session.head
        seconds = round(time.time() - run.data.get("began", time.time()), 3)
        return run.event(before=head, after=head, seconds=seconds, **details)

    async def _give_up(self, active: ActiveSession) -> None:
        await self._operations.join(active.id, _STOP_SECONDS)
        try:
            await self._holding.release(active.id)
        except SojournError as error:
            log.error("session %s stays with this node: %s", active.id, error.message)

    # -- beforehand -------------------------------------------------------------------------

    async def fetch(self, session: str) -> None:
        """Bring what an operation that will hand a session to this node has sent already, and tell
        it so. Returns when the operation is handed over, or over."""
        database = self._context.database
        fetched: str | None = None
        found = await self._coming(session)
        while found is not None and not found.finished:
            if found.server == self._node.id:
                self._node.hint.set()
                return
            copied = found.data.get("copied")
            if copied is not None and copied != fetched:
                fetched = str(copied)
                await self._tell(found.id, "fetching", time.time())
                with contextlib.suppress(StoreUnreachable):
                    await self.prefetch(fetched)
                await self._tell(found.id, "fetched", True)
            await asyncio.sleep(_LOOK_SECONDS)
            found = await database.get_operation(None, found.id)

    async def _coming(self, session: str) -> Operation | None:
        """The operation that hands a session to this node. It may just be about to begin."""
        database = self._context.database
        for _ in range(50):
            holder = (await database.get_session(None, session)).holder
            if holder is None:
                return None
            for one in await database.unfinished_operations(server=holder):
                if one.session == session and one.verb == VERB:
                    return one
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    async def _tell(self, operation: str, what: str, value: Any) -> None:
        with contextlib.suppress(SojournError):  # it may be over by now
            await self._context.database.set_step(operation, what, {what: value})

    async def prefetch(self, snapshot: str) -> None:
        """Bring a durable snapshot's layers and memory, which a resume would wait for. Raises
        StoreUnreachable, IntegrityError, NodeUnavailable."""
        record = await self._context.database.get_snapshot(None, snapshot, hidden=True)
        manifest = await self._context.manifests.bring(record)
        store = self._context.store

        def bring() -> None:
            for layer in manifest.layers:
                store.layer_path(layer.id)
            if manifest.memory is not None:
                store.image_path(manifest.memory.id)

        await asyncio.to_thread(bring)
