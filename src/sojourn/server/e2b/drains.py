"""Output that nobody reads.

Guarantee: commands are started so that none of their output is lost to a slow reader, which holds
them back instead; here is read and dropped what has no reader, so that none is held back for long:
after its client left, after a pause however it ended, and after a restart of the server. That keeps
no session awake.
"""

from __future__ import annotations

import asyncio
import logging

from sojourn.errors import Interrupted, OutputTruncated, SessionNotFound, SojournError
from sojourn.server.base import Principal, SessionService
from sojourn.wire.guest import ProcessState

log = logging.getLogger(__name__)

TAG = "e2b:"
"""Before the tag a client gave; processes of others are left to them."""
_LOOK_SECONDS = 2.0


class Drains:
    """Reads what nobody reads, by session and process."""

    def __init__(self, service: SessionService) -> None:
        self._service = service
        self._readers: dict[tuple[str, int], int] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        # In which placement the commands of a session were last looked at (0: not yet).
        self._watched: dict[str, tuple[Principal, int]] = {}

    async def stop(self) -> None:
        """Read nothing more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, who: Principal, session: str) -> None:
        """It may have commands: they are looked at each time it begins to run."""
        self._watched.setdefault(session, (who, 0))

    async def run(self) -> None:
        """Look for sessions that something else than a client of E2B's has woken."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for session, (who, epoch) in list(self._watched.items()):
                try:
                    state, now = await self._service.standing(who, session)
                    if state == "running" and now != epoch:
                        await self.resume(who, session, now)
                except SessionNotFound:
                    self._watched.pop(session, None)
                except SojournError as error:
                    log.debug("commands of %s are not looked at: %s", session, error)

    # -- readers ----------------------------------------------------------------------------

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

    async def resume(self, who: Principal, session: str, epoch: int) -> None:
        """Take up again what was read of a session's commands before it was put away, or before
        the server was started."""
        self._watched[session] = (who, epoch)
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
            await self._service.discard_output(who, session, process, offsets)
        except Interrupted:
            return  # put away: it is taken up again when it is woken
        except OutputTruncated as error:
            # Gone already, so there is something to go on from.
            log.debug("output of process %d of %s is gone: %s", process, session, error)
        except SojournError as error:
            log.debug("nobody reads process %d of %s: %s", process, session, error)
