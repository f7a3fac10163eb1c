"""Packs, indexes and forged objects for tests of the repository's formats."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from sojourn.repository.keys import DomainKeys, Keyring
from sojourn.repository.packs import (
    CHUNK_DATA,
    CHUNK_SEGMENT,
    DATA,
    PackBuilder,
    PackInfo,
    encode_block,
)
from sojourn.repository.records import BLOCK, CHUNK, PACK_HEADER
from sojourn.repository.sealed import FOOTER, seal

ROOT = bytes(range(32))
OPEN = Keyring(ROOT, False).domain("ten_1")  # of a repository that is not encrypted
CLOSED = Keyring(ROOT, True).domain("ten_1")


def name_of(keys: DomainKeys, content: bytes, kind: int = DATA) -> bytes:
    """The name of a data chunk, or of a segment in a metadata pack."""
    which = CHUNK_DATA if kind == DATA else CHUNK_SEGMENT
    return keys.chunk_name(which, blake3(content).digest())


def make_pack(
    keys: DomainKeys, blocks: Sequence[Sequence[bytes]], kind: int = DATA
) -> tuple[bytes, PackInfo]:
    """A pack of these blocks of chunks."""
    builder = PackBuilder(keys, kind)
    for number, chunks in enumerate(blocks):
        block = encode_block(list(chunks), keys, builder.salt, number)
        builder.add(block, [(name_of(keys, chunk, kind), len(chunk)) for chunk in chunks])
    return builder.finish()


def made_up(names: Sequence[bytes], length: int = 10, id: bytes | None = None) -> PackInfo:
    """Consistent records of one block with chunks of these names; there is no such pack."""
    chunks = b"".join(CHUNK.pack(name, 0, at * length, length) for at, name in enumerate(names))
    size = length * len(names)
    blocks = BLOCK.pack(PACK_HEADER.size, size, size, 0, bytes(16))
    id = id if id is not None else os.urandom(32)
    return PackInfo(id, PACK_HEADER.size + size + 200, DATA, bytes(32), blocks, chunks)


def forged_pack(
    keys: DomainKeys, footer: object, body: bytes = b"", salt: bytes = bytes(32), kind: int = DATA
) -> bytes:
    """A pack with any footer under a seal that holds."""
    payload = footer if isinstance(footer, bytes) else msgspec.msgpack.encode(footer)
    sealed = seal(FOOTER, payload, keys, salt, salt=salt)
    header = PACK_HEADER.pack(b"SJPK", 1, kind, 2 if keys.encrypted else 0, 0, salt)
    return header + body + sealed + struct.pack("<I4s", len(sealed), b"SJPE")
