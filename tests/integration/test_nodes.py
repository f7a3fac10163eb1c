"""Two nodes on one machine with one database and one object store: whose a session is, and what
becomes of it when it changes nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Sojourn
from sojourn.database import Database
from sojourn.errors import SessionElsewhere
from support.durable import stock
from support.node_process import NodeProcess, with_database
from support.postgres import PostgresServer

pytestmark = pytest.mark.privileged

COUNTING = (
    "import time\n"
    "n = 0\n"
    "while True:\n"
    "    n += 1\n"
    "    open('/root/count', 'w').write(str(n))\n"
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
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("nodes")
    postgres = PostgresServer(directory)
    made: Rig | None = None
    try:
        postgres.start()
        made = Rig(directory, stock(directory), postgres)
        made.node("a")
        made.node("b")
        yield made
    finally:
        for node in made.nodes if made is not None else []:
            node.remove()
        postgres.remove()


def clients(rig: Rig) -> tuple[Sojourn, Sojourn]:
    return rig.nodes[0].client(rig.tenant), rig.nodes[1].client(rig.tenant)


def start_counting(session) -> None:  # type: ignore[no-untyped-def]
    session.write_file("/root/count.py", COUNTING)
    session.spawn(["python3", "/root/count.py"])


def test_a_session_goes_from_node_to_node_with_its_memory(rig: Rig) -> None:
    a, b = clients(rig)
    session = a.sessions.create()
    session.run_code("x = 41")
    session.exec("echo kept > /root/kept")
    with pytest.raises(SessionElsewhere) as told:
        b.sessions.get(session.id).exec("true")
    assert told.value.details["holder"] == rig.nodes[0].id
    session.suspend()
    status, body = rig.nodes[0].ask("POST", f"/node/sessions/{session.id}/release")
    assert status == 204, body
    assert rig.session(session.id).holder is None
    taken = b.sessions.get(session.id)
    assert taken.run_code("x + 1").text == "42"
    assert taken.exec("cat /root/kept").text == "kept\n"
    assert rig.session(session.id).holder == rig.nodes[1].id
    with pytest.raises(SessionElsewhere):
        session.exec("true")
    taken.delete()
