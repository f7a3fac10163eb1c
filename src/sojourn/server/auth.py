"""Reading the caller's token from a request.

Guarantee: a token is taken from the `Authorization: Bearer` header alone, never from the query,
so that it stays out of logs. What a token is worth is the service's business
(`SessionService.authenticate`, which looks for its hash).
"""

from __future__ import annotations

from collections.abc import Iterable


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The bearer token of a request's raw headers, None when there is none or it is not ASCII."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            token = token.strip()
            if scheme.lower() != b"bearer" or not token or not token.isascii():
                return None
            return token.decode("ascii")
    return None
