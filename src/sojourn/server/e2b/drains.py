"""Output that nobody reads.

Guarantee: commands are started so that none of their output is lost to a slow reader, which holds
them back instead; here is read and dropped what has no reader, so that none is held back for ever:
after its client left, after a pause, and after a restart of the server.
"""

from __future__ import annotations

import asyncio
import logging

from sojourn.errors import Interrupted, OutputTruncated, SojournError
from sojourn.server.base import Principal, SessionService
from sojourn.wire.guest import ProcessState

log = logging.getLogger(__name__)

TAG = "e2b:"
"""Before the tag a client gave; processes of others are left to them."""


class Drains:
    """Reads what nobody reads, by session and process."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._readers: dict[tuple[str, int], int] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def stop(self) -> None:
        """Read nothing more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def attended(self, session: str, process: int) -> None:
        """Somebody reads it now."""
        key = (session, process)
        self._readers[key] = self._readers.get(key, 0) + 1
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def left(
        self,
        who: Principal,
        session: str,
        process: int,
        offsets: tuple[int, int],
        *,
        ended: bool,
    ) -> None:
        """A reader has gone, at these offsets."""
        key = (session, process)
        left = self._readers.get(key, 1) - 1
        if left > 0:
            self._readers[key] = left
            return
        self._readers.pop(key, None)
        if not ended:
            self._drain(who, key, offsets)

    async def resume(self, who: Principal, session: str) -> None:
        """Take up again what was read of a session's commands before a pause or a restart."""
        for state in await self._service.processes(who, session):
            key = (session, state.id)
            if self._unread(state) and key not in self._readers and key not in self._tasks:
                self._drain(who, key, (state.out[1], state.err[1]))

    def _unread(self, state: ProcessState) -> bool:
        return state.running and state.tag.startswith(TAG)

    def _drain(self, who: Principal, key: tuple[str, int], offsets: tuple[int, int]) -> None:
        if key not in self._tasks:
            task = asyncio.create_task(self._read(who, key, offsets), name=f"drain {key}")
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _read(self, who: Principal, key: tuple[str, int], offsets: tuple[int, int]) -> None:
        session, process = key
        try:
            info = await self._service.get(who, session)
            if info.state != "running":
                return  # it is taken up again when it is woken
            try:
                async for _ in self._service.output(who, session, process, offsets):
                    pass
            except OutputTruncated:
                log.debug("output of process %d of %s is gone already", process, session)
        except Interrupted:
            return  # put away: it is taken up again when it is woken
        except SojournError as error:
            log.debug("nobody reads process %d of %s: %s", process, session, error)
