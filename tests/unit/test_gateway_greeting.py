"""The name in the first message of a TLS connection."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.gateway.greeting import GreetingRefused, server_name


def hello(name: str | None) -> bytes:
    """A real greeting."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    read, written = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(read, written, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return written.read()


def test_the_name_is_read() -> None:
    assert server_name(hello("a.example.com")) == (True, b"a.example.com")
    assert server_name(hello(None)) == (True, None)


def test_any_beginning_is_unfinished() -> None:
    data = hello("a.example.com")
    for size in range(len(data)):
        assert server_name(data[:size]) == (False, None)


def test_a_greeting_in_many_records_is_one() -> None:
    body = hello("a.example.com")[5:]
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    data = b"".join(b"\x16\3\1" + len(piece).to_bytes(2, "big") + piece for piece in pieces)
    assert server_name(data) == (True, b"a.example.com")


def extended(*extensions: bytes) -> bytes:
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0"
    block = b"".join(extensions)
    body += len(block).to_bytes(2, "big") + block
    message = b"\1" + len(body).to_bytes(3, "big") + body
    return b"\x16\3\1" + len(message).to_bytes(2, "big") + message


def named(*names: bytes) -> bytes:
    entries = b"".join(b"\0" + len(name).to_bytes(2, "big") + name for name in names)
    body = len(entries).to_bytes(2, "big") + entries
    return b"\0\0" + len(body).to_bytes(2, "big") + body


def test_two_names_are_refused() -> None:
    assert server_name(extended(named(b"a.com"))) == (True, b"a.com")
    for data in (extended(named(b"a.com", b"b.com")), extended(named(b"a.com"), named(b"b.com"))):
        with pytest.raises(GreetingRefused):
            server_name(data)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_for(data: bytes) -> None:
    for given_data in (data, b"\x16\3\1" + data, extended(data)):
        try:
            server_name(given_data)
        except GreetingRefused:
            continue
