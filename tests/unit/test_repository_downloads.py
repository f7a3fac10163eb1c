"""Reading chunks: each once, in few requests, with bounded memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import GAP, REQUESTS, UNIT, WINDOW, Reader
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.uploads import Upload, adopt_unindexed
from support.uploads import SECRET, domain_on


class Counting:
    """A backend that notes what is read of packs."""

    def __init__(self) -> None:
        self.backend = open_backend("memory:")
        self.ranges: list[tuple[int, int]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str):
        return getattr(self.backend, name)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.lock:
            self.ranges += ranges
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            time.sleep(0.001)
            return self.backend.get_ranges(key, ranges)
        finally:
            with self.lock:
                self.at_once -= 1


def put(domain: Domain, contents: Sequence[bytes]) -> list[bytes]:
    """Upload chunks; answers their names."""
    with Upload(domain) as up:
        for data in contents:
            up.add(CHUNK_DATA, blake3(data).digest(), data)
    return [domain.keys.chunk_name(CHUNK_DATA, blake3(data).digest()) for data in contents]


def random_chunks(count: int, size: int, seed: int = 1) -> list[bytes]:
    """Chunks that do not compress."""
    choose = random.Random(seed)
    return [choose.randbytes(size) for _ in range(count)]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_chunk_is_handed_out_once_with_its_bytes(secret):
    backend = Counting()
    contents = [bytes([n % 251]) * (1 + n * 37) for n in range(700)] + random_chunks(30, 300_000)
    names = put(domain_on(backend, secret), contents)
    domain = domain_on(backend, secret)
    found = list(Reader(domain).chunks(names + names[:50]))
    assert len(found) == len(names)
    assert dict(found) == dict(zip(names, contents, strict=True))


def test_nothing_asked_is_nothing_read():
    backend = Counting()
    assert list(Reader(domain_on(backend)).chunks([])) == []
    assert backend.ranges == []


def test_neighbours_are_fetched_together_and_a_few_requests_at_a_time():
    backend = Counting()
    contents = random_chunks(300, 200_000)
    names = put(domain_on(backend), contents)
    assert sum(1 for _ in Reader(domain_on(backend)).chunks(names)) == 300
    total = sum(length for _, length in backend.ranges)
    assert 60_000_000 <= total < 61_000_000
    assert len(backend.ranges) < 30
    assert max(length for _, length in backend.ranges) <= UNIT + GAP
    assert 1 < backend.most_at_once <= REQUESTS


def test_of_a_pack_only_what_is_asked_is_read():
    backend = Counting()
    contents = random_chunks(60, 250_000)
    names = put(domain_on(backend), contents)
    wanted = [names[0], names[30]]
    found = dict(Reader(domain_on(backend)).chunks(wanted))
    assert [found[name] for name in wanted] == [contents[0], contents[30]]
    assert len(backend.ranges) == 2
    assert sum(length for _, length in backend.ranges) <= 2 * ((1 << 20) + GAP)


def test_who_takes_slowly_bounds_what_is_fetched():
    backend = Counting()
    contents = random_chunks(120, 1 << 20)
    names = put(domain_on(backend), contents)
    chunks = Reader(domain_on(backend)).chunks(names)
    next(chunks)
    fetched, settled = -1, 0
    while settled < 20:  # until nothing more is requested
        time.sleep(0.005)
        now = sum(length for _, length in backend.ranges)
        settled = settled + 1 if now == fetched else 0
        fetched = now
    assert fetched <= WINDOW * (UNIT + GAP)
    assert sum(1 for _ in chunks) == 119


def test_a_reading_that_is_left_ends_its_threads():
    backend = Counting()
    names = put(domain_on(backend), random_chunks(60, 1 << 20))
    chunks = Reader(domain_on(backend)).chunks(names)
    next(chunks)
    chunks.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("read chunks")]
    read = len(backend.ranges)
    time.sleep(0.02)
    assert len(backend.ranges) == read


def test_what_others_wrote_since_is_found():
    backend = Counting()
    domain = domain_on(backend)
    assert len(domain.index) == 0
    contents = random_chunks(5, 1000)
    names = put(domain_on(backend), contents)
    assert dict(Reader(domain).chunks(names)) == dict(zip(names, contents, strict=True))


def test_a_chunk_in_no_pack_is_named_with_what_needs_it():
    domain = domain_on(Counting())
    with pytest.raises(IntegrityError, match="layer abc") as caught:
        list(Reader(domain).chunks([b"n" * 32], needed_by="layer abc"))
    assert caught.value.details["chunk"] == (b"n" * 32).hex()


def test_many_threads_read_one_domain():
    backend = Counting()
    contents = random_chunks(40, 100_000)
    names = put(domain_on(backend), contents)
    domain = domain_on(backend)
    results: list[bool] = []

    def read() -> None:
        results.append(
            dict(Reader(domain).chunks(names)) == dict(zip(names, contents, strict=True))
        )

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_a_bad_index_stops_only_who_needs_what_it_names_until_its_packs_are_indexed_anew():
    backend = open_backend("memory:")
    first = put(domain_on(backend), random_chunks(3, 1000, seed=1))
    before = {info.key for info in backend.list("ten_1/indexes/")}
    second = put(domain_on(backend), random_chunks(3, 1000, seed=2))
    [key] = {info.key for info in backend.list("ten_1/indexes/")} - before
    backend.put(key, b"no index")
    reader = Reader(domain_on(backend))
    assert len(list(reader.chunks(first))) == 3
    with pytest.raises(IntegrityError) as caught:
        list(reader.chunks(second, needed_by="layer x"))
    assert caught.value.details["object"] == key
    assert caught.value.details["needed_by"] == "layer x"
    assert adopt_unindexed(domain_on(backend)) == 1
    assert len(list(reader.chunks(second))) == 3
