"""Sending one snapshot, and keeping clear of collections.

Guarantee: when `send` has returned, all the snapshot needs stands where no tombstone named it after
the snapshot was written; a collection that names it later sees the snapshot first. What the indexes
know is not sent again, in whatever order sends, crashes and collections come.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Protocol

import msgspec

from sojourn.errors import Conflict, IntegrityError, ObjectMissing
from sojourn.model.snapshots import MemoryRef, Snapshot
from sojourn.repository.images_out import publish_image, push_image
from sojourn.repository.layers_out import publish_layer, push_layer
from sojourn.repository.reliance import Exposed, Watch, exposed
from sojourn.repository.sealed import SNAPSHOT
from sojourn.repository.uploads import Upload
from sojourn.store.manifests import Manifest

log = logging.getLogger(__name__)

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


class Push:
    """One send. `parent` is a snapshot whose memory image is likely to share pages."""

    def __init__(
        self, domain: Watch, shared: Watch, copies: Copies, parent: Snapshot | None
    ) -> None:
        self._watch = domain
        self._shared_watch = shared
        self._domain = domain.domain
        self._copies = copies
        self._parent = parent
        self._sent = 0

    def send(self, snapshot: Snapshot) -> int:
        """Make the snapshot durable; answers the bytes of content that were sent.

        Raises IntegrityError (what lies on this node is not what was sealed), StoreUnreachable,
        StorageFull, Interrupted, Conflict (collections that never end).
        """
        template, own = snapshot.layers[0].id, [layer.id for layer in snapshot.layers[1:]]
        for watch in (self._shared_watch, self._watch):
            watch.begin()
        again = Exposed(frozenset(), frozenset())
        written = False
        for _ in range(_LOOKS):
            self._layers(self._shared_watch, [template], again.layers)
            self._layers(self._watch, own, again.layers)
            if snapshot.memory is not None:
                self._image(snapshot.memory, bool(again.images))
            again = self._exposed(snapshot)
            if again and not written:
                continue  # cut off after the next step it would be there and not whole
            self._write(snapshot)
            written = True
            # Only now it counts: whoever collects either sees the snapshot, or is seen here.
            again = self._exposed(snapshot)
            if not again:
                return self._sent
        raise Conflict(
            f"snapshot {snapshot.id} could not be kept clear of collections",
            next_step="Collect less often.",
        )

    def _write(self, snapshot: Snapshot) -> None:
        """Write the manifest. Only with a condition: a thinned snapshot takes the place of the one
        before, and a request for that one which was given up may arrive after it."""
        domain = self._domain
        key = domain.snapshot_key(snapshot.id)
        payload = msgspec.msgpack.encode(snapshot)
        version: str | None = None
        for _ in range(_LOOKS):
            try:
                domain.put_object(SNAPSHOT, key, payload, create=version is None, replaces=version)
                return
            except (Conflict, ObjectMissing):
                pass  # another version is there than was thought, or none
            try:
                version = domain.backend.head(key).version
            except ObjectMissing:
                version = None
        raise Conflict(f"snapshot {snapshot.id} is being written by others")

    def _exposed(self, snapshot: Snapshot) -> Exposed:
        found = exposed(self._watch, self._shared_watch, snapshot)
        if found:
            log.info("snapshot %s: a collection is under way, sending again", snapshot.id)
        return found

    def _layers(self, watch: Watch, layers: list[str], again: frozenset[str]) -> None:
        """Send the layers the domain lacks, and what is missing of those in `again`."""
        domain = watch.domain
        wanted = [id for id in layers if id in again or not domain.has_layer(id)]
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
            publish_layer(domain, manifest)
            watch.note(manifest.id, up.relied | up.written)

    def _image(self, ref: MemoryRef, again: bool) -> None:
        domain = self._domain
        if not again and domain.has_image(ref.id):
            return
        with Upload(domain) as up:
            image = push_image(
                domain, up, ref, self._copies.image_path(ref.id), self._parent_image(ref)
            )
            up.flush()
            self._sent += up.stored_bytes
        publish_image(domain, image)
        self._watch.note(ref.id, up.relied | up.written)

    def _parent_image(self, ref: MemoryRef) -> tuple[MemoryRef, Path] | None:
        parent = self._parent.memory if self._parent is not None else None
        if parent is None or parent.id == ref.id or not self._domain.has_image(parent.id):
            return None
        with contextlib.suppress(IntegrityError):  # evicted or damaged: only a saving is lost
            return parent, self._copies.image_path(parent.id)
        return None
