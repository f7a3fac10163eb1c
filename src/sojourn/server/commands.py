"""Commands, processes and code in sessions.

Guarantee: output is exact or its loss is said; a command that a lifecycle verb interrupts ends
with Interrupted naming the process to attach to again; what cannot be started changed nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal as signals
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sojourn.errors import (
    CommandNotStarted,
    DiskQuotaExceeded,
    Interrupted,
    SojournError,
)
from sojourn.node.sandboxes import Sandbox
from sojourn.server.base import Principal
from sojourn.server.turns import Turn, Turns
from sojourn.wire.api import CodeRequest, ExecRequest, ExecResult, SpawnRequest
from sojourn.wire.code import CodeResult
from sojourn.wire.guest import Output, ProcessSpec, ProcessState

# Longer input than a line is acted on without an end of line.
_LINE_BYTES = 4096


async def process_spec(sandbox: Sandbox, request: ExecRequest) -> ProcessSpec:
    """What the supervisor is asked to start. Raises CommandNotStarted."""
    if request.shell is not None:
        shell = await sandbox.guest.shell()
        if not shell:
            raise CommandNotStarted(
                "the template has no shell", next_step="Give the command as a list of arguments."
            )
        argv = [shell, b"-c", os.fsencode(request.shell)]
    elif request.argv is not None:
        argv = [os.fsencode(argument) for argument in request.argv]
    else:
        argv = list(request.argv_bytes or [])
    stdin = request.stdin
    config = sandbox.record.config
    cwd = request.cwd if request.cwd is not None else config.cwd
    return ProcessSpec(
        argv=argv,
        env={
            os.fsencode(name): os.fsencode(value)
            for name, value in (sandbox.environment | request.env).items()
        },
        # Without one it is the home of the command's user, who may not enter another's.
        cwd=os.fsencode(cwd) if cwd else None,
        user=request.user or config.user,
        timeout=request.timeout,
        stdin="inline" if stdin is not None else "null",
        input=stdin or b"",
        lossless=True,
    )


def command_line(request: ExecRequest) -> list[str]:
    """The command as the event log shows it, cut to a readable length."""
    if request.shell is not None:
        words = [request.shell]
    elif request.argv is not None:
        words = request.argv
    else:
        words = [word.decode(errors="replace") for word in request.argv_bytes or []]
    return [word[:500] for word in words[:50]]


def exit_code(state: ProcessState) -> int:
    """The exit code, or 128 + the signal as shells say it."""
    if state.exit_code is not None:
        return state.exit_code
    return 128 + (state.signal or 0)


class _Collector:
    """Joins output pieces up to a bound, noting what did not fit."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._parts: dict[int, list[bytes]] = {1: [], 2: []}
        self._size = {1: 0, 2: 0}
        self.offsets = [0, 0]
        self.truncated = False

    def add(self, output: Output) -> None:
        stream = output.stream
        self.offsets[stream - 1] = output.offset + len(output.data)
        room = self._bound - self._size[stream]
        data = output.data
        if len(data) > room:
            self.truncated = True
            data = data[:room]
        self._parts[stream].append(data)
        self._size[stream] += len(data)

    def get(self, stream: int) -> bytes:
        return b"".join(self._parts[stream])


class Commands:
    """Runs commands and code as turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def exec(self, who: Principal, ref: str, request: ExecRequest) -> ExecResult:
        """Run a command to its end."""
        async with self._turns.turn(who, ref, "exec", command=command_line(request)) as turn:
            started = time.perf_counter()
            guest = turn.sandbox.guest
            state, outputs = await guest.run(await process_spec(turn.sandbox, request))
            collected = _Collector(request.max_output)
            for output in outputs:
                collected.add(output)
            if state.running:
                try:
                    async for output in guest.output(
                        state.id, (collected.offsets[0], collected.offsets[1])
                    ):
                        collected.add(output)
                    state = await guest.wait(state.id)
                    await guest.forget(state.id)
                except Interrupted as error:
                    out, err = collected.offsets
                    error.details.update(process=state.id, stdout=out, stderr=err)
                    raise
            self._note(turn, state)
            self._quota(turn, state)
            if exit_code(state) != 0 and not state.timed_out:
                await self._turns.check_alive(turn)
            return ExecResult(
                exit_code=exit_code(state),
                signal=state.signal,
                timed_out=state.timed_out,
                reason=state.reason,
                stdout=collected.get(1),
                stderr=collected.get(2),
                truncated=collected.truncated,
                process=state.id,
                duration=time.perf_counter() - started,
            )

    def _note(self, turn: Turn, state: ProcessState) -> None:
        turn.details["process"] = state.id
        turn.details["exit_code"] = exit_code(state)
        if state.signal is not None:
            turn.details["signal"] = state.signal
        if state.timed_out:
            turn.details["timed_out"] = True
        if state.reason is not None:
            turn.details["reason"] = state.reason

    def _quota(self, turn: Turn, state: ProcessState) -> None:
        """A command that was ended for the disk limit says so instead of only `killed`."""
        used = turn.active.over_quota
        if used is not None and state.signal == signals.SIGKILL and not state.timed_out:
            raise DiskQuotaExceeded(
                f"the command was ended: the session holds {used} bytes of files, its limit is"
                f" {turn.active.session.limits.disk_bytes}",
                used=used,
                limit=turn.active.session.limits.disk_bytes,
            )

    async def exec_stream(
        self, who: Principal, ref: str, request: ExecRequest
    ) -> AsyncIterator[ProcessState | Output]:
        """Run a command; output as it comes, the ended process last."""
        async with self._turns.turn(who, ref, "exec", command=command_line(request)) as turn:
            guest = turn.sandbox.guest
            state, outputs = await guest.run(await process_spec(turn.sandbox, request))
            yield state
            offsets = [0, 0]
            try:
                for output in outputs:
                    offsets[output.stream - 1] = output.offset + len(output.data)
                    yield output
                if state.running:
                    async for output in guest.output(state.id, (offsets[0], offsets[1])):
                        offsets[output.stream - 1] = output.offset + len(output.data)
                        yield output
                    state = await guest.wait(state.id)
                    await guest.forget(state.id)
            except Interrupted as error:
                error.details.update(process=state.id, stdout=offsets[0], stderr=offsets[1])
                raise
            self._note(turn, state)
            self._quota(turn, state)
            if exit_code(state) != 0 and not state.timed_out:
                await self._turns.check_alive(turn)
            yield state

    async def spawn(
        self, who: Principal, ref: str, request: SpawnRequest, *, tag: str = "spawn"
    ) -> ProcessState:
        """Start a process that goes on by itself."""
        async with self._turns.turn(who, ref, "spawn", command=command_line(request)) as turn:
            spec = await process_spec(turn.sandbox, request)
            changes: dict[str, Any] = {
                "pty": request.pty,
                "keep": request.keep,
                "lossless": request.lossless,
                "tag": tag,
            }
            if request.open_stdin:
                changes["stdin"] = "pipe"
            state = await turn.sandbox.guest.start(msgspec.structs.replace(spec, **changes))
            turn.details["process"] = state.id
            turn.details["pid"] = state.pid
            self._turns.follow(turn.active, turn.sandbox, state.id)
            return state

    # -- processes --------------------------------------------------------------------------

    async def processes(self, who: Principal, ref: str) -> list[ProcessState]:
        """All processes the supervisor knows."""
        async with self._turns.call(who, ref) as sandbox:
            return await sandbox.guest.processes()

    async def process(self, who: Principal, ref: str, process: int) -> ProcessState:
        """One of them. Raises ProcessNotFound."""
        async with self._turns.call(who, ref) as sandbox:
            return await sandbox.guest.process(process)

    async def wait(self, who: Principal, ref: str, process: int, timeout: float) -> ProcessState:
        """Wait for its end, at most `timeout` seconds."""
        async with self._turns.process_call(who, ref) as (active, sandbox):
            try:
                async with asyncio.timeout(timeout):
                    state = await sandbox.guest.wait(process)
            except TimeoutError:
                state = await sandbox.guest.process(process)
            if not state.running:
                self._turns.end_seen(active, sandbox, process)
            return state

    async def output(
        self, who: Principal, ref: str, process: int, offsets: tuple[int, int]
    ) -> AsyncIterator[Output]:
        """Its output from the offsets on, to the end."""
        at = [*offsets]
        try:
            async with self._turns.process_call(who, ref) as (active, sandbox):
                self._turns.follow(active, sandbox, process)
                async for output in sandbox.guest.output(process, offsets):
                    at[output.stream - 1] = output.offset + len(output.data)
                    yield output
        except Interrupted as error:
            error.details.update(process=process, stdout=at[0], stderr=at[1])
            raise

    async def write_stdin(self, who: Principal, ref: str, process: int, data: bytes) -> None:
        """Write to its standard input."""
        async with self._turns.process_call(who, ref) as (active, sandbox):
            await sandbox.guest.write(process, data)
            # A process acts on whole lines or key strokes; what it does may be seen nowhere but
            # in its memory.
            if any(byte < 0x20 for byte in data) or len(data) > _LINE_BYTES:
                active.dirty = True
            self._turns.note(active, later=True)

    async def close_stdin(self, who: Principal, ref: str, process: int) -> None:
        """End its standard input."""
        async with self._turns.process_call(who, ref) as (active, sandbox):
            await sandbox.guest.close_stdin(process)
            self._turns.note(active, later=True)

    async def signal(
        self, who: Principal, ref: str, process: int, signal: int, group: bool
    ) -> None:
        """Send it a signal: a turn, since it changes which processes there are."""
        async with self._turns.turn(
            who, ref, "signal", frees=True, process=process, signal=signal
        ) as turn:
            await turn.sandbox.guest.signal(process, signal, group=group)

    async def resize(self, who: Principal, ref: str, process: int, rows: int, columns: int) -> None:
        """Resize its terminal."""
        async with self._turns.call(who, ref) as sandbox:
            await sandbox.guest.resize(process, rows, columns)

    # -- code -------------------------------------------------------------------------------

    async def run_code(self, who: Principal, ref: str, request: CodeRequest) -> CodeResult:
        """Run code in the session's persistent interpreter."""
        async with self._turns.turn(
            who, ref, "code", context=request.context, code=request.code[:500]
        ) as turn:
            # Only memory may have changed, which no look at the files shows.
            turn.active.dirty = True
            try:
                result = await turn.sandbox.interpreter.run(
                    request.code, context=request.context, timeout=request.timeout
                )
            except SojournError as error:
                turn.details["error"] = error.code
                await self._turns.check_alive(turn)
                raise
            finally:
                # Another turn's snapshot may have been taken while it ran.
                turn.active.dirty = True
            if result.error is not None:
                turn.details["error"] = result.error.name
                await self._turns.check_alive(turn)
            return result
