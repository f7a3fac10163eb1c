"""Killed at any point, the store opens again with everything it had acknowledged and nothing half.

A child works on a store in a loop and writes what was acknowledged to a pipe. It kills itself
(SIGKILL) right before one of its calls to the file system, chosen at random; then the store is
opened anew and judged.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from sojourn.model import new_id
from sojourn.model.snapshots import LayerRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")

ROUNDS = 60
CALLS = {
    "open",
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.utime",
}
CONFIG = SnapshotConfig(template="t", env={}, user="root", cwd="/", hostname="h")

Tell = Callable[[str, Any], None]


def work(root: Path, seed: int, tell: Tell) -> None:
    """Capture, seal, publish, delete and collect for ever."""
    choose = random.Random(seed)
    store = LocalStore(root / "store", grace=0)

    def publish(layers: list[LayerRef], memory: Any = None) -> Snapshot:
        made = Snapshot(
            id=new_id("snp"),
            session="s",
            parent=None,
            kind=SnapshotKind.AUTO,
            label=None,
            created_at=0.0,
            layers=layers,
            memory=memory,
            config=CONFIG,
            fingerprint=fingerprint(layers, memory, CONFIG),
        )
        store.publish_snapshot(made)
        tell("P", made)
        return made

    upper, number, since = root / "upper-0", 0, None
    kept: list[Snapshot] = []
    upper.mkdir()
    while True:
        number += 1
        for _ in range(choose.randrange(1, 4)):
            name = upper / f"f{choose.randrange(12)}"
            name.write_bytes(os.urandom(choose.randrange(1, 30_000)))
        (upper / f"d{choose.randrange(4)}").mkdir(exist_ok=True)
        pending = store.capture_layer(upper, since=since, suspects=set())
        layer = pending.publish()
        since = (pending.scan, layer)
        memory = None
        if choose.random() < 0.4:
            staged = store.stage_image()
            (staged / "pages").write_bytes(os.urandom(100_000))
            memory = store.publish_image(staged, "d", "r", [])
        kept.append(publish([layer], memory))
        if choose.random() < 0.5:
            (upper / "last words").write_bytes(os.urandom(100))
            sealed = store.seal_layer(upper, since=since, suspects=set())
            tell("S", (sealed.ref, str(upper)))
            kept.append(publish([sealed.ref]))
            sealed.take()
            tell("T", sealed.ref)
            upper = root / f"upper-{number}"
            upper.mkdir()
            since = None
        if len(kept) > 3:
            gone = kept.pop(0)
            tell("D", gone)
            store.delete_snapshot(gone.id)
            store.collect({since[1].id} if since else set())


def child(root: Path, seed: int, pipe: int, calls_of: set[str], last: int) -> NoReturn:
    """The body of the forked worker; it never returns."""
    calls = 0

    def count(event: str, _: tuple[Any, ...]) -> None:
        nonlocal calls
        if event in calls_of:
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)

    def tell(kind: str, value: Any) -> None:
        # One write, so that what arrives is whole; it comes after the store has acknowledged.
        os.write(pipe, kind.encode() + msgspec.json.encode(value) + b"\n")

    try:
        sys.addaudithook(count)
        work(root, seed, tell)
    finally:
        os._exit(1)  # only an error leads here


def run_and_kill(root: Path, seed: int, calls_of: set[str], last: int) -> list[tuple[str, bytes]]:
    """What the worker told before it died at its call number `last`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(root, seed, writing, calls_of, last)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"
    return [(chr(line[0]), line[1:]) for line in told.splitlines()]


def judge(root: Path, told: list[tuple[str, bytes]]) -> int:
    """Open the store as the next process would and compare with what was acknowledged."""
    store = LocalStore(root / "store", grace=0)
    promised: dict[str, Snapshot] = {}
    sealed: list[tuple[LayerRef, Path]] = []
    for kind, value in told:
        if kind == "P":
            snapshot = msgspec.json.decode(value, type=Snapshot)
            promised[snapshot.id] = snapshot
        elif kind == "D":
            promised.pop(msgspec.json.decode(value, type=Snapshot).id)
        elif kind == "S":
            ref, upper = msgspec.json.decode(value, type=tuple[LayerRef, str])
            sealed.append((ref, Path(upper)))
        elif kind == "T":
            taken = msgspec.json.decode(value, type=LayerRef)
            sealed = [pair for pair in sealed if pair[0] != taken]
    for ref, upper in sealed:
        assert store.take_layer(ref, upper) == ref
    for snapshot in promised.values():
        assert store.read_snapshot(snapshot.id) == snapshot
        assert list(store.verify(snapshot)) == []
    # Nothing half stands there: all that is stored is whole.
    for path in (store.root / "snapshots").iterdir():
        found = store.read_snapshot(path.name)
        assert list(store.verify(found)) == []
    for place in (store.root / "layers").iterdir():
        assert (place / "fs").is_dir() and (place / "manifest").is_file()
    assert list((store.root / "staging").iterdir())[1:] == [], "leftovers of the killed process"
    store.collect(set())
    for snapshot in promised.values():
        assert list(store.verify(snapshot)) == []
    return len(promised)


@pytest.fixture
def place(tmp_path):
    """Memory where there is some: a kill loses nothing that a disk would keep, and syncing the
    rounds to a busy disk would take most of the time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="store-kill-", dir="/dev/shm") as name:
        yield Path(name)


def test_killed_at_random_points(place):
    choose = random.Random(20)
    acknowledged = 0
    for round in range(ROUNDS):
        root = place / f"round{round}"
        root.mkdir()
        # Moves into place are few and matter most: every second round aims at them.
        if round % 2:
            told = run_and_kill(root, round, {"os.rename"}, choose.randrange(1, 120))
        else:
            told = run_and_kill(root, round, CALLS, choose.randrange(1, 1500))
        acknowledged += judge(root, told)
        shutil.rmtree(root)
    assert acknowledged > ROUNDS, "the rounds were long enough to mean something"
