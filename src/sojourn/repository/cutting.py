"""Cutting content into chunks: where the boundaries are, and reading files window by window.

Guarantee: the pieces of a file, in order, are its bytes; equal runs of bytes give equal chunks
wherever they lie in a file, so an insertion changes the chunks around it and no others. No more
than one window is held, whatever the file's size. Large holes are not read: they are runs of
chunks of zeros, which a restore can make holes again.

The native chunker is required: the library's pure form is a thousand times slower, and would be
taken in silence.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache

from blake3 import blake3

from sojourn.errors import HostUnfit, IntegrityError

SMALL_FILE = 1 << 20  # a file up to this size is one chunk
MINIMUM, AVERAGE, LARGEST = 256 << 10, 1 << 20, 4 << 20
WINDOW = 16 << 20
LEAST_HOLE = 1 << 20  # smaller ones are read: cutting at each would make chunks of no use
_SEED_BITS = 63  # the library shifts the seed left once within 64 bits
_THREADED = 1 << 20  # hashing less than this in several threads does not pay

RECIPE = struct.Struct("<32sI")  # content id and length of a chunk

ZEROS = bytes(LARGEST)  # never written, so no memory stands behind it


class Cutter:
    """Content-defined cutting with one domain's seed. Not for several threads at once.

    It holds a window of 16 MiB from the first large file on.
    """

    def __init__(self, seed: int) -> None:
        """Raises HostUnfit where the library came without its compiled module."""
        try:
            # Loaded here, because checks and restores, which never cut, take a while to start.
            from pyfastcdc.cy import FastCDC
        except ImportError as error:  # pragma: no cover
            raise HostUnfit(
                "pyfastcdc is installed without its compiled module (pyfastcdc.cy).",
                next_step="Install a binary wheel of pyfastcdc for this Python and platform.",
            ) from error
        self._chunker = FastCDC(
            AVERAGE,
            min_size=MINIMUM,
            max_size=LARGEST,
            seed=(seed & ((1 << _SEED_BITS) - 1)) or 1,
        )
        self._window: bytearray | None = None

    def lengths(self, data: bytes | bytearray | memoryview) -> Iterator[int]:
        """Lengths of the chunks of content that is held whole."""
        return (chunk.length for chunk in self._chunker.cut_buf(data))

    def cut(self, fd: int, size: int, hasher: blake3) -> Iterator[tuple[int, memoryview | None]]:
        """The chunks of an open file of `size` bytes: length, and bytes or None for zeros.

        The bytes are valid until the next step. `hasher` takes in the whole content. Ends early
        where the file is shorter than `size`: the caller compares lengths and digest.
        """
        for start, end, hole in extents(fd, size):
            if hole:
                yield from self._zeros(end - start, hasher)
            else:
                yield from self._data(fd, start, end, hasher)

    @staticmethod
    def _zeros(length: int, hasher: blake3) -> Iterator[tuple[int, None]]:
        while length:
            count = min(length, LARGEST)
            hasher.update(memoryview(ZEROS)[:count])
            yield count, None
            length -= count

    def _data(
        self, fd: int, at: int, end: int, hasher: blake3
    ) -> Iterator[tuple[int, memoryview | None]]:
        if self._window is None:
            self._window = bytearray(WINDOW)
        view = memoryview(self._window)
        held = 0
        while True:
            while at < end and held < WINDOW:
                stop = held + min(WINDOW - held, end - at)
                count = os.preadv(fd, [view[held:stop]], at)
                if count == 0:
                    end = at
                    break
                hasher.update(view[held : held + count])
                held += count
                at += count
            last = at >= end
            done = 0
            for chunk in self._chunker.cut_buf(view[:held]):
                # A chunk near the window's end might go on behind it.
                if not last and held - chunk.offset < LARGEST:
                    break
                yield chunk.length, view[chunk.offset : chunk.offset + chunk.length]
                done = chunk.offset + chunk.length
            if last:
                return
            view[: held - done] = view[done:held]
            held -= done


def file_hasher() -> blake3:
    """A hasher for a large file's content, in several threads where that is faster."""
    return blake3(max_threads=blake3.AUTO)


def content_id(data: bytes | memoryview) -> bytes:
    """The content id of a chunk's bytes."""
    if len(data) > _THREADED:
        return blake3(data, max_threads=blake3.AUTO).digest()
    return blake3(data).digest()


@lru_cache(maxsize=256)
def zeros_id(length: int) -> bytes:
    """The content id of a chunk of zeros; what has it needs no bytes, a hole will do."""
    return content_id(memoryview(ZEROS)[:length])


def extents(fd: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Runs of an open file in order: start, end, whether it is a hole worth leaving out."""
    at = start = 0  # data is gathered from `start` on, over small holes
    while at < size:
        try:
            data = min(os.lseek(fd, at, os.SEEK_DATA), size)
        except OSError as error:
            if error.errno == errno.ENXIO:
                data = size  # a hole up to the end
            elif error.errno == errno.EINVAL:
                break  # this file system does not tell
            else:
                raise
        if data - at >= LEAST_HOLE:
            if at > start:
                yield start, at, False
            yield at, data, True
            start = data
        if data >= size:
            at = size
            break
        at = min(max(os.lseek(fd, data, os.SEEK_HOLE), data + 1), size)
    if size > start:
        yield start, size, False


def encode_recipe(chunks: Iterable[tuple[bytes, int]]) -> bytes:
    """The content of a recipe: content id and length of each chunk of a file, in order."""
    return b"".join([RECIPE.pack(content, length) for content, length in chunks])


def decode_recipe(data: bytes, size: int, name: str) -> list[tuple[bytes, int]]:
    """The chunks of a file of `size` bytes. Raises IntegrityError naming `name`."""
    chunks: list[tuple[bytes, int]] = []
    if len(data) % RECIPE.size == 0:
        chunks = list(RECIPE.iter_unpack(data))
    if sum(length for _, length in chunks) != size or not all(
        0 < length <= LARGEST for _, length in chunks
    ):
        raise IntegrityError(f"The recipe of {name} does not fit its file.", object=name)
    return chunks
