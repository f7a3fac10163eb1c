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
from collections.abc import Callable
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
from sojourn.store.fingerprints import EMPTY_DIGEST, hash_entry, hash_open_file, layer_digest
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
_FEW = 16  # syncing more files than this one by one costs more than syncing the file system

Since = tuple[Scan, LayerRef] | None


class Earlier:
    """What an earlier capture of the same upper tells about entries that did not change since."""

    def __init__(self, layers: Layers, since: Since, suspects: set[bytes]) -> None:
        self._suspects = {path.lstrip(b"/") for path in suspects}
        self._inodes: set[int] = set()
        self._scan: LocalScan | None = None
        self.layer = ""
        self.digests: dict[bytes, bytes] = {}
        if since is not None and isinstance(since[0], LocalScan):
            try:
                stored = layers.get(since[1].id)
            except IntegrityError:
                return  # nothing to share with: everything is taken anew
            self._scan = since[0]
            self.layer = stored.manifest.id
            self.digests = stored.manifest.digests

    def extra(self, path: bytes, facts: Facts) -> Extra | None:
        """Attributes and target, when the entry is the one seen then."""
        scan = self._scan
        if scan is None or scan.entries.get(path) != facts or path in scan.recent:
            return None
        return scan.extras.get(path)

    def note_suspects(self, scan: LocalScan) -> None:
        """Find the files behind the suspect paths, so that other names of them count too."""
        for path in self._suspects:
            facts = scan.entries.get(path)
            if facts is not None:
                self._inodes.add(facts[INODE])

    def suspect(self, facts: Facts) -> bool:
        """Whether the file may have been written without a sign."""
        return facts[INODE] in self._inodes

    def keeps(self, path: bytes, facts: Facts) -> bool:
        """Whether a regular file's content is the one of the earlier layer."""
        scan = self._scan
        return (
            scan is not None
            and scan.entries.get(path) == facts
            and path not in scan.recent
            and path in self.digests
            and facts[INODE] not in self._inodes
        )


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

    def look(self, upper: Path, earlier: Earlier) -> LocalScan:
        """Scan with everything a manifest needs."""
        scan = scan_tree(upper, self.window(upper), earlier.extra)
        if scan.torn:
            raise CaptureFailed("The session's files changed while they were captured.")
        earlier.note_suspects(scan)
        return scan

    def estimate(self, upper: Path, since: Since) -> int:
        """Bytes a live capture would copy now."""
        earlier = Earlier(self.layers, since, set())
        scan = scan_tree(upper, self.window(upper))
        total = 0
        seen: set[int] = set()
        for path, facts in scan.entries.items():
            if stat.S_ISREG(facts[MODE]) and facts[INODE] not in seen:
                if facts[NLINK] > 1:
                    seen.add(facts[INODE])
                if not earlier.keeps(path, facts):
                    total += facts[SIZE]
        return total

    def capture(self, upper: Path, since: Since, suspects: set[bytes]) -> PendingCapture:
        """Copy what changed; the sandbox is frozen meanwhile."""
        held = since[1].id if since is not None else ""
        if held:
            self.pins.hold(held)  # its files are shared at publishing
        try:
            with disk_errors("capturing the session's files"):
                directory = self.staging.new()
                try:
                    earlier = Earlier(self.layers, since, suspects)
                    scan = self.look(upper, earlier)
                    sources: dict[bytes, Shared | Staged] = {}
                    copied = self._copy(upper, scan, earlier, directory, sources)
                except BaseException:
                    self.staging.drop(directory)
                    raise
        except BaseException:
            if held:
                self.pins.release(held)
            raise
        return PendingCapture(self, scan, earlier, directory, sources, copied, held)

    def _copy(
        self,
        upper: Path,
        scan: LocalScan,
        earlier: Earlier,
        directory: Path,
        sources: dict[bytes, Shared | Staged],
    ) -> int:
        copied = 0
        number = 0
        firsts: dict[int, bytes] = {}
        files = [p for p, facts in scan.entries.items() if stat.S_ISREG(facts[MODE])]
        files.sort()  # the first of hard-linked names carries the content, as in the manifest
        with Directories(upper) as held:
            target_directory = open_directory(directory)
            try:
                for path in files:
                    facts = scan.entries[path]
                    if facts[NLINK] > 1 and firsts.setdefault(facts[INODE], path) != path:
                        continue
                    if earlier.keeps(path, facts):
                        sources[path] = Shared(earlier.layer, path)
                        continue
                    if facts[SIZE] == 0:
                        continue
                    name = b"%d" % number
                    number += 1
                    fd, own = held.parent(path)
                    copied += self._copy_file(
                        fd, own, facts, earlier.suspect(facts), target_directory, name
                    )
                    sources[path] = Staged(directory / name.decode())
            finally:
                os.close(target_directory)
        return copied

    def _copy_file(
        self, fd: int, name: bytes, facts: Facts, flush: bool, target_directory: int, copy: bytes
    ) -> int:
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
        return facts[SIZE]

    # -- publishing a tree ------------------------------------------------------------------
    def publish(
        self,
        directory: Path,
        manifest: Manifest,
        sources: dict[bytes, Shared | Staged],
        extras: Callable[[bytes], Extra | None],
    ) -> None:
        """Build a manifest's tree in a staging directory, prove it, sync it, move it in place."""
        if self.layers.present(manifest.id):
            self.layers.check(manifest.id)
            return
        whole = directory / "layer"
        whole.mkdir(mode=0o700)
        builder = Builder(
            whole / "fs", self.copier, lambda layer: self.layers.get(layer).tree, self.layers.trust
        )
        builder.build(manifest.entries, sources)

        def known(path: bytes, _: Facts) -> Extra | None:
            return extras(path)

        made = scan_tree(whole / "fs", 0, known)
        if manifest_of(made, manifest.digests).id != manifest.id:
            raise CaptureFailed(
                "The node's disk does not keep files as the session has them.",
                next_step="Use a file system with times in nanoseconds, attributes and hard links.",
                difference=_first_difference(manifest, manifest_of(made, manifest.digests)),
            )
        if builder.shared:
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
        earlier = Earlier(self.layers, since, suspects)
        with disk_errors("sealing the session's files"):
            scan = self.look(upper, earlier)
            digests: dict[bytes, bytes] = {}
            by_inode: dict[int, bytes] = {}
            with Directories(upper) as held:
                for path, facts in scan.entries.items():
                    if not stat.S_ISREG(facts[MODE]):
                        continue
                    if earlier.keeps(path, facts):
                        digests[path] = earlier.digests[path]
                        continue
                    digest = by_inode.get(facts[INODE])
                    if digest is None:
                        fd, name = held.parent(path)
                        digest = hash_entry(fd, name)
                        if facts[NLINK] > 1:
                            by_inode[facts[INODE]] = digest
                    digests[path] = digest
            manifest = manifest_of(scan, digests)
            self.pins.fresh(manifest.id)
            self._record(manifest, scan)
            # One sync of the file system covers everything below the upper, and the record.
            if upper.stat().st_dev != self._device:
                sync_filesystem(upper)
            sync_filesystem(self.sealed)
        if manifest.ref.entries == 0:
            self.pins.settle(manifest.id)  # no snapshot will name it
        scan.digests = manifest.digests
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
            scan = scan_tree(upper, 0, lambda path, facts: None)
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
        for place in self.sealed.iterdir():
            if not (place / "fs").is_dir():
                continue
            manifest = _sealed_manifest(place)
            if manifest is not None and not self.layers.present(manifest.id):
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
    digests = {}
    with Directories(upper) as held:
        for path, facts in scan.entries.items():
            if stat.S_ISREG(facts[MODE]):
                fd, name = held.parent(path)
                digests[path] = hash_entry(fd, name)
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
        sources: dict[bytes, Shared | Staged],
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
        self._sources = sources
        self._ref: LayerRef | None = None

    def publish(self) -> LayerRef:
        """Hash, put together, sync and publish. Raises StorageFull."""
        if self._ref is not None:
            return self._ref
        if self._directory is None:
            raise CaptureFailed("This capture was discarded.")
        scan, sources = self._scan, self._sources
        try:
            with disk_errors("storing the session's files"):
                manifest = manifest_of(scan, self._digests())
                self._captures.pins.fresh(manifest.id)
                self._captures.publish(self._directory, manifest, sources, self._known_extra)
        except BaseException:
            self.discard()
            raise
        self._ref = manifest.ref
        if self._ref.entries == 0:
            self._captures.pins.settle(manifest.id)  # no snapshot will name it
        scan.digests = manifest.digests
        self.discard()
        return self._ref

    def _digests(self) -> dict[bytes, bytes]:
        digests: dict[bytes, bytes] = {}
        by_inode: dict[int, bytes] = {}
        for path, source in self._sources.items():
            if isinstance(source, Shared):
                digest = self._earlier.digests[source.path]
            else:
                fd = os.open(source.file, _READ)
                try:
                    digest = hash_open_file(fd)
                finally:
                    os.close(fd)
            digests[path] = digest
            by_inode[self._scan.entries[path][INODE]] = digest
        for path, facts in self._scan.entries.items():
            if path not in digests and stat.S_ISREG(facts[MODE]):
                digests[path] = by_inode.get(facts[INODE], EMPTY_DIGEST)
        return digests

    def _known_extra(self, path: bytes) -> Extra | None:
        """Attributes of shared files were read when their layer was made."""
        if isinstance(self._sources.get(path), Shared):
            return self._scan.extras[path]
        return None

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
