"""Query strings of requests, read as raw bytes and checked against what an endpoint declares.

Guarantee: a path keeps its exact bytes, whatever they are; an unknown, repeated or malformed
parameter is refused by name and never guessed at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from sojourn.errors import InvalidRequest, PathInvalid

_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_TRUE = frozenset({b"true", b"1", b"yes"})
_FALSE = frozenset({b"false", b"0", b"no"})

DURABLE = "durable"
"""The value of a `wait` that waits for the object store, too."""

MAX_PATH = 4096
"""Longest path in bytes, as in Linux."""


class Query(msgspec.Struct, frozen=True):
    """One declared query parameter. `kind` is str, int, float, wait (a float or `durable`), bool,
    octal or path; a `many` parameter may be repeated."""

    kind: str
    about: str
    required: bool = False
    many: bool = False
    default: Any = None
    low: float | None = None
    high: float | None = None


def check_percent(raw: bytes) -> None:
    """Raises InvalidRequest when a percent sign is not followed by two hexadecimal digits."""
    if b"%" in raw and _BAD_PERCENT.search(raw):
        raise InvalidRequest("the address holds a malformed percent-encoding", field="url")


def parse_query(raw: bytes, declared: Mapping[str, Query]) -> dict[str, Any]:
    """The values of a query string by name, defaults included. Raises InvalidRequest."""
    found: dict[str, list[bytes]] = {}
    if raw:
        check_percent(raw)
        for part in raw.split(b"&"):
            if not part:
                continue
            key, _, value = part.partition(b"=")
            name = unquote_to_bytes(key.replace(b"+", b" ")).decode("utf-8", "replace")
            if name not in declared:
                raise InvalidRequest(f"unknown query parameter `{name}`", field=name)
            found.setdefault(name, []).append(unquote_to_bytes(value.replace(b"+", b" ")))
    values: dict[str, Any] = {}
    for name, query in declared.items():
        given = found.get(name)
        if given is None:
            if query.required:
                raise InvalidRequest(f"query parameter `{name}` is missing", field=name)
            values[name] = [] if query.many else query.default
        elif query.many:
            values[name] = [_convert(name, query, value) for value in given]
        elif len(given) > 1:
            raise InvalidRequest(f"query parameter `{name}` is given more than once", field=name)
        else:
            values[name] = _convert(name, query, given[0])
    return values


def _convert(name: str, query: Query, value: bytes) -> Any:
    if query.kind == "path":
        return check_path(value, name)
    if query.kind == "bool":
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise InvalidRequest(f"query parameter `{name}` is not true or false", field=name)
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"query parameter `{name}` is not UTF-8", field=name) from error
    if query.kind == "str" or (query.kind == "wait" and text == DURABLE):
        return text
    try:
        number = _number(query.kind, text)
    except ValueError as error:
        wanted = f"a number of seconds or `{DURABLE}`" if query.kind == "wait" else "a number"
        raise InvalidRequest(f"query parameter `{name}` is not {wanted}", field=name) from error
    if (query.low is not None and number < query.low) or (
        query.high is not None and number > query.high
    ):
        raise InvalidRequest(
            f"query parameter `{name}` is out of range ({query.low} to {query.high}"
            + (f", or `{DURABLE}`)" if query.kind == "wait" else ")"),
            field=name,
        )
    return number


def _number(kind: str, text: str) -> float | int:
    if len(text) > 32 or not text.isascii() or "_" in text:
        raise ValueError(text)
    if kind == "octal":
        return int(text, 8)
    if kind == "int":
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def check_path(path: bytes, field: str = "path") -> bytes:
    """A path inside a session: absolute, without NUL, not too long. Raises PathInvalid."""
    if not path:
        raise PathInvalid("the path is empty", field=field)
    if b"\0" in path:
        raise PathInvalid("the path holds a NUL byte", field=field)
    if not path.startswith(b"/"):
        raise PathInvalid(
            f"the path {path.decode('utf-8', 'replace')!r} is not absolute", field=field
        )
    if len(path) > MAX_PATH:
        raise PathInvalid(f"the path is longer than {MAX_PATH} bytes", field=field)
    return path
