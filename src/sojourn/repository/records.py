"""What is known of a pack: which blocks it has, and which chunks lie where in them.

Guarantee: records that pass `flaw` are consistent: blocks follow one another without gaps, chunks
cover their block exactly, no number points outside, and no block is larger than its kind's limit.
They stay in their stored form (fixed records in two byte strings), because millions of them are
kept in memory: 44 bytes a chunk instead of several hundred as objects.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from itertools import accumulate
from operator import add, le
from typing import NamedTuple

import msgspec

DATA, META = 0, 1
CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT = 0, 1, 2

# Raw bytes of the largest block of a pack's kind: one chunk may be larger than BLOCK_BYTES.
BLOCK_LIMITS = {DATA: 8 << 20, META: 64 << 20}
MAX_BLOCKS = 1 << 14
MAX_CHUNKS = 1 << 17
MAX_PACK = 128 << 20

PACK_HEADER = struct.Struct("<4sBBBB32s")
BLOCK = struct.Struct("<IIIB16s")
CHUNK = struct.Struct("<32sIII")
ID_BYTES = SALT_BYTES = NAME_BYTES = 32
COMPRESSED = 1
SEAL_BYTES = 16  # the tag of an encrypted block
WHERE = struct.Struct("<III")
_WORDS = CHUNK.size // 4


def pack_key(domain: str, id: bytes | str) -> str:
    """The key of a pack, by its id or its id in hex."""
    name = id if isinstance(id, str) else id.hex()
    return f"{domain}/packs/{name[:2]}/{name}"


class Block(NamedTuple):
    """One block: where its stored bytes lie in the pack, and what they are."""

    offset: int
    stored: int
    raw: int
    flags: int
    digest: bytes


class PackInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The records of one pack; in this form they stand in an index."""

    id: bytes
    size: int
    kind: int
    salt: bytes
    blocks: bytes
    chunks: bytes

    def __repr__(self) -> str:
        return f"<pack {self.id.hex()[:16]}, {self.block_count} blocks, {len(self)} chunks>"

    def __len__(self) -> int:
        return len(self.chunks) // CHUNK.size

    @property
    def block_count(self) -> int:
        """How many blocks it has."""
        return len(self.blocks) // BLOCK.size

    @property
    def raw(self) -> int:
        """Bytes of all chunks before compression."""
        return sum(block[2] for block in BLOCK.iter_unpack(self.blocks))

    def block(self, number: int) -> Block:
        """The block of a number."""
        return Block._make(BLOCK.unpack_from(self.blocks, number * BLOCK.size))

    def chunk(self, number: int) -> tuple[bytes, int, int, int]:
        """Name, block, offset in the block's raw bytes, and length of a chunk."""
        return CHUNK.unpack_from(self.chunks, number * CHUNK.size)

    def where(self, number: int) -> tuple[int, int, int]:
        """Block, offset and length of a chunk."""
        return WHERE.unpack_from(self.chunks, number * CHUNK.size + NAME_BYTES)

    def name(self, number: int) -> bytes:
        """Name of a chunk."""
        at = number * CHUNK.size
        return self.chunks[at : at + NAME_BYTES]

    def records(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Name, block, offset and length of every chunk, in order."""
        return CHUNK.iter_unpack(self.chunks)

    def names(self) -> Iterator[bytes]:
        """The names of the chunks, in order."""
        return (record[0] for record in CHUNK.iter_unpack(self.chunks))

    def words(self) -> array[int]:
        """The chunk records as numbers of 32 bits, eleven each: the first eight are the name."""
        words = array("I")
        words.frombytes(self.chunks)
        if sys.byteorder == "big":
            words.byteswap()
        return words

    def flaw(self) -> str | None:
        """The first breach of the rules for records, if any."""
        if len(self.id) != ID_BYTES or len(self.salt) != SALT_BYTES:
            return "length of the id or salt"
        if self.kind not in BLOCK_LIMITS or not 0 <= self.size <= MAX_PACK:
            return "kind or size"
        if len(self.blocks) % BLOCK.size or len(self.chunks) % CHUNK.size:
            return "length of the records"
        if not 0 < self.block_count <= MAX_BLOCKS or not 0 < len(self) <= MAX_CHUNKS:
            return "number of blocks or chunks"
        return self._flaw_of_blocks() or self._flaw_of_chunks()

    def _flaw_of_blocks(self) -> str | None:
        at = PACK_HEADER.size
        limit = BLOCK_LIMITS[self.kind]
        for number, (offset, stored, raw, flags, _) in enumerate(BLOCK.iter_unpack(self.blocks)):
            if offset != at or not 0 < raw <= limit or not 0 < stored <= raw + SEAL_BYTES:
                return f"place or length of block {number}"
            if flags & ~COMPRESSED:
                return f"flags of block {number}"
            at += stored
        return "blocks that leave the pack" if at > self.size else None

    def _flaw_of_chunks(self) -> str | None:
        # The same for all chunks at once, in C: an index may hold a million.
        raws = [block[2] for block in BLOCK.iter_unpack(self.blocks)]
        starts = list(accumulate(raws, initial=0))
        words = self.words()
        numbers, offsets, lengths = words[8::_WORDS], words[9::_WORDS], words[10::_WORDS]
        if max(numbers) >= len(raws) or not min(lengths):
            return "a chunk without a block or a length"
        ends = map(add, offsets, lengths)
        if not all(map(le, ends, map(raws.__getitem__, numbers))):
            return "a chunk that leaves its block"
        positions = list(accumulate(lengths, initial=0))
        if positions.pop() != starts[-1]:
            return "blocks that are not covered by chunks"
        if positions != list(map(add, map(starts.__getitem__, numbers), offsets)):
            return "chunks that do not follow one another"
        return None


class Place(NamedTuple):
    """Where a chunk lies."""

    pack: PackInfo
    block: int
    offset: int
    length: int
