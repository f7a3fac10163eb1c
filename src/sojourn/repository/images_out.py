"""Bringing a memory image into the repository: only the pages that its parent does not have.

Guarantee: the pieces of the map, joined, are the image: every byte is read here and compared with
the digests of the image's reference before the map is given back, and a page is taken from a chunk
of the parent only after the store was found to have that chunk. What differs is an IntegrityError
naming the file; no root object is written then.

Pages are looked up by their BLAKE3 wherever they lay in the parent, because a runtime writes the
pages it has one after another, so that one more moves all behind it. The pages of the last images
are remembered by image id, so that the parent's files need not be read again.

Memory: a window of 1 MiB, up to 256 KiB of new pages, and about 150 bytes for each distinct page of
the image and of its parent; between calls those of up to `REMEMBERED_PAGES` pages stay.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from blake3 import blake3

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.model.snapshots import MemoryRef
from sojourn.repository.cutting import (
    SMALL_FILE,
    Cutter,
    content_id,
    file_hasher,
)
from sojourn.repository.domains import Domain
from sojourn.repository.images import (
    CHUNK_PAGES,
    LARGEST_PIECE,
    PAGE,
    RECORD,
    ImageMap,
    decode_image,
    encode_image,
)
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.sealed import IMAGE
from sojourn.repository.uploads import Upload
from sojourn.store.images import object_name
from sojourn.store.trees import open_directory

LEAST_PAGED = 64 << 10
REMEMBERED_PAGES = 1 << 19  # of 2 GiB of images, some 80 MB
_PAGE_DIGEST = 16  # of a page in memory; no two pages meet by accident in 128 bits
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WINDOW = 1 << 20
_CHUNK_BYTES = CHUNK_PAGES * PAGE
_CHUNK_SHIFT = CHUNK_PAGES.bit_length() - 1
_ZERO_PAGE = bytes(PAGE)
_ZERO_WINDOW = bytes(_WINDOW)


def is_paged(file: str, size: int) -> bool:
    """Whether a file of an image is looked at in pages."""
    name = file.rpartition("/")[2]
    return name.startswith("pages") and name.endswith(".img") and size >= LEAST_PAGED


class _Pages:
    """Where each distinct page of an image lies: `at` maps a page's digest to the number of its
    chunk (from 0) times CHUNK_PAGES and the page in it."""

    __slots__ = ("at", "chunks")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.at: dict[bytes, int] = {}


class PageMemory:
    """The pages of the images pushed last, by domain and image id. Safe for many threads."""

    def __init__(self, most: int = REMEMBERED_PAGES) -> None:
        self._most = most
        self._pages = 0
        self._held: OrderedDict[tuple[str, str, str], _Pages] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, domain: Domain, image: str) -> _Pages | None:
        with self._lock:
            found = self._held.get(_place(domain, image))
            if found is not None:
                self._held.move_to_end(_place(domain, image))
            return found

    def put(self, domain: Domain, image: str, pages: _Pages) -> None:
        place = _place(domain, image)
        with self._lock:
            old = self._held.pop(place, None)
            self._pages += len(pages.at) - (len(old.at) if old is not None else 0)
            self._held[place] = pages
            while self._pages > self._most and self._held:
                _, dropped = self._held.popitem(last=False)
                self._pages -= len(dropped.at)


def _place(domain: Domain, image: str) -> tuple[str, str, str]:
    return domain.backend.url, domain.name, image


_memory = PageMemory()


def push_image(
    domain: Domain,
    up: Upload,
    ref: MemoryRef,
    files: Path,
    parent: tuple[MemoryRef, Path] | None = None,
    *,
    memory: PageMemory = _memory,
) -> ImageMap:
    """Send what the store lacks of the image whose files lie in `files`; answers its map, for
    `publish_image` after `up.flush`. `parent` is an image that is likely to share pages, with the
    directory of its files; it is of use only when the store has it.

    Raises IntegrityError naming the file that is not what the reference says, and what `Upload`
    raises.
    """
    base = _parent_pages(domain, parent, memory) if parent is not None else None
    push = _Push(domain, up, object_name(ref.id), base)
    directory = open_directory(files)
    try:
        maps = {
            file: push.file(directory, file, size, digest)
            for file, (size, digest) in sorted(ref.files.items())
        }
    finally:
        os.close(directory)
    memory.put(domain, ref.id, push.pages)
    return ImageMap(ref=ref, chunks=b"".join(push.pages.chunks), files=maps)


def publish_image(domain: Domain, image: ImageMap) -> None:
    """Write the root object of an image that was pushed and flushed."""
    domain.put_root(IMAGE, domain.image_key(image.ref.id), encode_image(image))


def _parent_pages(
    domain: Domain, parent: tuple[MemoryRef, Path], memory: PageMemory
) -> _Pages | None:
    """The pages of the parent as the store has them; None where it lacks the image, or where the
    files on this node are not those of the image."""
    ref, files = parent
    found = memory.get(domain, ref.id)
    if found is not None:
        return found
    try:
        image = decode_image(domain.get_root(IMAGE, domain.image_key(ref.id)), ref.id)
        pages = _read_pages(image, files)
    except (ObjectMissing, IntegrityError, OSError):
        return None  # nothing is shared then, and nothing is lost
    memory.put(domain, ref.id, pages)
    return pages


def _read_pages(image: ImageMap, files: Path) -> _Pages:
    """The pages of an image from its map and its files. Raises IntegrityError, OSError."""
    pages = _Pages()
    pages.chunks = list(image.chunk_ids())
    at = pages.at
    directory = open_directory(files)
    try:
        for file, (size, digest) in image.ref.files.items():
            if not is_paged(file, size):
                continue
            fd = os.open(file, _READ, dir_fd=directory)
            try:
                hasher = file_hasher()
                start = 0
                for length, source, offset in image.pieces(file):
                    done = 0
                    while done < length:
                        data = os.pread(fd, min(_WINDOW, length - done), start + done)
                        if not data:
                            break
                        hasher.update(data)
                        if source and not offset % PAGE and offset + length <= _CHUNK_BYTES:
                            first = (source - 1) * CHUNK_PAGES + (offset + done) // PAGE
                            for number in range(len(data) // PAGE):
                                page = data[number * PAGE : number * PAGE + PAGE]
                                at[blake3(page).digest(_PAGE_DIGEST)] = first + number
                        done += len(data)
                    start += length
                if hasher.hexdigest() != digest:
                    raise IntegrityError("The parent differs.", object=object_name(image.ref.id))
            finally:
                os.close(fd)
    finally:
        os.close(directory)
    return pages


class _Pieces:
    """The pieces of a file as they are found, those that follow one another made one."""

    __slots__ = ("_end", "_length", "_offset", "_raw", "_source")

    def __init__(self) -> None:
        self._raw: list[bytes] = []
        self._length = self._source = self._offset = 0
        self._end = -1  # where the next piece must begin to belong to this one

    def add(self, length: int, source: int, offset: int) -> None:
        """The next piece: its length, its chunk (from 1; 0 for zeros), and its offset there."""
        if source == self._source and (
            offset == self._end if source else self._length + length <= LARGEST_PIECE
        ):
            self._length += length
            self._end = offset + length
            return
        self._close()
        self._length, self._source, self._offset = length, source, offset
        self._end = offset + length

    def _close(self) -> None:
        if self._length:
            self._raw.append(RECORD.pack(self._length, self._source, self._offset))

    def encoded(self) -> bytes:
        """All of them, as an image's map holds them."""
        self._close()
        self._length = 0
        return b"".join(self._raw)


class _Push:
    """One image on its way out."""

    def __init__(self, domain: Domain, up: Upload, image: str, base: _Pages | None) -> None:
        self._domain = domain
        self._up = up
        self._image = image
        self._base = base
        self._shared: dict[int, int] = {}  # chunk of the parent: our number, -1 the store lacks it
        self._numbers: dict[bytes, int] = {}  # content id: our number
        self._cutter = Cutter(domain.keys.cutting)
        self._fresh: list[bytes] = []  # new pages, of the chunk that is being filled
        self._filled = -1  # its number
        self.pages = _Pages()

    def file(self, directory: int, file: str, size: int, digest: str) -> bytes:
        """The pieces of one file, after all of it was read, sent and found right."""
        try:
            fd = os.open(file, _READ, dir_fd=directory)
        except OSError as error:
            raise self._changed(file, error.strerror) from error
        try:
            if os.fstat(fd).st_size != size:
                raise self._changed(file)
            hasher = file_hasher()
            if is_paged(file, size):
                pieces = self._paged(fd, size, hasher)
            else:
                pieces = self._cut(fd, size, hasher)
        except OSError as error:
            raise self._changed(file, error.strerror) from error
        finally:
            os.close(fd)
        if hasher.hexdigest() != digest:
            raise self._changed(file)
        return pieces

    # -- pages ------------------------------------------------------------------------------
    def _paged(self, fd: int, size: int, hasher: blake3) -> bytes:
        pieces = _Pieces()
        known = self.pages.at
        find, add = known.get, pieces.add
        base = self._base.at if self._base is not None else {}
        at = 0
        while at < size and (data := os.pread(fd, min(_WINDOW, size - at), at)):
            hasher.update(data)
            at += len(data)
            if data == _ZERO_WINDOW:
                add(_WINDOW, 0, 0)
                continue
            for start in range(0, len(data), PAGE):
                page = data[start : start + PAGE]
                if page == _ZERO_PAGE:
                    add(PAGE, 0, 0)
                    continue
                if len(page) < PAGE:
                    self._last(page, pieces)
                    continue
                key = blake3(page).digest(_PAGE_DIGEST)
                place = find(key)
                if place is None:
                    old = base.get(key)
                    place = self._take(old) if old is not None else -1
                    if place < 0:
                        place = self._new(page)
                    known[key] = place
                add(PAGE, (place >> _CHUNK_SHIFT) + 1, (place & (CHUNK_PAGES - 1)) * PAGE)
        self._finish_chunk()
        return pieces.encoded()

    def _take(self, old: int) -> int:
        """Our place for a page that a chunk of the parent holds; -1 where the store has lost it."""
        chunk = old >> _CHUNK_SHIFT
        number = self._shared.get(chunk)
        if number is None:
            assert self._base is not None
            content = self._base.chunks[chunk]
            number = self._number(content) if self._up.has(CHUNK_DATA, content) else -1
            self._shared[chunk] = number
        return number << _CHUNK_SHIFT | old & (CHUNK_PAGES - 1) if number >= 0 else -1

    def _new(self, page: bytes) -> int:
        """The place of a page nobody has: in the chunk that is being filled."""
        if len(self._fresh) == CHUNK_PAGES:
            self._finish_chunk()
        if not self._fresh:
            self.pages.chunks.append(b"")  # its content id follows
            self._filled = len(self.pages.chunks) - 1
        self._fresh.append(page)
        return self._filled << _CHUNK_SHIFT | len(self._fresh) - 1

    def _last(self, page: bytes, pieces: _Pieces) -> None:
        """The end of a file that does not fill a page: no other page follows it in its chunk."""
        if page == _ZERO_PAGE[: len(page)]:
            pieces.add(len(page), 0, 0)
            return
        place = self._new(page)
        pieces.add(len(page), (place >> _CHUNK_SHIFT) + 1, (place & (CHUNK_PAGES - 1)) * PAGE)
        self._finish_chunk()

    def _finish_chunk(self) -> None:
        if self._fresh:
            data = b"".join(self._fresh)
            self._fresh = []
            content = content_id(data)
            self.pages.chunks[self._filled] = content
            self._up.add(CHUNK_DATA, content, data)

    # -- other files ------------------------------------------------------------------------
    def _cut(self, fd: int, size: int, hasher: blake3) -> bytes:
        pieces = _Pieces()
        if 0 < size <= SMALL_FILE:
            data = os.pread(fd, size, 0)
            hasher.update(data)
            if data:
                self._whole(data, pieces)
            return pieces.encoded()
        for length, view in self._cutter.cut(fd, size, hasher):
            if view is None:
                pieces.add(length, 0, 0)
            else:
                self._whole(view, pieces)
        return pieces.encoded()

    def _whole(self, data: bytes | memoryview, pieces: _Pieces) -> None:
        content = content_id(data)
        self._up.add(CHUNK_DATA, content, data)
        pieces.add(len(data), self._number(content) + 1, 0)

    def _number(self, content: bytes) -> int:
        """Our number (from 0) of a chunk that is used whole or was another image's."""
        number = self._numbers.get(content)
        if number is None:
            number = self._numbers[content] = len(self.pages.chunks)
            self.pages.chunks.append(content)
        return number

    def _changed(self, file: str, cause: str | None = None) -> IntegrityError:
        how = f"cannot be read: {cause}" if cause else "differs from what was written"
        return IntegrityError(f"{file} of {self._image} {how}.", object=self._image, path=file)
