"""One sandbox of the OpenAI Agents SDK: a session.

Guarantee: exec, files and terminals are those of the session, with exact bytes and exit codes and
bounded memory here; failures are the framework's own errors, with ours as the cause. Terminals
are known by the session's own process numbers and their state says how far they were read, so
that they go on in whichever process resumes it. A connection is held from `start` to `shutdown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, cast
from urllib.parse import urlencode, urlsplit

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    PtySessionNotFoundError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
    WorkspaceStopError,
)
from agents.sandbox.session import SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.pty_output import collect_pty_output
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    clamp_pty_yield_time_ms,
    resolve_pty_write_yield_time_ms,
)
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tar_bytes
from pydantic import Field

from sojourn.adapters import commands
from sojourn.client import AsyncProcess, AsyncSession, AsyncSojourn
from sojourn.errors import (
    CaptureRefused,
    CommandNotStarted,
    FileMissing,
    OutputTruncated,
    ProcessNotFound,
    SessionBusy,
    SessionNotFound,
    SojournError,
    Unreachable,
    WrongState,
)
from sojourn.wire.guest import Output

OUTPUT_BYTES = 16 * 1024 * 1024
"""How much of each stream of a command is kept."""
READ_BYTES = 512 * 1024 * 1024
MEMORY_BYTES = 8 * 1024 * 1024  # larger files are held on disk while the framework reads them
TERMINAL_BYTES = 1024 * 1024
"""How much of a terminal's output is kept until it is read."""
PIECE_BYTES = 64 * 1024

_REFERENCE = b"sojourn-snapshot:"
_SIZE = (24, 80)


class Connection:
    """Where the server is; opened for each session, as a connection belongs to one event loop."""

    def __init__(self, url: str | None, token: str | None) -> None:
        self._url = url
        self._token = token

    def open(self) -> AsyncSojourn:
        """A client, to be closed. Raises Unreachable when no server is named and none runs here."""
        return AsyncSojourn(self._url, self._token)


class SojournSandboxSessionState(SandboxSessionState):
    """What is needed to find the session again; nothing secret."""

    type: Literal["sojourn"] = "sojourn"
    session: str
    on_exit: Literal["suspend", "delete"] = "suspend"
    terminals: dict[int, tuple[int, int]] = Field(default_factory=dict)
    """Terminals and background commands by process, and how far each stream was read."""


class SojournSandboxSession(BaseSandboxSession):
    """The framework's view of a session; `session` is the session itself, once started."""

    state: SojournSandboxSessionState

    def __init__(self, state: SojournSandboxSessionState, connection: Connection) -> None:
        self.state = state
        self._connection = connection
        self._client: AsyncSojourn | None = None
        self._session: AsyncSession | None = None
        self._usable = False  # its workspace is there

    @property
    def session(self) -> AsyncSession:
        """The session, for what the framework does not know of. Raises WrongState before `start`
        and after `shutdown`."""
        if self._session is None:
            raise WrongState("the sandbox is not started", next_step="Call its `start` first.")
        return self._session

    # -- beginning and end

    async def _ensure_backend_started(self) -> None:
        if self._client is None:
            self._client = self._connection.open()
        self._session = await self._client.sessions.get(self.state.session)

    async def _prepare_backend_workspace(self) -> None:
        await self.session.files.mkdir(self.state.manifest.root)
        self._usable = True

    async def _after_start_failed(self) -> None:
        self._usable = False
        await self._disconnect()

    def _wrap_start_error(self, error: Exception) -> Exception:
        if isinstance(error, SojournError):
            return WorkspaceStartError(path=Path(self.state.manifest.root), cause=error)
        return error

    def _wrap_stop_error(self, error: Exception) -> Exception:
        if isinstance(error, SojournError):
            return WorkspaceStopError(path=Path(self.state.manifest.root), cause=error)
        return error

    async def running(self) -> bool:
        """Whether calls work: one that is put away wakes by itself."""
        if not self._usable:
            return False
        try:
            found = await self.session.refresh()
        except (SessionNotFound, Unreachable):
            return False
        return found.state in {"running", "paused", "suspended"}

    async def _shutdown_backend(self) -> None:
        self._usable = False
        try:
            if self._session is not None and self.state.on_exit == "suspend":
                await self._suspend()
        except SojournError as error:
            raise WorkspaceStopError(
                path=Path(self.state.manifest.root), cause=error, context={"code": error.code}
            ) from error
        finally:
            await self._disconnect()

    async def _suspend(self) -> None:
        """Put it away. Where its memory cannot be taken now it runs on, and its idle timeout
        tries again: ending its processes is nothing the end of a run should do."""
        try:
            if (await self.session.refresh()).state in {"running", "paused"}:
                await self.session.suspend()
        except SessionNotFound:
            return  # deleted meanwhile: there is nothing to put away
        except CaptureRefused:
            await self.session.snapshot(memory=False)

    async def _disconnect(self) -> None:
        client, self._client, self._session = self._client, None, None
        if client is not None:
            await client.close()

    # -- the framework's snapshots, which are the session's own

    def _should_compute_snapshot_fingerprint_on_persist(self) -> bool:
        return False  # snapshots are known by their ids

    async def persist_workspace(self) -> io.IOBase:
        """A reference to the present. Where the session stays, it is suspended for it: its memory
        is then taken once, not for a snapshot and again at the end."""
        try:
            if self.state.on_exit == "suspend":
                await self._suspend()
                head = (await self.session.refresh()).head
            else:
                head = (await self.session.snapshot()).id
        except SojournError as error:
            raise WorkspaceArchiveReadError(
                path=self._workspace_root_path(),
                cause=error,
                context={"code": error.code},
                retryable=_passing(error),
            ) from error
        told = json.dumps({"session": self.state.session, "snapshot": head})
        return io.BytesIO(_REFERENCE + told.encode())

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Go back to what a reference names; an archive of another sandbox is unpacked."""
        raw = data.read()
        reference = _reference(raw)
        root = self._workspace_root_path()
        try:
            if reference is None:
                await self._unpack(raw)
            elif reference["session"] != self.state.session:
                raise WrongState(f"the snapshot is one of session {reference['session']}")
            else:
                await self.session.rollback(reference["snapshot"])
        except (SojournError, UnsafeTarMemberError) as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error) from error

    async def _unpack(self, raw: bytes) -> None:
        validate_tar_bytes(raw, allow_external_symlink_targets=False)
        root = self._workspace_root_path().as_posix()
        command = ["tar", "-C", root, "--no-same-owner", "-xf", "-"]
        done = await self.session.exec(command, stdin=raw)
        if not done.ok:
            raise WrongState(f"tar ended with {done.exit_code}: {done.error_text[-2000:]}")

    async def _can_skip_snapshot_restore_on_resume(self, *, is_running: bool) -> bool:
        _ = is_running  # suspended is as good: its head is compared
        stream = await self.state.snapshot.restore(dependencies=self.dependencies)
        with contextlib.closing(stream):
            reference = _reference(stream.read())
        return reference == {"session": self.state.session, "snapshot": self.session.head}

    async def _restore_snapshot_into_workspace_on_resume(self) -> None:
        stream = await self.state.snapshot.restore(dependencies=self.dependencies)
        with contextlib.closing(stream):
            raw = stream.read()
        if _reference(raw) is None:
            await self._clear_workspace_root_on_resume()
        await self.hydrate_workspace(io.BytesIO(raw))
        self.state.terminals.clear()  # their numbers and offsets are of a time that is undone

    # -- commands

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    def _runtime_helpers(self) -> tuple[Any, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object:
        return self.state.session

    async def _place(self, command: tuple[str | Path, ...]) -> tuple[list[str], dict[str, Any]]:
        """A command as the session takes it: the framework names users by a prefix of sudo."""
        words = [str(word) for word in command]
        user: str | None = None
        if words[:2] == ["sudo", "-u"] and words[3:4] == ["--"]:
            user, words = words[2], words[4:]
        env = await self.state.manifest.environment.resolve()
        cwd = self.state.manifest.root if self._usable else None
        return words, {"env": env, "cwd": cwd, "user": user}

    async def _exec_internal(
        self, *command: str | Path, timeout: float | None = None
    ) -> ExecResult:
        words, place = await self._place(command)
        try:
            run = commands.Run(
                self.state.session, words, limit=OUTPUT_BYTES, timeout=timeout, **place
            )
            done = await commands.finish_async(self.session, run)
        except CommandNotStarted as error:
            # As a shell tells it.
            return ExecResult(stdout=b"", stderr=error.message.encode(), exit_code=127)
        except SojournError as error:
            _transport(command, error)
        if done.timed_out:
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        stderr = done.stderr
        if done.dropped:
            stderr += f"\n[{done.dropped} bytes of output were left out]\n".encode()
        return ExecResult(stdout=done.stdout, stderr=stderr, exit_code=done.exit_code)

    # -- terminals

    def supports_pty(self) -> bool:
        """Also ones that outlive this process."""
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a command that may go on; what it wrote so far."""
        words, place = await self._place(
            tuple(self._prepare_exec_command(*command, shell=shell, user=user))
        )
        try:
            process = await self.session.spawn(
                words, timeout=timeout, pty=_SIZE if tty else None, keep=TERMINAL_BYTES, **place
            )
        except SojournError as error:
            _transport(command, error)
        self.state.terminals[process.id] = (0, 0)
        await self._prune()
        wanted = 10_000 if yield_time_s is None else int(yield_time_s * 1000)
        return await self._update(process, clamp_pty_yield_time_ms(wanted), max_output_tokens)

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Type into a terminal, or with nothing to type look at it; what it wrote since."""
        if session_id not in self.state.terminals:
            raise PtySessionNotFoundError(session_id=session_id)
        try:
            process = await self.session.process(session_id)
            if chars:
                if not process.info.pty:
                    # The framework's tools know this error by its words.
                    raise RuntimeError("stdin is not available for this process")
                await self._type(process, chars)
        except ProcessNotFound as error:
            self.state.terminals.pop(session_id, None)
            raise PtySessionNotFoundError(session_id=session_id, cause=error) from error
        except SojournError as error:
            _transport(("write_stdin", str(session_id)), error)
        wanted = 250 if yield_time_s is None else int(yield_time_s * 1000)
        wanted = resolve_pty_write_yield_time_ms(yield_time_ms=wanted, input_empty=not chars)
        return await self._update(process, wanted, max_output_tokens)

    async def _type(self, process: AsyncProcess, chars: str) -> None:
        try:
            await process.write(chars.encode())
        except WrongState:
            return  # it has ended: its last output and exit code say so

    async def pty_terminate_all(self) -> None:
        """They go on with the session; where it is deleted, they end with it."""

    async def _prune(self) -> None:
        while len(self.state.terminals) > PTY_PROCESSES_MAX:
            oldest = next(iter(self.state.terminals))
            del self.state.terminals[oldest]
            with contextlib.suppress(ProcessNotFound):
                await (await self.session.process(oldest)).kill()

    async def _update(
        self, process: AsyncProcess, milliseconds: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        begin = self.state.terminals[process.id]
        reader = _Reader(process, begin)
        chunks: deque[bytes] = deque()
        try:
            output, tokens, closed = await collect_pty_output(
                output_chunks=chunks,
                output_lock=asyncio.Lock(),
                output_notify=asyncio.Event(),
                is_done=lambda: reader.ended,
                yield_time_ms=milliseconds,
                max_output_tokens=max_output_tokens,
                wait_for_output=lambda seconds: reader.next(seconds, chunks.append),
            )
            exit_code = (await process.refresh()).exit_code if closed else None
        except SojournError as error:
            _transport(("terminal", str(process.id)), error)
        # Bytes of a character that is not whole yet are left, to be read again with its rest.
        self.state.terminals[process.id] = reader.before(sum(map(len, chunks)))
        if exit_code is not None:
            del self.state.terminals[process.id]
        return PtyExecUpdate(
            process_id=process.id if exit_code is None else None,
            output=output,
            exit_code=exit_code,
            original_token_count=tokens,
        )

    # -- files

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """A file's bytes, exact; at most READ_BYTES of them."""
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        place = (await self._validate_path_access(path)).as_posix()
        held = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 (handed out)
        try:
            size = (await self.session.files.stat(place)).size
            _check_size(path, size)
            size = 0
            async for piece in self.session.files.stream(place):
                size += len(piece)
                _check_size(path, size)
                await asyncio.to_thread(held.write, piece)
            held.seek(0)
        except FileMissing as error:
            held.close()
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except SojournError as error:
            held.close()
            raise WorkspaceArchiveReadError(
                path=path, cause=error, retryable=_passing(error)
            ) from error
        except BaseException:
            held.close()
            raise
        return held

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        place = (await self._validate_path_access(path)).as_posix()
        try:
            return await self.session.files.read(place, length=max_bytes)
        except FileMissing as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Write a file whole: the former one is there until the new one is."""
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        place = await self._validate_path_access(path, for_write=True)
        stream = coerce_write_payload(path=path, data=data).stream
        owner = user.name if isinstance(user, User) else user
        try:
            await self.session.files.write(
                place.as_posix(), iter(lambda: stream.read(PIECE_BYTES), b""), user=owner
            )
        except SojournError as error:
            raise WorkspaceArchiveWriteError(
                path=place, cause=error, retryable=_passing(error)
            ) from error

    # -- ports

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            found = await self.session.expose(port)
        except SojournError as error:
            raise ExposedPortUnavailableError(
                port=port,
                exposed_ports=self.state.exposed_ports,
                reason="backend_unavailable",
                context={"backend": "sojourn", "code": error.code},
                cause=error,
                retryable=_passing(error),
            ) from error
        address = urlsplit(found.url or "")
        secure = address.scheme == "https"
        return ExposedPortEndpoint(
            host=address.hostname or "",
            port=address.port or (443 if secure else 80),
            tls=secure,
            query=urlencode({"sojourn_token": found.token}) if found.token else "",
        )


class _Reader:
    """Output of a process from where it was last read."""

    def __init__(self, process: AsyncProcess, offsets: tuple[int, int]) -> None:
        self._process = process
        self._offsets = list(offsets)
        self._last = 0
        self.ended = False

    def before(self, count: int) -> tuple[int, int]:
        """How far each stream was read, without the last `count` bytes."""
        offsets = list(self._offsets)
        offsets[self._last] -= count
        return offsets[0], offsets[1]

    async def next(self, seconds: float, keep: Callable[[bytes], object]) -> None:
        """Wait for the next piece, at most that long. What was dropped meanwhile is passed over."""
        try:
            async with asyncio.timeout(seconds):
                pieces = self._process.output((self._offsets[0], self._offsets[1]))
                async with contextlib.aclosing(cast(AsyncGenerator[Output, None], pieces)) as held:
                    async for piece in held:
                        self._last = piece.stream - 1
                        self._offsets[self._last] = piece.offset + len(piece.data)
                        keep(piece.data)
                        return
                self.ended = True
        except TimeoutError:
            return  # nothing came
        except OutputTruncated:
            info = (await self._process.refresh()).info
            for number, (first, _) in enumerate((info.stdout, info.stderr)):
                self._offsets[number] = max(self._offsets[number], first)


def _reference(raw: bytes) -> dict[str, str] | None:
    """The snapshot that the framework's archive names, if it is one of ours."""
    if not raw.startswith(_REFERENCE):
        return None
    found = json.loads(raw[len(_REFERENCE) :])
    return {"session": str(found["session"]), "snapshot": str(found["snapshot"])}


def _passing(error: SojournError) -> bool:
    """Whether trying again can help."""
    return isinstance(error, (Unreachable, SessionBusy))


def _transport(command: tuple[str | Path, ...], error: SojournError) -> NoReturn:
    raise ExecTransportError(
        command=command,
        message=str(error),
        context={"code": error.code},
        cause=error,
        # The framework falls back to running it once more where it may: never for what may have
        # begun. Only a busy session is known not to have started it.
        retryable=isinstance(error, SessionBusy),
    ) from error


def _check_size(path: Path, size: int) -> None:
    if size > READ_BYTES:
        raise WorkspaceArchiveReadError(
            path=path, context={"reason": "too_large", "limit": READ_BYTES}
        )
