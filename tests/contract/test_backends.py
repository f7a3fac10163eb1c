"""What every place for objects promises, on a directory, in memory and on S3 over HTTP."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sojourn.errors import Conflict, IntegrityError, InvalidRequest, ObjectMissing
from sojourn.repository.backends.base import Backend
from sojourn.repository.backends.opening import open_backend
from support.object_stores import ACCESS_KEY, SECRET_KEY, S3Server, s3_options

MANY = 1100  # more than a page of a listing, and than a bulk deletion takes
Opener = Callable[[], Backend]


@pytest.fixture(params=["directory", "memory", "s3"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same, at first empty, place again and again (memory: one backend)."""
    if request.param == "memory":
        only = open_backend("memory:")
        return lambda: only
    if request.param == "directory":
        return lambda: open_backend((tmp_path / "a" / "store").as_uri())
    server: S3Server = request.getfixturevalue("s3_server")
    url = f"s3://{server.make_bucket()}/some/prefix"
    return lambda: open_backend(url, options=s3_options(server.url))


@pytest.fixture
def backend(opener: Opener) -> Iterator[Backend]:
    backend = opener()
    yield backend
    backend.close()


def test_what_was_put_is_there_for_every_reader(backend: Backend, opener: Opener) -> None:
    version = backend.put("dom/packs/ab/abcd", b"content")
    for reader in (backend, opener()):
        assert reader.get("dom/packs/ab/abcd") == (b"content", version)
        info = reader.head("dom/packs/ab/abcd")
        assert (info.key, info.size, info.version) == ("dom/packs/ab/abcd", 7, version)
        assert list(reader.list("")) == [info]


@pytest.mark.parametrize("size", [0, 1, 20 << 20])
def test_objects_of_every_size_come_back_whole(backend: Backend, size: int) -> None:
    content = os.urandom(size)
    version = backend.put("object", content)
    assert backend.get("object", limit=size) == (content, version)
    assert backend.head("object").size == size
    assert backend.get_tail("object", 100) == (content[-100:], size)
    assert backend.get_tail("object", size + 1) == (content, size)
    assert backend.get_ranges("object", [(0, size), (size, 0)]) == [content, b""]


def test_every_write_makes_another_version(backend: Backend) -> None:
    versions = [backend.put("key", b"%d" % turn) for turn in range(20)]
    assert len(set(versions)) == 20
    assert backend.get("key") == (b"19", versions[-1])


def test_create_writes_only_where_nothing_is(backend: Backend) -> None:
    version = backend.put("key", b"first", create=True)
    with pytest.raises(Conflict):
        backend.put("key", b"other", create=True)
    assert backend.get("key") == (b"first", version)
    assert backend.put("key", b"first", create=True) == version  # the same: it counts as done
    backend.delete(["key"])
    backend.put("key", b"other", create=True)
    assert backend.get("key")[0] == b"other"


def test_replace_writes_only_over_the_version_it_was_given(backend: Backend) -> None:
    first = backend.put("key", b"first")
    second = backend.put("key", b"second", replaces=first)
    with pytest.raises(Conflict):
        backend.put("key", b"late", replaces=first)
    assert backend.get("key") == (b"second", second)
    backend.delete(["key"])
    with pytest.raises(Conflict):
        backend.put("key", b"late", replaces=second)
    with pytest.raises(ObjectMissing):
        backend.get("key")


def test_larger_objects_than_the_limit_are_refused(backend: Backend) -> None:
    backend.put("key", b"0123456789")
    assert backend.get("key", limit=10)[0] == b"0123456789"
    with pytest.raises(IntegrityError) as refused:
        backend.get("key", limit=9)
    assert refused.value.details["object"] == "key"


def test_pieces_come_in_the_order_asked_for(backend: Backend) -> None:
    content = os.urandom(3 << 20)
    backend.put("key", content)
    ranges = [(2 << 20, 1000), (0, 1), (10, 100), (50, 100), (7, 0), (len(content) - 1, 1), (0, 1)]
    pieces = backend.get_ranges("key", ranges)
    assert pieces == [content[offset : offset + length] for offset, length in ranges]
    assert backend.get_ranges("key", []) == []
    assert backend.get_ranges("key", [(4 << 20, 0)]) == [b""]  # nothing of it is missing


@pytest.mark.parametrize("piece", [(0, 11), (5, 6), (10, 1), (1 << 40, 5)])
def test_a_piece_beyond_the_end_is_an_integrity_error(
    backend: Backend, piece: tuple[int, int]
) -> None:
    backend.put("key", b"0123456789")
    for ranges in ([piece], [(0, 2), piece]):
        with pytest.raises(IntegrityError) as refused:
            backend.get_ranges("key", ranges)
        assert refused.value.details["object"] == "key"


def test_the_tail_comes_with_the_size(backend: Backend) -> None:
    backend.put("key", b"0123456789")
    assert backend.get_tail("key", 4) == (b"6789", 10)
    assert backend.get_tail("key", 0) == (b"", 10)


def test_a_missing_object_is_said_to_be_missing(backend: Backend) -> None:
    backend.put("other/key", b"")
    for key in ("key", "other", "other/key/below", "other/keys"):
        for read in (
            lambda key=key: backend.get(key),
            lambda key=key: backend.head(key),
            lambda key=key: backend.get_tail(key, 1),
            lambda key=key: backend.get_ranges(key, [(0, 1)]),
            lambda key=key: backend.get_ranges(key, [(0, 0)]),
        ):
            with pytest.raises(ObjectMissing):
                read()


def test_all_characters_of_keys_are_kept(backend: Backend) -> None:
    keys = {
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ/abcdefghijklmnopqrstuvwxyz/0123456789._-",
        ".hidden",
        "..dots/...",
        "-dash/_under/a.b",
        "/".join(["s" * 100] * 5),
        "x" * 200,
    }
    for key in keys:
        backend.put(key, key.encode(), create=True)
    assert {info.key for info in backend.list("")} == keys
    for key in keys:
        assert backend.get(key)[0] == key.encode()
    backend.delete(sorted(keys))
    assert list(backend.list("")) == []


@pytest.mark.parametrize(
    "key",
    [
        "", "/", ".", "..", "/absolute", "a/", "a//b", "a/../b", "../a", "a/./b", "a\\b", "a b",
        "a\0b", "ä", "a#b", "a%2e", "a\n", "x" * 201, "a/" * 300 + "a", ".clock",
    ],
)  # fmt: skip
def test_other_keys_are_refused_before_anything_is_done(backend: Backend, key: str) -> None:
    for use in (
        lambda: backend.put(key, b"x"),
        lambda: backend.get(key),
        lambda: backend.head(key),
        lambda: backend.get_tail(key, 1),
        lambda: backend.get_ranges(key, [(0, 1)]),
        lambda: backend.delete([key]),
        lambda: list(backend.list(key + "/")),
    ):
        with pytest.raises(InvalidRequest):
            use()
    assert list(backend.list("")) == []


def test_pieces_before_the_beginning_are_refused(backend: Backend) -> None:
    backend.put("key", b"0123456789")
    for piece in ((-1, 5), (0, -1)):
        with pytest.raises(InvalidRequest):
            backend.get_ranges("key", [piece])
    with pytest.raises(InvalidRequest):
        backend.get_tail("key", -1)


def test_listings_are_of_whole_names_and_in_order(backend: Backend) -> None:
    keys = ["a", "ab/x", "b-/x", "b.x", "b/c/d", "b/c-", "b/cc/d", "b/z", "b0"]
    for key in reversed(keys):
        backend.put(key, key.encode())
    assert [info.key for info in backend.list("")] == sorted(keys)
    assert [info.key for info in backend.list("b/")] == ["b/c-", "b/c/d", "b/cc/d", "b/z"]
    assert [info.key for info in backend.list("b/c/")] == ["b/c/d"]
    assert list(backend.list("a/")) == []
    assert list(backend.list("nothing/")) == []
    for info in backend.list(""):
        assert info == backend.head(info.key)
    with pytest.raises(InvalidRequest):
        list(backend.list("b"))


def test_more_than_a_page_is_listed_and_removed_at_once(backend: Backend) -> None:
    keys = [f"dom/packs/{number % 7:02x}/{number:06}" for number in range(MANY)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: backend.put(key, key.encode()), keys))
    backend.put("dom/packs-not", b"")
    assert [info.key for info in backend.list("dom/packs/")] == sorted(keys)
    backend.delete([*keys, "dom/packs/00/missing", "missing"])
    assert [info.key for info in backend.list("")] == ["dom/packs-not"]
    backend.delete([])
    backend.delete(["missing"])


def test_of_many_creators_one_wins(opener: Opener) -> None:
    start = threading.Barrier(8)

    def create(number: int) -> str | None:
        backend = opener()
        start.wait()
        try:
            return backend.put("key", b"by %d" % number, create=True)
        except Conflict:
            return None

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(create, range(8)))
    winners = [number for number, version in enumerate(versions) if version]
    assert len(winners) == 1
    assert opener().get("key") == (b"by %d" % winners[0], versions[winners[0]])


def test_no_replacement_is_lost(opener: Opener) -> None:
    opener().put("count", b"0")

    def count(_: int) -> None:
        backend = opener()
        done = 0
        while done < 10:
            value, version = backend.get("count")
            try:
                backend.put("count", b"%d" % (int(value) + 1), replaces=version)
            except Conflict:
                continue
            done += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert opener().get("count")[0] == b"40"


def test_readers_beside_a_writer_see_whole_objects(opener: Opener) -> None:
    contents = [bytes([value]) * (200_000 + value) for value in range(4)]
    opener().put("key", contents[0])
    over = threading.Event()

    def write() -> None:
        backend = opener()
        for turn in range(40):
            backend.put("key", contents[turn % 4])
        over.set()

    def read(_: int) -> int:
        backend, seen = opener(), 0
        while not over.is_set() or not seen:
            assert backend.get("key")[0] in contents
            assert next(iter(backend.list(""))).size in {len(c) for c in contents}
            seen += 1
        return seen

    with ThreadPoolExecutor(3) as pool:
        writer = pool.submit(write)
        readers = [pool.submit(read, number) for number in range(2)]
        writer.result()
        assert all(reader.result() for reader in readers)


def test_a_listing_beside_writers_has_all_that_was_there(opener: Opener) -> None:
    old = {f"old/{number:03}" for number in range(50)}
    for key in old:
        opener().put(key, b"x")
    over = threading.Event()

    def write() -> None:
        backend = opener()
        for number in range(60):
            backend.put(f"new/{number:03}", b"y")
            backend.put(f"old/{number % 50:03}", b"z")
        over.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        backend = opener()
        while not over.is_set():
            listed = list(backend.list(""))
            assert old <= {info.key for info in listed}
            assert all(info.size == 1 for info in listed)
        writer.result()


def test_the_clock_is_that_of_the_objects(backend: Backend) -> None:
    before = backend.now()
    backend.put("key", b"")
    modified = backend.head("key").modified
    # Buckets tell whole seconds, rounded down.
    assert before - 1 <= modified <= backend.now() + 1
    assert abs(backend.now() - time.time()) < 5
    assert [info.key for info in backend.list("")] == ["key"]  # and looking at it leaves no object


def test_where_it_is_tells_no_credentials(backend: Backend) -> None:
    for shown in (backend.url, repr(backend), str(backend)):
        assert ACCESS_KEY not in shown and SECRET_KEY not in shown
    assert backend.url.split(":")[0] in {"file", "memory", "s3"}


def test_closing_twice_is_no_error(opener: Opener) -> None:
    backend = opener()
    backend.put("key", b"")
    backend.close()
    backend.close()
