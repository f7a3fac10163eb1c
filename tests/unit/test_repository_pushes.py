"""A send writes what changes in place with a condition only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sojourn.errors import Conflict
from sojourn.repository import config
from sojourn.repository.repository import Repository
from sojourn.store.fingerprints import fingerprint
from sojourn.store.manifests import Manifest
from support.dictionaries import DictBackend
from support.repositories import CONFIG, TENANT, Node


class Delayed(DictBackend):
    """Keeps each request to write a snapshot, so that it can arrive once more."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, bytes, bool, str | None]] = []

    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        if "/snapshots/" in key:
            self.kept.append((key, data, create, replaces))
        return super().put(key, data, create=create, replaces=replaces)


class Trees:
    """The trees and images of a node, as a send reads them."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def manifest(self, layer: str) -> Manifest:
        return self.node.trees[layer][0]

    def layer_path(self, layer: str) -> Path:
        return self.node.trees[layer][1]

    def image_path(self, image: str) -> Path:
        return self.node.images[image][1]


def test_a_request_that_arrives_late_does_not_bring_an_older_manifest_back(tmp_path: Path) -> None:
    backend = Delayed()
    repository = Repository(backend, *config.create(backend, None))
    node = Node(backend, tmp_path)
    whole = node.snapshot({"a": b"1"}, memory={"checkpoint.img": b"pages" * 100})
    thinned = msgspec.structs.replace(
        whole, memory=None, fingerprint=fingerprint(whole.layers, None, CONFIG)
    )
    for snapshot in (whole, thinned, thinned):
        repository.push(TENANT, snapshot, Trees(node))
        assert repository.read_snapshot(TENANT, snapshot.id) == snapshot
    assert len(backend.kept) >= 3
    for key, data, create, replaces in list(backend.kept):
        assert create or replaces is not None
        with pytest.raises(Conflict):
            backend.put(key, data, create=create, replaces=replaces)
    assert repository.read_snapshot(TENANT, whole.id) == thinned
