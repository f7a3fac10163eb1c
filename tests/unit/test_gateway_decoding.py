"""Answers that come compressed although they were asked not to be."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib

import pytest

from sojourn.gateway.exchanges import _Decoder
from sojourn.gateway.streams import Reset


def _opened(data: bytes, step: int) -> bytes:
    decoder = _Decoder()
    found = b"".join(
        piece for at in range(0, len(data), step) for piece in decoder.feed(data[at : at + step])
    )
    decoder.check_end()
    return found


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_body_comes_out_whole(step: int) -> None:
    text = random.Random(3).randbytes(3000) + b"a" * 200_000
    assert _opened(gzip.compress(text), step) == text
    assert _opened(zlib.compress(text), step) == text
    assert _opened(gzip.compress(text) + gzip.compress(b"the second"), step) == text + b"the second"


@pytest.mark.parametrize("cut", [5, 400, 410])
def test_what_is_cut_or_damaged_does_not_look_whole(cut: int) -> None:
    data = gzip.compress(random.Random(4).randbytes(380)) + gzip.compress(b"the second")
    with pytest.raises(Reset):
        _opened(data[:cut], 1 << 20)
    with pytest.raises(Reset):
        _opened(gzip.compress(b"whole") + b"and more", 1 << 20)


def test_a_small_body_that_becomes_a_large_one_is_not_held() -> None:
    data = gzip.compress(bytes(40 << 20))
    decoder = _Decoder()
    tracemalloc.start()
    size = sum(len(piece) for piece in decoder.feed(data))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 40 << 20
    assert most < 2 << 20
