"""A backend of LangChain's deepagents in a durable session.

Guarantee: what the agent's tools do (`execute`, `read_file`, `edit_file`, ...) happens in one
session, which outlives the agent, this process and the sandbox it is in. File contents are exact
bytes; exit codes are the command's own; both streams are in one text, in the order they were
written. The session is suspended by `close` and deleted only by `destroy`.

    backend = SojournSandbox.open("research")
    agent = create_deep_agent(model=model, backend=backend)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from deepagents.backends.protocol import (
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

from sojourn.adapters import commands
from sojourn.client import Session, Sojourn
from sojourn.errors import (
    FileConflict,
    FileMissing,
    Forbidden,
    NameTaken,
    PathInvalid,
    SessionNotFound,
    SojournError,
)
from sojourn.wire.api import SnapshotInfo

OUTPUT_BYTES = 8 * 1024 * 1024
"""How much of a command's output is kept; the framework puts long ones into files by itself."""
DOWNLOAD_BYTES = 256 * 1024 * 1024
TIMEOUT_SECONDS = 1800.0

_READABLE = 0o444


class SojournSandbox(BaseSandbox):
    """A session as a sandbox backend; `session` is the session itself."""

    def __init__(
        self,
        session: Session,
        *,
        timeout: float | None = TIMEOUT_SECONDS,
        output_bytes: int = OUTPUT_BYTES,
        download_bytes: int = DOWNLOAD_BYTES,
        client: Sojourn | None = None,
    ) -> None:
        """On a session that is there. `timeout` is for commands that name none. A `client` given
        here is closed with this."""
        self.session = session
        self._destroyed = False
        self._client = client
        self._timeout = timeout
        self._output_bytes = output_bytes
        self._download_bytes = download_bytes

    @classmethod
    def open(
        cls,
        name: str,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout: float | None = TIMEOUT_SECONDS,
        labels: Mapping[str, str] | None = None,
        **create: Any,
    ) -> SojournSandbox:
        """The session of this name, made (with `create`, as `sessions.create` takes it) when there
        is none. Raises Unreachable, Unauthenticated and what `create` raises."""
        client = Sojourn(url, token)
        try:
            try:
                session = client.sessions.get(name)
            except SessionNotFound:
                try:
                    session = client.sessions.create(
                        name=name, labels=commands.labels("deepagents", labels), **create
                    )
                except NameTaken:
                    session = client.sessions.get(name)  # made by another at the same moment
        except BaseException:
            client.close()
            raise
        return cls(session, timeout=timeout, client=client)

    def __enter__(self) -> SojournSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Suspend the session, with its processes, and close the connection if it was made here;
        of one that was destroyed nothing is left to do. Raises CaptureRefused where a process holds
        what no snapshot can; the session runs on."""
        try:
            if not self._destroyed and self.session.refresh().state in {"running", "paused"}:
                self.session.suspend()
        finally:
            self._disconnect()

    def destroy(self) -> None:
        """Delete the session and all that is in it."""
        try:
            self.session.delete()
            self._destroyed = True
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()

    # -- what the framework does not know of

    def snapshot(self, label: str | None = None) -> SnapshotInfo:
        """Keep the present, to go back to or fork from."""
        return self.session.snapshot(label)

    def rollback(self, snapshot: str | SnapshotInfo) -> None:
        """Go back: files and processes. Files that the agent was told of may be gone."""
        self.session.rollback(snapshot)

    def fork(self, n: int = 1, snapshot: str | SnapshotInfo | None = None) -> list[SojournSandbox]:
        """`n` backends that each go on alone from here, or from a snapshot. They share this one's
        connection: close them before it."""
        return [
            SojournSandbox(
                child,
                timeout=self._timeout,
                output_bytes=self._output_bytes,
                download_bytes=self._download_bytes,
            )
            for child in self.session.fork(n, snapshot)
        ]

    # -- what the framework asks for

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    def _run(self, command: str, timeout: float | None) -> commands.Run:
        # The framework says 0 for no limit.
        seconds = self._timeout if timeout is None else timeout or None
        return commands.Run(
            self.session.id, commands.merged(command), limit=self._output_bytes, timeout=seconds
        )

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell command; it wakes a session that is put away."""
        return _answer(commands.finish(self.session, self._run(command, timeout)))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """As `execute`; a task that is cancelled has its command killed."""
        run = self._run(command, timeout)
        try:
            return _answer(await asyncio.to_thread(commands.finish, self.session, run))
        except asyncio.CancelledError:
            await asyncio.to_thread(commands.kill, self.session, run)
            raise

    def write(self, file_path: str, content: str) -> WriteResult:
        """Write a file whole, in the place of one that is there; its parents are made."""
        error = self._upload(file_path, content.encode("utf-8", "surrogatepass"))
        if error is not None:
            return WriteResult(error=f"Failed to write file '{file_path}': {error}")
        return WriteResult(path=file_path)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        """As `write`."""
        return await asyncio.to_thread(self.write, file_path, content)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files whole, in order; each fails by itself."""
        return [FileUploadResponse(path, self._upload(path, data)) for path, data in files]

    def _upload(self, path: str, data: bytes) -> str | None:
        try:
            self.session.files.write(path, data)
        except SojournError as error:
            return _reason(error)
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files whole, in order; each fails by itself."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        try:
            info = self.session.files.stat(path)
            if info.type == "dir":
                return FileDownloadResponse(path, error="is_directory")
            if not info.mode & _READABLE:
                # The server could read it; who took the right from everybody did not mean that.
                return FileDownloadResponse(path, error="permission_denied")
            if info.size > self._download_bytes:
                return FileDownloadResponse(path, error=self._too_large(info.size))
            # One byte more: a file that grows under way is told as too large, not cut.
            data = self.session.files.read(path, length=self._download_bytes + 1)
        except SojournError as error:
            return FileDownloadResponse(path, error=_reason(error))
        if len(data) > self._download_bytes:
            return FileDownloadResponse(path, error=self._too_large(len(data)))
        return FileDownloadResponse(path, content=data)

    def _too_large(self, size: int) -> str:
        return (
            f"too_large: {size} bytes, {self._download_bytes} at most are read at once;"
            " session.files.stream or session.files.download takes files of any size"
        )


def _answer(outcome: commands.Outcome) -> ExecuteResponse:
    output = commands.text(outcome.stdout)
    if outcome.timed_out or outcome.reason:
        why = "its timeout" if outcome.timed_out else outcome.reason
        output += f"\n[killed: {why}]"
    return ExecuteResponse(output, outcome.exit_code, truncated=bool(outcome.dropped))


def _reason(error: SojournError) -> str:
    """An error as one of the framework's words, or as it is."""
    if isinstance(error, FileMissing):
        return "file_not_found"
    if isinstance(error, PathInvalid):
        return "invalid_path"
    if isinstance(error, FileConflict):
        return "is_directory"
    if isinstance(error, Forbidden):
        return "permission_denied"
    return str(error)
