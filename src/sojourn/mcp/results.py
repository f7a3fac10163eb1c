"""What each tool gives.

Guarantee: every result is one of these, told to the client as the tool's output schema. A field
that has nothing to say is left out. Nothing here carries the environment of a session, which may
hold secrets.
"""

from __future__ import annotations

import datetime

import msgspec

from sojourn.mcp.texts import UTF8, Encoding
from sojourn.wire import api


class Result(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all."""


class SessionResult(Result, frozen=True, kw_only=True):
    """A session. `own` marks the one that is used when none is named."""

    session: str
    state: str
    template: str
    created: str
    name: str | None = None
    head: str | None = None
    forked_from: str | None = None
    cause: str | None = None
    own: bool = False


class SessionsResult(Result, frozen=True, kw_only=True):
    """Sessions, the newest first. `more` says that there are others."""

    sessions: list[SessionResult]
    more: bool = False


class Done(Result, frozen=True, kw_only=True):
    """It was done."""

    session: str
    done: str


class ExecResult(Result, frozen=True, kw_only=True):
    """How a command ended. Output in the middle of a long stream is left out with a mark; `output`
    is then what exec_output takes. A background process has no exit code yet."""

    session: str
    process: int
    stdout: str
    stderr: str
    exit_code: int | None = None
    stdout_encoding: Encoding = UTF8
    stderr_encoding: Encoding = UTF8
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    timed_out: bool = False
    killed_because: str | None = None
    seconds: float | None = None
    output: str | None = None
    next_step: str | None = None


class CodeResult(Result, frozen=True, kw_only=True):
    """What code gave. `value` is the repr of its last expression; `error` an exception it raised.
    `restarted`: the interpreter is a fresh one, earlier variables are gone."""

    session: str
    stdout: str
    stderr: str
    value: str | None = None
    error: str | None = None
    traceback: str | None = None
    images: int = 0
    restarted: bool = False
    output: str | None = None
    next_step: str | None = None


class OutputResult(Result, frozen=True, kw_only=True):
    """A part of a stream, exactly. `next_offset` is where to go on; without it this is its end."""

    text: str
    encoding: Encoding
    offset: int
    size: int
    next_offset: int | None = None


class ProcessOutputResult(OutputResult, frozen=True, kw_only=True):
    """The same of a process, and how that stands."""

    running: bool
    exit_code: int | None = None
    timed_out: bool = False


class ProcessResult(Result, frozen=True, kw_only=True):
    """A process of a session."""

    process: int
    command: str
    running: bool
    started: str
    exit_code: int | None = None


class ProcessesResult(Result, frozen=True, kw_only=True):
    """Processes, the newest first."""

    session: str
    processes: list[ProcessResult]
    left_out: int = 0


class FileReadResult(Result, frozen=True, kw_only=True):
    """A part of a file, exactly. `next_offset` is where to go on; without it this is its end."""

    path: str
    content: str
    encoding: Encoding
    offset: int
    size: int
    next_offset: int | None = None


class FileResult(Result, frozen=True, kw_only=True):
    """A file. `path_base64` gives the exact name of one that is not UTF-8."""

    path: str
    type: str
    size: int
    mode: str
    target: str | None = None
    path_base64: str | None = None


class FilesResult(Result, frozen=True, kw_only=True):
    """The entries of a directory, by name. `left_out` of them were too many to tell."""

    path: str
    entries: list[FileResult]
    left_out: int = 0


class RollbackResult(SessionResult, frozen=True, kw_only=True):
    """The session, and requests to the outside since the snapshot, which are not taken back."""

    not_taken_back: list[str] = []


class AllowedResult(Result, frozen=True, kw_only=True):
    """Domains or networks that are let through; without ports: those of the web."""

    name: str
    targets: list[str]
    ports: list[int] = []


class NetworkResult(Result, frozen=True, kw_only=True):
    """What a session reaches: none, only what is allowed (allowlist), or open. `secrets` names
    those that are put into its requests outside."""

    session: str
    mode: str
    allowed: list[AllowedResult] = []
    secrets: list[str] = []


class SnapshotResult(Result, frozen=True, kw_only=True):
    """A snapshot. `memory`: processes go on from it, not only files."""

    snapshot: str
    kind: str
    created: str
    memory: bool
    label: str | None = None
    parent: str | None = None
    current: bool = False


class HistoryResult(Result, frozen=True, kw_only=True):
    """Snapshots, the newest first. `left_out` older ones were too many to tell."""

    session: str
    snapshots: list[SnapshotResult]
    left_out: int = 0


class ForkResult(Result, frozen=True, kw_only=True):
    """New sessions, and requests to the outside since the snapshot, which are not taken back."""

    sessions: list[SessionResult]
    not_taken_back: list[str] = []


class ChangeResult(Result, frozen=True, kw_only=True):
    """One difference: added, changed or removed, and what about it (content, mode, ...)."""

    path: str
    kind: str
    what: list[str] = []


class DiffResult(Result, frozen=True, kw_only=True):
    """Differences of the files. `left_out` of them were too many to tell."""

    before: str
    after: str
    changes: list[ChangeResult]
    text: dict[str, str] = {}
    left_out: int = 0
    more: bool = False


def moment(at: float) -> str:
    """A time as text, in UTC."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="seconds")


def session_result(info: api.SessionInfo, *, own: bool = False) -> SessionResult:
    """A session as it is told."""
    return SessionResult(
        session=info.id,
        name=info.name,
        state=info.state,
        template=info.template,
        created=moment(info.created_at),
        head=info.head,
        forked_from=info.forked_from,
        cause=info.cause,
        own=own,
    )


def snapshot_result(info: api.SnapshotInfo) -> SnapshotResult:
    """A snapshot as it is told."""
    return SnapshotResult(
        snapshot=info.id,
        label=info.label,
        kind=info.kind,
        created=moment(info.created_at),
        memory=info.memory,
        parent=info.parent,
        current=info.current,
    )
