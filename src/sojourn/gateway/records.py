"""What left a session, told to the server.

Guarantee: nothing that cannot be taken back leaves before the server has put it on record, so a
crash at any moment leaves a record too many at worst, never one too few.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Protocol

import msgspec

from sojourn.errors import SojournError
from sojourn.gateway.messages import Began, Ended, Withheld
from sojourn.model.network import Effect, lasting

log = logging.getLogger(__name__)

ACKNOWLEDGED_SECONDS = 10
# RFC 9110 section 9.2.2
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
_LONGEST_PATH = 2048
_MOST_UNTOLD = 256


class NotRecorded(Exception):
    """The server did not put it on record, so it must not leave."""


class Server(Protocol):
    """What records are told to."""

    async def request(self, body: Began | Ended | Withheld) -> None:
        """Returns when it is on record. Raises SojournError."""


def idempotent(method: str) -> bool:
    """Whether a request may be repeated without a further effect."""
    return method in _IDEMPOTENT


class Record:
    """One effect under way; what changes is set on it, and `end` tells it."""

    def __init__(self, recorder: Recorder, effect: Effect) -> None:
        self._recorder = recorder
        self._effect = effect
        self._over = False
        self.status: int | None = None
        self.request_bytes = self.response_bytes = 0

    async def begin(self) -> None:
        """Return once it may leave. Raises NotRecorded."""
        await self._recorder.ready()
        if lasting(self._effect):
            await self._recorder.begin(self._effect)

    def end(self, outcome: str) -> None:
        """Tell how it ended; only the first time counts."""
        if self._over:
            return
        self._over = True
        self._recorder.end(
            msgspec.structs.replace(
                self._effect,
                ended_at=time.time(),
                status=self.status,
                request_bytes=self.request_bytes,
                response_bytes=self.response_bytes,
                outcome=outcome,
            )
        )


class Recorder:
    """Makes records for one sandbox."""

    def __init__(self, server: Server, session: str, sandbox: str, epoch: int) -> None:
        self._server = server
        self.session, self.sandbox, self.epoch = session, sandbox, epoch
        self._tasks: set[asyncio.Task[None]] = set()

    def new(
        self,
        *,
        kind: str,
        host: str,
        port: int,
        rule: str,
        method: str = "",
        scheme: str = "",
        path: str = "",
        secrets_used: list[str] | None = None,
    ) -> Record:
        """A record of what is about to leave; it is told by `begin` or `end`."""
        return Record(
            self,
            Effect(
                id=f"eff_{secrets.token_hex(12)}",
                session=self.session,
                sandbox=self.sandbox,
                epoch=self.epoch,
                kind=kind,
                method=method,
                scheme=scheme,
                host=host,
                port=port,
                path=path[:_LONGEST_PATH],
                idempotent=kind == "http" and idempotent(method),
                rule=rule,
                secrets=secrets_used or [],
                began_at=time.time(),
            ),
        )

    async def ready(self) -> None:
        """Until the server has taken most of what was told. Raises NotRecorded."""
        if len(self._tasks) < _MOST_UNTOLD:
            return
        try:
            async with asyncio.timeout(ACKNOWLEDGED_SECONDS):
                while len(self._tasks) >= _MOST_UNTOLD:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            raise NotRecorded("the server takes no records") from error

    async def begin(self, effect: Effect) -> None:
        """Have the server put it on record. Raises NotRecorded."""
        try:
            async with asyncio.timeout(ACKNOWLEDGED_SECONDS):
                await self._server.request(Began(effect))
        except (TimeoutError, SojournError) as error:
            raise NotRecorded("the server did not put it on record") from error

    def end(self, effect: Effect) -> None:
        """Tell how it ended, while others go on."""
        self.tell(Ended(effect))

    def tell(self, body: Ended | Withheld) -> None:
        """Tell the server, while others go on."""
        task = asyncio.get_running_loop().create_task(self._tell(body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, body: Ended | Withheld) -> None:
        try:
            await self._server.request(body)
        except SojournError as error:
            # The server marks what it knows as open when it starts this process anew.
            told = f"how {body.effect.id} ended" if isinstance(body, Ended) else "what was refused"
            log.warning("%s is not on record: %s", told, error)
