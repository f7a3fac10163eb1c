"""A session that cannot leave goes on where it was, and one that left is not touched any more: the
steps of a migration over a real database, with sandboxes and the object store standing in."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.database import Database, open_database
from sojourn.database.writes import InsertSnapshot, SetStep, UpdateSession
from sojourn.errors import Conflict, SessionElsewhere, SojournError, StoreUnreachable
from sojourn.model import SessionState
from sojourn.model.nodes import NodeState, Resources
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.guards import StoreGuard
from sojourn.server.nodes.holding import Holding
from sojourn.server.nodes.identity import NodeSettings
from sojourn.server.nodes.migration import Migration
from sojourn.server.operations import Operations, Run
from sojourn.server.registry import ActiveSession, Registry
from support.databases import insert_session, make_session, make_snapshot

WHO = Principal("ten_a", "test", "tenant")
ME, OTHER = "nod_me", "nod_other"
RUNNING, SUSPENDED = SessionState.RUNNING, SessionState.SUSPENDED


class Sandboxes:
    """Puts sessions away and places them, by commits alone."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.sealed = self.placed = 0

    # as Verbs
    async def seal(self, run: Run, memory: bool) -> None:
        self.sealed += 1
        await run.step("seal", plan={"sandbox": "sbx-1"})

    async def put_away(self, run: Run, why: str, *also: Any, moved: bool = False) -> None:
        assert moved
        await self._context.commit(
            run.active, {"state": SUSPENDED, "sandbox": None, "node": None}, *also
        )

    # as Placements
    async def check_held(self, active: ActiveSession) -> bool:
        return active.session.live

    async def require_held(self, active: ActiveSession) -> None:
        pass

    async def place(
        self, run: Run, active: ActiveSession, head: Any, changes: Any, *also: Any
    ) -> None:
        self.placed += 1
        epoch = active.session.epoch + 1
        await self._context.commit(
            active, {"state": RUNNING, "sandbox": "sbx-2", "epoch": epoch, **changes}, *also
        )

    # as Snapshots
    async def begin_or_files_only(self, active: ActiveSession) -> None:
        pass

    async def finish(self, active: ActiveSession, taking: None, *, actor: str) -> None:
        pass

    async def head(self, session: Any) -> None:
        pass


class World:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.unreachable: list[str] = []
        self.before_sending: Callable[[], Awaitable[None]] | None = None
        context: Any = Context.__new__(Context)
        self.context = context
        context.database = database
        context.registry = Registry(database, lambda _: None)
        context.guard = StoreGuard()
        context.server = ME
        context._chores = set()
        context.replicator = types.SimpleNamespace(durable=self._durable, changed=lambda _: None)
        guest = types.SimpleNamespace(
            run=None, attached=True, lost=None, exists=self._no_hook, stat=self._no_hook
        )
        sandbox = types.SimpleNamespace(frozen=True, guest=guest, has=lambda _: True)
        driver = types.SimpleNamespace(capabilities=frozenset(), runtime="runsc 1")
        context.agent = types.SimpleNamespace(
            drivers={"gvisor": driver}, find=lambda *_: sandbox, destroy_soon=lambda _: None
        )
        context.ports = types.SimpleNamespace(left=lambda _: None)
        lease = types.SimpleNamespace(held=True, require=lambda: None, losses=0)
        self.node = types.SimpleNamespace(
            id=ME,
            settings=NodeSettings(id=ME, address=""),
            lease=lease,
            hint=asyncio.Event(),
            fence=None,
        )
        context.node = self.node
        self.sandboxes = Sandboxes(context)
        turns: Any = types.SimpleNamespace(settle=self._settle)
        holding = Holding(context, self.node, turns)  # type: ignore[arg-type]
        context.registry.taker = holding
        self.operations = Operations(context, {})
        given: Any = self.sandboxes
        self.migration = Migration(
            context,
            self.node,
            holding,
            given,
            given,
            given,
            self.operations,  # type: ignore[arg-type]
        )
        self.operations.know({"migrate": self.migration.migrate})

    async def _no_hook(self, *_: object) -> None:
        raise AssertionError("a frozen sandbox runs no hook")

    async def _settle(self, active: ActiveSession) -> None:
        pass

    async def _durable(self, snapshot: str, timeout: float) -> None:
        if self.before_sending is not None:
            await self.before_sending()
        if self.unreachable:
            raise StoreUnreachable(self.unreachable.pop())

    async def start(self) -> ActiveSession:
        for id in (ME, OTHER):
            await self.database.add_node(id, id.removeprefix("nod_"))
            node = await self.database.start_node(
                id,
                address="127.0.0.1:1",
                capacity=Resources(),
                runtime="runsc 1",
                cpu=[],
                version="0",
                lease=60.0,
            )
            if id == ME:
                self.node.fence = node.fence
        session = await insert_session(
            self.database, make_session(holder=ME, state=RUNNING, sandbox="sbx-1", driver="gvisor")
        )
        head = make_snapshot(session, durable_at=1.0)
        update = UpdateSession(session.id, {RUNNING}, session.epoch, {"head": head.id})
        stored = (await self.database.commit([InsertSnapshot(head), update]))[1]
        active: ActiveSession = self.context.registry.hold(stored)
        return active

    async def migrate(self, active: ActiveSession, node: str | None = "other") -> Any:
        begun = await self.operations.begin(WHO, active, "migrate", {"node": node}, None)
        await self.operations.join(active.id, 20)
        return await self.database.get_operation(None, begun.id)


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        world = World(database)
        try:
            async with asyncio.timeout(30):
                await scenario(world)
        finally:
            await world.context.settle(5)
            await database.close()

    asyncio.run(whole())


def test_session_and_operation_are_handed_over_in_one_commit(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        active = await world.start()
        ended = await world.migrate(active)
        assert (ended.finished, ended.server, ended.data["handed"]) == (False, OTHER, True)
        moved = await world.database.get_session(None, active.id)
        assert (moved.holder, moved.state) == (OTHER, SUSPENDED)
        assert moved.epoch == active.session.epoch + 1
        with pytest.raises(SessionElsewhere):
            await active.gate.passed()
        assert world.sandboxes.placed == 0

    run(tmp_path, scenario)


def test_what_cannot_be_sent_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        active = await world.start()

        async def once_put_away() -> None:
            if active.state is SUSPENDED:
                world.unreachable = ["the store is away"]

        world.before_sending = once_put_away
        ended = await world.migrate(active)
        assert ended.error.code == StoreUnreachable.code
        stayed = await world.database.get_session(None, active.id)
        assert (stayed.holder, stayed.state, stayed.sandbox) == (ME, RUNNING, "sbx-2")
        assert (world.sandboxes.sealed, world.sandboxes.placed) == (1, 1)
        await active.gate.passed()
        assert await world.database.unfinished_operations() == []

    run(tmp_path, scenario)


def test_what_cannot_be_copied_is_not_even_stopped(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        active = await world.start()
        world.unreachable = ["the store is away"]
        ended = await world.migrate(active)
        assert ended.error.code == StoreUnreachable.code
        assert (active.state, world.sandboxes.sealed) == (RUNNING, 0)

    run(tmp_path, scenario)


def test_nothing_is_handed_to_a_node_that_went_away_meanwhile(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        active = await world.start()

        async def gone() -> None:
            node = await world.database.get_node(OTHER)
            if node.lease_left > 0:
                await world.database.stop_node(node.fence)

        world.before_sending = gone
        ended = await world.migrate(active)
        assert ended.error.code == Conflict.code
        assert (active.state, active.session.holder) == (RUNNING, ME)
        assert world.sandboxes.placed == 1

    run(tmp_path, scenario)


@pytest.mark.parametrize("node", ["me", "other", None])
def test_where_to(tmp_path: Path, node: str | None) -> None:
    async def scenario(world: World) -> None:
        active = await world.start()
        await world.database.set_node_state(OTHER, NodeState.CORDONED)
        ended = await world.migrate(active, node)
        assert (active.state, world.sandboxes.sealed) == (RUNNING, 0)
        if node == "me":
            assert ended.result == {"node": ME}
        else:
            assert ended.error.code == Conflict.code
            assert "cordoned" in ended.error.message

    run(tmp_path, scenario)


def test_on_the_other_node_it_is_placed_or_given_up(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        active = await world.start()
        # As another node leaves it: handed over to this one.
        begun, _ = await world.database.begin(
            tenant=active.session.tenant,
            session=active.id,
            verb="migrate",
            request={"actor": "test"},
            server=OTHER,
        )
        step = SetStep(begun.id, "handed", {"handed": True, "was": "running"}, server=ME)
        await world.database.commit([step])
        changes = {"state": SUSPENDED, "sandbox": None}
        await world.context.commit(active, changes)
        place = world.sandboxes.place

        async def refused(*_: Any) -> None:
            raise SojournError("another runtime")

        world.sandboxes.place = refused  # type: ignore[assignment, method-assign]
        handed = await world.database.get_operation(None, begun.id)
        ended = await world.operations.run(handed, active)
        assert ended.error is not None and ended.error.message == "another runtime"
        await world.context.settle(10)
        free = await world.database.get_session(None, active.id)
        assert (free.holder, free.state) == (None, SUSPENDED)
        assert place is not None

    run(tmp_path, scenario)


def test_a_paused_session_is_paused_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sojourn.node import captures

    async def scenario(world: World) -> None:
        active = await world.start()
        begun, _ = await world.database.begin(
            tenant=active.session.tenant,
            session=active.id,
            verb="migrate",
            request={"actor": "test"},
            server=ME,
        )
        data = {"handed": True, "was": "paused"}
        await world.database.commit([SetStep(begun.id, "handed", data)])
        await world.context.commit(active, {"state": SUSPENDED, "sandbox": None})
        paused: list[Any] = []

        async def pause(sandbox: Any) -> None:
            paused.append(sandbox)

        monkeypatch.setattr(captures, "pause", pause)
        ended = await world.operations.run(
            await world.database.get_operation(None, begun.id), active
        )
        assert ended.error is None and len(paused) == 1
        assert active.state is SessionState.PAUSED
        events = await world.database.list_events(active.id, kinds=["migrate"])
        assert [event.details["node"] for event in events] == [ME]
        assert msgspec.to_builtins(ended.result) == {"node": ME}

    run(tmp_path, scenario)
