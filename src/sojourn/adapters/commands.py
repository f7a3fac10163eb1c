"""Commands of adapters: run to their end, with a bounded part of their output kept.

Guarantee: exit codes are the command's own and kept bytes are exact. However much a command writes,
it is read to its end, so that it ends as it would, while this process holds `limit` bytes of each
stream at most. A command whose caller goes away is killed with its whole group: nobody would hear
of it any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.client import core_commands
from sojourn.client.async_session import AsyncSession
from sojourn.client.core_commands import Command, FrameSource
from sojourn.client.sync_session import Session
from sojourn.errors import Interrupted, SojournError
from sojourn.wire import stream
from sojourn.wire.guest import Output

MERGED = 'exec "$(command -v bash || command -v sh)" -c "$1" 2>&1'
"""For `sh -c`: a shell command with both its streams in one, in the order it wrote."""


class Outcome(msgspec.Struct, frozen=True):
    """How a command ended and what is kept of its output; `dropped` bytes of it are not."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    dropped: int
    signal: int | None
    timed_out: bool
    reason: str | None
    process: int


class Run:
    """One command under way: what is kept of its output, its process once it is known."""

    def __init__(
        self,
        session: str,
        command: Command,
        *,
        limit: int,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
    ) -> None:
        self.process: int | None = None
        self.source: FrameSource = core_commands.exec_source(
            session,
            command,
            timeout=timeout,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin,
            on_start=self._on_start,
        )
        self._limit = limit
        self._kept = (bytearray(), bytearray())
        self._dropped = 0
        self._end: stream.Ended | None = None

    def _on_start(self, process: int) -> None:
        self.process = process

    def take(self, item: Output | stream.Ended) -> None:
        """One item of the source."""
        if isinstance(item, stream.Ended):
            self._end = item
            return
        kept = self._kept[item.stream - 1]
        taken = item.data[: self._limit - len(kept)]
        kept += taken
        self._dropped += len(item.data) - len(taken)

    def outcome(self) -> Outcome:
        """What came of it. Raises Interrupted when its end was not heard."""
        end = self._end
        if end is None or end.exit_code is None:
            raise Interrupted("the stream ended before the command did")
        return Outcome(
            exit_code=end.exit_code,
            stdout=bytes(self._kept[0]),
            stderr=bytes(self._kept[1]),
            dropped=self._dropped,
            signal=end.signal,
            timed_out=end.timed_out,
            reason=end.reason,
            process=end.process,
        )


def finish(session: Session, run: Run) -> Outcome:
    """Run it to its end, blocking. Raises what `Session.exec` raises."""
    try:
        for item in session._transport.stream(run.source):
            run.take(item)
    except SojournError:
        raise
    except BaseException:
        kill(session, run)
        raise
    return run.outcome()


def kill(session: Session, run: Run) -> None:
    """Kill it with its group, if it has been heard of."""
    if run.process is not None:
        # Ended meanwhile, or its server is gone: there is nothing left to kill from here.
        with contextlib.suppress(SojournError):
            session.process(run.process).kill()


async def finish_async(session: AsyncSession, run: Run) -> Outcome:
    """Run it to its end. Raises what `AsyncSession.exec` raises."""
    try:
        async for item in session._transport.stream(run.source):
            run.take(item)
    except SojournError:
        raise
    except BaseException:
        if run.process is not None:
            with contextlib.suppress(SojournError):  # as in `kill`
                await (await session.process(run.process)).kill()
        raise
    return run.outcome()


def text(data: bytes) -> str:
    """Output as text; bytes that are not UTF-8 become U+FFFD."""
    return data.decode("utf-8", "replace")


def merged(command: str) -> list[str]:
    """A shell command as arguments, with its streams in one."""
    return ["/bin/sh", "-c", MERGED, "sh", command]


def labels(framework: str, given: Mapping[str, str] | None) -> dict[str, Any]:
    """The labels of a session that an adapter makes."""
    return {"made-by": framework, **(given or {})}
