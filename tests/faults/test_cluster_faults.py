"""What a cluster does when its parts fail, on machines of their own in network namespaces."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError
from support.cluster import Cluster
from support.cluster_faults import run
from support.cluster_history import Watch, read_count, start_counting, until

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

LIMITS = {"cpus": 0.5, "memory_bytes": 256 << 20}
POLICY = {"auto_snapshot": "off", "idle_timeout": None}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with Cluster(directory, nodes=3, servers=2) as cluster:
        with cluster.networks.entered():
            yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Sojourn]:
    with cluster.client("s1") as client:
        yield client


@pytest.fixture
def watch(cluster: Cluster) -> Iterator[Watch]:
    with Watch(node.data for node in cluster.nodes.values()) as watch:
        yield watch
    assert not watch.twice


@pytest.fixture
def session(client: Sojourn) -> Iterator[Session]:
    session = client.sessions.create(policy=POLICY, limits=LIMITS)
    start_counting(session)
    yield session
    until(lambda: client.sessions.get(session.id).delete() is None, 120)


def node_of(client: Sojourn, session: Session) -> str:
    """The name of the node that a session runs on."""
    here = client.sessions.get(session.id).info.node
    return next(one.name for one in client.nodes.list() if here in (one.id, one.name))


def counts_on(client: Sojourn, session: Session, least: int) -> int:
    """Wait until a session can be used and counts on, from no less than this."""
    first = until(lambda: read_count(client.sessions.get(session.id)) + 1, 120) - 1
    assert first >= least
    return until(lambda: max(0, read_count(client.sessions.get(session.id)) - first) and first + 1)


def lost_events(client: Sojourn, session: Session) -> list[dict[str, object]]:
    events = client.sessions.get(session.id).events()
    return [event.details for event in events if event.kind == "node.lost"]


def healthy(client: Sojourn) -> bool:
    """Whether every node has its lease."""
    return all(one.lease_left > 0 and not one.lost for one in client.nodes.list())


def test_a_session_migrates_and_counts_on_without_a_gap(
    cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    before, source = read_count(session), node_of(client, session)
    moved = session.migrate()
    assert moved.id == session.id
    assert node_of(client, session) != source
    counts_on(client, session, before)
    # Through the other server, and back.
    with cluster.client("s2") as other:
        other.sessions.get(session.id).migrate(source)
        assert node_of(other, session) == source
        counts_on(other, session, before)
    assert not lost_events(client, session)


def test_a_drained_node_gives_all_its_sessions_away(client: Sojourn, watch: Watch) -> None:
    sessions = [client.sessions.create(policy=POLICY, limits=LIMITS) for _ in range(10)]
    for one in sessions:
        start_counting(one)
    name = node_of(client, sessions[0])
    counts = {one.id: read_count(one) for one in sessions}
    client.nodes.drain(name)
    try:
        until(lambda: all(node_of(client, one) != name for one in sessions), 120)
        for one in sessions:
            counts_on(client, one, counts[one.id])
            assert not lost_events(client, one)
    finally:
        client.nodes.uncordon(name)
        for one in sessions:
            client.sessions.get(one.id).delete()


def test_a_node_that_crashes_loses_no_acknowledged_snapshot(
    cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    least = read_count(session)
    snapshot = session.snapshot(wait="durable")
    name = node_of(client, session)
    cluster.nodes[name].crash()
    try:
        counts_on(client, session, least)
        assert node_of(client, session) != name
        (loss,) = lost_events(client, session)
        assert loss["head"] == snapshot.id
        assert float(str(loss["lost_seconds"])) > 0
    finally:
        cluster.nodes[name].unmount()
        cluster.nodes[name].start()
    until(lambda: healthy(client))


def test_a_node_process_that_is_killed_takes_its_sessions_up_again(
    cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    least = read_count(session)
    session.snapshot(wait="durable")
    before, name = read_count(session), node_of(client, session)
    cluster.nodes[name].kill()
    cluster.nodes[name].start()
    first = counts_on(client, session, least)
    if not lost_events(client, session):  # it was back before its lease was over
        assert first >= before
        assert node_of(client, session) == name
    until(lambda: healthy(client))


@pytest.mark.parametrize("how", ["stopped", "cut off from the database"])
def test_a_node_without_its_lease_stands_still_and_is_not_believed(
    how: str, cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    least = read_count(session)
    session.snapshot(wait="durable")
    node = cluster.nodes[node_of(client, session)]
    if how == "stopped":
        node.pause()
    else:
        node.machine.cut("db")
    try:
        counts_on(client, session, least)
        assert node_of(client, session) != node.name
        time.sleep(2)
    finally:
        if how == "stopped":
            node.go_on()
        else:
            node.machine.join("db")
    until(lambda: healthy(client))
    counts_on(client, session, least)
    assert len(lost_events(client, session)) == 1


def test_a_node_cut_off_from_the_store_goes_on_and_catches_up(
    cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    node = cluster.nodes[node_of(client, session)]
    node.machine.cut("s3")
    try:
        before = counts_on(client, session, 0)
        snapshot = session.snapshot()
        assert session.durability(snapshot=snapshot.id).durable_at is None
    finally:
        node.machine.join("s3")
    assert session.durability(wait=100, snapshot=snapshot.id).durable_at is not None
    counts_on(client, session, before)


def test_a_node_that_no_server_reaches_keeps_its_sessions(
    cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    before, name = read_count(session), node_of(client, session)
    node = cluster.nodes[name]
    node.machine.cut("net")
    try:
        with pytest.raises(SojournError):
            session.exec(["true"], timeout=5)
        time.sleep(cluster.lease * 2)
    finally:
        node.machine.join("net")
    counts_on(client, session, before)
    assert node_of(client, session) == name
    assert not lost_events(client, session)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_faults(tmp_path: Path) -> None:
    """In CI for a minute; SOJOURN_SOAK says for how many seconds."""
    seconds = float(os.environ.get("SOJOURN_CLUSTER_SOAK", "60"))
    faults = run(
        tmp_path, seconds, seed=int(os.environ.get("SOJOURN_CLUSTER_SEED", "1")), say=print
    )
    assert sum(faults.done.values()) >= 1
