"""One step of the store's own measure, as a process: what `bench.store_tools.Ours` starts.

A capture takes the way of a suspend: the tree is sealed where it lies (scanned, hashed, synced,
its manifest recorded), then the snapshot is pushed into the repository, and both are safe when the
process ends. A server holds the scan of the last capture in memory; here it is read from a file,
and that counts.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sojourn.model.ids import new_id
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.repository.opened import OpenedRepository

# What only some steps use, they load themselves: the start of the process is measured, too.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sojourn.repository.checks import Problem
    from sojourn.repository.repository import Repository
    from sojourn.store.local import LocalStore
    from sojourn.store.manifests import Manifest
    from sojourn.store.trees import LocalScan

TENANT = "bench"


class State:
    """What a server would hold in memory or in its database, in files below `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @cached_property
    def store(self) -> LocalStore:
        """The node's store; checks and restores do without."""
        from sojourn.store.local import LocalStore

        return LocalStore(self.place / "store")

    @property
    def template(self) -> LayerRef:
        """The layer every snapshot begins with."""
        return self.store.adopt_template(self.place / "template", "bench")

    @property
    def newest(self) -> Snapshot | None:
        """The snapshot taken last."""
        try:
            return msgspec.msgpack.decode((self.place / "snapshot").read_bytes(), type=Snapshot)
        except FileNotFoundError:
            return None

    def keep(self, snapshot: Snapshot) -> None:
        """Remember a snapshot."""
        (self.place / "snapshot").write_bytes(msgspec.msgpack.encode(snapshot))

    @property
    def scan(self) -> LocalScan | None:
        """The scan of the capture before."""
        import pickle  # not loaded by steps that do without

        try:
            with (self.place / "scan").open("rb") as file:
                found: LocalScan = pickle.load(file)
                return found
        except FileNotFoundError:
            return None

    def repository(self, *, create: bool = False) -> Repository:
        """The repository, opened."""
        from sojourn.repository.repository import Repository

        return Repository.open(*self.named, create=create)

    @property
    def named(self) -> tuple[str, bytes | None]:
        """Where the repository is, and its secret."""
        return str(self.place / "repository"), os.environ["SOJOURN_BENCH_SECRET"].encode() or None


class Copies:
    """Where a push reads: a sealed upper, or the store."""

    def __init__(self, store: LocalStore, upper: Path | None = None) -> None:
        self._store = store
        self._upper = upper

    def _sealed(self, layer: str) -> Path:
        from sojourn.store.layers import SHORT

        return self._store.root / "sealed" / layer[:SHORT]

    def manifest(self, layer: str) -> Manifest:
        """A layer's manifest."""
        from sojourn.store.layers import read_manifest

        if (self._sealed(layer) / "manifest").exists():
            return read_manifest(self._sealed(layer), layer)
        return self._store.manifest(layer)

    def layer_path(self, layer: str) -> Path:
        """The directory with a layer's tree."""
        if self._upper is not None and (self._sealed(layer) / "manifest").exists():
            return self._upper
        return self._store.layer_path(layer)

    def image_path(self, image: str) -> Path:
        """The directory with a memory image's files."""
        return self._store.image_path(image)


def snapshot_of(
    layers: list[LayerRef], memory: MemoryRef | None, parent: Snapshot | None
) -> Snapshot:
    """A snapshot of these parts."""
    from sojourn.store.fingerprints import fingerprint

    config = SnapshotConfig("bench", {}, "root", "", "bench")
    return Snapshot(
        id=new_id("snp"),
        session="ses_bench",
        parent=parent.id if parent is not None else None,
        kind=SnapshotKind.SUSPEND,
        label=None,
        created_at=time.time(),
        layers=layers,
        memory=memory,
        config=config,
        fingerprint=fingerprint(layers, memory, config),
    )


def start(state: State) -> None:
    """Make store, repository and template."""
    (state.place / "template").mkdir()
    (state.place / "template" / "os-release").write_text("NAME=bench\n")
    repository = state.repository(create=True)
    snapshot = snapshot_of([state.template], None, None)
    repository.push(TENANT, snapshot, Copies(state.store))


def capture_layer(state: State, tree: Path) -> None:
    """Seal a tree and push it."""
    parent, scan = state.newest, state.scan
    since = (scan, parent.layers[-1]) if scan is not None and parent is not None else None
    sealed = state.store.seal_layer(tree, since=since, suspects=set())
    snapshot = snapshot_of([state.template, sealed.ref], None, parent)
    state.repository().push(TENANT, snapshot, Copies(state.store, tree), parent)
    state.keep(snapshot)


def settle_layer(state: State, tree: Path) -> None:
    """Let the store have the layer that was sealed, with its tree where it is, so that the next
    capture of the same tree finds it as that of a session which lives on, and keep its scan."""
    sealed = state.store.seal_layer(tree, since=None, suspects=set())
    import pickle

    (state.place / "scan").write_bytes(pickle.dumps(sealed.scan))
    state.store.adopt_template(tree, "upper")
    State(state.place).store  # noqa: B018 - opened anew: the record of the sealing is not needed any more


def settle_image(state: State, tree: Path) -> None:
    """Lay the driver's files ready: in a server it writes them into the staging area itself, but
    that is emptied whenever a store is opened."""
    shutil.copytree(tree, state.place / "written")
    os.sync()


def capture_image(state: State) -> None:
    """Publish the image as the driver wrote it, and push it."""
    staged = state.store.stage_image()
    for file in (state.place / "written").iterdir():
        file.rename(staged / file.name)
    (state.place / "written").rmdir()
    parent = state.newest
    memory = state.store.publish_image(staged, "bench", "none", [])
    snapshot = snapshot_of([state.template], memory, parent)
    state.repository().push(TENANT, snapshot, Copies(state.store), parent)
    state.keep(snapshot)


def restore(state: State, kind: str, target: Path) -> None:
    """Bring the newest snapshot's layer or image back from the repository alone."""
    repository = state.repository()
    newest = state.newest
    assert newest is not None
    found = repository.read_snapshot(TENANT, newest.id)
    if kind == "layer":
        repository.fetch_layer(TENANT, found.layers[-1].id, target)
    else:
        assert found.memory is not None
        target.mkdir()
        repository.fetch_image(TENANT, found.memory.id, target)


def check(state: State, *, data: bool) -> None:
    """Check the repository: its structure, or every byte."""

    def load() -> Callable[..., Iterator[Problem]]:
        from sojourn.repository.checks import check

        return check

    repository, check_repository = OpenedRepository.open_beside(*state.named, load)
    found = check_repository(repository.backend, repository.domain, read_data=data)
    # There is no server here that would write down whose snapshots these are.
    damage = [problem for problem in found if problem.severity != "warning"]
    if damage:
        raise SystemExit(f"the repository is damaged: {damage[0]}")


def main() -> None:
    """Do one step."""
    step, kind, place, *rest = sys.argv[1:]
    state = State(Path(place))
    if step == "start":
        start(state)
    elif step == "settle":
        (settle_layer if kind == "layer" else settle_image)(state, Path(rest[0]))
    elif step == "capture":
        if kind == "layer":
            capture_layer(state, Path(rest[0]))
        else:
            capture_image(state)
    elif step == "restore":
        restore(state, kind, Path(rest[0]))
    else:
        check(state, data=bool(rest))


if __name__ == "__main__":
    main()
