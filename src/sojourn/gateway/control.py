"""The channel between the server and the gateway process: requests in both directions.

Guarantee: each request is answered once, or fails when the channel ends; requests that came in are
begun in their order. Neither side has more than a bounded number of requests that nobody answered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable

import msgspec

from sojourn.errors import SojournError, Unreachable, from_body, to_body
from sojourn.gateway.messages import (
    MAX_FRAME,
    Answer,
    Attach,
    Began,
    Detach,
    Ended,
    Envelope,
    Start,
    Withheld,
)

log = logging.getLogger(__name__)

Request = Start | Attach | Detach | Began | Ended | Withheld
_LENGTH = struct.Struct(">I")
_MOST_UNANSWERED = 4096
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


class Control:
    """One end of the channel. `asked` does what the other side asks for; what it raises is the
    answer. Used from within the event loop it was opened in."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asked: Callable[[Request], Awaitable[None]],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._asked = asked
        self._next = 1
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._slots = asyncio.Semaphore(_MOST_UNANSWERED)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def open(cls, end: socket.socket, asked: Callable[[Request], Awaitable[None]]) -> Control:
        """Take over one end of a stream socket pair."""
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, asked)

    async def serve(self) -> None:
        """Answer and pass answers on, until the other side is gone."""
        try:
            while (envelope := await self._read()) is not None:
                if isinstance(envelope.body, Answer):
                    waiting = self._waiting.pop(-envelope.id, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(envelope.body)
                else:
                    task = asyncio.get_running_loop().create_task(
                        self._answer(envelope.id, envelope.body)
                    )
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        finally:
            self.close()

    def close(self) -> None:
        """End it; whoever waits for an answer is told. Idempotent."""
        self._closed = True
        self._writer.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(Unreachable("the other process is gone"))
                future.exception()  # told also where nobody waits any more

    async def request(self, body: Request) -> None:
        """Ask, and wait for the answer. Raises what the other side raised, Unreachable."""
        async with self._slots:
            number, future = self._send(body)
            try:
                answer = await future
            finally:
                self._waiting.pop(number, None)
        if answer.error is not None:
            raise from_body(answer.error)

    def _send(self, body: Request) -> tuple[int, asyncio.Future[Answer]]:
        if self._closed:
            raise Unreachable("the other process is gone")
        number = self._next
        self._next += 1
        self._write(Envelope(number, body))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        return number, future

    async def _answer(self, number: int, body: Request) -> None:
        error: SojournError | None = None
        try:
            await self._asked(body)
        except SojournError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001
            # The other side gets an answer whatever happened here. The type alone is told: the
            # text of an error may hold what was asked, and with it a secret.
            log.error("a fault while answering %s: %s", type(body).__name__, type(failure).__name__)
            error = SojournError(f"a fault in the gateway: {type(failure).__name__}")
        if not self._closed:
            self._write(Envelope(-number, Answer(None if error is None else to_body(error))))

    def _write(self, envelope: Envelope) -> None:
        payload = _encode(envelope)
        if len(payload) > MAX_FRAME:
            raise SojournError(f"a message of {len(payload)} bytes is over the limit")
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def _read(self) -> Envelope | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME:
                log.error("the other process sent a frame of %d bytes", length)
                return None
            return _decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.DecodeError:
            log.error("the other process sent what is no message")
            return None
