"""Which node a session is placed on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import InvalidRequest
from sojourn.model.nodes import Node, NodeState, Resources
from sojourn.model.sessions import Limits
from sojourn.server.cluster import scheduler
from sojourn.server.cluster.scheduler import Need, Refusal, Settings, choose

GIB = 1 << 30
PLAIN = Settings(cpus=1.0, memory=1.0, disk=1.0)


def a_node(id: str = "nod_a", **changes: Any) -> Node:
    found = Node(
        id=id,
        name=id,
        address="127.0.0.1:1",
        state=NodeState.READY,
        incarnation=1,
        lease_left=10.0,
        lost=False,
        labels={},
        taints=[],
        capacity=Resources(8, 16 * GIB, 100 * GIB, 0),
        used=Resources(),
        runtime="runsc 1",
        cpu=["avx", "sse"],
        version="0",
        joined_at=0.0,
        seen_at=0.0,
    )
    return msgspec.structs.replace(found, **changes)


def a_need(cpus: float = 1, memory: int = GIB, **more: Any) -> Need:
    return Need(Resources(cpus, memory, GIB, 1), **more)


names = st.sampled_from(["a", "b", "c"])
resources = st.builds(
    Resources,
    st.floats(0, 16),
    st.integers(0, 32 * GIB),
    st.integers(0, 200 * GIB),
    st.integers(0, 20),
)
nodes = st.builds(
    lambda **facts: a_node(**facts),
    state=st.sampled_from(NodeState),
    lease_left=st.floats(-20, 20),
    lost=st.booleans(),
    labels=st.dictionaries(names, names, max_size=2),
    taints=st.lists(names, max_size=1),
    capacity=resources,
    used=resources,
    runtime=st.sampled_from([None, "runsc 1", "runsc 2"]),
    cpu=st.lists(st.sampled_from(["avx", "sse"]), unique=True),
)
clusters = st.lists(nodes, max_size=6).map(
    lambda found: [
        msgspec.structs.replace(node, id=f"nod_{at}", name=f"n{at}")
        for at, node in enumerate(found)
    ]
)
needs = st.builds(
    Need,
    resources,
    st.dictionaries(
        st.one_of(
            names,
            names.map(lambda name: scheduler.NODE_LABEL + name),
            names.map(lambda name: scheduler.TOLERATION + name),
        ),
        names,
        max_size=3,
    ),
    affinity=st.sampled_from([None, "nod_0", "nod_3"]),
    runtime=st.sampled_from([None, "runsc 1"]),
    cpu=st.sampled_from([frozenset(), frozenset(["avx"])]),
    avoid=st.frozensets(st.sampled_from(["nod_0", "nod_1"])),
)
settings = st.builds(
    Settings, st.floats(0.5, 8), st.floats(0.5, 4), st.floats(0.5, 4), pack=st.booleans()
)


@given(clusters, needs, settings)
def test_what_is_chosen_can_take_it(cluster: list[Node], need: Need, how: Settings) -> None:
    found = choose(cluster, need, how)
    fits = [node for node in cluster if _may(node, need) and _room(node, need, how)]
    if isinstance(found, Refusal):
        assert not fits
        full = {node.id for node in cluster if _may(node, need)}
        assert set(found.full) == full
        assert found.cause
        return
    assert found in fits
    if need.affinity in {node.id for node in fits}:
        assert found.id == need.affinity
    assert choose(list(reversed(cluster)), need, how) == found


def _may(node: Node, need: Need) -> bool:
    """As the page for operators says it, written anew."""
    if node.state != "ready" or node.lost or node.lease_left <= 0 or node.id in need.avoid:
        return False
    for key, value in need.labels.items():
        if key.startswith("sojourn.node/") and node.labels.get(key[13:]) != value:
            return False
    if any(f"sojourn.toleration/{taint}" not in need.labels for taint in node.taints):
        return False
    runs = need.runtime in (None, node.runtime)
    return runs and all(one in node.cpu for one in need.cpu)


def _room(node: Node, need: Need, how: Settings) -> bool:
    has, used, asked = node.capacity, node.used, need.resources
    return (
        (not has.cpus or used.cpus + asked.cpus <= has.cpus * how.cpus + 1e-9)
        and (
            not has.memory_bytes
            or used.memory_bytes + asked.memory_bytes <= has.memory_bytes * how.memory + 1e-9
        )
        and (
            not has.disk_bytes
            or used.disk_bytes + asked.disk_bytes <= has.disk_bytes * how.disk + 1e-9
        )
        and (not has.sessions or used.sessions + asked.sessions <= has.sessions)
    )


def test_sessions_are_spread_or_packed() -> None:
    empty = a_node("nod_a")
    half = a_node("nod_b", used=Resources(4, 0, 0, 2))
    full = a_node("nod_c", used=Resources(8, 0, 0, 4))
    cluster = [full, half, empty]
    assert choose(cluster, a_need(), PLAIN) == empty
    assert choose(cluster, a_need(), Settings(1.0, 1.0, 1.0, pack=True)) == half
    assert choose(cluster, a_need(affinity="nod_b"), PLAIN) == half
    assert choose(cluster, a_need(affinity="nod_c"), PLAIN) == empty


def test_a_full_cluster_says_whom_to_ask_first() -> None:
    fuller = a_node("nod_a", used=Resources(8, 16 * GIB, 0, 1))
    less = a_node("nod_b", used=Resources(7.5, 0, 0, 1))
    gone = a_node("nod_c", lease_left=-1.0)
    found = choose([fuller, less, gone], a_need(), PLAIN)
    assert found == Refusal("1 does not answer, 2 is full", ["nod_b", "nod_a"])
    assert choose([], a_need(), PLAIN) == Refusal("there is no node", [])


def test_limits_may_add_up_to_more_than_there_is() -> None:
    used = a_node(used=Resources(8, 0, 0, 4))
    assert isinstance(choose([used], a_need(), PLAIN), Refusal)
    assert choose([used], a_need(), Settings(cpus=2.0)) == used


def test_what_was_placed_counts_before_the_node_tells_of_it() -> None:
    node = a_node(capacity=Resources(2, 0, 0, 0))
    need = scheduler.need_of(Limits(cpus=2.0), {})
    assert choose([node], need, PLAIN) == node
    assert isinstance(choose([scheduler.add(node, need.resources)], need, PLAIN), Refusal)


def test_settings_are_read_from_words() -> None:
    assert scheduler.read_settings("pack", "cpus=2, memory=1.5") == Settings(2.0, 1.5, pack=True)
    for place, factors in (("spread", "cpus"), ("spread", "cpus=0"), ("x", "cpus=1"), ("pack", "")):
        with pytest.raises(InvalidRequest):
            scheduler.read_settings(place, factors)
