"""The tools that run something: exec, run_code, and what goes on in the background.

Guarantee: exit codes are the command's own; stdout and stderr stay apart and exact. A command whose
call is cancelled is killed, with its whole group, also when it had only just been sent. Whatever a
command writes, this process keeps a bounded part of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets

from mcp_types import ContentBlock, ImageContent

from sojourn.client import core_commands
from sojourn.client.async_session import AsyncSession
from sojourn.errors import Interrupted, InvalidRequest, SojournError
from sojourn.mcp import arguments, results
from sojourn.mcp.calls import Call, closing
from sojourn.mcp.texts import LIMIT, Stream, clipped, part
from sojourn.wire import stream
from sojourn.wire.api import ProcessInfo
from sojourn.wire.code import CodeResult, is_interpreter
from sojourn.wire.guest import Output

START_SECONDS = 30.0  # how long a cancelled call waits to learn which process it started
END_SECONDS = 10.0
INTERRUPT_SECONDS = 0.5
INTERRUPTS = 3
MAX_IMAGES = 8
IMAGE_BYTES = 4 * 1024 * 1024
COMMAND_SHOWN = 500


class _Running:
    """A command under way: what it wrote, and which process it is once that is known."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        self.streams = {"stdout": Stream(), "stderr": Stream()}
        self.started = asyncio.Event()
        self.process: int | None = None
        self.end: stream.Ended | None = None

    def on_start(self, process: int) -> None:
        self.process = process
        self.started.set()

    async def run(self, call: Call, given: arguments.Exec) -> stream.Ended:
        """Run it to its end. Raises what exec raises."""
        source = core_commands.exec_source(
            self.session.id,
            given.command,
            timeout=given.timeout,
            env=None,
            cwd=given.cwd,
            user=None,
            stdin=None,
            on_start=self.on_start,
        )
        async for item in call.transport.stream(source):
            if isinstance(item, Output):
                self.streams["stdout" if item.stream == 1 else "stderr"].feed(item.data)
            else:
                self.end = item
        if self.end is None or self.end.exit_code is None:
            raise Interrupted("the stream ended before the command did")
        return self.end

    async def kill(self, task: asyncio.Task[stream.Ended]) -> None:
        """Kill it, and see it end."""
        starting = asyncio.create_task(self.started.wait())
        await asyncio.wait(
            {task, starting}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        starting.cancel()
        if self.process is None or task.done():
            return
        # Gone already, or its server is: there is nothing left to kill from here.
        with contextlib.suppress(SojournError):
            await (await self.session.process(self.process)).kill()
        await asyncio.wait({task}, timeout=END_SECONDS)


async def execute(call: Call, given: arguments.Exec) -> results.ExecResult:
    """exec."""
    session = await call.session(given.session, make=True)
    if given.background:
        process = await session.spawn(given.command, cwd=given.cwd)
        return results.ExecResult(
            session=session.id,
            process=process.id,
            stdout="",
            stderr="",
            next_step=f"process_output(process={process.id}) reads what it writes,"
            f" process_kill(process={process.id}) ends it.",
        )
    running = _Running(session)
    end = await call.finish(running.run(call, given), "running", running.kill)
    output = _kept(call, running.streams)
    shown = {
        name: one.show(f'exec_output(output="{output}", stream="{name}", offset={{offset}})')
        for name, one in running.streams.items()
    }
    return results.ExecResult(
        session=session.id,
        process=end.process,
        exit_code=end.exit_code,
        stdout=shown["stdout"].text,
        stdout_encoding=shown["stdout"].encoding,
        stdout_bytes=shown["stdout"].size,
        stderr=shown["stderr"].text,
        stderr_encoding=shown["stderr"].encoding,
        stderr_bytes=shown["stderr"].size,
        timed_out=end.timed_out,
        killed_because=end.reason,
        seconds=round(end.duration, 3),
        output=output,
        next_step=_rest(output) or (_TIMED_OUT.format(given.timeout) if end.timed_out else None),
    )


_TIMED_OUT = "It was killed after {:g} s: give a longer timeout, or background=true."


def _kept(call: Call, streams: dict[str, Stream]) -> str | None:
    """The name under which the rest of an output can be asked for, if anything is left out."""
    if all(one.whole() for one in streams.values()):
        return None
    name = f"out-{secrets.token_hex(4)}"
    call.outputs.keep(name, streams)
    return name


def _rest(output: str | None) -> str | None:
    if output is None:
        return None
    return f'Not all output is shown: exec_output(output="{output}") reads it part by part.'


async def exec_output(call: Call, given: arguments.ExecOutput) -> results.OutputResult:
    """exec_output."""
    streams = call.outputs.get(given.output)
    if streams is None or given.stream not in streams:
        raise InvalidRequest(
            f"no {given.stream} of {given.output!r} is kept",
            next_step="Only the newest outputs are kept. Run it again, with its output in a file.",
            field="output",
        )
    held = streams[given.stream]
    offset = _from_end(given.offset, held.size)
    if offset > len(held.kept):
        raise InvalidRequest(
            f"of {held.size} bytes the first {len(held.kept)} are kept, {offset} is behind them",
            next_step="Run it again, with its output in a file.",
            field="offset",
        )
    shown = part(bytes(held.kept[offset : offset + LIMIT + 4]), more=False)
    after = offset + shown.size
    return results.OutputResult(
        text=shown.text,
        encoding=shown.encoding,
        offset=offset,
        size=held.size,
        next_offset=after if after < held.size else None,
    )


def _from_end(offset: int, size: int) -> int:
    return offset if offset >= 0 else max(size + offset, 0)


# -- code ---------------------------------------------------------------------------------------


async def run_code(
    call: Call, given: arguments.RunCode
) -> tuple[results.CodeResult, list[ContentBlock]]:
    """run_code."""
    session = await call.session(given.session, make=True)

    async def interrupt(task: asyncio.Task[CodeResult]) -> None:
        await _interrupt(session, task)

    found = await call.finish(
        session.run_code(given.code, timeout=given.timeout), "running", interrupt
    )
    streams = {"stdout": Stream(), "stderr": Stream(), "value": Stream()}
    for name, text in (("stdout", found.stdout), ("stderr", found.stderr), ("value", found.text)):
        streams[name].feed((text or "").encode("utf-8", "replace"))
    output = _kept(call, streams)
    shown = {
        name: one.show(f'exec_output(output="{output}", stream="{name}", offset={{offset}})').text
        for name, one in streams.items()
    }
    images: list[ContentBlock] = [
        ImageContent(type="image", data=base64.b64encode(one).decode(), mime_type="image/png")
        for one in found.images[:MAX_IMAGES]
        if len(one) <= IMAGE_BYTES
    ]
    error = found.error
    result = results.CodeResult(
        session=session.id,
        value=None if found.text is None else shown["value"],
        stdout=shown["stdout"],
        stderr=shown["stderr"],
        error=None if error is None else clipped(f"{error.name}: {error.value}"),
        traceback=None if error is None else clipped(error.traceback),
        images=len(found.images),
        restarted=found.restarted,
        output=output,
        next_step=_rest(output),
    )
    return result, images


async def _interrupt(session: AsyncSession, task: asyncio.Task[CodeResult]) -> None:
    """Interrupt the code, and kill the interpreter if it does not listen."""
    with contextlib.suppress(SojournError):
        found = [
            one
            for one in await session.processes()
            if one.running and is_interpreter(one.info.argv)
        ]
        if len(found) != 1:
            return  # which one runs this code cannot be told; its timeout ends it
        for _ in range(INTERRUPTS):
            await found[0].signal("INT", group=False)
            await asyncio.wait({task}, timeout=INTERRUPT_SECONDS)
            if task.done():
                return
        await found[0].kill()
        await asyncio.wait({task}, timeout=END_SECONDS)


# -- processes ----------------------------------------------------------------------------------


async def process_list(call: Call, given: arguments.Own) -> results.ProcessesResult:
    """process_list."""
    session = await call.session(given.session)
    found = [one.info for one in await session.processes()]
    found.sort(key=lambda one: one.id, reverse=True)
    told = [
        results.ProcessResult(
            process=one.id,
            command=clipped(_command(one), COMMAND_SHOWN),
            running=one.running,
            started=results.moment(one.started_at),
            exit_code=one.exit_code,
        )
        for one in found[:50]
    ]
    return results.ProcessesResult(
        session=session.id, processes=told, left_out=len(found) - len(told)
    )


def _command(info: ProcessInfo) -> str:
    if is_interpreter(info.argv):
        return "(the interpreter of run_code)"
    return " ".join(info.argv)


async def process_output(call: Call, given: arguments.ProcessOutput) -> results.ProcessOutputResult:
    """process_output."""
    session = await call.session(given.session)
    process = await session.process(given.process)
    if given.wait and process.running:
        with contextlib.suppress(TimeoutError):  # it runs on: `running` says so
            await process.wait(given.wait)
    await process.refresh()
    number = 1 if given.stream == "stdout" else 2
    first, size = process.info.stdout if number == 1 else process.info.stderr
    offset = _from_end(given.offset, size)
    if given.offset < 0:
        offset = max(offset, first)
    other = process.info.stderr[1] if number == 1 else process.info.stdout[1]
    data = bytearray()
    if offset < size:
        offsets = (offset, other) if number == 1 else (other, offset)
        async with closing(process.output(offsets, follow=False)) as pieces:
            async for piece in pieces:
                if piece.stream == number:
                    data += piece.data
                if len(data) > LIMIT:
                    break
    shown = part(bytes(data), more=process.running)
    after = offset + shown.size
    return results.ProcessOutputResult(
        text=shown.text,
        encoding=shown.encoding,
        offset=offset,
        size=max(size, offset + len(data)),  # it goes on writing
        next_offset=after if after < size or process.running else None,
        running=process.running,
        exit_code=process.exit_code,
        timed_out=process.info.timed_out,
    )


async def process_kill(call: Call, given: arguments.ProcessKill) -> results.Done:
    """process_kill."""
    session = await call.session(given.session)
    process = await session.process(given.process)
    if not process.running:
        return results.Done(session=session.id, done=f"process {process.id} had ended before")
    await process.signal(given.signal)
    return results.Done(session=session.id, done=f"{given.signal} sent to process {process.id}")
