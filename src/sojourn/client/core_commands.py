"""Commands and their streams, without input or output.

Guarantee: a command is sent once and never repeated; once it is known to have started, a lost
connection is taken up again at the exact offsets reached, so that no byte is missing or doubled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from sojourn.client.core import (
    ANSWER_SECONDS,
    JSON_TYPE,
    OCTETS_TYPE,
    Content,
    Plan,
    Request,
    act,
    check,
    decode,
    get,
    json_body,
    query_text,
    session_path,
)
from sojourn.errors import Interrupted, InvalidRequest, SessionElsewhere, SojournError
from sojourn.wire import stream
from sojourn.wire.api import (
    ExecRequest,
    ProcessInfo,
    ResizeRequest,
    SignalRequest,
    SpawnRequest,
)
from sojourn.wire.guest import Output

T = TypeVar("T")

Command = str | Sequence[str | bytes]
"""Text for the session's shell, or arguments."""

INLINE_STDIN = 1024 * 1024
"""Longer input is streamed to a spawned process."""

STREAM_SECONDS = 60.0
"""The server shows a sign of life every 15 s; after this much silence the connection is lost."""

MAX_REATTACH = 20

_ACCEPT = (b"accept", stream.MEDIA_TYPE.encode())
_EXEC_HEADERS = (JSON_TYPE, _ACCEPT)
_encoder = msgspec.json.Encoder()


class ExecResult(msgspec.Struct, frozen=True):
    """How a command ended, and all it wrote.

    `exit_code` is that of the command, or 128 + `signal`. `timed_out` says that its timeout killed
    it, `reason` why the sandbox did. `duration` is in seconds. `process` names it in the session.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    signal: int | None
    timed_out: bool
    reason: str | None
    duration: float
    process: int

    @property
    def ok(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Standard error as text."""
        return self.stderr.decode("utf-8", "replace")


def command_fields(command: Command) -> dict[str, Any]:
    """A command as the fields of a request. Raises InvalidRequest."""
    if isinstance(command, str):
        return {"shell": command}
    if isinstance(command, bytes) or not isinstance(command, Sequence):
        raise InvalidRequest("a command is text or a list of arguments", field="argv")
    arguments = list(command)
    if all(isinstance(argument, str) and _is_utf8(argument) for argument in arguments):
        return {"argv": arguments}
    try:
        return {"argv_bytes": [os.fsencode(argument) for argument in arguments]}
    except TypeError as error:
        raise InvalidRequest("an argument is neither text nor bytes", field="argv") from error


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Source(Protocol[T]):
    """A stream of items over one or, after a lost connection, several requests."""

    def request(self) -> Request:
        """What to send now."""

    def feed(self, data: bytes) -> list[T]:
        """The items that received bytes complete. Raises the stream's own error."""

    def ended(self) -> bool:
        """The answer came to its end: whether the stream has, too."""

    def take_up(self) -> bool:
        """The connection was lost: whether `request` now gives one that goes on from here."""


class FrameSource:
    """Output of one process as a stream of frames: by exec, and after that by its id."""

    def __init__(
        self,
        ref: str,
        *,
        body: bytes | None = None,
        process: int | None = None,
        offsets: tuple[int, int] = (0, 0),
        follow: bool = True,
        on_start: Callable[[int], object] | None = None,
    ) -> None:
        self._ref = ref
        self._body = body
        self.process = process
        self.offsets = list(offsets)
        self._follow = follow
        self._on_start = on_start
        self._decoder = stream.FrameDecoder()
        self._done = False
        self._reattached = 0
        self._not_begun = False

    def request(self) -> Request:
        """Exec first, the process's output from the offsets reached afterwards."""
        self._decoder = stream.FrameDecoder()
        self._not_begun = False
        if self.process is None:
            target = f"{session_path(self._ref)}/exec"
            return Request(b"POST", target, _EXEC_HEADERS, self._body or b"", STREAM_SECONDS)
        target = process_path(self._ref, self.process) + "/output"
        target += query_text(
            {"stdout": self.offsets[0], "stderr": self.offsets[1], "follow": self._follow}
        )
        return Request(b"GET", target, (_ACCEPT,), timeout=STREAM_SECONDS, repeatable=True)

    def feed(self, data: bytes) -> list[Output | stream.Ended]:
        """Output and at last the end. Raises the error the server told."""
        items: list[Output | stream.Ended] = []
        for frame in self._decoder.feed(data):
            if isinstance(frame, Output):
                self.offsets[frame.stream - 1] = frame.offset + len(frame.data)
                items.append(frame)
            elif isinstance(frame, stream.Started):
                if self.process is None and self._on_start is not None:
                    self._on_start(frame.process)
                self.process = frame.process
            elif isinstance(frame, stream.Ended):
                self._done = True
                items.append(frame)
            elif isinstance(frame, SessionElsewhere):
                self._not_begun = True  # it moved while this waited for it: ask again
                break
            elif frame.details.get("moved") and self.process is not None:
                break  # the session goes on elsewhere, and so does this stream
            else:
                if self.process is not None:
                    frame.details.setdefault("process", self.process)
                raise frame
        if items:
            self._reattached = 0
        return items

    def ended(self) -> bool:
        """An answer without an end frame was cut off."""
        return self._done

    def take_up(self) -> bool:
        """A started process is found again by its id; what was not begun can begin anew."""
        self._reattached += 1
        known = self.process is not None or self._not_begun
        return known and self._reattached <= MAX_REATTACH


class Collector:
    """Gathers a command's output into a result, telling callbacks on the way."""

    def __init__(
        self,
        on_stdout: Callable[[bytes], object] | None,
        on_stderr: Callable[[bytes], object] | None,
    ) -> None:
        self._parts: tuple[list[bytes], list[bytes]] = ([], [])
        self._callbacks = (on_stdout, on_stderr)
        self._end: stream.Ended | None = None

    def take(self, item: Output | stream.Ended) -> None:
        """One item of a FrameSource."""
        if isinstance(item, stream.Ended):
            self._end = item
            return
        self._parts[item.stream - 1].append(item.data)
        callback = self._callbacks[item.stream - 1]
        if callback is not None:
            callback(item.data)

    def result(self) -> ExecResult:
        """What came of it."""
        end = self._end
        if end is None or end.exit_code is None:
            raise Interrupted("the stream ended before the command did")
        return ExecResult(
            exit_code=end.exit_code,
            stdout=b"".join(self._parts[0]),
            stderr=b"".join(self._parts[1]),
            signal=end.signal,
            timed_out=end.timed_out,
            reason=end.reason,
            duration=end.duration,
            process=end.process,
        )


def exec_source(
    ref: str,
    command: Command,
    *,
    timeout: float | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: bytes | None,
    on_start: Callable[[int], object] | None,
) -> FrameSource:
    """Run a command with input that fits into the request. Raises InvalidRequest."""
    if timeout is not None and not math.isfinite(timeout):
        raise InvalidRequest(f"`timeout` is {timeout}, which is no number of seconds")
    body = ExecRequest(
        **command_fields(command),
        env=dict(env) if env else {},
        cwd=cwd,
        user=user,
        timeout=timeout,
        stdin=stdin,
    )
    return FrameSource(ref, body=_encoder.encode(body), on_start=on_start)


# -- processes ----------------------------------------------------------------------------------


def process_path(ref: str, process: int) -> str:
    """The path of a process."""
    return f"{session_path(ref)}/processes/{process}"


def spawn(
    ref: str,
    command: Command,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    user: str | None = None,
    stdin: bytes | None = None,
    open_stdin: bool = False,
    pty: tuple[int, int] | None = None,
    keep: int = 8 * 1024 * 1024,
    lossless: bool = False,
) -> Plan[ProcessInfo]:
    """Start a command that goes on by itself."""
    body = SpawnRequest(
        **command_fields(command),
        env=dict(env or {}),
        cwd=cwd,
        user=user,
        timeout=timeout,
        stdin=stdin,
        open_stdin=open_stdin,
        pty=pty,
        keep=keep,
        lossless=lossless,
    )
    target = f"{session_path(ref)}/processes"
    response = yield Request(b"POST", target, (JSON_TYPE,), json_body(body))
    info: ProcessInfo = decode(response, ProcessInfo)
    return info


def processes(ref: str) -> Plan[list[ProcessInfo]]:
    """All processes of a session."""
    found: list[ProcessInfo] = yield from get(f"{session_path(ref)}/processes", list[ProcessInfo])
    return found


def process(ref: str, number: int) -> Plan[ProcessInfo]:
    """One process."""
    info: ProcessInfo = yield from get(process_path(ref, number), ProcessInfo)
    return info


def wait_once(ref: str, number: int, seconds: float) -> Plan[ProcessInfo]:
    """Wait for its end at most that long."""
    target = process_path(ref, number) + "/wait" + query_text({"timeout": seconds})
    response = yield Request(b"GET", target, timeout=seconds + ANSWER_SECONDS, repeatable=True)
    info: ProcessInfo = decode(response, ProcessInfo)
    return info


def write(ref: str, number: int, data: Content, *, eof: bool) -> Plan[None]:
    """Write to its standard input."""
    target = process_path(ref, number) + "/stdin" + query_text({"eof": eof or None})
    response = yield Request(b"POST", target, (OCTETS_TYPE,), data, timeout=None)
    check(response)


def close_stdin(ref: str, number: int) -> Plan[None]:
    """End its input."""
    yield from act(b"POST", process_path(ref, number) + "/stdin/close", repeatable=True)


def send_signal(ref: str, number: int, which: int | str, *, group: bool) -> Plan[None]:
    """Send a signal."""
    body = SignalRequest(signal=which, group=group)
    yield from act(b"POST", process_path(ref, number) + "/signal", body)


def resize(ref: str, number: int, rows: int, columns: int) -> Plan[None]:
    """Resize its terminal."""
    body = ResizeRequest(rows=rows, columns=columns)
    yield from act(b"POST", process_path(ref, number) + "/resize", body, repeatable=True)


def streams_input(stdin: object) -> bool:
    """Whether input has to be streamed rather than sent with the command."""
    if stdin is None:
        return False
    return not isinstance(stdin, (bytes, bytearray, memoryview, str)) or len(stdin) > INLINE_STDIN


def inline_input(stdin: Any) -> bytes | None:
    """Input that is sent with the command."""
    if stdin is None:
        return None
    return stdin.encode() if isinstance(stdin, str) else bytes(stdin)


def forgive_input(error: SojournError) -> bool:
    """Whether a failure to deliver input is moot, as the command ended without reading it."""
    return error.code in {"process_not_found", "wrong_state", "conflict", "interrupted"}
