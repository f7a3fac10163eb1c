"""Packs: what was put in comes out, from the end alone or from the whole; all else is refused."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository import packs
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.packs import (
    CHUNK_RECIPE,
    DATA,
    META,
    PackBuilder,
    encode_block,
    open_block,
    parse_pack,
    read_footer,
)
from sojourn.repository.records import BLOCK, CHUNK, COMPRESSED, MAX_CHUNKS
from support.packs import CLOSED, OPEN, forged_pack, made_up, make_pack, name_of

KEYS = st.sampled_from([OPEN, CLOSED])
BOTH = pytest.mark.parametrize("keys", [OPEN, CLOSED], ids=["open", "encrypted"])
TEXT = b" ".join(str(number).encode() for number in range(40_000))


def key_of(info) -> str:
    return f"ten_1/packs/{info.id.hex()[:2]}/{info.id.hex()}"


def stored(data: bytes, info, number: int) -> bytes:
    block = info.block(number)
    return data[block.offset : block.offset + block.stored]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    ),
    KEYS,
    st.sampled_from([DATA, META]),
)
def test_what_was_put_in_comes_out(blocks, keys, kind):
    data, info = make_pack(keys, blocks, kind)
    assert parse_pack(data, keys) == info
    assert info.flaw() is None
    chunks = [chunk for block in blocks for chunk in block]
    assert list(info.names()) == [name_of(keys, chunk, kind) for chunk in chunks]
    assert len(info) == len(chunks) and info.block_count == len(blocks)
    assert info.raw == sum(map(len, chunks)) and info.size == len(data)
    for number in range(len(info)):
        name, block, offset, length = info.chunk(number)
        raw = open_block(stored(data, info, block), info, block, keys)
        assert raw[offset : offset + length] == chunks[number]
        assert info.name(number) == name and info.where(number) == (block, offset, length)
    backend = open_backend("memory:")
    backend.put(key_of(info), data)
    assert read_footer(backend, key_of(info), keys) == info


@BOTH
def test_a_footer_longer_than_the_first_look_is_read_whole(keys):
    data, info = make_pack(keys, [[os.urandom(8) for _ in range(1000)] for _ in range(4)])
    assert len(data) - info.block(3).offset > packs._TAIL
    backend = open_backend("memory:")
    backend.put(key_of(info), data)
    assert read_footer(backend, key_of(info), keys) == info


def test_a_missing_pack_is_missing():
    with pytest.raises(ObjectMissing):
        read_footer(open_backend("memory:"), key_of(made_up([bytes(32)])), OPEN)


@BOTH
def test_incompressible_blocks_are_kept_as_they_are(keys):
    for size in (1, 1000, 200_000, 1 << 20):
        noise = encode_block(random.Random(1).randbytes(size), keys, bytes(32), 0)
        assert not noise.flags and len(noise.stored) == size + (16 if keys.encrypted else 0)
    text = encode_block(TEXT, keys, bytes(32), 0)
    assert text.flags == COMPRESSED and len(text.stored) < len(TEXT) * 0.7


def test_the_probe_looks_at_more_than_the_beginning():
    noise = random.Random(2).randbytes(300_000)
    for whole in (noise + TEXT, TEXT + noise, TEXT[:150_000] + noise + TEXT[150_000:]):
        assert encode_block(whole, OPEN, bytes(32), 0).flags == COMPRESSED


@BOTH
def test_encoding_takes_views_and_parts_from_many_threads(keys):
    parts = [TEXT[at : at + 10_000] for at in range(0, len(TEXT), 10_000)]
    forms = [TEXT, memoryview(TEXT), bytearray(TEXT), parts, [memoryview(part) for part in parts]]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(
            pool.map(lambda n: encode_block(forms[n % 5], keys, bytes(32), 0), range(40))
        )
    assert len({block.stored for block in encoded}) == 1


def test_encrypted_blocks_differ_by_pack_and_number():
    made = {encode_block(TEXT, CLOSED, salt, n).stored for salt in (b"1" * 32, b"2" * 32)
            for n in range(2)}  # fmt: skip
    assert len(made) == 4


@BOTH
def test_a_block_opens_only_where_it_belongs(keys):
    same = os.urandom(1000)
    data, info = make_pack(keys, [[same], [same[::-1]]])
    first, second = stored(data, info, 0), stored(data, info, 1)
    for bad, number in (
        (second, 0),
        (first, 1),
        (first[:-1], 0),
        (first + b"\0", 0),
        (b"", 0),
        (first[:-1] + bytes([first[-1] ^ 1]), 0),
    ):
        with pytest.raises(IntegrityError) as caught:
            open_block(bad, info, number, keys)
        assert caught.value.details["object"] == key_of(info)


def test_a_block_moved_within_an_encrypted_pack_does_not_open_even_if_the_records_say_so():
    chunks = [os.urandom(500), os.urandom(500)]
    data, info = make_pack(CLOSED, [[chunk] for chunk in chunks])
    first, second = info.block(0), info.block(1)
    swapped = msgspec.structs.replace(
        info,
        blocks=BLOCK.pack(*first._replace(digest=second.digest))
        + BLOCK.pack(*second._replace(digest=first.digest)),
    )
    assert swapped.flaw() is None
    with pytest.raises(IntegrityError, match="key"):
        open_block(stored(data, info, 1), swapped, 0, CLOSED)


@BOTH
def test_a_bomb_is_refused_before_it_grows(keys):
    block = encode_block(bytes(4 << 20), keys, bytes(32), 0)
    assert len(block.stored) < 1000
    made = made_up([bytes(32)])
    for raw in (1, (4 << 20) - 1, (4 << 20) + 1, 8 << 20, (8 << 20) + 1, 1 << 31, 0):
        record = BLOCK.pack(40, len(block.stored), raw, block.flags, block.digest)
        lying = msgspec.structs.replace(made, blocks=record)
        with pytest.raises(IntegrityError):
            open_block(block.stored, lying, 0, keys)


@BOTH
def test_every_flip_and_cut_of_a_pack_is_refused(keys):
    data, info = make_pack(keys, [[b"abc" * 30, b"d"], [os.urandom(20)]])
    bad = [data[:end] for end in range(0, len(data), 3)] + [data + b"\0", b"\0" + data]
    bad += [
        data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        for at in range(len(data))
        for bit in (1, 128)
    ]
    for forged in bad:
        with pytest.raises(IntegrityError) as caught:
            parse_pack(forged, keys, name="the pack")
        assert caught.value.details["object"]
    backend = open_backend("memory:")
    footer = info.block(1).offset + info.block(1).stored
    for forged in (data[:-1], data[:footer], data[:100], b"", data[1:], data + b"\0"):
        backend.put(key_of(info), forged)
        with pytest.raises(IntegrityError) as caught:
            read_footer(backend, key_of(info), keys)
        assert caught.value.details["object"] == key_of(info)


def test_a_chunk_under_a_wrong_name_is_found():
    builder = PackBuilder(OPEN, DATA)
    block = encode_block(b"content", OPEN, builder.salt, 0)
    builder.add(block, [(name_of(OPEN, b"another"), 7)])
    data, info = builder.finish()
    with pytest.raises(IntegrityError, match="name"):
        parse_pack(data, OPEN)
    assert packs.parse_records(data, OPEN, info.id, "x") == info


def test_recipes_are_named_by_what_they_describe():
    builder = PackBuilder(OPEN, META)
    recipe = os.urandom(72)
    name = OPEN.chunk_name(CHUNK_RECIPE, bytes(32))
    builder.add(encode_block(recipe, OPEN, builder.salt, 0), [(name, 72)])
    data, info = builder.finish()
    assert parse_pack(data, OPEN) == info


def breaches() -> dict[str, dict]:
    """Records that break one rule each, as changes of two blocks of two chunks of ten bytes."""

    def blocks(*lines) -> bytes:
        return b"".join(BLOCK.pack(*line, bytes(16)) for line in lines)

    def chunks(*lines) -> bytes:
        return b"".join(CHUNK.pack(bytes(32), *line) for line in lines)

    one, two = (40, 20, 20, 0), (60, 20, 20, 0)
    first, second = [(0, 0, 10), (0, 10, 10)], [(1, 0, 10), (1, 10, 10)]
    return {
        "no blocks": {"blocks": b""},
        "no chunks": {"chunks": b""},
        "half a block": {"blocks": blocks(one, two)[:-1]},
        "half a chunk": {"chunks": chunks(*first, *second)[:-1]},
        "block before the first place": {"blocks": blocks((39, 20, 20, 0), two)},
        "blocks that overlap": {"blocks": blocks(one, (59, 20, 20, 0))},
        "a gap between blocks": {"blocks": blocks(one, (61, 20, 20, 0))},
        "blocks out of order": {"blocks": blocks(two, one)},
        "a block behind the end": {"blocks": blocks(one, two), "size": 79},
        "a block without raw bytes": {"blocks": blocks((40, 20, 0, 0), two)},
        "a block without stored bytes": {"blocks": blocks((40, 0, 20, 0), (40, 20, 20, 0))},
        "a block over the limit": {"blocks": blocks(one, (60, 20, (8 << 20) + 1, 1))},
        "a block that grew": {"blocks": blocks((40, 37, 20, 0), (77, 20, 20, 0))},
        "unknown flags": {"blocks": blocks(one, (60, 20, 20, 2))},
        "a number behind the last": {"chunks": chunks(*first, (1, 0, 10), (2, 10, 10))},
        "a number far away": {"chunks": chunks(*first, (1, 0, 10), (2**32 - 1, 10, 10))},
        "chunks out of order": {"chunks": chunks(*second, *first)},
        "chunks that overlap": {"chunks": chunks((0, 0, 10), (0, 9, 11), *second)},
        "a gap between chunks": {"chunks": chunks((0, 0, 9), (0, 10, 10), *second)},
        "an empty chunk": {"chunks": chunks((0, 0, 0), (0, 0, 10), (0, 10, 10), *second)},
        "a block not covered": {"chunks": chunks(*first, (1, 0, 10))},
        "a chunk over the border": {"chunks": chunks((0, 0, 10), (0, 10, 20), (1, 10, 10))},
        "a chunk behind its block": {"chunks": chunks(*first, (0, 20, 10), (1, 10, 10))},
        "sums that wrap": {"chunks": chunks(*first, (1, 0, 10), (1, 10, 2**32 - 1))},
        "a chunk named twice": {"chunks": chunks(*first, *second, (1, 10, 10))},
        "no kind": {"kind": 2},
        "a negative kind": {"kind": -1},
        "a negative size": {"size": -1},
        "a pack over the limit": {"size": (128 << 20) + 1},
        "a short id": {"id": bytes(31)},
        "a long salt": {"salt": bytes(33)},
    }


def two_blocks():
    info = msgspec.structs.replace(
        made_up([bytes(32)]),
        size=500,
        blocks=BLOCK.pack(40, 20, 20, 0, bytes(16)) + BLOCK.pack(60, 20, 20, 0, bytes(16)),
        chunks=b"".join(
            CHUNK.pack(bytes(32), *at) for at in [(0, 0, 10), (0, 10, 10), (1, 0, 10), (1, 10, 10)]
        ),
    )
    assert info.flaw() is None
    return info


@pytest.mark.parametrize("breach", breaches())
def test_records_that_break_a_rule_are_refused(breach):
    changes = breaches()[breach]
    info = msgspec.structs.replace(two_blocks(), **changes)
    assert info.flaw()
    from sojourn.repository.indexes import decode_index, encode_index

    with pytest.raises(IntegrityError) as caught:
        decode_index(encode_index([two_blocks(), info]), name="index 1")
    assert caught.value.details["object"] == "index 1"
    if changes.keys() <= {"blocks", "chunks", "kind"}:
        body = bytes(info.size - 40)
        with pytest.raises(IntegrityError):
            parse_pack(forged_pack(OPEN, [info.kind, info.blocks, info.chunks], body), OPEN)


@pytest.mark.parametrize(
    "footer",
    [b"", b"\xc1", [], [0], [0, b""], [0, b"", b"", b""], ["0", b"", b""], [0, 1, 2], {}, None],
)
def test_a_malformed_footer_under_a_good_seal_is_refused(footer):
    with pytest.raises(IntegrityError):
        parse_pack(forged_pack(OPEN, footer), OPEN)


def test_a_pack_whose_header_disagrees_with_its_footer_is_refused():
    data, _ = make_pack(OPEN, [[b"x"]])
    for at in (0, 4, 5, 6, 7, 20):
        with pytest.raises(IntegrityError, match="header"):
            parse_pack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], OPEN)


def test_the_builder_refuses_what_a_reader_would():
    builder = PackBuilder(OPEN, DATA)
    block = encode_block(b"0123456789", OPEN, builder.salt, 0)
    name = bytes(32)
    for chunks in ([], [(name, 9)], [(name, 11)], [(name, 10), (name, 0)], [(b"short", 10)]):
        with pytest.raises(ValueError):
            builder.add(block, chunks)
    with pytest.raises(ValueError):
        builder.add(encode_block(b"0123456789", OPEN, builder.salt, 1), [(name, 10)])
    with pytest.raises(ValueError):
        builder.finish()
    with pytest.raises(ValueError):
        encode_block(b"", OPEN, builder.salt, 0)
    with pytest.raises(ValueError):
        PackBuilder(OPEN, 2)
    builder.add(block, [(name, 4), (name, 6)])
    assert builder.block_count == 1 and builder.chunk_count == 2 and not builder.full


def test_a_pack_of_tiny_chunks_is_full_before_a_reader_would_refuse_it():
    builder = PackBuilder(OPEN, DATA)
    chunks = [(number.to_bytes(32, "big"), 1) for number in range(packs.BLOCK_CHUNKS)]
    raw = bytes(packs.BLOCK_CHUNKS)
    while not builder.full:
        block = encode_block(raw, OPEN, builder.salt, builder.block_count)
        builder.add(block, chunks)
    assert MAX_CHUNKS - packs.BLOCK_CHUNKS < builder.chunk_count <= MAX_CHUNKS
    _, info = builder.finish()
    assert info.flaw() is None
