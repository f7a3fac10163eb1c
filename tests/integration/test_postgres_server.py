"""A whole server on PostgreSQL: it goes on over a crash of its own, over a restart of the database,
and, on another machine, over the loss of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import Unreachable
from support.durable import lose, sojourn
from support.postgres import PostgresServer, postgres_server
from support.servers import UP, ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]


class Server(ServerProcess):
    """One whose database is elsewhere."""

    def __init__(self, data: Path, store: str, database: str) -> None:
        super().__init__(data, store=store)
        self.database = database

    def start(self, **environment: str):  # type: ignore[no-untyped-def]
        return super().start(**({"SOJOURN_DATABASE": self.database} | environment))


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[PostgresServer]:
    with postgres_server(tmp_path, durable=True) as postgres:
        yield postgres


@pytest.fixture
def server(tmp_path: Path, place: Path, postgres: PostgresServer) -> Iterator[Server]:
    server = Server(tmp_path / "data", place.as_uri(), postgres.url(postgres.create()))
    server.start()
    yield server
    server.remove()


def test_sessions_outlive_server_database_and_machine(
    server: Server, postgres: PostgresServer, tmp_path: Path
) -> None:
    one = server.client().sessions.create(name="one", policy={"auto_snapshot": "off"})
    one.run_code("value = 41")
    one.files.write("/root/note", b"kept")

    # The server is killed; the sandbox goes on, and with it what it holds.
    one = server.restart().sessions.get("one")
    assert one.run_code("value").text == "41"
    assert one.state == "running"

    # PostgreSQL is killed and comes back; whoever asks meanwhile waits.
    postgres.kill()
    postgres.start()
    assert one.run_code("value + 1").text == "42"
    kept = one.snapshot("kept")
    one.suspend(wait="durable")
    eventually(lambda: one.durability().waiting == 0)

    # A second server is refused, whatever its data directory.
    done = subprocess.run(
        [*UP, "--data", str(tmp_path / "other"), "--database", server.database],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 117 and "another server uses the database" in done.stderr

    # What is done from here on is on this machine's disk alone, which is lost.
    one.files.write("/root/note", b"lost")
    before = len(one.events())
    lose(server)
    told = sojourn(
        "recover",
        "--store",
        server.store,
        "--data",
        str(server.data),
        "--database",
        server.database,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    one = server.start().sessions.get("one")
    assert one.state == "suspended"
    assert one.info.cause is not None and "machine was lost" in one.info.cause
    kinds = [event.kind for event in one.events()]
    assert len(kinds) > before and "recovered" in kinds
    assert one.files.read("/root/note") == b"kept"
    assert one.run_code("value + 1").text == "42"
    assert kept.id in {info.id for info in one.history()}
    assert one.verify().ok


def test_a_server_without_its_database_says_so_and_goes_on_when_it_is_back(
    server: Server, postgres: PostgresServer
) -> None:
    client = server.restart(SOJOURN_DATABASE_PATIENCE="2")
    one = client.sessions.create(policy={"auto_snapshot": "off"})
    postgres.stop()
    with pytest.raises(Unreachable) as refused:
        one.pause()
    assert "does not answer" in refused.value.message
    postgres.start()
    one.pause()
    assert one.state == "paused"
    assert one.exec("echo back").text == "back\n"
