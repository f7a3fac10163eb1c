"""Whatever stored bytes say: SojournError or an answer, and memory in proportion."""

from __future__ import annotations

import functools
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sojourn.repository.records import BLOCK_LIMITS, DATA
from sojourn.repository.sealed import LIMITS, SNAPSHOT
from support.stored_bytes import PARSERS, attempt, samples

EACH = pytest.mark.parametrize("parser", PARSERS)
QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
# What a parser may take beside a multiple of its input: its objects, and one page of what it reads.
SMALL, FACTOR = 2 << 20, 40


@functools.cache
def valid(parser: str) -> list[bytes]:
    return samples()[parser]


def taken(parser: str, data: bytes) -> int:
    """Bytes a parser takes at its peak, after a first run that fills the caches of libraries."""
    attempt(parser, data)
    tracemalloc.start()
    try:
        attempt(parser, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@EACH
def test_what_was_written_is_taken(parser):
    # `forged_records` alone cannot tell where its samples' blocks end and need not take them.
    assert parser == "forged_records" or all(attempt(parser, data) for data in valid(parser))


@EACH
@QUICK
@given(st.binary(max_size=400))
@example(b"")
def test_any_bytes(parser, data):
    attempt(parser, data)


@EACH
@QUICK
@given(st.data())
def test_changed_bytes(parser, data):
    whole = bytearray(data.draw(st.sampled_from(valid(parser))))
    for _ in range(data.draw(st.integers(1, 4))):
        how = data.draw(st.sampled_from(["flip", "set", "cut", "grow", "drop", "repeat", "number"]))
        at = data.draw(st.integers(0, max(0, len(whole) - 1)))
        length = data.draw(st.integers(1, 40))
        if not whole:
            break
        if how == "flip":
            whole[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "set":
            whole[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF]))
        elif how == "cut":
            del whole[at:]
        elif how == "grow":
            whole += data.draw(st.binary(min_size=1, max_size=40))
        elif how == "drop":
            del whole[at : at + length]
        elif how == "repeat":
            whole[at:at] = whole[at : at + length]
        else:
            number = data.draw(st.sampled_from([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]))
            whole[at : at + 4] = struct.pack("<I", number)
    attempt(parser, bytes(whole))


@EACH
def test_every_cut(parser):
    for whole in valid(parser):
        for end in range(len(whole) - 1):
            assert not attempt(parser, whole[:end]) or parser.startswith("forged")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=80)
    | st.sampled_from([bytes(32), bytes(29), bytes(44), bytes(16), bytes(48)])
    | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=8), inner, max_size=6)
    ),
    max_leaves=30,
)


@pytest.mark.parametrize(
    "parser", ["forged_configuration", "forged_wrapped_key", "forged_footer", "forged_index"]
)
@QUICK
@given(VALUES)
@example([[bytes(32), 2**64 - 1, 0, bytes(32), bytes(29), bytes(44)]])
@example([[bytes(32), 100, 0, bytes(32), b"\xff" * 29, b"\xff" * 44]])
def test_any_values_under_a_good_seal(parser, value):
    encoded = msgspec.msgpack.encode(value)
    if parser == "forged_footer":
        encoded = struct.pack("<H", len(encoded)) + encoded
    attempt(parser, encoded)


@EACH
@pytest.mark.parametrize("size", [1000, 100_000])
def test_memory_is_in_proportion_to_noise(parser, size):
    noise = random.Random(size).randbytes(size)
    assert taken(parser, noise) < SMALL + FACTOR * size
    for whole in valid(parser):
        assert taken(parser, whole + noise) < SMALL + FACTOR * size


@pytest.mark.parametrize(
    "payload",
    [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
     b"\xdb\xff\xff\xff\xff",
     b"\x91" * 50_000, b"\x81\xa1a" * 20_000, b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF,
     b"\xdd\x00\x0f\xff\xff" + b"\x96" * 0xFFFFF, b"\xc9\xff\xff\xff\xff\x01"],
    ids=["array", "map", "bin", "str", "nested", "nested maps", "empty", "short", "ext"],
)  # fmt: skip
@pytest.mark.parametrize(
    "parser", ["forged_configuration", "forged_wrapped_key", "forged_footer", "forged_index"]
)
def test_lengths_that_are_declared_but_not_there_take_no_memory(parser, payload):
    data = payload if parser != "forged_footer" else b"\xff\xff" + payload
    assert not attempt(parser, data)
    assert taken(parser, data) < SMALL + FACTOR * len(data)


def bombs() -> dict[str, tuple[bytes, int]]:
    """Compressed bodies and the length declared for them."""

    def frame(content: bytes, **options) -> bytes:
        return zstandard.ZstdCompressor(**options).compress(content)

    large = 512 << 20
    zeros = bytearray(frame(bytes(4 << 20)))
    huge = bytearray(frame(bytes(300)))
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    # Frame headers that declare far more than there is, written by hand: descriptor, size.
    claim = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", large) + b"\x01\x00\x00"
    wide = b"\x28\xb5\x2f\xfd" + bytes([0x00, 0xA8]) + b"\x01\x00\x00"
    return {
        "more than declared": (bytes(zeros), 1 << 20),
        "less than declared": (bytes(huge), 4 << 20),
        "no length of its own": (stream, 64 << 20),
        "no length of its own, short": (stream, 1000),
        "a length of its own, far away": (claim, large),
        "a length of its own, unlike the declared": (claim, 1000),
        "a wide window": (wide, 1000),
        "two frames": (frame(bytes(500)) + frame(bytes(500)), 1000),
        "a skippable frame": (b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip", 1000),
        "a dictionary": (b"\x28\xb5\x2f\xfd\x21\x07\xe8" + b"\x01\x00\x00", 1000),
        "nothing": (b"", 1000),
        "zero bytes": (frame(b""), 0),
    }


@pytest.mark.parametrize("bomb", bombs())
def test_bombs_are_refused_before_they_grow(bomb):
    body, length = bombs()[bomb]
    sealed = struct.pack("<I", length) + body
    assert not attempt("forged_compressed", sealed)
    assert taken("forged_compressed", sealed) < SMALL + 2 * len(body)
    block = struct.pack("<IB", length, 1) + body
    assert not attempt("forged_block", block)
    assert taken("forged_block", block) < SMALL + 2 * len(body)


def test_what_grows_within_its_limit_takes_no_more_than_that():
    for parser, limit, head in (
        ("forged_compressed", LIMITS[SNAPSHOT], b""),
        ("forged_block", BLOCK_LIMITS[DATA], b"\x01"),
    ):
        frame = zstandard.ZstdCompressor().compress(bytes(limit))
        assert attempt(parser, struct.pack("<I", limit) + head + frame)
        assert taken(parser, struct.pack("<I", limit) + head + frame) < limit + SMALL
        over = zstandard.ZstdCompressor().compress(bytes(limit + 1))
        assert not attempt(parser, struct.pack("<I", limit + 1) + head + over)


@pytest.mark.slow
def test_a_coverage_guided_fuzzer_finds_nothing(tmp_path):
    pytest.importorskip("atheris")
    target = Path(__file__).parents[1] / "fuzz" / "repository_formats.py"
    seconds = 120 if os.environ.get("SOJOURN_SOAK") else 10
    options = [f"-max_total_time={seconds}", "-max_len=2048", "-rss_limit_mb=1500"]
    done = subprocess.run(
        [sys.executable, str(target), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=seconds + 100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DONE" in done.stderr, done.stderr[-3000:]
