"""Processes of a session over the link.

Guarantee: a command is started once however often the link breaks; output is read by offset, so a
stream that was parked by a freeze goes on with the very next byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sojourn.errors import InvalidRequest, OutputTruncated
from sojourn.node.link_connection import Connection, encode
from sojourn.wire import frames
from sojourn.wire.frames import Op, Reader
from sojourn.wire.guest import Output, ProcessSpec, ProcessState

_INPUT_PIECE = 128 << 10
_INLINE_INPUT = 512 << 10
_OUTPUT_PIECE = frames.PIECE


def _output_body(process: int, out: int, err: int) -> bytes:
    return frames.number(process) + frames.pair(out, err) + _OUTPUT_PIECE.to_bytes(4, "little")


class ProcessCalls(Connection):
    """The part of `Guest` that deals with processes."""

    async def start(self, spec: ProcessSpec) -> ProcessState:
        """Start a command. Raises CommandNotStarted."""
        if spec.stdin == "inline" and len(spec.input) > _INLINE_INPUT:
            raise InvalidRequest("input of this size has to be written to a pipe")
        body = encode(lambda: frames.start_body(spec))
        return frames.read_process(await self.call(Op.START, body))

    async def process(self, process: int) -> ProcessState:
        """One process as it stands. Raises ProcessNotFound."""
        return frames.read_process(await self.call(Op.PROCESS, frames.number(process)))

    async def wait(self, process: int) -> ProcessState:
        """Wait for its end. Raises ProcessNotFound."""
        return frames.read_process(await self.call(Op.WAIT, frames.number(process)))

    async def run(self, spec: ProcessSpec) -> tuple[ProcessState, list[Output]]:
        """Start, collect all output, wait: one round trip. When the caller is cancelled, the
        command is killed: nobody else could reach it."""
        if spec.stdin == "pipe":
            raise InvalidRequest("a command that is run at once gets its input inline")
        if len(spec.input) > _INLINE_INPUT and spec.stdin == "inline":
            return await self._run_with_long_input(spec)
        body = encode(lambda: frames.start_body(spec))
        identifier, future = self.submit(Op.RUN, body, hold=True)
        try:
            reader = Reader((await future)[0])
        except asyncio.CancelledError:
            self.abandon(identifier)
            raise
        self.acknowledge(identifier)
        state = frames.read_process(reader)
        partial = reader.u8()
        out, out_data = frames.read_piece(reader)
        err, err_data = frames.read_piece(reader)
        pieces = []
        if out_data:
            pieces.append(Output(1, out, out_data))
        if err_data:
            pieces.append(Output(2, err, err_data))
        if partial and not state.running:
            out, err = out + len(out_data), err + len(err_data)
            pieces += await self._collect(state.id, out, err)
            await self.forget(state.id)
        return state, pieces

    async def _collect(self, process: int, out: int, err: int) -> list[Output]:
        """All output an ended process has left, from the offsets on."""
        pieces: list[Output] = []
        flags = 0
        while not flags & 1:
            reader = await self.call(Op.OUTPUT, _output_body(process, out, err))
            flags, _, _ = reader.u8(), reader.u64(), reader.u64()
            at, data = frames.read_piece(reader)
            if data:
                pieces.append(Output(1, at, data))
            out = at + len(data)
            at, data = frames.read_piece(reader)
            if data:
                pieces.append(Output(2, at, data))
            err = at + len(data)
        return pieces

    async def _run_with_long_input(self, spec: ProcessSpec) -> tuple[ProcessState, list[Output]]:
        piped = ProcessSpec(
            argv=spec.argv,
            env=spec.env,
            cwd=spec.cwd,
            user=spec.user,
            timeout=spec.timeout,
            stdin="pipe",
            pty=spec.pty,
            keep=spec.keep,
            tag=spec.tag,
        )
        state = await self.start(piped)
        try:
            await self.write(state.id, spec.input)
            await self.close_stdin(state.id)
            state = await self.wait(state.id)
            pieces = await self._collect(state.id, *_first(state))
        except asyncio.CancelledError:
            self.post(Op.SIGNAL, _signal_body(state.id, 9, True))
            raise
        await self.forget(state.id)
        return state, pieces

    async def output(
        self, process: int, offsets: tuple[int, int] = (0, 0)
    ) -> AsyncIterator[Output]:
        """All output from the offsets on. Raises ProcessNotFound, OutputTruncated."""
        out, err = offsets
        generation = self.generation
        while True:
            self.check(generation)
            reader = await self.call(Op.OUTPUT, _output_body(process, out, err))
            flags, first_out, first_err = reader.u8(), reader.u64(), reader.u64()
            for stream, wanted, first in ((1, out, first_out), (2, err, first_err)):
                if first > wanted:
                    raise OutputTruncated(
                        f"the output before byte {first} is no longer kept",
                        first_offset=first,
                        stream=stream,
                        process=process,
                    )
            at, data = frames.read_piece(reader)
            if data:
                out = at + len(data)
                yield Output(1, at, data)
            at, data = frames.read_piece(reader)
            if data:
                err = at + len(data)
                yield Output(2, at, data)
            if flags & 1:
                return

    async def write(self, process: int, data: bytes) -> None:
        """Write to stdin; returns when the supervisor has taken it. What the process has closed
        its ears to is thrown away."""
        for at in range(0, len(data), _INPUT_PIECE):
            piece = data[at : at + _INPUT_PIECE]
            answer = await self.call(Op.WRITE, frames.number(process) + frames.blob(piece))
            if answer.u8():
                return

    async def close_stdin(self, process: int) -> None:
        """End of input."""
        await self.call(Op.CLOSE_STDIN, frames.number(process))

    async def signal(self, process: int, signal: int, *, group: bool = True) -> None:
        """Send a signal to the process or its whole group."""
        await self.call(Op.SIGNAL, _signal_body(process, signal, group))

    async def resize(self, process: int, rows: int, columns: int) -> None:
        """Resize its terminal."""
        if not (0 < rows < 65536 and 0 < columns < 65536):
            raise InvalidRequest("a terminal has 1 to 65535 rows and columns")
        size = rows.to_bytes(2, "little") + columns.to_bytes(2, "little")
        await self.call(Op.RESIZE, frames.number(process) + size)

    async def processes(self) -> list[ProcessState]:
        """All processes the supervisor knows, oldest first."""
        found: list[ProcessState] = []
        below = 0
        while True:
            reader = await self.call(Op.PROCESSES, frames.number(below))
            states = [frames.read_process(reader) for _ in range(reader.u32())]
            found.extend(states)
            if not reader.u8() or not states:
                break
            below = states[-1].id
        found.sort(key=lambda state: state.id)
        return found

    async def forget(self, process: int) -> None:
        """Drop an ended process and its kept output."""
        await self.call(Op.FORGET, frames.number(process))


def _first(state: ProcessState) -> tuple[int, int]:
    return state.out[0], state.err[0]


def _signal_body(process: int, signal: int, group: bool) -> bytes:
    return frames.number(process) + signal.to_bytes(4, "little") + bytes([group])
