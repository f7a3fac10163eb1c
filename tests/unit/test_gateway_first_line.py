"""HTTP is told from other protocols by its first line, however it is cut into pieces."""

from __future__ import annotations

import pytest

from sojourn.gateway.splicing import FirstLine


def verdict(data: bytes, size: int) -> bool | None:
    first = FirstLine()
    for at in range(0, len(data), size):
        first.feed(data[at : at + size])
    return first.http


@pytest.mark.parametrize("size", [1, 3, 70_000])
@pytest.mark.parametrize(
    ("data", "http"),
    [
        (b"GET / HTTP/1.1\r\n", True),
        (b"get\t/ http/1.1\n", True),
        (b"\r\n\r\nGET / HTTP/1.1\r\n", True),
        (b"PRI * HTTP/2.0\r\n", True),
        (b"X" * 300 + b" / HTTP/1.1\r\n", True),
        (b"GET /" + b"a" * 17_000, True),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", False),
        (b"*1\r\n$4\r\nPING\r\n", False),
        (b"GET key\r\n", False),
        (b'{"a": "HTTP/1.1', False),
        (b"\0\0\0\x08", False),
        (b"EHLO \xff", False),
        (b"GET / HTTP/1.1", None),
        (b"PING", None),
        (b"", None),
    ],
)
def test_the_first_line_decides(data: bytes, size: int, http: bool | None) -> None:
    assert verdict(data, size) is http
