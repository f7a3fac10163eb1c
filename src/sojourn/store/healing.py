"""Replacing what was damaged on this disk by what the source still has.

Guarantee: nothing is replaced that a check did not find bad, nothing that the source does not have,
and only by what was proven to be the one of its id; where that fails, what was there stands in its
place again. What was set aside is kept while it may be in use: a sandbox that runs on it reads it
through its mount, and would lose the good files with the bad ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from sojourn.errors import IntegrityError, SojournError
from sojourn.model.snapshots import LayerRef, MemoryRef
from sojourn.store.caching import Cache
from sojourn.store.copying import disk_errors, sync_path
from sojourn.store.images import Images
from sojourn.store.images import object_name as image_name
from sojourn.store.layers import Layers
from sojourn.store.layers import object_name as layer_name
from sojourn.store.trees import Unlink, remove_tree

T = TypeVar("T")

log = logging.getLogger(__name__)


class Healing:
    """Checks layers and images, and replaces the bad ones. `aside` is where those are kept."""

    def __init__(
        self, cache: Cache, layers: Layers, images: Images, aside: Path, remove_file: Unlink
    ) -> None:
        self._cache = cache
        self._layers = layers
        self._images = images
        self._aside = aside
        self._remove_file = remove_file

    def heal(self, layers: Iterable[LayerRef], memory: MemoryRef | None) -> list[str]:
        """Check these and replace the bad ones; the names of those that were replaced.

        Raises what the source raises when it has one of them and cannot give it.
        """
        healed = []
        for layer in layers:
            place = self._layers.directory(layer.id)
            # A template's tree belongs to whoever installed it.
            ours = not (place / "source").exists() and self._cache.replaceable(layer.id)
            if ours and _is_bad(self._layers.check, layer.id):
                self._replace(place, layer.id, self._layers.get)
                healed.append(layer_name(layer.id))
        if memory is None or not self._cache.replaceable_image(memory.id):
            return healed
        if _is_bad(self._images.verify, memory):
            self._replace(self._images.directory(memory.id), memory.id, self._images.path)
            healed.append(image_name(memory.id))
        return healed

    def _replace(self, place: Path, id: str, bring: Callable[[str], object]) -> None:
        with disk_errors("replacing what was damaged"):
            self._aside.mkdir(mode=0o700, exist_ok=True)
            aside = self._aside / f"{id}.{os.urandom(6).hex()}"
            with contextlib.suppress(FileNotFoundError):  # the damage may be that it is gone
                place.rename(aside)
            sync_path(place.parent)
            self._layers.drop(id)
            try:
                bring(id)
            except SojournError:
                if aside.exists() and not place.exists():
                    aside.rename(place)
                    self._layers.drop(id)
                raise

    def discard(self, in_use: set[str]) -> int:
        """Remove what was set aside of all but these ids. Returns the bytes freed."""
        freed = 0
        with contextlib.suppress(FileNotFoundError):
            for place in sorted(self._aside.iterdir()):
                if place.name.partition(".")[0] not in in_use:
                    freed += remove_tree(place, self._remove_file)
        return freed


def _is_bad(check: Callable[[T], object], what: T) -> bool:
    try:
        check(what)
    except IntegrityError as error:
        log.warning("%s", error.message)
        return True
    return False
