"""What running code in a session's persistent interpreter gives."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_PROGRAM = "Runs inside the sandbox as `python3 -c"  # how `sojourn.node.interpreter_driver` begins


class CodeError(msgspec.Struct, frozen=True):
    """An exception that the code raised."""

    name: str
    value: str
    traceback: str


class CodeResult(msgspec.Struct, frozen=True):
    """`text` is the repr of the last expression, None without one. `results` holds its rich forms
    by media type. `restarted` says that the interpreter is a fresh one."""

    text: str | None
    stdout: str
    stderr: str
    error: CodeError | None
    images: list[bytes] = []
    results: list[dict[str, str]] = []
    execution_count: int = 0
    restarted: bool = False
    truncated: bool = False


def is_interpreter(argv: Iterable[str]) -> bool:
    """Whether a process with these arguments is an interpreter that code is run in."""
    return any(_PROGRAM in word[:200] for word in argv)
