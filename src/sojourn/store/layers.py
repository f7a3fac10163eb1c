"""Stored layers: reading their manifests, checking their trees, admitting new ones.

Guarantee: what stands under `layers/` is complete and synced, because a layer gets there by one
rename after everything in it is on disk. A layer's tree is given out only when its manifest is the
one of its id.

    layers/<short>/manifest   canonical entries (checked file)
    layers/<short>/index      the host's view of the tree (a cache)
    layers/<short>/fs         the tree, or
    layers/<short>/source     where an external, immutable tree lies (templates)

`<short>` is the first 20 hex digits of the id, which keeps overlay mount options short.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from sojourn.errors import IntegrityError
from sojourn.store.base import Fault
from sojourn.store.copying import sync_path
from sojourn.store.envelopes import read_checked
from sojourn.store.fingerprints import hash_entry
from sojourn.store.indexes import LinkLedger, Row, read_index, row_of, write_index
from sojourn.store.manifests import DIRECTORY, FILE, WHITEOUT, Entry, Manifest, manifest_of
from sojourn.store.trees import (
    CTIME,
    INODE,
    SIZE,
    Directories,
    Facts,
    LocalScan,
    facts_of,
    join,
    names_in,
    open_below,
    open_directory,
    read_extra,
    scan_tree,
    split,
)

MANIFEST, SOURCE = b"LAYR", b"TREE"
SHORT = 20
_CACHED_ENTRIES = 400_000


class Stored:
    """One stored layer: its directory, tree, manifest and the host's view of it."""

    def __init__(self, directory: Path, tree: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.tree = tree
        self.manifest = manifest
        self.rows: list[Row] | None = None
        self.mark: tuple[int, ...] | None = None  # the manifest's file as it was read
        self.listings = listings_of(manifest)
        self.lock = threading.Lock()


Listings = dict[bytes, dict[bytes, int]]


def listings_of(manifest: Manifest) -> Listings:
    """For each directory the names in it, each with the number of its entry."""
    grouped: dict[bytes, dict[bytes, int]] = {}
    for number, entry in enumerate(manifest.entries):
        if entry.type == DIRECTORY:
            grouped[entry.path] = {}
        if number:
            directory, name = split(entry.path)
            grouped[directory][name] = number
    return grouped


def object_name(layer: str) -> str:
    """How errors and faults name a layer."""
    return f"layer {layer}"


class Layers:
    """The layers of one store."""

    def __init__(self, root: Path, ledger: LinkLedger) -> None:
        self.root = root
        self.ledger = ledger
        self._cache: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()
        # Set by the store's cache: brings a layer that is not here, notes that one is used.
        self.bring: Callable[[str], None] | None = None
        self.note_use: Callable[[Path], None] | None = None
        self.note_shared: Callable[[set[str]], None] | None = None

    def directory(self, layer: str) -> Path:
        """Where a layer lies or would lie."""
        if len(layer) != 64 or not set(layer) <= set("0123456789abcdef"):
            raise IntegrityError(f"{layer!r} is not a layer id.", object=object_name(layer))
        return self.root / layer[:SHORT]

    def present(self, layer: str) -> bool:
        """Whether the layer stands in the store (by name; `get` proves it)."""
        return (self.directory(layer) / "manifest").exists()

    def whole(self, layer: str) -> bool:
        """Whether the layer stands in the store together with its tree, wherever that lies."""
        directory = self.directory(layer)
        if not (directory / "manifest").exists():
            return False
        if (directory / "fs").is_dir():
            return True
        try:
            source = read_checked(SOURCE, directory / "source", object_name(layer))
        except FileNotFoundError:
            return False
        return Path(os.fsdecode(source)).is_dir()

    def get(self, layer: str, *, bring: bool = True) -> Stored:
        """A layer with its checked manifest. Where the store has a source, a layer that is not here
        is brought first, unless `bring` is false. Raises IntegrityError, or what the source
        raises."""
        stored = self._get(layer, bring)
        if self.note_use is not None:
            self.note_use(stored.directory)
        return stored

    def _get(self, layer: str, bring: bool) -> Stored:
        with self._lock:
            found = self._cache.get(layer)
            if found is not None:
                self._cache.move_to_end(layer)
        if found is not None:
            known = found.mark is not None and found.mark == _mark(found.directory)
            if known and found.tree.is_dir():
                return found
            self.drop(layer)
        if bring and self.bring is not None and not self.whole(layer):
            self.bring(layer)
        directory = self.directory(layer)
        name = object_name(layer)
        mark = _mark(directory)
        manifest = read_manifest(directory, layer)
        tree = directory / "fs"
        if not tree.is_dir():
            try:
                tree = Path(os.fsdecode(read_checked(SOURCE, directory / "source", name)))
            except FileNotFoundError:
                raise IntegrityError(f"The tree of {name} is missing.", object=name) from None
            if not tree.is_dir():
                raise IntegrityError(f"{tree}, the tree of {name}, is missing.", object=name)
        found = Stored(directory, tree, manifest)
        found.mark = mark
        with self._lock:
            self._cache[layer] = found
            total = sum(len(s.manifest.entries) for s in self._cache.values())
            while total > _CACHED_ENTRIES and len(self._cache) > 1:
                _, old = self._cache.popitem(last=False)
                total -= len(old.manifest.entries)
        return found

    def drop(self, layer: str) -> None:
        """Forget what is remembered of a layer."""
        with self._lock:
            self._cache.pop(layer, None)

    def shared_from(self, layers: set[str]) -> None:
        """Files of these layers were shared with another one."""
        if self.note_shared is not None:
            self.note_shared(layers)

    def rows(self, stored: Stored) -> list[Row] | None:
        """The host's recorded view; None when it is lost."""
        if stored.rows is None:
            stored.rows = read_index(
                stored.directory / "index",
                len(stored.manifest.entries),
                object_name(stored.manifest.id),
            )
        return stored.rows

    # -- checking ---------------------------------------------------------------------------
    def check(self, layer: str) -> None:
        """The quick check before use. Raises IntegrityError naming layer and path."""
        stored = self.get(layer)
        with stored.lock:
            rows = self.rows(stored)
            try:
                fresh = self.check_tree(stored.manifest, stored.tree, stored.listings, rows)
            except OSError as error:  # an entry that went away, a disk that cannot read it
                name = object_name(layer)
                raise IntegrityError(
                    f"{name} cannot be read: {error.strerror}.", object=name
                ) from error
            if fresh is not None:
                stored.rows = fresh
                # The index only saves time: a full disk must not stop a layer from being used.
                with contextlib.suppress(OSError):
                    write_index(stored.directory / "index", fresh, sync=False)

    def check_tree(
        self,
        manifest: Manifest,
        tree: Path,
        listings: Listings,
        rows: list[Row] | None,
    ) -> list[Row] | None:
        """Compare a tree with its manifest and index; read again what was touched.

        Returns new rows when the index is out of date. Raises IntegrityError.
        """
        name = object_name(manifest.id)
        touched: dict[int, Facts] = {}
        moved: dict[int, int] = {}  # entries whose change time the store itself moved
        times = self.ledger.get
        try:
            base = open_directory(tree)
        except FileNotFoundError:
            raise IntegrityError(f"The tree of {name} is missing.", object=name) from None
        try:
            s = os.fstat(base)
            if rows is None or row_of(facts_of(s)) != rows[0]:
                touched[0] = facts_of(s)
            for directory, listing in listings.items():
                fd = _enter(base, directory, name)
                try:
                    names = names_in(fd)
                    if len(names) != len(listing):
                        _name_difference(directory, set(names), set(listing), name)
                    for entry in names:
                        number = listing.get(entry)
                        if number is None:
                            _name_difference(directory, set(names), set(listing), name)
                            continue
                        s = os.stat(entry, dir_fd=fd, follow_symlinks=False)
                        row = (
                            s.st_ino,
                            s.st_ctime_ns,
                            s.st_mode,
                            s.st_uid,
                            s.st_gid,
                            s.st_size,
                            s.st_mtime_ns,
                        )
                        if rows is None:
                            touched[number] = facts_of(s)
                        elif row != rows[number]:
                            old = rows[number]
                            if (
                                times(s.st_ino) == s.st_ctime_ns
                                and old[0] == s.st_ino
                                and old[2:] == row[2:]
                            ):
                                moved[number] = s.st_ctime_ns
                            else:
                                touched[number] = facts_of(s)
                finally:
                    os.close(fd)
            if touched:
                self._check_touched(manifest, tree, touched)
        finally:
            os.close(base)
        if not touched and not moved:
            return None
        fresh: list[Row] = list(rows) if rows is not None else [()] * len(manifest.entries)
        for number, facts in touched.items():
            fresh[number] = row_of(facts)
        for number, changed in moved.items():
            old = fresh[number]
            fresh[number] = (old[0], changed, *old[2:])
        return fresh

    def _check_touched(self, manifest: Manifest, tree: Path, touched: dict[int, Facts]) -> None:
        name = object_name(manifest.id)
        entries = manifest.entries
        with Directories(tree) as held:
            inodes: dict[bytes, int] = {}
            for number in sorted(touched):
                entry, facts = entries[number], touched[number]
                cause = self._difference(entry, facts, held, inodes)
                if cause is not None:
                    raise IntegrityError(
                        f"{cause} differs in {name}.",
                        object=name,
                        path="/" + os.fsdecode(entry.path),
                    )

    @staticmethod
    def _difference(
        entry: Entry, facts: Facts, held: Directories, inodes: dict[bytes, int]
    ) -> str | None:
        """What of an entry on disk is not as its manifest says, content included."""
        fd, name = held.parent(entry.path) if entry.path else (held.get(b""), b"")
        if entry.type == FILE and facts[SIZE] != entry.size:
            return "size"
        probe = LocalScan(0, 0)
        probe.entries[entry.path] = facts
        probe.extras[entry.path] = read_extra(fd, name, facts[0])
        seen = manifest_of(probe, {entry.path: entry.digest}).entries[0]
        if entry.type == WHITEOUT and seen.type == FILE:
            # The attribute form of a whiteout shows only together with its directory's mark.
            return None if facts[SIZE] == 0 and seen.xattrs else "type"
        for field, what in _COMPARED:
            if getattr(seen, field) != getattr(entry, field):
                return what
        if entry.type not in (DIRECTORY, WHITEOUT):
            inodes[entry.path] = facts[INODE]
            if entry.link is not None:
                first = inodes.get(entry.link)
                if first is None:
                    where, other = held.parent(entry.link)
                    first = os.stat(other, dir_fd=where, follow_symlinks=False).st_ino
                    fd, name = held.parent(entry.path)
                if first != facts[INODE]:
                    return "hard link"
        if entry.type == FILE and entry.link is None and hash_entry(fd, name) != entry.digest:
            return "content"
        return None

    def verify(self, layer: str) -> Iterator[Fault]:
        """Read every byte of a layer and yield what is bad."""
        name = object_name(layer)
        try:
            stored = self.get(layer)
            read_manifest(stored.directory, layer)  # what is held in memory proves no disk
        except IntegrityError as error:
            yield Fault(name, None, error.message)
            return
        manifest = stored.manifest
        scan = scan_tree(stored.tree, 0)
        with Directories(stored.tree) as held:
            inodes: dict[bytes, int] = {}
            for entry in manifest.entries:
                facts = scan.entries.get(entry.path)
                path = b"/" + entry.path
                if facts is None:
                    yield Fault(name, path, "missing")
                    continue
                try:
                    cause = self._difference(entry, facts, held, inodes)
                except OSError as error:
                    cause = f"unreadable ({error.strerror})"
                if cause is not None:
                    yield Fault(name, path, f"{cause} differs" if "(" not in cause else cause)
        known = manifest.by_path
        for path in sorted(scan.entries):
            if path not in known:
                yield Fault(name, b"/" + path, "not in the manifest")

    def trust(
        self, stored: Stored, path: bytes, s: os.stat_result, directory: int, name: bytes
    ) -> None:
        """Let a stored file be shared: untouched by the host's record, or read and found right.

        Raises IntegrityError.
        """
        rows = self.rows(stored)
        parent, own = split(path)
        number = stored.listings.get(parent, {}).get(own)
        facts = facts_of(s)
        if rows is not None and number is not None:
            row, seen = rows[number], row_of(facts)
            if row == seen:
                return
            same = row[0] == seen[0] and row[2:] == seen[2:]
            if same and self.ledger.get(s.st_ino) == facts[CTIME]:
                return
        entry = stored.manifest.by_path.get(path)
        if entry is None or hash_entry(directory, name) != entry.digest:
            layer = object_name(stored.manifest.id)
            raise IntegrityError(
                f"content differs in {layer}.",
                object=layer,
                path="/" + os.fsdecode(path),
            )

    # -- admission --------------------------------------------------------------------------
    def admit(self, staged: Path, layer: str) -> bool:
        """Move a complete, synced directory to its place. False when the layer was there."""
        place = self.directory(layer)
        if self.present(layer):
            self.get(layer)  # raises when another id holds the short name
            return False
        try:
            staged.rename(place)
        except OSError:
            if not self.present(layer):
                raise
            return False
        sync_path(self.root)
        return True


_COMPARED = (
    ("type", "type"),
    ("mode", "mode"),
    ("uid", "owner"),
    ("gid", "owner"),
    ("size", "size"),
    ("mtime_s", "mtime"),
    ("mtime_ns", "mtime"),
    ("target", "link target"),
    ("major", "device"),
    ("minor", "device"),
    ("xattrs", "attributes"),
)


def _mark(directory: Path) -> tuple[int, ...] | None:
    """What of a manifest's file changes with any write to it."""
    try:
        facts = (directory / "manifest").stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def read_manifest(directory: Path, layer: str) -> Manifest:
    """Read and check the manifest in a layer's directory. Raises IntegrityError."""
    name = object_name(layer)
    try:
        payload = read_checked(MANIFEST, directory / "manifest", name)
    except FileNotFoundError:
        raise IntegrityError(f"{name} is missing.", object=name) from None
    return Manifest.decode(payload, name, layer)


def _enter(base: int, directory: bytes, name: str) -> int:
    try:
        return open_below(base, directory)
    except OSError as error:
        raise IntegrityError(
            f"A directory of {name} cannot be read: {error.strerror}.",
            object=name,
            path="/" + os.fsdecode(directory),
        ) from error


def _name_difference(directory: bytes, found: set[bytes], known: set[bytes], name: str) -> None:
    missing = sorted(known - found)
    path = join(directory, missing[0] if missing else min(found - known))
    what = "is missing from" if missing else "does not belong to"
    raise IntegrityError(f"An entry {what} {name}.", object=name, path="/" + os.fsdecode(path))
