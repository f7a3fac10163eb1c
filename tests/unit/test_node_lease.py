"""A node's lease: held while the database grants it, and never a moment longer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sojourn.errors import NodeFenced, NodeUnavailable, StorageFull, Unreachable
from sojourn.model.nodes import Fence, Resources
from sojourn.server.nodes.lease import Lease
from sojourn.telemetry import declared
from sojourn.wire.lease_file import now

SECONDS = 0.5
FENCE = Fence("nod_1", 1)


class FakeDatabase:
    """Grants renewals as long as `answer` says nothing else."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Callable[[], Awaitable[None]] | None = None

    async def renew_node(self, fence: Fence, *, lease: float, used: Resources) -> object:
        assert (fence, lease) == (FENCE, SECONDS)
        self.asked += 1
        if self.answer is not None:
            await self.answer()
        return object()


class Guard:
    """A watchdog that notes what it is told, and whether the node relied on it before."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.deadlines: list[int] = []
        self.thaws = 0
        self.error: Exception | None = None

    def hold(self, deadline: int) -> None:
        if self.error is not None:
            raise self.error
        assert self.lease is not None and self.lease._deadline < deadline, "not before it counts"
        self.deadlines.append(deadline)

    def thaw(self) -> None:
        assert self.deadlines and now() < self.deadlines[-1]
        self.thaws += 1


class Rig:
    def __init__(self) -> None:
        self.database, self.guard = FakeDatabase(), Guard()
        self.told: list[str] = []
        database: Any = self.database
        self.lease = Lease(database, FENCE, SECONDS, self.guard, lambda: Resources())
        self.guard.lease = self.lease
        self.lease.lost = lambda: self.told.append("lost")
        self.lease.regained = lambda: self.told.append("regained")
        self.lease.fenced = lambda: self.told.append("fenced")

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)


def run(work: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig()
        try:
            await work(rig)
        finally:
            await rig.lease.stop()

    asyncio.run(main())


def test_it_is_renewed_and_each_deadline_is_from_before_it_was_asked_for() -> None:
    async def work(rig: Rig) -> None:
        assert not rig.lease.held
        sent = now()
        await rig.lease.begin(sent)
        assert rig.told[0] == "regained" and rig.guard.thaws >= 1
        assert rig.guard.deadlines[0] == sent + int(SECONDS * 1e9)
        await rig.until(lambda: rig.database.asked >= 8)
        assert rig.guard.deadlines == sorted(rig.guard.deadlines)
        assert rig.guard.deadlines[-1] <= now() + SECONDS * 1e9
        assert rig.lease.left <= SECONDS

    run(work)


def test_without_an_answer_it_ends_and_is_held_again_with_one() -> None:
    async def work(rig: Rig) -> None:
        before = declared.LEASE_LOSSES.values().get((), 0)
        await rig.lease.begin(now())

        async def away() -> None:
            raise Unreachable("the database is away")

        rig.database.answer = away
        await rig.until(lambda: "lost" in rig.told)
        assert not rig.lease.held and rig.lease.losses == 1 and rig.lease.left == 0
        assert now() >= rig.guard.deadlines[-1]
        with pytest.raises(NodeUnavailable):
            rig.lease.require()
        assert declared.LEASE_LOSSES.values()[()] == before + 1
        rig.database.answer = None
        await rig.until(lambda: rig.told == ["regained", "lost", "regained"])
        rig.lease.require()
        assert rig.guard.thaws == 2

    run(work)


def test_what_was_changed_meanwhile_is_known_before_anything_goes_on() -> None:
    async def work(rig: Rig) -> None:
        await rig.lease.begin(now())

        async def away() -> None:
            raise Unreachable("the database is away")

        async def returning() -> None:
            assert not rig.lease.held and now() >= rig.guard.deadlines[-1]
            rig.told.append("returning")
            if rig.told.count("returning") == 1:
                raise Unreachable("the secrets cannot be read")

        rig.lease.returning = returning
        rig.database.answer = away
        await rig.until(lambda: "lost" in rig.told)
        rig.database.answer = None
        await rig.until(lambda: rig.told[-1] == "regained")
        assert rig.told == ["regained", "lost", "returning", "returning", "regained"]

    run(work)


def test_an_answer_that_came_too_late_grants_nothing() -> None:
    async def work(rig: Rig) -> None:
        await rig.lease.begin(now())
        held = len(rig.guard.deadlines)

        async def slow() -> None:
            await asyncio.sleep(60)

        rig.database.answer = slow  # given up, and asked again
        asked = rig.database.asked
        await rig.until(lambda: rig.database.asked >= asked + 3)
        await rig.until(lambda: "lost" in rig.told)
        assert len(rig.guard.deadlines) <= held + 1
        await rig.lease._hold(now() - int(SECONDS * 1e9))
        assert not rig.lease.held

    run(work)


def test_who_is_fenced_never_acts_again() -> None:
    async def work(rig: Rig) -> None:
        await rig.lease.begin(now())

        async def fenced() -> None:
            raise NodeFenced("another incarnation")

        rig.database.answer = fenced
        await rig.until(lambda: "fenced" in rig.told)
        assert rig.lease.is_fenced and not rig.lease.held and rig.lease.left == 0
        rig.database.answer = None
        asked = rig.database.asked
        await asyncio.sleep(SECONDS / 2)
        assert rig.database.asked == asked and not rig.lease.held
        with pytest.raises(NodeUnavailable, match="fenced"):
            rig.lease.require()

    run(work)


def test_what_the_watchdog_does_not_hold_does_not_count() -> None:
    async def work(rig: Rig) -> None:
        await rig.lease.begin(now())
        rig.guard.error = StorageFull("no room for the lease file")
        await rig.until(lambda: "lost" in rig.told)
        assert not rig.lease.held
        rig.guard.error = None
        await rig.until(lambda: rig.lease.held)

    run(work)


def test_it_is_renewed_while_every_other_thread_waits() -> None:
    async def work(rig: Rig) -> None:
        release = threading.Event()
        blocked = [asyncio.to_thread(release.wait, 30) for _ in range(80)]
        waiting = [asyncio.ensure_future(one) for one in blocked]
        try:
            await rig.lease.begin(now())
            await rig.until(lambda: rig.database.asked >= 8)
            await rig.until(lambda: rig.lease.held)
        finally:
            release.set()
            await asyncio.gather(*waiting)

    run(work)
