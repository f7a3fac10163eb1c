"""Uploads whose store fails, blocks, is full or slow: the first error comes out, nothing hangs,
memory stays bounded, and the next upload sends what is missing and no more."""

from __future__ import annotations

import random
import threading

import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError, StorageFull, StoreUnreachable
from sojourn.repository.packs import CHUNK_DATA, PACK_BYTES
from sojourn.repository.sealed import TOMBSTONE
from sojourn.repository.tombstones import NAMED, encode_tombstone, tombstone
from sojourn.repository.uploads import INDEX_EVERY, PACKS, UPLOADERS, Upload, adopt_unindexed
from support.uploads import Told, domain_on, fetch

R = random.Random(5)
MIB = 1 << 20


def id_of(data: bytes) -> bytes:
    return blake3(data).digest()


def chunks(count: int, size: int = MIB) -> list[bytes]:
    return [R.randbytes(size) for _ in range(count)]


MANY = chunks(80)  # five packs


def upload(told: Told, contents: list[bytes], **options) -> Upload:
    with Upload(domain_on(told), **options) as up:
        for content in contents:
            up.add(CHUNK_DATA, id_of(content), content)
        up.flush()
    return up


def upload_threads() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("encode chunks", "put packs", "read footers"))
    ]


@pytest.mark.parametrize("error", [StoreUnreachable("gone"), StorageFull("full"), OSError("disk")])
@pytest.mark.parametrize("number", [1, 3])
def test_a_put_that_fails_ends_the_upload_with_its_error(error, number):
    told = Told()
    domain_on(told)
    begun = len(told.puts)

    def fail(key: str, count: int) -> None:
        if count >= begun + number:
            raise error

    told.before = fail
    with pytest.raises(type(error)) as caught:
        upload(told, MANY)
    assert caught.value is error
    assert upload_threads() == []
    # Every upload after it works, in the same process and domain.
    told.before = lambda key, count: None
    upload(told, MANY)
    fresh = domain_on(told)
    for content in MANY:
        assert fetch(fresh, CHUNK_DATA, id_of(content)) == content


def test_the_error_comes_while_adding_not_only_at_the_end():
    told = Told()
    domain = domain_on(told)

    def fail(key: str, count: int) -> None:
        raise StorageFull("full")

    told.before = fail
    added = 0
    with pytest.raises(StorageFull):
        with Upload(domain) as up:
            for _ in range(1000):  # far more than may wait
                for content in MANY[:40]:
                    up.put(CHUNK_DATA, bytes(32), content)
                    added += 1
    assert added < 2 * PACKS * PACK_BYTES // MIB


def test_a_put_that_blocks_and_then_fails_hangs_nobody():
    told = Told()
    domain = domain_on(told)
    blocked, go = threading.Event(), threading.Event()

    def block(key: str, count: int) -> None:
        blocked.set()
        assert go.wait(60)
        raise StoreUnreachable("no answer")

    told.before = block
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            with Upload(domain) as up:
                for content in MANY * 3:
                    up.put(CHUNK_DATA, bytes(32), content)
        except StoreUnreachable as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert blocked.wait(60)
    finally:
        go.set()
        thread.join(60)
    assert not thread.is_alive()
    assert [error.message for error in outcome] == ["no answer"]
    assert upload_threads() == []


def test_the_callers_own_error_stays_the_one_that_is_raised():
    told = Told()
    domain = domain_on(told)
    with pytest.raises(IntegrityError, match="the caller's"):
        with Upload(domain) as up:
            for content in MANY:
                up.add(CHUNK_DATA, id_of(content), content)
            raise IntegrityError("the caller's")
    assert upload_threads() == []
    # What the store had acknowledged by then was named, and is not sent again.
    known = {pack.id for pack in domain_on(told).index.packs()}
    assert known == up.written
    again = upload(told, MANY)
    assert known <= again.relied or not known


def test_a_failing_index_acknowledges_nothing():
    told = Told()

    def fail(key: str, count: int) -> None:
        if "/indexes/" in key:
            raise StorageFull("full")

    told.before = fail
    domain = domain_on(told)
    with pytest.raises(StorageFull):
        with Upload(domain) as up:
            up.add(CHUNK_DATA, id_of(MANY[0]), MANY[0])
            with pytest.raises(StorageFull):
                up.flush()
            told.before = lambda key, count: None
            up.flush()  # what failed once was not acknowledged since
    told.before = lambda key, count: None
    # The pack is in the store, but nobody may rely on it: no index names it.
    with Upload(domain) as up:
        assert not up.has(CHUNK_DATA, id_of(MANY[0]))


def test_indexes_along_the_way_spare_the_next_upload():
    told = Told()
    domain_on(told)
    many = chunks((INDEX_EVERY + 4) * 16)
    seen = []

    def fail(key: str, count: int) -> None:
        seen.append(key)
        if any("/indexes/" in key for key in seen[:-1]):
            raise StoreUnreachable("gone")

    told.before = fail
    with pytest.raises(StoreUnreachable):
        upload(told, many)
    told.before = lambda key, count: None
    again = upload(told, many)
    assert again.sent_bytes <= (len(many) - INDEX_EVERY * 14) * MIB
    assert len(again.relied) >= INDEX_EVERY


def test_packs_no_index_names_are_adopted_and_not_sent_again():
    told = Told()

    def fail(key: str, count: int) -> None:
        if "/indexes/" in key:
            raise StoreUnreachable("gone")

    told.before = fail
    with pytest.raises(StoreUnreachable):
        upload(told, MANY)
    told.before = lambda key, count: None
    put = len(told.packs())
    domain = domain_on(told)
    assert adopt_unindexed(domain) == put
    assert adopt_unindexed(domain) == 0
    fresh = domain_on(told)
    assert adopt_unindexed(fresh) == 0
    with Upload(fresh) as up:
        assert not any(up.add(CHUNK_DATA, id_of(content), content) for content in MANY)
    assert len(told.packs()) == put
    assert fetch(fresh, CHUNK_DATA, id_of(MANY[7])) == MANY[7]


def test_dead_and_damaged_packs_are_not_adopted():
    told = Told()

    def fail(key: str, count: int) -> None:
        if "/indexes/" in key:
            raise StoreUnreachable("gone")

    told.before = fail
    with pytest.raises(StoreUnreachable):
        upload(told, MANY)
    told.before = lambda key, count: None
    keys = told.packs()
    dead, cut, flipped = keys[:3]
    domain = domain_on(told)
    value = tombstone(NAMED, [bytes.fromhex(dead.rpartition("/")[2])], [])
    domain.put_object(TOMBSTONE, domain.key("tombstones", "t1"), encode_tombstone(value))
    whole = told.backend.get(cut)[0]
    told.backend.put(cut, whole[:-100])
    whole = bytearray(told.backend.get(flipped)[0])
    whole[-40] ^= 1
    told.backend.put(flipped, bytes(whole))
    assert adopt_unindexed(domain) == len(keys) - 3
    named = {domain.pack_key(pack.id) for pack in domain_on(told).index.packs()}
    assert named == set(keys[3:])


def test_a_slow_store_bounds_what_is_held():
    told = Told()
    domain = domain_on(told)
    go = threading.Event()
    waiting = threading.Semaphore(0)

    def wait(key: str, count: int) -> None:
        waiting.release()
        assert go.wait(60)

    told.before = wait
    added = 0
    full = threading.Event()
    finished = threading.Event()

    def run() -> None:
        nonlocal added
        with Upload(domain, encoders=2) as up:
            for number in range(200):
                content = number.to_bytes(8, "big") + MANY[number % 80][8:]
                up.add(CHUNK_DATA, id_of(content), content)
                added += 1
            up.flush()
        finished.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(UPLOADERS):
            assert waiting.acquire(timeout=60)
        # It stands still once the packs that may exist are full: what may be held bounds it.
        most = (PACKS * PACK_BYTES) // MIB + 2 * 2 + 2 + 2
        before = -1
        while before != added:
            before = added
            full.wait(0.3)
        assert added <= most
        assert not finished.is_set()
    finally:
        go.set()
        thread.join(60)
    assert finished.is_set()
    assert len(domain_on(told).index) == 200


def test_two_uploads_at_once_do_not_disturb_each_other():
    told = Told()
    domain = domain_on(told)
    errors: list[BaseException] = []

    def run(contents: list[bytes]) -> None:
        try:
            with Upload(domain) as up:
                for content in contents:
                    up.add(CHUNK_DATA, id_of(content), content)
        except BaseException as error:  # noqa: BLE001 (looked at below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(MANY[at : at + 50],)) for at in (0, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert errors == []
    fresh = domain_on(told)
    for content in MANY:
        assert fetch(fresh, CHUNK_DATA, id_of(content)) == content
