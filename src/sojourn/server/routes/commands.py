"""/v1/sessions/{ref}/exec and code: commands whose end is waited for.

Guarantee: with `Accept: application/vnd.sojourn.stream` every byte of output arrives, whatever its
size; as JSON each stream is bounded by `max_output`, and `truncated` says when that cut it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from litestar.types import ASGIApp

from sojourn.errors import (
    CommandNotStarted,
    Interrupted,
    InvalidRequest,
    SandboxLost,
    SessionBusy,
    SessionNotFound,
    TooLarge,
    WrongState,
)
from sojourn.server.answers import StreamAnswer, json_answer
from sojourn.server.checks import check_code, check_command
from sojourn.server.commands import exit_code
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.wire import stream
from sojourn.wire.api import CodeRequest, ExecRequest, ExecResult
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import Output, ProcessState

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


def ended_frame(state: ProcessState) -> stream.Ended:
    """How a process ended, as a stream tells it."""
    ended = state.ended_ns
    return stream.Ended(
        state.id,
        None if ended is None else exit_code(state),
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
    check_code(body)
    with call.shutdown.cancellable():
        result = await call.service.run_code(call.who, call.ref, body)
    return json_answer(result)


ENDPOINTS: list[Endpoint] = [run, code]
