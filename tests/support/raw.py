"""One plain HTTP request to a test server, below the client library."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


def request(
    url: str,
    method: str,
    target: str,
    content: bytes | None = None,
    token: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Send it as it is; the status and the JSON body (or bytes, when it is none)."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        given = dict(headers or {})
        if token is not None:
            given.setdefault("authorization", f"Bearer {token}")
        connection.request(method, target, content, given)
        answer = connection.getresponse()
        body = answer.read()
        if "json" in (answer.getheader("content-type") or ""):
            return answer.status, json.loads(body)
        return answer.status, body
    finally:
        connection.close()
