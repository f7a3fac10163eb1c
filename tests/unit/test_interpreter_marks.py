"""Cutting the interpreter's streams at their marks, wherever the pieces happen to end."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sojourn.node import interpreter, interpreter_driver
from sojourn.node.interpreter import _Collector
from sojourn.wire.code import is_interpreter

TOKEN = "0123456789abcdef" * 2


def mark(kind: bytes, payload: bytes = b"", token: str = TOKEN) -> bytes:
    return b"\0sojourn:" + token.encode() + kind + b"%08x:" % len(payload) + payload


def feed(collector: _Collector, data: bytes, cuts: list[int]) -> None:
    at = 0
    for cut in [*sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]:
        collector.feed(data[at:cut])
        at = cut


output = st.lists(
    st.one_of(st.binary(max_size=40), st.just(b"\0"), st.just(b"\0sojourn:"), st.just(b"\0so"))
).map(b"".join)


@given(output, st.binary(max_size=50), st.lists(st.integers(0, 10000), max_size=12))
def test_output_and_payload_are_exact(text: bytes, payload: bytes, cuts: list[int]) -> None:
    collector = _Collector(TOKEN, begin=False)
    feed(collector, text + mark(b">", payload), cuts)
    assert bytes(collector.text) == text
    assert collector.payload == payload


@given(output, output, st.lists(st.integers(0, 10000), max_size=12))
def test_what_an_earlier_request_left_is_skipped(old: bytes, text: bytes, cuts: list[int]) -> None:
    collector = _Collector(TOKEN, begin=True)
    stale = old + mark(b">", b"{}", token="f" * 32)
    feed(collector, stale + mark(b"<") + text + mark(b">", b"{}"), cuts)
    assert bytes(collector.text) == text
    assert collector.payload == b"{}"


def test_output_is_bounded_and_flagged() -> None:
    collector = _Collector(TOKEN, begin=False)
    for _ in range(12):
        collector.feed(b"x" * (1 << 20))
    collector.feed(mark(b">", b"{}"))
    assert len(collector.text) == interpreter.OUTPUT_LIMIT
    assert collector.truncated
    assert collector.done


def test_without_a_mark_all_is_output() -> None:
    collector = _Collector(TOKEN, begin=False)
    collector.feed(b"abc\0sojourn:01")
    collector.rest()
    assert bytes(collector.text) == b"abc\0sojourn:01"


def test_an_interpreter_is_told_by_its_arguments() -> None:
    program = Path(interpreter_driver.__file__).read_text()
    assert is_interpreter(["python3", "-c", program])
    assert not is_interpreter(["python3", "-c", "print(1)"])
