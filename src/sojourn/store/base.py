"""What every snapshot store promises.

Guarantee: an object that was put and acknowledged survives a crash of everything but the disk,
is immutable, is named by its content, and is either given back as it was put away or refused with
IntegrityError naming the object. A manifest is published last, after all it refers to is safe.
All methods block; callers run them in threads. They release the GIL where libraries allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot
from sojourn.store.manifests import Manifest


class Change(msgspec.Struct, frozen=True):
    """One difference between two snapshots. `path` is raw bytes, absolute inside the session.

    `kind` is added, changed or removed; `what` names the differing properties
    (content, type, mode, owner, mtime, xattrs, link, device).
    """

    path: bytes
    kind: str
    what: list[str]
    before: EntryInfo | None
    after: EntryInfo | None


class EntryInfo(msgspec.Struct, frozen=True):
    """The facts a diff shows of one entry.

    `type` is file, dir, symlink, fifo, socket, char or block.
    """

    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    digest: str | None = None
    target: bytes | None = None


class Fault(msgspec.Struct, frozen=True):
    """One object found bad: name (`layer <id>`, `memory <id>`, `snapshot <id>`), path, cause."""

    object: str
    path: bytes | None
    cause: str


class Source(Protocol):
    """Where a node's store gets layers and memory images that are not on its disk (any more).

    May be called from many threads. Every method raises the source's own typed errors
    (StoreUnreachable, IntegrityError, ...), which reach whoever asked the store.
    """

    def has_layer(self, id: str) -> bool:
        """Whether the source holds the whole layer."""

    def has_image(self, id: str) -> bool:
        """Whether the source holds the whole memory image."""

    def fetch_layer(self, id: str, into: Path) -> Manifest:
        """Make the layer's tree at `into` (which is not there yet), every file's content compared
        with its digest. The caller proves the rest of the tree and syncs it."""

    def fetch_image(
        self, id: str, into: Path, cached: Sequence[tuple[MemoryRef, Path]]
    ) -> MemoryRef:
        """Write the image's files into `into` (an empty directory), every file compared with its
        digest. `cached` are images on the node's disk with the directories of their files, the
        likeliest to hold the same pages first; they may be damaged."""


class Scan(Protocol):
    """The state of an upper directory at one instant, to compare a later one with."""

    @property
    def bytes(self) -> int:
        """Allocated bytes under the tree."""

    @property
    def quick(self) -> bool:
        """Whether `unchanged` takes no longer than a thread takes to wake up."""


class Store(Protocol):
    """A snapshot store."""

    @property
    def root(self) -> Path:
        """The directory that holds all of it."""

    # -- layers -----------------------------------------------------------------------------
    def scan(self, upper: Path) -> Scan:
        """Note names, inodes, sizes, times of every entry; reads no file content."""

    def unchanged(self, upper: Path, since: Scan) -> bool:
        """True when nothing under `upper` differs from the scan. Cheap; the tree may be live."""

    def prepare_upper(self, upper: Path, layers: Sequence[LayerRef]) -> None:
        """Make a new, empty upper whose root has the attributes of the topmost root of `layers`
        (lowest first): the merged `/` shows those of the upper, so a plain new directory would
        change its owner, mode and times."""

    def capture_layer(
        self,
        upper: Path,
        *,
        since: tuple[Scan, LayerRef] | None,
        suspects: set[bytes],
    ) -> PendingLayer:
        """Copy a frozen upper's state into the store's staging area, sharing what did not change
        since the earlier capture (`since`). `suspects` are paths (relative, raw bytes) that must
        be taken anew whatever their times say. Only copying happens here, so that the stall of
        the sandbox stays short; hashing, syncing and publishing is `PendingLayer.publish`.
        Raises StorageFull; nothing is left behind then.
        """

    def seal_layer(
        self,
        upper: Path,
        *,
        since: tuple[Scan, LayerRef] | None,
        suspects: set[bytes],
    ) -> SealedLayer:
        """Hash a frozen upper in place and sync it, without moving it. `SealedLayer.take` then
        moves the directory itself into the store: O(1), no copy."""

    def take_layer(self, ref: LayerRef, upper: Path) -> LayerRef:
        """`SealedLayer.take` after a restart: moves the upper in once it is proven to be `ref`,
        or finds it already there. Raises IntegrityError when it is neither."""

    def squash(self, layers: Sequence[LayerRef], below: Sequence[LayerRef]) -> LayerRef:
        """Merge adjacent layers (lowest first, no template among them) into one that shows the
        same over the layers `below` them (all of them, lowest first), sharing their files. For the
        background."""

    def layer_path(self, layer: str) -> Path:
        """Directory to use as overlay lower directory. Raises IntegrityError when missing."""

    def manifest(self, layer: str) -> Manifest:
        """A layer's canonical entries. Raises IntegrityError when it is missing."""

    def stage_tree(self) -> Path:
        """A fresh directory on the store's file system to make a tree in, for `seal_layer`."""

    def discard_tree(self, staged: Path) -> None:
        """Drop what is left of it. Idempotent."""

    def adopt_template(self, tree: Path, name: str) -> LayerRef:
        """Register an immutable external tree (a template's root) as a layer without copying it."""

    # -- memory images ----------------------------------------------------------------------
    def stage_image(self) -> Path:
        """A fresh directory on the store's file system for a driver to write an image into."""

    def publish_image(self, staged: Path, driver: str, runtime: str, cpu: list[str]) -> MemoryRef:
        """Hash, sync and publish a staged image; `cpu` are the features it may rely on.
        Idempotent by content."""

    def discard_image(self, staged: Path) -> None:
        """Drop a staged image that is not to be published. Idempotent."""

    def image_path(self, image: str) -> Path:
        """Directory of a published image. Raises IntegrityError when missing."""

    def verify_image(self, image: MemoryRef) -> None:
        """Read and compare every byte. Raises IntegrityError naming the file."""

    # -- for exports and imports ------------------------------------------------------------
    def held(self, ids: Iterable[str]) -> AbstractContextManager[None]:
        """Keep layers and images from collection and eviction meanwhile."""

    def present(self, id: str) -> bool:
        """Whether a layer or image lies on this disk."""

    def take_in(self, source: Source, layers: Iterable[str], images: Iterable[str]) -> None:
        """Take layers and images from `source`, those that are not here. Each is proven to be the
        one of its id and synced; the caller holds them until a snapshot refers to them."""

    # -- snapshots --------------------------------------------------------------------------
    def publish_snapshot(self, snapshot: Snapshot) -> None:
        """Write the manifest, durably, after checking that all it refers to is there. A layer that
        is sealed but not taken yet counts as there. Raises IntegrityError, StorageFull, Conflict
        (another manifest has this id)."""

    def read_snapshot(self, snapshot: str) -> Snapshot:
        """Read and check a manifest. Raises SnapshotNotFound, IntegrityError."""

    def snapshot_ids(self) -> list[str]:
        """The ids of all manifests, readable or not."""

    def drop_memory(self, snapshot: str) -> Snapshot:
        """Turn a snapshot into a files-only one (thinning)."""

    def delete_snapshot(self, snapshot: str) -> None:
        """Remove the manifest. Its layers and image go with `collect`. Idempotent."""

    def collect(self, live: set[str]) -> int:
        """Remove layers, images and staging leftovers no snapshot refers to. `live` are layer and
        image ids in use by sandboxes and running captures. Returns the bytes freed."""

    def heal(self, layers: Sequence[LayerRef], memory: MemoryRef | None) -> list[str]:
        """Check these, and replace those that are damaged here and whole in the source. The names
        of those that were replaced. Raises what the source raises."""

    def discard_damaged(self, in_use: set[str]) -> int:
        """Remove what `heal` set aside, but of layers that sandboxes run on. Returns the bytes
        freed."""

    def check_layer(self, layer: LayerRef) -> None:
        """The quick check before use: every entry is as it was sealed (names, types, sizes, times,
        owners, modes); content is read again wherever the host says a file was touched.
        Raises IntegrityError naming layer and path."""

    def verify(self, snapshot: Snapshot) -> Iterator[Fault]:
        """Read every byte the snapshot uses and yield what is bad."""

    def verify_layer(self, layer: LayerRef) -> Iterator[Fault]:
        """The part of `verify` for one layer."""

    def verify_memory(self, memory: MemoryRef) -> Iterator[Fault]:
        """The part of `verify` for a memory image."""

    def diff(self, a: Snapshot, b: Snapshot) -> Iterator[Change]:
        """Differences from a to b as the session's file tree shows them (layers applied)."""

    def read_file(self, snapshot: Snapshot, path: bytes) -> bytes:
        """A regular file's content in a snapshot (used by the text diff). Raises FileMissing,
        TooLarge above 4 MiB."""

    def text_diff(self, a: Snapshot, b: Snapshot, path: bytes) -> str | None:
        """Unified diff of one file; None where it is no UTF-8 text or over 1 MiB on a side."""


class PendingLayer(Protocol):
    """A captured copy that is not yet published."""

    scan: Scan
    copied_bytes: int

    def publish(self) -> LayerRef:
        """Hash, sync and publish. Raises StorageFull."""

    def discard(self) -> None:
        """Drop it. Idempotent."""


class SealedLayer(Protocol):
    """An upper that was hashed in place."""

    ref: LayerRef
    scan: Scan

    def take(self) -> LayerRef:
        """Move the (now unmounted) upper directory into the store and sync. Idempotent: a second
        call, or a call after a crash in between, finds it already there."""

    def discard(self) -> None:
        """Give up sealing: the upper stays as it is. Idempotent."""
