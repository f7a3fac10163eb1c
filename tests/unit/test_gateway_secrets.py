"""Secrets go where they are bound to, and come back as what stands for them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.gateway.messages import Granted
from sojourn.gateway.secrets import Placed, Scrubber, place
from sojourn.model.network import SecretPlace, SecretUse, placeholder

_VALUE = 's3cr3t/with+odd "chars"&é'
_STAND_IN = placeholder("KEY").encode()


def granted(*uses: SecretUse, name: str = "KEY", value: str = _VALUE) -> Granted:
    return Granted(name, list(uses), value)


def use(**fields: object) -> SecretUse:
    return SecretUse(domains=["api.example.com"], **fields)  # type: ignore[arg-type]


def put(
    secret: Granted,
    *,
    host: str = "api.example.com",
    tls: bool = True,
    target: bytes = b"/",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> Placed:
    return place([secret], host, tls, target, headers or [])


def header(placed: Placed, name: bytes) -> list[bytes]:
    return [value for key, value in placed.headers if key.lower() == name]


def test_a_header_is_put_in_place_of_the_programs_own() -> None:
    placed = put(granted(use()), headers=[(b"authorization", b"Bearer mine")])
    assert header(placed, b"authorization") == [b"Bearer " + _VALUE.encode()]
    assert placed.names == ["KEY"]
    plain = put(granted(use(name="X-Key")))
    assert header(plain, b"x-key") == [_VALUE.encode()]


def test_other_places() -> None:
    query = put(granted(use(place=SecretPlace.QUERY, name="key")), target=b"/a?b=1&key=old")
    assert query.target == b"/a?b=1&key=" + quote(_VALUE, safe="").encode()
    basic = put(granted(use(place=SecretPlace.BASIC, name="me")))
    assert base64.b64decode(header(basic, b"authorization")[0][6:]) == f"me:{_VALUE}".encode()
    template = put(granted(use(place=SecretPlace.TEMPLATE, name="X-A", template="t={secret};")))
    assert header(template, b"x-a") == [f"t={_VALUE};".encode()]


@pytest.mark.parametrize(
    ("host", "tls"),
    [
        ("example.com", True),
        ("api.example.com.evil.com", True),
        ("x.api.example.com", True),
        ("api.example.com", False),
        (None, True),
    ],
)
def test_nothing_goes_anywhere_else(host: str | None, tls: bool) -> None:
    asked = [(b"authorization", b"Bearer " + _STAND_IN)]
    placed = place([granted(use())], host, tls, b"/?k=" + _STAND_IN, asked)
    assert (placed.target, placed.headers, placed.names) == (b"/?k=" + _STAND_IN, asked, [])


def test_plain_http_only_where_its_use_says_so() -> None:
    assert put(granted(use(over_http=True)), tls=False).names == ["KEY"]


def test_placeholders_are_replaced_in_headers_queries_and_credentials() -> None:
    pair = base64.b64encode(b"me:" + _STAND_IN)
    placed = put(
        granted(use(name="X-Unused")),
        target=b"/path/" + _STAND_IN + b"?k=" + _STAND_IN,
        headers=[(b"x-token", b"a " + _STAND_IN), (b"authorization", b"Basic " + pair)],
    )
    escaped = quote(_VALUE, safe="").encode()
    assert placed.target == b"/path/" + _STAND_IN + b"?k=" + escaped
    assert header(placed, b"x-token") == [b"a " + _VALUE.encode()]
    assert base64.b64decode(header(placed, b"authorization")[0][6:]) == b"me:" + _VALUE.encode()


def test_a_name_that_begins_another_is_not_taken_for_it() -> None:
    short, long = granted(use(name="A"), value="11111111"), granted(use(name="B"), name="KEY2")
    placed = place([short, long], "api.example.com", True, b"/", [(b"x", b"sojourn-secret-KEY2")])
    assert header(placed, b"x") == [_VALUE.encode()]


def test_answers_are_asked_for_in_a_form_that_can_be_searched() -> None:
    asked = [(b"accept-encoding", b"gzip, br"), (b"range", b"bytes=0-3")]
    placed = put(granted(use()), headers=asked)
    assert header(placed, b"accept-encoding") == [b"identity"]
    assert header(placed, b"range") == []


@pytest.mark.parametrize(
    "written",
    [
        _VALUE,
        quote(_VALUE, safe=""),
        quote(_VALUE, safe="").lower(),
        json.dumps(_VALUE),
        json.dumps(_VALUE, ensure_ascii=False),
        base64.b64encode(_VALUE.encode()).decode(),
    ],
)
def test_every_form_of_a_value_comes_back_as_its_placeholder(written: str) -> None:
    scrubber = put(granted(use())).scrubber
    assert scrubber is not None
    if written.lower() == written and "%" in written:
        written = "".join(
            part.lower() if part[:1] == "%" else part for part in _percent_parts(_VALUE)
        )
    cleaned = scrubber.whole(b"<" + written.encode() + b">")
    assert _STAND_IN in cleaned
    assert b"s3cr3t" not in cleaned


def _percent_parts(text: str) -> list[str]:
    escaped, parts, at = quote(text, safe=""), [], 0
    while at < len(escaped):
        size = 3 if escaped[at] == "%" else 1
        parts.append(escaped[at : at + size])
        at += size
    return parts


@given(
    st.lists(st.sampled_from([b"ab", b"abab", b"abc", b"a", b"b", b"c", b"xx", b""]), max_size=20),
    st.lists(st.integers(1, 5), max_size=40),
)
def test_the_borders_of_pieces_change_nothing(parts: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(parts)
    forms = {b"ababc": b"<1>", b"abx": b"<2>"}
    at, cut = 0, Scrubber(forms)
    found = b""
    for size in [*cuts, len(whole)]:
        found += cut.feed(whole[at : at + size])
        at += size
    found += cut.last()
    assert found == Scrubber(forms).whole(whole)


@given(st.binary(max_size=30), st.binary(max_size=30), st.integers(1, 7))
def test_a_value_in_a_stream_is_found_across_borders(
    before: bytes, after: bytes, size: int
) -> None:
    data = before + b"abcabd" + after
    scrubber = Scrubber({b"abcabd": b""})
    assert None in [scrubber.passable(data[at : at + size]) for at in range(0, len(data), size)]


@given(st.lists(st.sampled_from([b"a", b"b", b"abcdefgh", b"ijkl", b"m"]), max_size=30))
def test_a_stream_without_a_value_is_passed_on_as_it_is(pieces: list[bytes]) -> None:
    scrubber = Scrubber({b"abcdefghijklmnop": b"", b"bb-": b""})
    passed = [scrubber.passable(piece) for piece in pieces]
    assert b"".join(one or b"" for one in passed) + scrubber.passable_rest() == b"".join(pieces)
    assert None not in passed


@given(st.lists(st.integers(1, 20), max_size=20))
def test_of_a_value_in_a_stream_nothing_but_its_beginning_goes_on(cuts: list[int]) -> None:
    value, said = b"0123456789abcdefghij", b"a message: "
    scrubber, data, at, passed = Scrubber({value: b""}), said + value, 0, b""
    for size in [*cuts, len(data)]:
        piece = scrubber.passable(data[at : at + size])
        at += size
        if piece is None:
            break
        passed += piece
    else:
        raise AssertionError("it was not found")
    assert len(passed) <= len(said) + 7


def test_a_message_that_ends_like_a_value_begins_is_not_held_up() -> None:
    scrubber = Scrubber({b"ghp_0123456789": b""})
    assert scrubber.passable(b"what is ghp_") == b"what is ghp_"


@pytest.mark.parametrize("before", [b"", b"Bearer ", b"x", b"xy", b'{"token": "'])
@pytest.mark.parametrize("after", [b"", b"}", b" and more"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_value_within_base64_is_found(
    before: bytes, after: bytes, encode: Callable[[bytes], bytes]
) -> None:
    scrubber = put(granted(use())).scrubber
    assert scrubber is not None
    cleaned = scrubber.whole(encode(before + _VALUE.encode() + after))
    assert _STAND_IN in cleaned
    # At its borders it shares a letter with what is beside it; no more of it stays.
    assert len(cleaned) < len(_STAND_IN) + len(encode(before)) + len(encode(after)) + 4


def test_a_name_that_holds_a_value_is_known_in_any_case() -> None:
    scrubber = Scrubber({b"0a1b2C3D": b"x"})
    assert scrubber.named_in(b"x-0a1b2c3d") and scrubber.named_in(b"X-0A1B2C3D-y")
    assert not scrubber.named_in(b"x-0a1b2c")


def test_a_value_stands_in_no_representation() -> None:
    secret = granted(use())
    placed = put(secret)
    for thing in (secret, placed, placed.scrubber, [secret], {"a": placed}):
        assert "s3cr3t" not in repr(thing)
        assert "s3cr3t" not in str(thing)
