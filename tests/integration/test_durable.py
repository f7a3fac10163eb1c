"""The loss of the node: what is durable comes back from the object store alone, processes and all;
what is not yet durable is told; a store that cannot be reached costs lag and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import support.durable
from sojourn.client import Session, Sojourn
from sojourn.errors import StoreUnreachable, Unsupported
from support.counting import COUNTER
from support.durable import sojourn
from support.object_stores import FaultProxy, S3Server, s3_options
from support.servers import ServerProcess, eventually

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]


@pytest.fixture
def durable(tmp_path: Path, place: Path) -> Iterator[ServerProcess]:
    """A server with that object store, and a data directory of its own."""
    server = ServerProcess(tmp_path / "data", store=place.as_uri())
    server.start()
    yield server
    server.remove()


def lose(server: ServerProcess) -> Sojourn:
    """The whole data directory goes, database included; a new one is made from the store."""
    support.durable.lose(server)
    done = sojourn("recover", "--store", server.store, "--data", str(server.data))
    assert done.returncode == 0, done.stderr
    return server.start()


def linear(session: Session) -> int:
    lines = session.files.read("/root/count").decode().split("\n")[:-1]
    assert lines == [str(n + 1) for n in range(len(lines))]
    return len(lines)


def test_every_durable_session_comes_back_from_the_store_alone(durable: ServerProcess) -> None:
    client = durable.client()
    one = client.sessions.create(name="one", labels={"kind": "kept"}, env={"A": "1"})
    one.spawn(COUNTER)
    one.run_code("value = 41")
    one.files.write("/root/note", b"before")
    marked = one.snapshot("mark")
    one.files.write("/root/note", b"after")
    child = one.fork(1, names=["child"])[0]
    child.files.write("/root/own", b"child")
    one.suspend(wait="durable")
    child.suspend(wait="durable")
    eventually(lambda: one.durability().waiting == 0 and child.durability().waiting == 0)
    tree = [(info.id, info.parent, info.label) for info in one.history()]
    counted = one.info.head

    client = lose(durable)
    assert {session.info.name for session in client.sessions.list()} == {"one", "child"}
    one, child = client.sessions.get("one"), client.sessions.get("child")
    assert (one.state, one.head, one.info.labels) == ("suspended", counted, {"kind": "kept"})
    assert [(info.id, info.parent, info.label) for info in one.history()] == tree
    assert one.exec("echo $A").text == "1\n"
    before = linear(one)
    eventually(lambda: linear(one) > before)
    assert one.run_code("value + 1").text == "42"
    assert one.files.read("/root/note") == b"after"
    assert child.files.read("/root/own") == b"child"
    assert child.run_code("value").text == "41"
    one.rollback(marked.id)
    assert one.files.read("/root/note") == b"before"
    assert one.verify().ok and child.verify().ok
    assert any(event.kind == "recovered" for event in one.events())


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_what_is_damaged_on_the_node_is_replaced_from_the_store(durable: ServerProcess) -> None:
    session = durable.client().sessions.create(policy={"auto_snapshot": "off"})
    session.run_code("value = 41")
    session.exec("head -c 100000 /dev/urandom > /srv/data")
    wanted = session.files.read("/srv/data")
    session.suspend(wait="durable")
    files = [path for path in (durable.data / "store").rglob("*") if path.is_file()]
    flip(max((path for path in files if "images" in path.parts), key=lambda p: p.stat().st_size))
    flip(next(path for path in files if path.parts[-3:] == ("fs", "srv", "data")))
    assert session.files.read("/srv/data") == wanted
    assert session.run_code("value + 1").text == "42"
    told = [event for event in session.events() if event.kind == "store.healed"]
    assert len(told) == 1 and len(told[0].details["replaced"]) == 2
    assert session.verify().ok


def test_a_tree_that_was_thinned_comes_back_whole(durable: ServerProcess) -> None:
    """Manifests keep naming parents that were given up since; the record tells the tree."""
    keep = {"keep_all_for": 0, "keep_last": 1, "hourly": 0, "daily": 0, "weekly": 0}
    session = durable.client().sessions.create(policy={"retention": keep})
    first = session.snapshot("first")
    for number in range(4):
        session.files.write("/root/number", str(number).encode())
    last = session.snapshot("last")
    eventually(lambda: len(session.history()) <= 4)
    session.suspend(wait="durable")
    eventually(lambda: session.durability().waiting == 0)
    tree = {info.id: info.parent for info in session.history()}
    session = lose(durable).sessions.get(session.id)
    assert {info.id: info.parent for info in session.history()} == tree
    assert {first.id, last.id} <= tree.keys()
    session.rollback("first")
    assert not session.files.exists("/root/number")


def test_a_session_whose_record_is_lost_comes_back_without_its_name(
    durable: ServerProcess, place: Path
) -> None:
    client = durable.client()
    session = client.sessions.create(name="named", env={"A": "1"})
    session.run_code("x = 1")
    session.suspend(wait="durable")
    eventually(lambda: session.durability().waiting == 0)
    durable.stop()
    next(place.glob(f"*/sessions/{session.id}")).unlink()
    shutil.rmtree(durable.data)
    done = sojourn("recover", "--store", durable.store, "--data", str(durable.data))
    assert done.returncode == 112 and session.id in done.stderr + done.stdout
    session = durable.start().sessions.get(session.id)
    assert (session.info.name, session.state) == (None, "suspended")
    assert session.run_code("x").text == "1" and session.exec("echo $A").text == "1\n"


def test_an_older_server_cannot_write_over_a_recovered_session(
    durable: ServerProcess, tmp_path: Path
) -> None:
    """Two databases, one store: the epoch in the store decides."""
    session = durable.client().sessions.create()
    session.suspend(wait="durable")
    eventually(lambda: session.durability().waiting == 0)
    other = tmp_path / "other"
    done = sojourn("recover", "--store", durable.store, "--data", str(other))
    assert done.returncode == 0, done.stderr

    session.resume()
    session.files.write("/root/late", b"written by the old server")
    session.suspend()
    status = eventually(lambda: durable.client().status().objects.error)
    assert "epoch" in status


def test_wait_durable_tells_when_the_store_has_it(durable: ServerProcess) -> None:
    session = durable.client().sessions.create(policy={"auto_snapshot": "off"})
    session.run_code("x = 1")
    taken = session.snapshot("kept", wait="durable")
    assert taken.durable_at is not None
    assert session.durability(snapshot="kept").head_durable
    assert next(i for i in session.history() if i.id == taken.id).durable_at is not None
    session.run_code("x = 2")
    session.pause(wait="durable")
    assert session.state == "paused"
    head = session.refresh().head
    assert head != taken.id and session.durability().head_durable
    client = lose(durable)
    assert client.sessions.get(session.id).run_code("x").text == "2"


def test_a_deleted_session_leaves_the_store(durable: ServerProcess, place: Path) -> None:
    session = durable.client().sessions.create()
    session.suspend(wait="durable")
    kept = list(place.glob(f"*/snapshots/{session.head}"))
    assert len(kept) == 1
    session.delete()
    eventually(lambda: not any(path.exists() for path in kept))
    # Its record says so, that no older server may write it again.
    client = lose(durable)
    assert client.sessions.list() == []


def test_the_server_collects_the_object_store_by_itself(
    durable: ServerProcess,
) -> None:
    durable.stop()
    client = durable.start(SOJOURN_STORE_COLLECT="1")
    session = client.sessions.create()
    session.exec("head -c 300000 /dev/urandom > /root/own")
    session.suspend(wait="durable")
    # What is younger than an hour is left alone, so there is nothing to see in the store.
    eventually(lambda: "the object store was collected" in durable.log(), timeout=60)
    assert session.durability().head_durable and session.exec("test -s /root/own").ok
    assert client.status().objects.error is None


def test_an_object_store_that_vanished_is_not_made_anew(
    durable: ServerProcess, place: Path
) -> None:
    """An unmounted file system looks like an empty directory: nothing may take it for a store."""
    session = durable.client().sessions.create()
    session.suspend(wait="durable")
    durable.stop()
    place.rename(place.with_name("unmounted"))
    place.mkdir()
    with pytest.raises(RuntimeError, match="was this server's object store"):
        durable.start()
    assert not (place / "config").exists()
    shutil.rmtree(place)
    place.with_name("unmounted").rename(place)
    durable.start()
    assert durable.client().sessions.get(session.id).durability().head_durable


def test_another_object_store_gets_everything_anew(durable: ServerProcess, tmp_path: Path) -> None:
    session = durable.client().sessions.create()
    session.run_code("x = 1")
    session.suspend(wait="durable")
    durable.stop()
    durable.store = str(tmp_path / "another")
    client = durable.start()
    client.sessions.get(session.id).durability(wait=60)
    eventually(lambda: client.status().objects.waiting == 0)
    client = lose(durable)
    assert client.sessions.get(session.id).run_code("x").text == "1"


def test_without_an_object_store_durable_is_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    try:
        session = server.client().sessions.create()
        with pytest.raises(Unsupported):
            session.snapshot(wait="durable")
        assert session.exec("echo on").text == "on\n"
        assert server.client().status().objects is None
    finally:
        server.remove()


def test_a_small_cache_gives_up_what_the_store_has(tmp_path: Path, place: Path) -> None:
    server = ServerProcess(tmp_path / "data", store=place.as_uri())
    client = server.start(SOJOURN_CACHE_BYTES="1")
    try:
        session = client.sessions.create()
        session.run_code("x = 'kept in memory'")
        session.exec("head -c 5000000 /dev/urandom > /root/big; sha256sum /root/big > /root/sum")
        session.suspend(wait="durable")
        images = server.data / "store" / "images"
        # What was handed out within the last minute stays; age it.
        for mark in (server.data / "store").rglob("used"):
            os.utime(mark, (1, 1))
        server.restart(SOJOURN_CACHE_BYTES="1")
        session = server.client().sessions.get(session.id)
        other = server.client().sessions.create()
        other.suspend(wait="durable")
        eventually(lambda: len(list(images.iterdir())) <= 1, timeout=40)
        assert session.exec("sha256sum -c /root/sum").ok
        assert session.run_code("x").text == "'kept in memory'"
        assert session.verify().ok
    finally:
        server.remove()


def test_sessions_go_on_while_a_bucket_cannot_be_reached(
    tmp_path: Path, s3_server: S3Server
) -> None:
    bucket = s3_server.make_bucket()
    with FaultProxy.before(s3_server.url) as proxy:
        options = s3_options(proxy.url, timeout=3, patience=2)
        server = ServerProcess(tmp_path / "data", store=f"s3://{bucket}/some/place")
        proxy.partition()
        client = server.start(**options)  # starts all the same
        try:
            session = client.sessions.create()
            session.run_code("x = 1")
            session.suspend()
            assert session.resume().run_code("x").text == "1"
            with pytest.raises(StoreUnreachable):
                session.durability(wait=3)
            lag = eventually(lambda: client.status().objects.lag)
            assert lag > 0 and client.status().objects.error
            proxy.heal()
            session.suspend(wait="durable")
            # Passing failures are not seen at all.
            proxy.answer(503, times=3, method="PUT")
            proxy.drop(after=True, times=1, method="PUT")
            session.resume().run_code("x = 2")
            session.suspend(wait="durable")
            eventually(lambda: client.status().objects.waiting == 0)
            server.kill()
            shutil.rmtree(server.data)
            done = sojourn(
                "recover", "--store", server.store, "--data", str(server.data), **options
            )
            assert done.returncode == 0, done.stderr
            client = server.start(**options)
            assert client.sessions.get(session.id).run_code("x").text == "2"
        finally:
            proxy.clear()
            server.remove(**options)
