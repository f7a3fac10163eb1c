"""A process of a session, asynchronous.

Guarantee: output can be read again from any offset still kept; a lost connection is taken up
again where it broke.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from sojourn.client import core_commands
from sojourn.client.async_transport import AsyncTransport, content_of
from sojourn.client.core import WAIT_SECONDS
from sojourn.wire.api import ProcessInfo
from sojourn.wire.guest import Output


class AsyncProcess:
    """A process of a session, running or ended."""

    def __init__(self, transport: AsyncTransport, session: str, info: ProcessInfo) -> None:
        self._transport = transport
        self._session = session
        self.info = info

    @property
    def id(self) -> int:
        """Its id in the API."""
        return self.info.id

    @property
    def pid(self) -> int:
        """Its process number inside the session."""
        return self.info.pid

    @property
    def running(self) -> bool:
        """Whether it ran when last asked (`refresh`, `wait`)."""
        return self.info.running

    @property
    def exit_code(self) -> int | None:
        """Its exit code when last asked, 128 + signal for a death by signal, None if running."""
        return self.info.exit_code

    async def refresh(self) -> AsyncProcess:
        """Ask anew. Raises ProcessNotFound."""
        self.info = await self._transport.run(core_commands.process(self._session, self.id))
        return self

    async def output(
        self, offset: int | tuple[int, int] = 0, *, follow: bool = True
    ) -> AsyncIterator[Output]:
        """Its output from `offset` (of both streams, or one for each) on, as pieces with
        `stream` (1 stdout or terminal, 2 stderr), `offset` and `data`, until its end; without
        `follow` up to what is there now. Raises OutputTruncated, ProcessNotFound, Interrupted."""
        offsets = (offset, offset) if isinstance(offset, int) else offset
        source = core_commands.FrameSource(
            self._session, process=self.id, offsets=offsets, follow=follow
        )
        async for item in self._transport.stream(source):
            if isinstance(item, Output):
                yield item

    async def wait(self, timeout: float | None = None) -> ProcessInfo:
        """Wait for its end, at most `timeout` seconds. Raises TimeoutError, ProcessNotFound."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SECONDS if end is None else max(end - time.monotonic(), 0.0)
            self.info = await self._transport.run(
                core_commands.wait_once(self._session, self.id, min(left, WAIT_SECONDS))
            )
            if not self.info.running:
                return self.info
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"process {self.id} runs on after {timeout} s")

    async def write(self, data: Any, *, eof: bool = False) -> None:
        """Write bytes, text, an open file or an iterable of bytes, of any size, to its standard
        input, as fast as it reads; `eof` closes it after that. Raises ProcessNotFound."""
        await self._transport.run(
            core_commands.write(self._session, self.id, content_of(data), eof=eof)
        )

    async def close_stdin(self) -> None:
        """Close its standard input."""
        await self._transport.run(core_commands.close_stdin(self._session, self.id))

    async def signal(self, signal: int | str, *, group: bool = True) -> None:
        """Send a signal, by number or name, to its group or to it alone."""
        await self._transport.run(
            core_commands.send_signal(self._session, self.id, signal, group=group)
        )

    async def kill(self) -> None:
        """Kill its whole group (SIGKILL)."""
        await self.signal("KILL")

    async def resize(self, rows: int, columns: int) -> None:
        """Resize its terminal."""
        await self._transport.run(core_commands.resize(self._session, self.id, rows, columns))
