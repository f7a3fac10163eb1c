"""The runtime of a SWE-ReX deployment: commands, shells and files of a session.

Guarantee: as its deployment says. A shell is bash on a terminal of its own. What it is to do lies
in a file that it reads, so that nothing is echoed and no prompt is looked for; the end of a command
is told by a mark with a random word in it, and the exit code is in the mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shlex
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import msgspec
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SessionNotInitializedError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from sojourn.adapters import commands
from sojourn.client import AsyncProcess, AsyncSession
from sojourn.errors import (
    CommandNotStarted,
    FileMissing,
    OutputTruncated,
    ProcessNotFound,
    SojournError,
)
from sojourn.wire.guest import Output

OUTPUT_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 16 * 1024 * 1024
"""How much of a shell's output is kept in the session until it is read; the oldest goes first, so
that what runs in the background of a shell is never held up."""
READ_BYTES = 256 * 1024 * 1024
_TAIL = 64 * 1024  # kept of what is over the limit: the mark is in it
_SIZE = (50, 200)
_QUIET = "stty -echo -onlcr 2>/dev/null"
_MARK = re.compile(rb"\x01([0-9a-f]{16}):(\d+)\x02")
_ESCAPE = re.compile(rb"\x1b[@-_][0-?]*[ -/]*[@-~]|\x01[0-9a-f]{16}:\d+\x02")

_KILL_LAST = """
last=0
for file in /proc/[0-9]*/stat; do
    read -r line <"$file" || continue
    pid=${file#/proc/}; pid=${pid%/stat}
    rest=${line##*) }
    parent=${rest#* }; parent=${parent%% *}
    group=${rest#* * }; group=${group%% *}
    if [ "$parent" = "$1" ] && [ "$pid" -gt "$last" ]; then last=$pid; its=$group; fi
done 2>/dev/null
[ "$last" -gt 0 ] || exit 0
[ "$its" -gt 1 ] && [ "$its" != "$1" ] && kill -9 -- "-$its"
kill -9 "$last" 2>/dev/null
"""
"""Kills the newest child of a shell, with its process group if it has one of its own."""


class ShellState(msgspec.Struct):
    """A shell as another process finds it: its process, how far its output was read, and the mark
    that the program in its foreground ends with, if there is one."""

    process: int
    offset: int = 0
    waiting: str | None = None


class SojournRuntime(AbstractRuntime):
    """Runs what a harness asks for in `session`."""

    def __init__(
        self,
        session: AsyncSession,
        shells: dict[str, ShellState] | None = None,
        *,
        logger: logging.Logger | None = None,
    ) -> None:
        self.session = session
        self.logger = logger or logging.getLogger(__name__)
        self._shells = {
            name: _Shell(session, msgspec.structs.replace(one))
            for name, one in (shells or {}).items()
        }

    def shell_states(self) -> dict[str, ShellState]:
        """The shells, for another process."""
        return {name: msgspec.structs.replace(one.state) for name, one in self._shells.items()}

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether commands can run: one that is suspended wakes by itself."""
        try:
            async with asyncio.timeout(timeout):
                state = (await self.session.refresh()).state
        except (SojournError, TimeoutError) as error:
            return IsAliveResponse(is_alive=False, message=str(error) or "no answer in time")
        alive = state in {"running", "paused", "suspended"}
        return IsAliveResponse(is_alive=alive, message="" if alive else f"the session is {state}")

    # -- shells

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        """Start a shell. Raises SessionExistsError, CommandTimeoutError."""
        if request.session in self._shells:
            raise SessionExistsError(f"session {request.session} already exists")
        process = await self.session.spawn(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            env={"PS1": "", "PS2": "", "PS0": "", "PROMPT_COMMAND": "", "TERM": "dumb"},
            pty=_SIZE,
            keep=KEPT_BYTES,
        )
        shell = _Shell(self.session, ShellState(process.id))
        lines = [f"source {shlex.quote(path)}" for path in request.startup_source]
        try:
            begun = await shell.begin("\n".join(lines), request.startup_timeout)
        except BaseException:
            await process.kill()
            raise
        self._shells[request.session] = shell
        return CreateBashSessionResponse(output=begun)

    async def run_in_session(self, action: Action) -> Observation:
        """Run a command in a shell, or interrupt it. Raises SessionDoesNotExistError,
        BashIncorrectSyntaxError, CommandTimeoutError (it goes on), NonZeroExitCodeError."""
        shell = self._shells.get(action.session)
        if shell is None:
            raise SessionDoesNotExistError(f"session {action.session!r} does not exist")
        if isinstance(action, BashInterruptAction):
            return await shell.interrupt(action)
        if not (action.is_interactive_command or action.is_interactive_quit):
            await self._check(action.command)
        seen = await shell.run(action)
        if action.is_interactive_command or action.is_interactive_quit:
            return seen.model_copy(update={"exit_code": 0})
        if action.check == "ignore":
            return seen.model_copy(update={"exit_code": None})
        if action.check == "raise" and seen.exit_code:
            message = f"Command {action.command!r} failed with exit code {seen.exit_code}."
            message += f" Here is the output:\n{seen.output!r}"
            raise NonZeroExitCodeError(
                f"{action.error_msg}: {message}" if action.error_msg else message
            )
        return seen

    async def _check(self, command: str) -> None:
        found = await self.session.exec(["bash", "-n"], stdin=command.encode())
        if not found.ok:
            told = {"bash_stdout": found.text, "bash_stderr": found.error_text}
            raise BashIncorrectSyntaxError(
                f"bash cannot read {command!r}: {found.error_text}", extra_info=told
            )

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        """End a shell and what it runs. Raises SessionDoesNotExistError."""
        shell = self._shells.pop(request.session, None)
        if shell is None:
            raise SessionDoesNotExistError(f"session {request.session!r} does not exist")
        await shell.close()
        return CloseBashSessionResponse()

    async def close(self) -> CloseResponse:
        """End all shells."""
        while self._shells:
            _, shell = self._shells.popitem()
            await shell.close()
        return CloseResponse()

    # -- commands and files

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command by itself. Raises CommandTimeoutError, NonZeroExitCodeError,
        FileNotFoundError where there is no such program."""
        words: str | list[str] = command.command
        if command.shell and not isinstance(words, str):
            words = shlex.join(words)
        elif not command.shell and isinstance(words, str):
            words = [words]
        if command.merge_output_streams:
            if isinstance(words, str):
                words = commands.merged(words)
            else:
                words = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *words]
        run = commands.Run(
            self.session.id,
            words,
            limit=OUTPUT_BYTES,
            timeout=command.timeout,
            env=command.env,
            cwd=command.cwd,
        )
        try:
            done = await commands.finish_async(self.session, run)
        except CommandNotStarted as error:
            raise FileNotFoundError(error.message) from error
        if done.timed_out:
            raise CommandTimeoutError(
                f"Timeout ({command.timeout}s) exceeded while running command"
            )
        if command.check and done.exit_code:
            message = f"Command {command.command!r} failed with exit code {done.exit_code}"
            raise NonZeroExitCodeError(
                f"{command.error_msg}: {message}" if command.error_msg else message
            )
        stderr = done.stderr
        if done.dropped:
            stderr += b"\n[%d bytes of output were left out]\n" % done.dropped
        return CommandResponse(
            stdout=done.stdout.decode(errors="backslashreplace"),
            stderr=stderr.decode(errors="backslashreplace"),
            exit_code=done.exit_code,
        )

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """A file as text. Raises FileNotFoundError, UnicodeDecodeError, OSError (too large)."""
        try:
            size = (await self.session.files.stat(request.path)).size
            if size <= READ_BYTES:
                # One byte more: a file that grows under way is told as too large, not cut.
                data = await self.session.files.read(request.path, length=READ_BYTES + 1)
                size = len(data)
        except FileMissing as error:
            raise FileNotFoundError(error.message) from error
        if size > READ_BYTES:
            raise OSError(f"{request.path} is over {READ_BYTES} bytes ({size})")
        text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        return ReadFileResponse(content=text)

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write text to a file, whole."""
        await self.session.files.write(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a file or directory of this machine into the session."""
        if not await asyncio.to_thread(Path(request.source_path).exists):
            raise FileNotFoundError(request.source_path)
        await self.session.files.upload(request.source_path, request.target_path)
        return UploadResponse()


class _Shell:
    """One bash."""

    def __init__(self, session: AsyncSession, state: ShellState) -> None:
        self.state = state
        self._session = session
        self._file = f"/tmp/.swerex-{state.process}"

    async def _process(self) -> AsyncProcess:
        try:
            process = await self._session.process(self.state.process)
        except ProcessNotFound as error:
            raise SessionNotInitializedError("the shell is gone") from error
        if not process.running:
            raise SessionNotInitializedError(f"the shell has ended ({process.exit_code})")
        return process

    async def _start(self, process: AsyncProcess, command: str) -> str:
        """Have a command begin; the word that its mark will have."""
        word = secrets.token_hex(8)
        await self._session.files.write(self._file, command + "\n")
        # The exit code goes through, so that the next command sees it as `$?`.
        line = (
            f" . {self._file}; __s=$?; {_QUIET}; "
            f"printf '\\001%s:%d\\002' {word} $__s; (exit $__s)\n"
        )
        await process.write(line)
        self.state.waiting = word
        return word

    async def begin(self, command: str, timeout: float) -> str:
        """Quieten the terminal and run what a new shell is to begin with."""
        process = await self._process()
        await process.write(f" {_QUIET}\n")
        word = await self._start(process, command or ":")
        await self._until(process, word, [], timeout + 10.0)
        return ""

    async def run(self, action: BashAction) -> BashObservation:
        """Run a command, or type a line into the program in the foreground."""
        process = await self._process()
        if self.state.waiting is not None:
            word = self.state.waiting
            await process.write(action.command + "\n")
        else:
            word = await self._start(process, action.command)
        try:
            return await self._until(process, word, action.expect, action.timeout)
        except TimeoutError as error:
            raise CommandTimeoutError(
                f"timeout after {action.timeout} seconds while running command {action.command!r}"
            ) from error

    async def interrupt(self, action: BashInterruptAction) -> BashObservation:
        """Interrupt what runs: by Ctrl-C, then by killing what the shell started last."""
        process = await self._process()
        for attempt in range(max(action.n_retry, 1) + 1):
            if attempt < max(action.n_retry, 1):
                await process.write("\x03")
            else:
                await self._session.exec(["/bin/sh", "-c", _KILL_LAST, "sh", str(process.pid)])
            await asyncio.sleep(0.1)
            # An interrupt ends the whole line that bash was at, mark and all: another one follows.
            word = await self._start(process, ":")
            with contextlib.suppress(TimeoutError):
                return await self._until(process, word, action.expect, max(action.timeout, 1.0))
        raise CommandTimeoutError("Failed to interrupt session")

    async def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessNotFound):
            await (await self._session.process(self.state.process)).signal("HUP")
            await (await self._session.process(self.state.process)).kill()
        with contextlib.suppress(FileMissing):
            await self._session.files.remove(self._file)

    async def _until(
        self, process: AsyncProcess, word: str, expect: list[str], timeout: float | None
    ) -> BashObservation:
        """Read until the mark of this word, or something expected. Raises TimeoutError."""
        patterns = [re.compile(one.encode()) for one in expect]
        seen = _Seen()
        async with asyncio.timeout(timeout):
            while True:
                try:
                    return await self._read(process, word, patterns, seen)
                except OutputTruncated:
                    first = (await process.refresh()).info.stdout[0]
                    seen.missed(first - self.state.offset)
                    self.state.offset = first

    async def _read(
        self, process: AsyncProcess, word: str, patterns: list[re.Pattern[bytes]], seen: _Seen
    ) -> BashObservation:
        pieces = process.output(self.state.offset)
        async with contextlib.aclosing(cast(AsyncGenerator[Output, None], pieces)) as held:
            async for piece in held:
                self.state.offset = piece.offset + len(piece.data)
                seen.feed(piece.data)
                for mark in _MARK.finditer(seen.tail):
                    if mark[1].decode() == word:
                        self.state.waiting = None
                        return seen.told(exit_code=int(mark[2]))
                for pattern in patterns:
                    if found := pattern.search(seen.tail):
                        return seen.told(expect_string=found[0].decode(errors="replace"))
        raise SessionNotInitializedError("the shell has ended")


class _Seen:
    """Output of a command: its first OUTPUT_BYTES, and the end of it."""

    def __init__(self) -> None:
        self._head = bytearray()
        self.tail = b""
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """More of it."""
        self.tail += data
        if len(self.tail) > 2 * _TAIL:
            over, self.tail = self.tail[:-_TAIL], self.tail[-_TAIL:]
            room = over[: OUTPUT_BYTES - len(self._head)]
            self._head += room
            self._dropped += len(over) - len(room)

    def missed(self, count: int) -> None:
        """Some of it was written faster than it was read, and is gone."""
        self._head += self.tail[: OUTPUT_BYTES - len(self._head)]
        self.tail = b""
        self._dropped += count

    def told(self, **more: Any) -> BashObservation:
        """What the harness is told."""
        left = f"\n[{self._dropped} bytes left out]\n".encode() if self._dropped else b""
        data = _ESCAPE.sub(b"", bytes(self._head) + left + self.tail)
        text = data.decode(errors="backslashreplace").replace("\r\n", "\n")
        return BashObservation(output=text, **more)
