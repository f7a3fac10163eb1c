"""Bounded output: exact parts, marks, and no character cut in two."""

from __future__ import annotations

import base64
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.mcp.texts import KEPT, LIMIT, Outputs, Stream, clipped, part

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
CALL = "rest(offset={offset})"


def stream(*pieces: bytes) -> Stream:
    made = Stream()
    for piece in pieces:
        made.feed(piece)
    return made


@QUICK
@given(st.lists(st.binary(max_size=50)))
def test_what_is_short_is_shown_exactly(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    shown = stream(*pieces).show(CALL)
    exact = shown.text.encode() if shown.encoding == "utf-8" else base64.b64decode(shown.text)
    assert exact == whole and shown.size == len(whole)


@QUICK
@given(st.text(min_size=1, max_size=40), st.integers(1, 3))
def test_a_long_text_is_its_beginning_and_its_end_and_the_mark_tells_the_rest(
    word: str, shift: int
) -> None:
    whole = b"x" * shift + word.encode() * (2 * LIMIT // len(word.encode()))
    made = stream(whole[:7], whole[7:])
    if made.whole():
        return
    shown = made.show(CALL)
    found = re.search(
        r"\n\[(\d+) bytes left out here; rest\(offset=(\d+)\) gives them\]\n", shown.text
    )
    assert found is not None and shown.encoding == "utf-8"
    head, tail = shown.text[: found.start()].encode(), shown.text[found.end() :].encode()
    assert whole.startswith(head) and whole.endswith(tail)
    assert int(found[2]) == len(head) and int(found[1]) == len(whole) - len(head) - len(tail)
    assert len(shown.text) <= LIMIT + 200 and len(head) > LIMIT // 2 - 4 < len(tail) + 4


@QUICK
@given(st.text(min_size=1, max_size=5), st.integers(0, 5))
def test_parts_joined_are_the_whole(word: str, shift: int) -> None:
    whole = b"y" * shift + word.encode() * (2 * LIMIT // len(word.encode()) + 9)
    read = b""
    while len(read) < len(whole):
        shown = part(whole[len(read) : len(read) + LIMIT + 4], more=False)
        assert shown.encoding == "utf-8" and 0 < len(shown.text) <= LIMIT
        read += shown.text.encode()
    assert read == whole


@QUICK
@given(st.binary(min_size=1))
def test_parts_of_anything_go_on(data: bytes) -> None:
    noise = b"\xff" + data
    shown = part(noise, more=False)
    assert shown.encoding == "base64" and base64.b64decode(shown.text) == noise[: shown.size]
    assert shown.size > 0 and len(shown.text) <= LIMIT


def test_a_character_that_is_not_complete_yet_waits() -> None:
    euro = "\u20ac".encode()
    assert part(euro[:2], more=True).size == 0
    assert part(b"a" + euro[:2], more=True).text == "a"
    assert part(euro[:2], more=False).encoding == "base64"  # it never will be


def test_what_is_kept_is_bounded_and_the_end_is_seen() -> None:
    made = Stream()
    for number in range(2 * KEPT // 65536):
        made.feed(bytes([97 + number % 26]) * 65536)
    made.feed(b"the end")
    assert len(made.kept) == KEPT and made.size == 2 * KEPT + 7
    shown = made.show(CALL)
    assert shown.text.endswith("the end") and f"first {KEPT} bytes" in shown.text


def test_noise_is_its_beginning_in_base64() -> None:
    noise = b"\x80\x81" * LIMIT
    shown = stream(noise).show(CALL)
    assert shown.encoding == "base64" and base64.b64decode(shown.text) == noise[:22_500]
    assert shown.size == len(noise) and len(shown.text) <= LIMIT


def test_old_outputs_make_room_for_new_ones() -> None:
    kept = Outputs(bound=100)
    for number in range(4):
        kept.keep(f"out-{number}", {"stdout": stream(b"x" * 40)})
    assert [kept.get(f"out-{number}") is not None for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    kept.keep("big", {"stdout": stream(b"x" * 500)})  # the newest one always stays
    assert kept.get("big") is not None and kept.get("out-3") is None


@pytest.mark.parametrize(
    ("text", "told"), [("abc", "abc"), ("abcdef", "abc\n[3 characters left out]")]
)
def test_clipping_says_so(text: str, told: str) -> None:
    assert clipped(text, 3) == told
