"""Killed while it fetches and gives up, the cache opens again with whole objects and nothing else.

A process works on a store in front of a repository and kills itself (SIGKILL) right before one of
its calls to the file system, chosen at random; then the store is opened anew and judged.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from contract.store_rig import hostile_tree, look, snapshot_of
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot
from sojourn.repository.domains import Domain
from sojourn.repository.images_out import publish_image, push_image
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.uploads import Upload
from sojourn.store.envelopes import read_checked
from sojourn.store.fingerprints import layer_digest
from sojourn.store.local import LocalStore
from sojourn.store.trees import remove_tree
from support.cache_worker import domain_at
from support.sources import DomainSource
from support.uploads import manifest_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners need root")

ROUNDS = 14
CALLS = {"open", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename"}
CALLS |= {"os.rmdir", "os.utime", "os.setxattr", "os.truncate"}


class Far:
    """What the repository holds: layers and images, each pushed once for all rounds."""

    def __init__(self, directory: Path) -> None:
        self.url = str(directory / "repository")
        domain = self.domain()
        self.layers: list[LayerRef] = []
        self.images: list[MemoryRef] = []
        choose = random.Random(3)
        maker = LocalStore(directory / "maker", grace=0)
        with Upload(domain) as up:
            for number in range(3):
                tree = directory / f"tree-{number}"
                if number == 0:
                    hostile_tree(tree)
                    (tree / "sparse").unlink()  # hashing it again and again would take long
                else:
                    tree.mkdir()
                    for name in range(12):
                        (tree / f"{name}").write_bytes(choose.randbytes(3000))
                manifest = manifest_at(tree)
                push_layer(domain, up, manifest, tree)
                up.flush()
                publish_layer(domain, manifest)
                self.layers.append(manifest.ref)
                remove_tree(tree)
            shared = choose.randbytes(40 * 4096)
            for _ in range(2):
                staged = maker.stage_image()
                (staged / "pages.img").write_bytes(shared + choose.randbytes(4096))
                ref = maker.publish_image(staged, "d", "r", [])
                image = push_image(domain, up, ref, maker.image_path(ref.id))
                up.flush()
                publish_image(domain, image)
                self.images.append(ref)

    def domain(self) -> Domain:
        """As a process that has just started sees it."""
        return domain_at(self.url)


def run_and_kill(root: Path, far: Far, seed: int, calls_of: set[str], last: int) -> list[Snapshot]:
    """The snapshots that were acknowledged before the worker died."""
    refs = msgspec.json.encode((far.layers, far.images)).decode()
    command = [sys.executable, "-m", "support.cache_worker", str(root), far.url, str(seed)]
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [*command, ",".join(calls_of), str(last), refs],
        capture_output=True,
        cwd=tests,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    return [msgspec.json.decode(line, type=Snapshot) for line in done.stdout.splitlines()]


def judge(root: Path, far: Far, promised: list[Snapshot]) -> None:
    """Open the store as the next process would."""
    alone = LocalStore(root / "store", grace=0)
    staging = alone.root / "staging"
    assert [path for path in staging.iterdir() if any(path.iterdir())] == [], "leftovers"
    # All that stands there is whole, without any help.
    for place in (alone.root / "layers").iterdir():
        id = layer_digest(read_checked(b"LAYR", place / "manifest", place.name)).hex()
        assert list(alone.verify_layer(LayerRef(id, 0, 0))) == []
    for place in (alone.root / "images").iterdir():
        alone.verify_image(alone._images.read_at(place))
    store = LocalStore(root / "store", grace=0, source=DomainSource(far.domain()))
    for snapshot in promised:
        assert store.read_snapshot(snapshot.id) == snapshot
    for snapshot in promised[-2:]:
        assert list(store.verify(snapshot)) == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Memory where there is some: a kill loses nothing that a disk would keep."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    with tempfile.TemporaryDirectory(prefix="cache-kill-", dir=base) as name:
        yield Path(name)
        for left in Path(name).iterdir():
            remove_tree(left)  # trees that are too deep for others


def test_killed_at_random_points(place: Path) -> None:
    far = Far(place)
    choose = random.Random(21)
    acknowledged = 0
    for round in range(ROUNDS):
        root = place / f"round{round}"
        root.mkdir()
        # Moves into and out of place are few and matter most.
        if round % 2:
            promised = run_and_kill(root, far, round, {"os.rename"}, choose.randrange(2, 60))
        else:
            promised = run_and_kill(root, far, round, CALLS, choose.randrange(300, 2500))
        judge(root, far, promised)
        acknowledged += len(promised)
        remove_tree(root)
    assert acknowledged > ROUNDS, "the rounds were long enough to mean something"


def test_a_store_lives_on_its_repository_alone(place: Path) -> None:
    """The whole way: pushed by one node, restored by another that has nothing, twice."""
    far = Far(place)
    source = DomainSource(far.domain())
    store = LocalStore(place / "node", grace=0, source=source)
    snapshot = snapshot_of(far.layers, far.images[1])
    store.publish_snapshot(snapshot)
    store.image_path(far.images[0].id)
    assert list(store.verify(snapshot)) == []
    seen = look(store.layer_path(far.layers[0].id))
    assert store.usage() > 0
    assert store.evict(0, keep=set(), durable=lambda _: True) > 0
    assert store.usage() == 0
    assert look(store.layer_path(far.layers[0].id)) == seen
    assert list(store.verify(snapshot)) == []
    assert len(source.fetched) == 9
    shutil.rmtree(place / "repository")
    again = LocalStore(place / "node", grace=0)
    assert list(again.verify(snapshot)) == []
