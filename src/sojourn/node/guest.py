"""The node's view of the supervisor inside a sandbox; each transport implements it once.

Guarantee: every call either takes effect exactly once or raises; calls in flight and open streams
survive a `detach`/`attach` pair (freeze, snapshot) without a lost or doubled byte, because streams
carry offsets and the supervisor answers a repeated request from its record.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from typing import Protocol

from sojourn.wire.frames import Feature
from sojourn.wire.guest import (
    GuestActivity,
    OpenUnlinked,
    Output,
    ProcessSpec,
    ProcessState,
    Reach,
    Stat,
    WatchEvent,
)


class Guest(Protocol):
    """What can be asked of a running sandbox."""

    # -- link -------------------------------------------------------------------------------
    async def detach(self, deadline: float) -> None:
        """Finish short requests, then have the supervisor drop its connection, so that nothing of
        the host is attached. New calls wait until `attach`. Long waits and streams are parked.
        Raises SandboxLost when the supervisor does not answer within `deadline` seconds."""

    async def attach(self, deadline: float) -> None:
        """Accept the supervisor's connection (again); parked calls go on. Raises SandboxLost."""

    async def interrupt(self, reason: str, *, moved: bool = False) -> None:
        """End all parked and running calls with Interrupted (suspend, rollback, delete). `moved`,
        among its details, says that the session goes on elsewhere: they can be asked again."""

    async def close(self) -> None:
        """Drop the link for good."""

    def give_up(self, cause: str) -> None:
        """The sandbox is known to be gone: whoever waits, for an answer or in `attach`, raises
        SandboxLost with the cause."""

    @property
    def attached(self) -> bool:
        """Whether the supervisor is connected now."""

    @property
    def lost(self) -> str | None:
        """Why the supervisor counts as lost: it did not come back, or owed answers for longer than
        any load explains. All that waited has raised SandboxLost. None where it is not."""

    @property
    def features(self) -> Feature:
        """What the supervisor of this sandbox can do, as of the last attach. A sandbox that was
        restored from an image of before a feature lacks it."""

    @property
    def interrupts(self) -> int:
        """How often `interrupt` was called: streams opened before the last time do not go on."""

    # -- processes --------------------------------------------------------------------------
    async def start(self, spec: ProcessSpec) -> ProcessState:
        """Start a command. Raises CommandNotStarted with the cause (ENOENT, EACCES, user, cwd)."""

    async def shell(self) -> bytes | None:
        """The shell for commands given as text (/bin/bash, else /bin/sh); asked for once, then
        remembered. None when the template has none."""

    async def process(self, process: int) -> ProcessState:
        """One process as it stands. Raises ProcessNotFound."""

    async def wait(self, process: int) -> ProcessState:
        """Wait for its end. Raises ProcessNotFound."""

    async def run(self, spec: ProcessSpec) -> tuple[ProcessState, list[Output]]:
        """Start, collect all output, wait: one round trip each way.

        Without `spec.lossless` the oldest bytes beyond `spec.keep` are dropped, as offsets show.
        With it nothing is ever dropped: once more than about 1 MiB is pending, the answer comes
        early with the process still running (`state.running`), and the caller goes on with
        `output` from the offsets reached; the process is held back meanwhile."""

    def output(self, process: int, offsets: tuple[int, int] = (0, 0)) -> AsyncIterator[Output]:
        """All output from the offsets (stdout, stderr) on, until the end of the process and of
        its streams. Raises ProcessNotFound, OutputTruncated."""

    async def write(self, process: int, data: bytes) -> None:
        """Write to stdin; returns when the supervisor has taken it (flow control)."""

    async def close_stdin(self, process: int) -> None:
        """End of input."""

    async def signal(self, process: int, signal: int, *, group: bool = True) -> None:
        """Send a signal to the process or its whole group."""

    async def resize(self, process: int, rows: int, columns: int) -> None:
        """Resize its terminal."""

    async def processes(self) -> list[ProcessState]:
        """All processes the supervisor knows, ended ones as long as they are kept."""

    async def forget(self, process: int) -> None:
        """Drop an ended process and its kept output."""

    # -- files ------------------------------------------------------------------------------
    async def stat(self, path: bytes, *, follow: bool = True) -> Stat: ...

    async def list(self, path: bytes) -> builtins.list[Stat]:
        """Entries of a directory, sorted by name."""

    def walk(self, path: bytes) -> AsyncIterator[Stat]:
        """The tree below, parents before children, links not followed."""

    def read(self, path: bytes, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """A regular file's bytes, in pieces; memory use is bounded whatever its size."""

    async def write_file(
        self,
        path: bytes,
        data: AsyncIterator[bytes] | bytes,
        *,
        mode: int | None = None,
        user: str | None = None,
        append: bool = False,
        parents: bool = True,
    ) -> Stat:
        """Write a file. Without `append` it is replaced whole or not at all (temporary file in the
        same directory, then rename; a symlink at `path` is followed to its target first)."""

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = True) -> None: ...

    async def remove(self, path: bytes, *, recursive: bool = False) -> None: ...

    async def move(self, source: bytes, target: bytes) -> None: ...

    async def chmod(self, path: bytes, mode: int) -> None: ...

    async def chown(self, path: bytes, uid: int, gid: int, *, follow: bool = False) -> None: ...

    async def utime(self, path: bytes, mtime_ns: int) -> None: ...

    async def symlink(self, target: bytes, path: bytes) -> None: ...

    async def link(self, existing: bytes, path: bytes) -> None: ...

    async def mknod(self, path: bytes, type: str, mode: int, rdev: int = 0) -> None: ...

    def watch(self, path: bytes, *, recursive: bool = False) -> AsyncIterator[WatchEvent]: ...

    # -- network ----------------------------------------------------------------------------
    async def network(self, on: bool) -> Reach:
        """Let connections of the session out as tunnels to `net.sock` in the control directory, or
        no longer; those that are open are reset then. Tells what is served now. Idempotent.
        Raises Unsupported where the supervisor has no tunnels."""

    async def dial(self, token: bytes, port: int) -> None:
        """Have a connection to a port inside opened; it comes as a tunnel of kind INBOUND with
        this token (16 bytes), which is opened before this returns. Works whether or not the
        network is on. Raises Conflict (details.errno) when nothing answers at the port,
        QuotaExceeded with too many tunnels, Unsupported where the supervisor has no tunnels."""

    # -- state ------------------------------------------------------------------------------
    async def activity(self) -> GuestActivity: ...

    async def unlinked(self, *, maps: bool = False) -> builtins.list[OpenUnlinked]: ...

    async def sync(self) -> None:
        """Flush file systems inside."""

    async def refresh(self, *, generation: str, hostname: str | None = None) -> None:
        """After a restore: write the new generation id to /run/sojourn/generation, reseed what the
        supervisor holds, set the host name."""
