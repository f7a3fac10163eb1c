"""What left sessions, in the tree: what a rollback from one snapshot to another leaves behind."""

from __future__ import annotations

import time
from typing import Any

from sojourn.database import Database
from sojourn.database.writes import (
    DeleteSnapshot,
    InsertSnapshot,
    PutEffect,
    SettleEffects,
    UpdateSession,
    UpdateSnapshot,
)
from sojourn.model import Session, SessionState, new_id
from sojourn.model.network import Effect, NetworkMode, NetworkPolicy, NetworkRule
from support.databases import Harness, insert_session, make_session, make_snapshot

RUNNING = SessionState.RUNNING


def make_effect(session: Session, **fields: Any) -> Effect:
    values: dict[str, Any] = {
        "id": new_id("eff"),
        "session": session.id,
        "sandbox": "sbx-1",
        "epoch": session.epoch,
        "kind": "http",
        "method": "POST",
        "scheme": "https",
        "host": "api.example.com",
        "port": 443,
        "path": "/orders",
        "idempotent": False,
        "rule": "api",
        "secrets": [],
        "began_at": time.time(),
    }
    return Effect(**(values | fields))


class Line:
    """A session that does something and takes snapshots, as the server commits it."""

    def __init__(self, database: Database, session: Session) -> None:
        self.database = database
        self.session = session

    async def act(self, **fields: Any) -> str:
        effect = make_effect(self.session, **fields)
        lasting = fields.get("method", "POST") != "GET"
        assert (await self.database.commit([PutEffect(effect, lasting)]))[0]
        return effect.id

    async def snapshot(self, until: float | None = None) -> str:
        taken = make_snapshot(self.session, parent=self.session.head)
        await self.database.commit(
            [
                InsertSnapshot(taken),
                SettleEffects(self.session.id, taken.id, until or time.time()),
                self._head(taken.id),
            ]
        )
        return await self._at(taken.id)

    async def go(self, snapshot: str) -> None:
        await self.database.commit(
            [SettleEffects(self.session.id, None, time.time()), self._head(snapshot)]
        )
        await self._at(snapshot)

    def _head(self, snapshot: str) -> UpdateSession:
        return UpdateSession(self.session.id, {RUNNING}, 1, {"head": snapshot})

    async def _at(self, snapshot: str) -> str:
        self.session = await self.database.get_session(None, self.session.id)
        assert self.session.head == snapshot
        return snapshot

    async def left(self, base: str) -> list[str]:
        """What a rollback to a snapshot leaves behind now."""
        found, count = await self.database.effects_between(
            base, self.session.head, session=self.session.id
        )
        assert count == len(found)
        return [one.effect.id for one in found]


async def begin(database: Database) -> Line:
    return Line(database, await insert_session(database, make_session()))


def test_a_policy_is_kept_with_its_session(database: Harness) -> None:
    policy = NetworkPolicy(
        mode=NetworkMode.ALLOWLIST, rules=[NetworkRule("api", domains=["api.example.com"])]
    )

    async def scenario(database: Database) -> Session:
        made = await insert_session(database, make_session(network=policy))
        assert made.network == policy
        await database.commit(
            [UpdateSession(made.id, {RUNNING}, 1, {"network": NetworkPolicy(NetworkMode.OPEN)})]
        )
        return await database.get_session(None, made.id)

    assert database.run(scenario).network == NetworkPolicy(NetworkMode.OPEN)


def test_what_was_done_on_the_way_is_left_behind(database: Harness) -> None:
    async def scenario(database: Database) -> None:
        line = await begin(database)
        first = await line.snapshot()
        one = await line.act()
        await line.act(method="GET")
        second = await line.snapshot()
        two = await line.act()
        assert await line.left(first) == [one, two]
        assert await line.left(second) == [two]
        third = await line.snapshot()
        assert await line.left(third) == []
        assert await line.left(second) == [two]
        between, count = await database.effects_between(first, second)
        assert [effect.effect.id for effect in between] == [one] and count == 1

    database.run(scenario)


def test_what_a_rollback_left_is_not_told_again_on_the_new_line(database: Harness) -> None:
    async def scenario(database: Database) -> None:
        line = await begin(database)
        first = await line.snapshot()
        one = await line.act()
        second = await line.snapshot()
        await line.act()  # after the last snapshot: on no line once it is left
        await line.go(first)
        assert await line.left(first) == []
        three = await line.act()
        assert await line.left(first) == [three]
        await line.snapshot()
        # Back on the first branch: what was done on the second one is left behind.
        assert await line.left(second) == [three]
        await line.go(second)
        assert await line.left(first) == [one]

    database.run(scenario)


def test_what_begins_while_a_snapshot_is_taken_comes_after_it(database: Harness) -> None:
    async def scenario(database: Database) -> None:
        line = await begin(database)
        first = await line.snapshot()
        frozen = time.time()
        late = await line.act(began_at=frozen + 0.001)
        second = await line.snapshot(until=frozen)
        assert await line.left(second) == [late]
        assert await line.left(first) == [late]

    database.run(scenario)


def test_removed_snapshots_pass_on_what_lay_before_them(database: Harness) -> None:
    async def scenario(database: Database) -> None:
        line = await begin(database)
        first = await line.snapshot()
        one = await line.act()
        second = await line.snapshot()
        third = await line.snapshot()
        await line.go(second)
        fourth = await line.snapshot()
        await database.commit([UpdateSnapshot(second, {"hidden": True}), DeleteSnapshot(second)])
        assert await line.left(first) == [one]
        await line.go(third)
        assert await line.left(first) == [one]
        assert await line.left(fourth) == []  # it lies before both

    database.run(scenario)


def test_an_end_is_recorded_once_and_keeps_the_place(database: Harness) -> None:
    async def scenario(database: Database) -> None:
        line = await begin(database)
        first = await line.snapshot()
        id = await line.act()
        open_ones = await database.open_effects()
        assert [one.effect.id for one in open_ones] == [id]
        await line.snapshot()
        ended = make_effect(line.session, id=id, outcome="done", status=201, ended_at=time.time())
        await database.commit([PutEffect(ended, True)])
        assert await database.open_effects() == []
        found = await database.list_effects(line.session.id)
        assert [(one.effect.status, one.snapshot) for one in found] == [(201, first)]
        assert await line.left(first) == [id]

    database.run(scenario)


def test_pages_and_kinds_of_effects(database: Harness) -> None:
    async def scenario(database: Database) -> None:
        line = await begin(database)
        ids = [await line.act(began_at=1000.0 + n) for n in range(5)]
        reading = await line.act(method="GET", began_at=2000.0)
        session = line.session.id
        page = await database.list_effects(session, limit=3)
        assert [one.effect.id for one in page] == ids[:3]
        last = page[-1].effect
        rest = await database.list_effects(session, after=(last.began_at, last.id))
        assert [one.effect.id for one in rest] == ids[3:]
        everything = await database.list_effects(session, all=True)
        assert [one.effect.id for one in everything] == [*ids, reading]

    database.run(scenario)


def test_nothing_is_recorded_of_a_session_that_is_not_there(database: Harness) -> None:
    async def scenario(database: Database) -> Any:
        return (await database.commit([PutEffect(make_effect(make_session()), True)]))[0]

    assert database.run(scenario) is False
