"""Objects in one file: appended one after another when it is written, read-only afterwards.

Guarantee: that of `backends.base` for a space of objects nobody changes. A file is read only when
all of it is there: the digest at its end is that of every byte before it, the directory names each
object once by a key that leads nowhere else, and the objects follow one another without a gap, so
nothing can hide between or behind them. Anything else is ArchiveInvalid, before an object is read.

Places are not stored: they follow from the sizes, so no two objects can be made to overlap.
docs/formats/archive.md gives the bytes. Memory: some 200 bytes for each object.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
from blake3 import blake3

from sojourn.errors import (
    ArchiveInvalid,
    Conflict,
    IntegrityError,
    Interrupted,
    ObjectMissing,
    StorageFull,
    StoreRefused,
    StoreUnreachable,
)
from sojourn.repository.backends.base import ObjectInfo
from sojourn.repository.backends.object_keys import check_key, check_prefix, check_ranges, is_key

MAGIC, END = b"SJAR", b"SJAE"
FORMAT = 1
HEADER = struct.Struct("<4sHH")
TRAILER = struct.Struct("<I4s")  # length of the directory
DIGEST = 32
MAX_DIRECTORY = 16 << 20
LEAST = HEADER.size + 1 + TRAILER.size + DIGEST

_HASHED = 4 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, int]])


class _File:
    """The reading half of both."""

    def __init__(self, descriptor: int, stop: threading.Event | None = None) -> None:
        self._fd = descriptor
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}  # offset and size by key
        self._url = f"archive:{os.urandom(8).hex()}"  # tells archives apart where they are cached
        self._stop = stop or threading.Event()

    @property
    def url(self) -> str:
        return self._url

    def get(self, key: str, *, limit: int | None = None) -> tuple[bytes, str]:
        offset, size = self._place(key)
        if limit is not None and size > limit:
            raise IntegrityError(
                f"{key} has {size} bytes, more than the {limit} it may have.", object=key
            )
        return self._read(key, offset, size), str(offset)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_ranges(ranges)
        start, size = self._place(key)
        for offset, length in ranges:
            if length and offset + length > size:
                raise IntegrityError(
                    f"{key} has {size} bytes, too few for {offset}+{length}.", object=key
                )
        return [self._read(key, start + offset, length) for offset, length in ranges]

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        check_ranges([(0, length)])
        start, size = self._place(key)
        taken = min(length, size)
        return self._read(key, start + size - taken, taken), size

    def head(self, key: str) -> ObjectInfo:
        offset, size = self._place(key)
        return ObjectInfo(key, size, 0.0, str(offset))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """In the order of the keys."""
        check_prefix(prefix)
        with self._lock:
            found = sorted(key for key in self._places if key.startswith(prefix))
        return (self.head(key) for key in found)

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        """The file is the caller's."""

    def _place(self, key: str) -> tuple[int, int]:
        check_key(key)
        with self._lock:
            found = self._places.get(key)
        if found is None:
            raise ObjectMissing(f"There is no object {key}.", key=key)
        return found

    def _read(self, key: str, offset: int, length: int) -> bytes:
        pieces = []
        while length:
            if self._stop.is_set():
                raise Interrupted("the work on the archive was given up", next_step="")
            try:
                piece = os.pread(self._fd, min(length, 64 << 20), offset)
            except OSError as error:
                raise StoreUnreachable(
                    f"The archive cannot be read: {error.strerror}.", key=key
                ) from error
            if not piece:
                raise IntegrityError(f"{key} was cut off while it was read.", object=key)
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class ArchiveWriter(_File):
    """An archive that is being written to an empty file open for reading and writing. An object
    is written once and stays. Safe for many threads; `finish` comes last."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._hasher = blake3(max_threads=blake3.AUTO)
        self._end = 0
        self._append(HEADER.pack(MAGIC, FORMAT, 0))

    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        check_key(key)
        if not data:
            raise StoreRefused(f"{key} would be empty.", key=key)
        with self._lock:
            if key in self._places or replaces is not None:
                raise Conflict(f"{key} cannot be changed: an archive is written once.", key=key)
            offset = self._append(data)
            self._places[key] = offset, len(data)
            return str(offset)

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                if key in self._places:
                    raise StoreRefused(f"{key} is in an archive and stays there.", key=key)

    def finish(self) -> tuple[str, int]:
        """Write the directory and the digest; answers the digest in hex and the file's size.
        Raises StorageFull."""
        with self._lock:
            listed = sorted(self._places.items(), key=lambda item: item[1][0])
            directory = _encoder.encode([(key, size) for key, (_, size) in listed])
            if len(directory) > MAX_DIRECTORY:
                raise StoreRefused("The archive would hold too many objects.")
            self._append(directory + TRAILER.pack(len(directory), END))
            digest = self._hasher.digest()
            self._append(digest)
            return digest.hex(), self._end

    def _append(self, data: bytes) -> int:
        """Where it stands. What a failed call has written is written over by the next."""
        at = offset = self._end
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._fd, view, at)
                view = view[count:]
                at += count
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull(
                    "No room on the node's disk for the archive.",
                    cause=os.strerror(error.errno or 0),
                ) from error
            raise StoreUnreachable(f"The archive cannot be written: {error.strerror}.") from error
        self._hasher.update(data)
        self._end = at
        return offset


class ArchiveReader(_File):
    """An archive in a file open for reading, found whole when this is made.

    Raises ArchiveInvalid; also when `expect`, a digest in hex, is another than the archive's.
    Once `stop` is set, everything ends with Interrupted at its next read."""

    def __init__(
        self,
        descriptor: int,
        *,
        expect: str | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        super().__init__(descriptor, stop)
        self.size = os.fstat(descriptor).st_size
        if self.size < LEAST:
            raise ArchiveInvalid(f"The archive is cut off: it has {self.size} bytes.")
        magic, format, reserved = HEADER.unpack(self._read("header", 0, HEADER.size))
        if magic != MAGIC:
            raise ArchiveInvalid("The file is no archive of a session: it begins otherwise.")
        if format != FORMAT or reserved:
            raise ArchiveInvalid(
                f"The archive has format {format}; this version reads format {FORMAT}.",
                next_step="Use a version of Sojourn that knows this format.",
            )
        end = self.size - DIGEST
        stated = self._read("digest", end, DIGEST)
        length, magic = TRAILER.unpack(self._read("trailer", end - TRAILER.size, TRAILER.size))
        if magic != END:
            raise ArchiveInvalid("The archive is cut off, or something follows its end.")
        if self._hash(end) != stated:
            raise ArchiveInvalid("The archive is damaged: its digest is not that of its bytes.")
        self.digest = stated.hex()
        if expect is not None and expect.lower() != self.digest:
            raise ArchiveInvalid(
                f"The archive is another one: its digest is {self.digest}.",
                next_step="Compare the digest with the one that `sojourn export` printed.",
                expected=expect,
                digest=self.digest,
            )
        self._take_directory(end - TRAILER.size - length, length)

    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        raise StoreRefused("An archive is not changed.", key=key)

    def delete(self, keys: Sequence[str]) -> None:
        raise StoreRefused("An archive is not changed.")

    def keys(self) -> set[str]:
        """The keys of all objects."""
        return set(self._places)

    def _hash(self, end: int) -> bytes:
        hasher = blake3(max_threads=blake3.AUTO)
        at = 0
        while at < end:
            piece = self._read("archive", at, min(_HASHED, end - at))
            hasher.update(piece)
            at += len(piece)
        return hasher.digest()

    def _take_directory(self, start: int, length: int) -> None:
        if length > MAX_DIRECTORY or start < HEADER.size:
            raise ArchiveInvalid("The archive's directory cannot be its own.")
        try:
            listed = _decoder.decode(self._read("directory", start, length))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ArchiveInvalid(f"The archive's directory is malformed: {error}") from None
        at = HEADER.size
        for key, size in listed:
            if not is_key(key):
                raise ArchiveInvalid(f"The archive names an object {key[:200]!r}.")
            if key in self._places:
                raise ArchiveInvalid(f"The archive names {key} twice.", key=key)
            if size <= 0:
                raise ArchiveInvalid(f"The archive gives {key} a size of {size}.", key=key)
            self._places[key] = at, size
            at += size
        if at != start:
            raise ArchiveInvalid("The objects of the archive do not fill it.")
