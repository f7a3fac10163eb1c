"""What both transports share: the server's address as httpcore takes it, and which of its
exceptions mean a failed connection."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpcore

from sojourn.client import core
from sojourn.errors import InvalidRequest
from sojourn.telemetry import tracing

NOT_SENT = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout)
"""Failures after which the server cannot have seen the request."""

FAILURES = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)
"""What httpcore raises when a connection fails."""

_CONNECT_SECONDS = 10.0


class Origin:
    """A server's address and the headers that go with every request."""

    def __init__(self, address: core.Address) -> None:
        parts = urlsplit(address.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidRequest(
                f"{address.url!r} is not an http address",
                next_step="Give the URL as http://HOST:PORT.",
                field="url",
            )
        self.url = address.url
        self.prefix = parts.path.rstrip("/").encode()
        self.scheme = parts.scheme.encode()
        self.host = parts.hostname.encode()
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.headers: list[tuple[bytes, bytes]] = [
            (b"host", parts.netloc.rpartition("@")[2].encode()),
            (b"user-agent", b"sojourn"),
        ]
        if address.token:
            self.headers.append((b"authorization", f"Bearer {address.token}".encode()))


def http_request(origin: Origin, request: core.Request) -> httpcore.Request:
    """A request as httpcore takes it."""
    content: Any = request.content
    headers = [*origin.headers, *tracing.carry(), *request.headers]
    if not isinstance(content, bytes):
        headers.append((b"transfer-encoding", b"chunked"))
    elif content or request.method != b"GET":
        headers.append((b"content-length", b"%d" % len(content)))
    url = httpcore.URL(
        scheme=origin.scheme,
        host=origin.host,
        port=origin.port,
        target=origin.prefix + request.target.encode("ascii"),
    )
    timeout = {"connect": _CONNECT_SECONDS, "read": request.timeout, "write": None, "pool": None}
    return httpcore.Request(
        request.method, url, headers=headers, content=content, extensions={"timeout": timeout}
    )
