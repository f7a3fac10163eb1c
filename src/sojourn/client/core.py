"""The client without input or output: requests and responses as values.

Guarantee: what is asked of the server, and what its answers mean, is written once here, for both
the blocking and the asynchronous client. A plan is a generator that yields requests, is sent their
responses and returns the result; a shell only carries the bytes. Whether a request may be
repeated after a lost connection is a property of the request: reads and verbs (which carry an
idempotency key) may, commands never.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, quote_from_bytes

import msgspec

from sojourn.errors import (
    ErrorBody,
    Interrupted,
    InvalidRequest,
    NodeUnavailable,
    SojournError,
    Unreachable,
    from_body,
)
from sojourn.model import paths
from sojourn.wire.api import OperationInfo, ServerAddress

T = TypeVar("T")

ANSWER_SECONDS = 60.0
"""How long an answer may take that the server gives at once."""
WAIT_SECONDS = 60.0
DURABLE = "durable"
DURABLE_SECONDS = 1300.0  # the server waits up to 600 s for the operation, then for the store
"""How long the server is asked to wait in one request."""
RETRY_DELAYS = (0.05, 0.2, 0.5)
MOVED_DELAYS = (0.2, 1.0, 3.0, 5.0, 10.0)
"""Before a request is sent again whose session moves between nodes."""

JSON_TYPE = (b"content-type", b"application/json")
OCTETS_TYPE = (b"content-type", b"application/octet-stream")

Content = bytes | Iterable[bytes] | AsyncIterable[bytes]


class Request(msgspec.Struct, frozen=True):
    """One request. `timeout` bounds the wait for the next bytes of the answer (None: no bound);
    `repeatable` says that sending it twice does no harm."""

    method: bytes
    target: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content: Content = b""
    timeout: float | None = ANSWER_SECONDS
    repeatable: bool = False


class Response(msgspec.Struct, frozen=True):
    """One whole answer."""

    status: int
    body: bytes


Plan = Generator[Request, Response, T]


class Address(msgspec.Struct, frozen=True):
    """Where the server is and what to show it."""

    url: str
    token: str | None


def find_server(url: str | None, token: str | None, environ: dict[str, str]) -> Address:
    """The server to use: as given, else SOJOURN_URL and SOJOURN_TOKEN, else the local server by
    its own files. Raises Unreachable when there is none."""
    data = paths.data_directory()
    url = url or environ.get("SOJOURN_URL")
    token = token or environ.get("SOJOURN_TOKEN")
    if url is None:
        try:
            raw = paths.server_file(data).read_bytes()
            url = msgspec.json.decode(raw, type=ServerAddress).url
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreachable(
                f"no server was named and none runs with the data directory {data}"
            ) from error
        token = token or _local_token(data)
    return Address(url.rstrip("/"), token)


def _local_token(data: Path) -> str | None:
    try:
        return paths.token_file(data).read_text().strip() or None
    except OSError:
        return None  # the server then says that a token is missing


def retry_delay(request: Request, attempt: int, *, sent: bool) -> float | None:
    """Seconds before the next attempt after the connection failed, None to give up. What was
    never sent can always be sent again; a body that is consumed while it is sent cannot."""
    if attempt >= len(RETRY_DELAYS):
        return None
    if sent and not (request.repeatable and isinstance(request.content, bytes)):
        return None
    return RETRY_DELAYS[attempt]


def moved_delay(request: Request, response: Response, attempt: int) -> float | None:
    """Seconds before a request is sent again whose node was lost or not reached, as a server of a
    cluster says; None: its answer counts. Only what may be repeated is."""
    if response.status != 503 or attempt >= len(MOVED_DELAYS):
        return None
    if not (request.repeatable and isinstance(request.content, bytes)):
        return None
    error = error_of(response.status, response.body)
    lost = isinstance(error, Interrupted) and "node" in error.details
    return MOVED_DELAYS[attempt] if lost or isinstance(error, NodeUnavailable) else None


def unreachable(url: str, cause: BaseException, *, sent: bool) -> SojournError:
    """What a failed connection means to the caller."""
    reason = str(cause) or type(cause).__name__
    if not sent:
        return Unreachable(f"the server at {url} does not answer: {reason}", url=url)
    return Unreachable(
        f"the connection to {url} was lost before the answer came: {reason}",
        next_step="Whether it was done is unknown: look before you repeat it.",
        url=url,
    )


def cut_off(cause: BaseException) -> SojournError:
    """What an answer means that ended before its end."""
    return Interrupted(
        f"the answer was cut off: {str(cause) or type(cause).__name__}",
        next_step="Ask again; the server's log tells why.",
    )


def error_of(status: int, body: bytes) -> SojournError:
    """The error an answer stands for."""
    try:
        return from_body(msgspec.json.decode(body, type=ErrorBody))
    except msgspec.MsgspecError:
        shown = body[:200].decode("utf-8", "replace")
        return SojournError(
            f"the server answered {status} with no error body: {shown!r}",
            next_step="Check that SOJOURN_URL names a Sojourn server.",
        )


def decode(response: Response, kind: Any) -> Any:
    """An answer's body as a value of the API's schemas. Raises the error it stands for."""
    if response.status >= 400:
        raise error_of(response.status, response.body)
    return parse(response.body, kind)


def parse(text: bytes, kind: Any) -> Any:
    """JSON of the server as a value of the API's schemas. Raises SojournError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise SojournError(
            f"the server's answer was not understood: {error}",
            next_step="Check that server and client are of the same version.",
        ) from error


def check(response: Response) -> None:
    """Raises the error a body-less answer stands for."""
    if response.status >= 400:
        raise error_of(response.status, response.body)


# -- building requests --------------------------------------------------------------------------


def segment(value: str | int) -> str:
    """A value as one part of a path."""
    text = quote(str(value), safe="")
    if not text:
        raise InvalidRequest("the id or name is empty", field="ref")
    return text.replace(".", "%2E") if text in {".", ".."} else text


def session_path(ref: str) -> str:
    """The path of a session."""
    return f"/v1/sessions/{segment(ref)}"


def query_text(values: dict[str, Any]) -> str:
    """A query string, `?` included; None is left out, bytes keep their exact value."""
    parts = []
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            if one is None:
                continue
            if isinstance(one, bytes):
                text = quote_from_bytes(one, safe="/")
            elif isinstance(one, bool):
                text = "true" if one else "false"
            else:
                text = quote(str(one), safe="")
            parts.append(f"{name}={text}")
    return "?" + "&".join(parts) if parts else ""


def raw_path(path: str | bytes | Path) -> bytes:
    """A path inside a session as its bytes."""
    if isinstance(path, bytes):
        return path
    return str(path).encode("utf-8", "surrogateescape")


def json_body(value: Any) -> bytes:
    """A request body. Raises InvalidRequest for a number JSON cannot say: written as null it would
    mean something else, such as no timeout at all."""
    _check_finite(msgspec.to_builtins(value, builtin_types=(bytes,)))
    return msgspec.json.encode(value)


def _check_finite(value: Any, field: str = "") -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"`{field}` is {value}, which is no number to ask for", field=field)
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_finite(inner, f"{field}.{name}" if field else str(name))


def convert(value: Any, kind: type[T], field: str) -> T:
    """A value given as a mapping, or as it is, as one of the API's types. Raises InvalidRequest."""
    if isinstance(value, kind):
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"`{field}` is not valid: {error}", field=field) from error


def get(
    where: str, kind: Any, /, *, timeout: float | None = ANSWER_SECONDS, **query: Any
) -> Plan[Any]:
    """Read something."""
    target = where + query_text(query)
    response = yield Request(b"GET", target, timeout=timeout, repeatable=True)
    return decode(response, kind)


def act(
    method: bytes, where: str, value: Any = None, /, *, repeatable: bool = False, **query: Any
) -> Plan[None]:
    """Do something that answers nothing."""
    content = b"" if value is None else json_body(value)
    headers = () if value is None else (JSON_TYPE,)
    target = where + query_text(query)
    check((yield Request(method, target, headers, content, repeatable=repeatable)))


# -- verbs --------------------------------------------------------------------------------------


def new_key() -> str:
    """An idempotency key."""
    return os.urandom(16).hex()


def verb(
    method: bytes,
    path: str,
    value: Any = None,
    *,
    key: str | None = None,
    wait: str | None = None,
) -> Plan[OperationInfo | None]:
    """Do a verb and wait for its end, however long that takes; `wait` "durable" waits for the
    object store, too. None for one that answers nothing.

    Raises the operation's error when it failed."""
    if wait not in (None, DURABLE):
        raise InvalidRequest(f'wait is {wait!r}: give "durable" or nothing', field="wait")
    headers = ((b"idempotency-key", (key or new_key()).encode()), JSON_TYPE)
    content = b"" if value is None else json_body(value)
    seconds = DURABLE_SECONDS if wait else WAIT_SECONDS
    target = f"{path}?wait={wait or f'{WAIT_SECONDS:g}'}"
    response = yield Request(
        method, target, headers, content, ANSWER_SECONDS + seconds, repeatable=True
    )
    if response.status == 204:
        return None
    operation: OperationInfo = decode(response, OperationInfo)
    while operation.state not in {"succeeded", "failed"}:
        where = f"/v1/operations/{segment(operation.id)}?wait={WAIT_SECONDS:g}"
        response = yield Request(
            b"GET", where, timeout=ANSWER_SECONDS + WAIT_SECONDS, repeatable=True
        )
        operation = decode(response, OperationInfo)
    if operation.state == "failed":
        error = from_body(convert(operation.error, ErrorBody, "error"))
        error.details["operation"] = operation.id
        raise error
    return operation


def verb_result(
    kind: Any,
    method: bytes,
    path: str,
    value: Any = None,
    *,
    key: str | None = None,
    wait: str | None = None,
) -> Plan[Any]:
    """Do a verb and give its operation's result as a type."""
    operation = yield from verb(method, path, value, key=key, wait=wait)
    try:
        return msgspec.convert(operation.result if operation else None, kind)
    except msgspec.ValidationError as error:
        raise SojournError(f"the operation's result was not understood: {error}") from error
