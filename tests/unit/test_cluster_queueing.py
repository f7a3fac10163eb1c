"""Waiting for room: in which order, for how long, and what is put away for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.database import open_database
from sojourn.database.base import Database
from sojourn.errors import CapacityExhausted
from sojourn.model.nodes import Node, Resources
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.queueing import Admissions, TenantQueue
from sojourn.server.cluster.scheduler import Need, Settings

ONE = Need(Resources(sessions=1))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())))
def test_tenants_take_turns_and_each_keeps_its_order(items: list[tuple[str, bool]]) -> None:
    queue: TenantQueue[tuple[int, str, bool]] = TenantQueue()
    for number, (tenant, fits) in enumerate(items):
        queue.add(tenant, (number, tenant, fits))
    admitted: list[tuple[int, str, bool]] = []

    def fits(item: tuple[int, str, bool]) -> bool:
        if item[2]:
            admitted.append(item)
        return item[2]

    queue.admit(fits)
    for tenant in "abc":
        own = [number for number, (one, _) in enumerate(items) if one == tenant]
        got = [number for number, one, _ in admitted if one == tenant]
        blocked = next((at for at, number in enumerate(own) if not items[number][1]), len(own))
        # All before the first that does not fit, in the order they came; nothing behind it.
        assert got == own[:blocked]
        assert queue.waits(tenant) == (blocked < len(own))
    # Nobody has a second turn while another one who could go has had none.
    for at, (_, tenant, _) in enumerate(admitted):
        before = [one for _, one, _ in admitted[:at]]
        for other in {one for _, one, _ in admitted[at:]} - {tenant}:
            assert before.count(tenant) <= before.count(other) + 1
    assert len(queue) == len(items) - len(admitted)
    assert len(queue.first()) == len({one for one in "abc" if queue.waits(one)})


class Rig:
    """One node with room for two, and what is asked of it."""

    def __init__(self, database: Database, node: Node) -> None:
        self.database = database
        self.node = node
        self.members = Members(database)
        self.evicts = False
        self.asked = 0
        self.admissions = self.new()

    def new(self, patience: float = 10.0, most: int = 100) -> Admissions:
        return Admissions(self.members, Settings(), self.evict, patience=patience, most=most)

    async def evict(self, nodes: list[str], need: Need) -> str | None:
        self.asked += 1
        assert nodes == [self.node.id]
        return self.node.id if self.evicts else None

    async def uses(self, sessions: int) -> None:
        """The node tells what is on it."""
        await self.database.renew_node(self.node.fence, lease=60, used=Resources(sessions=sessions))
        self.members._reserved.clear()
        await self.members.refresh()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Rig], Awaitable[None]]], None]:
    def runs(work: Callable[[Rig], Awaitable[None]]) -> None:
        async def inner() -> None:
            database = await open_database(tmp_path / "x.db")
            await database.add_node("nod_a", "a")
            node = await database.start_node(
                "nod_a",
                address="127.0.0.1:1",
                capacity=Resources(sessions=2),
                runtime=None,
                cpu=[],
                version="0",
                lease=60,
            )
            rig = Rig(database, node)
            await rig.members.refresh()
            try:
                async with asyncio.timeout(30):
                    await work(rig)
            finally:
                await rig.admissions.stop()
                await database.close()

        asyncio.run(inner())

    return runs


def test_what_is_under_way_has_its_room(run: Callable[..., None]) -> None:
    async def work(rig: Rig) -> None:
        admissions = rig.new(patience=0.05)
        first = await admissions.place("a", ONE)
        second = await admissions.place("a", ONE)
        with pytest.raises(CapacityExhausted) as refused:
            await admissions.place("a", ONE)
        assert refused.value.details["retry_after"] > 0
        second.cancel()  # it was not placed after all
        third = await admissions.place("a", ONE)
        for one in (first, third):
            one.settle()
            one.cancel()  # without effect: it is the node's to tell from now on
        with pytest.raises(CapacityExhausted):
            await admissions.place("b", ONE)
        await admissions.stop()

    run(work)


def test_whoever_waits_is_admitted_in_order_as_room_comes(run: Callable[..., None]) -> None:
    async def work(rig: Rig) -> None:
        await rig.uses(2)
        order: list[str] = []

        async def ask(name: str, tenant: str) -> None:
            await rig.admissions.place(tenant, ONE)
            order.append(name)

        asking = []
        for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
            asking.append(asyncio.create_task(ask(name, tenant)))
            await asyncio.sleep(0.02)
        assert rig.admissions.waiting == 4
        await rig.uses(1)
        await asyncio.sleep(0.02)
        assert order == ["a1"]
        await rig.uses(1)
        await asyncio.sleep(0.02)
        assert order == ["a1", "b1"]  # the other tenant's turn
        await rig.uses(0)
        await asyncio.gather(*asking)
        assert order == ["a1", "b1", "a2", "a3"]

    run(work)


@pytest.mark.parametrize(
    "need",
    [
        Need(Resources(sessions=1), labels={"sojourn.node/zone": "z"}),
        Need(Resources(sessions=3)),
    ],
)
def test_what_no_node_would_do_for_holds_up_nothing_else(
    run: Callable[..., None], need: Need
) -> None:
    async def work(rig: Rig) -> None:
        waiting = asyncio.create_task(rig.admissions.place("t", need))
        while not rig.admissions.waiting:
            await asyncio.sleep(0)
        for _ in range(2):
            (await rig.admissions.place("t", ONE)).settle()
        assert rig.admissions.waiting == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not rig.admissions.waiting

    run(work)


def test_the_queue_is_bounded_and_whoever_leaves_holds_up_nobody(
    run: Callable[..., None],
) -> None:
    async def work(rig: Rig) -> None:
        await rig.uses(2)
        admissions = rig.new(most=2)
        asking = [asyncio.create_task(admissions.place("a", ONE)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(CapacityExhausted, match="too many"):
            await admissions.place("b", ONE)
        asking[0].cancel()
        await asyncio.gather(asking[0], return_exceptions=True)
        assert admissions.waiting == 1
        await rig.uses(1)
        assert (await asking[1]).node.id == rig.node.id
        assert admissions.waiting == 0
        await admissions.stop()

    run(work)


def test_nodes_are_asked_for_room_at_once_and_again_while_someone_waits(
    run: Callable[..., None],
) -> None:
    async def work(rig: Rig) -> None:
        await rig.uses(2)
        rig.evicts = True
        await rig.admissions.place("a", ONE)  # without waiting
        assert rig.asked == 1
        rig.evicts = False
        asking = asyncio.create_task(rig.admissions.place("a", ONE))
        await asyncio.sleep(0.05)
        assert not asking.done()
        rig.evicts = True  # what was in use has become idle
        await rig.uses(2)
        assert (await asking).node.id == rig.node.id
        assert rig.admissions.waiting == 0

    run(work)
