"""The snapshot store on a node's local disk.

Guarantee: that of `sojourn.store.base`. What was acknowledged survives a crash of everything but
the disk; nothing is removed that a readable snapshot, a live sandbox or a running capture needs;
where a snapshot's manifest cannot be read nothing is removed at all.

    layers/    sealed layers (see layers.py)        images/     memory images (see images.py)
    sealed/    layers hashed in place, not moved yet (see captures.py)
    snapshots/ manifests, written last              staging/    unpublished and thrown away
    links      change times that sharing caused     templates/  which layer a template's tree is

One process at a time uses a store; opening it removes what crashed ones left in staging.

With a source (an object store) it is a cache: a layer or image that is not here is brought at its
first use, and `evict` gives up what was not used for long (see caching.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from sojourn.errors import FileMissing, IntegrityError, InvalidRequest, SojournError
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot
from sojourn.store.base import Change, Fault, Scan, Source
from sojourn.store.building import Shared, Staged
from sojourn.store.caching import Cache
from sojourn.store.captures import Captures, PendingCapture, SealedUpper, Since
from sojourn.store.copying import disk_errors, sync_path
from sojourn.store.envelopes import read_checked, write_checked
from sojourn.store.fingerprints import fingerprint, hash_entry
from sojourn.store.healing import Healing
from sojourn.store.images import Images
from sojourn.store.indexes import LinkLedger, row_of, write_index
from sojourn.store.layers import MANIFEST, SHORT, SOURCE, Layers
from sojourn.store.manifests import Entry, Manifest, manifest_of
from sojourn.store.snapshots import Snapshots
from sojourn.store.squashing import squash_manifests
from sojourn.store.staging import Pins, Staging
from sojourn.store.trees import (
    COARSE_WINDOW_NS,
    MODE,
    Directories,
    LocalScan,
    same_as,
    scan_tree,
    stamps_are_fine,
)
from sojourn.store.views import View, differences, read_content, unified


class LocalStore:
    """Implements `sojourn.store.base.Store` under one directory.

    `grace` seconds a published object is safe from collection before a snapshot refers to it.
    `timestamp_window_ns` overrides the probing of the file system's change times.
    `source` has layers and images that are not on this disk (any more).
    """

    def __init__(
        self,
        root: Path,
        *,
        grace: float = 900.0,
        timestamp_window_ns: int | None = None,
        source: Source | None = None,
    ) -> None:
        self.root = root
        with disk_errors("opening the store"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("layers", "images", "sealed", "snapshots", "templates"):
                (root / name).mkdir(mode=0o700, exist_ok=True)
            self._ledger = LinkLedger(root / "links")
            self._staging = Staging(root / "staging", self._unlink)
            if timestamp_window_ns is None:
                fine = stamps_are_fine(self._staging.directory)
                timestamp_window_ns = 0 if fine else COARSE_WINDOW_NS
        self._pins = Pins(grace)
        self._layers = Layers(root / "layers", self._ledger)
        self._images = Images(root / "images", self._staging, self._pins)
        self._cache = Cache(source, self._layers, self._images, self._staging, self._pins, grace)
        self._healing = Healing(
            self._cache, self._layers, self._images, root / "damaged", self._unlink
        )
        self._snapshots = Snapshots(root / "snapshots", self._staging)
        self._captures = Captures(
            self._layers, root / "sealed", self._staging, self._pins, timestamp_window_ns
        )
        self._references = threading.Lock()  # publishing a reference and collecting exclude
        self._captures.finish()

    # -- layers -----------------------------------------------------------------------------
    def scan(self, upper: Path) -> LocalScan:
        """Note names, inodes, sizes, times of every entry; reads no file content."""
        return scan_tree(upper, self._captures.window(upper))

    def unchanged(self, upper: Path, since: Scan) -> bool:
        """True when nothing under `upper` differs from the scan. Cheap; the tree may be live."""
        if not isinstance(since, LocalScan):
            raise TypeError("the scan is not one of this store")
        return same_as(upper, since, hash_entry)

    def prepare_upper(self, upper: Path, layers: Sequence[LayerRef]) -> None:
        """Make a new, empty upper whose root looks like that of the layers below.

        The merged tree shows the attributes of the topmost root, so a plain new directory would
        change the owner, mode and times of `/`.
        """
        with disk_errors("making a session's directory"):
            upper.mkdir(mode=0o700)
            if not layers:
                return
            found = View([self._layers.get(layers[-1].id).manifest]).lookup(b"")
            if found is None:
                return
            entry = found[1]
            os.chown(upper, entry.uid, entry.gid)
            for key, value in entry.xattrs:
                if not key.startswith(b"trusted.overlay."):
                    os.setxattr(upper, key, value)
            upper.chmod(entry.mode)
            os.utime(upper, ns=(entry.mtime, entry.mtime))

    def capture_layer(self, upper: Path, *, since: Since, suspects: set[bytes]) -> PendingCapture:
        """Copy a frozen upper's state, sharing what did not change since the earlier capture."""
        return self._captures.capture(upper, since, suspects)

    def seal_layer(self, upper: Path, *, since: Since, suspects: set[bytes]) -> SealedUpper:
        """Hash a frozen upper in place and sync it, without moving it."""
        return self._captures.seal(upper, since, suspects)

    def take_layer(self, ref: LayerRef, upper: Path) -> LayerRef:
        """`SealedLayer.take` after a restart: moves the upper in once it is proven to be `ref`.
        Raises IntegrityError when it is not."""
        return self._captures.take(ref, upper)

    def layer_path(self, layer: str) -> Path:
        """Directory to use as overlay lower directory. Raises IntegrityError when missing."""
        return self._layers.get(layer).tree

    def manifest(self, layer: str) -> Manifest:
        """A layer's canonical entries. Raises IntegrityError when it is missing."""
        return self._layers.get(layer).manifest

    def stage_tree(self) -> Path:
        """A fresh directory on the store's file system to make a tree in, for `seal_layer`."""
        return self._staging.new()

    def discard_tree(self, staged: Path) -> None:
        """Drop what is left of it. Idempotent."""
        self._staging.drop(staged)

    def adopt_template(self, tree: Path, name: str) -> LayerRef:
        """Register an immutable external tree as a layer without copying it."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name):
            raise InvalidRequest(f"{name!r} is not a template name.")
        tree = tree.resolve()
        note = self.root / "templates" / name
        with disk_errors("registering a template"):
            if note.is_file():
                layer = note.read_text().strip()
                with contextlib.suppress(IntegrityError):  # changed or damaged: look again
                    stored = self._layers.get(layer)
                    if stored.tree == tree:
                        self._layers.check(layer)
                        return stored.manifest.ref
            return self._adopt(tree, note)

    def _adopt(self, tree: Path, note: Path) -> LayerRef:
        scan = scan_tree(tree, 0, full=True)
        digests = {}
        with Directories(tree) as held:
            for path, facts in scan.entries.items():
                if stat.S_ISREG(facts[MODE]):
                    fd, own = held.parent(path)
                    digests[path] = hash_entry(fd, own)
        manifest = manifest_of(scan, digests)
        staged = self._staging.new()
        try:
            rows = [row_of(scan.entries[entry.path]) for entry in manifest.entries]
            write_index(staged / "index", rows, sync=False)
            write_checked(MANIFEST, staged / "manifest", manifest.encoded)
            write_checked(SOURCE, staged / "source", os.fsencode(tree))
            self._release_stale(tree, manifest.id)
            place = self._layers.directory(manifest.id)
            if self._layers.present(manifest.id) and (place / "source").exists():
                # The same content elsewhere: the newest place counts.
                for part in ("index", "source"):
                    (staged / part).replace(place / part)
                sync_path(place)
                self._layers.drop(manifest.id)
            else:
                sync_path(staged)
                self._layers.admit(staged, manifest.id)
            written = self._staging.new() / "note"
            written.write_text(manifest.id + "\n")
            sync_path(written)
            written.replace(note)
            self._staging.drop(written.parent)
            sync_path(note.parent)
        finally:
            self._staging.drop(staged)
        return manifest.ref

    def _release_stale(self, tree: Path, layer: str) -> None:
        """Forget that another layer lies at `tree`, which holds `layer` now: where the source has
        it, it is brought from there as a layer of its own when it is needed."""
        for place in self._layers.root.iterdir():
            try:
                source = read_checked(SOURCE, place / "source", place.name)
                other = self._cache.id_of(place)
            except (FileNotFoundError, IntegrityError):
                continue
            if other is None or other == layer or os.fsdecode(source) != str(tree):
                continue
            try:
                if not self._cache.replaceable(other):
                    continue
            except SojournError:
                continue  # the source cannot tell now: its check will say that it differs
            self._staging.trash(place)
            self._layers.drop(other)

    def check_layer(self, layer: LayerRef) -> None:
        """The quick check before use. Raises IntegrityError naming layer and path."""
        with self._pins.held([layer.id]):
            self._layers.check(layer.id)

    def squash(self, layers: Sequence[LayerRef], below: Sequence[LayerRef]) -> LayerRef:
        """Merge adjacent layers (lowest first, no template among them) into one that shows the
        same over the layers `below` them."""
        if not layers:
            raise InvalidRequest("There is nothing to squash.")
        held = [layer.id for layer in layers]
        with self._pins.held(held), disk_errors("merging layers"):
            manifests = [self._layers.get(layer).manifest for layer in held]
            lower = [self._manifest(layer.id) for layer in below]
            merged, sources = squash_manifests(manifests, lower)
            self._publish(merged, sources)
            return merged.ref

    def _publish(self, manifest: Manifest, sources: dict[bytes, Shared | Staged]) -> None:
        self._pins.fresh(manifest.id)
        staged = self._staging.new()
        try:
            self._captures.publish(staged, manifest, sources, {})
            if manifest.ref.entries == 0:
                self._pins.settle(manifest.id)  # no snapshot will name it
        finally:
            self._staging.drop(staged)

    # -- memory images ----------------------------------------------------------------------
    def stage_image(self) -> Path:
        """A fresh directory on the store's file system for a driver to write an image into."""
        return self._images.stage()

    def discard_image(self, staged: Path) -> None:
        """Drop a staged image that is not to be published. Idempotent."""
        self._images.discard(staged)

    def publish_image(self, staged: Path, driver: str, runtime: str, cpu: list[str]) -> MemoryRef:
        """Hash, sync and publish a staged image. Idempotent by content."""
        return self._images.publish(staged, driver, runtime, cpu)

    def image_path(self, image: str) -> Path:
        """Directory of a published image. Raises IntegrityError when missing."""
        return self._images.path(image)

    def verify_image(self, image: MemoryRef) -> None:
        """Read and compare every byte. Raises IntegrityError naming the file."""
        with self._pins.held([image.id]):
            self._images.verify(image)

    # -- snapshots --------------------------------------------------------------------------
    def publish_snapshot(self, snapshot: Snapshot) -> None:
        """Write the manifest, durably, after checking that all it refers to is there.

        A sealed layer counts as there: it is recorded and synced, though its upper moves in later.
        So does what the source has.
        """
        memory = snapshot.memory
        elsewhere = self._cache.elsewhere(  # asked before the lock: it may take long
            [layer.id for layer in snapshot.layers if not self._captures.sealed_here(layer.id)],
            memory.id if memory is not None else None,
        )
        with self._references:
            for layer in snapshot.layers:
                if layer.id in elsewhere or self._captures.sealed_here(layer.id):
                    continue
                self._layers.get(layer.id, bring=False)
            if memory is not None and memory.id not in elsewhere:
                self._images.path(memory.id, bring=False)
            self._snapshots.write(snapshot)
            for layer in snapshot.layers:
                self._pins.settle(layer.id)
            if memory is not None:
                self._pins.settle(memory.id)

    def read_snapshot(self, snapshot: str) -> Snapshot:
        """Read and check a manifest. Raises SnapshotNotFound, IntegrityError."""
        return self._snapshots.read(snapshot)

    def snapshot_ids(self) -> list[str]:
        """The ids of all manifests, readable or not."""
        return self._snapshots.ids()

    def drop_memory(self, snapshot: str) -> Snapshot:
        """Turn a snapshot into a files-only one (thinning). Its fingerprint changes with it."""
        with self._references:
            old = self._snapshots.read(snapshot)
            if old.memory is None:
                return old
            new = msgspec.structs.replace(
                old,
                memory=None,
                fingerprint=fingerprint(old.layers, None, old.config, old.format),
            )
            self._snapshots.write(new, replace=True)
            return new

    def delete_snapshot(self, snapshot: str) -> None:
        """Remove the manifest. Its layers and image go with `collect`. Idempotent."""
        with self._references:
            self._snapshots.delete(snapshot)

    def collect(self, live: set[str]) -> int:
        """Remove layers, images and leftovers nothing refers to. Returns the bytes freed."""
        with self._references:
            needed = set(live)
            for snapshot in self._snapshots.all():
                needed.update(layer.id for layer in snapshot.layers)
                if snapshot.memory is not None:
                    needed.add(snapshot.memory.id)
            kept = {id[:SHORT] for id in needed}
            self._sweep(self.root / "layers", kept)
            self._sweep(self.root / "sealed", kept)
            self._sweep(self.root / "images", kept)
        return self._staging.empty_trash()

    def _sweep(self, places: Path, kept: set[str]) -> None:
        for place in sorted(places.iterdir()):
            if place.name in kept or (place / "source").exists():
                continue  # templates stay: registering them again means reading them whole
            with self._pins.still() as pinned:
                if place.name not in {id[:SHORT] for id in pinned}:
                    self._staging.trash(place)
        sync_path(places)

    def _unlink(self, directory: int, name: bytes, s: os.stat_result) -> None:
        """Unlink a file, noting the change time this gives an inode that other layers share."""
        if s.st_nlink == 1 or not stat.S_ISREG(s.st_mode):
            os.unlink(name, dir_fd=directory)
            self._ledger.forget(s.st_ino)
            return
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory
        )
        try:
            before = os.fstat(fd)
            known = self._ledger.get(before.st_ino) == before.st_ctime_ns
            os.unlink(name, dir_fd=directory)
            if known:  # a change that was not the store's own must go on showing
                self._ledger.record({before.st_ino: os.fstat(fd).st_ctime_ns})
        finally:
            os.close(fd)

    def verify(self, snapshot: Snapshot) -> Iterator[Fault]:
        """Read every byte the snapshot uses and yield what is bad."""
        for layer in snapshot.layers:
            yield from self.verify_layer(layer)
        if snapshot.memory is not None:
            yield from self.verify_memory(snapshot.memory)
        try:
            stored = self._snapshots.read(snapshot.id)
        except SojournError as error:
            yield Fault(f"snapshot {snapshot.id}", None, error.message)
            return
        if stored != snapshot:
            yield Fault(f"snapshot {snapshot.id}", None, "differs from the stored manifest")

    def verify_layer(self, layer: LayerRef) -> Iterator[Fault]:
        """Read every byte of a layer and yield what is bad."""
        with self._pins.held([layer.id]):
            yield from self._layers.verify(layer.id)

    def verify_memory(self, memory: MemoryRef) -> Iterator[Fault]:
        """Read every byte of a memory image and yield what is bad."""
        try:
            self.verify_image(memory)
        except IntegrityError as error:
            path = error.details.get("path")
            known = path.encode() if isinstance(path, str) else None
            yield Fault(f"memory {memory.id}", known, error.message)

    # -- looking ----------------------------------------------------------------------------
    def _manifests(self, snapshot: Snapshot) -> list[Manifest]:
        return [self._manifest(layer.id) for layer in snapshot.layers]

    def _manifest(self, layer: str) -> Manifest:
        return self._layers.get(layer).manifest

    def diff(self, a: Snapshot, b: Snapshot) -> Iterator[Change]:
        """Differences from a to b as the session's file tree shows them."""
        return differences(self._manifests(a), self._manifests(b))

    def text_diff(self, a: Snapshot, b: Snapshot, path: bytes) -> str | None:
        """Unified diff of a file; None where it is no text or over 1 MiB."""
        old, new = self._content(a, path), self._content(b, path)
        return unified(path, old, new)

    def _content(self, snapshot: Snapshot, path: bytes) -> bytes | None:
        try:
            return self.read_file(snapshot, path)
        except FileMissing:
            return None

    def read_file(self, snapshot: Snapshot, path: bytes) -> bytes:
        """A regular file's content in a snapshot. Raises FileMissing, TooLarge above 4 MiB."""
        with self._pins.held(layer.id for layer in snapshot.layers):
            view = View(self._manifests(snapshot))
            return read_content(view, snapshot.layers, path, self.layer_path, _read_entry)

    # -- for exports and imports ------------------------------------------------------------
    def held(self, ids: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Keep layers and images from collection and eviction meanwhile."""
        return self._pins.held(ids)

    def present(self, id: str) -> bool:
        """Whether a layer or image lies on this disk."""
        return self._layers.whole(id) or self._images.present(id)

    def take_in(self, source: Source, layers: Iterable[str], images: Iterable[str]) -> None:
        """Take layers and images from `source`, those that are not here. Each is proven to be the
        one of its id and synced; the caller holds them until a snapshot refers to them."""
        with disk_errors("taking in an archive"):
            self._cache.take_in(source, layers, images)

    # -- damage -----------------------------------------------------------------------------
    def heal(self, layers: Sequence[LayerRef], memory: MemoryRef | None) -> list[str]:
        """Check these, and replace those that are damaged here and whole in the source. The names
        of those that were replaced. Raises what the source raises."""
        return self._healing.heal(layers, memory)

    def discard_damaged(self, in_use: set[str]) -> int:
        """Remove what `heal` set aside, but of layers that sandboxes run on. Returns the bytes
        freed."""
        return self._healing.discard(in_use)

    # -- as a cache -------------------------------------------------------------------------
    def usage(self) -> int:
        """Bytes on disk of layers and images; a file that several layers share counts once."""
        return self._cache.usage()

    def evict(self, limit_bytes: int, *, keep: set[str], durable: Callable[[str], bool]) -> int:
        """Give up the layers and images that were not used for longest, until `usage` is at most
        `limit_bytes`. Never one whose id is in `keep` (above all those in use by sandboxes), that
        is pinned by something under way, that was handed out within the last minute, that is a
        template's external tree, or that `durable` does not call safe in the source. Without a
        source nothing is given up. Returns the bytes freed."""
        return self._cache.evict(limit_bytes, keep, durable)


def _read_entry(tree: Path, path: bytes, entry: Entry) -> bytes:
    with Directories(tree) as held:
        fd, name = held.parent(path)
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
        with os.fdopen(file, "rb") as content:
            data = content.read(entry.size + 1)
    if len(data) != entry.size or blake3(data).digest() != entry.digest:
        raise IntegrityError("A stored file differs from what was put away.", path=repr(path))
    return data
