"""Cutting: chunks joined are the content, boundaries follow the content, holes are not read."""

from __future__ import annotations

import os
import random
import resource

import pytest
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.repository.cutting import (
    LARGEST,
    LEAST_HOLE,
    MINIMUM,
    WINDOW,
    Cutter,
    content_id,
    decode_recipe,
    encode_recipe,
    extents,
    file_hasher,
    zeros_id,
)

SEED = 0xFEDC_BA98_7654_3210
DATA = random.Random(7).randbytes(24 << 20)


def cut(path, seed: int = SEED) -> list[tuple[bytes, int]]:
    """Content id and length of each chunk of a file; its joined content is compared."""
    fd = os.open(path, os.O_RDONLY)
    hasher = file_hasher()
    size = os.fstat(fd).st_size
    joined = blake3()
    found = []
    try:
        for length, data in Cutter(seed).cut(fd, size, hasher):
            if data is None:
                found.append((zeros_id(length), length))
                joined.update(bytes(length))
            else:
                assert len(data) == length
                found.append((content_id(data), length))
                joined.update(data)
    finally:
        os.close(fd)
    assert hasher.digest() == joined.digest()
    assert sum(length for _, length in found) == size
    with path.open("rb") as file:
        assert blake3(file.read()).digest() == joined.digest()
    return found


def test_chunks_are_the_file_and_within_their_limits(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(DATA)
    found = cut(path)
    assert all(MINIMUM <= length <= LARGEST for _, length in found[:-1])
    assert 8 < len(found) < 48


def test_windows_do_not_move_boundaries(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(DATA)
    assert len(DATA) > WINDOW
    assert [length for _, length in cut(path)] == list(Cutter(SEED).lengths(DATA))


def test_an_insertion_changes_the_chunks_around_it_and_no_others(tmp_path):
    before, after = tmp_path / "a", tmp_path / "b"
    before.write_bytes(DATA)
    after.write_bytes(DATA[: 9 << 20] + b"inserted" + DATA[9 << 20 :])
    old, new = cut(before), cut(after)
    assert len(set(new) - set(old)) <= 3


def test_another_seed_gives_other_boundaries(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(DATA)
    seeds = (SEED, SEED + 2, 0, 2**64 - 1)
    cuts = [cut(path, seed) for seed in seeds]
    assert len({tuple(each) for each in cuts}) == len(seeds)


def test_holes_are_chunks_of_zeros_and_are_not_read(tmp_path):
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(3 << 30)
        file.seek(1 << 30)
        file.write(DATA[: 3 << 20])
    fd = os.open(path, os.O_RDONLY)
    try:
        assert [hole for _, _, hole in extents(fd, 3 << 30)] == [True, False, True]
        pieces = [
            (length, data is None) for length, data in Cutter(SEED).cut(fd, 3 << 30, blake3())
        ]
    finally:
        os.close(fd)
    assert sum(length for length, _ in pieces) == 3 << 30
    assert sum(length for length, zeros in pieces if not zeros) <= (3 << 20) + (1 << 16)
    assert max(length for length, _ in pieces) <= LARGEST


def test_sparse_content_is_that_of_the_file(tmp_path):
    path = tmp_path / "f"
    with path.open("wb") as file:
        for number in range(6):
            file.seek(number * (LEAST_HOLE + (1 << 20)))
            file.write(DATA[number << 18 : (number + 1) << 18])
        file.truncate(file.tell() + 5_000_000)
    cut(path)


def test_small_holes_are_read_as_what_they_are(tmp_path):
    path = tmp_path / "f"
    with path.open("wb") as file:
        for number in range(64):
            file.seek(number * 65536)
            file.write(b"x" * 4096)
    assert len(cut(path)) < 20


@pytest.mark.parametrize("size", [1, 4095, MINIMUM, (1 << 20) + 1, LARGEST, WINDOW, WINDOW + 1])
def test_every_size_is_cut_whole(tmp_path, size):
    path = tmp_path / "f"
    path.write_bytes(DATA[:size])
    cut(path)


def test_a_file_that_ends_early_gives_less(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(DATA[: 2 << 20])
    fd = os.open(path, os.O_RDONLY)
    try:
        hasher = file_hasher()
        got = sum(length for length, _ in Cutter(SEED).cut(fd, 5 << 20, hasher))
    finally:
        os.close(fd)
    assert got != 5 << 20 or hasher.digest() != blake3(DATA[: 5 << 20]).digest()


def test_a_large_file_takes_one_window(tmp_path):
    path = tmp_path / "f"
    with path.open("wb") as file:
        for _ in range(8):
            file.write(DATA)
    fd = os.open(path, os.O_RDONLY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for _ in Cutter(SEED).cut(fd, 8 * len(DATA), file_hasher()):
            pass
    finally:
        os.close(fd)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10


def test_recipes_are_read_back_and_checked():
    chunks = [(b"a" * 32, 5), (b"b" * 32, LARGEST)]
    data = encode_recipe(chunks)
    assert decode_recipe(data, 5 + LARGEST, "x") == chunks
    for bad, size in (
        (data, LARGEST),
        (data[:-1], 5 + LARGEST),
        (b"", 5),
        (encode_recipe([(b"a" * 32, 0), (b"b" * 32, 5)]), 5),
        (encode_recipe([(b"a" * 32, LARGEST + 1)]), LARGEST + 1),
    ):
        with pytest.raises(IntegrityError):
            decode_recipe(bad, size, "x")
