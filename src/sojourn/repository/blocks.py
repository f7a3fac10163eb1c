"""Blocks: consecutive chunks compressed and sealed together, the unit of reading.

Guarantee: encoding is pure, so any number of threads may do it; opening gives exactly the bytes
that were encoded as this block of this pack, or raises IntegrityError naming the pack. What does
not shrink is kept as it is, and a probe spares the attempt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.repository import cipher
from sojourn.repository.compression import LEVEL, compress, decompress
from sojourn.repository.keys import DomainKeys
from sojourn.repository.records import (
    BLOCK_LIMITS,
    COMPRESSED,
    META,
    PackInfo,
    pack_key,
)

DIGEST_BYTES = 16
_ASSOCIATED = struct.Struct("<32sIB")
_PROBE_LEVEL = 1
_PROBED = 128 << 10  # a smaller block is compressed sooner than probed
_PIECES, _PIECE = 8, 8 << 10
_GAIN = 20  # what does not shrink by a twentieth is kept as it is

Raw = bytes | bytearray | memoryview


class EncodedBlock(msgspec.Struct, frozen=True):
    """A block as it will stand in a pack. `number` and the salt it was encoded with bind it to its
    place; `raw` is its length before."""

    number: int
    raw: int
    flags: int
    stored: bytes
    digest: bytes


def encode_block(
    raw: Raw | Sequence[Raw],
    keys: DomainKeys,
    salt: bytes,
    number: int,
    level: int = LEVEL,
) -> EncodedBlock:
    """Compress and seal a block's bytes (or its chunks in order) as block `number` of the pack
    that has this salt. Pure; for threads."""
    whole = raw if isinstance(raw, bytes | bytearray | memoryview) else b"".join(raw)
    size = len(whole)
    if not 0 < size <= BLOCK_LIMITS[META]:
        raise ValueError(f"a block of {size} bytes")
    flags = 0
    body: Raw = whole
    if _shrinks(whole):
        packed = compress(whole, level)
        if len(packed) < size:
            body, flags = packed, COMPRESSED
    if keys.sealing is not None:
        # Numbers as nonces are safe: the key is this pack's alone, and has one block of a number.
        associated = _ASSOCIATED.pack(salt, number, flags)
        stored = cipher.encrypt(keys.pack_key(salt), body, associated, number)
    else:
        stored = bytes(body)
    return EncodedBlock(number, size, flags, stored, digest(stored))


def open_block(stored: bytes | memoryview, pack: PackInfo, number: int, keys: DomainKeys) -> bytes:
    """The raw bytes of a block as read from its pack. Raises IntegrityError naming the pack."""
    block = pack.block(number)
    if len(stored) != block.stored or digest(stored) != block.digest:
        raise damaged(keys, pack, number, "differs from what was written")
    if not 0 < block.raw <= BLOCK_LIMITS.get(pack.kind, 0):
        raise damaged(keys, pack, number, "declares a length over the limit")
    body: bytes | memoryview = stored
    if keys.sealing is not None:
        associated = _ASSOCIATED.pack(pack.salt, number, block.flags)
        try:
            body = cipher.decrypt(keys.pack_key(pack.salt), stored, associated, number)
        except cipher.Refused:
            raise damaged(keys, pack, number, "does not open with the domain's key") from None
    if not block.flags & COMPRESSED:
        if len(body) != block.raw:
            raise damaged(keys, pack, number, "is not of the length its record says")
        return bytes(body)
    try:
        return decompress(body, block.raw)
    except ValueError as error:
        raise damaged(keys, pack, number, f"is damaged: {error}") from None


def digest(stored: Raw) -> bytes:
    """What the records hold of a block's stored bytes."""
    return blake3(stored).digest(DIGEST_BYTES)


def damaged(keys: DomainKeys, pack: PackInfo, number: int, cause: str) -> IntegrityError:
    """The error for a bad block."""
    key = pack_key(keys.domain, pack.id)
    return IntegrityError(f"Block {number} of {key}: it {cause}.", object=key, block=number)


def _shrinks(whole: Raw) -> bool:
    """Whether compressing is worth a try. A block holds files of many kinds, so pieces from all
    over it are looked at, not its beginning alone."""
    size = len(whole)
    if size < _PROBED:
        return True
    step = (size - _PIECE) // (_PIECES - 1)
    view = memoryview(whole)
    sample = b"".join(view[at * step : at * step + _PIECE] for at in range(_PIECES))
    return len(compress(sample, _PROBE_LEVEL)) * _GAIN <= len(sample) * (_GAIN - 1)
