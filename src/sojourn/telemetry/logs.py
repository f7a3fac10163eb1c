"""Logs that say what they are about: which tenant, session, placement and operation.

Guarantee: a line written while something is done for a session names it, in whatever module the
line is from; each line of the JSON form is one object, whatever a message or an exception holds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TextIO

VARIABLE = "SOJOURN_LOG_FORMAT"
TEXT, JSON = "text", "json"
FORMATS = (TEXT, JSON)
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_NOTHING: Mapping[str, Any] = {}
_about: ContextVar[Mapping[str, Any]] = ContextVar("about", default=_NOTHING)


def note(**facts: Any) -> None:
    """What is done from now on in this task, and in those it begins, is about this: `tenant`,
    `session`, `epoch`, `operation`."""
    _about.set({**_about.get(), **facts})


@contextlib.contextmanager
def about(**facts: Any) -> Iterator[None]:
    """`note`, for as long as this lasts."""
    token = _about.set({**_about.get(), **facts})
    try:
        yield
    finally:
        _about.reset(token)


def noted() -> Mapping[str, Any]:
    """What is being done is about this."""
    return _about.get()


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, what it is about, and an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # In ASCII, with escapes: a name inside a session need not be Unicode. Whatever is no text
        # of its own is told as it shows itself.
        return json.dumps(line, default=repr)


class TextFormatter(logging.Formatter):
    """For people: the same with what it is about at the end."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        facts = _about.get()
        if not facts:
            return text
        first, newline, rest = text.partition("\n")
        told = " ".join(f"{name}={value}" for name, value in facts.items())
        return f"{first} [{told}]{newline}{rest}"


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def set_up_helper(level: str = "info") -> None:
    """`set_up` of a process that a server has begun: in the server's form."""
    set_up(level, os.environ.get(VARIABLE, TEXT))


def set_up(level: str, form: str, stream: TextIO | None = None) -> None:
    """Write what is logged to standard error, in this form; so do processes that are begun by this
    one."""
    os.environ[VARIABLE] = form
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == JSON else TextFormatter(TEXT_FORMAT))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
