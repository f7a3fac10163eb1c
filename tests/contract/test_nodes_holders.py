"""Whose a session is: its holder alone begins something with it, and each change of that counts."""

from __future__ import annotations

import asyncio

import pytest

from sojourn.database import Database, DurableObjects, References
from sojourn.database.writes import (
    InsertSession,
    InsertSnapshot,
    PutEffect,
    SetStep,
    UpdateSession,
)
from sojourn.errors import (
    Conflict,
    NodeFenced,
    SessionBusy,
    SessionElsewhere,
    SessionNotFound,
    StaleEpoch,
    WrongState,
)
from sojourn.model import Policy, SessionState
from sojourn.model.network import Effect
from sojourn.model.nodes import Fence
from sojourn.model.ports import ExposedPort
from support.databases import RUNNING, SUSPENDED, Harness, make_session, make_snapshot
from support.nodes import held, joined, line, lose, opened

PAUSE = {"tenant": "ten_a", "verb": "pause", "request": {}, "server": "nod_a"}


def test_only_the_holder_begins_something(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        mine = await held(db, "nod_a")
        for holder, told in (("nod_b", "nod_b"), (None, None)):
            session = await held(db, holder)
            with pytest.raises(SessionElsewhere) as refused:
                await db.begin(session=session.id, holder="nod_a", **PAUSE)
            assert refused.value.status == 421
            assert refused.value.details["holder"] == told
        first, new = await db.begin(session=mine.id, holder="nod_a", key="k", **PAUSE)
        assert new
        with pytest.raises(SessionBusy):
            await db.begin(session=mine.id, holder="nod_a", **PAUSE)
        change = UpdateSession(mine.id, {RUNNING}, 1, {"holder": "nod_b", "epoch": 2})
        await db.commit([change])
        # It is told where the session is, not that it is busy; what it began it may still ask for.
        with pytest.raises(SessionElsewhere):
            await db.begin(session=mine.id, holder="nod_a", **PAUSE)
        assert await db.begin(session=mine.id, holder="nod_a", key="k", **PAUSE) == (first, False)
        with pytest.raises(SessionNotFound):
            await db.begin(session="ses_none", holder="nod_a", **PAUSE)
        made = make_session(holder="nod_a")
        _, new = await db.begin(
            session=made.id, holder="nod_a", creates=True, also=[InsertSession(made)], **PAUSE
        )
        assert new

    database.run(scenario)


def test_one_node_takes_a_session_that_nobody_holds(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        nodes = [await joined(db, f"nod_{n}") for n in range(4)]
        session = await held(db, None, state=SUSPENDED)
        async with opened(database) as two:
            takes = [
                each.take_session(session.id, node.fence, 1)
                for each, node in zip((db, two, db, two), nodes, strict=True)
            ]
            took = await asyncio.gather(*takes, return_exceptions=True)
        (won,) = [one for one in took if not isinstance(one, BaseException)]
        assert won.epoch == 2
        refused = [one for one in took if isinstance(one, SessionElsewhere)]
        assert len(refused) == 3
        assert {one.details["holder"] for one in refused} == {won.holder}
        assert await db.get_session(None, session.id) == won
        # Asked again, because the answer was lost.
        assert won.holder is not None
        assert await db.take_session(session.id, Fence(won.holder, 1), 1) == won
        assert await db.take_session(session.id, Fence(won.holder, 1), 2) == won

    database.run(scenario)


def test_what_cannot_be_taken(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        live = await held(db, None)
        with pytest.raises(WrongState):
            await db.take_session(live.id, node.fence, 1)
        away = await held(db, None, state=SUSPENDED, epoch=5)
        with pytest.raises(StaleEpoch):
            await db.take_session(away.id, node.fence, 4)
        gone = await held(db, None, state=SessionState.DELETED)
        for id in (gone.id, "ses_none"):
            with pytest.raises(SessionNotFound):
                await db.take_session(id, node.fence, 1)
        await lose(db, node)
        with pytest.raises(NodeFenced):
            await db.take_session(away.id, node.fence, 5)
        assert (await db.get_session(None, away.id)).holder is None

    database.run(scenario)


def test_a_session_is_released_when_nothing_of_it_is_here_alone(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        (_, head) = await line(db, session, [True, False])
        with pytest.raises(WrongState):
            await db.mark_durable(head.id, fingerprint="ff", at=1.0)
            await db.release_session(session.id, node.fence, 1)
        await db.update_snapshot(head.id, durable_at=None)
        await db.commit([UpdateSession(session.id, {RUNNING}, 1, {"state": SUSPENDED})])
        with pytest.raises(Conflict) as refused:
            await db.release_session(session.id, node.fence, 1)
        assert refused.value.details["snapshot"] == head.id
        await db.mark_durable(head.id, fingerprint="ff", at=1.0)
        operation, _ = await db.begin(session=session.id, **PAUSE)
        with pytest.raises(SessionBusy):
            await db.release_session(session.id, node.fence, 1)
        with pytest.raises(StaleEpoch):
            await db.release_session(session.id, node.fence, 0, within=operation.id)
        released = await db.release_session(session.id, node.fence, 1, within=operation.id)
        assert (released.holder, released.epoch) == (None, 2)
        assert (await db.get_operation(None, operation.id)).state == "succeeded"
        # What the node still wanted to do with it is refused.
        with pytest.raises(StaleEpoch):
            await db.commit([UpdateSession(session.id, {SUSPENDED}, 1, {"labels": {}})])
        for holder in (None, "nod_b"):
            other = await held(db, holder, state=SUSPENDED)
            with pytest.raises(SessionElsewhere):
                await db.release_session(other.id, node.fence, 1)

    database.run(scenario)


def test_a_session_is_handed_over_with_its_operation_or_not_at_all(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await held(db, "nod_a")
        operation, _ = await db.begin(session=session.id, holder="nod_a", **PAUSE)
        changes = {"state": SUSPENDED, "holder": "nod_b", "epoch": 2}
        step = SetStep(operation.id, "handed", {"to": "nod_b"}, server="nod_b")
        with pytest.raises(StaleEpoch):
            await db.commit([step, UpdateSession(session.id, {RUNNING}, 0, changes)])
        assert await db.unfinished_operations(server="nod_a") == [operation]
        await db.commit([step, UpdateSession(session.id, {RUNNING}, 1, changes)])
        assert await db.unfinished_operations(server="nod_a") == []
        (moved,) = await db.unfinished_operations(server="nod_b")
        assert (moved.id, moved.step, moved.server) == (operation.id, "handed", "nod_b")
        assert (await db.set_step(moved.id, "placed")).server == "nod_b"
        assert (await db.get_session(None, session.id)).holder == "nod_b"

    database.run(scenario)


def test_nobody_holds_a_deleted_session(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await held(db, "nod_a")
        change = UpdateSession(session.id, {RUNNING}, 1, {"state": SessionState.DELETED})
        (deleted,) = await db.commit([change])
        assert deleted.holder is None

    database.run(scenario)


def test_what_is_asked_of_one_holder(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        delete = Policy(on_expiry="delete")
        due = {"idle_deadline": 1.0}
        mine = [await held(db, "nod_a", **due), await held(db, "nod_a", state=SUSPENDED)]
        theirs = await held(db, "nod_b", **due)
        free = await held(db, None, state=SUSPENDED, policy=delete, lifetime_deadline=1.0)
        ids = [one.id for one in mine]

        async def listed(holder: str | None) -> list[str]:
            return [one.id for one in (await db.list_sessions(None, holder=holder)).items]

        assert sorted(await listed("nod_a")) == sorted(ids)
        assert await listed("") == [free.id]
        assert len(await listed(None)) == 4
        assert (await db.list_sessions("ten_b", holder="nod_a")).items == []
        first = await db.list_sessions(None, holder="nod_a", limit=1)
        rest = await db.list_sessions(None, holder="nod_a", limit=1, after=first.next)
        assert sorted(one.id for one in first.items + rest.items) == sorted(ids)
        assert (await db.count_sessions(holder="nod_a"))[RUNNING] == 1
        assert (await db.count_sessions(holder=""))[SUSPENDED] == 1
        for holder, found in (("nod_a", [ids[0]]), ("nod_b", [theirs.id]), ("", [free.id])):
            assert [one.id for one in await db.due_sessions(2.0, holder=holder)] == found
        assert len(await db.due_sessions(2.0)) == 3
        port = ExposedPort(ids[0], 80, "ten_a", "http", True, "", [], None, 1.0)
        await db.put_port(port)
        assert await db.list_ports(holder="nod_a") == [port]
        assert await db.list_ports(holder="nod_b") == []
        effect = Effect(
            *("eff_1", ids[0], "sbx", 1, "tcp", "", "", "h", 1, "", False, "r", [], 1.0)
        )
        await db.commit([PutEffect(effect, True)])
        assert [one.effect for one in await db.open_effects(holder="nod_a")] == [effect]
        assert await db.open_effects(holder="nod_b") == []
        one, _ = await db.begin(session=ids[0], **PAUSE)
        two, _ = await db.begin(session=theirs.id, **(PAUSE | {"server": "nod_b"}))
        assert await db.unfinished_operations(server="nod_a") == [one]
        assert await db.unfinished_operations(server="nod_b") == [two]
        assert await db.unfinished_operations() == [one, two]

    database.run(scenario)


def test_what_the_disk_of_one_node_must_keep(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await held(db, "nod_a")
        line_a = await line(db, session, [True, True], layers=["base", "a"], image="ia")
        other = await held(db, "nod_b")
        line_b = await line(db, other, [True, False], layers=["base", "b"], image="ib")
        # Held by b, and begun from what a has.
        await held(db, "nod_b", state=SUSPENDED, head=line_a[0].id, forked_from=line_a[0].id)
        # Given away, and not durable: nobody but a has it.
        given = await held(db, "nod_c")
        (left,) = await line(db, given, [False], layers=["base", "c"], image="ic", node="nod_a")
        a, b, c = [await db.references(holder=f"nod_{n}") for n in "abc"]
        assert a == References({"base", "a", "c"}, {"ia", "ic"})
        assert b == References({"base", "a", "b"}, {"ia", "ib"})
        assert c == References({"base", "c"}, {"ic"})
        assert await db.references() == References({"base", "a", "b", "c"}, {"ia", "ib", "ic"})
        owner = {"ten_a"}
        assert await db.durable_objects(holder="nod_b") == DurableObjects(
            {"b": owner, "a": owner}, {"ib": owner, "ia": owner}, {"base"}
        )
        assert await db.durable_objects(holder="nod_c") == DurableObjects({}, {}, set())
        assert [one.id for one in await db.undurable_snapshots(node="nod_a")] == [left.id]
        assert [one.id for one in await db.undurable_snapshots(node="nod_b")] == [line_b[1].id]
        assert await db.undurable_snapshots(node="nod_c") == []
        assert len(await db.undurable_snapshots()) == 2
        assert [one.session for one in await db.durability(None, holder="nod_a")] == [session.id]
        assert len(await db.durability(None)) == 4

    database.run(scenario)


def test_what_is_not_needed_any_more_its_holder_removes(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        hidden = {}
        for holder in ("nod_a", "nod_b", None):
            session = await held(db, holder)
            hidden[holder] = make_snapshot(session, hidden=True)
            await db.commit([InsertSnapshot(hidden[holder])])
        for holder in ("nod_a", "nod_b"):
            found = {one.id for one in await db.removable_snapshots(holder=holder)}
            assert found == {hidden[holder].id, hidden[None].id}
        assert len(await db.removable_snapshots()) == 3

    database.run(scenario)
