"""Nodes and their leases: who is of the cluster, since when, and who is lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from sojourn.database import Database
from sojourn.errors import Conflict, NameTaken, NodeFenced, NodeNotFound, Unauthenticated
from sojourn.model.nodes import Fence, NodeState, Resources
from support.databases import Harness
from support.nodes import LONG, held, joined, lose, opened, start


def test_a_node_joins_starts_and_renews(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        added = await db.add_node(
            "nod_a", "one", address="h:1", labels={"zone": "a"}, taints=["gpu"]
        )
        assert (added.incarnation, added.lease_left, added.lost) == (0, 0.0, False)
        assert (added.state, added.runtime, added.seen_at) == (NodeState.READY, None, None)
        assert abs(added.joined_at - time.time()) < 60
        started = await start(db, "nod_a")
        assert (started.incarnation, started.labels, started.taints) == (1, {"zone": "a"}, ["gpu"])
        assert started.address == "nod_a:7000" and started.cpu == ["avx2", "sse4_2"]
        assert LONG - 60 < started.lease_left <= LONG
        used = Resources(cpus=1.5, sessions=3)
        renewed = await db.renew_node(started.fence, lease=2 * LONG, used=used)
        assert LONG < renewed.lease_left <= 2 * LONG and renewed.used == used
        assert (await db.renew_node(started.fence, lease=LONG)).used == used
        found = await db.get_node("one")
        assert found.id == "nod_a" and found.used == used
        assert [node.id for node in await db.list_nodes()] == ["nod_a"]
        await db.start_node(
            "nod_a",
            address="h:2",
            capacity=Resources(),
            runtime=None,
            cpu=[],
            version="2",
            lease=LONG,
            labels={"zone": "b"},
            taints=[],
        )
        again = await db.get_node("nod_a")
        assert (again.incarnation, again.labels, again.taints) == (2, {"zone": "b"}, [])
        assert again.used == Resources()

    database.run(scenario)


def test_names_and_ids_of_nodes_are_their_own(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await db.add_node("nod_a", "one")
        with pytest.raises(NameTaken):
            await db.add_node("nod_b", "one")
        with pytest.raises(Conflict):
            await db.add_node("nod_a", "two")
        for ref in ("nod_b", "two"):
            with pytest.raises(NodeNotFound):
                await db.get_node(ref)
        with pytest.raises(NodeNotFound):
            await start(db, "nod_b")

    database.run(scenario)


def test_the_state_of_a_node_outlives_its_restart(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await joined(db, "nod_a")
        assert (await db.set_node_state("name-nod_a", NodeState.CORDONED)).state == "cordoned"
        assert (await start(db, "nod_a")).state is NodeState.CORDONED
        await db.set_node_state("nod_a", NodeState.READY)
        assert (await db.get_node("nod_a")).state is NodeState.READY

    database.run(scenario)


def test_a_removed_node_is_fenced_and_its_name_free(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        session = await held(db, "nod_a")
        removed = await db.set_node_state("nod_a", NodeState.REMOVED)
        assert removed.lost and removed.incarnation == 2
        assert await db.list_nodes() == []
        with pytest.raises(NodeFenced):
            await db.renew_node(node.fence, lease=LONG)
        with pytest.raises(NodeNotFound):
            await start(db, "nod_a")
        with pytest.raises(NodeNotFound):
            await db.set_node_state("nod_a", NodeState.READY)
        lost = await db.lose_node(LONG)
        assert lost is not None and lost.id == "nod_a"
        assert [one.session for one in await db.fail_over("nod_a")] == [session.id]
        assert await db.lose_node(0.0) is None
        await db.add_node("nod_b", "name-nod_a")

    database.run(scenario)


def test_a_node_is_lost_when_its_lease_is_over_and_the_grace_too(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        await db.add_node("nod_new", "never started")
        alive = await joined(db, "nod_alive")
        node = await joined(db, "nod_a", lease=0.02)
        assert await db.lose_node(LONG) is None
        await asyncio.sleep(0.1)
        assert (await db.get_node("nod_a")).lease_left < 0
        assert not (await db.get_node("nod_a")).lost
        # Late, and nobody fenced it: it goes on.
        await db.renew_node(node.fence, lease=LONG)
        assert await db.lose_node(0.0) is None
        lost = await lose(db, node)
        assert lost.lost and lost.incarnation == 2
        with pytest.raises(NodeFenced) as refused:
            await db.renew_node(node.fence, lease=LONG)
        assert refused.value.details["node"] == "nod_a"
        with pytest.raises(NodeFenced):
            await db.stop_node(node.fence)
        # It is lost once; nothing is left of it to be taken.
        assert await db.lose_node(0.0) is None
        again = await start(db, "nod_a")
        assert (again.incarnation, again.lost) == (3, False)
        await db.renew_node(again.fence, lease=LONG)
        await db.renew_node(alive.fence, lease=LONG)

    database.run(scenario)


def test_a_lost_node_that_has_sessions_left_is_told_again(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        await held(db, "nod_a")
        await lose(db, node)
        for _ in range(2):
            lost = await db.lose_node(LONG)
            assert lost is not None and (lost.id, lost.incarnation) == ("nod_a", 2)
        await db.fail_over("nod_a")
        assert await db.lose_node(0.0) is None

    database.run(scenario)


def test_of_several_that_lose_nodes_each_gets_another(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        nodes = [await joined(db, f"nod_{n}") for n in range(6)]
        for node in nodes:
            await db.stop_node(node.fence)
        await asyncio.sleep(0.02)
        async with opened(database) as two:
            lost = await asyncio.gather(*[each.lose_node(0.0) for each in (db, two) * 3])
        found = [node.id for node in lost if node is not None]
        assert len(found) == len(set(found))
        while (node := await db.lose_node(0.0)) is not None:
            found.append(node.id)
        assert sorted(found) == [node.id for node in nodes]
        assert all(node.incarnation == 2 for node in await db.list_nodes())

    database.run(scenario)


def test_a_token_lets_one_node_join(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        until = time.time() + LONG
        await db.add_node_token("tok_1", "digest", expires_at=until, labels={"zone": "a"})
        await db.add_node_token("tok_2", "digest", expires_at=time.time() - 1)
        for id, digest in (("tok_1", "other"), ("tok_3", "digest"), ("tok_2", "digest")):
            with pytest.raises(Unauthenticated):
                await db.use_node_token(id, digest)
        async with opened(database) as two:
            tries = [each.use_node_token("tok_1", "digest") for each in (db, two) * 3]
            used = await asyncio.gather(*tries, return_exceptions=True)
        assert [one for one in used if isinstance(one, dict)] == [{"zone": "a"}]
        assert sum(isinstance(one, Unauthenticated) for one in used) == 5

    database.run(scenario)


def test_of_values_that_many_put_the_first_one_stays(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        assert await db.cluster_value("key") is None
        async with opened(database) as two:
            puts = [
                each.put_cluster_value("key", bytes([n, 0, 255]))
                for n, each in enumerate((db, two) * 4)
            ]
            kept = set(await asyncio.gather(*puts))
            assert kept == {await two.cluster_value("key")}
        assert await db.put_cluster_value("other", b"") == b""

    database.run(scenario)


def test_a_duty_is_one_nodes_until_its_time_is_over(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        async with opened(database) as two:
            asked = [
                each.hold_duty("collect", f"nod_{n}", lease=LONG)
                for n, each in enumerate((db, two) * 3)
            ]
            got = await asyncio.gather(*asked)
        assert sum(got) == 1
        holder = f"nod_{got.index(True)}"
        assert await db.hold_duty("collect", holder, lease=0.01)
        assert await db.hold_duty("other", "nod_x", lease=LONG)
        await asyncio.sleep(0.05)
        assert await db.hold_duty("collect", "nod_x", lease=LONG)
        assert not await db.hold_duty("collect", holder, lease=LONG)

    database.run(scenario)


def test_a_fence_of_another_node_renews_nothing(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        node = await joined(db, "nod_a")
        for fence in (Fence("nod_b", 1), Fence("nod_a", node.incarnation + 1)):
            with pytest.raises(NodeFenced):
                await db.renew_node(fence, lease=LONG)

    database.run(scenario)
