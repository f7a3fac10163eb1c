"""The object store as the source that the node's own store reads through.

Guarantee: an object counts as there only when a durable snapshot refers to it, so nothing is
removed from the node on a mere hope.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from sojourn.database.records import DurableObjects, SnapshotRecord
from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.model.snapshots import MemoryRef
from sojourn.repository.repository import SHARED, Repository
from sojourn.store.manifests import Manifest


class RepositorySource:
    """Implements `sojourn.store.base.Source`. `repository` may be a function that opens it when it
    is first needed."""

    def __init__(self, repository: Repository | Callable[[], Repository]) -> None:
        self._open = repository
        self._layers: dict[str, str] = {}
        self._images: dict[str, str] = {}
        self._lock = threading.Lock()

    def _repository(self) -> Repository:
        return self._open if isinstance(self._open, Repository) else self._open()

    # -- what is there ----------------------------------------------------------------------

    def learn(self, objects: DurableObjects) -> None:
        """Note what the database says is durable."""
        with self._lock:
            self._layers = {**_domains(objects.layers, self._layers), **_shared(objects)}
            self._images = _domains(objects.images, self._images)

    def note(self, record: SnapshotRecord) -> None:
        """Note what a durable snapshot refers to."""
        with self._lock:
            self._layers[record.layers[0]] = SHARED
            for layer in record.layers[1:]:
                self._layers.setdefault(layer, record.tenant)
            if record.image is not None:
                self._images.setdefault(record.image, record.tenant)

    def forget(self, live: DurableObjects) -> None:
        """Keep only what the database still says is durable: the rest may be collected. What stays
        is there throughout, for those who ask meanwhile."""
        with self._lock:
            self._layers = {**_domains(live.layers), **_shared(live)}
            self._images = _domains(live.images)

    def has(self, id: str) -> bool:
        """Whether the object store has a layer or image."""
        return id in self._layers or id in self._images

    # -- the protocol -----------------------------------------------------------------------

    def has_layer(self, id: str) -> bool:
        """Whether the object store has a layer."""
        return id in self._layers

    def has_image(self, id: str) -> bool:
        """Whether the object store has a memory image."""
        return id in self._images

    def fetch_layer(self, id: str, into: Path) -> Manifest:
        """Make a layer's tree. Raises IntegrityError, StoreUnreachable, StorageFull."""
        domain = self._layers.get(id)
        if domain is None:
            name = f"layer {id}"
            raise IntegrityError(f"{name} is not in the object store.", object=name)
        with _there():
            return self._repository().fetch_layer(domain, id, into)

    def fetch_image(
        self, id: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]]
    ) -> MemoryRef:
        """Make a memory image's files. Raises IntegrityError, StoreUnreachable, StorageFull."""
        domain = self._images.get(id)
        if domain is None:
            name = f"memory {id}"
            raise IntegrityError(f"{name} is not in the object store.", object=name)
        with _there():
            return self._repository().fetch_image(domain, id, into, cached)


def _domains(
    tenants: Mapping[str, Collection[str]], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The domain to read each object from; what is known already stays where it is."""
    found = {id: min(names) for id, names in tenants.items()}
    return found if known is None else found | dict(known)


def _shared(objects: DurableObjects) -> dict[str, str]:
    return dict.fromkeys(objects.templates, SHARED)


@contextlib.contextmanager
def _there() -> Iterator[None]:
    """What counts as durable and is missing was lost by the object store."""
    try:
        yield
    except ObjectMissing as error:
        key = error.details.get("key")
        raise IntegrityError(
            f"The object store has lost {key}.",
            object=key,
            next_step="`sojourn store repair` brings back what a node still has.",
        ) from error
