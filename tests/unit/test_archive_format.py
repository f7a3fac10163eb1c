"""Archives of snapshots: what is written comes out, and nothing else is taken."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from sojourn.errors import (
    ArchiveInvalid,
    Conflict,
    IntegrityError,
    InvalidRequest,
    ObjectMissing,
    StorageFull,
    StoreKeyInvalid,
    StoreRefused,
)
from sojourn.model.snapshots import Snapshot
from sojourn.repository.archive_worker import Job
from sojourn.repository.archives import write_archive
from sojourn.repository.backends.archive_file import ArchiveReader, ArchiveWriter
from support.archives import Trees, changed, data_of, objects, opened, record_of
from support.repositories import Node, node

SECRET = b"a secret of sixteen bytes"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Node, list[Snapshot]]:
    """Three snapshots, the last two from the first, with large files, holes and memory."""
    here = node(tmp_path / "node")
    large = os.urandom(3 << 20) + bytes(9 << 20) + os.urandom(1 << 20)
    pages = os.urandom(1 << 20) + bytes(1 << 20)
    first = here.snapshot({"a": b"one", "empty": b""}, memory={"pages.img": pages, "c.img": b"c"})
    layers = ({"a": b"one", "empty": b""}, {"large": large, "a": b"two"})
    more = pages[: 1 << 19] + os.urandom(1 << 16) + pages[1 << 19 :]
    second = here.snapshot(*layers, memory={"pages.img": more, "c.img": b"d"})
    third = here.snapshot({"a": b"one", "empty": b""}, {"b": b"three"})
    second = msgspec.structs.replace(second, parent=first.id, label="second")
    third = msgspec.structs.replace(third, parent=first.id)
    return here, [first, second, third]


def restore(data: bytes, into: Path, secret: bytes | None = None) -> dict[str, bytes]:
    """Everything in an archive, by layer or image and path."""
    archive = opened(data, secret)
    found = {}
    into.mkdir()
    for layer in archive.layers:
        archive.fetch_layer(layer, into / layer)
    for image in archive.images:
        (into / image).mkdir()
        archive.fetch_image(image, into / image, [])
    for path in into.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(into))] = path.read_bytes()
    return found


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_of_it_comes_out(
    made: tuple[Node, list[Snapshot]], secret: bytes | None, tmp_path: Path
) -> None:
    here, snapshots = made
    data = data_of(here, snapshots, secret)
    archive = opened(data, secret)
    assert sorted(one.id for one in archive.snapshots) == sorted(one.id for one in snapshots)
    assert archive.snapshots[0] == snapshots[0]
    assert {one.id: one for one in archive.snapshots} == {one.id: one for one in snapshots}
    assert archive.record.session.name == "box" and archive.record.session.tenant == "session"
    assert archive.record.snapshots[1].label == "second"
    found = restore(data, tmp_path / "out", secret)
    wanted = {
        f"{id}/{path.relative_to(tree)}": path.read_bytes()
        for id, (_, tree) in [*here.trees.items(), *here.images.items()]
        for path in tree.rglob("*")
        if path.is_file()
    }
    assert found == wanted
    # What the parent has is not there twice, and holes are not there at all.
    assert len(data) < (3 + 1 + 1) * (1 << 20) + (1 << 19)
    assert archive.needed >= 5 << 20
    if secret is not None:
        assert b"debian" not in data and b"template" not in data


def test_one_snapshot_alone(made: tuple[Node, list[Snapshot]], tmp_path: Path) -> None:
    here, snapshots = made
    alone = msgspec.structs.replace(snapshots[1], parent=None)
    archive = opened(data_of(here, [alone]))
    assert archive.snapshots == [alone]
    assert set(archive.layers) == {layer.id for layer in alone.layers}


def test_keys(made: tuple[Node, list[Snapshot]]) -> None:
    here, snapshots = made
    closed, plain = data_of(here, snapshots[:1], SECRET), data_of(here, snapshots[:1])
    assert opened(closed, SECRET + b"\n").snapshots == opened(plain).snapshots
    for data, secret in (
        (closed, None),
        (closed, b"another secret of some length"),
        (plain, SECRET),
    ):
        with pytest.raises(StoreKeyInvalid) as caught:
            opened(data, secret)
        assert "archive" in caught.value.message
    for data in (closed, plain):
        with pytest.raises(InvalidRequest):
            opened(data, b"short")
    others = dict(objects(data_of(here, snapshots[:1], SECRET)))

    def mixed(key: str, part: bytes) -> bytes:
        return others[key] if "/snapshots/" in key else part

    # With the key of another archive even a good object is no part of this one.
    with pytest.raises(ArchiveInvalid):
        opened(changed(closed, mixed), SECRET)
    job = Job(0, "/store", record_of(snapshots), snapshots, SECRET)
    assert SECRET.decode() not in repr(job)


def test_the_digest_tells_archives_apart(made: tuple[Node, list[Snapshot]]) -> None:
    here, snapshots = made
    one, other = data_of(here, snapshots[:1]), data_of(here, snapshots[:1])
    digest = blake3(one[:-32]).hexdigest()
    assert opened(one, expect=digest).digest == digest
    with pytest.raises(ArchiveInvalid):
        opened(other, expect=digest)


def test_an_archive_is_written_once() -> None:
    with tempfile.TemporaryFile() as file:
        writer = ArchiveWriter(file.fileno())
        writer.put("a/b", b"one")
        for wrong in (
            lambda: writer.put("a/b", b"one"),
            lambda: writer.put("a/b", b"two", create=True),
            lambda: writer.put("a/c", b"two", replaces="8"),
        ):
            with pytest.raises(Conflict):
                wrong()
        for worse in (lambda: writer.delete(["a/b"]), lambda: writer.put("a/d", b"")):
            with pytest.raises(StoreRefused):
                worse()
        with pytest.raises(InvalidRequest):
            writer.put("../x", b"x")
        writer.delete(["not/there"])
        assert writer.get("a/b") == (b"one", "8")
        assert writer.get_tail("a/b", 100) == (b"one", 3)
        assert writer.get_ranges("a/b", [(1, 1), (0, 0)]) == [b"n", b""]
        assert [info.key for info in writer.list("a/")] == ["a/b"]
        with pytest.raises(ObjectMissing):
            writer.get("a/c")
        digest, size = writer.finish()
        reader = ArchiveReader(file.fileno(), expect=digest)
        assert reader.size == size and reader.get("a/b")[0] == b"one"
        with pytest.raises(IntegrityError):
            reader.get("a/b", limit=2)
        with pytest.raises(IntegrityError):
            reader.get_ranges("a/b", [(2, 2)])
        for change in (lambda: reader.put("x", b"x"), lambda: reader.delete(["a/b"])):
            with pytest.raises(StoreRefused):
                change()


def test_many_threads_write_whole_objects() -> None:
    with tempfile.TemporaryFile() as file:
        writer = ArchiveWriter(file.fileno())
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda n: writer.put(f"k/{n}", b"%d" % n * 5000), range(200)):
                pass
        reader = ArchiveReader(file.fileno(), expect=writer.finish()[0])
        assert all(reader.get(f"k/{n}")[0] == b"%d" % n * 5000 for n in range(200))


def test_no_room_is_told() -> None:
    with Path("/dev/full").open("r+b", buffering=0) as full, pytest.raises(StorageFull):
        ArchiveWriter(full.fileno())


def test_what_the_node_lacks_or_has_otherwise_is_not_exported(
    made: tuple[Node, list[Snapshot]],
) -> None:
    here, snapshots = made
    (here.trees[snapshots[0].layers[1].id][1] / "a").write_bytes(b"eno")
    with tempfile.TemporaryFile() as file, pytest.raises(IntegrityError):
        write_archive(file.fileno(), record_of(snapshots), snapshots, Trees(here), None)
