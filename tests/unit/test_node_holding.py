"""What a node keeps on its disk and what it lets go of: manifests of what is other nodes' and safe
go, nothing goes that only this disk has."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sojourn.database import Database, open_database
from sojourn.database.writes import InsertSnapshot
from sojourn.errors import StoreUnreachable, WrongState
from sojourn.model import Session, SessionKind, SessionState
from sojourn.server.guards import StoreGuard
from sojourn.server.nodes.holding import Holding
from sojourn.server.registry import Registry
from support.databases import insert_session, insert_snapshot, make_session, make_snapshot

ME, OTHER = "nod_me", "nod_other"
SUSPENDED = SessionState.SUSPENDED


class World:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.manifests: set[str] = set()
        self.waited: list[str] = []
        self.refused: set[str] = set()
        self.guard = StoreGuard()
        self.context: Any = types.SimpleNamespace(
            database=database,
            registry=Registry(database, lambda _: None),
            guard=self.guard,
            store=types.SimpleNamespace(
                snapshot_ids=lambda: sorted(self.manifests), delete_snapshot=self.manifests.discard
            ),
            replicator=types.SimpleNamespace(durable=self._durable, changed=lambda _: None),
            ports=types.SimpleNamespace(left=lambda _: None, arrived=self._arrived),
            require_lease=lambda: None,
        )
        self.node: Any = types.SimpleNamespace(id=ME, fence=None)
        turns: Any = types.SimpleNamespace(settle=self._settle)
        self.holding = Holding(self.context, self.node, turns)
        self.context.registry.taker = self.holding

    async def _arrived(self, session: str) -> None:
        pass

    async def _settle(self, active: Any) -> None:
        pass

    async def _durable(self, snapshot: str, timeout: float) -> None:
        self.waited.append(snapshot)
        if snapshot in self.refused:
            raise StoreUnreachable("the store is away")

    async def snapshot(self, session: Session, **fields: Any) -> str:
        made = make_snapshot(session, **fields)
        await insert_snapshot(self.database, made)
        self.manifests.add(made.id)
        return made.id


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        try:
            world = World(database)
            world.node.fence = (await database.add_node(ME, "me")).fence
            async with asyncio.timeout(30):
                await scenario(world)
        finally:
            await database.close()

    asyncio.run(whole())


def test_what_is_safe_and_anothers_goes_and_nothing_else(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        mine = await insert_session(world.database, make_session(holder=ME))
        theirs = await insert_session(world.database, make_session(holder=OTHER))
        template = await insert_session(
            world.database, make_session(kind=SessionKind.TEMPLATE, state=SUSPENDED, name="made")
        )
        kept = {
            await world.snapshot(mine, durable_at=1.0),
            await world.snapshot(template, durable_at=1.0),
            await world.snapshot(theirs, node=ME),  # not sent yet
        }
        await world.snapshot(theirs, durable_at=1.0)
        world.manifests.add("snp_without_a_row")
        await world.holding.tidy()
        assert world.manifests == kept

    run(tmp_path, scenario)


def test_what_is_just_being_published_stays(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await insert_session(world.database, make_session(holder=ME))
        made = make_snapshot(session)
        async with world.guard.publishing():
            world.manifests.add(made.id)
            tidying = asyncio.create_task(world.holding.tidy())
            await asyncio.sleep(0.05)
            await world.database.commit([InsertSnapshot(made)])
        await tidying
        assert world.manifests == {made.id}

    run(tmp_path, scenario)


def test_a_session_is_released_when_all_of_it_is_safe(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await insert_session(world.database, make_session(holder=ME, state=SUSPENDED))
        own = await world.snapshot(session, node=ME)
        await world.snapshot(session, node=OTHER)  # nobody here can send that
        world.refused = {own}
        with pytest.raises(StoreUnreachable):
            await world.holding.release(session.id)
        assert (await world.database.get_session(None, session.id)).holder == ME
        world.refused = set()
        released = await world.holding.release(session.id)
        assert released.holder is None and released.epoch == session.epoch + 1
        assert set(world.waited) == {own}
        assert world.context.registry.held(session.id) is None

    run(tmp_path, scenario)


def test_a_session_that_runs_is_not_released(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await insert_session(
            world.database, make_session(holder=ME, state=SessionState.RUNNING)
        )
        with pytest.raises(WrongState):
            await world.holding.release(session.id)

    run(tmp_path, scenario)
