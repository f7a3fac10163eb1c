"""What a cluster does when its parts fail, on machines of their own in network namespaces."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sojourn.client import ExecResult, Session, Sojourn
from sojourn.errors import SojournError
from support.cluster import PORTS, Cluster
from support.cluster_faults import run
from support.cluster_history import LOG, Watch, read_count, start_counting, until
from support.cluster_traffic import LIMITS, POLICY, Asker, Balancer, Traffic

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", str(len(sys.argv[1])))
        self.end_headers()
        self.wfile.write(sys.argv[1].encode())
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


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


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves when it fails is not the next one's."""
    yield
    if "client" not in request.fixturenames:
        return
    client: Sojourn = request.getfixturevalue("client")
    for node in client.nodes.list():
        if node.state != "ready":
            client.nodes.uncordon(node.id)
    for session in client.sessions.list():
        session.delete()


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


def on_node(client: Sojourn, name: str) -> Session:
    """A new session on a node, counting."""
    session = client.sessions.create(policy=POLICY, limits=LIMITS)
    if node_of(client, session) != name:
        session.migrate(name)
    start_counting(session)
    return session


def counts_on(client: Sojourn, session: Session, least: int) -> int:
    """Wait until a session can be used and counts on, from no less than this."""
    first = until(lambda: read_count(client.sessions.get(session.id)) + 1, 120) - 1
    assert first >= least
    return until(lambda: max(0, read_count(client.sessions.get(session.id)) - first) and first + 1)


def lost_events(client: Sojourn, session: Session) -> list[dict[str, object]]:
    events = client.sessions.get(session.id).events()
    return [event.details for event in events if event.kind == "node.lost"]


def state_of(client: Sojourn, name: str) -> str:
    """How a node stands."""
    return next(one.state for one in client.nodes.list() if one.name == name)


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


def test_streams_go_on_over_a_migration(
    cluster: Cluster, client: Sojourn, session: Session
) -> None:
    """Of a command that is waited for and of a process that is attached to: all of the output, once
    each, over moves that two servers are told."""
    lines = 150
    program = (
        f"import time\nfor n in range({lines}): print(n, 'x' * 200, flush=True); time.sleep(0.02)"
    )
    told: list[bytes] = []
    pieces: list[bytes] = []
    done: list[ExecResult] = []
    process = session.spawn(["python3", "-c", program])

    def attach() -> None:
        pieces.extend(piece.data for piece in process.output())

    def wait() -> None:
        done.append(session.exec(["python3", "-c", program], on_stdout=told.append))

    readers = [threading.Thread(target=work, daemon=True) for work in (attach, wait)]
    for reader in readers:
        reader.start()
    until(lambda: told and pieces)
    session.migrate()
    with cluster.client("s2") as other:
        other.sessions.get(session.id).migrate()
    for reader in readers:
        reader.join(120)
    whole = b"".join(b"%d %s\n" % (n, b"x" * 200) for n in range(lines))
    assert b"".join(pieces) == whole
    assert [(one.exit_code, one.stdout) for one in done] == [(0, whole)]
    assert b"".join(told) == whole


def test_a_drained_node_gives_all_its_sessions_away(client: Sojourn, watch: Watch) -> None:
    sessions = [client.sessions.create(policy=POLICY, limits=LIMITS) for _ in range(6)]
    for one in sessions:
        start_counting(one)
    name = node_of(client, sessions[0])
    counts = {one.id: read_count(one) for one in sessions}
    client.nodes.drain(name)
    try:
        until(lambda: all(node_of(client, one) != name for one in sessions), 120)
        until(lambda: state_of(client, name) == "drained")
        for one in sessions:
            counts_on(client, one, counts[one.id])
            assert not lost_events(client, one)
    finally:
        client.nodes.uncordon(name)
        for one in sessions:
            client.sessions.get(one.id).delete()


@pytest.mark.slow
@pytest.mark.skipif("SOJOURN_SOAK" not in os.environ, reason="a soak: set SOJOURN_SOAK=1")
@pytest.mark.timeout(900)
def test_a_rolling_restart_fails_no_request(
    cluster: Cluster, client: Sojourn, watch: Watch
) -> None:
    """Servers one after another, then nodes, each drained first, while clients work."""
    with Balancer(cluster) as front, Traffic(front.url, cluster.token, clients=4) as traffic:
        for server in cluster.servers.values():
            server.stop()
            server.start()
            traffic.turn()
        for one in client.nodes.list():
            node = cluster.nodes[one.name]
            client.nodes.drain(one.id)
            until(lambda name=one.name: state_of(client, name) == "drained", 240)
            node.stop()
            node.start()
            client.nodes.uncordon(one.id)
            until(lambda: healthy(client))
            traffic.turn()
    traffic.check()


def test_a_node_that_crashes_loses_no_acknowledged_snapshot(
    cluster: Cluster, client: Sojourn, session: Session, watch: Watch
) -> None:
    """Of one that runs, one that was put away durably, and one that was put away only there."""
    name = node_of(client, session)
    node = cluster.nodes[name]
    safe, unsafe = (on_node(client, name) for _ in range(2))
    try:
        least = read_count(session)
        snapshot = session.snapshot(wait="durable")
        safe_at = read_count(safe)
        safe.suspend(wait="durable")
        known = unsafe.snapshot(wait="durable")
        known_at = read_count(unsafe)
        node.machine.cut("s3")
        unsafe_at = until(lambda: max(0, read_count(unsafe) - known_at)) + known_at
        last = unsafe.suspend().head
        assert last is not None
        node.crash()
        node.machine.join("s3")
        counts_on(client, session, least)
        assert node_of(client, session) != name
        (loss,) = lost_events(client, session)
        assert loss["head"] == snapshot.id
        assert float(str(loss["lost_seconds"])) > 0
        # Nothing is missing: it goes on in the middle of its line.
        counts_on(client, safe, safe_at)
        (loss,) = lost_events(client, safe)
        assert (loss["undurable"], loss["lost_seconds"]) == (0, 0)
        # It goes back, and says so.
        counts_on(client, unsafe, 1)
        (loss,) = lost_events(client, unsafe)
        assert (loss["head"], loss["head_before"]) == (known.id, last)
        assert loss["undurable"] == 1
        node.unmount()
        node.start()
        # What only the lost disk had is not lost.
        durable = unsafe.durability(wait=100, snapshot=last)
        assert durable.durable_at is not None
        unsafe.rollback(last)
        counts_on(client, unsafe, unsafe_at)
    finally:
        node.machine.join("s3")
        if not node.running:
            node.crash()
            node.unmount()
            node.start()
        for one in (safe, unsafe):
            client.sessions.get(one.id).delete()
    until(lambda: healthy(client))


def test_an_exposed_port_answers_over_a_migration_and_a_failover(
    cluster: Cluster, client: Sojourn, watch: Watch
) -> None:
    """The same addresses, of two sessions that cross; a request meanwhile is held, or told to ask
    again, and no answer is another session's."""
    sessions = [client.sessions.create(policy=POLICY, limits=LIMITS) for _ in range(2)]
    try:
        with contextlib.ExitStack() as stack:
            askers = {}
            for session, server in zip(sessions, cluster.servers.values(), strict=True):
                session.spawn(["python3", "-c", ANSWERS, session.id])
                path = urlsplit(str(session.expose(8000, public=True).path_url)).path
                address = f"http://{server.machine.addresses['net']}:{PORTS}{path}"
                askers[session.id] = stack.enter_context(Asker(address))

            def all_answer() -> None:
                for asker in askers.values():
                    asker.again()

            all_answer()
            for session in sessions:
                session.migrate()
            all_answer()
            for session in sessions:
                session.snapshot(wait="durable")
            node = cluster.nodes[node_of(client, sessions[0])]
            node.crash()
            try:
                all_answer()
                assert node_of(client, sessions[0]) != node.name
            finally:
                node.unmount()
                node.start()
        for id, asker in askers.items():
            for one in asker.answers:
                assert one.status in (200, 503, 504, None), one
                assert one.status != 200 or one.said == id, one
                assert one.ended - one.began < 70, one  # as long as a wake may take, at most
        until(lambda: healthy(client))
    finally:
        for session in sessions:
            client.sessions.get(session.id).delete()


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


def test_a_node_without_its_lease_stands_still_and_is_not_believed(
    cluster: Cluster, client: Sojourn, watch: Watch
) -> None:
    """One whose process is stopped, and at the same time one that is cut off from the database."""
    names = [one.name for one in client.nodes.list()][:2]
    sessions = {name: on_node(client, name) for name in names}
    least = {name: read_count(session) for name, session in sessions.items()}
    for session in sessions.values():
        session.snapshot(wait="durable")
    stopped, cut = (cluster.nodes[name] for name in names)
    stopped.pause()
    cut.machine.cut("db")
    try:
        for name, session in sessions.items():
            counts_on(client, session, least[name])
            assert node_of(client, session) not in names
    finally:
        stopped.go_on()
        cut.machine.join("db")
    until(lambda: healthy(client))
    for name, session in sessions.items():
        counts_on(client, session, least[name])
        assert len(lost_events(client, session)) == 1
        session.delete()


def test_an_outage_of_the_database_loses_nobody(
    cluster: Cluster, client: Sojourn, watch: Watch
) -> None:
    """Longer than a lease: every node stands still, and goes on with what it has."""
    names = [one.name for one in client.nodes.list()][:2]
    sessions = {name: on_node(client, name) for name in names}
    before = {name: read_count(session) for name, session in sessions.items()}
    logs = [
        log for name in names for log in cluster.nodes[name].data.glob(f"sandboxes/*/upper{LOG}")
    ]
    assert len(logs) == 2

    def standing() -> bool:
        """Whether no session counts; half a second is as long as twenty numbers take."""
        sizes = [log.stat().st_size for log in logs]
        time.sleep(0.5)
        return sizes == [log.stat().st_size for log in logs]

    cluster.postgres.stop()
    try:
        until(standing)
        time.sleep(cluster.lease)  # all leases are over for longer than servers wait otherwise
        assert standing()
    finally:
        cluster.postgres.start()
    for name, session in sessions.items():
        counts_on(client, session, before[name])
        assert node_of(client, session) == name
        assert not lost_events(client, session)
        session.delete()
    assert healthy(client)


def test_a_full_node_puts_away_what_is_idle_and_has_others_wait(
    cluster: Cluster, client: Sojourn, watch: Watch
) -> None:
    """A node for two sessions: a third waits until there is room, and one that may be woken makes
    room when it is idle."""
    name, *others = [one.name for one in client.nodes.list()]
    node = cluster.nodes[name]
    for other in others:
        client.nodes.cordon(other)
    node.stop()
    node.options = ("--capacity", "sessions=2")
    node.start()
    kept = POLICY | {"auto_resume": False}
    made: list[Session] = []

    def create() -> None:
        made.append(client.sessions.create(policy=kept, limits=LIMITS))

    try:
        until(lambda: {one.name: one.ready for one in client.nodes.list()}[name])
        create()
        idle = client.sessions.create(policy=POLICY | {"idle_timeout": 3600}, limits=LIMITS)
        start_counting(idle)
        count = read_count(idle)
        create()  # makes the other one be put away, after five seconds without a call
        assert idle.refresh().state == "suspended"
        waiting = threading.Thread(target=create, daemon=True)
        waiting.start()
        waiting.join(2)
        assert waiting.is_alive() and len(made) == 2
        made.pop(0).delete()
        waiting.join(60)
        assert len(made) == 2
        assert {node_of(client, session) for session in made} == {name}
        for session in made:
            session.delete()
        counts_on(client, idle, count)
        idle.delete()
    finally:
        node.stop()
        node.options = ()
        node.start()
        for other in others:
            client.nodes.uncordon(other)
    until(lambda: healthy(client))


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
        time.sleep(cluster.lease + 4)  # longer than a node without a lease is waited for
    finally:
        node.machine.join("net")
    counts_on(client, session, before)
    assert node_of(client, session) == name
    assert not lost_events(client, session)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_faults(tmp_path: Path) -> None:
    """In CI for some seconds; SOJOURN_CLUSTER_SOAK says for how many."""
    seconds = float(os.environ.get("SOJOURN_CLUSTER_SOAK", "20"))
    faults = run(
        tmp_path, seconds, seed=int(os.environ.get("SOJOURN_CLUSTER_SEED", "1")), say=print
    )
    assert sum(faults.done.values()) >= 1
