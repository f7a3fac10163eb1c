"""Every parser of stored bytes of the repository's formats, as one function of bytes each.

A parser may give an answer or raise SojournError. Anything else, or memory out of proportion to
the input and its limits, is a fault. The same functions are driven by hypothesis and, where it is
installed, by a coverage-guided fuzzer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import zstandard
from blake3 import blake3

from sojourn.errors import SojournError
from sojourn.repository import config
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.repository.indexes import Index, decode_index
from sojourn.repository.keys import PLAIN, DomainKeys, read_wrapped
from sojourn.repository.packs import open_block, parse_pack, parse_records, read_footer
from sojourn.repository.records import BLOCK, CHUNK, DATA, PACK_HEADER, PackInfo
from sojourn.repository.sealed import (
    COMPRESSED,
    CONFIG,
    HEADER,
    INDEX,
    LIMITS,
    SNAPSHOT,
    WRAPPED,
    seal,
    unseal,
)
from support.packs import CLOSED, OPEN, forged_pack

SECRET = b"a secret for fuzzing"
PLACE = b"ten_1/snapshots/x"


def sealed_by_hand(
    kind: bytes, body: bytes, length: int, place: bytes, flags: int, keys: DomainKeys
) -> bytes:
    """A sealed object whose tag holds, whatever header and body say: what anyone can make in a
    repository that is not encrypted."""
    header = HEADER.pack(b"SJRS", kind, 1, flags, 0, length & (2**64 - 1), bytes(32))
    hasher = blake3(header, key=keys.naming)
    hasher.update(struct.pack("<I", len(place)) + place)
    hasher.update(body)
    return header + body + hasher.digest()


def unseal_open(data: bytes) -> object:
    return unseal(SNAPSHOT, data, OPEN, PLACE, name="x")


def unseal_encrypted(data: bytes) -> object:
    return unseal(SNAPSHOT, data, CLOSED, PLACE, name="x")


def forged_compressed(data: bytes) -> object:
    """A good seal around any compressed body; the first bytes are the declared length."""
    length = int.from_bytes(data[:4], "little")
    forged = sealed_by_hand(SNAPSHOT, data[4:], length, PLACE, COMPRESSED, OPEN)
    return unseal(SNAPSHOT, forged, OPEN, PLACE, name="x")


def configuration(data: bytes) -> object:
    """The object `config` as it lies in the store."""
    backend = open_backend("memory:")
    backend.put("config", data)
    return config.open_existing(backend, None)


def forged_configuration(data: bytes) -> object:
    """A good seal around any configuration."""
    return configuration(seal(CONFIG, data[: LIMITS[CONFIG]], PLAIN, b"config"))


def wrapped_key(data: bytes) -> object:
    """A wrapped key as it lies in the store, of a repository that has no other."""
    return read_wrapped(unseal(WRAPPED, data, PLAIN, b"keys/1", name="keys/1"), name="keys/1")


def forged_wrapped_key(data: bytes) -> object:
    return read_wrapped(data, name="keys/1")


def whole_pack(data: bytes) -> object:
    return parse_pack(data, OPEN)


def encrypted_pack(data: bytes) -> object:
    return parse_pack(data, CLOSED)


def pack_records(data: bytes) -> object:
    return parse_records(data, OPEN, bytes(32), "x")


def pack_end(data: bytes) -> object:
    """A pack's footer as it is read from a store."""
    backend = open_backend("memory:")
    key = f"ten_1/packs/00/{bytes(32).hex()}"
    backend.put(key, data)
    return read_footer(backend, key, OPEN)


def forged_footer(data: bytes) -> object:
    """A good seal around any footer, behind any body; both lengths are the input's."""
    cut = int.from_bytes(data[:2], "little") % (len(data) + 1)
    pack = forged_pack(OPEN, data[2:][:cut], data[2:][cut:])
    pack_end(pack)
    return whole_pack(pack)


def forged_records(data: bytes) -> object:
    """Well-formed footers of any records: numbers of blocks and chunks are the input's."""
    blocks = len(data) // 3 // BLOCK.size * BLOCK.size
    chunks = (len(data) - blocks) // CHUNK.size * CHUNK.size
    footer = [DATA, data[:blocks], data[blocks : blocks + chunks]]
    return whole_pack(forged_pack(OPEN, footer, data[blocks + chunks :]))


def forged_block(data: bytes) -> object:
    """One block with any stored bytes, flags and raw length, whose digest is right."""
    raw, stored = int.from_bytes(data[:4], "little"), data[5:]
    flags = data[4] if len(data) > 4 else 0
    digest = blake3(stored).digest(16)
    blocks = BLOCK.pack(PACK_HEADER.size, len(stored), raw, flags, digest)
    chunks = CHUNK.pack(bytes(32), 0, 0, raw)
    info = PackInfo(bytes(32), 40 + len(stored), DATA, bytes(32), blocks, chunks)
    return open_block(stored, info, 0, OPEN)


def index_object(data: bytes) -> object:
    """An index object as it lies in the store, under the name its bytes give."""
    backend = open_backend("memory:")
    key = f"ten_1/indexes/{blake3(data).hexdigest()}"
    backend.put(key, data)
    domain = Domain(backend, OPEN)
    # Also by way of the whole index, which passes a bad one over.
    return domain.index.find(bytes(32)), domain.read_index(key)


def forged_index(data: bytes) -> object:
    """A good seal around any index."""
    index_object(seal(INDEX, data, OPEN, b"ten_1/indexes/"))
    infos = decode_index(data, name="x")
    index = Index(lambda: ["x"], lambda key: infos)
    index.refresh()
    return [index.find(name) for info in infos for name in info.names()]


PARSERS: dict[str, Callable[[bytes], object]] = {
    parse.__name__: parse
    for parse in (
        unseal_open,
        unseal_encrypted,
        forged_compressed,
        configuration,
        forged_configuration,
        wrapped_key,
        forged_wrapped_key,
        whole_pack,
        encrypted_pack,
        pack_records,
        pack_end,
        forged_footer,
        forged_records,
        forged_block,
        index_object,
        forged_index,
    )
}


def attempt(name: str, data: bytes) -> bool:
    """Whether a parser took the bytes; anything but SojournError passes through."""
    try:
        PARSERS[name](data)
    except SojournError as error:
        assert error.code in {"integrity_error", "unsupported", "store_key_invalid"}, error.code
        return False
    return True


def samples() -> dict[str, list[bytes]]:
    """Bytes each parser takes, to begin from."""
    from sojourn.repository.indexes import encode_index
    from sojourn.repository.keys import wrap_root
    from support.packs import ROOT, make_pack

    blocks = [[b"abc" * 50, b"d"], [bytes(range(256))]]
    pack, info = make_pack(OPEN, blocks)
    encrypted, _ = make_pack(CLOSED, blocks)
    index = encode_index([info])
    stored = {
        "format": 1,
        "id": "0" * 32,
        "created_at": 1.0,
        "encrypted": False,
        "parameters": dict(config.PARAMETERS),
        "root": ROOT,
    }
    encoded = msgspec.msgpack.encode(stored)
    wrapped = wrap_root(ROOT, SECRET, "r")
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    last = info.block(1)
    footer = msgspec.msgpack.encode([DATA, info.blocks, info.chunks])
    return {
        "unseal_open": [seal(SNAPSHOT, data, OPEN, PLACE) for data in (b"x", bytes(999))],
        "unseal_encrypted": [seal(SNAPSHOT, data, CLOSED, PLACE) for data in (b"x", bytes(999))],
        "forged_compressed": [struct.pack("<I", 1000) + frame],
        "configuration": [seal(CONFIG, encoded, PLAIN, b"config")],
        "forged_configuration": [encoded],
        "wrapped_key": [seal(WRAPPED, wrapped, PLAIN, b"keys/1")],
        "forged_wrapped_key": [wrapped],
        "whole_pack": [pack],
        "encrypted_pack": [encrypted],
        "pack_records": [pack],
        "pack_end": [pack],
        "forged_footer": [
            struct.pack("<H", len(footer)) + footer + pack[40 : last.offset + last.stored]
        ],
        "forged_records": [info.blocks + info.chunks + pack[40 : last.offset + last.stored]],
        "forged_block": [struct.pack("<IB", 1000, 1) + frame],
        "index_object": [seal(INDEX, index, OPEN, b"ten_1/indexes/")],
        "forged_index": [index, encode_index([])],
    }
