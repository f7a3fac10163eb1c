"""Stored bytes that changed are found before anything runs on them, and named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import IntegrityError, ResumeFailed, SojournError
from sojourn.model import Snapshot
from sojourn.store.envelopes import unwrap, wrap
from sojourn.store.fingerprints import fingerprint
from sojourn.store.snapshots import KIND
from support.servers import ServerProcess


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose store is damaged by these tests."""
    server = ServerProcess(tmp_path_factory.mktemp("damage") / "data")
    server.start().close()
    yield server
    server.remove()


@pytest.fixture
def client(damaged: ServerProcess) -> Iterator[Sojourn]:
    with damaged.client() as client:
        yield client


def newest(directory: Path) -> Path:
    return max(directory.iterdir(), key=lambda path: (path / "manifest").stat().st_mtime_ns)


def flip(path: Path) -> None:
    """Change one bit in the middle, and nothing else that shows."""
    before = path.stat()
    if before.st_nlink > 1:  # this one alone, not what shares its content
        own = path.with_name("own")
        own.write_bytes(path.read_bytes())
        own.replace(path)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)
        file.seek(before.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(before.st_mode & 0o7777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def file_in(layer: Path) -> Path:
    return layer / "fs" / "srv" / "data"


def largest(directory: Path) -> Path:
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


def flip_rest(image: Path) -> None:
    """Damage everything but the largest file."""
    for path in sorted(image.rglob("*")):
        if path.is_file() and path != largest(image):
            flip(path)


Damage = Callable[[Path, Path, Path], object]

# Each gets the newest layer, image and manifest.
DAMAGES: dict[str, Damage] = {
    "flipped byte in the memory image": lambda layer, image, manifest: flip(largest(image)),
    "truncated memory image": lambda layer, image, manifest: shorten(largest(image)),
    "removed memory image": lambda layer, image, manifest: shutil.rmtree(image),
    "removed part of the memory image": lambda layer, image, manifest: largest(image).unlink(),
    "flipped bytes in the rest of the image": lambda layer, image, manifest: flip_rest(image),
    "flipped byte in a file": lambda layer, image, manifest: flip(file_in(layer)),
    "truncated file": lambda layer, image, manifest: shorten(file_in(layer)),
    "removed file": lambda layer, image, manifest: file_in(layer).unlink(),
    "added file": lambda layer, image, manifest: (layer / "fs/srv/added").touch(),
    "changed mode": lambda layer, image, manifest: file_in(layer).chmod(0o777),
    "changed owner": lambda layer, image, manifest: os.chown(file_in(layer), 12, 34),
    "changed time": lambda layer, image, manifest: os.utime(file_in(layer), ns=(1, 1)),
    "changed link": lambda layer, image, manifest: relink(layer / "fs/srv/link"),
    "removed layer": lambda layer, image, manifest: shutil.rmtree(layer),
    "flipped byte in the layer's manifest": lambda layer, image, manifest: flip(layer / "manifest"),
    "flipped byte in the layer's index": lambda layer, image, manifest: flip(layer / "index"),
    "flipped byte in the snapshot's manifest": lambda layer, image, manifest: flip(manifest),
    "truncated snapshot manifest": lambda layer, image, manifest: shorten(manifest),
    "removed snapshot manifest": lambda layer, image, manifest: manifest.unlink(),
    "empty snapshot manifest": lambda layer, image, manifest: os.truncate(manifest, 0),
}


def prepared(client: Sojourn) -> tuple[Session, str]:
    """A suspended session with a good snapshot before the one that will be damaged."""
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    session.exec("head -c 100000 /dev/urandom > /srv/good; sync")
    good = session.snapshot("good").id
    session.exec("head -c 200000 /dev/urandom > /srv/data; ln -s data /srv/link")
    session.suspend()
    return session, good


# One of each kind is tried every time, all of them with SOJOURN_SOAK.
OFTEN = [
    "flipped byte in the memory image",
    "removed part of the memory image",
    "flipped byte in a file",
    "added file",
    "changed mode",
    "flipped byte in the layer's manifest",
    "flipped byte in the snapshot's manifest",
    "removed snapshot manifest",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DAMAGES) if os.environ.get("SOJOURN_SOAK") else OFTEN)
def test_damage_is_refused_by_name_and_the_session_goes_on_from_before(
    damaged: ServerProcess, client: Sojourn, name: str
) -> None:
    session, good = prepared(client)
    store = damaged.data / "store"
    bad = session.refresh().head
    assert bad
    DAMAGES[name](newest(store / "layers"), newest(store / "images"), store / "snapshots" / bad)
    report = session.verify()
    harmless = "layer's index" in name and report.ok  # an index can be made again
    if not harmless:
        assert not report.ok
        assert {fault.snapshot for fault in report.faults} == {bad}
        assert all(fault.object and fault.cause for fault in report.faults)
        with pytest.raises(IntegrityError) as raised:
            session.resume()
        assert raised.value.details["object"]
        assert raised.value.details["last_good"] == good
        assert session.refresh().state == "failed"
        assert session.info.cause
        # It says so again, and does not run on what is bad.
        with pytest.raises(SojournError):
            session.exec("true")
        with pytest.raises(SojournError):
            session.fork(1, snapshot=bad)
        assert session.verify(good).ok
        session.rollback(good)
    assert session.exec("wc -c < /srv/good").text == "100000\n"
    assert session.refresh().state == "running"
    session.delete()


def test_a_failed_session_can_be_deleted_and_listed(
    damaged: ServerProcess, client: Sojourn
) -> None:
    session, _ = prepared(client)
    shutil.rmtree(newest(damaged.data / "store" / "images"))
    with pytest.raises(IntegrityError):
        session.resume()
    assert session.id in {one.id for one in client.sessions.list(state="failed")}
    session.delete()
    assert session.id not in {one.id for one in client.sessions.list()}


def test_damage_while_a_server_is_down_is_found_too(
    damaged: ServerProcess, client: Sojourn
) -> None:
    session, good = prepared(client)
    damaged.stop()
    flip(largest(newest(damaged.data / "store" / "images")))
    with damaged.start() as client:
        session = client.sessions.get(session.id)
        with pytest.raises(IntegrityError) as raised:
            session.exec("true")
        assert raised.value.details["last_good"] == good
        assert not session.verify().ok
        session.rollback("good")
        assert session.exec("wc -c < /srv/good").text == "100000\n"
        session.delete()


def test_c49_a_snapshot_with_children_can_be_deleted(client: Sojourn) -> None:
    session = client.sessions.create(policy={"auto_snapshot": "off"})
    session.files.write("/srv/a", b"a" * 1_000_000)
    first = session.snapshot("first")
    session.files.write("/srv/b", b"b")
    second = session.snapshot("second")
    [fork] = session.fork(1, snapshot=first)
    session.delete_snapshot(first)
    names = {one.label for one in session.history()}
    assert "first" not in names and "second" in names
    with pytest.raises(SojournError) as raised:
        session.rollback(first)
    assert raised.value.code == "snapshot_not_found"
    # What descends from it is whole.
    assert fork.files.read("/srv/a") == b"a" * 1_000_000
    fork.suspend()
    assert fork.files.read("/srv/a") == b"a" * 1_000_000
    session.rollback(second)
    assert session.files.read("/srv/b") == b"b"
    assert session.verify().ok and fork.verify().ok
    with pytest.raises(SojournError):
        session.delete_snapshot(session.refresh().head or "")
    session.delete()
    assert fork.exec("wc -c < /srv/a").text == "1000000\n"
    fork.delete()


@pytest.mark.parametrize("what", ["processor", "runtime"])
def test_c50_an_image_of_another_machine_is_refused_before_the_start(
    damaged: ServerProcess, client: Sojourn, what: str
) -> None:
    """As if it came from a node whose processor can do more, or that has another runtime."""
    session, good = prepared(client)
    path = damaged.data / "store" / "snapshots" / str(session.refresh().head)
    found = msgspec.msgpack.decode(unwrap(KIND, path.read_bytes(), "test"), type=Snapshot)
    assert found.memory is not None
    assert found.memory.cpu, "the features the image may use are recorded"
    if what == "processor":
        memory = msgspec.structs.replace(found.memory, cpu=[*found.memory.cpu, "imaginary"])
    else:
        memory = msgspec.structs.replace(found.memory, runtime="another runtime")
    mark = fingerprint(found.layers, memory, found.config)
    other = msgspec.structs.replace(found, memory=memory, fingerprint=mark)
    path.write_bytes(wrap(KIND, msgspec.msgpack.encode(other)))
    with pytest.raises(ResumeFailed) as raised:
        session.resume()
    assert ("imaginary" if what == "processor" else "another runtime") in raised.value.message
    # It stays as it was, to be resumed where it fits; older states can be had here.
    assert session.refresh().state == "suspended"
    session.rollback(good)
    assert session.exec("wc -c < /srv/good").text == "100000\n"
    session.delete()
