"""What an upload puts into the store: each content once, all of it named before `flush` returns."""

from __future__ import annotations

import os
import random

import pytest
from blake3 import blake3

from sojourn.errors import Interrupted, TooLarge
from sojourn.repository.packs import (
    BLOCK_LIMITS,
    CHUNK_DATA,
    CHUNK_RECIPE,
    CHUNK_SEGMENT,
    DATA,
    META,
    PACK_BYTES,
)
from sojourn.repository.uploads import INDEX_EVERY, Upload
from support.uploads import SECRET, Told, domain_on, fetch

R = random.Random(11)


def id_of(data: bytes) -> bytes:
    return blake3(data).digest()


def random_chunks(count: int, size: int) -> list[bytes]:
    return [R.randbytes(size) for _ in range(count)]


def add_all(up: Upload, chunks: list[bytes]) -> int:
    """How many of them were new."""
    return sum(up.add(CHUNK_DATA, id_of(chunk), chunk) for chunk in chunks)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_was_added_is_read_by_another_process(secret):
    told = Told()
    chunks = [b"small", b"x" * 5000, os.urandom(3 << 20), b"", *random_chunks(30, 100_000)]
    chunks.remove(b"")
    with Upload(domain_on(told, secret)) as up:
        assert add_all(up, chunks) == len(chunks)
        assert up.add(CHUNK_SEGMENT, id_of(b"seg"), b"seg")
        assert up.add(CHUNK_RECIPE, b"f" * 32, b"recipe")
        up.flush()
    fresh = domain_on(told, secret)
    for chunk in chunks:
        assert fetch(fresh, CHUNK_DATA, id_of(chunk)) == chunk
    assert fetch(fresh, CHUNK_SEGMENT, id_of(b"seg")) == b"seg"
    assert fetch(fresh, CHUNK_RECIPE, b"f" * 32) == b"recipe"
    assert up.sent_bytes == sum(map(len, chunks)) + 9
    assert up.stored_bytes == sum(pack.size for pack in fresh.index.packs())
    assert up.written == {pack.id for pack in fresh.index.packs()}


def test_data_and_metadata_lie_in_packs_of_their_own():
    domain = domain_on(Told())
    with Upload(domain) as up:
        up.add(CHUNK_DATA, id_of(b"d"), b"d")
        up.add(CHUNK_RECIPE, id_of(b"f"), b"r")
        up.add(CHUNK_SEGMENT, id_of(b"s"), b"s")
    kinds = {pack.kind: set(pack.names()) for pack in domain.index.packs()}
    name = domain.keys.chunk_name
    assert kinds == {
        DATA: {name(CHUNK_DATA, id_of(b"d"))},
        META: {name(CHUNK_RECIPE, id_of(b"f")), name(CHUNK_SEGMENT, id_of(b"s"))},
    }


def test_equal_content_is_sent_once_and_relied_on_afterwards():
    told = Told()
    chunks = random_chunks(10, 50_000)
    with Upload(domain_on(told)) as up:
        assert add_all(up, chunks + chunks) == len(chunks)
        up.flush()
        assert add_all(up, chunks) == 0
    puts = list(told.puts)
    later = domain_on(told)
    with Upload(later) as up:
        assert up.has(CHUNK_DATA, id_of(chunks[3]))
        assert not up.has(CHUNK_RECIPE, id_of(chunks[3]))
        assert add_all(up, chunks) == 0
        assert up.relied == {pack.id for pack in later.index.packs()}
        assert (up.sent_bytes, up.stored_bytes, up.written) == (0, 0, set())
    assert told.puts == puts


def test_domains_share_nothing():
    told = Told()
    with Upload(domain_on(told)) as up:
        up.add(CHUNK_DATA, id_of(b"content"), b"content")
    with Upload(domain_on(told, name="ten_2")) as up:
        assert up.add(CHUNK_DATA, id_of(b"content"), b"content")


def test_packs_a_tombstone_names_are_not_relied_on():
    told = Told()
    with Upload(domain_on(told)) as up:
        up.add(CHUNK_DATA, id_of(b"content"), b"content")
    domain = domain_on(told)
    domain.index.exclude([pack.id for pack in domain.index.packs()])
    with Upload(domain) as up:
        assert up.add(CHUNK_DATA, id_of(b"content"), b"content")
        up.flush()
        assert not up.relied
        assert not up.add(CHUNK_DATA, id_of(b"content"), b"content")


def test_packs_are_closed_at_their_size_and_named_along_the_way():
    told = Told()
    with Upload(domain_on(told)) as up:
        for number in range(INDEX_EVERY + 3):
            for chunk in random_chunks(16, 1 << 20):
                up.add(CHUNK_DATA, id_of(chunk), chunk)
            assert len(told.packs()) >= number - 6
        up.flush()
    infos = domain_on(told).index.packs()
    assert max(info.size for info in infos) <= PACK_BYTES + (1 << 20) + 65536
    assert sum(info.size > PACK_BYTES // 2 for info in infos) >= len(infos) - 1
    indexes = [number for number, key in enumerate(told.puts) if "/indexes/" in key]
    assert len(indexes) == 2
    # Each index comes after the packs it names.
    packs = [number for number, key in enumerate(told.puts) if "/packs/" in key]
    assert sum(number < indexes[0] for number in packs) >= INDEX_EVERY
    assert max(packs) < indexes[1]


def test_small_chunks_are_joined_to_blocks():
    domain = domain_on(Told())
    with Upload(domain) as up:
        add_all(up, [b"chunk number %d" % number for number in range(10_000)])
    (pack,) = domain.index.packs()
    assert len(pack) == 10_000
    assert pack.block_count == 3  # 4096 chunks at most in each


def test_an_empty_flush_puts_nothing():
    told = Told()
    domain = domain_on(told)
    puts = list(told.puts)
    with Upload(domain) as up:
        up.flush()
        up.flush()
    assert told.puts == puts


def test_more_may_be_added_after_a_flush():
    told = Told()
    with Upload(domain_on(told)) as up:
        up.add(CHUNK_DATA, id_of(b"1"), b"1")
        up.flush()
        assert fetch(domain_on(told), CHUNK_DATA, id_of(b"1")) == b"1"
        up.add(CHUNK_DATA, id_of(b"2"), b"2")
    assert fetch(domain_on(told), CHUNK_DATA, id_of(b"2")) == b"2"


def test_a_view_may_change_once_it_is_added():
    told = Told()
    buffer = bytearray(b"before")
    with Upload(domain_on(told)) as up:
        up.add(CHUNK_DATA, id_of(b"before"), memoryview(buffer))
        buffer[:] = b"after!"
    assert fetch(domain_on(told), CHUNK_DATA, id_of(b"before")) == b"before"


def test_an_upload_that_ended_takes_no_more():
    with Upload(domain_on(Told())) as up:
        up.add(CHUNK_DATA, id_of(b"1"), b"1")
    up.add(CHUNK_DATA, id_of(b"2"), b"2")
    with pytest.raises(Interrupted):
        up.flush()


def test_a_chunk_over_the_limit_is_refused():
    with pytest.raises(TooLarge):
        with Upload(domain_on(Told())) as up:
            up.add(CHUNK_DATA, b"i" * 32, bytes(BLOCK_LIMITS[DATA] + 1))
