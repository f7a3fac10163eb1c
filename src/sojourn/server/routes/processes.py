"""/v1/sessions/{ref}/processes: commands that go on by themselves, and reattaching to any command.

Guarantee: output can be read again from any offset still kept, as often as wanted; input of any
size is taken as fast as the process reads it.
"""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator

from litestar.types import ASGIApp

from sojourn.errors import InvalidRequest, OutputTruncated, ProcessNotFound, SessionNotFound
from sojourn.server.answers import StreamAnswer, empty_answer, json_answer
from sojourn.server.checks import check_spawn, check_terminal
from sojourn.server.commands import exit_code
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.server.routes.commands import (
    COMMAND_ERRORS,
    ended_frame,
    output_frames,
)
from sojourn.wire import stream
from sojourn.wire.api import ProcessInfo, ResizeRequest, SignalRequest, SpawnRequest
from sojourn.wire.guest import ProcessState

STDIN_PIECE = 256 * 1024

_ERRORS = (SessionNotFound, ProcessNotFound)


def process_info(state: ProcessState) -> ProcessInfo:
    """A process as the API shows it."""
    return ProcessInfo(
        id=state.id,
        pid=state.pid,
        argv=[argument.decode("utf-8", "replace") for argument in state.argv],
        pty=state.pty,
        running=state.running,
        started_at=state.started_ns / 1e9,
        ended_at=None if state.ended_ns is None else state.ended_ns / 1e9,
        exit_code=None if state.running else exit_code(state),
        signal=state.signal,
        timed_out=state.timed_out,
        reason=state.reason,
        stdout=state.out,
        stderr=state.err,
    )


@endpoint(
    "POST",
    "/v1/sessions/{ref}/processes",
    "Start a command that goes on by itself; resumes the session if needed",
    body=SpawnRequest,
    answers={201: ProcessInfo},
    errors=COMMAND_ERRORS,
    example={"shell": "python3 -m http.server 8000", "cwd": "/srv"},
)
async def spawn(call: Call, body: SpawnRequest) -> ASGIApp:
    check_spawn(body)
    return json_answer(process_info(await call.service.spawn(call.who, call.ref, body)), 201)


@endpoint(
    "GET",
    "/v1/sessions/{ref}/processes",
    "List a session's processes, ended ones as long as they are kept",
    answers={200: list[ProcessInfo]},
    errors=(SessionNotFound,),
)
async def list_processes(call: Call) -> ASGIApp:
    states = await call.service.processes(call.who, call.ref)
    return json_answer([process_info(state) for state in states])


@endpoint(
    "GET",
    "/v1/sessions/{ref}/processes/{process}",
    "Get a process",
    answers={200: ProcessInfo},
    errors=_ERRORS,
)
async def get(call: Call) -> ASGIApp:
    state = await call.service.process(call.who, call.ref, call.process)
    return json_answer(process_info(state))


@endpoint(
    "GET",
    "/v1/sessions/{ref}/processes/{process}/wait",
    "Wait for a process's end; answers it running when that did not come in time",
    answers={200: ProcessInfo},
    query={"timeout": Query("float", "Seconds to wait.", default=120.0, low=0, high=600)},
    errors=_ERRORS,
)
async def wait(call: Call) -> ASGIApp:
    with call.shutdown.cancellable():
        state = await call.service.wait_process(
            call.who, call.ref, call.process, call.query["timeout"]
        )
    return json_answer(process_info(state))


@endpoint(
    "GET",
    "/v1/sessions/{ref}/processes/{process}/output",
    "Read a process's output from the given offsets on, as a frame stream",
    answers={200: stream.MEDIA_TYPE},
    query={
        "stdout": Query("int", "Offset in stdout (or the terminal).", default=0, low=0, high=2**62),
        "stderr": Query("int", "Offset in stderr.", default=0, low=0, high=2**62),
        "follow": Query("bool", "Go on to the process's end.", default=True),
    },
    errors=(*_ERRORS, OutputTruncated),
)
async def output(call: Call) -> ASGIApp:
    state = await call.service.process(call.who, call.ref, call.process)
    return StreamAnswer(_output(call, state), call.shutdown)


async def _output(call: Call, state: ProcessState) -> AsyncIterator[bytes]:
    yield stream.encode_started(stream.Started(state.id, state.pid))
    offsets: tuple[int, int] = (call.query["stdout"], call.query["stderr"])
    ends = None if call.query["follow"] else (state.out[1], state.err[1])
    if ends is None or offsets[0] < ends[0] or offsets[1] < ends[1]:
        reached = list(offsets)
        async for piece in call.service.output(call.who, call.ref, call.process, offsets):
            yield output_frames(piece)
            reached[piece.stream - 1] = piece.offset + len(piece.data)
            if ends is not None and reached[0] >= ends[0] and reached[1] >= ends[1]:
                break
    state = await call.service.process(call.who, call.ref, call.process)
    if ends is None and state.running:
        # Its streams are at their end (it closed them), it is not: the end is still to come.
        while state.running:
            state = await call.service.wait_process(call.who, call.ref, call.process, 600.0)
    yield stream.encode_ended(ended_frame(state))


@endpoint(
    "POST",
    "/v1/sessions/{ref}/processes/{process}/stdin",
    "Write the body, of any size, to a process's standard input",
    body="application/octet-stream",
    answers={204: None},
    query={"eof": Query("bool", "Close standard input after it.", default=False)},
    errors=_ERRORS,
)
async def write_stdin(call: Call) -> ASGIApp:
    await call.service.process(call.who, call.ref, call.process)  # an empty body asks, too
    with call.shutdown.cancellable():
        async for chunk in call.chunks():
            for at in range(0, len(chunk), STDIN_PIECE):
                await call.service.write_stdin(
                    call.who, call.ref, call.process, chunk[at : at + STDIN_PIECE]
                )
        if call.query["eof"]:
            await call.service.close_stdin(call.who, call.ref, call.process)
    return empty_answer()


@endpoint(
    "POST",
    "/v1/sessions/{ref}/processes/{process}/stdin/close",
    "Close a process's standard input",
    answers={204: None},
    errors=_ERRORS,
)
async def close_stdin(call: Call) -> ASGIApp:
    await call.service.close_stdin(call.who, call.ref, call.process)
    return empty_answer()


@endpoint(
    "POST",
    "/v1/sessions/{ref}/processes/{process}/signal",
    "Send a signal to a process or its whole group",
    body=SignalRequest,
    answers={204: None},
    errors=(*_ERRORS, InvalidRequest),
    example={"signal": "TERM", "group": True},
)
async def signal(call: Call, body: SignalRequest) -> ASGIApp:
    number = signal_number(body.signal)
    await call.service.signal(call.who, call.ref, call.process, number, body.group)
    return empty_answer()


def signal_number(given: int | str) -> int:
    """A signal by number or name (TERM, SIGTERM). Raises InvalidRequest."""
    if isinstance(given, int):
        if not 1 <= given <= 64:
            raise InvalidRequest(f"there is no signal {given}", field="signal")
        return given
    name = given.upper().removeprefix("SIG")
    try:
        return int(signals.Signals[f"SIG{name}"])
    except KeyError as error:
        raise InvalidRequest(f"there is no signal {given!r}", field="signal") from error


@endpoint(
    "POST",
    "/v1/sessions/{ref}/processes/{process}/resize",
    "Resize a process's terminal",
    body=ResizeRequest,
    answers={204: None},
    errors=(*_ERRORS, InvalidRequest),
    example={"rows": 40, "columns": 120},
)
async def resize(call: Call, body: ResizeRequest) -> ASGIApp:
    check_terminal(body.rows, body.columns, field="rows")
    await call.service.resize(call.who, call.ref, call.process, body.rows, body.columns)
    return empty_answer()


ENDPOINTS: list[Endpoint] = [
    spawn,
    list_processes,
    get,
    wait,
    output,
    write_stdin,
    close_stdin,
    signal,
    resize,
]
