"""Several nodes on one machine with one database and one object store, and sessions that count, so
that a gap or a second one of them would show."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.client import Process, Session
from sojourn.database import Database, Operation
from sojourn.model import Session as Record
from sojourn.model.nodes import NodeState
from support.node_process import NodeProcess, with_database
from support.postgres import PostgresServer
from support.servers import eventually

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
        self.postgres = postgres
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

    def session(self, id: str) -> Record:
        """A session as the database has it."""

        async def work(database: Database) -> Record:
            return await database.get_session(None, id)

        return with_database(self.database, work)

    def holder(self, id: str) -> NodeProcess:
        """The node that holds a session."""
        holder = self.session(id).holder
        return next(node for node in self.nodes if node.id == holder)

    def unfinished(self) -> list[Operation]:
        """What is under way on all nodes."""

        async def work(database: Database) -> list[Operation]:
            return await database.unfinished_operations()

        return with_database(self.database, work)

    def migrate(
        self, node: NodeProcess, session: str, to: NodeProcess | None, *, wait: float = 120
    ) -> tuple[int, Any]:
        """Ask the node that holds a session."""
        path = f"/v1/sessions/{session}/migrate?wait={wait:g}"
        return node.api(self.tenant, "POST", path, {"node": to.name if to is not None else None})

    def set_state(self, node: NodeProcess, state: NodeState) -> None:
        async def work(database: Database) -> None:
            await database.set_node_state(node.id, state)

        with_database(self.database, work)


@contextlib.contextmanager
def node_rig(directory: Path, stocked: Path, *names: str) -> Iterator[Rig]:
    """A rig with these nodes, over a copy of an object store."""
    postgres = PostgresServer(directory)
    made: Rig | None = None
    try:
        postgres.start()
        made = Rig(directory, Path(shutil.copytree(stocked, directory / "objects")), postgres)
        for name in names:
            made.node(name)
        yield made
    finally:
        for node in made.nodes if made is not None else []:
            node.remove()
        postgres.remove()


def start_counting(session: Session) -> Process:
    """A process that counts, and has begun."""
    session.files.write("/root/count.py", COUNTING)
    process = session.spawn("exec python3 /root/count.py")
    eventually(lambda: len(counted(process)) > 5)
    return process


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
