"""Answers of the HTTP API, written straight to ASGI.

Guarantee: an answer is either complete, or visibly cut off; a stream is answered in one piece when
it is over quickly, so that a short command costs one round trip, and otherwise shows a sign of
life at least every HEARTBEAT_SECONDS. A client that leaves ends the work behind its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

from sojourn.errors import Interrupted, SojournError, to_body
from sojourn.model import new_id
from sojourn.wire import stream as frames

HEARTBEAT_SECONDS = 15.0
FIRST_PIECE_SECONDS = 0.02
"""How long a stream may stay silent before its head is sent."""
ONE_PIECE_BYTES = 256 * 1024

_JSON = (b"content-type", b"application/json")
_json = msgspec.json.Encoder()
_log = logging.getLogger(__name__)


class Answer:
    """A whole answer: status, headers, body."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = self.headers
        if self.status != 204:
            headers = [*headers, (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def json_answer(value: Any, status: int = 200) -> Answer:
    """A value of the API's schemas as JSON."""
    return Answer(status, _json.encode(value), [_JSON])


def empty_answer() -> Answer:
    """Done, with nothing to tell."""
    return Answer(204, b"", [])


def internal_error(error: BaseException) -> SojournError:
    """Log an unforeseen failure under an id, and give what a caller may know of it."""
    name = new_id("err")
    _log.error("internal error %s", name, exc_info=error)
    return SojournError(f"internal error {name}", id=name)


def error_answer(
    error: SojournError, status: int | None = None, headers: list[tuple[bytes, bytes]] | None = None
) -> Answer:
    """A failure as its body and status."""
    body = msgspec.json.encode(to_body(error), enc_hook=repr)
    return Answer(status or error.status, body, [_JSON, *(headers or [])])


class Shutdown:
    """Ends long answers when the server stops.

    Long work enters `cancellable`; `begin` cancels it, and the work sees Interrupted instead.
    `again` says that it can be taken up at the same address at once, since something in front of
    this server finds where: clients do that by themselves then.
    """

    def __init__(self, *, again: bool = False) -> None:
        self.stopping = False
        self._again = again
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Raises Interrupted inside when the server stops."""
        task = asyncio.current_task()
        assert task is not None  # only tasks serve requests
        if self.stopping:
            raise self._interrupted()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            task.uncancel()
            raise self._interrupted() from None
        finally:
            self._tasks.discard(task)

    def _interrupted(self) -> Interrupted:
        error = Interrupted("the server is stopping")
        if self._again:
            error.details["moved"] = True
        return error

    def begin(self) -> None:
        """Stop: ends what is under way and refuses new long work."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()


class StreamAnswer:
    """An answer whose pieces come over time.

    The head is held back for FIRST_PIECE_SECONDS or ONE_PIECE_BYTES: an error before that gets its
    own status, a stream that ends before that is one answer with a length.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        shutdown: Shutdown,
        *,
        media_type: bytes = frames.MEDIA_TYPE.encode(),
        heartbeat: bytes = frames.HEARTBEAT,
        encode_error: Callable[[SojournError], bytes] = frames.encode_error,
        at_once: bool = False,
    ) -> None:
        self._pieces = pieces
        self._shutdown = shutdown
        self._media_type = media_type
        self._heartbeat = heartbeat
        self._encode_error = encode_error
        self._at_once = at_once
        self._held: list[bytes] = []
        self._writing = asyncio.Lock()  # between the stream itself and its companion
        self._started = False
        self._left = False
        self._idle = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None  # handlers always run in a task
        try:
            await self._answer(task, scope, receive, send)
        except asyncio.CancelledError:
            if not self._left:
                raise
            task.uncancel()

    async def _answer(
        self, task: asyncio.Task[Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        companion: asyncio.Task[None] | None = None

        def begin_companion() -> None:
            nonlocal companion
            companion = loop.create_task(self._accompany(task, receive, send))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(0 if self._at_once else FIRST_PIECE_SECONDS, begin_companion)
        try:
            with self._shutdown.cancellable():
                await self._forward(send)
        except SojournError as error:
            if not self._started:
                raise
            await self._write(send, self._encode_error(error))
        except Exception as error:
            if not self._started:
                raise
            await self._write(send, self._encode_error(internal_error(error)))
        finally:
            timer.cancel()
            if companion is not None:
                async with self._writing:
                    companion.cancel()
            if isinstance(self._pieces, AsyncGenerator):
                await self._pieces.aclose()
        if self._started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            headers = [(b"content-type", self._media_type)]
            await Answer(200, b"".join(self._held), headers)(scope, receive, send)

    async def _forward(self, send: Send) -> None:
        size = 0
        async for piece in self._pieces:
            if self._started:
                await self._write(send, piece)
                continue
            self._held.append(piece)
            size += len(piece)
            if size > ONE_PIECE_BYTES:
                await self._start(send)

    async def _write(self, send: Send, piece: bytes) -> None:
        async with self._writing:
            self._idle = False
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _start(self, send: Send) -> None:
        async with self._writing:
            if self._started:
                return
            headers = [(b"content-type", self._media_type), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._started = True
            held, self._held = self._held, []
            for piece in held:
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _accompany(self, task: asyncio.Task[Any], receive: Receive, send: Send) -> None:
        """Send the head and heartbeats, and end the stream when the client leaves."""
        await self._start(send)
        while True:
            self._idle = True
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    message = await receive()
            except TimeoutError:
                if self._idle:
                    await self._write(send, self._heartbeat)
                continue
            if message["type"] == "http.disconnect":
                self._left = True
                task.cancel()
                return


class Head(msgspec.Struct, frozen=True):
    """Status and headers of an answer whose content follows."""

    status: int
    headers: list[tuple[bytes, bytes]]


class DownloadAnswer:
    """Bytes of any size. `source` gives a Head first, then the bytes.

    A failure before the head is an error answer. After it the connection is cut before the
    promised end, which no client takes for a whole answer.
    """

    def __init__(self, source: AsyncGenerator[Head | bytes, None], shutdown: Shutdown) -> None:
        self._source = source
        self._shutdown = shutdown
        self._left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None  # only tasks serve requests
        watch: asyncio.Task[None] | None = None

        def begin_watch() -> None:
            nonlocal watch
            watch = loop.create_task(self._watch(task, receive))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(FIRST_PIECE_SECONDS, begin_watch)
        started = False
        try:
            with self._shutdown.cancellable():
                async for item in self._source:
                    if isinstance(item, Head):
                        await send(
                            {
                                "type": "http.response.start",
                                "status": item.status,
                                "headers": item.headers,
                            }
                        )
                        started = True
                    elif item:
                        await send({"type": "http.response.body", "body": item, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except SojournError as error:
            if not started:
                raise
            _log.warning("a download was cut off: %s", error)
        except asyncio.CancelledError:
            if not self._left:
                raise
            task.uncancel()
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()
            await self._source.aclose()

    async def _watch(self, task: asyncio.Task[Any], receive: Receive) -> None:
        """End the work when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        task.cancel()
