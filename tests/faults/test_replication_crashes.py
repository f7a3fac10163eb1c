"""Copying to the object store, cut off anywhere: the next server goes on where it was, nothing is
sent twice, nothing counts as durable that is not there, and sessions never notice."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError, StoreUnreachable
from sojourn.repository.checks import check
from sojourn.repository.repository import Repository
from support.durable import REPLICATION_POINTS, moved, objects, settled, workers
from support.object_stores import FaultProxy, S3Server, s3_options
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

SIZE = 48 << 20  # of what does not compress: three packs


@pytest.fixture(scope="module")
def shared_place(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(stocked, tmp_path_factory.mktemp("cut-off") / "objects"))


@pytest.fixture(scope="module")
def server(shared_place: Path) -> Iterator[ServerProcess]:
    """One server for all tests here: each begins and ends with all of its sessions sent."""
    server = ServerProcess(shared_place.parent / "data", store=shared_place.as_uri())
    server.start()
    yield server
    server.remove()


@pytest.fixture
def store(server: ServerProcess, shared_place: Path) -> Path:
    """Its object store; the server runs."""
    if not server.running:
        server.start()
    return shared_place


def prepared(client: Sojourn, size: int = SIZE) -> Session:
    """A session that is wholly in the store, and has new content since."""
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    session.durability(wait=60)
    eventually(lambda: settled(client))
    done = session.exec(f"head -c {size} /dev/urandom > /srv/big; sha256sum /srv/big > /srv/sum")
    assert done.exit_code == 0, done.stderr
    return session


def packs(place: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in objects(place, "packs", "*")}


def prove(place: Path, session: Session) -> None:
    """All of the store is whole, no chunk is there twice, and the session's record stands where
    the session does."""
    repository = Repository.open(str(place))
    try:
        assert list(check(repository.backend, repository.domain)) == []
        for name in ("shared", session_tenant(repository)):
            names = Counter(
                chunk for pack in repository.domain(name).index.packs() for chunk in pack.names()
            )
            assert [chunk for chunk, count in names.items() if count > 1] == []
        tenant = session_tenant(repository)
        assert repository.read_session(tenant, session.id).session.head == session.head
    finally:
        repository.close()


def session_tenant(repository: Repository) -> str:
    return next(repository.tenants()).id


def sent(server: ServerProcess, session: Session) -> Session:
    """Wait until all of the session is durable, record included."""
    client = server.client()
    session = client.sessions.get(session.id)
    assert session.durability(wait=60).head_durable
    eventually(lambda: settled(client))
    place = Path(server.store.removeprefix("file://"))
    eventually(lambda: record_head(place, session) == session.refresh().head)
    return session


def record_head(place: Path, session: Session) -> str | None:
    repository = Repository.open(str(place))
    try:
        return repository.read_session(session_tenant(repository), session.id).session.head
    finally:
        repository.close()


# -- the server ---------------------------------------------------------------------------------

SENDING = tuple(point for point in REPLICATION_POINTS if point != "replicate.remove")


@pytest.mark.parametrize("point", SENDING)
def test_a_server_killed_while_it_sends_sends_nothing_twice(
    server: ServerProcess, store: Path, point: str
) -> None:
    session = prepared(server.client())
    server.restart(SOJOURN_CRASH_AT=point)
    session = server.client().sessions.get(session.id)
    with contextlib.suppress(SojournError):
        session.suspend(memory=False)
    assert server.wait(60) == -signal.SIGKILL, f"{point} was not reached"
    eventually(lambda: not workers(server.store))
    before = packs(store)
    assert sum(before.values()) > SIZE
    server.start()
    session = sent(server, session)
    assert packs(store) == before
    prove(store, session)
    assert session.exec("sha256sum -c /srv/sum").exit_code == 0
    session.delete()


@pytest.mark.parametrize("what", ["snapshot", "session"])
def test_a_server_killed_while_it_removes_removes_all_the_same(
    server: ServerProcess, store: Path, what: str
) -> None:
    session = prepared(server.client(), 1000)
    taken = session.snapshot("goes", wait="durable")
    session.suspend(wait="durable")
    session = sent(server, session)
    [kept] = store.glob(f"ten_*/snapshots/{session.head}")
    [gone] = store.glob(f"ten_*/snapshots/{taken.id}")
    server.restart(SOJOURN_CRASH_AT="replicate.remove")
    session = server.client().sessions.get(session.id)
    with contextlib.suppress(SojournError):
        session.delete_snapshot(taken) if what == "snapshot" else session.delete()
    assert server.wait(60) == -signal.SIGKILL
    server.start()
    eventually(lambda: not gone.exists())
    if what == "session":
        eventually(lambda: not kept.exists())
        assert session.id not in {one.id for one in server.client().sessions.list()}
        repository = Repository.open(str(store))
        [path] = store.glob(f"ten_*/sessions/{session.id}")
        told = repository.read_session(path.parts[-3], session.id)
        repository.close()
        assert told.session.state == "deleted" and told.session.name is None
        return
    session = sent(server, session)
    assert kept.exists()
    assert "goes" not in {one.label for one in session.history()}
    prove(store, session)
    session.delete()


# -- the process that sends -----------------------------------------------------------------------


def in_the_middle(
    server: ServerProcess, store: Path, act: Callable[[int], None]
) -> tuple[Session, int]:
    """A session that is being sent: when the first of its packs is there, `act` on the process
    that sends. Answers the session and that process."""
    session = prepared(server.client())
    before = packs(store)
    session.suspend(memory=False)
    deadline = time.monotonic() + 60
    while not (packs(store).keys() - before.keys()):
        assert time.monotonic() < deadline, "nothing is sent"
        time.sleep(0.001)
    [worker] = workers(server.store)
    act(worker)
    return session, worker


def send_signal(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def test_a_killed_worker_is_followed_by_one_that_goes_on(
    server: ServerProcess, store: Path
) -> None:
    session, worker = in_the_middle(server, store, send_signal(signal.SIGKILL))
    session = sent(server, session)
    assert worker not in workers(server.store)
    prove(store, session)
    assert server.client().status().objects.error is None
    session.delete()


def test_a_worker_that_stands_still_holds_up_nobody_and_nothing_counts(
    server: ServerProcess, store: Path
) -> None:
    session, worker = in_the_middle(server, store, send_signal(signal.SIGSTOP))
    try:
        with pytest.raises(StoreUnreachable):
            session.durability(wait=1)
        assert not session.durability().head_durable
        assert not list(store.glob(f"ten_*/snapshots/{session.head}"))
        status = server.client().status().objects
        assert status.waiting >= 1 and status.lag > 0
        # Sessions come and go meanwhile.
        other = server.client().sessions.create()
        other.suspend()
        assert other.exec("echo on").text == "on\n"
        other.delete()
    finally:
        os.kill(worker, signal.SIGCONT)
    session = sent(server, session)
    prove(store, session)
    session.delete()


def test_a_server_that_is_told_to_stop_does_not_wait_for_what_is_sent(
    server: ServerProcess, store: Path
) -> None:
    session, worker = in_the_middle(server, store, send_signal(signal.SIGSTOP))
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(timeout=30) == 0
    eventually(lambda: worker not in workers(server.store))
    assert not list(store.glob(f"ten_*/snapshots/{session.head}"))
    there = packs(store)
    server.start()
    session = sent(server, session)
    assert there.keys() <= packs(store).keys()
    prove(store, session)
    session.delete()


def test_a_bucket_that_does_not_answer_holds_up_neither_start_nor_stop(
    tmp_path: Path, s3_server: S3Server
) -> None:
    """With the usual patience, which is minutes; one that says nothing, and one that refuses."""
    with ThreadPoolExecutor(2) as both:
        for done in [
            both.submit(unanswered, s3_server, tmp_path / name, silent=name == "silent")
            for name in ("silent", "refusing")
        ]:
            done.result()


def unanswered(s3: S3Server, directory: Path, *, silent: bool) -> None:
    directory.mkdir()
    with FaultProxy.before(s3.url) as proxy:
        options = s3_options(proxy.url, timeout=60, patience=600)
        server = ServerProcess(directory / "data", store=f"s3://{s3.make_bucket()}/place")
        proxy.partition(silent=silent)
        client = server.start(**options)
        try:
            session = client.sessions.create()
            assert session.exec("echo on").text == "on\n"
            assert client.status().objects.error
            session.delete()
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()


def test_after_all_of_it_the_store_alone_is_enough(
    server: ServerProcess, store: Path, tmp_path: Path
) -> None:
    """A server that is killed together with its worker in the middle of sending, and then lost."""
    session = prepared(server.client(), 1000)
    session.suspend(memory=False, wait="durable")
    kept = sent(server, session)
    behind, worker = in_the_middle(server, store, send_signal(signal.SIGSTOP))
    base = next(one.id for one in behind.history() if one.kind == "base")
    other = moved(server, tmp_path / "data")
    try:
        # The kernel ends the process of a server that was killed, also one that stands still.
        eventually(lambda: worker not in workers(server.store))
        client = other.client()
        assert {one.id for one in client.sessions.list()} == {kept.id, behind.id}
        # What had not reached the store is gone, and the session stands where it was before.
        assert client.sessions.get(behind.id).head == base
        assert client.sessions.get(kept.id).exec("sha256sum -c /srv/sum").exit_code == 0
        eventually(lambda: settled(client))
        repository = Repository.open(str(store))
        assert list(check(repository.backend, repository.domain)) == []
        repository.close()
    finally:
        other.remove()
