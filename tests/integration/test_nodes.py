"""Two nodes on one machine with one database and one object store: whose a session is, and what
becomes of it when it changes nodes."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sojourn.client import Process, Session, Sojourn
from sojourn.database import Database
from sojourn.errors import SessionElsewhere
from sojourn.model.nodes import FailedOver
from support.node_process import NodeProcess, with_database
from support.postgres import PostgresServer
from support.servers import eventually

pytestmark = pytest.mark.privileged

COUNTING = (
    "import os, time\n"
    "n = 0\n"
    "while True:\n"
    "    n += 1\n"
    "    with open('/root/next', 'w') as file: file.write(str(n))\n"
    "    os.replace('/root/next', '/root/count')\n"
    "    print(n, flush=True)\n"
    "    time.sleep(0.02)\n"
)


class Rig:
    """A database, an object store, and nodes."""

    def __init__(self, directory: Path, place: Path, postgres: PostgresServer) -> None:
        self.directory = directory
        self.database = postgres.url(postgres.create())
        self.store = place.as_uri()
        self.nodes: list[NodeProcess] = []

        async def tenant(database: Database) -> str:
            return (await database.create_tenant("one")).id

        self.tenant = with_database(self.database, tenant)

    def node(self, name: str, *, lease: float = 15.0) -> NodeProcess:
        made = NodeProcess(self.directory / name, name, self.database, self.store, lease=lease)
        made.join()
        made.start()
        self.nodes.append(made)
        return made

    def session(self, id: str):  # type: ignore[no-untyped-def]
        async def work(database: Database):  # type: ignore[no-untyped-def]
            return await database.get_session(None, id)

        return with_database(self.database, work)


@pytest.fixture(scope="module")
def short(rig: Rig) -> NodeProcess:
    """A node whose lease ends soon."""
    return rig.node("c", lease=2.0)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("nodes")
    postgres = PostgresServer(directory)
    made: Rig | None = None
    try:
        postgres.start()
        place = Path(shutil.copytree(stocked, directory / "objects"))
        made = Rig(directory, place, postgres)
        made.node("a")
        made.node("b")
        yield made
    finally:
        for node in made.nodes if made is not None else []:
            node.remove()
        postgres.remove()


def clients(rig: Rig) -> tuple[Sojourn, Sojourn]:
    return rig.nodes[0].client(rig.tenant), rig.nodes[1].client(rig.tenant)


def start_counting(session: Session) -> Process:
    session.files.write("/root/count.py", COUNTING)
    return session.spawn("exec python3 /root/count.py")


def counted(process: Process) -> list[int]:
    """What a counting process has printed so far."""
    whole = b"".join(piece.data for piece in process.output(follow=False))
    return [int(line) for line in whole.split(b"\n")[:-1]]


def require_no_gap(session: Session, process: Process) -> int:
    """It goes on counting, and has left out nothing: memory, files and output agree."""
    seen = counted(process)
    assert seen == list(range(1, len(seen) + 1))
    more = eventually(lambda: [n for n in [len(counted(process))] if n > len(seen)])
    noted = int(session.exec("cat /root/count").text)
    assert more[0] <= noted <= len(counted(process)) + 1
    return noted


def test_a_session_goes_from_node_to_node_with_its_memory(rig: Rig) -> None:
    a, b = clients(rig)
    session = a.sessions.create()
    process = start_counting(session)
    eventually(lambda: len(counted(process)) > 5)
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


def migrate(node: NodeProcess, rig: Rig, session: str, to: NodeProcess | None) -> dict[str, Any]:
    """Ask the node that holds a session; how the operation ended."""
    status, told = node.api(
        rig.tenant,
        "POST",
        f"/v1/sessions/{session}/migrate",
        {"node": to.name if to is not None else None},
    )
    assert status == 200, told
    return told


def test_a_running_session_moves_and_its_streams_go_on(rig: Rig) -> None:
    a, b = rig.nodes[0], rig.nodes[1]
    session = a.client(rig.tenant).sessions.create()
    process = start_counting(session)
    eventually(lambda: len(counted(process)) > 5)
    b.ask("POST", f"/node/sessions/{session.id}/prefetch", {})
    told = migrate(a, rig, session.id, b)
    assert told["result"]["state"] == "running"
    moved = b.client(rig.tenant).sessions.get(session.id)
    assert rig.session(session.id).holder == b.id
    require_no_gap(moved, moved.process(process.id))
    events = {event.kind: event for event in moved.events()}
    assert events["migrate"].details["node"] == b.id
    with pytest.raises(SessionElsewhere):
        session.exec("true")
    assert a.sandboxes() == set()
    # And back, where most of it is still on the disk.
    migrate(b, rig, session.id, None)
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
    eventually(lambda: len(counted(process)) > 5)
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


def test_a_fenced_node_ends_its_sandboxes_and_its_sessions_go_on_elsewhere(
    short: NodeProcess, rig: Rig
) -> None:
    session = short.client(rig.tenant).sessions.create()
    process = start_counting(session)
    eventually(lambda: len(counted(process)) > 5)
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
