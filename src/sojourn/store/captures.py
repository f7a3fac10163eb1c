"""Taking layers from a session's upper directory: copied while it lives on, or sealed in place.

Guarantee: a layer is exactly the upper at the frozen instant. Nothing is published before it is
whole and synced; a failure leaves the upper and all older layers untouched and nothing of itself.

A live capture only looks and copies what changed while the sandbox is frozen (`capture`); the tree
is put together, hashed and synced afterwards (`PendingCapture.publish`), sharing unchanged files
with the previous capture's layer, which is immutable.

Sealing hashes in place and records manifest and index durably under `sealed/<short>`; `take` then
moves the upper there and the whole into `layers/`. Every step can be repeated after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sojourn.errors import CaptureFailed, IntegrityError
from sojourn.model.snapshots import LayerRef
from sojourn.store.base import Scan
from sojourn.store.building import Builder, Shared, Staged
from sojourn.store.copying import (
    Copier,
    disk_errors,
    flush_mapped,
    sync_filesystem,
    sync_path,
)
from sojourn.store.envelopes import read_checked, write_checked
from sojourn.store.fingerprints import hash_entry, hash_open_file, layer_digest
from sojourn.store.indexes import read_index, row_of, write_index
from sojourn.store.layers import (
    MANIFEST,
    SHORT,
    Layers,
    listings_of,
    object_name,
    read_manifest,
)
from sojourn.store.manifests import Manifest, manifest_of
from sojourn.store.staging import Pins, Staging
from sojourn.store.trees import (
    COARSE_WINDOW_NS,
    CTIME,
    INODE,
    MODE,
    NLINK,
    SIZE,
    Directories,
    Extra,
    Facts,
    LocalScan,
    facts_of,
    open_directory,
    scan_tree,
)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_BATCH, _HASHERS = 256, 2  # files hashed by one thread at a time
_FEW = 16  # syncing more files than this one by one costs more than syncing the file system

Since = tuple[Scan, LayerRef] | None


class Earlier:
    """What an earlier capture of the same upper tells about entries that did not change since."""

    def __init__(self, layers: Layers, since: Since) -> None:
        self.scan: LocalScan | None = None
        self.layer = ""
        self.digests: dict[bytes, bytes] = {}
        self.manifest: Manifest | None = None
        if since is None or not isinstance(since[0], LocalScan):
            return
        # A scan vouches only for the layer that was made from it.
        if since[0].layer == since[1].id:
            # Without the layer there is nothing to share with: everything is taken anew. It is
            # not brought from elsewhere either, because a sandbox is frozen meanwhile.
            with contextlib.suppress(IntegrityError):
                stored = layers.get(since[1].id, bring=False)
                self.scan = since[0]
                self.layer = stored.manifest.id
                self.digests = stored.manifest.digests
                self.manifest = stored.manifest

    def unchanged(self, scan: LocalScan) -> Manifest | None:
        """The earlier layer's manifest where a scan that was compared with it differs in nothing.

        An entry that came is among the changed; one that went moved its directory's times."""
        if self.scan is None or scan.changed or len(scan.entries) != len(self.scan.entries):
            return None
        return self.manifest


class Captures:
    """Makes layers out of upper directories."""

    def __init__(
        self, layers: Layers, sealed: Path, staging: Staging, pins: Pins, window_ns: int
    ) -> None:
        self.layers = layers
        self.sealed = sealed
        self.staging = staging
        self.pins = pins
        self.window_ns = window_ns
        self.copier = Copier()
        self._device = sealed.stat().st_dev

    def window(self, upper: Path) -> int:
        """The window of unsure change times on the upper's file system."""
        if self.window_ns or upper.stat().st_dev == self._device:
            return self.window_ns
        return COARSE_WINDOW_NS

    def _look(self, upper: Path, earlier: Earlier) -> LocalScan:
        """Scan with everything a manifest needs."""
        scan = scan_tree(upper, self.window(upper), full=True, earlier=earlier.scan)
        if scan.torn:
            raise CaptureFailed("The session's files changed while they were captured.")
        return scan

    @staticmethod
    def _suspect_inodes(scan: LocalScan, suspects: set[bytes]) -> set[int]:
        """The files behind the suspect paths: their other names are suspect too."""
        found = (scan.entries.get(path.lstrip(b"/")) for path in suspects)
        return {facts[INODE] for facts in found if facts is not None}

    @staticmethod
    def _fresh_files(scan: LocalScan, suspects: set[int]) -> list[bytes]:
        """Regular files whose content must be taken or read anew."""
        entries = scan.entries
        fresh = [path for path in scan.changed if stat.S_ISREG(entries[path][MODE])]
        if suspects:
            seen = set(fresh)
            for path, facts in entries.items():
                if facts[INODE] in suspects and path not in seen and stat.S_ISREG(facts[MODE]):
                    fresh.append(path)
        return fresh

    def capture(self, upper: Path, since: Since, suspects: set[bytes]) -> PendingCapture:
        """Copy what changed; the sandbox is frozen meanwhile."""
        held = since[1].id if since is not None else ""
        if held:
            self.pins.hold(held)  # its files are shared at publishing
        try:
            with disk_errors("capturing the session's files"):
                directory = self.staging.new()
                try:
                    earlier = Earlier(self.layers, since)
                    scan = self._look(upper, earlier)
                    copies, copied = self._copy(upper, scan, suspects, directory)
                except BaseException:
                    self.staging.drop(directory)
                    raise
        except BaseException:
            if held:
                self.pins.release(held)
            raise
        return PendingCapture(self, scan, earlier, directory, copies, copied, held)

    def _copy(
        self,
        upper: Path,
        scan: LocalScan,
        suspects: set[bytes],
        directory: Path,
    ) -> tuple[dict[int, Path], int]:
        """Copy the files that changed since the earlier capture: where, by inode; bytes."""
        flush = self._suspect_inodes(scan, suspects)
        copies: dict[int, Path] = {}
        copied = 0
        with Directories(upper) as held:
            target_directory = open_directory(directory)
            try:
                for path in self._fresh_files(scan, flush):
                    facts = scan.entries[path]
                    inode = facts[INODE]
                    if inode in copies:
                        continue
                    name = b"%d" % len(copies)
                    copies[inode] = directory / name.decode()
                    if facts[SIZE] == 0:
                        os.close(os.open(name, _CREATE, 0o600, dir_fd=target_directory))
                        continue
                    fd, own = held.parent(path)
                    self._copy_file(fd, own, facts, inode in flush, target_directory, name)
                    copied += facts[SIZE]
            finally:
                os.close(target_directory)
        return copies, copied

    def _copy_file(
        self, fd: int, name: bytes, facts: Facts, flush: bool, target_directory: int, copy: bytes
    ) -> None:
        source = os.open(name, _READ, dir_fd=fd)
        try:
            s = os.fstat(source)
            if s.st_ino != facts[INODE]:
                raise CaptureFailed("A file was replaced while it was captured.", path=repr(name))
            if flush:
                flush_mapped(source)
            target = os.open(copy, _CREATE, 0o600, dir_fd=target_directory)
            try:
                self.copier.copy(source, target, facts[SIZE], s.st_blocks * 512)
                if os.fstat(target).st_size != facts[SIZE]:
                    raise CaptureFailed("A file shrank while it was captured.", path=repr(name))
            finally:
                os.close(target)
        finally:
            os.close(source)

    # -- publishing a tree ------------------------------------------------------------------
    def publish(
        self,
        directory: Path,
        manifest: Manifest,
        sources: dict[bytes, Shared | Staged],
        extras: Mapping[bytes, Extra],
    ) -> None:
        """Build a manifest's tree in a staging directory, prove it, sync it, move it in place."""
        if self.layers.present(manifest.id):
            self.layers.check(manifest.id)
            return
        whole = directory / "layer"
        whole.mkdir(mode=0o700)
        builder = Builder(whole / "fs", self.copier, self.layers.get, self.layers.trust)
        builder.build(manifest.entries, sources)
        made = scan_tree(whole / "fs", 0, full=True, extras=extras)
        if manifest_of(made, manifest.digests).id != manifest.id:
            raise CaptureFailed(
                "The node's disk does not keep files as the session has them.",
                next_step="Use a file system with times in nanoseconds, attributes and hard links.",
                difference=_first_difference(manifest, manifest_of(made, manifest.digests)),
            )
        if builder.shared:
            self.layers.shared_from(
                {source.layer for source in sources.values() if isinstance(source, Shared)}
            )
            self.layers.ledger.record(
                {
                    facts[INODE]: facts[CTIME]
                    for facts in made.entries.values()
                    if facts[INODE] in builder.shared
                }
            )
        write_checked(MANIFEST, whole / "manifest", manifest.encoded)
        rows = [row_of(made.entries[entry.path]) for entry in manifest.entries]
        write_index(whole / "index", rows, sync=False)
        if builder.new > _FEW:
            sync_filesystem(whole)
        else:
            self._sync_few(whole, manifest, sources, made)
        self.layers.admit(whole, manifest.id)

    @staticmethod
    def _sync_few(
        whole: Path,
        manifest: Manifest,
        sources: dict[bytes, Shared | Staged],
        made: LocalScan,
    ) -> None:
        with Directories(whole / "fs") as held:
            for entry in manifest.entries:
                facts = made.entries[entry.path]
                if stat.S_ISDIR(facts[MODE]):
                    os.fsync(held.get(entry.path))
                elif stat.S_ISREG(facts[MODE]) and not isinstance(sources.get(entry.path), Shared):
                    fd, name = held.parent(entry.path)
                    file = os.open(name, _READ, dir_fd=fd)
                    try:
                        os.fsync(file)
                    finally:
                        os.close(file)
        sync_path(whole)

    # -- sealing in place -------------------------------------------------------------------
    def seal(self, upper: Path, since: Since, suspects: set[bytes]) -> SealedUpper:
        """Hash a frozen upper in place, sync it, and record its manifest durably."""
        earlier = Earlier(self.layers, since)
        with disk_errors("sealing the session's files"):
            scan = self._look(upper, earlier)
            fresh = self._fresh_files(scan, self._suspect_inodes(scan, suspects))
            manifest = None if fresh else earlier.unchanged(scan)
            if manifest is None:
                manifest = manifest_of(scan, earlier.digests | _hash_files(upper, scan, fresh))
            self.pins.fresh(manifest.id)
            self._record(manifest, scan)
            # One sync of the file system covers everything below the upper, and the record.
            if upper.stat().st_dev != self._device:
                sync_filesystem(upper)
            sync_filesystem(self.sealed)
        if manifest.ref.entries == 0:
            self.pins.settle(manifest.id)  # no snapshot will name it
        scan.digests, scan.layer = manifest.digests, manifest.id
        return SealedUpper(self, manifest.ref, scan, upper)

    def _record(self, manifest: Manifest, scan: LocalScan) -> None:
        place = self.sealed / manifest.id[:SHORT]
        staged = self.staging.new()
        try:
            write_checked(MANIFEST, staged / "manifest", manifest.encoded, sync=False)
            rows = [row_of(scan.entries[entry.path]) for entry in manifest.entries]
            write_index(staged / "index", rows, sync=False)
            if place.exists():
                read_manifest(place, manifest.id)  # the same content was sealed before
                (staged / "index").rename(place / "index")
                return
            staged.rename(place)
        finally:
            self.staging.drop(staged)

    def take(self, ref: LayerRef, upper: Path) -> LayerRef:
        """Move a sealed upper into the store. Repeatable after a crash at any point."""
        place = self.sealed / ref.id[:SHORT]
        self.pins.hold(ref.id)
        try:
            with disk_errors("putting the session's files away"):
                return self._take(ref, upper, place)
        finally:
            self.pins.release(ref.id)

    def _take(self, ref: LayerRef, upper: Path, place: Path) -> LayerRef:
        if self.layers.present(ref.id):
            self.layers.get(ref.id)
            if upper.is_dir() and self._matches(ref.id, upper, place):
                self.staging.trash(upper)
            self._forget(ref.id)
            return ref
        if not (place / "fs").exists():
            if not upper.is_dir():
                name = object_name(ref.id)
                raise IntegrityError(f"{name} is neither in the store nor at {upper}.", object=name)
            self._prove(ref, upper, place)
            try:
                upper.rename(place / "fs")
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                raise CaptureFailed(
                    "The session's files lie on another file system than the store.",
                    next_step="Keep sandboxes and store on one file system.",
                ) from error
            sync_path(upper.parent)
            self._note_move(ref.id, place)
            sync_path(place)
        self.layers.admit(place, ref.id)
        sync_path(self.sealed)
        return ref

    def _note_move(self, layer: str, place: Path) -> None:
        """Moving changed the root's change time: keep the index current. Only a cache."""
        entries = read_manifest(place, layer).entries
        rows = read_index(place / "index", len(entries), object_name(layer))
        if rows is not None:
            rows[0] = row_of(facts_of((place / "fs").stat()))
            with contextlib.suppress(OSError):
                write_index(place / "index", rows, sync=False)

    def _prove(self, ref: LayerRef, upper: Path, place: Path) -> None:
        """Refuse an upper that is not what was sealed. Raises IntegrityError."""
        name = object_name(ref.id)
        if not (place / "manifest").exists():
            # The record is lost: make it again from the upper, which must then have the same id.
            scan = scan_tree(upper, 0, full=True)
            manifest = manifest_of(scan, _hash_all(upper, scan))
            if manifest.id != ref.id:
                raise IntegrityError(f"What lies at {upper} is not {name}.", object=name)
            self._record(manifest, scan)
            sync_filesystem(self.sealed)
            return
        manifest = read_manifest(place, ref.id)
        rows = read_index(place / "index", len(manifest.entries), name)
        fresh = self.layers.check_tree(manifest, upper, listings_of(manifest), rows)
        if fresh is not None:
            write_index(place / "index", fresh, sync=False)

    def _matches(self, layer: str, upper: Path, place: Path) -> bool:
        """Whether an upper is a second copy of a stored layer (and not the next one)."""
        manifest = self.layers.get(layer).manifest
        rows = None
        if (place / "manifest").exists():
            rows = read_index(place / "index", len(manifest.entries), object_name(layer))
        try:
            self.layers.check_tree(manifest, upper, listings_of(manifest), rows)
        except IntegrityError:
            return False
        return True

    def _forget(self, layer: str) -> None:
        """Drop the record of a sealed layer that is not to be taken (any more)."""
        place = self.sealed / layer[:SHORT]
        if place.exists() and not (place / "fs").exists():
            self.staging.trash(place)

    def discard_seal(self, layer: str) -> None:
        """Give up a sealing that was not taken."""
        if not self.layers.present(layer):
            self.pins.settle(layer)
        self._forget(layer)

    def finish(self) -> None:
        """After a crash: complete the takes whose upper was already moved."""
        for place in sorted(self.sealed.iterdir()):
            manifest = _sealed_manifest(place)
            if manifest is None:
                continue  # left to `take_layer`, which can do without, and to the collection
            if self.layers.present(manifest.id):
                self.staging.trash(place)  # stored by a copy meanwhile
            elif (place / "fs").is_dir():
                self.layers.admit(place, manifest.id)

    def sealed_here(self, layer: str) -> bool:
        """Whether a layer is sealed and durable, though perhaps not taken yet."""
        place = self.sealed / layer[:SHORT]
        if not (place / "manifest").exists():
            return False
        read_manifest(place, layer)
        return True


def _sealed_manifest(place: Path) -> Manifest | None:
    """The manifest of a sealed record, whatever its id; None when it cannot be read."""
    try:
        payload = read_checked(MANIFEST, place / "manifest", str(place.name))
        return Manifest.decode(payload, str(place.name), layer_digest(payload).hex())
    except (IntegrityError, FileNotFoundError):
        return None


def _hash_all(upper: Path, scan: LocalScan) -> dict[bytes, bytes]:
    regular = [path for path, facts in scan.entries.items() if stat.S_ISREG(facts[MODE])]
    return _hash_files(upper, scan, regular)


def _hash_files(upper: Path, scan: LocalScan, paths: list[bytes]) -> dict[bytes, bytes]:
    """Content hashes of regular files. Opening, reading and closing let other threads run."""
    paths = sorted(paths)  # those of one directory together
    if len(paths) <= _BATCH:
        return _hash_batch(upper, scan, paths)
    digests: dict[bytes, bytes] = {}
    batches = [paths[at : at + _BATCH] for at in range(0, len(paths), _BATCH)]
    with ThreadPoolExecutor(_HASHERS) as pool:
        for found in pool.map(lambda batch: _hash_batch(upper, scan, batch), batches):
            digests.update(found)
    return digests


def _hash_batch(upper: Path, scan: LocalScan, paths: list[bytes]) -> dict[bytes, bytes]:
    digests: dict[bytes, bytes] = {}
    by_inode: dict[int, bytes] = {}
    with Directories(upper) as held:
        for path in paths:
            facts = scan.entries[path]
            digest = by_inode.get(facts[INODE])
            if digest is None:
                fd, name = held.parent(path)
                digest = hash_entry(fd, name)
                if facts[NLINK] > 1:
                    by_inode[facts[INODE]] = digest
            digests[path] = digest
    return digests


def _first_difference(wanted: Manifest, made: Manifest) -> str:
    found = made.by_path
    for entry in wanted.entries:
        if found.get(entry.path) != entry:
            return f"{entry!r} became {found.get(entry.path)!r}"
    return "an entry too many"


class PendingCapture:
    """A captured copy that is not yet published. Implements `PendingLayer`."""

    def __init__(
        self,
        captures: Captures,
        scan: LocalScan,
        earlier: Earlier,
        directory: Path,
        copies: dict[int, Path],
        copied: int,
        held: str,
    ) -> None:
        self._held = held
        self.scan: Scan = scan
        self.copied_bytes = copied
        self._scan = scan
        self._captures = captures
        self._earlier = earlier
        self._directory: Path | None = directory
        self._copies = copies
        self._ref: LayerRef | None = None

    def publish(self) -> LayerRef:
        """Hash, put together, sync and publish. Raises StorageFull."""
        if self._ref is not None:
            return self._ref
        if self._directory is None:
            raise CaptureFailed("This capture was discarded.")
        scan = self._scan
        try:
            with disk_errors("storing the session's files"):
                digests, sources, extras = self._contents()
                manifest = manifest_of(scan, digests)
                self._captures.pins.fresh(manifest.id)
                self._captures.publish(self._directory, manifest, sources, extras)
        except BaseException:
            self.discard()
            raise
        self._ref = manifest.ref
        if self._ref.entries == 0:
            self._captures.pins.settle(manifest.id)  # no snapshot will name it
        scan.digests, scan.layer = manifest.digests, manifest.id
        self.discard()
        return self._ref

    def _contents(
        self,
    ) -> tuple[dict[bytes, bytes], dict[bytes, Shared | Staged], dict[bytes, Extra]]:
        """Of every regular file the hash and where its content is; attributes of shared ones,
        which were read when their layer was made."""
        digests: dict[bytes, bytes] = {}
        sources: dict[bytes, Shared | Staged] = {}
        extras: dict[bytes, Extra] = {}
        copied: dict[int, bytes] = {}
        for inode, file in self._copies.items():
            fd = os.open(file, _READ)
            try:
                copied[inode] = hash_open_file(fd)
            finally:
                os.close(fd)
        entries = self._scan.entries
        placed: set[int] = set()  # the first name in order carries the content
        for path in sorted(path for path, f in entries.items() if stat.S_ISREG(f[MODE])):
            inode = entries[path][INODE]
            digest = copied.get(inode)
            if digest is not None:
                if inode not in placed:
                    placed.add(inode)
                    sources[path] = Staged(self._copies[inode])
            else:
                digest = self._earlier.digests.get(path)
                if digest is None:
                    continue  # an empty file that stands for a whiteout
                sources[path] = Shared(self._earlier.layer, path)
                extras[path] = self._scan.extras[path]
            digests[path] = digest
        return digests, sources, extras

    def discard(self) -> None:
        """Drop the copy. Idempotent."""
        if self._directory is not None:
            self._captures.staging.drop(self._directory)
            self._directory = None
            if self._held:
                self._captures.pins.release(self._held)


class SealedUpper:
    """An upper that was hashed in place. Implements `SealedLayer`."""

    def __init__(self, captures: Captures, ref: LayerRef, scan: LocalScan, upper: Path) -> None:
        self.ref = ref
        self.scan: Scan = scan
        self._captures = captures
        self._upper = upper

    def take(self) -> LayerRef:
        """Move the (now unmounted) upper into the store and sync. Idempotent."""
        return self._captures.take(self.ref, self._upper)

    def discard(self) -> None:
        """Give up sealing: the upper stays as it is, its record goes. Idempotent."""
        self._captures.discard_seal(self.ref.id)
