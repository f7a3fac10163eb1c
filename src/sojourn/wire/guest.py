"""Values exchanged with the supervisor inside a sandbox.

Bytes stay bytes: paths, arguments and output may hold anything. Paths are absolute inside the
session. Times are nanoseconds since 1970.
"""

from __future__ import annotations

import enum

import msgspec


class Reach(enum.StrEnum):
    """How connections of a session get to the gateway."""

    OFF = "off"
    PROXY = "proxy"  # only by the proxy at 127.0.0.1:3128
    TRANSPARENT = "transparent"  # every connection by itself; names are answered


class ProcessSpec(msgspec.Struct, frozen=True):
    """A command to start.

    `env` is added to the session's environment. `user` is a name or number of the sandbox's
    /etc/passwd (None: the session's user). `timeout` in seconds kills the whole group (SIGKILL).
    `stdin`: "null" (empty), "pipe" (written later, ended by EOF) or "inline" with `input`.
    `pty`: (rows, columns) for a terminal, where stdout and stderr are one stream.
    `keep` bytes of each output stream are kept for later reads; with `lossless` the process is
    held back instead of dropping bytes nobody has read.
    """

    argv: list[bytes]
    env: dict[bytes, bytes] = {}
    cwd: bytes | None = None
    user: str | None = None
    timeout: float | None = None
    stdin: str = "null"
    input: bytes = b""
    pty: tuple[int, int] | None = None
    keep: int = 8 * 1024 * 1024
    lossless: bool = False
    tag: str = ""


class ProcessState(msgspec.Struct, frozen=True):
    """A process the supervisor started, running or ended.

    `id` is unique for the life of the session's memory; `pid` is the process id inside.
    `exit_code` for a normal end, `signal` for a death by signal, `timed_out` when the timeout
    killed it, `reason` when the supervisor ended it for a limit.
    `out` and `err` are (first kept offset, next offset) of the streams.
    """

    id: int
    pid: int
    argv: list[bytes]
    tag: str
    pty: bool
    started_ns: int
    ended_ns: int | None
    exit_code: int | None
    signal: int | None
    timed_out: bool
    reason: str | None
    out: tuple[int, int]
    err: tuple[int, int]

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.ended_ns is None


class Output(msgspec.Struct, frozen=True):
    """A piece of output: `stream` 1 (stdout or terminal) or 2 (stderr), at byte `offset`."""

    stream: int
    offset: int
    data: bytes


class Stat(msgspec.Struct, frozen=True):
    """One file. `type` is file, dir, symlink, fifo, socket, char or block; `mode` has 12 bits."""

    path: bytes
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    inode: int
    nlink: int
    rdev: int = 0
    target: bytes | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """A change under a watched directory: created, modified, removed, renamed_from, renamed_to,
    attributes, or overflow (events were lost: list again)."""

    kind: str
    path: bytes
    is_dir: bool


class GuestActivity(msgspec.Struct, frozen=True):
    """What tells whether something changed in memory since last asked.

    `started` counts processes ever started, `ended` those ended, `alive` live guest processes
    besides the supervisor, `tmpfs` a hash over names, sizes and times of the memory file systems
    and over the numbers of the living processes (None when there is too much to look through
    cheaply: assume a change).
    """

    started: int
    ended: int
    alive: int
    tmpfs: int | None


class OpenUnlinked(msgspec.Struct, frozen=True):
    """A file in use inside that has lost its name on a non-memory file system. Without `fd` it is
    a working directory, a running program or a map."""

    pid: int
    fd: int | None
    path: bytes
    command: bytes
