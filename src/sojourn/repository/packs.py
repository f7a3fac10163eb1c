"""Packs: objects of many blocks of chunks, with an index of themselves at their end.

Guarantee: a pack's id is the hash of its bytes, and its footer alone says all that is in it, so
that packs no index names are found and used again after a crash. Whatever stored bytes say is
checked before anything is looked up by it. docs/formats/repository.md gives the bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator

import msgspec
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.repository.backends.base import Backend
from sojourn.repository.blocks import EncodedBlock, damaged, encode_block, open_block
from sojourn.repository.keys import DomainKeys
from sojourn.repository.records import (
    BLOCK,
    BLOCK_LIMITS,
    CHUNK,
    CHUNK_DATA,
    CHUNK_RECIPE,
    CHUNK_SEGMENT,
    DATA,
    ID_BYTES,
    MAX_BLOCKS,
    MAX_CHUNKS,
    MAX_PACK,
    META,
    PACK_HEADER,
    SALT_BYTES,
    Block,
    PackInfo,
    Place,
    pack_key,
)
from sojourn.repository.sealed import ENCRYPTED, FOOTER, HEADER, largest, seal, unseal

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_CHUNKS",
    "BLOCK_LIMITS",
    "CHUNK_DATA",
    "CHUNK_RECIPE",
    "CHUNK_SEGMENT",
    "DATA",
    "MAX_BLOCKS",
    "MAX_CHUNKS",
    "MAX_PACK",
    "META",
    "PACK_BYTES",
    "Block",
    "EncodedBlock",
    "PackBuilder",
    "PackInfo",
    "Place",
    "encode_block",
    "open_block",
    "pack_id",
    "parse_pack",
    "read_footer",
]

MAGIC, END = b"SJPK", b"SJPE"
FORMAT = 1

# How writers size things; readers hold to the limits of `records` alone.
BLOCK_BYTES = 1 << 20
BLOCK_CHUNKS = 4096
PACK_BYTES = 16 << 20

_TRAILER = struct.Struct("<I4s")
_TAIL = 64 << 10  # what is fetched first of a pack's end: the footers of most packs


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, bytes, bytes])


class PackBuilder:
    """Puts encoded blocks together to one pack. Not for several threads at once."""

    def __init__(self, keys: DomainKeys, kind: int) -> None:
        if kind not in BLOCK_LIMITS:
            raise ValueError(f"no kind of pack: {kind}")
        self.keys = keys
        self.kind = kind
        self.salt = os.urandom(SALT_BYTES)
        self._parts = [_header(keys, kind, self.salt)]
        self._blocks: list[bytes] = []
        self._chunks: list[bytes] = []
        self._size = PACK_HEADER.size

    @property
    def size(self) -> int:
        """Bytes so far, without the footer."""
        return self._size

    @property
    def block_count(self) -> int:
        """Blocks so far: the number the next one must have been encoded with."""
        return len(self._blocks)

    @property
    def chunk_count(self) -> int:
        """Chunks so far."""
        return len(self._chunks)

    @property
    def full(self) -> bool:
        """Whether it is to be finished before another block of at most BLOCK_CHUNKS is added."""
        return (
            self._size >= PACK_BYTES
            or len(self._chunks) > MAX_CHUNKS - BLOCK_CHUNKS
            or len(self._blocks) >= MAX_BLOCKS
        )

    def add(self, block: EncodedBlock, chunks: Iterable[tuple[bytes, int]]) -> None:
        """Append a block and the chunks (name, length) it consists of, in order. Blocks must be
        encoded with this pack's salt and come in the order of their numbers."""
        number = len(self._blocks)
        if block.number != number or block.raw > BLOCK_LIMITS[self.kind]:
            raise ValueError(f"block {block.number} of {block.raw} bytes where {number} follows")
        records = []
        at = 0
        for name, length in chunks:
            records.append(CHUNK.pack(name, number, at, length))
            if length <= 0 or len(name) != 32:
                raise ValueError("a chunk without a length or name")
            at += length
        if at != block.raw:
            raise ValueError(f"chunks of {at} bytes in a block of {block.raw}")
        if number >= MAX_BLOCKS or len(self._chunks) + len(records) > MAX_CHUNKS:
            raise ValueError("the pack is full")
        self._chunks += records
        self._blocks.append(
            BLOCK.pack(self._size, len(block.stored), block.raw, block.flags, block.digest)
        )
        self._parts.append(block.stored)
        self._size += len(block.stored)

    def finish(self) -> tuple[bytes, PackInfo]:
        """The pack's bytes and records."""
        if not self._blocks:
            raise ValueError("a pack without blocks")
        blocks, chunks = b"".join(self._blocks), b"".join(self._chunks)
        # The footer is sealed with the pack's salt, so it can be opened without the header.
        payload = _encoder.encode((self.kind, blocks, chunks))
        footer = seal(FOOTER, payload, self.keys, self.salt, salt=self.salt)
        self._parts += (footer, _TRAILER.pack(len(footer), END))
        data = b"".join(self._parts)
        self._parts.clear()
        info = PackInfo(blake3(data).digest(), len(data), self.kind, self.salt, blocks, chunks)
        return data, info


def pack_id(key: str) -> bytes:
    """The id in a pack's key. Raises IntegrityError where it has none."""
    try:
        found = bytes.fromhex(key.rpartition("/")[2])
    except ValueError:
        found = b""
    if len(found) != ID_BYTES:
        raise IntegrityError(f"{key} is no key of a pack.", object=key)
    return found


def read_footer(backend: Backend, key: str, keys: DomainKeys) -> PackInfo:
    """The records of a pack from its end alone; its blocks are not read. Raises ObjectMissing,
    IntegrityError naming the key, StoreUnreachable."""
    id = pack_id(key)
    tail, size = backend.get_tail(key, _TAIL)
    length = _footer_length(tail, size, key)
    if length + _TRAILER.size > len(tail):
        tail, size = backend.get_tail(key, length + _TRAILER.size)
        if _footer_length(tail, size, key) != length or len(tail) < length + _TRAILER.size:
            raise IntegrityError(f"{key} changed while it was read.", object=key)
    footer = tail[len(tail) - _TRAILER.size - length : len(tail) - _TRAILER.size]
    return _records(footer, id, size, keys, key)


def parse_pack(data: bytes, keys: DomainKeys, *, name: str | None = None) -> PackInfo:
    """The records of a whole pack, after everything in it was checked: header, footer, every
    block, and the content of every chunk whose name follows from its bytes (all but recipes, whose
    name is that of the file they describe). Raises IntegrityError."""
    id = blake3(data).digest()
    info = parse_records(data, keys, id, name if name is not None else pack_key(keys.domain, id))
    for _ in contents(data, info, keys):
        pass
    return info


def parse_records(data: bytes, keys: DomainKeys, id: bytes, name: str) -> PackInfo:
    """The records of a whole pack; of its blocks only the places are checked."""
    length = _footer_length(data, len(data), name)
    end = len(data) - _TRAILER.size
    info = _records(data[end - length : end], id, len(data), keys, name)
    if data[: PACK_HEADER.size] != _header(keys, info.kind, info.salt):
        raise IntegrityError(f"{name} has a damaged header.", object=name)
    return info


def contents(data: bytes, info: PackInfo, keys: DomainKeys) -> Iterator[tuple[bytes, memoryview]]:
    """Name and bytes of every chunk of a whole pack, opened and compared with the names."""
    view = memoryview(data)
    opened = -1
    raw = memoryview(b"")
    for name, number, offset, length in info.records():
        if number != opened:
            block = info.block(number)
            stored = view[block.offset : block.offset + block.stored]
            raw, opened = memoryview(open_block(stored, info, number, keys)), number
        piece = raw[offset : offset + length]
        if not names_content(info.kind, name, piece, keys):
            raise damaged(keys, info, number, f"holds other content under the name {name.hex()}")
        yield name, piece


def names_content(kind: int, name: bytes, content: bytes | memoryview, keys: DomainKeys) -> bool:
    """Whether a chunk in a pack of this kind may have this name. A chunk of a metadata pack that is
    no segment may be a recipe; only the file it describes would tell."""
    if kind == DATA:
        return keys.chunk_name(CHUNK_DATA, blake3(content).digest()) == name
    return len(content) % 36 == 0 or (
        keys.chunk_name(CHUNK_SEGMENT, blake3(content).digest()) == name
    )


def _header(keys: DomainKeys, kind: int, salt: bytes) -> bytes:
    flags = ENCRYPTED if keys.sealing is not None else 0
    return PACK_HEADER.pack(MAGIC, FORMAT, kind, flags, 0, salt)


def _footer_length(tail: bytes, size: int, name: str) -> int:
    if len(tail) < _TRAILER.size or size < PACK_HEADER.size + _TRAILER.size:
        raise IntegrityError(f"{name} is cut off: it is no whole pack.", object=name)
    length, magic = _TRAILER.unpack_from(tail, len(tail) - _TRAILER.size)
    if magic != END:
        raise IntegrityError(f"{name} is cut off: it does not end as a pack does.", object=name)
    room = min(size - PACK_HEADER.size - _TRAILER.size, largest(FOOTER))
    if size > MAX_PACK or not HEADER.size <= length <= room:
        raise IntegrityError(f"{name} declares a footer that cannot be its own.", object=name)
    return int(length)


def _records(footer: bytes, id: bytes, size: int, keys: DomainKeys, name: str) -> PackInfo:
    salt = HEADER.unpack_from(footer)[-1]
    payload = unseal(FOOTER, footer, keys, salt, name=name)
    try:
        kind, blocks, chunks = _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise IntegrityError(f"The footer of {name} is malformed: {error}", object=name) from None
    info = PackInfo(id, size, kind, salt, blocks, chunks)
    cause = info.flaw()
    if cause is None:
        last = info.block(info.block_count - 1)
        if last.offset + last.stored + len(footer) + _TRAILER.size != size:
            cause = "blocks that do not fill the pack"
    if cause is not None:
        raise IntegrityError(f"The footer of {name} is inconsistent: {cause}.", object=name)
    return info
