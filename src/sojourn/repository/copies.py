"""What a push reads of a node's store, by files alone.

Guarantee: only reads; may be used by another process than the one that owns the store. What is not
there, or is removed meanwhile, raises IntegrityError.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from sojourn.errors import IntegrityError
from sojourn.store.envelopes import read_checked
from sojourn.store.images import object_name as image_name
from sojourn.store.layers import SHORT, SOURCE, object_name, read_manifest
from sojourn.store.manifests import Manifest

_MANIFESTS = 4  # of a chain's layers, the lower ones are in the store already


class StoredCopies:
    """Layers and images under a store's directory. Implements `pushes.Copies`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()

    def manifest(self, layer: str) -> Manifest:
        """A layer's manifest. Raises IntegrityError."""
        found = self._manifests.get(layer)
        if found is None:
            found = read_manifest(self._directory(layer), layer)
            self._manifests[layer] = found
            if len(self._manifests) > _MANIFESTS:
                self._manifests.popitem(last=False)
        return found

    def layer_path(self, layer: str) -> Path:
        """The directory with a layer's tree. Raises IntegrityError."""
        directory = self._directory(layer)
        name = object_name(layer)
        tree = directory / "fs"
        if not tree.is_dir():
            try:
                tree = Path(os.fsdecode(read_checked(SOURCE, directory / "source", name)))
            except FileNotFoundError:
                raise IntegrityError(f"The tree of {name} is missing.", object=name) from None
        return tree

    def image_path(self, image: str) -> Path:
        """The directory with a memory image's files. Raises IntegrityError."""
        files = self._root / "images" / image[:SHORT] / "files"
        if not files.is_dir():
            name = image_name(image)
            raise IntegrityError(f"{name} is missing.", object=name)
        return files

    def has(self, id: str) -> bool:
        """Whether a layer or a memory image is here."""
        short = id[:SHORT]
        return any(
            (self._root / group / short / "manifest").exists() for group in ("layers", "images")
        )

    def _directory(self, layer: str) -> Path:
        return self._root / "layers" / layer[:SHORT]
