"""One request of an E2B client on its way through a route.

Guarantee: a route sees who asks and for which sandbox only after the key or token was checked;
the body is bounded unless a route reads it as it comes.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from litestar.types import ASGIApp, Receive, Scope

from sojourn.errors import InvalidRequest, SojournError, TooLarge, Unreachable
from sojourn.server.answers import Answer, Shutdown
from sojourn.server.base import Principal, SessionService
from sojourn.server.e2b import connect, ids

MAX_BODY = 8 * 1024 * 1024
JSON = (b"content-type", b"application/json")

T = TypeVar("T")


class Call:
    """What a route is given."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        service: SessionService,
        shutdown: Shutdown,
        groups: dict[str, str],
    ) -> None:
        self._receive = receive
        self.scope = scope
        self.method = str(scope.get("method"))
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.service = service
        self.shutdown = shutdown
        self.groups = groups
        self._query: bytes = scope["query_string"]
        self.who = Principal("", "", "")
        self.sandbox = ""
        """The sandbox id, as the client said it."""

    @property
    def session(self) -> str:
        """The session's id."""
        return self.groups["session"]

    @functools.cached_property
    def query(self) -> dict[str, str]:
        """What the address asks for; of a name that comes twice, the last."""
        return query(self._query)

    def header(self, name: bytes) -> str | None:
        """A header's value as text."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises Unreachable when the client leaves before its end."""
        while True:
            message: dict[str, Any] = dict(await self._receive())
            if message["type"] == "http.disconnect":
                raise Unreachable("the client left before its request was complete")
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    async def body(self) -> bytes:
        """The whole body. Raises TooLarge."""
        parts = bytearray()
        async for chunk in self.chunks():
            parts += chunk
            if len(parts) > MAX_BODY:
                raise TooLarge(f"the body is over {MAX_BODY} bytes", limit=MAX_BODY)
        return bytes(parts)

    def ended_with(self, error: SojournError) -> bytes:
        """The end of a stream that failed."""
        sandbox = ids.sandbox_id(self.session)
        return connect.end(connect.error_object(error, sandbox, stopping=self.shutdown.stopping))

    async def json(self, kind: type[T]) -> T:
        """The body as a value of a schema. Raises InvalidRequest, TooLarge."""
        try:
            return msgspec.json.decode(await self.body() or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not valid: {error}") from error


def query(raw: bytes) -> dict[str, str]:
    """The values of a query string. What is no UTF-8 is kept in surrogates."""
    found = {}
    for part in raw.decode("latin-1").split("&"):
        if part:
            name, _, value = part.partition("=")
            found[_plain(name)] = _plain(value)
    return found


def _plain(text: str) -> str:
    text = text.replace("+", " ")
    if "%" not in text and text.isascii():
        return text
    return unquote_to_bytes(text.encode("latin-1")).decode("utf-8", "surrogateescape")


Route = Callable[[Call], Awaitable[ASGIApp]]


def answer(
    value: Any, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> Answer:
    """A value as JSON."""
    return Answer(status, msgspec.json.encode(value), [JSON, *(headers or [])])


def nothing() -> Answer:
    """Done, with nothing to tell."""
    return Answer(204, b"", [])
