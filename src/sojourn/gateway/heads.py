"""Heads of HTTP messages: what of them concerns one connection, and what the message itself.

Guarantee: no header that frames a message or speaks of its connection is passed on as it came.
"""

from __future__ import annotations

from collections.abc import Sequence

import h11

from sojourn.gateway.answers import malformed
from sojourn.gateway.names import Host
from sojourn.gateway.secrets import Headers

HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Cannot stand in a trailer: they would change how the message is read.
NOT_IN_TRAILERS = HOP | {b"host", b"content-length", b"content-encoding", b"authorization"}


def outgoing(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """A request's headers without those of the connection they came on, and without its host."""
    named = named_by_connection(headers)
    found = [
        (key, value)
        for key, value in headers
        if key not in HOP and key not in named and key != b"host"
    ]
    if any(key == b"transfer-encoding" for key, _ in headers):
        found.append((b"transfer-encoding", b"chunked"))
    return found


def named_by_connection(headers: Sequence[tuple[bytes, bytes]]) -> set[bytes]:
    """Headers that speak of the connection. What frames a message or names its host cannot be
    made to vanish this way."""
    named = {
        part.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for part in value.split(b",")
    }
    return named - {b"content-length", b"host", b"authorization", b"expect"}


def host_header(host: Host, port: int, tls: bool) -> bytes:
    text = f"[{host}]" if host.address is not None and host.address.version == 6 else str(host)
    return (text if port == (443 if tls else 80) else f"{text}:{port}").encode()


def has_body(request: h11.Request) -> bool:
    return any(
        key == b"transfer-encoding" or (key == b"content-length" and value != b"0")
        for key, value in request.headers
    )


def wants_websocket(request: h11.Request) -> bool:
    upgrades = [value.strip().lower() for key, value in request.headers if key == b"upgrade"]
    return (
        upgrades == [b"websocket"]
        and request.method == b"GET"
        and b"upgrade" in named_by_connection(request.headers)
    )


def absolute(target: bytes, tls: bool) -> tuple[bytes, bytes]:
    """Authority and path of a whole address. Raises Refused."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() != (b"https" if tls else b"http"):
        raise malformed("a request's target is no address that can be gone to here")
    ends = [at for at in (rest.find(mark) for mark in (b"/", b"?", b"#")) if at >= 0]
    end = min(ends, default=len(rest))
    path = rest[end:].partition(b"#")[0]
    if not path.startswith(b"/"):
        path = b"/" + path
    return rest[:end], path
