"""C45, C47: an object store or a node without room, and collections beside everything else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.client import Session
from sojourn.errors import Conflict, SojournError, StorageFull
from sojourn.repository.checks import check
from sojourn.repository.collection import collect
from sojourn.repository.repository import Repository
from support.durable import moved, objects, settled, workers
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

ROOM = 24 << 20


@contextlib.contextmanager
def small_disk(mount: Path, size: int) -> Iterator[Path]:
    """A file system of this size."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(mount)]
    subprocess.run(command, check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def size_of(place: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in place.rglob("*"))


def fill(session: Session, name: str, size: int) -> None:
    path = f"/srv/{name}"
    done = session.exec(f"head -c {size} /dev/urandom > {path}; sha256sum {path} > {path}.sum")
    assert done.exit_code == 0, done.stderr


def whole(session: Session, name: str) -> bool:
    return session.exec(f"sha256sum -c /srv/{name}.sum").exit_code == 0


def test_c45_a_full_object_store_is_told_and_nothing_counts_that_is_not_there(
    stocked: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", size_of(stocked) + ROOM) as disk:
        place = Path(shutil.copytree(stocked, disk / "objects"))
        server = ServerProcess(tmp_path / "data", store=place.as_uri())
        try:
            client = server.start()
            session = client.sessions.create(policy={"auto_snapshot": "off"})
            fill(session, "kept", 1 << 20)
            good = session.snapshot("good", memory=False, wait="durable")
            # The error comes, and comes before anything counts; the node has it all the same.
            fill(session, "big", 2 * ROOM)
            with pytest.raises(StorageFull):
                session.snapshot("big", memory=False, wait="durable")
            assert session.state == "running"
            with pytest.raises(StorageFull):
                session.suspend(memory=False, wait="durable")
            assert session.refresh().state == "suspended"
            found = {one.label: one for one in session.history()}
            assert found["good"].durable_at is not None
            assert found["big"].durable_at is None
            assert not session.durability().head_durable
            [tenant] = [one.name for one in place.glob("ten_*")]
            stored = {path.name for path in (place / tenant / "snapshots").iterdir()}
            assert good.id in stored
            assert not stored & {found["big"].id, session.head}
            status = client.status().objects
            assert status.waiting == 2 and status.lag > 0 and status.error
            # It goes on, here and for others.
            assert whole(session, "big")
            other = client.sessions.create()
            other.suspend()
            assert other.exec("echo on").text == "on\n"
            # What is there is whole.
            repository = Repository.open(str(place))
            bad = [one for one in check(repository.backend, repository.domain, read_data=True)]
            assert [one for one in bad if one.severity == "error"] == []
            repository.close()
            # With room it becomes durable by itself.
            remount = f"remount,size={size_of(place) + 4 * ROOM}"
            subprocess.run(["mount", "-o", remount, str(disk)], check=True)
            assert session.durability(wait=60).head_durable
            assert session.durability(snapshot="big", wait=60).head_durable
            eventually(lambda: settled(client))
            server = moved(server, tmp_path / "second")
            session = server.client().sessions.get(session.id)
            assert whole(session, "kept") and whole(session, "big")
        finally:
            server.remove()


def test_c45_a_node_without_room_for_what_the_store_has_says_so_and_keeps_nothing_half(
    stocked: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(stocked, tmp_path / "objects"))
    with small_disk(tmp_path / "disk", ROOM) as disk:
        server = ServerProcess(tmp_path / "data", store=place.as_uri())
        try:
            session = server.start().sessions.create(policy={"auto_snapshot": "off"})
            fill(session, "big", 2 * ROOM)
            session.suspend(memory=False, wait="durable")
            small = server.client().sessions.create(policy={"auto_snapshot": "off"})
            fill(small, "little", 10_000)
            small.suspend(wait="durable")
            eventually(lambda: settled(server.client()))
            server = moved(server, disk / "data")
            client = server.client()
            session, small = client.sessions.get(session.id), client.sessions.get(small.id)
            for _ in range(2):
                with pytest.raises(StorageFull):
                    session.resume()
                assert session.refresh().state == "suspended"
            # Nothing half-made takes the room of others.
            assert whole(small, "little")
            small.suspend(memory=False)
            subprocess.run(["mount", "-o", f"remount,size={6 * ROOM}", str(disk)], check=True)
            assert whole(session, "big")
            assert session.verify().ok
        finally:
            server.remove()


class Collecting:
    """Collections without a grace, one after another, in a thread."""

    def __init__(self, place: Path) -> None:
        self._repository = Repository.open(str(place))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = self.freed = 0
        self.fault: Exception | None = None

    def __enter__(self) -> Collecting:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                with contextlib.suppress(Conflict):  # the store changed too fast: nothing was lost
                    found = collect(self._repository.backend, self._repository.domain, grace=0)
                    self.freed += found.bytes
                self.rounds += 1
                time.sleep(0.5)
        except SojournError as error:
            self.fault = error

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._repository.close()


def test_c47_collections_beside_changing_sessions_and_a_stopped_worker_lose_nothing(
    stocked: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(stocked, tmp_path / "objects"))
    server = ServerProcess(tmp_path / "data", store=place.as_uri())
    try:
        client = server.start()
        sessions = [client.sessions.create(policy={"auto_snapshot": "off"}) for _ in range(2)]
        # What no snapshot needs goes: the template is needed from here on.
        for session in sessions:
            session.durability(wait=60)
        with Collecting(place) as collecting:
            for round in range(3):
                for session in sessions:
                    fill(session, f"r{round % 2}", 3 << 20)  # what it replaces becomes dead
                    before = set(objects(place, "packs"))
                    session.snapshot(f"r{round}", memory=False)
                    # A pack is sent, what refers to it is not: the worker stands still there, over
                    # several collections.
                    eventually(lambda before=before: set(objects(place, "packs")) - before, 60, 0.0)
                    [worker] = workers(server.store)
                    os.kill(worker, signal.SIGSTOP)
                    seen = collecting.rounds
                    try:
                        eventually(lambda seen=seen: collecting.rounds > seen + 2, timeout=60)
                    finally:
                        os.kill(worker, signal.SIGCONT)
                    if round:
                        session.delete_snapshot(f"r{round - 1}")
            for session in sessions:
                session.suspend(wait="durable")
            eventually(lambda: settled(client))
            seen = collecting.rounds
            eventually(lambda: collecting.rounds > seen + 3, timeout=60)
        assert collecting.fault is None, collecting.fault
        assert collecting.freed > 2 * (3 << 20)
        server = moved(server, tmp_path / "second")
        for session in sessions:
            session = server.client().sessions.get(session.id)
            assert {one.label for one in session.history()} >= {"r2"}
            assert whole(session, "r0") and whole(session, "r1")
            assert session.verify().ok
        repository = Repository.open(str(place))
        assert list(check(repository.backend, repository.domain, read_data=True)) == []
        repository.close()
    finally:
        server.remove()
