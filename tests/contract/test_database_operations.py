"""Operations: begun once per key, one at a time per session, durable step by step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sojourn.database import Database, Operation, OperationState
from sojourn.database.base import KEY_LIFETIME
from sojourn.database.writes import (
    AppendEvent,
    FinishOperation,
    InsertSession,
    SetStep,
    UpdateSession,
)
from sojourn.errors import (
    Conflict,
    IdempotencyMismatch,
    NameTaken,
    OperationNotFound,
    SessionBusy,
    SessionNotFound,
    StorageFull,
    to_body,
)
from sojourn.model import Session, SessionState
from support.databases import (
    PAUSED,
    RUNNING,
    Harness,
    insert_session,
    make_session,
)


async def begin(db: Database, session: Session, verb: str = "pause", **more: Any) -> Operation:
    operation, _ = await begin_twice(db, session, verb, **more)
    return operation


async def begin_twice(
    db: Database, session: Session, verb: str = "pause", **more: Any
) -> tuple[Operation, bool]:
    asked: dict[str, Any] = {"request": {}, "server": "srv_1", **more}
    return await db.begin(tenant="ten_a", session=session.id, verb=verb, **asked)


def test_an_operation_is_there_after_reopening_with_its_steps(database: Harness) -> None:
    async def write(db: Database) -> str:
        session = await insert_session(db, make_session())
        operation = await begin(db, session, "suspend", request={"memory": True, "n": 1.5})
        assert (operation.state, operation.step_number) == (OperationState.PENDING, 0)
        await db.set_step(operation.id, "freeze", {"image": "/x", "old": 1})
        await db.set_step(operation.id, "checkpoint", {"old": None, "new": [1]})
        return operation.id

    id = database.run(write)

    async def read(db: Database) -> None:
        operation = await db.get_operation("ten_a", id)
        assert operation.state is OperationState.RUNNING
        assert (operation.step, operation.step_number) == ("checkpoint", 2)
        assert operation.data == {"image": "/x", "old": None, "new": [1]}
        assert operation.request == {"memory": True, "n": 1.5}
        assert [found.id for found in await db.unfinished_operations()] == [id]
        with pytest.raises(OperationNotFound):
            await db.get_operation("ten_b", id)

    database.run(read)


def test_recording_a_step_again_does_not_count_it_twice(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        operation = await begin(db, await insert_session(db, make_session()))
        await db.set_step(operation.id, "freeze")
        again = await db.set_step(operation.id, "freeze", {"more": 1})
        assert (again.step_number, again.data) == (1, {"more": 1})

    database.run(scenario)


@pytest.mark.parametrize("failed", [False, True])
def test_an_operation_finishes_once(database: Harness, failed: bool) -> None:
    error = to_body(StorageFull("no room", path="/x")) if failed else None

    async def scenario(db: Database) -> None:
        operation = await begin(db, await insert_session(db, make_session()))
        result = None if failed else {"snapshot": "snp_1"}
        done = await db.finish(operation.id, result, error=error)
        assert done == await db.get_operation(None, operation.id)
        assert done.state is (OperationState.FAILED if failed else OperationState.SUCCEEDED)
        assert (done.result, done.error) == (result, error)
        assert done.finished
        assert done.finished_at is not None
        with pytest.raises(Conflict, match=str(done.state)):
            await db.finish(operation.id, {"other": 1})
        with pytest.raises(Conflict):
            await db.set_step(operation.id, "late")
        assert await db.get_operation(None, operation.id) == done
        assert await db.unfinished_operations() == []

    database.run(scenario)


def test_an_unknown_operation_is_not_found(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        with pytest.raises(OperationNotFound):
            await db.set_step("opr_none", "x")
        with pytest.raises(OperationNotFound):
            await db.finish("opr_none")
        with pytest.raises(SessionNotFound):
            await begin(db, make_session())

    database.run(scenario)


# -- idempotency --------------------------------------------------------------------------------


def test_ten_creations_with_one_key_make_one_session(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        async def create() -> tuple[Operation, bool]:
            session = make_session(name="box", state=SessionState.CREATING)
            return await begin_twice(
                db,
                session,
                "create",
                request={"name": "box"},
                key="k",
                creates=True,
                also=[InsertSession(session)],
            )

        answers = await asyncio.gather(*[create() for _ in range(10)])
        assert sum(new for _, new in answers) == 1
        assert len({operation.id for operation, _ in answers}) == 1
        page = await db.list_sessions("ten_a")
        assert [session.id for session in page.items] == [answers[0][0].session]

    database.run(scenario)


def test_the_same_request_is_answered_again_also_after_reopening_and_finishing(
    database: Harness,
) -> None:
    async def first(db: Database) -> tuple[Session, Operation]:
        session = await insert_session(db, make_session())
        operation = await begin(db, session, key="k", request={"a": 1, "b": 2})
        return session, await db.finish(operation.id, {"ok": True})

    session, operation = database.run(first)

    async def again(db: Database) -> None:
        answer = await begin_twice(db, session, key="k", request={"b": 2, "a": 1})
        assert answer == (operation, False)

    database.run(again)


@pytest.mark.parametrize("other", ["request", "verb", "session"])
def test_the_key_with_another_request_is_refused(database: Harness, other: str) -> None:
    async def scenario(db: Database) -> None:
        one = await insert_session(db, make_session())
        two = await insert_session(db, make_session())
        first = await begin(db, one, key="k")
        await db.finish(first.id)
        with pytest.raises(IdempotencyMismatch) as mismatch:
            await begin(
                db,
                two if other == "session" else one,
                "resume" if other == "verb" else "pause",
                request={"x": 1} if other == "request" else {},
                key="k",
            )
        assert mismatch.value.details["operation"] == first.id
        assert list(database.operation_states(one.id)) == [first.id]
        assert database.operation_states(two.id) == {}

    database.run(scenario)


def test_keys_of_tenants_are_apart(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        mine = await insert_session(db, make_session())
        theirs = await insert_session(db, make_session(tenant="ten_b"))
        await begin(db, mine, key="k")
        _, new = await db.begin(
            tenant="ten_b", session=theirs.id, verb="delete", request={}, server="s", key="k"
        )
        assert new

    database.run(scenario)


def test_a_refused_beginning_leaves_no_trace_of_its_key(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await insert_session(db, make_session(name="box"))
        child = make_session(name="box")
        with pytest.raises(NameTaken):
            await begin(db, child, "create", key="k", creates=True, also=[InsertSession(child)])
        free = make_session(name="free")
        _, new = await begin_twice(
            db, free, "create", key="k", request={"n": 1}, creates=True, also=[InsertSession(free)]
        )
        assert new

    database.run(scenario)


def test_a_key_is_forgotten_after_a_day_unless_its_operation_goes_on(
    database: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sojourn.database.begin as beginning

    class Clock:
        ahead = 0.0

        @staticmethod
        def time() -> float:
            return real() + Clock.ahead

    real = beginning.time.time
    monkeypatch.setattr(beginning, "time", Clock)

    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        first = await begin(db, session, key="k")
        Clock.ahead = KEY_LIFETIME + 10
        assert await begin_twice(db, session, key="k") == (first, False)
        await db.finish(first.id)
        Clock.ahead = KEY_LIFETIME - 10
        assert (await begin_twice(db, session, key="k"))[1] is False
        Clock.ahead = KEY_LIFETIME + 10
        second, new = await begin_twice(db, session, "resume", key="k")
        assert new
        assert second.id != first.id

    database.run(scenario)


# -- one at a time ------------------------------------------------------------------------------


def test_a_session_has_one_unfinished_exclusive_operation(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        other = await insert_session(db, make_session())
        answers = await asyncio.gather(
            *[begin_twice(db, session, verb) for verb in ("pause", "resume", "suspend", "fork")],
            return_exceptions=True,
        )
        won = [answer[0] for answer in answers if isinstance(answer, tuple)]
        busy = [answer for answer in answers if isinstance(answer, SessionBusy)]
        assert (len(won), len(busy)) == (1, 3)
        assert busy[0].details["operation"] == won[0].id
        assert busy[0].details["verb"] == won[0].verb
        await begin(db, other)
        await begin(db, session, "exec", exclusive=False)
        await db.finish(won[0].id)
        await begin(db, session)

    database.run(scenario)


def test_delete_takes_over_from_an_operation_that_hangs(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(state=SessionState.CREATING))
        hanging = await begin(db, session, "create")
        await db.set_step(hanging.id, "mount")
        delete = await begin(db, session, "delete", supersede=True)
        ended = await db.get_operation(None, hanging.id)
        assert ended.state is OperationState.FAILED
        assert ended.error is not None
        assert ended.error.code == "interrupted"
        assert ended.error.details["superseded_by"] == delete.id
        with pytest.raises(Conflict):
            await db.set_step(hanging.id, "start")
        with pytest.raises(Conflict):
            await db.commit(
                [
                    UpdateSession(session.id, {SessionState.CREATING}, 1, {"state": RUNNING}),
                    FinishOperation(hanging.id),
                ]
            )
        assert (await db.get_session(None, session.id)).state is SessionState.CREATING
        assert [op.id for op in await db.unfinished_operations()] == [delete.id]

    database.run(scenario)


def test_the_end_of_an_operation_and_what_it_did_are_one(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        operation = await begin(db, session)
        updated, step, done, sequence = await db.commit(
            [
                UpdateSession(session.id, {RUNNING}, 1, {"state": PAUSED}),
                SetStep(operation.id, "commit"),
                FinishOperation(operation.id, {"state": "paused"}),
                AppendEvent(session.id, "pause", operation=operation.id),
            ]
        )
        assert (updated.state, step.step, done.result, sequence) == (
            PAUSED,
            "commit",
            {"state": "paused"},
            1,
        )
        # A second time nothing of it may happen: the operation is finished.
        with pytest.raises(Conflict):
            await db.commit(
                [
                    UpdateSession(session.id, {PAUSED}, 1, {"state": RUNNING}),
                    FinishOperation(operation.id),
                ]
            )
        assert (await db.get_session(None, session.id)).state is PAUSED

    database.run(scenario)


def test_unfinished_operations_are_listed_oldest_first(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        one = await insert_session(db, make_session())
        two = await insert_session(db, make_session())
        done = await begin(db, one)
        await db.finish(done.id)
        first = await begin(db, one, "suspend")
        second = await begin(db, two)
        assert [op.id for op in await db.unfinished_operations()] == [first.id, second.id]

    database.run(scenario)


def test_pruning_keeps_what_is_unfinished_or_still_named_by_a_key(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        old = await begin(db, session)
        done = await db.finish(old.id)
        keyed = await begin(db, session, key="k")
        await db.finish(keyed.id)
        going = await begin(db, session)
        assert done.finished_at is not None
        soon = await db.prune(done.finished_at + 1, operations_after=0.0)
        assert (soon.operations, soon.keys) == (1, 0)
        assert list(database.operation_states(session.id)) == [keyed.id, going.id]
        later = await db.prune(done.finished_at + KEY_LIFETIME + 60, operations_after=0.0)
        assert (later.operations, later.keys) == (1, 1)
        assert list(database.operation_states(session.id)) == [going.id]

    database.run(scenario)
