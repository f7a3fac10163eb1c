"""The applications as they are served: each request counted, timed, traced and named in the log;
and /metrics.

Guarantee: an answer passes through unchanged and as fast as it comes. Metrics are told to the
operator alone.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from sojourn.database.records import Role
from sojourn.errors import Forbidden, InvalidRequest, SojournError
from sojourn.server.answers import Answer, error_answer, internal_error
from sojourn.server.auth import bearer_token
from sojourn.server.base import Principal
from sojourn.telemetry import declared, scraping, tracing

Headers = Iterable[tuple[bytes, bytes]]
Authenticate = Callable[[Headers], Awaitable[Principal]]

_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Observed:
    """In front of an application. `authenticate` tells who sent these headers, `pattern` of which
    pattern the path of a request is that no router of ours has seen."""

    def __init__(
        self,
        inner: ASGIApp,
        authenticate: Authenticate,
        pattern: Callable[[str], str | None] = lambda path: None,
    ) -> None:
        self._inner = inner
        self._pattern = pattern
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked: Any = scope
        if asked["type"] != "http":
            await self._inner(scope, receive, send)
            return
        began = time.perf_counter()
        method = asked["method"] if asked["method"] in _METHODS else "other"
        span = tracing.server_span(method, asked["headers"])

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = self._route(asked)
                status = message["status"]
                declared.HTTP_SECONDS.observe(time.perf_counter() - began, method, route)
                declared.HTTP_REQUESTS.add(method, route, str(status))
                span.rename(f"{method} {route}")
                span.set(
                    http__request__method=method,
                    http__route=route,
                    http__response__status_code=status,
                )
                if status >= 500:
                    span.fail(str(status))
            await send(message)

        with span:
            if asked["path"] == "/metrics":
                await (await self._metrics(asked))(scope, receive, observed)
            else:
                await self._inner(scope, receive, observed)

    def _route(self, asked: Any) -> str:
        """The pattern of an address, never the address itself: it may hold names and paths."""
        template = asked.get("path_template")
        if isinstance(template, str) and template:
            return template
        path: str = asked["path"]
        if path == "/metrics":
            return path
        found = self._pattern(path)
        if found is not None:
            return found
        return "unknown" if path.startswith("/v1/") or path == "/v1" else "e2b"

    async def _metrics(self, asked: Any) -> Answer:
        headers = asked["headers"]
        try:
            if asked["method"] != "GET":
                raise InvalidRequest("metrics are only read (GET)")
            who = await self._authenticate(headers)
            if who.role != Role.OPERATOR:
                raise Forbidden("only the operator reads metrics")
            return await metrics_answer(headers)
        except SojournError as error:
            return error_answer(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the scrape is answered
            return error_answer(internal_error(error))


def by_token(
    authenticate: Callable[[str | None], Awaitable[Principal]],
) -> Authenticate:
    """Who sent headers, by the bearer's token in them."""

    async def who(headers: Headers) -> Principal:
        return await authenticate(bearer_token(headers))

    return who


async def metrics_answer(headers: Headers) -> Answer:
    """All metrics, as these headers ask for them."""
    accept = ",".join(value.decode("latin-1") for name, value in headers if name == b"accept")
    body, content_type = await scraping.scrape(accept)
    return Answer(200, body, [(b"content-type", content_type.encode())])
