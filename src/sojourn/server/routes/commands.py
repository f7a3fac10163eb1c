"""/v1/sessions/{ref}/exec and code: commands whose end is waited for.

Guarantee: with `Accept: application/vnd.sojourn.stream` every byte of output arrives, whatever its
size; as JSON each stream is bounded by `max_output`, and `truncated` says when that cut it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from litestar.types import ASGIApp

from sojourn.errors import (
    CommandNotStarted,
    Interrupted,
    InvalidRequest,
    PathInvalid,
    SandboxLost,
    SessionBusy,
    SessionNotFound,
    TooLarge,
    WrongState,
)
from sojourn.server.answers import StreamAnswer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.wire import stream
from sojourn.wire.api import CodeRequest, ExecRequest, ExecResult
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import Output, ProcessState

MAX_INLINE_STDIN = 1024 * 1024
MAX_OUTPUT = 64 * 1024 * 1024
MAX_TIMEOUT = 366 * 86400.0
MAX_FRAME = 1024 * 1024

COMMAND_ERRORS = (
    InvalidRequest,
    SessionNotFound,
    SessionBusy,
    WrongState,
    CommandNotStarted,
    TooLarge,
    Interrupted,
    SandboxLost,
)


def check_command(request: ExecRequest) -> None:
    """Raises InvalidRequest, PathInvalid or TooLarge, naming the field."""
    argv, argv_bytes, shell = request.argv, request.argv_bytes, request.shell
    if (argv is None) + (argv_bytes is None) + (shell is None) != 2:
        raise InvalidRequest("give one of `argv`, `argv_bytes` and `shell`", field="argv")
    if argv is not None:
        if not argv or not argv[0]:
            raise InvalidRequest("`argv` names no command", field="argv")
        if any("\0" in argument for argument in argv):
            raise InvalidRequest("`argv` holds a NUL character", field="argv")
    elif argv_bytes is not None:
        if not argv_bytes or not argv_bytes[0]:
            raise InvalidRequest("`argv_bytes` names no command", field="argv_bytes")
        if any(b"\0" in argument for argument in argv_bytes):
            raise InvalidRequest("`argv_bytes` holds a NUL byte", field="argv_bytes")
    elif shell is not None and "\0" in shell:
        raise InvalidRequest("`shell` holds a NUL character", field="shell")
    if request.env:
        check_env(request.env)
    if request.cwd is not None and (not request.cwd.startswith("/") or "\0" in request.cwd):
        raise PathInvalid("`cwd` is not an absolute path", field="cwd")
    check_timeout(request.timeout)
    if request.stdin is not None and len(request.stdin) > MAX_INLINE_STDIN:
        raise TooLarge(
            f"`stdin` is over {MAX_INLINE_STDIN} bytes",
            next_step="Spawn with `open_stdin` and stream the input to the process.",
            field="stdin",
            limit=MAX_INLINE_STDIN,
        )
    if not 0 <= request.max_output <= MAX_OUTPUT:
        raise InvalidRequest(f"`max_output` is not between 0 and {MAX_OUTPUT}", field="max_output")


def check_env(env: dict[str, str]) -> None:
    """Raises InvalidRequest for a name or value that no process could be given."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequest(f"`env` holds the impossible variable {name!r}", field="env")


def check_timeout(timeout: float | None) -> None:
    """Raises InvalidRequest for a timeout that is not a positive number of seconds."""
    if timeout is not None and not (math.isfinite(timeout) and 0 < timeout <= MAX_TIMEOUT):
        raise InvalidRequest("`timeout` is not a positive number of seconds", field="timeout")


def ended_frame(state: ProcessState) -> stream.Ended:
    """How a process ended, as a stream tells it."""
    code = state.exit_code
    if code is None and state.signal is not None:
        code = 128 + state.signal
    ended = state.ended_ns
    return stream.Ended(
        state.id,
        code,
        state.signal,
        state.timed_out,
        state.reason,
        0.0 if ended is None else (ended - state.started_ns) / 1e9,
        running=ended is None,
    )


def output_frames(piece: Output) -> bytes:
    """Output as frames of at most MAX_FRAME bytes."""
    if len(piece.data) <= MAX_FRAME:
        return stream.encode_output(piece)
    return b"".join(
        stream.encode_output(
            Output(piece.stream, piece.offset + at, piece.data[at : at + MAX_FRAME])
        )
        for at in range(0, len(piece.data), MAX_FRAME)
    )


@endpoint(
    "POST",
    "/v1/sessions/{ref}/exec",
    "Run a command and wait for its end; resumes the session if needed",
    body=ExecRequest,
    answers={200: ExecResult},
    errors=COMMAND_ERRORS,
    example={"argv": ["python3", "-c", "print(1)"], "timeout": 30},
)
async def run(call: Call, body: ExecRequest) -> ASGIApp:
    check_command(body)
    if call.accepts(stream.MEDIA_TYPE):
        return StreamAnswer(_frames(call, body), call.shutdown)
    with call.shutdown.cancellable():
        result = await call.service.exec(call.who, call.ref, body)
    return json_answer(result)


async def _frames(call: Call, body: ExecRequest) -> AsyncIterator[bytes]:
    started = False
    async for item in call.service.exec_stream(call.who, call.ref, body):
        if isinstance(item, Output):
            yield output_frames(item)
        elif not started:
            started = True
            yield stream.encode_started(stream.Started(item.id, item.pid))
        else:
            yield stream.encode_ended(ended_frame(item))


@endpoint(
    "POST",
    "/v1/sessions/{ref}/code",
    "Run code in the session's persistent Python interpreter",
    body=CodeRequest,
    answers={200: CodeResult},
    errors=COMMAND_ERRORS,
    example={"code": "x = 1\nx + 1"},
)
async def code(call: Call, body: CodeRequest) -> ASGIApp:
    check_timeout(body.timeout)
    if not 0 < len(body.context) <= 64 or not body.context.isprintable():
        raise InvalidRequest("`context` is not 1 to 64 printable characters", field="context")
    with call.shutdown.cancellable():
        result = await call.service.run_code(call.who, call.ref, body)
    return json_answer(result)


ENDPOINTS: list[Endpoint] = [run, code]
