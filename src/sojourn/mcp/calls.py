"""One call of a tool: its session, its progress, and what ends with it.

Guarantee: a call that is cancelled leaves no command running that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

import anyio

from sojourn.client.async_session import AsyncSession
from sojourn.client.async_transport import AsyncTransport
from sojourn.errors import InvalidRequest
from sojourn.mcp.own_sessions import OwnSession, Sessions
from sojourn.mcp.texts import Outputs

T = TypeVar("T")

PROGRESS_SECONDS = 2.0

Report = Callable[[float, float | None, str | None], Awaitable[None]]


@contextlib.asynccontextmanager
async def closing(pieces: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """A stream that may not be read to its end; its connection is given back."""
    try:
        yield pieces
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


class Call:
    """What a tool works with."""

    def __init__(
        self,
        sessions: Sessions,
        outputs: Outputs,
        own: Callable[[], OwnSession],
        report: Report,
    ) -> None:
        self._sessions = sessions
        self._own = own
        self._report = report
        self.outputs = outputs
        self.server = sessions.server
        self.settings = sessions.settings

    @property
    def transport(self) -> AsyncTransport:
        """A transport to the server."""
        return self.server.transport()

    def is_own(self, session_id: str) -> bool:
        """Whether a session is this connection's own one."""
        try:
            return self._own().id == session_id
        except InvalidRequest:
            return False

    async def session(self, ref: str | None, *, make: bool = False) -> AsyncSession:
        """The session a call names, else the connection's own one; `make` it if there is none.
        Raises SessionNotFound."""
        if ref is not None:
            return await self.server.sessions().get(ref)
        own = self._own()
        self._sessions.uses(own)
        return await own.get(make=make)

    async def finish(
        self, work: Awaitable[T], what: str, on_cancel: Callable[[asyncio.Task[T]], Awaitable[None]]
    ) -> T:
        """Wait for work, telling of its progress. When the call is cancelled `on_cancel` is given
        the time to end what the work started."""

        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        began = time.monotonic()
        try:
            while True:
                await asyncio.wait({task}, timeout=PROGRESS_SECONDS)
                if task.done():
                    return task.result()
                passed = time.monotonic() - began
                await self._report(passed, None, f"{what} for {passed:.0f} s")
        finally:
            if not task.done():
                with anyio.CancelScope(shield=True):
                    await on_cancel(task)
                    task.cancel()
                    await asyncio.wait({task})
