"""What of a layer or image is still there, where something is lost.

Guarantee: everything that can be read is counted as needed, everything that cannot is named, down
to the files it was for; nothing that is wrong ends the look. Only used where the strict reading of
`marking` has failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.cutting import SMALL_FILE, decode_recipe
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images import decode_image
from sojourn.repository.needs import decode_segment, read_layer
from sojourn.repository.records import CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT, Place
from sojourn.repository.sealed import IMAGE
from sojourn.store.images import object_name as image_object
from sojourn.store.layers import object_name as layer_object
from sojourn.store.manifests import FILE, Entry

Find = Callable[[bytes], Place | None]

_NAMED = 20  # files of one layer that are told by name


class Losses:
    """What is lost of one layer or image. `objects` tell people; `lost` are names of chunks;
    `needed` those of all chunks that are known to belong to it."""

    def __init__(self, name: str, find: Find) -> None:
        self.name = name
        self.find = find
        self.needed: set[bytes] = set()
        self.lost: set[bytes] = set()
        self._objects: list[str] = []
        self._files: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.objects)

    @property
    def objects(self) -> list[str]:
        """What is lost, for people."""
        shown = [f"{path!r} of {self.name}" for path in self._files[:_NAMED]]
        more = len(self._files) - _NAMED
        return [*self._objects, *shown, *([f"{more} more of {self.name}"] if more > 0 else [])]

    def add(self, what: str) -> None:
        """Note something that is lost."""
        self._objects.append(f"{what} of {self.name}")

    def add_file(self, path: bytes) -> None:
        """Note a file that is lost, by its path in the layer."""
        self._files.append("/" + os.fsdecode(path))


def losses_of_layer(domain: Domain, layer: str, find: Find | None = None) -> Losses:
    """What is lost of a layer. `find` says where a chunk lies; without it, only packs count that
    the domain's index does not pass over."""
    found = Losses(layer_object(layer), find or domain.index.find)
    try:
        root = read_layer(domain, layer)
    except (ObjectMissing, IntegrityError):
        found.add("the record")
        return found
    chunk_name = domain.keys.chunk_name
    segments = [chunk_name(CHUNK_SEGMENT, content) for content in root.segments]
    recipes: dict[bytes, list[Entry]] = {}
    read: set[bytes] = set()
    for name, data in _readable(domain, segments, found):
        try:
            entries = decode_segment(data, name)
        except IntegrityError:
            continue
        read.add(name)
        for entry in entries:
            if entry.type != FILE or not entry.size or entry.link is not None:
                continue
            if entry.size > SMALL_FILE:
                recipes.setdefault(chunk_name(CHUNK_RECIPE, entry.digest), []).append(entry)
                continue
            chunk = chunk_name(CHUNK_DATA, entry.digest)
            found.needed.add(chunk)
            if found.find(chunk) is None:
                found.lost.add(chunk)
                found.add_file(entry.path)
    gone = set(segments) - read
    if gone:
        found.lost |= gone
        found.add(f"{len(gone)} segments of the list of files")
    for name, data in _readable(domain, recipes, found):
        entries = recipes.pop(name)
        if not _has_all(domain, data, entries[0], found):
            for entry in entries:
                found.add_file(entry.path)
    for name, entries in recipes.items():
        found.lost.add(name)
        for entry in entries:
            found.add_file(entry.path)
    return found


def losses_of_image(domain: Domain, image: str, find: Find | None = None) -> Losses:
    """The same for a memory image."""
    found = Losses(image_object(image), find or domain.index.find)
    try:
        root = decode_image(domain.get_root(IMAGE, domain.image_key(image)), image)
    except (ObjectMissing, IntegrityError):
        found.add("the map")
        return found
    for content in root.chunk_ids():
        chunk = domain.keys.chunk_name(CHUNK_DATA, content)
        found.needed.add(chunk)
        if found.find(chunk) is None:
            found.lost.add(chunk)
    if found.lost:
        found.add(f"{len(found.lost)} pieces")
    return found


def _has_all(domain: Domain, recipe: bytes, entry: Entry, found: Losses) -> bool:
    try:
        contents = decode_recipe(recipe, entry.size, found.name)
    except IntegrityError:
        return False
    whole = True
    for content, _ in contents:
        chunk = domain.keys.chunk_name(CHUNK_DATA, content)
        found.needed.add(chunk)
        if found.find(chunk) is None:
            found.lost.add(chunk)
            whole = False
    return whole


def _readable(
    domain: Domain, names: Iterable[bytes], found: Losses
) -> Iterator[tuple[bytes, bytes]]:
    """Those of the chunks that can be read. Together first; where that fails, one by one."""
    wanted = dict.fromkeys(names)
    found.needed.update(wanted)
    there = [name for name in wanted if found.find(name) is not None]
    done: set[bytes] = set()
    try:
        for name, data in Reader(domain).chunks(there, needed_by=found.name):
            done.add(name)
            yield name, data
        return
    except IntegrityError:
        pass  # some of it is bad: found out below
    for name in there:
        if name in done:
            continue
        try:
            yield from Reader(domain).chunks([name], needed_by=found.name)
        except IntegrityError:
            continue  # counted as lost by the caller, who misses it
