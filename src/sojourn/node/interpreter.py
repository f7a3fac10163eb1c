"""The persistent Python interpreter of a session: pieces of code in one namespace per context.

Guarantee: a result holds exactly what its code wrote and gave; the namespace lives in a process of
the session, so it survives snapshot, suspend and fork with it. When that process is lost, the next
result says `restarted`. Output is bounded; what is left out is flagged.

Requests go down the process's stdin; its stdout and stderr carry what the code writes, unchanged,
and after it a mark with the token of the request (see interpreter_driver.py). Tokens are random,
so neither the code nor the answer to a request of a former server can be mistaken for ours.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from sojourn.errors import CommandNotStarted, Conflict, ProcessNotFound, SandboxLost
from sojourn.node.guest import Guest
from sojourn.wire.code import CodeError, CodeResult
from sojourn.wire.guest import Output, ProcessSpec, ProcessState

OUTPUT_LIMIT = 10 << 20  # kept of each stream, for one result
ANSWER_LIMIT = 64 << 20
INTERRUPT_EVERY = 0.4
INTERRUPTS = 4  # then it is killed
_MARK = b"\0sojourn:"
_TOKEN = 32
_HEAD = len(_MARK) + _TOKEN + 1 + 9
TAG = "interpreter:"


class _Answer(msgspec.Struct):
    text: str | None
    error: CodeError | None
    images: list[str]
    results: list[dict[str, str]]
    count: int
    truncated: bool = False


class _Lost(Exception):
    """The interpreter's process ended before the answer was complete."""


class _Collector:
    """One stream of a request: what came before its mark, and what the mark carries."""

    def __init__(self, token: str, begin: bool) -> None:
        self._end = _MARK + token.encode() + b">"
        self._begin = _MARK + token.encode() + b"<00000000:" if begin else b""
        self._tail = bytearray()  # not yet known to be output
        self._payload_length = -1
        self.text = bytearray()
        self.truncated = False
        self.payload: bytes | None = None

    @property
    def done(self) -> bool:
        """Whether the mark has come, whole."""
        return self.payload is not None

    @property
    def begun(self) -> bool:
        """Whether what comes is of this request and no earlier one."""
        return not self._begin

    def _keep(self, data: bytes | bytearray) -> None:
        room = OUTPUT_LIMIT - len(self.text)
        if len(data) > room:
            self.truncated = True
            data = data[: max(0, room)]
        self.text += data

    def feed(self, data: bytes) -> None:
        """Take further bytes of the stream."""
        self._tail += data
        if self._begin:
            at = self._tail.find(self._begin)
            if at < 0:
                del self._tail[: max(0, len(self._tail) - len(self._begin))]
                return
            del self._tail[: at + len(self._begin)]
            self._begin = b""
        if self._payload_length < 0:
            at = self._tail.find(self._end)
            if at < 0:
                at = self._tail.rfind(b"\0", max(0, len(self._tail) - _HEAD))
                safe = at if at >= 0 else len(self._tail)
                self._keep(self._tail[:safe])
                del self._tail[:safe]
                return
            if len(self._tail) < at + _HEAD:
                return
            self._keep(self._tail[:at])
            self._payload_length = int(self._tail[at + len(self._end) : at + _HEAD - 1], 16)
            if self._payload_length > ANSWER_LIMIT:
                raise _Lost
            del self._tail[: at + _HEAD]
        if len(self._tail) >= self._payload_length:
            self.payload = bytes(self._tail[: self._payload_length])

    def rest(self) -> None:
        """No mark will come any more: all there is counts as output."""
        if not self._begin and self._payload_length < 0:
            self._keep(self._tail)


class _Context:
    """The interpreter of one context."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.process: int | None = None
        self.stream: AsyncIterator[Output] | None = None
        self.interrupts = 0  # of the guest, when the stream was opened
        self.fresh = True  # nothing was ever lost
        self.begin = False  # the next request cannot know what the stream holds


@functools.cache
def driver_source() -> bytes:
    """The program that runs inside."""
    return Path(__file__).with_name("interpreter_driver.py").read_bytes()


class Interpreter:
    """The interpreters of one session, by context."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self.environment: dict[str, str] = {}
        self._contexts: dict[str, _Context] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, code: str, *, context: str = "default", timeout: float | None = None
    ) -> CodeResult:
        """Execute code. Raises CommandNotStarted when the session has no python3."""
        held = self._contexts.setdefault(context, _Context())
        async with held.lock:
            restarted = False
            for attempt in (1, 2):
                restarted |= await self._ensure(held, context)
                try:
                    return await self._run(held, code, timeout, restarted)
                except _Lost:
                    # It was gone before it took the request; a second time it is the code.
                    held.process = None
                    held.fresh = False
                    if attempt == 2:
                        raise SandboxLost("the interpreter ends as soon as it starts") from None
                except BaseException:
                    held.process = None
                    raise
            raise AssertionError("unreachable")

    # -- the process ------------------------------------------------------------------------

    async def _ensure(self, held: _Context, context: str) -> bool:
        """Have a process; True when it is a fresh one in place of one that was lost."""
        if held.process is not None and held.interrupts == self._guest.interrupts:
            return False
        tag = TAG + context
        for state in await self._guest.processes():
            if state.tag != tag:
                continue
            if state.running:
                # Started by us before an interruption, by a former server, or before a restore.
                self._use(held, state, begin=True)
                return False
            held.fresh = False
            with contextlib.suppress(ProcessNotFound, Conflict):
                await self._guest.forget(state.id)
        state = await self._start(tag)
        self._use(held, state, begin=False)
        return not held.fresh

    async def _start(self, tag: str) -> ProcessState:
        spec = ProcessSpec(
            argv=[b"python3", b"-c", driver_source()],
            env={os.fsencode(name): os.fsencode(text) for name, text in self.environment.items()},
            stdin="pipe",
            lossless=True,
            tag=tag,
        )
        try:
            return await self._guest.start(spec)
        except CommandNotStarted as error:
            raise CommandNotStarted(
                f"running code needs python3 inside the session: {error.message}",
                next_step="Use a template with python3, or install it in the session.",
                **error.details,
            ) from error

    def _use(self, held: _Context, state: ProcessState, *, begin: bool) -> None:
        held.process = state.id
        held.interrupts = self._guest.interrupts
        held.begin = begin
        offsets = (state.out[1], state.err[1]) if begin else (0, 0)
        held.stream = self._guest.output(state.id, offsets)

    # -- one request ------------------------------------------------------------------------

    async def _run(
        self, held: _Context, code: str, timeout: float | None, restarted: bool
    ) -> CodeResult:
        assert held.process is not None and held.stream is not None
        process, stream = held.process, held.stream
        token = secrets.token_hex(_TOKEN // 2)
        begin, held.begin = held.begin, False
        out, err = _Collector(token, begin), _Collector(token, begin)
        body = msgspec.json.encode({"code": code, "token": token, "begin": begin})
        request = len(body).to_bytes(4, "big") + body
        # Its answer comes on the streams; waiting for the write first would cost a round trip.
        writing = asyncio.ensure_future(self._guest.write(process, request))
        watchdog = _Watchdog(self._guest, process, timeout)
        ended = False
        try:
            while not (out.done and err.done):
                piece = await anext(stream, None)
                if piece is None:
                    ended = True
                    break
                (out if piece.stream == 1 else err).feed(piece.data)
        except asyncio.CancelledError:
            # The caller has gone; its code must not keep the next request waiting.
            self._later(_interrupt(self._guest, process))
            raise
        finally:
            watchdog.stop()
            if ended or (out.done and err.done):
                with contextlib.suppress(ProcessNotFound, Conflict):
                    await writing
            else:
                writing.cancel()
        if ended:
            return await self._died(held, process, out, err, watchdog, restarted)
        await watchdog.settled()
        assert out.payload is not None
        try:
            answer = msgspec.json.decode(out.payload, type=_Answer)
            return _result(answer, out, err, watchdog, restarted)
        except (msgspec.DecodeError, ValueError):
            # The code has the channel too, and may have answered in the driver's place.
            told = "what the code came to cannot be read"
            unread = _Answer(None, CodeError("InterpreterError", told, ""), [], [], 0)
            return _result(unread, out, err, watchdog, restarted)

    async def _died(
        self,
        held: _Context,
        process: int,
        out: _Collector,
        err: _Collector,
        watchdog: _Watchdog,
        restarted: bool,
    ) -> CodeResult:
        await watchdog.settled()
        state = await self._guest.wait(process)
        with contextlib.suppress(ProcessNotFound, Conflict):
            await self._guest.forget(process)
        held.process = None
        held.fresh = False
        out.rest()
        err.rest()
        if out.begun and not out.text and not err.text and _gone_before(state, watchdog):
            raise _Lost
        if watchdog.fired:
            error = CodeError(
                "TimeoutError",
                f"not done after {watchdog.timeout:g} s and not to be interrupted; "
                "the interpreter was killed",
                "",
            )
        else:
            how = (
                f"exit code {state.exit_code}"
                if state.exit_code is not None
                else f"signal {state.signal}"
            )
            cause = f" ({state.reason})" if state.reason else ""
            error = CodeError("InterpreterDied", f"the interpreter ended: {how}{cause}", "")
        return CodeResult(
            text=None,
            stdout=_text(out.text),
            stderr=_text(err.text),
            error=error,
            restarted=restarted,
            truncated=out.truncated or err.truncated,
        )

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _gone_before(state: ProcessState, watchdog: _Watchdog) -> bool:
    """Whether it ended, by a signal from elsewhere, before it can have run our request."""
    return not watchdog.fired and state.ended_ns is not None and state.ended_ns < watchdog.began_ns


async def _interrupt(guest: Guest, process: int) -> None:
    with contextlib.suppress(ProcessNotFound, SandboxLost):
        await guest.signal(process, signal.SIGINT, group=False)


class _Watchdog:
    """Interrupts code that takes too long, and kills what does not listen."""

    def __init__(self, guest: Guest, process: int, timeout: float | None) -> None:
        self._guest = guest
        self._process = process
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.timeout = timeout if timeout is not None else 0.0
        self.fired = False
        self.began_ns = time.time_ns()
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._fire)

    def _fire(self) -> None:
        self.fired = True
        self._task = asyncio.ensure_future(self._escalate())

    async def _escalate(self) -> None:
        # More than once: the first may have hit code of an earlier request that still ran.
        for _ in range(INTERRUPTS):
            await _interrupt(self._guest, self._process)
            await asyncio.sleep(INTERRUPT_EVERY)
        with contextlib.suppress(ProcessNotFound, SandboxLost):
            await self._guest.signal(self._process, signal.SIGKILL, group=True)

    def stop(self) -> None:
        """The answer is here, or nobody waits for it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def settled(self) -> None:
        """Return once no further signal can be on its way: it would hit the next request."""
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")


def _result(
    answer: _Answer, out: _Collector, err: _Collector, watchdog: _Watchdog, restarted: bool
) -> CodeResult:
    images = [base64.b64decode(image) for image in answer.images]
    for found in answer.results:
        if "image/png" in found:
            images.append(base64.b64decode(found["image/png"]))
    error = answer.error
    if error is not None and error.name == "KeyboardInterrupt" and watchdog.fired:
        error = CodeError(
            "TimeoutError", f"interrupted after {watchdog.timeout:g} s", error.traceback
        )
    return CodeResult(
        text=answer.text,
        stdout=_text(out.text),
        stderr=_text(err.text),
        error=error,
        images=images,
        results=answer.results,
        execution_count=answer.count,
        restarted=restarted,
        truncated=answer.truncated or out.truncated or err.truncated,
    )
