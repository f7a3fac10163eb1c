"""Plain HTTP requests to a test server, below the client library."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpcore
import msgspec

from support.servers import ServerProcess


class Answer(NamedTuple):
    """Status and decoded body (None when it is empty)."""

    status: int
    body: Any

    @property
    def code(self) -> str | None:
        """The error's code."""
        return self.body.get("code") if isinstance(self.body, dict) else None


class RawApi:
    """Sends requests as they are; nothing is repeated."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self._token = server.token
        self._pool = httpcore.ConnectionPool(max_connections=32)

    def close(self) -> None:
        self._pool.close()

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        token: str | None = None,
        timeout: float = 90.0,
    ) -> Answer:
        headers = [("authorization", f"Bearer {token or self._token}")]
        if key is not None:
            headers.append(("idempotency-key", key))
        content = b"" if body is None else msgspec.json.encode(body)
        answer = self._pool.request(
            method,
            self._url + path,
            headers=headers,
            content=content,
            extensions={"timeout": {"read": timeout, "connect": 5.0, "pool": timeout}},
        )
        return Answer(
            answer.status, msgspec.json.decode(answer.content) if answer.content else None
        )

    def parallel(self, requests: list[tuple[Any, ...]], **options: Any) -> list[Answer]:
        """All at once; each item holds the positional arguments of a call."""
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(lambda request: self(*request, **options), requests))


@contextmanager
def raw_api(server: ServerProcess) -> Iterator[RawApi]:
    """A RawApi that is closed again."""
    api = RawApi(server)
    try:
        yield api
    finally:
        api.close()
