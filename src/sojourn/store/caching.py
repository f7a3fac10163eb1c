"""The store as a cache: bringing what is not here from a source, and giving up what was not used.

Guarantee: a layer or image that is brought stands in its place only after all of it was proven to
be the one of its id and synced; however many ask at once, it is fetched once, and a failed fetch
leaves nothing and reaches each of them as the source's own error. Only what the caller calls
durable is given up, whole, the least recently used first, and never what is pinned, kept by the
caller, a template's external tree, or was handed out a moment ago.

Last use is kept in memory and, at most once a minute, as the time of an empty file `used` beside
the manifest, so that it outlives the process. A disk that refuses the mark only costs the order.

Bytes are blocks on disk. Layers share files by hard links, so a file counts once however many
layers name it, and goes only with the last of them. What an object holds is looked at once and
remembered (it never changes), until another layer shares files of it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec

from sojourn.errors import IntegrityError, StoreUnreachable
from sojourn.model.snapshots import MemoryRef
from sojourn.store.base import Source
from sojourn.store.copying import disk_errors, sync_filesystem, sync_path
from sojourn.store.envelopes import read_checked, write_checked
from sojourn.store.fingerprints import image_digest, layer_digest
from sojourn.store.images import Images
from sojourn.store.images import object_name as image_name
from sojourn.store.indexes import row_of, write_index
from sojourn.store.layers import MANIFEST, SHORT, Layers, object_name
from sojourn.store.manifests import Manifest, manifest_of
from sojourn.store.staging import Pins, Staging
from sojourn.store.trees import (
    MODE,
    SIZE,
    LocalScan,
    names_in,
    open_below,
    open_directory,
    scan_tree,
)

MARK = "used"
_MARK_SECONDS = 60.0
_HANDED_OUT_SECONDS = 60.0  # between giving out a path and the caller's keeping it
_RELATED = 4  # local images a fetch may take pieces from


class Footprint(msgspec.Struct, frozen=True):
    """What an object holds on disk: bytes of its own, and of files with several names by inode."""

    own: int
    linked: dict[int, int]


class Cache:
    """Brings, counts and evicts the layers and images of one store."""

    def __init__(
        self,
        source: Source | None,
        layers: Layers,
        images: Images,
        staging: Staging,
        pins: Pins,
        grace: float,
    ) -> None:
        self._source = source
        self._layers = layers
        self._images = images
        self._staging = staging
        self._pins = pins
        self._handed_out = min(grace, _HANDED_OUT_SECONDS)
        self._lock = threading.Lock()
        self._running: dict[str, Future[None]] = {}
        self._used: dict[str, tuple[float, float, int]] = {}  # last use, last mark, wall clock
        self._footprints: dict[str, Footprint] = {}
        self._shared = 0  # how often a footprint was made void
        self._evicting = threading.Lock()
        layers.note_shared = self._note_shared
        if source is not None:
            layers.bring, layers.note_use = self._bring_layer, self._note_use
            images.bring, images.note_use = self._bring_image, self._note_use

    # -- what only the source has ---------------------------------------------------------------
    def elsewhere(self, layers: Iterable[str], image: str | None) -> set[str]:
        """What of these is not here but the source has. Asks it only about what is not here."""
        found: set[str] = set()
        if self._source is None:
            return found
        for layer in layers:
            if not self._layers.whole(layer) and self._source.has_layer(layer):
                found.add(layer)
        if image is not None and not self._images.present(image) and self._source.has_image(image):
            found.add(image)
        return found

    def replaceable(self, layer: str) -> bool:
        """Whether the source could give a layer again."""
        return self._source is not None and self._source.has_layer(layer)

    def replaceable_image(self, image: str) -> bool:
        """Whether the source could give a memory image again."""
        return self._source is not None and self._source.has_image(image)

    # -- bringing -------------------------------------------------------------------------------
    def _once(self, id: str, fetch: Callable[[str], None]) -> None:
        """Fetch, or wait for the fetch that is under way and share its end."""
        with self._lock:
            running = self._running.get(id)
            mine = running is None
            if running is None:
                running = self._running[id] = Future()
        if not mine:
            running.result()
            return
        try:
            with self._pins.held([id]):
                fetch(id)
        except BaseException as error:
            with self._lock:
                del self._running[id]
            running.set_exception(error)
            raise
        with self._lock:
            del self._running[id]
        running.set_result(None)

    def take_in(self, source: Source, layers: Iterable[str], images: Iterable[str]) -> None:
        """Bring what is not here from another source than the store's own."""
        for layer in layers:
            self._take(layer, self._layers.whole, lambda id: self._fetch_layer(id, source))
        for image in images:
            self._take(image, self._images.present, lambda id: self._fetch_image(id, source))

    def _take(self, id: str, here: Callable[[str], bool], fetch: Callable[[str], None]) -> None:
        # One that is just being brought from the store's own source may fail to come from there.
        for last in (False, True):
            if here(id):
                return
            with contextlib.suppress(*(() if last else (StoreUnreachable,))):
                self._once(id, fetch)

    def _bring_layer(self, layer: str) -> None:
        self._once(layer, lambda id: self._fetch_layer(id, self._source))

    def _fetch_layer(self, layer: str, source: Source | None) -> None:
        if source is None or self._layers.whole(layer) or not source.has_layer(layer):
            return
        name = object_name(layer)
        staged = self._staging.new()
        try:
            with disk_errors("fetching a layer"):
                whole = staged / "layer"
                whole.mkdir(mode=0o700)
                manifest = source.fetch_layer(layer, whole / "fs")
                made = scan_tree(whole / "fs", 0, full=True)
                if manifest.id != layer or not _is_tree_of(manifest, made):
                    raise IntegrityError(
                        f"What was fetched of {name} is not {name}.",
                        object=name,
                        next_step="Use a file system with times in nanoseconds, attributes and "
                        "hard links; check the object store.",
                    )
                write_checked(MANIFEST, whole / "manifest", manifest.encoded, sync=False)
                rows = [row_of(made.entries[entry.path]) for entry in manifest.entries]
                write_index(whole / "index", rows, sync=False)
                sync_filesystem(whole)
                place = self._layers.directory(layer)
                if place.exists() and not self._layers.whole(layer):
                    self._staging.trash(place)  # a template's record whose tree is gone
                self._layers.admit(whole, layer)
        finally:
            self._staging.drop(staged)

    def _bring_image(self, image: str) -> None:
        self._once(image, lambda id: self._fetch_image(id, self._source))

    def _fetch_image(self, image: str, source: Source | None) -> None:
        if source is None or self._images.present(image) or not source.has_image(image):
            return
        staged = self._staging.new()
        try:
            with disk_errors("fetching a memory image"):
                files = staged / "files"
                files.mkdir(mode=0o700)
                with self._relatives() as cached:
                    ref = source.fetch_image(image, files, cached)
                self._prove_image(image, ref, files)
                self._images.admit(staged, ref)
        finally:
            self._staging.drop(staged)

    @staticmethod
    def _prove_image(image: str, ref: MemoryRef, files: Path) -> None:
        """The source compared every byte; names and sizes are compared here."""
        scan = scan_tree(files, 0)
        found = {
            path: facts[SIZE]
            for path, facts in scan.entries.items()
            if not stat.S_ISDIR(facts[MODE])
        }
        wanted = {os.fsencode(file): size for file, (size, _) in ref.files.items()}
        if ref.id != image or image_digest(ref.files) != image or found != wanted:
            name = image_name(image)
            raise IntegrityError(f"What was fetched of {name} is not {name}.", object=name)

    @contextlib.contextmanager
    def _relatives(self) -> Iterator[list[tuple[MemoryRef, Path]]]:
        """Images on disk that may hold the same pages: those used last. Pinned meanwhile."""
        places = sorted(
            (place for place in self._images.root.iterdir() if (place / "manifest").exists()),
            key=self._last_used,
            reverse=True,
        )
        found: list[tuple[MemoryRef, Path]] = []
        for place in places:
            if len(found) == _RELATED:
                break
            with contextlib.suppress(IntegrityError, OSError):  # a bad one is of no use, no harm
                found.append((self._images.read_at(place), place / "files"))
        with self._pins.held(ref.id for ref, _ in found):
            yield found

    # -- last use -------------------------------------------------------------------------------
    def _note_use(self, place: Path) -> None:
        now = time.monotonic()
        key = os.fspath(place)
        with self._lock:
            known = self._used.get(key)
            marked = known[1] if known is not None else -_MARK_SECONDS
            due = known is None or now - marked >= _MARK_SECONDS
            self._used[key] = (now, now if due else marked, time.time_ns())
        if due:
            mark = place / MARK
            with contextlib.suppress(OSError):
                mark.touch(mode=0o600)

    def _last_used(self, place: Path) -> int:
        """When an object was used last, in nanoseconds since 1970, as far as is known."""
        with self._lock:
            known = self._used.get(os.fspath(place))
        if known is not None:
            return known[2]
        for name in (MARK, "manifest"):
            with contextlib.suppress(OSError):
                return (place / name).stat().st_mtime_ns
        return 0

    def _in_hands(self, place: Path) -> bool:
        """Whether somebody was given the object's path so lately that it may just be in use."""
        known = self._used.get(os.fspath(place))
        return known is not None and time.monotonic() - known[0] < self._handed_out

    # -- counting -------------------------------------------------------------------------------
    def _note_shared(self, layers: set[str]) -> None:
        """Files of these layers got another name."""
        with self._lock:
            self._shared += 1
            for layer in layers:
                self._footprints.pop(os.fspath(self._layers.directory(layer)), None)

    def _footprint(self, place: Path) -> Footprint:
        key = os.fspath(place)
        with self._lock:
            found = self._footprints.get(key)
            begun = self._shared
        if found is None:
            found = measure(place)
            with self._lock:
                if self._shared == begun:
                    self._footprints[key] = found
        return found

    def _footprints_now(self) -> dict[Path, Footprint]:
        found: dict[Path, Footprint] = {}
        for root in (self._layers.root, self._images.root):
            for place in root.iterdir():
                with contextlib.suppress(FileNotFoundError):  # given up or collected meanwhile
                    found[place] = self._footprint(place)
        with self._lock:
            known = {os.fspath(place) for place in found}
            for key in [key for key in self._footprints if key not in known]:
                del self._footprints[key]
            for key in [key for key in self._used if key not in known]:
                del self._used[key]
        return found

    def usage(self) -> int:
        """Bytes on disk of all layers and images; what templates' external trees hold is not the
        cache's."""
        footprints = self._footprints_now().values()
        linked: dict[int, int] = {}
        for footprint in footprints:
            linked.update(footprint.linked)
        return sum(footprint.own for footprint in footprints) + sum(linked.values())

    # -- giving up ------------------------------------------------------------------------------
    def evict(self, limit: int, keep: set[str], durable: Callable[[str], bool]) -> int:
        """See `LocalStore.evict`."""
        if self._source is None:
            return 0  # nothing could be brought back
        with self._evicting:
            thrown: list[Path] = []
            try:
                self._throw(limit, keep, durable, thrown)
            finally:
                if thrown:
                    # On disk before anything of it goes: a crash finds it whole or not at all.
                    sync_path(self._layers.root)
                    sync_path(self._images.root)
            return sum(self._staging.remove(path) for path in thrown)

    def _throw(
        self, limit: int, keep: set[str], durable: Callable[[str], bool], thrown: list[Path]
    ) -> None:
        footprints = self._footprints_now()
        names: Counter[int] = Counter()
        linked: dict[int, int] = {}
        for footprint in footprints.values():
            names.update(footprint.linked.keys())
            linked.update(footprint.linked)
        used = sum(footprint.own for footprint in footprints.values()) + sum(linked.values())
        kept = {id[:SHORT] for id in keep}
        for place in sorted(footprints, key=self._last_used):
            if used <= limit:
                return
            if place.name in kept or (place / "source").exists():
                continue
            id = self.id_of(place)
            if id is None or id in keep or not durable(id):
                continue
            if not self._throw_one(place, id, thrown):
                continue
            footprint = footprints[place]
            names.subtract(footprint.linked.keys())
            used -= footprint.own
            used -= sum(size for inode, size in footprint.linked.items() if not names[inode])

    def _throw_one(self, place: Path, id: str, thrown: list[Path]) -> bool:
        with self._pins.still() as pinned:
            if place.name in {other[:SHORT] for other in pinned} or self._in_hands(place):
                return False
            try:
                thrown.append(self._staging.trash(place))
            except FileNotFoundError:
                return False  # collected meanwhile
        self._layers.drop(id)
        with self._lock:
            self._footprints.pop(os.fspath(place), None)
            self._used.pop(os.fspath(place), None)
        return True

    def id_of(self, place: Path) -> str | None:
        """The id of what lies at a place; None when its manifest cannot tell (then it stays)."""
        try:
            if place.parent == self._images.root:
                return self._images.read_at(place).id
            payload = read_checked(MANIFEST, place / "manifest", place.name)
            id = layer_digest(payload).hex()
        except (IntegrityError, OSError):
            return None
        return id if id.startswith(place.name) else None


def _is_tree_of(manifest: Manifest, made: LocalScan) -> bool:
    """Whether a tree is the one of its manifest, as far as it shows without reading contents: those
    the source compared while it wrote them."""
    digests = manifest.digests
    for path, facts in made.entries.items():
        if stat.S_ISREG(facts[MODE]) and path not in digests:
            return False
    return manifest_of(made, digests).id == manifest.id


def measure(place: Path) -> Footprint:
    """What the directory at `place` holds on disk."""
    own = 0
    linked: dict[int, int] = {}
    base = open_directory(place)
    try:
        pending = [b""]
        own += os.fstat(base).st_blocks
        while pending:
            directory = pending.pop()
            fd = open_below(base, directory)
            try:
                prefix = directory + b"/" if directory else b""
                for name in names_in(fd):
                    s = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISDIR(s.st_mode):
                        pending.append(prefix + name)
                        own += s.st_blocks
                    elif s.st_nlink == 1:
                        own += s.st_blocks
                    elif s.st_blocks:
                        linked[s.st_ino] = s.st_blocks * 512
            finally:
                os.close(fd)
    finally:
        os.close(base)
    return Footprint(own * 512, linked)
