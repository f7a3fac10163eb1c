"""The server is killed at random moments under load: nothing that was acknowledged is lost, no
session is stuck, and nothing is left on the machine."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Session
from sojourn.errors import Interrupted, SojournError, Unreachable, WrongState
from support.counting import COUNTER
from support.histories_machine import Machine, await_true
from support.servers import ServerProcess

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(600)]

SOAK = bool(os.environ.get("SOJOURN_SOAK"))
KILLS = int(os.environ.get("SOJOURN_KILLS", "2000"))
APPEND = "echo $(($(cat /root/log 2>/dev/null | wc -l) + 1)) >> /root/log"


class Log:
    """What was acknowledged of one session, kept outside the server: at least `acked` of at most
    `sent`, for lines in a file and for additions to a variable."""

    def __init__(self) -> None:
        self.acked = {"lines": 0, "value": 0}
        self.sent = {"lines": 0, "value": 0}
        self.snapshots: list[str] = []
        self.checked = 0

    def settle(self, what: str, found: int, where: str) -> None:
        assert self.acked[what] <= found <= self.sent[what], (
            f"{where}: {what} {found}, acknowledged {self.acked[what]}, sent {self.sent[what]}"
        )
        self.checked += found - self.acked[what] + 1
        self.acked[what] = self.sent[what] = found


class Worker:
    """One thread that works on one session until the server goes away."""

    def __init__(self, session: Session, seed: int) -> None:
        self.id = session.id
        self.session = session
        self.log = Log()
        self.random = random.Random(seed)
        self.failure: BaseException | None = None
        self.acknowledged = 0
        session.spawn(COUNTER)
        session.run_code("value = 0")

    def run(self) -> None:
        try:
            while True:
                self.step()
        except (Unreachable, Interrupted):
            return  # the server was killed
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
            self.failure = error

    def step(self) -> None:
        kinds = ["lines", "lines", "value", "pause", "suspend", "resume", "snapshot", "fork"]
        kind = self.random.choice(kinds)
        if kind in self.log.sent:
            self.log.sent[kind] += 1
            if kind == "lines":
                assert self.session.exec(APPEND).exit_code == 0
            else:
                assert self.session.run_code("value += 1").error is None
            self.log.acked[kind] += 1
            self.acknowledged += 1
        elif kind == "snapshot":
            self.log.snapshots.append(self.session.snapshot().id)
            self.acknowledged += 1
        elif kind == "fork":
            self.session.fork()[0].delete()
        else:
            try:
                getattr(self.session, kind)()
            except WrongState:
                assert kind == "pause"  # of a suspended session

    def check(self) -> None:
        """Everything that was acknowledged is there."""
        where = self.id
        lines = self.session.files.read("/root/log").decode().split() if self.exists() else []
        assert lines == [str(n + 1) for n in range(len(lines))]
        self.log.settle("lines", len(lines), where)
        self.log.settle("value", int(self.session.run_code("value").text or -1), where)
        counted = self.session.files.read("/root/count").decode().split("\n")[:-1]
        assert counted == [str(n + 1) for n in range(len(counted))]
        known = {item.id for item in self.session.history()}
        assert known.issuperset(self.log.snapshots)

    def exists(self) -> bool:
        return self.session.files.exists("/root/log")


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "data")
    server.start()
    yield server
    server.remove()


def at_rest(server: ServerProcess) -> None:
    for session in server.client().sessions.list():
        assert session.info.operation is None, session.info
        assert session.state in ("running", "paused", "suspended"), session.info


def kill_under_load(server: ServerProcess, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    client = server.client()
    workers = [Worker(client.sessions.create(), seed + number) for number in range(3)]
    ours = {worker.id for worker in workers}
    for number in range(kills):
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        threading.Event().wait(chance.uniform(0.02, 0.5))
        server.kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for worker in workers:
            if worker.failure is not None:
                raise worker.failure
        client.close()
        client = server.start()
        await_true(lambda: at_rest(server), 20)
        for session in client.sessions.list():
            if session.id not in ours:
                session.delete()  # a fork whose deletion the kill was faster than
        for worker in workers:
            worker.session = client.sessions.get(worker.id)
            try:
                worker.check()
            except SojournError as error:
                raise AssertionError(f"after kill {number + 1}: {error}") from error
    acknowledged = sum(worker.acknowledged for worker in workers)
    print(f"seed {seed}: {kills} kills, {acknowledged} acknowledged writes, 0 lost, 0 stuck")
    for session in client.sessions.list():
        session.delete()
    client.close()
    Machine(server).check_empty(30)


def test_random_kills(killed: ServerProcess) -> None:
    kill_under_load(killed, 20, random.randrange(1 << 30))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not SOAK, reason="a soak: set SOJOURN_SOAK=1")
def test_many_random_kills(killed: ServerProcess) -> None:
    kill_under_load(killed, KILLS, random.randrange(1 << 30))
