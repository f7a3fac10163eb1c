"""A full disk: an error first, nothing left behind, everything older intact."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from sojourn.errors import StorageFull
from sojourn.model import new_id
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
]

CONFIG = SnapshotConfig(template="base", env={}, user="root", cwd="/", hostname="box")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A small file system of its own: (its mount point)."""
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=2000", "none", str(place)]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(24 * 1024 * 1024)
        subprocess.run(["mkfs.ext4", "-q", "-N", "2000", image], check=True)
        command = ["mount", "-o", "loop", str(image), str(place)]
    subprocess.run(command, check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def filled(disk: Path, leave: int = 0):
    """All room taken but about `leave` bytes."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"b" * size) == size:
                    pass
        if leave:
            file.truncate(max(0, file.tell() - leave))
        os.fsync(file.fileno())
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def no_inodes(disk: Path):
    """No further file can be made, though there is room for bytes."""
    ballast = disk / "many"
    ballast.mkdir()
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (ballast / str(number)).touch()
    try:
        yield
    finally:
        for entry in ballast.iterdir():
            entry.unlink()
        ballast.rmdir()


def snapshot_of(layer: LayerRef, memory: MemoryRef | None = None) -> Snapshot:
    return Snapshot(
        id=new_id("snp"),
        session="ses_0",
        parent=None,
        kind=SnapshotKind.EXPLICIT,
        label=None,
        created_at=time.time(),
        layers=[layer],
        memory=memory,
        config=CONFIG,
        fingerprint=fingerprint([layer], memory, CONFIG),
    )


def make_upper(disk: Path, files: int = 20, size: int = 50_000) -> Path:
    upper = disk / "upper"
    upper.mkdir()
    for number in range(files):
        (upper / f"f{number}").write_bytes(os.urandom(size))
    return upper


def tree(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def contents_of(store: LocalStore) -> list[str]:
    """Everything in the store but the cache of change times and the emptied staging place."""
    return [name for name in tree(store.root) if name != "links"]


@pytest.mark.parametrize("leave", [0, 100_000, 600_000])
def test_capturing_into_a_full_disk(disk, leave):
    store = LocalStore(disk / "store", grace=0)
    upper = make_upper(disk)
    first = store.capture_layer(upper, since=None, suspects=set())
    layer = first.publish()
    snapshot = snapshot_of(layer)
    store.publish_snapshot(snapshot)
    for number in range(15):
        (upper / f"f{number}").write_bytes(os.urandom(50_000))
    before = contents_of(store)
    with filled(disk, leave):
        with pytest.raises(StorageFull):
            store.capture_layer(upper, since=(first.scan, layer), suspects=set()).publish()
        assert contents_of(store) == before
        reopened = LocalStore(store.root, grace=0) if leave else store
        assert list(reopened.verify(snapshot)) == []
    again = store.capture_layer(upper, since=(first.scan, layer), suspects=set()).publish()
    assert list(store.verify_layer(again)) == []
    assert list(store.verify(snapshot)) == []


def test_running_out_of_inodes(disk):
    store = LocalStore(disk / "store", grace=0)
    upper = make_upper(disk, files=100, size=10)
    before = contents_of(store)
    with no_inodes(disk):
        with pytest.raises(StorageFull):
            store.capture_layer(upper, since=None, suspects=set()).publish()
        with pytest.raises(StorageFull):
            store.stage_image()
        with pytest.raises(StorageFull):
            store.prepare_upper(disk / "another", [])
        assert contents_of(store) == before


def test_images_manifests_and_sealing_on_a_full_disk(disk):
    store = LocalStore(disk / "store", grace=0)
    upper = make_upper(disk, files=3, size=1000)
    layer = store.capture_layer(upper, since=None, suspects=set()).publish()
    snapshot = snapshot_of(layer)
    store.publish_snapshot(snapshot)
    staged = store.stage_image()
    (staged / "pages.img").write_bytes(os.urandom(100_000))
    (upper / "f0").write_bytes(b"changed")
    (disk / "tree").mkdir()
    for number in range(60):
        (disk / "tree" / ("n" * 200 + str(number))).symlink_to("t" * 200)
    before = [name for name in contents_of(store) if not name.startswith("staging/")]
    with filled(disk):
        with pytest.raises(StorageFull):
            store.publish_image(staged, "driver", "runtime", [])
    assert not staged.exists(), "the failed image took its room with it"
    with filled(disk):
        with pytest.raises(StorageFull):
            store.seal_layer(upper, since=None, suspects=set())
        with pytest.raises(StorageFull):
            store.publish_snapshot(snapshot_of(layer))
        with pytest.raises(StorageFull):
            store.adopt_template(disk / "tree", "big")
        assert [n for n in contents_of(store) if not n.startswith("staging/")] == before
        assert store.read_snapshot(snapshot.id) == snapshot
        store.check_layer(layer)
    assert (upper / "f0").read_bytes() == b"changed"
    taken = store.seal_layer(upper, since=None, suspects=set()).take()
    assert list(store.verify_layer(taken)) == []


def test_collecting_makes_room_on_a_full_disk(disk):
    store = LocalStore(disk / "store", grace=0)
    upper = make_upper(disk)
    pending = store.capture_layer(upper, since=None, suspects=set())
    first = pending.publish()
    for number in range(15):
        (upper / f"f{number}").write_bytes(os.urandom(50_000))
    second = store.capture_layer(upper, since=(pending.scan, first), suspects=set()).publish()
    with filled(disk):
        store.check_layer(second)
        (store.layer_path(second.id) / "f19").chmod(0o644)  # a touch that cannot be noted
        store.check_layer(second)
        assert store.collect({second.id}) >= 700_000
        store.check_layer(second)
    assert list(store.verify_layer(second)) == []
