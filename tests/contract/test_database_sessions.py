"""Sessions: names, lookup, pages, and the compare-and-swap."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from sojourn.database import Database
from sojourn.database.writes import AppendEvent, InsertSession, InsertSnapshot, UpdateSession
from sojourn.errors import (
    Conflict,
    InvalidRequest,
    NameTaken,
    SessionNotFound,
    SnapshotNotFound,
    StaleEpoch,
    WrongState,
)
from sojourn.model import AutoSnapshot, Limits, Policy, Session, SessionState
from support.databases import (
    PAUSED,
    RUNNING,
    SUSPENDED,
    Harness,
    insert_session,
    make_session,
    make_snapshot,
    update_session,
)
from support.nodes import opened

DELETED = SessionState.DELETED


async def delete(db: Database, session: Session) -> Session:
    return await update_session(
        db, session.id, expect_state={session.state}, expect_epoch=session.epoch, state=DELETED
    )


def test_a_session_reads_back_equal_in_every_field(database: Harness) -> None:
    session = make_session(
        name="näme",
        labels={"a": "1", "": "empty", "quote\"'": "\n"},
        env={"PATH": "/bin", "UNICODE": "\N{SNOWMAN}"},
        limits=Limits(cpus=0.5, memory_bytes=2**40, pids=1, disk_bytes=3),
        policy=Policy(auto_snapshot=AutoSnapshot.OFF, idle_timeout=None, max_lifetime=0.1),
        state=SessionState.FAILED,
        epoch=2**40,
        parent_session="ses_p",
        forked_from="snp_p",
        sandbox="sbx_1",
        node="local",
        idle_deadline=1.25,
        lifetime_deadline=1e10 + 0.1,
        cause="it broke",
    )

    async def write(db: Database) -> None:
        await insert_session(db, session)
        assert await db.get_session("ten_a", session.id) == session

    async def read_again(db: Database) -> None:
        assert await db.get_session("ten_a", "näme") == session
        assert await db.get_session(None, session.id) == session

    database.run(write)
    database.run(read_again)


def test_a_live_name_is_taken_per_tenant_and_free_again_after_delete(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        first = await insert_session(db, make_session(name="box"))
        with pytest.raises(NameTaken):
            await insert_session(db, make_session(name="box"))
        other = await insert_session(db, make_session(name="box", tenant="ten_b"))
        unnamed = [await insert_session(db, make_session()) for _ in range(2)]
        with pytest.raises(NameTaken):
            await update_session(
                db, unnamed[0].id, expect_state={RUNNING}, expect_epoch=1, name="box"
            )
        await delete(db, first)
        second = await insert_session(db, make_session(name="box"))
        assert (await db.get_session("ten_a", "box")).id == second.id
        assert (await db.get_session("ten_b", "box")).id == other.id

    database.run(scenario)


def test_other_tenants_and_deleted_sessions_are_not_found(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(name="box"))
        for key in (session.id, "box"):
            with pytest.raises(SessionNotFound):
                await db.get_session("ten_b", key)
        await delete(db, session)
        for tenant in ("ten_a", None):
            for key in (session.id, "box"):
                with pytest.raises(SessionNotFound):
                    await db.get_session(tenant, key)

    database.run(scenario)


def test_the_operator_finds_a_name_only_while_it_is_unambiguous(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(name="box"))
        assert (await db.get_session(None, "box")).id == session.id
        await insert_session(db, make_session(name="box", tenant="ten_b"))
        with pytest.raises(SessionNotFound, match="several tenants"):
            await db.get_session(None, "box")

    database.run(scenario)


def test_an_id_exists_once(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        with pytest.raises(Conflict):
            await insert_session(db, session)

    database.run(scenario)


# -- compare-and-swap ---------------------------------------------------------------------------


def test_a_swap_changes_what_it_names_and_nothing_else(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        before = await insert_session(db, make_session(name="box", labels={"a": "b"}))
        after = await update_session(
            db,
            before.id,
            expect_state={RUNNING, PAUSED},
            expect_epoch=1,
            state=SUSPENDED,
            epoch=2,
            labels={"c": "d"},
            policy=Policy(auto_resume=False),
            sandbox=None,
        )
        assert after == await db.get_session("ten_a", before.id)
        assert after.updated_at >= before.updated_at
        assert msgspec.structs.replace(after, updated_at=before.updated_at) == (
            msgspec.structs.replace(
                before,
                state=SUSPENDED,
                epoch=2,
                labels={"c": "d"},
                policy=Policy(auto_resume=False),
            )
        )

    database.run(scenario)


def test_a_writer_of_an_older_placement_is_refused(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(epoch=5))
        for epoch in (4, 6):
            with pytest.raises(StaleEpoch) as stale:
                await update_session(
                    db, session.id, expect_state={RUNNING}, expect_epoch=epoch, state=PAUSED
                )
            assert stale.value.details["epoch"] == 5
        assert await db.get_session(None, session.id) == session

    database.run(scenario)


def test_a_swap_from_another_state_is_refused_and_says_which(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(state=PAUSED))
        with pytest.raises(WrongState) as wrong:
            await update_session(
                db, session.id, expect_state={RUNNING}, expect_epoch=1, state=SUSPENDED
            )
        assert wrong.value.details["state"] == "paused"
        assert await db.get_session(None, session.id) == session

    database.run(scenario)


def test_of_many_swaps_at_once_exactly_one_wins(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        swaps = [
            update_session(
                db, session.id, expect_state={RUNNING}, expect_epoch=1, epoch=2, node=f"node-{n}"
            )
            for n in range(20)
        ]
        results = await asyncio.gather(*swaps, return_exceptions=True)
        won = [result for result in results if isinstance(result, Session)]
        lost = [result for result in results if isinstance(result, StaleEpoch)]
        assert (len(won), len(lost)) == (1, 19)
        assert (await db.get_session(None, session.id)).node == won[0].node

    database.run(scenario)


def test_deleted_is_final_and_the_epoch_never_shrinks(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session(epoch=3))
        with pytest.raises(InvalidRequest):
            await update_session(db, session.id, expect_state={RUNNING}, expect_epoch=3, epoch=2)
        await delete(db, session)
        with pytest.raises(SessionNotFound):
            await update_session(
                db, session.id, expect_state={DELETED, RUNNING}, expect_epoch=3, state=RUNNING
            )

    database.run(scenario)


@pytest.mark.parametrize("field", ["id", "tenant", "created_at", "no_such_field"])
def test_what_cannot_change_is_refused(database: Harness, field: str) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        with pytest.raises(InvalidRequest, match=field):
            await db.commit([UpdateSession(session.id, {RUNNING}, 1, {field: "x"})])
        assert await db.get_session(None, session.id) == session

    database.run(scenario)


def test_a_head_that_does_not_exist_is_refused_with_all_that_came_with_it(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        with pytest.raises(SnapshotNotFound):
            await db.commit(
                [
                    AppendEvent(session.id, "snapshot"),
                    UpdateSession(session.id, {RUNNING}, 1, {"head": "snp_none"}),
                ]
            )
        assert (await db.get_session(None, session.id)).head is None
        assert await db.list_events(session.id) == []

    database.run(scenario)


@pytest.mark.parametrize("snapshot_first", [True, False])
def test_head_and_snapshot_are_committed_together_in_either_order(
    database: Harness, snapshot_first: bool
) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        items = [
            InsertSnapshot(snapshot),
            UpdateSession(session.id, {RUNNING}, 1, {"head": snapshot.id}),
        ]
        await db.commit(items if snapshot_first else items[::-1])
        assert (await db.get_session(None, session.id)).head == snapshot.id

    database.run(scenario)


def test_a_commit_is_applied_whole_or_not_at_all(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        snapshot = make_snapshot(session)
        child = make_session(name="child")
        with pytest.raises(StaleEpoch):
            await db.commit(
                [
                    InsertSession(child),
                    InsertSnapshot(snapshot),
                    AppendEvent(session.id, "snapshot"),
                    UpdateSession(session.id, {RUNNING}, 7, {"head": snapshot.id}),
                ]
            )
        with pytest.raises(SessionNotFound):
            await db.get_session(None, "child")
        assert await db.list_snapshots(session.id) == []
        assert await db.list_events(session.id) == []

    database.run(scenario)


def test_one_that_fails_does_not_take_down_others_written_at_the_same_time(
    database: Harness,
) -> None:
    async def scenario(db: Database) -> None:
        taken = await insert_session(db, make_session(name="taken"))
        sessions = [make_session(name=f"n{n}" if n % 3 else "taken") for n in range(30)]
        results = await asyncio.gather(
            *[insert_session(db, session) for session in sessions], return_exceptions=True
        )
        for session, result in zip(sessions, results, strict=True):
            if session.name == "taken":
                assert isinstance(result, NameTaken)
            else:
                assert result == session
                assert await db.get_session(None, session.id) == session
        assert (await db.get_session("ten_a", "taken")).id == taken.id

    database.run(scenario)


# -- lists --------------------------------------------------------------------------------------


def test_sessions_are_found_by_state(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        by_state = {}
        for state in SessionState:
            by_state[state] = (await insert_session(db, make_session(state=state))).id
        for state in SessionState:
            page = await db.list_sessions("ten_a", states={state})
            assert [session.id for session in page.items] == [by_state[state]]
        live = await db.list_sessions("ten_a")
        assert {session.id for session in live.items} == set(by_state.values()) - {
            by_state[DELETED]
        }
        both = await db.list_sessions("ten_a", states={PAUSED, RUNNING})
        assert {session.state for session in both.items} == {PAUSED, RUNNING}
        assert await db.count_sessions("ten_a") == dict.fromkeys(SessionState, 1)
        assert await db.count_sessions("ten_b") == dict.fromkeys(SessionState, 0)

    database.run(scenario)


def test_a_paused_session_is_found_as_paused(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        await update_session(db, session.id, expect_state={RUNNING}, expect_epoch=1, state=PAUSED)
        page = await db.list_sessions("ten_a", states={PAUSED})
        assert [found.id for found in page.items] == [session.id]
        assert (await db.list_sessions("ten_a", states={RUNNING})).items == []

    database.run(scenario)


def test_all_given_labels_must_match_exactly(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        both = await insert_session(db, make_session(labels={"a": "1", "b.c": "2", '"': "x"}))
        one = await insert_session(db, make_session(labels={"a": "1"}))
        await insert_session(db, make_session(labels={"a": "10"}))

        async def found(**labels: str) -> set[str]:
            page = await db.list_sessions("ten_a", labels=labels)
            return {session.id for session in page.items}

        assert await found(a="1") == {both.id, one.id}
        assert await found(**{"a": "1", "b.c": "2"}) == {both.id}
        assert await found(**{'"': "x"}) == {both.id}
        assert await found(a="2") == set()
        assert await found(absent="") == set()

    database.run(scenario)


def test_pages_are_newest_first_and_stable_while_sessions_come_and_go(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        # Some share a creation time: the id decides then.
        sessions = [make_session(created_at=1000.0 + n // 3) for n in range(20)]
        for session in sessions:
            await insert_session(db, session)
        expected = [
            session.id
            for session in sorted(sessions, key=lambda s: (s.created_at, s.id), reverse=True)
        ]
        seen: list[str] = []
        cursor = None
        while True:
            page = await db.list_sessions("ten_a", limit=4, after=cursor)
            seen += [session.id for session in page.items]
            cursor = page.next
            if cursor is None:
                break
            await insert_session(db, make_session(created_at=5000.0))
            await delete(db, page.items[-1])
        assert seen == expected

    database.run(scenario)


def test_the_last_page_says_that_it_is_the_last(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        for _ in range(4):
            await insert_session(db, make_session())
        page = await db.list_sessions("ten_a", limit=2)
        assert page.next is not None
        page = await db.list_sessions("ten_a", limit=2, after=page.next)
        assert (len(page.items), page.next) == (2, None)
        assert (await db.list_sessions("ten_a", limit=4)).next is None

    database.run(scenario)


@pytest.mark.parametrize("cursor", ["", "x", "!!!", "AAAA", "bm90IGEgdGltZQ", "\udcff", "é"])
def test_a_bad_cursor_is_an_invalid_request(database: Harness, cursor: str) -> None:
    async def scenario(db: Database) -> None:
        with pytest.raises(InvalidRequest):
            await db.list_sessions("ten_a", after=cursor)
        with pytest.raises(InvalidRequest):
            await db.list_sessions("ten_a", limit=0)

    database.run(scenario)


def test_lists_keep_to_the_tenant(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        parent = await insert_session(db, make_session())
        child = await insert_session(db, make_session(parent_session=parent.id))
        foreign = await insert_session(db, make_session(tenant="ten_b"))
        assert {s.id for s in (await db.list_sessions("ten_a")).items} == {parent.id, child.id}
        assert {s.id for s in (await db.list_sessions(None)).items} == {
            parent.id,
            child.id,
            foreign.id,
        }

    database.run(scenario)


def test_pages_by_label_are_whole_whether_it_is_common_or_rare(database: Harness) -> None:
    """More sessions than are looked at before the label's index is asked."""

    async def scenario(db: Database) -> None:
        states = (RUNNING, SUSPENDED)
        sessions = [
            make_session(
                created_at=1000.0 + number,
                state=states[number % 2],
                tenant=f"ten_{number % 3 // 2}",
                labels={"common": "1", "third": str(number % 3), "rare": str(number % 400)},
            )
            for number in range(1800)
        ]
        await db.commit([InsertSession(session) for session in sessions])
        newest = sessions[::-1]
        for labels in ({"common": "1"}, {"third": "0"}, {"rare": "7"}, {"rare": "none"}):
            ((name, value),) = labels.items()
            for tenant in ("ten_0", None):
                expected = [
                    one.id
                    for one in newest
                    if one.labels[name] == value and one.tenant == (tenant or one.tenant)
                ]
                found, after = [], None
                while True:
                    page = await db.list_sessions(tenant, labels=labels, limit=450, after=after)
                    found += [one.id for one in page.items]
                    after = page.next
                    if after is None:
                        break
                assert found == expected

    database.run(scenario)


def test_very_many_sessions_are_not_counted_for_each_question(
    database: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.database.sql_database._MANY", 3)

    async def scenario(db: Database) -> None:
        for expected in (1, 2, 3):
            await insert_session(db, make_session())
            assert (await db.count_sessions())[RUNNING] == expected
        await insert_session(db, make_session(tenant="ten_b"))
        assert (await db.count_sessions())[RUNNING] == 3
        # What is few is counted, and what was counted is asked for again after a while.
        assert (await db.count_sessions("ten_b"))[RUNNING] == 1
        monkeypatch.setattr("sojourn.database.sql_database._COUNT_SECONDS", 0.0)
        async with opened(database) as later:
            assert (await later.count_sessions())[RUNNING] == 4
            await insert_session(later, make_session())
            assert (await later.count_sessions())[RUNNING] == 5

    database.run(scenario)
