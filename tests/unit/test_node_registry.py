"""Whose a session is, as a node's registry sees it: nothing is given out that another node holds,
and whoever waits for a session that leaves is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.database import Database, open_database
from sojourn.errors import SessionElsewhere, SessionNotFound, StaleEpoch
from sojourn.model import Session, SessionKind, SessionState
from sojourn.model.nodes import Fence
from sojourn.server.registry import Registry, elsewhere
from support.databases import insert_session, make_session

ME, OTHER = "nod_me", "nod_other"


class Taker:
    """This node, taking from a real database."""

    id = ME

    def __init__(self, database: Database) -> None:
        self._database = database
        self.came: list[str] = []
        self.went: list[str] = []
        self.fence = Fence(ME, 0)

    async def take(self, session: Session) -> Session:
        return await self._database.take_session(session.id, self.fence, session.epoch)

    async def arrived(self, session: Session) -> None:
        self.came.append(session.id)

    def left(self, session: Session) -> None:
        self.went.append(session.id)


class World:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.taker = Taker(database)
        self.registry = Registry(database, lambda _: None)
        self.registry.taker = self.taker

    async def session(self, **fields: Any) -> Session:
        fields.setdefault("state", SessionState.SUSPENDED)
        return await insert_session(self.database, make_session(**fields))


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        try:
            world = World(database)
            node = await database.add_node(ME, "me")
            world.taker.fence = node.fence
            async with asyncio.timeout(30):
                await scenario(world)
        finally:
            await database.close()

    asyncio.run(whole())


def test_what_nobody_holds_is_taken_once_however_many_ask(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session()
        find = world.registry.find
        found = await asyncio.gather(*(find(session.tenant, session.id) for _ in range(5)))
        assert len({id(active) for active in found}) == 1
        assert found[0].session.holder == ME
        assert found[0].session.epoch == session.epoch + 1
        assert set(world.taker.came) == {session.id}

    run(tmp_path, scenario)


def test_what_another_node_holds_is_only_looked_at(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session(holder=OTHER, name="theirs")
        with pytest.raises(SessionElsewhere) as told:
            await world.registry.find(session.tenant, "theirs")
        assert told.value.details == {"session": session.id, "holder": OTHER}
        assert (await world.registry.look(session.tenant, "theirs")).id == session.id
        assert world.registry.held(session.id) is None
        assert await world.registry.still(session) is None

    run(tmp_path, scenario)


def test_looking_takes_nothing(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session()
        assert (await world.registry.look(None, session.id)).holder is None
        assert (await world.database.get_session(None, session.id)).holder is None
        template = await world.session(kind=SessionKind.TEMPLATE, name="made")
        for ask in (world.registry.look, world.registry.find):
            with pytest.raises(SessionNotFound):
                await ask(template.tenant, template.id)

    run(tmp_path, scenario)


def test_whoever_waits_for_a_session_that_leaves_is_told(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session()
        active = await world.registry.find(None, session.id)

        async def hold() -> None:
            async with active.gate.closed("late"):
                raise AssertionError("it was let in")

        async with active.gate.closed("migrate"):
            waiting = [asyncio.create_task(active.gate.passed()), asyncio.create_task(hold())]
            await asyncio.sleep(0.05)
            moved = msgspec.structs.replace(active.session, holder=OTHER)
            world.registry.leave(active, moved)
        for one in waiting:
            with pytest.raises(SessionElsewhere) as told:
                await one
            assert told.value.details["holder"] == OTHER
        assert world.registry.held(session.id) is None
        assert world.taker.went == [session.id]

    run(tmp_path, scenario)


def test_a_list_that_is_old_brings_nothing_back(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session()
        active = await world.registry.find(None, session.id)
        seen = active.session
        fence = world.taker.fence
        released = await world.database.release_session(seen.id, fence, seen.epoch)
        world.registry.leave(active, released)
        assert await world.registry.still(seen) is None
        with pytest.raises(StaleEpoch):
            await world.database.take_session(seen.id, fence, seen.epoch - 1)

    run(tmp_path, scenario)


def test_nobody_holds_it_is_told_as_such() -> None:
    told = elsewhere(make_session(holder=None))
    assert told.details["holder"] is None and "no node holds" in told.message
