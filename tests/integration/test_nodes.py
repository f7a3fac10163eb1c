"""Two nodes on one machine with one database and one object store: whose a session is, and what
becomes of it when it changes nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sojourn.client import Sojourn
from sojourn.database import Database
from sojourn.errors import Conflict, SessionElsewhere, Unreachable
from sojourn.model.nodes import FailedOver, NodeState
from support.node_process import NodeProcess, with_database
from support.node_rig import Rig, counted, node_rig, require_no_gap, start_counting
from support.servers import eventually

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module")
def short(rig: Rig) -> NodeProcess:
    """A node whose lease ends soon."""
    return rig.node("c", lease=2.0)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[Rig]:
    with node_rig(tmp_path_factory.mktemp("nodes"), stocked, "a", "b") as made:
        yield made


def clients(rig: Rig) -> tuple[Sojourn, Sojourn]:
    return rig.nodes[0].client(rig.tenant), rig.nodes[1].client(rig.tenant)


def test_a_session_goes_from_node_to_node_with_its_memory(rig: Rig) -> None:
    a, b = clients(rig)
    session = a.sessions.create()
    process = start_counting(session)
    with pytest.raises(SessionElsewhere) as told:
        b.sessions.get(session.id).exec("true")
    assert told.value.details["holder"] == rig.nodes[0].id
    session.suspend()
    status, body = rig.nodes[0].ask("POST", f"/node/sessions/{session.id}/release")
    assert status == 204, body
    assert rig.session(session.id).holder is None
    taken = b.sessions.get(session.id)
    assert taken.state == "suspended"
    taken.resume()
    require_no_gap(taken, taken.process(process.id))
    assert rig.session(session.id).holder == rig.nodes[1].id
    with pytest.raises(SessionElsewhere):
        session.exec("true")
    taken.delete()


def test_a_running_session_moves_and_its_streams_go_on(rig: Rig) -> None:
    a, b = rig.nodes[0], rig.nodes[1]
    session = a.client(rig.tenant).sessions.create()
    process = start_counting(session)
    b.ask("POST", f"/node/sessions/{session.id}/prefetch", {})
    status, told = rig.migrate(a, session.id, b)
    assert (status, told["result"]["state"]) == (200, "running"), told
    moved = b.client(rig.tenant).sessions.get(session.id)
    assert rig.session(session.id).holder == b.id
    require_no_gap(moved, moved.process(process.id))
    events = {event.kind: event for event in moved.events()}
    assert events["migrate"].details["node"] == b.id
    with pytest.raises(SessionElsewhere):
        session.exec("true")
    assert a.sandboxes() == set()
    # And back, where most of it is still on the disk.
    assert rig.migrate(b, session.id, None)[0] == 200
    require_no_gap(session, process)
    session.delete()


def host_count(node: NodeProcess) -> int:
    """What a counting session of a node has written, as the host shows it."""
    (file,) = (node.data / "sandboxes").glob("*/upper/root/count")
    return int(file.read_text() or 0)


def stands_still(node: NodeProcess) -> bool:
    before = host_count(node)
    time.sleep(0.3)
    return host_count(node) == before


def test_without_its_lease_a_node_stands_still_and_goes_on_when_it_is_renewed(
    short: NodeProcess, rig: Rig
) -> None:
    session = short.client(rig.tenant).sessions.create()
    process = start_counting(session)
    epoch = rig.session(session.id).epoch
    short.send(signal.SIGSTOP)
    try:
        eventually(lambda: stands_still(short))
        assert short.row().lease_left < 0
    finally:
        short.send(signal.SIGCONT)
    eventually(lambda: short.ask("GET", "/node/health")[0] == 200)
    require_no_gap(session, process)
    assert rig.session(session.id).epoch == epoch
    session.delete()


def test_an_outage_of_the_database_costs_time_and_nothing_else(
    short: NodeProcess, rig: Rig
) -> None:
    session = short.client(rig.tenant).sessions.create()
    process = start_counting(session)
    epoch = rig.session(session.id).epoch
    rig.postgres.stop()
    try:
        eventually(lambda: stands_still(short))
        assert short.ask("GET", "/node/health")[0] == 503
        with pytest.raises(Unreachable):
            session.exec("true")
    finally:
        rig.postgres.start()
    eventually(lambda: short.ask("GET", "/node/health")[0] == 200)
    require_no_gap(session, process)
    assert rig.session(session.id).epoch == epoch
    session.delete()


def test_a_node_that_died_goes_on_when_it_starts_after_its_lease(
    short: NodeProcess, rig: Rig
) -> None:
    session = short.client(rig.tenant).sessions.create()
    process = start_counting(session)
    short.kill()
    try:
        eventually(lambda: stands_still(short))
    finally:
        short.start()
    again = short.client(rig.tenant).sessions.get(session.id)
    require_no_gap(again, again.process(process.id))
    again.delete()


def test_a_fenced_node_ends_its_sandboxes_and_its_sessions_go_on_elsewhere(
    short: NodeProcess, rig: Rig
) -> None:
    session = short.client(rig.tenant).sessions.create()
    process = start_counting(session)
    safe = session.snapshot(wait="durable")
    noted = len(counted(process))
    before = short.row().incarnation
    short.send(signal.SIGSTOP)
    try:
        eventually(lambda: stands_still(short))
        last = host_count(short)
        assert [one.session for one in fail_over(rig, short)] == [session.id]
        left = rig.session(session.id)
        assert (left.state, left.holder, left.head) == ("suspended", None, safe.id)
        here = rig.nodes[1].client(rig.tenant).sessions.get(session.id)
        here.resume()
        assert 0 < len(counted(here.process(process.id))) < noted + 50
    finally:
        short.send(signal.SIGCONT)
    # Nothing of it ran for a moment between the thaw and its end.
    eventually(lambda: short.row().incarnation > before + 1)
    eventually(lambda: not short.sandboxes())
    assert not list((short.data / "sandboxes").glob("*/upper/root/count")) or (
        host_count(short) == last
    )
    with pytest.raises(SessionElsewhere):
        eventually(lambda: short.running)
        short.client(rig.tenant).sessions.get(session.id).exec("true")
    require_no_gap(here, here.process(process.id))
    here.delete()


def fail_over(rig: Rig, node: NodeProcess) -> list[FailedOver]:
    """What a server does when a node's lease has ended."""

    async def work(database: Database) -> list[FailedOver]:
        found = await database.lose_node(0.0)
        assert found is not None and found.id == node.id
        return await database.fail_over(node.id)

    return with_database(rig.database, work)


def test_a_drained_node_gives_everything_away(rig: Rig) -> None:
    node, other = rig.nodes[0], rig.nodes[1]
    client = node.client(rig.tenant)
    live, away = client.sessions.create(), client.sessions.create()
    process = start_counting(live)
    away.suspend()
    rig.set_state(node, NodeState.DRAINING)
    try:
        node.ask("POST", "/node/operations")
        eventually(lambda: rig.session(away.id).holder is None, timeout=60)
        eventually(lambda: rig.session(live.id).holder not in (None, node.id), timeout=60)
        moved = rig.holder(live.id).client(rig.tenant).sessions.get(live.id)
        eventually(lambda: moved.refresh().state == "running")
        require_no_gap(moved, moved.process(process.id))
        eventually(lambda: not node.sandboxes())
    finally:
        rig.set_state(node, NodeState.READY)
    moved.delete()
    other.client(rig.tenant).sessions.get(away.id).delete()


def test_room_is_made_by_what_is_idle(rig: Rig) -> None:
    node = rig.nodes[0]
    client = node.client(rig.tenant)
    idle, kept = client.sessions.create(), client.sessions.create()
    kept.update(policy={"idle_timeout": None})
    need = {"memory_bytes": 1 << 50}
    status, told = node.ask("POST", "/node/evict", {"need": need, "idle": 3600.0})
    assert (status, told["room"], told["sessions"]) == (200, False, [])
    status, told = node.ask("POST", "/node/evict", {"need": need, "idle": 0.0})
    assert (status, told["room"]) == (200, False)
    assert told["sessions"] == [idle.id]
    assert (idle.refresh().state, kept.refresh().state) == ("suspended", "running")
    status, told = node.ask("POST", "/node/evict", {"need": {"sessions": 1}, "idle": 0.0})
    assert (status, told["room"], told["sessions"]) == (200, True, [])
    idle.delete()
    kept.delete()


def test_templates_are_every_nodes_and_versions_made_at_once_are_two(rig: Rig) -> None:
    a, b = clients(rig)
    source = a.sessions.create()
    source.exec("echo made > /root/made")
    assert source.to_template("shared").version == 1
    there = b.sessions.create(template="shared")
    assert there.exec("cat /root/made").text == "made\n"
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda one: one.to_template("shared", memory=False), [source, there]))
    assert sorted(one.version or 0 for one in made) == [2, 3]
    assert b.templates.get("shared").versions == [1, 2, 3]
    a.templates.remove("shared")
    for session in (source, there):
        session.delete()


def test_a_fork_that_moved_away_is_not_promoted_from_there(rig: Rig) -> None:
    a, b = rig.nodes[0], rig.nodes[1]
    parent = a.client(rig.tenant).sessions.create()
    (child,) = parent.fork()
    assert rig.session(child.id).holder == a.id
    assert rig.migrate(a, child.id, b)[0] == 200
    there = b.client(rig.tenant).sessions.get(child.id)
    there.exec("echo better > /root/file")
    with pytest.raises(Conflict) as told:
        there.promote()
    assert "sojourn session migrate" in told.value.next_step
    assert rig.migrate(b, child.id, a)[0] == 200
    child.promote()
    assert parent.exec("cat /root/file").text == "better\n"
    child.delete()
    parent.delete()
