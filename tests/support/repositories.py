"""Small repositories in memory: trees made of dictionaries, pushed as a node would."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from sojourn.model import new_id
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.repository import config
from sojourn.repository.backends.base import Backend, ObjectInfo
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.collection import Collected, collect
from sojourn.repository.domains import Domain
from sojourn.repository.images_out import publish_image, push_image
from sojourn.repository.layers_in import restore_layer
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.sealed import SNAPSHOT
from sojourn.repository.uploads import Upload
from sojourn.store.fingerprints import fingerprint, image_digest
from sojourn.store.manifests import Manifest
from support.uploads import manifest_at

CONFIG = SnapshotConfig(template="t", env={}, user="root", cwd="/", hostname="h")
TENANT = "ten_1"
DAY = 86400.0

Files = Mapping[str, bytes]


class Clocked:
    """A backend whose clock the test sets: `now` and the times of objects move by `ahead`, as it
    was when the object was written."""

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend if backend is not None else open_backend("memory:")
        self.ahead = 0.0
        self._written: dict[str, float] = {}

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def now(self) -> float:
        return self.backend.now() + self.ahead

    def put(self, key: str, data: bytes, **conditions) -> str:
        version = self.backend.put(key, data, **conditions)
        self._written[key] = self.ahead
        return version

    def _moved(self, info: ObjectInfo) -> ObjectInfo:
        moved = info.modified + self._written.get(info.key, 0.0)
        return msgspec.structs.replace(info, modified=moved)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return map(self._moved, self.backend.list(prefix))

    def head(self, key: str) -> ObjectInfo:
        return self._moved(self.backend.head(key))


class Node:
    """One process with the repository open, and the trees it made below `directory`."""

    def __init__(self, backend: Backend, directory: Path, secret: bytes | None = None) -> None:
        self.backend = backend
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        _, self._keyring = config.create(backend, secret)
        self._domains: dict[str, Domain] = {}
        self.trees: dict[str, tuple[Manifest, Path]] = {}
        self.images: dict[str, tuple[MemoryRef, Path]] = {}

    def fresh(self, backend: Backend | None = None) -> Node:
        """A process that starts now, with the same trees."""
        made = Node.__new__(Node)
        made.__dict__ = {**self.__dict__, "_domains": {}}
        if backend is not None:
            made.backend = backend
        return made

    def domain(self, name: str = TENANT) -> Domain:
        if name not in self._domains:
            self._domains[name] = Domain(self.backend, self._keyring.domain(name))
        return self._domains[name]

    def tree(self, files: Files) -> Manifest:
        """A tree with these files, always of the same times, so that its layer id follows from
        them."""
        path = self.directory / blake3(repr(sorted(files.items())).encode()).hexdigest()[:16]
        if not path.exists():
            for name, data in files.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(data)
            path.mkdir(exist_ok=True)
            for each in [*path.rglob("*"), path]:
                os.utime(each, ns=(10**18, 10**18))
        manifest = manifest_at(path)
        self.trees[manifest.id] = manifest, path
        return manifest

    def image(self, files: Files) -> MemoryRef:
        """A memory image with these files."""
        path = self.directory / f"image-{len(self.images)}"
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        listed = {name: (len(data), blake3(data).hexdigest()) for name, data in files.items()}
        total = sum(map(len, files.values()))
        ref = MemoryRef(image_digest(listed), total, listed, "d", "r", [])
        self.images[ref.id] = ref, path
        return ref

    def snapshot(
        self, *layers: Files, base: Files | None = None, memory: Files | None = None
    ) -> Snapshot:
        """A snapshot of these layers over a template, not pushed."""
        template = self.tree(base if base is not None else {"etc/os": b"template"})
        refs: list[LayerRef] = [template.ref, *(self.tree(files).ref for files in layers)]
        image = self.image(memory) if memory is not None else None
        return Snapshot(
            id=new_id("snp"),
            session="ses_1",
            parent=None,
            kind=SnapshotKind.EXPLICIT,
            label=None,
            created_at=0.0,
            layers=refs,
            memory=image,
            config=CONFIG,
            fingerprint=fingerprint(refs, image, CONFIG),
        )

    def push(self, snapshot: Snapshot, tenant: str = TENANT) -> Snapshot:
        """Send a snapshot with nobody collecting."""
        for number, layer in enumerate(snapshot.layers):
            domain = self.domain(tenant if number else "shared")
            if domain.has_layer(layer.id):
                continue
            manifest, path = self.trees[layer.id]
            with Upload(domain) as up:
                push_layer(domain, up, manifest, path)
            publish_layer(domain, manifest)
        domain = self.domain(tenant)
        if snapshot.memory is not None and not domain.has_image(snapshot.memory.id):
            ref, path = self.images[snapshot.memory.id]
            with Upload(domain) as up:
                image = push_image(domain, up, ref, path)
            publish_image(domain, image)
        payload = msgspec.msgpack.encode(snapshot)
        domain.put_object(SNAPSHOT, domain.snapshot_key(snapshot.id), payload)
        return snapshot

    def publish(self, *layers: Files, tenant: str = TENANT, **more) -> Snapshot:
        """Make and push a snapshot."""
        return self.push(self.snapshot(*layers, **more), tenant)

    def delete(self, snapshot: Snapshot, tenant: str = TENANT) -> None:
        self.backend.delete([self.domain(tenant).snapshot_key(snapshot.id)])

    def collect(self, grace: float = 0.0, **options) -> Collected:
        return collect(self.backend, self.domain, grace=grace, **options)

    def restore(self, snapshot: Snapshot, tenant: str = TENANT) -> None:
        """Fetch and prove all layers; raises where one is not whole."""
        for number, layer in enumerate(snapshot.layers):
            target = self.directory / "restored"
            restore_layer(self.domain(tenant if number else "shared"), layer.id, target)
            shutil.rmtree(target)

    def keys(self, part: str) -> list[str]:
        """The keys of all objects that have this in their key."""
        return sorted(info.key for info in self.backend.list("") if part in info.key)


def node(directory: Path, backend: Backend | None = None, secret: bytes | None = None) -> Node:
    """A node on a backend, by default a new one in memory with a clock to set."""
    return Node(backend if backend is not None else Clocked(), directory, secret)
