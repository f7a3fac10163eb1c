"""Carrying requests over asynchronous sockets.

Guarantee: safe to share between the tasks of one event loop; a connection that fails becomes an
error of the tree, and a request is repeated only where `core.retry_delay` says that this does no
harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, TypeVar

import httpcore

from sojourn.client import core
from sojourn.client.core_commands import Source
from sojourn.client.origin import FAILURES, NOT_SENT, Origin, http_request
from sojourn.client.streams import AsyncJoiningBackend
from sojourn.client.transport import content_of as blocking_content_of

T = TypeVar("T")


class AsyncTransport:
    """Sends requests to one server over a pool of connections."""

    def __init__(self, address: core.Address) -> None:
        self._origin = Origin(address)
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=1000,
            max_keepalive_connections=50,
            keepalive_expiry=30.0,
            network_backend=AsyncJoiningBackend(),
        )

    @property
    def url(self) -> str:
        """The server's address."""
        return self._origin.url

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def run(self, plan: core.Plan[T]) -> T:
        """Carry out a plan and give its result."""
        try:
            request = next(plan)
            while True:
                request = plan.send(await self.send(request))
        except StopIteration as done:
            result: T = done.value
            return result

    async def send(self, request: core.Request) -> core.Response:
        """Send one request and read its whole answer."""
        attempt = moved = 0
        while True:
            response = await self._open(request, attempt)
            try:
                whole = core.Response(response.status, await response.aread())
                delay = core.moved_delay(request, whole, moved)
                if delay is None:
                    return whole
                moved += 1
            except FAILURES as error:
                delay = core.retry_delay(request, attempt, sent=True)
                if delay is None:
                    raise core.unreachable(self.url, error, sent=True) from error
                attempt += 1
            finally:
                await response.aclose()
            await asyncio.sleep(delay)

    async def stream(self, source: Source[T]) -> AsyncIterator[T]:
        """The items of a stream, taken up again when the connection is lost."""
        attempt = 0
        while True:
            response = await self._open(source.request(), 0)
            lost: Exception = EOFError("the connection was closed")
            try:
                if response.status >= 400:
                    raise core.error_of(response.status, await response.aread())
                try:
                    async for chunk in response.aiter_stream():
                        for item in source.feed(chunk):
                            attempt = 0
                            yield item
                except FAILURES as error:
                    lost = error
                if source.ended():
                    return
            finally:
                await response.aclose()
            if not source.take_up():
                raise core.cut_off(lost) from lost
            await asyncio.sleep(core.RETRY_DELAYS[min(attempt, len(core.RETRY_DELAYS) - 1)])
            attempt += 1

    async def content(
        self, request: core.Request, headers: dict[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes of one answer as they come; its headers are put into `headers` before."""
        response = await self._open(request, 0)
        try:
            if response.status >= 400:
                raise core.error_of(response.status, await response.aread())
            if headers is not None:
                for name, value in response.headers:
                    headers[name.decode("latin-1").lower()] = value.decode("latin-1")
            try:
                async for chunk in response.aiter_stream():
                    yield chunk
            except FAILURES as error:
                raise core.cut_off(error) from error
        finally:
            await response.aclose()

    async def _open(self, request: core.Request, attempt: int) -> httpcore.Response:
        """Send a request and read the head of its answer."""
        while True:
            try:
                return await self._pool.handle_async_request(http_request(self._origin, request))
            except FAILURES as error:
                sent = not isinstance(error, NOT_SENT)
                delay = core.retry_delay(request, attempt, sent=sent)
                if delay is None:
                    raise core.unreachable(self.url, error, sent=sent) from error
            await asyncio.sleep(delay)
            attempt += 1


def content_of(data: Any) -> bytes | AsyncIterable[bytes]:
    """What a caller gives as data, as request content: bytes, text, an open binary file, or a
    plain or asynchronous iterable of bytes. Files and plain iterables are read in a thread."""
    if isinstance(data, AsyncIterable):
        return data
    content = blocking_content_of(data)
    return content if isinstance(content, bytes) else in_thread(content)


async def in_thread(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """A blocking iterable's items, each waited for in a thread."""
    iterator = iter(pieces)
    end = object()
    while True:
        piece: Any = await asyncio.to_thread(next, iterator, end)
        if piece is end:
            return
        yield piece
