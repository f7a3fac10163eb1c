"""What an endpoint of the API is: one declaration that drives routing, checking and the OpenAPI
document, so that the three cannot differ.

Guarantee: before a handler runs, the caller is authenticated, the path and query are well formed
and the body is of its schema; nothing is read from an unauthenticated caller. Every failure
becomes an error body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from sojourn.errors import (
    InvalidRequest,
    ProcessNotFound,
    SojournError,
    TooLarge,
    Unauthenticated,
    Unreachable,
)
from sojourn.server.answers import Shutdown, error_answer
from sojourn.server.auth import bearer_token
from sojourn.server.base import Principal, SessionService
from sojourn.server.queries import Query, check_percent, parse_query

MAX_JSON_BODY = 8 * 1024 * 1024
MAX_KEY = 255

PRINCIPAL = "sojourn.principal"
"""The key of a scope under which a node finds who asks; no client can set it."""


class Call:
    """One request on its way through an endpoint."""

    __slots__ = ("_request", "parameters", "query", "service", "shutdown", "who")

    def __init__(
        self,
        request: Request[Any, Any, Any],
        service: SessionService,
        shutdown: Shutdown,
        who: Principal,
        query: dict[str, Any],
    ) -> None:
        self._request = request
        self.service = service
        self.shutdown = shutdown
        self.who = who
        self.query = query
        self.parameters: dict[str, Any] = request.scope["path_params"]

    @property
    def ref(self) -> str:
        """The session's id or name."""
        return str(self.parameters["ref"])

    @property
    def process(self) -> int:
        """The process's id. Raises ProcessNotFound for a number that cannot be one."""
        number = int(self.parameters["process"])
        if not 0 <= number < 2**63:
            raise ProcessNotFound(f"there is no process {number}")
        return number

    def header(self, name: bytes) -> str | None:
        """A header's value as text."""
        for key, value in self._request.scope["headers"]:
            if key == name:
                return value.decode("latin-1")
        return None

    def accepts(self, media_type: str) -> bool:
        """Whether the caller asks for this media type by name."""
        return media_type in (self.header(b"accept") or "")

    @property
    def key(self) -> str | None:
        """The idempotency key. Raises InvalidRequest."""
        key = self.header(b"idempotency-key")
        if key is None:
            return None
        if not key or len(key) > MAX_KEY or not key.isprintable():
            raise InvalidRequest(
                f"the Idempotency-Key header is not 1 to {MAX_KEY} printable characters",
                field="Idempotency-Key",
            )
        return key

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, of any size. Raises Unreachable when the client leaves
        before its end, so that no half body passes for a whole one."""
        receive = self._request.receive
        while True:
            message: dict[str, Any] = dict(await receive())
            if message["type"] == "http.disconnect":
                raise Unreachable("the client left before its request was complete")
            if message["body"]:
                yield message["body"]
            if not message["more_body"]:
                return

    async def body(self, limit: int = MAX_JSON_BODY) -> bytes:
        """The whole body. Raises TooLarge."""
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise TooLarge(f"the body is over {limit} bytes", limit=limit)
        parts: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body is over {limit} bytes", limit=limit)
            parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Endpoint(msgspec.Struct, frozen=True):
    """A method and path of the API. `body` is the schema of a JSON body, or a media type for a
    streamed one; `answers` maps status to schema (None: no body; a str: a media type). `headers`
    says what optional headers of its own are about."""

    method: str
    path: str
    summary: str
    answers: dict[int, Any]
    body: Any = None
    query: dict[str, Query] = {}
    errors: tuple[type[SojournError], ...] = ()
    example: Any = None
    key: bool = False
    headers: dict[str, str] = {}
    public: bool = False
    handler: Any = None


def endpoint(method: str, path: str, summary: str, **facts: Any) -> Callable[[Any], Endpoint]:
    """Declare the decorated coroutine function as the handler of an endpoint."""

    def declare(handler: Any) -> Endpoint:
        return Endpoint(method, path, summary, handler=handler, **facts)

    return declare


def decode_body(raw: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """A JSON body of a schema; an empty body stands for `{}`. Raises InvalidRequest."""
    try:
        return decoder.decode(raw or b"{}")
    except msgspec.ValidationError as error:
        message = str(error)
        raise InvalidRequest(f"the body is not valid: {message}", field=_field(message)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from error


def _field(message: str) -> str:
    """The field that a message of msgspec is about."""
    where = (
        message.rpartition(" - at `$")[2].rstrip("`").lstrip(".") if " - at `$" in message else ""
    )
    if "field `" in message:
        inner = message.partition("field `")[2].partition("`")[0]
        return f"{where}.{inner}" if where else inner
    return where or "body"


async def caller(scope: Any, service: SessionService, token: str | None = None) -> Principal:
    """Who asks: by the token, or where servers alone can ask, as a server says. Raises
    Unauthenticated."""
    if PRINCIPAL in scope:
        told: Principal | None = scope[PRINCIPAL]
        if told is None:
            raise Unauthenticated("the server does not say who asks", next_step="")
        return told
    return await service.authenticate(token or bearer_token(scope["headers"]))


def build(declared: Endpoint, service: SessionService, shutdown: Shutdown) -> HTTPRouteHandler:
    """The Litestar handler of an endpoint."""
    decoder = (
        msgspec.json.Decoder(declared.body)
        if declared.body is not None and not isinstance(declared.body, str)
        else None
    )
    nobody = Principal("", "", "")
    call_handler = declared.handler

    async def handle(request: Request[Any, Any, Any]) -> ASGIApp:
        scope = request.scope
        try:
            who = nobody if declared.public else await caller(scope, service)
            check_percent(scope.get("raw_path") or b"")
            call = Call(
                request, service, shutdown, who, parse_query(scope["query_string"], declared.query)
            )
            if decoder is None:
                answer: ASGIApp = await call_handler(call)
            else:
                answer = await call_handler(call, decode_body(await call.body(), decoder))
        except SojournError as error:
            return error_answer(error)
        return answer

    path = declared.path.replace("{process}", "{process:int}")
    path = path.replace("{port}", "{port:int}")
    for name in ("ref", "operation", "snapshot", "turn", "token", "secret", "template", "node"):
        path = path.replace(f"{{{name}}}", f"{{{name}:str}}")
    return HTTPRouteHandler(
        path,
        http_method=declared.method,  # type: ignore[arg-type]
        status_code=200,
        include_in_schema=False,
        opt={"endpoint": declared},
    )(handle)
