"""A repository's domain as the source of a node's store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sojourn.model.snapshots import MemoryRef
from sojourn.repository.domains import Domain
from sojourn.repository.images_in import read_image, restore_image
from sojourn.repository.layers_in import restore_layer
from sojourn.store.manifests import Manifest


class DomainSource:
    """Implements `sojourn.store.base.Source`. `fetched` are the ids that were asked for."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.fetched: list[str] = []

    def has_layer(self, id: str) -> bool:
        return self.domain.has_layer(id)

    def has_image(self, id: str) -> bool:
        return self.domain.has_image(id)

    def fetch_layer(self, id: str, into: Path) -> Manifest:
        self.fetched.append(id)
        return restore_layer(self.domain, id, into)

    def fetch_image(
        self, id: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]]
    ) -> MemoryRef:
        self.fetched.append(id)
        maps = [
            (read_image(self.domain, ref.id), files)
            for ref, files in cached
            if self.domain.has_image(ref.id)
        ]
        return restore_image(self.domain, id, into, maps)
