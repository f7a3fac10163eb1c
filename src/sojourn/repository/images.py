"""A memory image in the repository: which piece of which chunk each of its files consists of.

Guarantee: a map that was decoded here names only files inside the image's directory, its pieces
fill every file exactly, refer only to chunks it lists, and its reference is the one of the image's
id; all of that is known before anything of the image is fetched or written. A forged map cannot ask
for more memory than its own size.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Iterator
from operator import add

import msgspec

from sojourn.errors import IntegrityError
from sojourn.model.snapshots import MemoryRef
from sojourn.store.fingerprints import image_digest
from sojourn.store.images import object_name

PAGE = 4096
CHUNK_PAGES = 64
DIGEST = 32
RECORD = struct.Struct("<III")  # length, source (0 zeros, n the n-th chunk from 1), offset in it
LARGEST_PIECE = (1 << 32) - PAGE  # of zeros; whole pages, so that pieces stay aligned
LARGEST_CHUNK = 4 << 20
_DIGEST_TEXT = re.compile(r"[0-9a-f]{64}")


class ImageMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image consists of.

    `chunks` are content ids, 32 bytes each; `files` holds for each file of `ref` its pieces in
    order, 12 bytes each (`RECORD`).
    """

    ref: MemoryRef
    chunks: bytes
    files: dict[str, bytes]

    def chunk(self, number: int) -> bytes:
        """Content id of the chunk that a piece's source names (from 1)."""
        return self.chunks[(number - 1) * DIGEST : number * DIGEST]

    def chunk_ids(self) -> Iterator[bytes]:
        """Content ids of all chunks, in order."""
        chunks = self.chunks
        for at in range(0, len(chunks), DIGEST):
            yield chunks[at : at + DIGEST]

    def pieces(self, file: str) -> Iterator[tuple[int, int, int]]:
        """Pieces of a file in order: length, source, offset in the chunk."""
        return RECORD.iter_unpack(self.files[file])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ImageMap)


def encode_image(image: ImageMap) -> bytes:
    """The payload of an image's root object."""
    return _encoder.encode(image)


def decode_image(payload: bytes, image: str) -> ImageMap:
    """The map of the image with this id. Raises IntegrityError."""
    name = object_name(image)
    try:
        found = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"The map of {name} is malformed: {error}", object=name) from None
    cause = _flaw(found, image)
    if cause is not None:
        raise IntegrityError(f"The map of {name} is inconsistent: {cause}.", object=name)
    return found


def _flaw(found: ImageMap, image: str) -> str | None:
    ref = found.ref
    if ref.id != image or image_digest(ref.files) != image:
        return "it is of another image"
    cause = _names_flaw(ref)
    if cause is not None:
        return cause
    if found.files.keys() != ref.files.keys():
        return "its files are not those of its reference"
    if len(found.chunks) % DIGEST:
        return "a chunk's id is cut off"
    count = len(found.chunks) // DIGEST
    used: set[int] = set()
    for file, raw in found.files.items():
        cause = _pieces_flaw(raw, ref.files[file][0], count, used)
        if cause is not None:
            return f"{cause} in {file!r}"
    used.discard(0)
    if len(used) != count:
        return "it lists chunks it does not use"
    return None


def _names_flaw(ref: MemoryRef) -> str | None:
    directories: set[str] = set()
    for file, (size, digest) in ref.files.items():
        parts = file.split("/")
        if "\0" in file or any(part in {"", ".", ".."} for part in parts):
            return f"the name {file!r}"
        try:
            file.encode()
        except UnicodeEncodeError:
            return f"the name {file!r}"
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
        if size < 0 or not _DIGEST_TEXT.fullmatch(digest):
            return f"size or digest of {file!r}"
    if directories & ref.files.keys():
        return "a file is a directory of another"
    if ref.bytes != sum(size for size, _ in ref.files.values()):
        return "its size is not that of its files"
    return None


def _pieces_flaw(raw: bytes, size: int, count: int, used: set[int]) -> str | None:
    if len(raw) % RECORD.size:
        return "a piece is cut off"
    numbers = array("I", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    lengths, sources, offsets = numbers[0::3], numbers[1::3], numbers[2::3]
    if sum(lengths) != size:
        return "the pieces do not fill the file"
    if not lengths:
        return None
    if not all(lengths):
        return "an empty piece"
    if max(sources) > count:
        return "a piece of a chunk that is not listed"
    if any(offset for offset, source in zip(offsets, sources, strict=True) if not source):
        return "an offset in zeros"
    ends = map(add, lengths, offsets)
    if any(end > LARGEST_CHUNK for end, source in zip(ends, sources, strict=True) if source):
        return "a piece larger than any chunk"
    used.update(sources)
    return None
