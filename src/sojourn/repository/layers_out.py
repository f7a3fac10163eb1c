"""Bringing a layer's files and manifest into the repository.

Guarantee: what is sent of a file is what its manifest says, or IntegrityError names the path and no
root object of the layer is written; so what changed on this node's disk since it was sealed never
becomes part of a snapshot in the store. Files whose content the store has are not read.

Memory: besides that of the upload, up to 12 MiB of small files read ahead, a window of 16 MiB for
large ones, and some 300 bytes for each file that is new.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.cutting import (
    SMALL_FILE,
    ZEROS,
    Cutter,
    content_id,
    decode_recipe,
    encode_recipe,
    file_hasher,
    zeros_id,
)
from sojourn.repository.domains import Domain
from sojourn.repository.layers import encode_layer, layer_object, segments_of
from sojourn.repository.packs import (
    CHUNK_DATA,
    CHUNK_RECIPE,
    CHUNK_SEGMENT,
    Place,
    open_block,
)
from sojourn.repository.sealed import LAYER
from sojourn.repository.uploads import Upload
from sojourn.store.layers import object_name
from sojourn.store.manifests import FILE, Entry, Manifest
from sojourn.store.trees import open_below, open_directory, split

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PATH = 3000  # bytes of path handed to the kernel at once
_OPENED_BLOCKS = 4
_READERS = 4
_BATCH_BYTES, _BATCH_FILES = 1 << 20, 256  # at most 2 MiB, as a file may be 1 MiB


def push_layer(domain: Domain, up: Upload, manifest: Manifest, tree: Path) -> int:
    """Send what the store lacks of a layer whose files lie in `tree`: contents, recipes, segments.
    Answers the bytes of files that were read. `publish_layer` comes after `up.flush`.

    Raises IntegrityError naming the path where a file is not what the manifest says, and what
    `Upload` raises.
    """
    root = open_directory(tree)
    try:
        files = _Files(domain, up, object_name(manifest.id), root)
        small: list[tuple[bytes, bytes, Entry]] = []
        large: list[Entry] = []
        seen: set[bytes] = set()
        chunk_name, knows = domain.keys.chunk_name, up.knows
        for entry in manifest.entries:
            if entry.type != FILE or entry.size == 0 or entry.link is not None:
                continue
            if entry.size > SMALL_FILE:
                large.append(entry)
                continue
            name = chunk_name(CHUNK_DATA, entry.digest)
            if name not in seen and not knows(name):
                seen.add(name)
                small.append((_likeness(entry.path), name, entry))
        del seen
        small.sort(key=_first)
        files.small([(name, entry) for _, name, entry in small])
        del small
        for entry in large:
            files.large(entry)
    finally:
        os.close(root)
    for content, data in segments_of(manifest):
        up.add(CHUNK_SEGMENT, content, data)
    return files.read_bytes


def publish_layer(
    domain: Domain, manifest: Manifest, segments: Iterable[bytes] | None = None
) -> None:
    """Write the root object of a layer that was pushed and flushed. `segments` are the content ids
    of its segments, where they are known."""
    if segments is None:
        segments = (content for content, _ in segments_of(manifest))
    payload = encode_layer(layer_object(manifest, segments))
    domain.put_root(LAYER, domain.layer_key(manifest.id), payload)


def _likeness(path: bytes) -> bytes:
    """What files are sent in order of: those of one kind and one name together, because they
    compress better as neighbours in a block (by 5 to 8 % on trees of programs)."""
    name = path.rpartition(b"/")[2]
    dot = name.rfind(b".")
    return b"%b\0%b\0%b" % (name[dot:] if dot > 0 else b"", name, path)


def _first(item: tuple[bytes, bytes, Entry]) -> bytes:
    return item[0]


def _batches(files: list[tuple[bytes, Entry]]) -> Iterator[list[tuple[bytes, Entry]]]:
    batch: list[tuple[bytes, Entry]] = []
    total = 0
    for file in files:
        batch.append(file)
        total += file[1].size
        if total >= _BATCH_BYTES or len(batch) == _BATCH_FILES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _result(
    ahead: deque[tuple[list[tuple[bytes, Entry]], Future[list[bytes]]]],
) -> tuple[list[tuple[bytes, Entry]], list[bytes]]:
    batch, reading = ahead.popleft()
    return batch, reading.result()


class _Files:
    """Reads the files of one layer's tree and adds what the store lacks of them."""

    def __init__(self, domain: Domain, up: Upload, layer: str, root: int) -> None:
        self._domain = domain
        self._up = up
        self._layer = layer
        self._root = root
        self._cutter = Cutter(domain.keys.cutting)
        self._blocks: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()
        self.read_bytes = 0

    def small(self, files: list[tuple[bytes, Entry]]) -> None:
        """Files that are one chunk each, with its name, in order.

        They are read a few batches ahead: where the disk has to be waited for, several files are
        waited for at once.
        """
        batches = list(_batches(files))
        if len(batches) < _READERS:
            for batch in batches:
                self._put(batch, self._read(batch))
            return
        with ThreadPoolExecutor(_READERS, "read files") as pool:
            ahead: deque[tuple[list[tuple[bytes, Entry]], Future[list[bytes]]]] = deque()
            try:
                for batch in batches:
                    ahead.append((batch, pool.submit(self._read, batch)))
                    if len(ahead) > _READERS:
                        self._put(*_result(ahead))
                while ahead:
                    self._put(*_result(ahead))
            finally:
                pool.shutdown(cancel_futures=True)

    def _put(self, batch: list[tuple[bytes, Entry]], contents: list[bytes]) -> None:
        for (name, _), data in zip(batch, contents, strict=True):
            self.read_bytes += len(data)
            self._up.put(CHUNK_DATA, name, data)

    def _read(self, batch: list[tuple[bytes, Entry]]) -> list[bytes]:
        """The contents of files, found right. For threads."""
        contents = []
        for _, entry in batch:
            fd = self._open(entry)
            try:
                size = entry.size
                data = os.read(fd, size + 1)
                while len(data) <= size and (more := os.read(fd, size + 1 - len(data))):
                    data += more
            except OSError as error:
                raise self._changed(entry, error.strerror) from error
            finally:
                os.close(fd)
            if len(data) != size or blake3(data).digest() != entry.digest:
                raise self._changed(entry)
            contents.append(data)
        return contents

    def large(self, entry: Entry) -> None:
        """A file that is cut and has a recipe."""
        name = self._domain.keys.chunk_name(CHUNK_RECIPE, entry.digest)
        if self._up.knows(name):
            place = self._domain.index.find(name)
            if place is None:
                return  # it came before in this upload, with all its chunks
            recipe = self._stored_recipe(place)
            if recipe is not None:
                self._complete(entry, decode_recipe(recipe, entry.size, self._where(entry)))
                return
        self._cut(entry, name)

    def _cut(self, entry: Entry, name: bytes) -> None:
        add = self._up.add
        hasher = file_hasher()
        chunks: list[tuple[bytes, int]] = []
        fd = self._open(entry)
        try:
            if os.fstat(fd).st_size != entry.size:
                raise self._changed(entry)
            for length, data in self._cutter.cut(fd, entry.size, hasher):
                if data is None:
                    content = zeros_id(length)
                    add(CHUNK_DATA, content, memoryview(ZEROS)[:length])
                else:
                    content = content_id(data)
                    add(CHUNK_DATA, content, data)
                    self.read_bytes += length
                chunks.append((content, length))
        except OSError as error:
            raise self._changed(entry, error.strerror) from error
        finally:
            os.close(fd)
        if hasher.digest() != entry.digest:
            raise self._changed(entry)
        self._up.put(CHUNK_RECIPE, name, encode_recipe(chunks))

    def _complete(self, entry: Entry, recipe: list[tuple[bytes, int]]) -> None:
        """Add the chunks of a known recipe that are gone since: a recipe may outlive them in its
        pack, which other recipes keep."""
        at = 0
        fd = -1
        try:
            for content, length in recipe:
                if not self._up.has(CHUNK_DATA, content):
                    if fd < 0:
                        fd = self._open(entry)
                    data = os.pread(fd, length, at)
                    if content_id(data) != content:
                        raise self._changed(entry)
                    self.read_bytes += length
                    self._up.add(CHUNK_DATA, content, data)
                at += length
        except OSError as error:
            raise self._changed(entry, error.strerror) from error
        finally:
            if fd >= 0:
                os.close(fd)

    def _stored_recipe(self, place: Place) -> bytes | None:
        """A recipe from the store; None where its pack has gone, which then is forgotten."""
        pack, number = place.pack, place.block
        raw = self._blocks.get((pack.id, number))
        if raw is None:
            block = pack.block(number)
            key = self._domain.pack_key(pack.id)
            try:
                stored = self._domain.backend.get_ranges(key, [(block.offset, block.stored)])[0]
            except ObjectMissing:
                self._domain.index.remove([pack.id])
                return None
            raw = open_block(stored, pack, number, self._domain.keys)
            self._blocks[(pack.id, number)] = raw
            if len(self._blocks) > _OPENED_BLOCKS:
                self._blocks.popitem(last=False)
        return raw[place.offset : place.offset + place.length]

    def _open(self, entry: Entry) -> int:
        path = entry.path
        try:
            if len(path) <= _PATH:
                return os.open(path, _READ, dir_fd=self._root)
            directory, name = split(path)
            fd = open_below(self._root, directory)
            try:
                return os.open(name, _READ, dir_fd=fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise self._changed(entry, error.strerror) from error

    def _where(self, entry: Entry) -> str:
        return f"/{os.fsdecode(entry.path)} in {self._layer}"

    def _changed(self, entry: Entry, cause: str | None = None) -> IntegrityError:
        how = f"cannot be read: {cause}" if cause else "differs from what was sealed"
        path = "/" + os.fsdecode(entry.path)
        return IntegrityError(f"{path!r} of {self._layer} {how}.", object=self._layer, path=path)
