"""Killed at any moment of captures, replications and collections, nothing acknowledged is lost.

A worker (`support.repository_kills`) is killed at a random moment, again and again, each new one
going on with what the last one left. After each kill the repository is checked, structure and
bytes, and some of the snapshots that were acknowledged are restored; in the end all of them.

SOJOURN_SOAK=1 with SOJOURN_KILLS=1000 is the long form.
"""

from __future__ import annotations

import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from sojourn.model.snapshots import Snapshot
from sojourn.repository.checks import ERROR, check
from sojourn.repository.repository import SHARED, Repository
from support.repository_kills import TENANT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")

KILLS = int(os.environ.get("SOJOURN_KILLS", "40")) if os.environ.get("SOJOURN_SOAK") else 40
MOST_TOLD, LONGEST = 6, 0.1  # what a worker tells before its last moments, and their seconds
PATIENCE = 60.0


class Workers:
    """The driver process, and what its workers told."""

    def __init__(self, root: Path) -> None:
        tests = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.repository_kills", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tests,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._buffer = b""
        self._pid: int | None = None
        self.promised: dict[str, Snapshot] = {}
        self.pushes = self.collections = self.told = 0

    def close(self) -> None:
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._selector.close()
        self._in.close()
        self._out.close()

    def _lines(self, seconds: float) -> list[str]:
        if not self._selector.select(seconds):
            return []
        data = self._out.read() or b""
        assert data, "the driver has ended"
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [line.decode() for line in lines]

    def run_and_kill(self, seed: int, told: int, seconds: float) -> None:
        """Let a worker work until it has told something so often, and for some seconds more, kill
        it, take in all it told."""
        self._in.write(f"{seed}\n".encode())
        self._in.flush()
        self._until(lambda: self._pid is not None)
        before = self.told
        self._until(lambda: self.told >= before + told)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._take(self._lines(left))
        assert self._pid is not None, "the worker ended by itself"
        os.kill(self._pid, signal.SIGKILL)
        self._until(lambda: self._pid is None)

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, "the driver says nothing"
            self._take(self._lines(0.1))

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            kind, _, text = line.partition(" ")
            self.told += kind in "PDG"
            if kind == "W":
                self._pid = int(text)
            elif kind == "K":
                self._pid = None
            elif kind == "P":
                snapshot = msgspec.json.decode(text, type=Snapshot)
                self.promised[snapshot.id] = snapshot
                self.pushes += 1
            elif kind == "D":
                self.promised.pop(text, None)
            elif kind == "G":
                self.collections += 1
            else:
                pytest.fail(text)


@pytest.fixture
def place(tmp_path):
    """Memory where there is some: a kill loses nothing that a disk would keep, and syncing to a
    busy disk would take most of the time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="repository-kill-", dir="/dev/shm") as name:
        yield Path(name)


def restore(repository: Repository, snapshot: Snapshot, place: Path) -> None:
    """Bring everything of a snapshot back; each part is proven while it is written."""
    assert repository.read_snapshot(TENANT, snapshot.id) == snapshot
    for number, layer in enumerate(snapshot.layers):
        target = place / "restored"
        domain = TENANT if number else SHARED
        assert repository.fetch_layer(domain, layer.id, target).id == layer.id
        shutil.rmtree(target)
    if snapshot.memory is not None:
        target = place / "image"
        target.mkdir()
        assert repository.fetch_image(TENANT, snapshot.memory.id, target).id == snapshot.memory.id
        shutil.rmtree(target)


@pytest.mark.timeout(90 + 4 * KILLS)
def test_killed_at_random_moments(place):
    choose = random.Random(7)
    workers = Workers(place)
    try:
        for kill in range(KILLS):
            workers.run_and_kill(kill, choose.randrange(MOST_TOLD), choose.uniform(0.0, LONGEST))
            repository = Repository.open(str(place / "objects"), create=True)
            found = check(repository.backend, repository.domain, read_data=True)
            assert [each for each in found if each.severity == ERROR] == [], f"after kill {kill}"
            promised = list(workers.promised.values())
            for snapshot in choose.sample(promised, min(2, len(promised))):
                restore(repository, snapshot, place)
            repository.close()
        repository = Repository.open(str(place / "objects"))
        for snapshot in workers.promised.values():
            restore(repository, snapshot, place)
        repository.close()
    finally:
        workers.close()
    print(KILLS, "kills,", workers.pushes, "pushes,", workers.collections, "collections")
    assert workers.pushes > KILLS, "they did what is meant"
    assert workers.collections > KILLS / 10
