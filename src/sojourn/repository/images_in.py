"""Restoring a memory image: what an image on the node's disk has is copied, the rest is fetched.

Guarantee: every file that is given back has the BLAKE3 of the image's reference, or IntegrityError
names it. What is copied from a cached image is taken on trust at first, which the whole file's
digest settles: where one differs, all that was copied is fetched from the store instead, once. So
a cached image that is damaged costs time, never a wrong byte. Pages that are zero are holes.

Copying and fetching go on at once. Memory: that of `downloads`, and about 150 bytes for each piece.
"""

from __future__ import annotations

import errno
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from sojourn.errors import HostUnfit, IntegrityError
from sojourn.model.snapshots import MemoryRef
from sojourn.repository.cutting import content_id
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images import ImageMap, decode_image
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.sealed import IMAGE
from sojourn.repository.sparse import write_all, write_at
from sojourn.store.copying import disk_errors
from sojourn.store.images import object_name
from sojourn.store.trees import open_below, open_directory, remove_tree, split

log = logging.getLogger(__name__)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_HASHED = 4 << 20  # bytes read at once, enough for several threads
_NO_RANGE = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})


class Piece(NamedTuple):
    """Where a part of a chunk goes: the file's number, offset there, offset in the chunk, bytes."""

    file: int
    at: int
    inside: int
    length: int


class Copy(NamedTuple):
    """A part that a cached image has: the open source and offset there, and what it stands for."""

    source: int
    start: int
    content: bytes
    piece: Piece


def read_image(domain: Domain, image: str) -> ImageMap:
    """The map of an image, checked. Raises ObjectMissing, IntegrityError."""
    return decode_image(domain.get_root(IMAGE, domain.image_key(image)), image)


def restore_image(
    domain: Domain, image: str, into: Path, cached: Sequence[tuple[ImageMap, Path]] = ()
) -> MemoryRef:
    """Write an image's files into the empty directory `into`. `cached` are images on this disk
    with the directories of their files, best first. On failure nothing is left in `into`.

    Raises ObjectMissing, IntegrityError, StoreUnreachable, StorageFull, HostUnfit."""
    wanted = read_image(domain, image)
    name = object_name(image)
    try:
        with disk_errors("restoring a memory image"):
            try:
                _restore(domain, wanted, into, cached, name)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise HostUnfit(
                    f"The node's disk does not take {name}: {error.strerror}.", object=name
                ) from error
    except BaseException:
        for left in into.iterdir():
            remove_tree(left)
        raise
    return wanted.ref


def _restore(
    domain: Domain,
    wanted: ImageMap,
    into: Path,
    cached: Sequence[tuple[ImageMap, Path]],
    name: str,
) -> None:
    held: list[int] = []
    try:
        files = list(wanted.files)
        targets = _make_files(wanted, files, into, held)
        needed, copies = _plan(wanted, files, cached, held)
        restoring = _Restoring(domain, targets, name)
        with ThreadPoolExecutor(1, "copy pages") as pool:
            copying = pool.submit(_copy_all, copies, targets)
            try:
                restoring.fetch(needed)
            except BaseException:
                copying.cancel()
                raise
            short = copying.result()
        restoring.fetch(_by_content(short), over=True)
        wrong = _differing(wanted, files, targets)
        if wrong and copies:
            log.warning(
                "pages of cached images are not those of %s (%s): they are fetched",
                name,
                ", ".join(wrong),
            )
            restoring.fetch(_by_content(copies), over=True)
            wrong = _differing(wanted, files, targets)
        if wrong:
            raise IntegrityError(
                f"{wrong[0]} of {name} differs from what was put away.", object=name, path=wrong[0]
            )
    finally:
        for fd in held:
            os.close(fd)


def _make_files(wanted: ImageMap, files: list[str], into: Path, held: list[int]) -> list[int]:
    """New files of the right sizes, all of them holes."""
    root = open_directory(into)
    held.append(root)
    made = {b""}
    targets = []
    for file in files:
        path = os.fsencode(file)
        directory, own = split(path)
        parts = directory.split(b"/") if directory else []
        for depth in range(1, len(parts) + 1):
            parent = b"/".join(parts[:depth])
            if parent not in made:
                os.mkdir(parent, 0o700, dir_fd=root)
                made.add(parent)
        place = open_below(root, directory)
        try:
            fd = os.open(own, _CREATE, 0o600, dir_fd=place)
        finally:
            os.close(place)
        held.append(fd)
        os.ftruncate(fd, wanted.ref.files[file][0])
        targets.append(fd)
    return targets


# -- what comes from where ----------------------------------------------------------------------
class _Cached:
    """Where parts of one chunk lie in cached images, by their offset in the chunk."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, int, int]] = []  # offset, length, source, offset there

    def find(self, inside: int) -> tuple[int, int, int] | None:
        """Source, offset there and bytes from an offset in the chunk on."""
        index = bisect_right(self.parts, (inside, 1 << 62, 0, 0)) - 1
        if index < 0:
            return None
        offset, length, source, start = self.parts[index]
        left = offset + length - inside
        return (source, start + inside - offset, left) if left > 0 else None


def _plan(
    wanted: ImageMap,
    files: list[str],
    cached: Sequence[tuple[ImageMap, Path]],
    held: list[int],
) -> tuple[dict[bytes, list[Piece]], list[Copy]]:
    """The pieces to fetch by chunk, and those to copy."""
    known = _index_cached(set(wanted.chunk_ids()) if cached else set(), cached, held)
    needed: dict[bytes, list[Piece]] = {}
    copies: list[Copy] = []
    for number, file in enumerate(files):
        at = 0
        for length, source, inside in wanted.pieces(file):
            if source:
                content = wanted.chunk(source)
                here = known.get(content)
                if here is None:
                    needed.setdefault(content, []).append(Piece(number, at, inside, length))
                else:
                    _split(here, content, Piece(number, at, inside, length), needed, copies)
            at += length
    return needed, copies


def _split(
    here: _Cached,
    content: bytes,
    piece: Piece,
    needed: dict[bytes, list[Piece]],
    copies: list[Copy],
) -> None:
    """Take of a piece what is cached; fetch it from the first byte on that is not."""
    file, at, inside, length = piece
    while length:
        found = here.find(inside)
        if found is None:
            needed.setdefault(content, []).append(Piece(file, at, inside, length))
            return
        source, start, there = found
        count = min(there, length)
        copies.append(Copy(source, start, content, Piece(file, at, inside, count)))
        at, inside, length = at + count, inside + count, length - count


def _index_cached(
    contents: set[bytes], cached: Sequence[tuple[ImageMap, Path]], held: list[int]
) -> dict[bytes, _Cached]:
    known: dict[bytes, _Cached] = {}
    for image, directory in cached:
        # The number of each chunk that is wanted; most of an unrelated image are not.
        useful = {
            number: content
            for number, content in enumerate(image.chunk_ids(), 1)
            if content in contents
        }
        if not useful:
            continue
        for file in image.files:
            fd = _open_cached(directory, file)
            if fd is None:
                continue
            held.append(fd)
            at = 0
            for length, source, inside in image.pieces(file):
                content = useful.get(source)
                if content is not None:
                    known.setdefault(content, _Cached()).parts.append((inside, length, fd, at))
                at += length
    for here in known.values():
        here.parts.sort()
    return known


def _open_cached(directory: Path, file: str) -> int | None:
    """A cached file, or None where it cannot be had: then it is no help, and no harm."""
    path = os.fsencode(file)
    try:
        root = open_directory(directory)
        try:
            place = open_below(root, split(path)[0])
        finally:
            os.close(root)
        try:
            return os.open(split(path)[1], _READ, dir_fd=place)
        finally:
            os.close(place)
    except OSError as error:
        log.warning("%s in a cached image cannot be read: %s", file, error.strerror)
        return None


def _by_content(copies: Iterable[Copy]) -> dict[bytes, list[Piece]]:
    found: dict[bytes, list[Piece]] = {}
    for copy in copies:
        found.setdefault(copy.content, []).append(copy.piece)
    return found


# -- copying ------------------------------------------------------------------------------------
def _copy_all(copies: list[Copy], targets: list[int]) -> list[Copy]:
    """Copy the pieces that are cached; answers those whose source was too short or unreadable.
    Pieces that follow one another in both files are copied at once."""
    short: list[Copy] = []
    first = 0
    while first < len(copies):
        head = copies[first]
        length = head.piece.length
        last = first + 1
        while last < len(copies):
            following = copies[last]
            if (
                following.source != head.source
                or following.start != head.start + length
                or following.piece.file != head.piece.file
                or following.piece.at != head.piece.at + length
            ):
                break
            length += following.piece.length
            last += 1
        target = targets[head.piece.file]
        if not _copy_range(head.source, head.start, target, head.piece.at, length):
            short += copies[first:last]
        first = last
    return short


def _copy_range(source: int, start: int, target: int, at: int, length: int) -> bool:
    """False where the source has not got all of it."""
    ranges = True
    while length:
        if ranges:
            try:
                count = os.copy_file_range(source, target, length, start, at)
            except OSError as error:
                if error.errno == errno.EIO:
                    return False
                if error.errno not in _NO_RANGE:
                    raise
                ranges = False
                continue
        else:
            try:
                data = os.pread(source, min(length, 1 << 20), start)
            except OSError:
                return False
            count = os.pwrite(target, data, at) if data else 0
        if count == 0:
            return False
        start, at, length = start + count, at + count, length - count
    return True


# -- fetching and comparing ---------------------------------------------------------------------
class _Restoring:
    """Fetches chunks and writes their pieces."""

    def __init__(self, domain: Domain, targets: list[int], name: str) -> None:
        self._domain = domain
        self._targets = targets
        self._name = name

    def fetch(self, needed: dict[bytes, list[Piece]], *, over: bool = False) -> None:
        """Write pieces of chunks from the store; `over` says that something may stand there already
        which must not show through zeros. Raises IntegrityError where a chunk is not the one of its
        content id."""
        if not needed:
            return
        chunk_name = self._domain.keys.chunk_name
        asked = {chunk_name(CHUNK_DATA, content): content for content in needed}
        for chunk, data in Reader(self._domain).chunks(asked, needed_by=self._name):
            content = asked[chunk]
            if content_id(data) != content:
                raise IntegrityError(
                    f"Chunk {chunk.hex()} of {self._name} is not the one of its name.",
                    object=self._name,
                    chunk=chunk.hex(),
                )
            for file, at, inside, length in needed[content]:
                part = data if length == len(data) else data[inside : inside + length]
                if len(part) != length:
                    raise IntegrityError(
                        f"Chunk {chunk.hex()} of {self._name} is shorter than its map says.",
                        object=self._name,
                        chunk=chunk.hex(),
                    )
                if over:
                    write_all(self._targets[file], part, at)
                else:
                    write_at(self._targets[file], part, at)


def _differing(wanted: ImageMap, files: list[str], targets: list[int]) -> list[str]:
    """The files whose bytes are not those of the reference."""
    return [
        file
        for file, fd in zip(files, targets, strict=True)
        if _digest(fd).hex() != wanted.ref.files[file][1]
    ]


def _digest(fd: int) -> bytes:
    hasher: blake3 = blake3(max_threads=blake3.AUTO)
    buffer = bytearray(_HASHED)
    view = memoryview(buffer)
    at = 0
    while count := os.preadv(fd, [buffer], at):
        hasher.update(view[:count])
        at += count
    return hasher.digest()
