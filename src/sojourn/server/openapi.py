"""The OpenAPI document, made from the declarations that also drive routing and checking.

Guarantee: every endpoint is in it, with its parameters, body, answers, errors and an example, and
nothing that is not served.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from sojourn.errors import ErrorBody, InvalidRequest, SojournError, Unauthenticated
from sojourn.server.answers import Answer
from sojourn.server.endpoints import MAX_KEY, Endpoint
from sojourn.server.queries import Query
from sojourn.wire import stream

OPENAPI_PATH = "/v1/openapi.json"

_KINDS: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "wait": {"oneOf": [{"type": "number"}, {"type": "string", "enum": ["durable"]}]},
    "bool": {"type": "boolean"},
    "octal": {"type": "string", "pattern": "^[0-7]{1,4}$"},
    "path": {"type": "string", "minLength": 1, "pattern": "^/"},
}


def _is_schema(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


def _parameter(name: str, query: Query) -> dict[str, Any]:
    schema = dict(_KINDS[query.kind])
    if query.kind != "octal":
        if query.low is not None:
            schema["minimum"] = query.low
        if query.high is not None:
            schema["maximum"] = query.high
    if query.default is not None:
        schema["default"] = f"{query.default:o}" if query.kind == "octal" else query.default
    if query.many:
        schema = {"type": "array", "items": schema}
    return {
        "name": name,
        "in": "query",
        "required": query.required,
        "description": query.about,
        "schema": schema,
    }


_ABOUT = {
    "ref": "Id or name of the session.",
    "port": "The number of the port inside the session.",
    "template": "The template's name, or NAME@VERSION.",
    "secret": "The secret's name.",
}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _ABOUT.get(name, f"The {name}'s id."),
            "schema": {"type": "integer" if name in ("process", "port") else "string"},
        }
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _error_answers(errors: Iterable[type[SojournError]]) -> dict[str, Any]:
    by_status: dict[int, list[type[SojournError]]] = {}
    for kind in errors:
        by_status.setdefault(kind.status, []).append(kind)
    return {
        str(status): {
            "description": "; ".join(
                f"`{kind.code}`: {(kind.__doc__ or '').splitlines()[0]}" for kind in kinds
            ),
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/ErrorBody"},
                    "example": msgspec.to_builtins(
                        ErrorBody(kinds[0].code, "what happened", kinds[0].default_next_step)
                    ),
                }
            },
        }
        for status, kinds in sorted(by_status.items())
    }


def _content(value: Any, schemas: dict[int, dict[str, Any]]) -> dict[str, Any]:
    if isinstance(value, str):
        return {value: {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": schemas[id(value)]}}


def _operation(declared: Endpoint, schemas: dict[int, dict[str, Any]]) -> dict[str, Any]:
    parameters = _path_parameters(declared.path)
    parameters += [_parameter(name, query) for name, query in declared.query.items()]
    if declared.key:
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key and request is done once, and answered alike.",
                "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
            }
        )
    for name, about in declared.headers.items():
        parameters.append(
            {
                "name": name,
                "in": "header",
                "required": False,
                "description": about,
                "schema": {"type": "string"},
            }
        )
    answers: dict[str, Any] = {}
    for status, value in declared.answers.items():
        answer: dict[str, Any] = {"description": "Still under way" if status == 202 else "Done"}
        if value is not None:
            answer["content"] = _content(value, schemas)
        answers[str(status)] = answer
    if declared.path.endswith("/exec"):
        answers["200"]["content"] |= _content(stream.MEDIA_TYPE, schemas)
    if declared.path.endswith("/events"):
        answers["200"]["content"] |= _content("text/event-stream", schemas)
    errors: list[type[SojournError]] = []
    if not declared.public:
        errors.append(Unauthenticated)
    if (declared.query or declared.body is not None) and InvalidRequest not in declared.errors:
        errors.append(InvalidRequest)
    answers |= _error_answers([*errors, *declared.errors])
    found: dict[str, Any] = {
        "summary": declared.summary,
        "operationId": _operation_id(declared),
        "tags": [_tag(declared)],
        "parameters": parameters,
        "responses": answers,
    }
    if declared.public:
        found["security"] = []
    if declared.body is not None:
        content = _content(declared.body, schemas)
        if declared.example is not None:
            content["application/json"]["example"] = declared.example
        found["requestBody"] = {"required": isinstance(declared.body, str), "content": content}
    return found


def _operation_id(declared: Endpoint) -> str:
    handler = declared.handler
    return f"{handler.__module__.rpartition('.')[2]}_{handler.__name__}"


def _tag(declared: Endpoint) -> str:
    return str(declared.handler.__module__.rpartition(".")[2])


def make_document(declared: list[Endpoint]) -> dict[str, Any]:
    """The document, as OpenAPI 3.1."""
    types: dict[int, Any] = {id(ErrorBody): ErrorBody}
    for one in declared:
        for value in (one.body, *one.answers.values()):
            if _is_schema(value):
                types[id(value)] = value
    schemas, components = msgspec.json.schema_components(
        types.values(), ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in declared:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sojourn",
            "version": version("sojourn"),
            "description": "Durable sessions for AI agents over short-lived sandboxes.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def openapi_handler(declared: list[Endpoint]) -> HTTPRouteHandler:
    """Serves the document, to anyone."""
    body = b""

    async def handle(request: Request[Any, Any, Any]) -> ASGIApp:
        nonlocal body
        if not body:
            body = msgspec.json.encode(make_document(declared))
        return Answer(200, body, [(b"content-type", b"application/json")])

    return HTTPRouteHandler(OPENAPI_PATH, http_method="GET", include_in_schema=False)(handle)
