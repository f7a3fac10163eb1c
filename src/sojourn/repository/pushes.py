"""Sending one snapshot, and keeping clear of collections.

Guarantee: when `send` has returned, all the snapshot needs stands where no tombstone named it
before the snapshot was written; a collection that names it later sees the snapshot first. What the
indexes know is not sent again, in whatever order sends, crashes and collections come.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from sojourn.errors import Conflict, IntegrityError
from sojourn.model.snapshots import MemoryRef, Snapshot
from sojourn.repository.domains import Domain
from sojourn.repository.images_out import publish_image, push_image
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.sealed import SNAPSHOT
from sojourn.repository.tombstones import Tombstones, names
from sojourn.repository.uploads import Upload
from sojourn.store.manifests import Manifest

log = logging.getLogger(__name__)

LONGEST = 12 * 3600.0  # seconds a send may take: finished tombstones are kept much longer
_LOOKS = 8


class Copies(Protocol):
    """Where a send finds what it reads: the node's own store. What it lacks raises
    IntegrityError."""

    def manifest(self, layer: str) -> Manifest:
        """A layer's manifest."""

    def layer_path(self, layer: str) -> Path:
        """The directory with a layer's tree."""

    def image_path(self, image: str) -> Path:
        """The directory with a memory image's files."""


class Watch:
    """The tombstones of a domain, and what this process made of them."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self._tombstones = Tombstones(domain)
        self._roots: set[str] = set()
        self._packs: set[bytes] = set()

    def look(self, needed: Iterable[str]) -> bool:
        """Take what is named from now on for absent; whether that may concern somebody who needs
        the root objects `needed` (names) and found chunks in the index."""
        roots, packs = names(self._tombstones.look())
        index = self.domain.index
        fresh_packs = {id for id in packs - self._packs if index.pack(id) is not None}
        fresh_roots = roots - self._roots
        wanted = set(needed)
        concerned = bool(fresh_packs) or any(
            not wanted.isdisjoint(key.split("/")) for key in fresh_roots
        )
        index.exclude(fresh_packs)
        self.domain.avoid(fresh_roots)
        self._roots |= roots
        self._packs |= packs
        return concerned


class Push:
    """One send. `parent` is a snapshot whose memory image is likely to share pages."""

    def __init__(
        self, domain: Watch, shared: Watch, copies: Copies, parent: Snapshot | None
    ) -> None:
        self._watches = (shared, domain)
        self._domain = domain.domain
        self._shared = shared.domain
        self._copies = copies
        self._parent = parent
        self._sent = 0

    def send(self, snapshot: Snapshot) -> int:
        """Make the snapshot durable; answers the bytes of content that were sent.

        Raises IntegrityError (what lies on this node is not what was sealed), StoreUnreachable,
        StorageFull, Interrupted, Conflict (collections that never end).
        """
        domain, shared = self._domain, self._shared
        template, own = snapshot.layers[0].id, [layer.id for layer in snapshot.layers[1:]]
        image = snapshot.memory.id if snapshot.memory else None
        needed = {
            shared.name: [_name(shared.layer_key(template))],
            domain.name: [_name(domain.layer_key(layer)) for layer in own],
        }
        if image is not None:
            needed[domain.name].append(_name(domain.image_key(image)))
        for watch in self._watches:
            watch.look(())
        whole = False  # whether roots in the store are taken at their word
        for _ in range(_LOOKS):
            begun = time.clock_gettime(time.CLOCK_BOOTTIME)
            self._layers(shared, [template], whole)
            self._layers(domain, own, whole)
            if snapshot.memory is not None:
                self._image(snapshot.memory, whole)
            payload = msgspec.msgpack.encode(snapshot)
            domain.put_object(SNAPSHOT, domain.snapshot_key(snapshot.id), payload)
            # Only now: whoever collects either sees the snapshot, or is seen here.
            whole = any([watch.look(needed[watch.domain.name]) for watch in self._watches])
            if time.clock_gettime(time.CLOCK_BOOTTIME) - begun > LONGEST:
                whole = True
                for watch in self._watches:
                    watch.domain.index.refresh()
            if not whole:
                return self._sent
            log.info("snapshot %s: a collection is under way, looking again", snapshot.id)
        raise Conflict(
            f"snapshot {snapshot.id} could not be kept clear of collections",
            next_step="Collect less often.",
        )

    def _layers(self, domain: Domain, layers: list[str], whole: bool) -> None:
        """Send the layers the domain lacks; with `whole` also what is missing of those it has."""
        wanted = [layer for layer in layers if whole or not domain.has_layer(layer)]
        if not wanted:
            return
        pushed = []
        with Upload(domain) as up:
            for layer in wanted:
                manifest = self._copies.manifest(layer)
                push_layer(domain, up, manifest, self._copies.layer_path(layer))
                pushed.append(manifest)
            up.flush()
            self._sent += up.stored_bytes
        for manifest in pushed:
            if not domain.has_layer(manifest.id):
                publish_layer(domain, manifest)

    def _image(self, ref: MemoryRef, whole: bool) -> None:
        domain = self._domain
        if not whole and domain.has_image(ref.id):
            return
        with Upload(domain) as up:
            image = push_image(
                domain, up, ref, self._copies.image_path(ref.id), self._parent_image(ref)
            )
            up.flush()
            self._sent += up.stored_bytes
        if not domain.has_image(ref.id) or whole:
            publish_image(domain, image)

    def _parent_image(self, ref: MemoryRef) -> tuple[MemoryRef, Path] | None:
        parent = self._parent.memory if self._parent is not None else None
        if parent is None or parent.id == ref.id or not self._domain.has_image(parent.id):
            return None
        with contextlib.suppress(IntegrityError):  # evicted or damaged: only a saving is lost
            return parent, self._copies.image_path(parent.id)
        return None


def _name(key: str) -> str:
    return key.rpartition("/")[2]
