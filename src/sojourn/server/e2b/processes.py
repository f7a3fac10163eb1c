"""The agent's process service: commands and terminals.

Guarantee: every byte a command writes reaches whoever is attached, or the loss is said; a stream
ends with the command's end or with an error that says what became of the sandbox. A command goes
on when its client leaves, and is never held up by output that nobody reads.
"""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar.types import ASGIApp

from sojourn.errors import (
    Conflict,
    InvalidRequest,
    ProcessNotFound,
    SojournError,
)
from sojourn.server.answers import StreamAnswer
from sojourn.server.checks import check_spawn
from sojourn.server.e2b import connect, ids, users
from sojourn.server.e2b.calls import Call
from sojourn.server.e2b.drains import TAG, Drains
from sojourn.server.e2b.rooms import Rooms
from sojourn.wire.api import SpawnRequest
from sojourn.wire.guest import Output, ProcessState

MAX_OUTPUT_FRAME = 256 * 1024
KEEP = 8 * 1024 * 1024
INTERPRETER = "interpreter:"
_KEEPALIVE = connect.envelope({"event": {"keepalive": {}}})
_SIGNALS = {
    "SIGNAL_SIGTERM": signals.SIGTERM,
    "SIGNAL_SIGKILL": signals.SIGKILL,
    15: signals.SIGTERM,
    9: signals.SIGKILL,
}


class Config(msgspec.Struct):
    """What to run."""

    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(msgspec.Struct):
    """Of a terminal."""

    cols: int = 80
    rows: int = 24


class Pty(msgspec.Struct):
    """A terminal."""

    size: Size | None = None


class Selector(msgspec.Struct):
    """Which process."""

    pid: int | None = None
    tag: str | None = None

    def fits(self, state: ProcessState) -> bool:
        """Whether a process is meant."""
        if self.pid is not None:
            return state.pid == self.pid
        return bool(self.tag) and state.tag == f"{TAG}{self.tag}"


class Start(msgspec.Struct):
    """Start a command, with a terminal where `pty` is given."""

    process: Config = msgspec.field(default_factory=Config)
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool | None = None


class Attach(msgspec.Struct):
    """Follow a process from now on."""

    process: Selector = msgspec.field(default_factory=Selector)


class Update(msgspec.Struct):
    """Resize a terminal."""

    process: Selector = msgspec.field(default_factory=Selector)
    pty: Pty | None = None


class Input(msgspec.Struct):
    """Bytes for a process."""

    stdin: bytes | None = None
    pty: bytes | None = None


class SendInput(msgspec.Struct):
    """Bytes for a process, in a request of their own."""

    process: Selector = msgspec.field(default_factory=Selector)
    input: Input = msgspec.field(default_factory=Input)


class InputStart(msgspec.Struct):
    """Where a stream of input goes."""

    process: Selector = msgspec.field(default_factory=Selector)


class InputData(msgspec.Struct):
    """A piece of it."""

    input: Input = msgspec.field(default_factory=Input)


class StreamInput(msgspec.Struct):
    """A message of a stream of input; one without either is a sign of life."""

    start: InputStart | None = None
    data: InputData | None = None


class SendSignal(msgspec.Struct):
    """A signal, by name or number as protobuf's JSON has it."""

    process: Selector = msgspec.field(default_factory=Selector)
    signal: str | int = 0


def outputs(piece: Output, *, pty: bool) -> bytes:
    """Output as messages of a stream."""
    stream = "pty" if pty else "stdout" if piece.stream == 1 else "stderr"
    data = piece.data
    return b"".join(
        connect.envelope({"event": {"data": {stream: data[at : at + MAX_OUTPUT_FRAME]}}})
        for at in range(0, len(data), MAX_OUTPUT_FRAME)
    )


def ended(state: ProcessState) -> bytes:
    """How a process ended, in the words of E2B's agent; -1 stands for an end by a signal."""
    event: dict[str, Any]
    if state.signal is None:
        code = state.exit_code or 0
        event = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        if code:
            event["error"] = f"exit status {code}"
    else:
        name = signals.strsignal(state.signal) or str(state.signal)
        status = f"signal: {name.lower()}"
        if state.reason is not None:
            status += f" ({state.reason})"
        event = {"exitCode": -1, "exited": False, "status": status, "error": status}
    return connect.envelope({"event": {"end": event}})


def shown(state: ProcessState) -> dict[str, Any]:
    """A process in the list."""
    words = [word.decode("utf-8", "replace") for word in state.argv]
    return {"config": {"cmd": words[0] if words else "", "args": words[1:]}, "pid": state.pid}


class Processes:
    """The methods of process.Process."""

    def __init__(self, rooms: Rooms, drains: Drains) -> None:
        self._rooms = rooms
        self._drains = drains

    # -- streams ----------------------------------------------------------------------------

    async def start(self, call: Call) -> ASGIApp:
        """Start: a command and what becomes of it."""
        asked = await connect.one_message(call.chunks(), Start)
        timeout = connect.timeout_seconds(call.header(b"connect-timeout-ms"))
        return self._stream(call, self._started(call, asked, timeout))

    async def connect(self, call: Call) -> ASGIApp:
        """Connect: what becomes of a command from now on."""
        asked = await connect.one_message(call.chunks(), Attach)
        return self._stream(call, self._attached(call, asked))

    def _stream(self, call: Call, pieces: AsyncIterator[bytes]) -> ASGIApp:
        return StreamAnswer(
            self._closing(call, pieces),
            call.shutdown,
            media_type=connect.STREAM.encode(),
            heartbeat=_KEEPALIVE,
            encode_error=call.ended_with,
        )

    async def _closing(self, call: Call, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces with the end of the stream; of a failure too, which has status 200 here."""
        try:
            async for piece in pieces:
                yield piece
        except SojournError as error:
            yield call.ended_with(error)
        else:
            yield connect.end()
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    async def _started(
        self, call: Call, asked: Start, timeout: float | None
    ) -> AsyncIterator[bytes]:
        shared = await self._rooms.enter(call)
        request = await self._request(call, shared, asked, timeout)
        tag = TAG + (asked.tag or "")
        state = await call.service.spawn(call.who, call.session, request, tag=tag)
        async for piece in self._followed(call, state, (0, 0)):
            yield piece

    async def _request(
        self, call: Call, shared: dict[str, str], asked: Start, timeout: float | None
    ) -> SpawnRequest:
        user = users.user_of(call.header(b"authorization"))
        process = asked.process
        cwd = process.cwd
        if cwd is not None and not cwd.startswith("/"):
            async with call.service.files(
                call.who, call.session, "files.stat /etc/passwd", mutates=False
            ) as guest:
                account = (await self._rooms.accounts(guest, call)).find(user)
            cwd = users.place(cwd, account).decode("utf-8", "surrogateescape")
        env = {
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": ids.sandbox_id(call.session),
            **shared,
            **process.envs,
        }
        size = None
        if asked.pty is not None:
            given = asked.pty.size or Size()
            size = (given.rows, given.cols)
        request = SpawnRequest(
            argv=[process.cmd, *process.args],
            env=env,
            cwd=cwd,
            user=user,
            # The client's deadline is the command's: nothing is left running behind it.
            timeout=timeout,
            open_stdin=asked.stdin is not False and asked.pty is None,
            pty=size,
            keep=KEEP,
            lossless=True,
        )
        check_spawn(request)
        return request

    async def _attached(self, call: Call, asked: Attach) -> AsyncIterator[bytes]:
        await self._rooms.enter(call)
        state = await self._select(call, asked.process, running=False)
        async for piece in self._followed(call, state, (state.out[1], state.err[1])):
            yield piece

    async def _followed(
        self, call: Call, state: ProcessState, offsets: tuple[int, int]
    ) -> AsyncIterator[bytes]:
        yield connect.envelope({"event": {"start": {"pid": state.pid}}})
        reached = list(offsets)
        complete = False
        self._drains.attended(call.session, state.id)
        try:
            if state.running or offsets != (state.out[1], state.err[1]):
                async for piece in call.service.output(call.who, call.session, state.id, offsets):
                    reached[piece.stream - 1] = piece.offset + len(piece.data)
                    yield outputs(piece, pty=state.pty)
            while state.running:
                state = await call.service.wait_process(call.who, call.session, state.id, 600.0)
            complete = True
        finally:
            self._drains.left(
                call.who, call.session, state.id, (reached[0], reached[1]), ended=complete
            )
        if state.timed_out:
            raise InvalidRequest(
                "the command did not end in time and was killed",
                next_step="",
                rpc="deadline_exceeded",
            )
        yield ended(state)

    # -- single calls -----------------------------------------------------------------------

    async def list(self, call: Call) -> Any:
        """List: what runs, commands of other clients and of before a pause included."""
        await self._rooms.enter(call)
        states = await call.service.processes(call.who, call.session)
        return {
            "processes": [
                shown(state)
                for state in states
                if state.running and not state.tag.startswith(INTERPRETER)
            ]
        }

    async def update(self, call: Call) -> Any:
        """Update: resize a terminal."""
        asked = connect.decode(await call.body(), Update)
        await self._rooms.enter(call)
        state = await self._select(call, asked.process)
        if asked.pty is not None and asked.pty.size is not None:
            size = asked.pty.size
            await call.service.resize(call.who, call.session, state.id, size.rows, size.cols)
        return {}

    async def send_input(self, call: Call) -> Any:
        """SendInput: bytes for a process."""
        asked = connect.decode(await call.body(), SendInput)
        await self._rooms.enter(call)
        state = await self._select(call, asked.process)
        await self._write(call, state, asked.input)
        return {}

    async def _write(self, call: Call, state: ProcessState, given: Input) -> None:
        data = given.pty if state.pty else given.stdin
        if data is None:
            other = "terminal" if state.pty else "standard input"
            raise Conflict(f"process {state.pid} takes input by its {other}", next_step="")
        await call.service.write_stdin(call.who, call.session, state.id, data)

    async def stream_input(self, call: Call) -> Any:
        """StreamInput: bytes for a process, as they come."""
        state: ProcessState | None = None
        await self._rooms.enter(call)
        async for message in connect.messages(call.chunks(), StreamInput):
            if message.start is not None:
                state = await self._select(call, message.start.process)
            elif message.data is not None:
                if state is None:
                    raise InvalidRequest("input came before the process it is for")
                await self._write(call, state, message.data.input)
        return {}

    async def close_stdin(self, call: Call) -> Any:
        """CloseStdin: the end of input."""
        asked = connect.decode(await call.body(), Attach)
        await self._rooms.enter(call)
        state = await self._select(call, asked.process)
        await call.service.close_stdin(call.who, call.session, state.id)
        return {}

    async def send_signal(self, call: Call) -> Any:
        """SendSignal: to the process and all of its group."""
        asked = connect.decode(await call.body(), SendSignal)
        number = _SIGNALS.get(asked.signal)
        if number is None:
            raise InvalidRequest(f"there is no signal {asked.signal!r}", field="signal")
        await self._rooms.enter(call)
        state = await self._select(call, asked.process)
        await call.service.signal(call.who, call.session, state.id, number, True)
        return {}

    async def _select(self, call: Call, wanted: Selector, *, running: bool = True) -> ProcessState:
        """The process with a pid or a tag: a running one, else (where that will do) the last that
        had it. Raises ProcessNotFound."""
        found = None
        for state in await call.service.processes(call.who, call.session):
            if state.tag.startswith(INTERPRETER) or not wanted.fits(state):
                continue
            if state.running:
                return state
            if not running and (found is None or found.id < state.id):
                found = state
        if found is None:
            what = f"pid {wanted.pid}" if wanted.pid is not None else f"tag {wanted.tag!r}"
            raise ProcessNotFound(f"there is no process with {what}", next_step="")
        return found
