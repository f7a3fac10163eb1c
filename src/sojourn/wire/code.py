"""What running code in a session's persistent interpreter gives."""

from __future__ import annotations

import msgspec


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
