"""When a server may declare a node lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.database import open_database
from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import InsertSnapshot, UpdateSession
from sojourn.model import SessionState
from sojourn.model.nodes import FailedOver, Node, Resources
from sojourn.model.snapshots import SnapshotKind
from sojourn.server.cluster.failover import Failover, Guard
from support.cluster_rig import cluster

LEASE = 15.0
EVERY = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def look(guard: Guard, clock: Clock, *, takes: float = 0.01, pause: float = EVERY) -> None:
    """One look of the loop, and the pause before the next."""
    guard.begin()
    clock.now += takes
    guard.answered()
    clock.now += pause


def test_nobody_is_lost_before_the_database_was_there_for_a_lease() -> None:
    clock = Clock()
    guard = Guard(LEASE, clock)
    assert guard.holds
    began = clock.now
    while clock.now < began + LEASE:
        look(guard, clock)
        if clock.now < began + LEASE - EVERY:
            assert guard.holds
    look(guard, clock)
    assert not guard.holds


@given(
    st.sampled_from(["fails", "slow", "gap"]),
    st.floats(5.0, 1000.0),
)
def test_after_an_outage_everybody_has_a_lease_to_renew(kind: str, seconds: float) -> None:
    clock = Clock()
    guard = Guard(LEASE, clock)
    for _ in range(20):
        look(guard, clock)
    assert not guard.holds
    if kind == "fails":
        guard.begin()
        clock.now += seconds
        guard.failed()
        clock.now += EVERY
    elif kind == "slow":  # the call waited for the database to come back
        look(guard, clock, takes=seconds)
    else:  # this machine slept, and maybe the database did
        clock.now += seconds
    look(guard, clock)
    assert guard.holds
    again = clock.now
    while guard.holds:
        look(guard, clock)
    assert clock.now - again >= LEASE - 3 * EVERY


def test_sessions_of_a_lost_node_are_taken_and_told(tmp_path: Path) -> None:
    async def work() -> None:
        database = await open_database(tmp_path / "x.db")
        try:
            await database.add_node("nod_a", "a")
            node = await database.start_node(
                "nod_a",
                address="127.0.0.1:1",
                capacity=Resources(),
                runtime=None,
                cpu=[],
                version="0",
                lease=0.001,
            )
            told: list[tuple[Node, FailedOver]] = []
            failover = Failover(
                database, lease=0.5, grace=0.0, moved=lambda node, one: told.append((node, one))
            )
            await asyncio.sleep(0.01)
            assert await failover.once() == 0  # just come: nobody is lost
            assert not (await database.get_node(node.id)).lost
            failover.start()
            async with asyncio.timeout(20):
                while not (await database.get_node(node.id)).lost:
                    await asyncio.sleep(0.05)
            await failover.stop()
            assert told == []
        finally:
            await database.close()

    asyncio.run(work())


@pytest.mark.parametrize("durable", [True, False])
def test_a_session_that_runs_and_that_nobody_holds_is_put_away(
    tmp_path: Path, durable: bool
) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 0) as found:
            database = found.database
            session = await found.session(None, state="suspended")
            snapshot = SnapshotRecord(
                id="snp_1",
                session=session.id,
                tenant=session.tenant,
                parent=None,
                kind=SnapshotKind.AUTO,
                label=None,
                created_at=1.0,
                fingerprint="f",
                has_memory=False,
                memory_bytes=0,
                layer_bytes=0,
                layers=[],
                image=None,
                durable_at=1.0 if durable else None,
            )
            changes = {"head": "snp_1", "state": SessionState.RUNNING, "sandbox": "sbx_1"}
            update = UpdateSession(session.id, {SessionState.SUSPENDED}, session.epoch, changes)
            await database.commit([InsertSnapshot(snapshot), update])
            failover = Failover(database, lease=1.0)
            seen = await failover.sweep({})
            assert seen == {session.id: session.epoch}
            assert (await database.get_session(None, session.id)).state == "running"
            await failover.sweep(seen)
            now = await database.get_session(None, session.id)
            assert now.state == ("suspended" if durable else "failed")
            assert (now.head, now.sandbox, now.epoch) == ("snp_1", None, session.epoch + 1)
            assert "no node held it" in str(now.cause)
            assert [one.kind for one in await database.list_events(session.id)] == [
                "session.unheld"
            ]
            assert await failover.sweep(seen) == {}

    asyncio.run(work())
