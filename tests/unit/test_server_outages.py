"""What the server does while its database is away: nothing is given up, and nobody goes on from a
record that may be old."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.database import Database, open_database
from sojourn.database.writes import FinishOperation, InsertSnapshot, UpdateSession
from sojourn.errors import (
    Interrupted,
    NodeFenced,
    OutcomeUnknown,
    SessionElsewhere,
    SojournError,
    Unreachable,
)
from sojourn.model import Session, SessionState
from sojourn.model.snapshots import SnapshotConfig
from sojourn.server import context, operations, verbs
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.guards import StoreGuard
from sojourn.server.nodes.migration import Migration
from sojourn.server.operations import Operations, Run
from sojourn.server.registry import ActiveSession, Registry
from sojourn.server.snapshots import Snapshots
from sojourn.server.turns import Turns
from sojourn.server.verbs import SealPlan, Verbs
from support.databases import insert_session, make_session, make_snapshot

WHO = Principal("ten", "test", "tenant")
ME, OTHER = "nod_me", "nod_other"


class Outage:
    """A database that is away as often as told: before its commits, or (`after`) once they are
    made, or (`lost`) instead of that; while it is away nothing can be read either."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.away = 0
        self.after = 0
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def _look(self) -> None:
        if self.away > 0:
            self.away -= 1
            raise Unreachable("the database is away")

    async def get_session(self, tenant: str | None, ref: str) -> Session:
        self._look()
        return await self._database.get_session(tenant, ref)

    async def commit(self, writes: Any, *, durable: bool = True) -> list[Any]:
        self._look()
        if self.lost > 0:
            self.lost, self.away = self.lost - 1, 2
            raise OutcomeUnknown("the database went away before a change was committed")
        results = await self._database.commit(writes, durable=durable)
        if self.after > 0:
            self.after, self.away = self.after - 1, 2
            raise OutcomeUnknown("the database went away while a change was committed")
        return results


class Rig:
    """As much of a server as commits sessions and operations."""

    def __init__(self, database: Database, session: Session) -> None:
        self.outage: Any = Outage(database)
        self.destroyed: list[str] = []
        self.context: Any = Context.__new__(Context)
        self.context.database = self.outage
        self.context.registry = Registry(self.outage, lambda _: None)
        self.context.guard = StoreGuard()
        self.context.agent = types.SimpleNamespace(destroy_soon=self.destroyed.append)
        self.context.server = "srv"
        self.context._chores = set()
        self.active: ActiveSession = self.context.registry.hold(session)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (context, "_AGAIN_SECONDS"),
        (operations, "_RETRY_SECONDS"),
        (verbs, "_RETRY_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.01)


def run(tmp_path: Path, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        rig = Rig(database, await insert_session(database, make_session()))
        try:
            async with asyncio.timeout(30):
                await scenario(rig)
        finally:
            await rig.context.settle(5)
            await database.close()

    asyncio.run(whole())


def test_whoever_comes_next_sees_what_a_commit_of_unknown_outcome_did(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.outage.after = 1
        async with rig.active.gate.closed("one"):
            with pytest.raises(OutcomeUnknown):
                await rig.context.commit(rig.active, {"labels": {"a": "1"}})
            assert rig.active.session.labels == {}
        async with rig.active.gate.closed("next"):
            assert rig.active.session.labels == {"a": "1"}

    run(tmp_path, scenario)


def test_a_deletion_of_unknown_outcome_leaves_no_sandbox(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.context.commit(rig.active, {"sandbox": "sbx-1"})
        rig.outage.after = 1
        with pytest.raises(OutcomeUnknown):
            await rig.context.commit(rig.active, {"state": SessionState.DELETED, "sandbox": None})
        async with rig.active.gate.closed("next"):
            assert rig.active.state is SessionState.DELETED
        assert rig.destroyed == ["sbx-1"]
        assert rig.context.registry.held(rig.active.id) is None

    run(tmp_path, scenario)


def test_the_failure_of_an_operation_is_recorded_when_the_database_is_back(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        async def body(_run: Run) -> None:
            rig.outage.away = 3
            await rig.context.commit(rig.active, {"labels": {}})

        made = Operations(rig.context, {"pause": body})
        begun = await made.begin(WHO, rig.active, "pause", {}, None)
        with pytest.raises(SojournError) as failed:
            await made.complete(begun)
        assert failed.value.code == Unreachable.code
        assert await rig.outage.unfinished_operations() == []
        await made.begin(WHO, rig.active, "pause", {}, None)  # nothing holds the session

    run(tmp_path, scenario)


@pytest.mark.parametrize("fault", ["away", "after"])
def test_what_was_sealed_is_put_away_however_long_the_database_is_away(
    tmp_path: Path, fault: str
) -> None:
    async def scenario(rig: Rig) -> None:
        row = make_snapshot(rig.active.session)
        plan = types.SimpleNamespace(id=row.id)
        made: Any = Verbs.__new__(Verbs)
        made._context = rig.context
        made._snapshots = types.SimpleNamespace(squash_soon=lambda *_: None)
        tries = 0

        async def once(_active: Any, _plan: SealPlan, _why: str, _moved: bool, also: Any) -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                setattr(rig.outage, fault, 2 if fault == "away" else 1)
            await rig.context.commit(
                rig.active,
                {"state": SessionState.SUSPENDED, "head": plan.id},
                InsertSnapshot(row),
                *also,
            )

        made._put_away_once = once

        async def body(run: Run) -> None:
            sealed = SealPlan("sbx-1", _manifest(rig.active.session, plan.id), None)
            run.data["plan"] = msgspec.to_builtins(sealed)
            await made._finish_seal(run)

        done = Operations(rig.context, {"suspend": body})
        begun = await done.begin(WHO, rig.active, "suspend", {}, None)
        await done.complete(begun)
        assert rig.active.state is SessionState.SUSPENDED
        assert rig.active.session.head == plan.id
        assert rig.destroyed == ["sbx-1"]
        assert tries == (3 if fault == "away" else 1)

    run(tmp_path, scenario)


def _manifest(session: Session, id: str) -> Any:
    return verbs.Snapshot(
        id=id,
        session=session.id,
        parent=None,
        kind=verbs.SnapshotKind.SUSPEND,
        label=None,
        created_at=0.0,
        layers=[],
        memory=None,
        config=SnapshotConfig("python", {}, "root", "", "sandbox"),
        fingerprint="",
    )


def test_a_commit_that_was_refused_is_no_outage(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        async def body(_run: Run) -> None:
            await rig.outage.commit([FinishOperation(_run.operation.id, result=1)])
            raise SojournError("and then it failed")

        made = Operations(rig.context, {"pause": body})
        begun = await made.begin(WHO, rig.active, "pause", {}, None)
        assert (await made.complete(begun)).result == 1

    run(tmp_path, scenario)


class Manifests:
    """A store of manifests."""

    def __init__(self) -> None:
        self.ids: set[str] = set()

    def delete_snapshot(self, id: str) -> None:
        self.ids.discard(id)


@pytest.mark.parametrize("fault", ["refused", "away", "after", "given up"])
def test_what_may_be_referred_to_is_never_withdrawn(tmp_path: Path, fault: str) -> None:
    async def scenario(rig: Rig) -> None:
        store = rig.context.store = Manifests()
        made: Any = Snapshots.__new__(Snapshots)
        made._context = rig.context
        made.collect_soon = lambda: None
        row = make_snapshot(rig.active.session)
        store.ids.add(row.id)
        writes: list[Any] = [InsertSnapshot(row)]
        if fault == "refused":
            writes.append(UpdateSession(rig.active.id, {SessionState.PAUSED}, 1, {}))
        elif fault != "given up":
            setattr(rig.outage, fault, 1)
        committing = asyncio.create_task(made.refer(writes, [row.id]))
        if fault == "given up":
            await asyncio.sleep(0)
            committing.cancel()
        with pytest.raises((SojournError, asyncio.CancelledError)):
            await committing
        rig.outage.away = 0
        await rig.outage.commit([])  # what was asked before is done by now
        rows = {one.id for one in await rig.outage.list_snapshots(rig.active.id)}
        assert rows <= store.ids  # no row without its manifest
        assert (row.id in store.ids) == (fault in ("after", "given up"))

    run(tmp_path, scenario)


def test_a_turn_that_a_fenced_node_cannot_record_is_not_told_as_one_that_never_began() -> None:
    async def scenario() -> None:
        active = ActiveSession(make_session(state=SessionState.RUNNING, sandbox="sbx-1"))
        recorded: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        recorded.set_exception(NodeFenced("another incarnation", node="nod_me"))
        made: Any = Turns.__new__(Turns)
        made._context = types.SimpleNamespace(
            database=types.SimpleNamespace(
                append_event=lambda event: recorded, touch_idle=lambda session, deadline: None
            )
        )
        made.running = lambda who, ref: _result((active, None))
        # Servers send again what a node has not begun (`node_fenced`), and never this.
        with pytest.raises(Interrupted) as told:
            async with made.turn(WHO, active.id, "exec") as turn:
                turn.changes = False
        assert told.value.details["node"] == "nod_me"

    asyncio.run(scenario())


async def _result(value: Any) -> Any:
    return value


@pytest.mark.parametrize("made", [True, False])
def test_a_session_whose_handing_over_may_have_been_made_is_one_nodes(
    tmp_path: Path, made: bool
) -> None:
    async def scenario(rig: Rig) -> None:
        for id in (ME, OTHER):
            await rig.outage.add_node(id, id)
        fields = {"state": SessionState.SUSPENDED, "holder": ME}
        active = rig.context.registry.hold(await insert_session(rig.outage, make_session(**fields)))
        operation, _ = await rig.outage.begin(
            tenant=active.session.tenant, session=active.id, verb="migrate", request={}, server=ME
        )
        run = Run(rig.context, operation, active)
        migration: Any = Migration.__new__(Migration)
        migration._context, migration._node = rig.context, types.SimpleNamespace(id=ME)
        rig.outage.after, rig.outage.lost = (1, 0) if made else (0, 1)
        if made:
            await migration._hand(run, OTHER)
            assert run.elsewhere
            assert rig.context.registry.held(active.id) is None
            with pytest.raises(SessionElsewhere):
                active.gate.require_here()
        else:
            with pytest.raises(OutcomeUnknown):
                await migration._hand(run, OTHER)
            assert not run.elsewhere
            assert rig.context.registry.held(active.id) is active

    run(tmp_path, scenario)
