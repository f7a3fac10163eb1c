"""Carrying requests over blocking sockets.

Guarantee: thread-safe; a connection that fails becomes an error of the tree, and a request is
repeated only where `core.retry_delay` says that this does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import httpcore

from sojourn.client import core
from sojourn.client.core_commands import Source
from sojourn.client.origin import FAILURES, NOT_SENT, Origin, http_request
from sojourn.client.streams import JoiningBackend
from sojourn.errors import SojournError

T = TypeVar("T")

PIECE = 256 * 1024


class Transport:
    """Sends requests to one server over a pool of connections."""

    def __init__(self, address: core.Address) -> None:
        self._origin = Origin(address)
        self._pool = httpcore.ConnectionPool(
            max_connections=1000,
            max_keepalive_connections=50,
            keepalive_expiry=30.0,
            network_backend=JoiningBackend(),
        )

    @property
    def url(self) -> str:
        """The server's address."""
        return self._origin.url

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def run(self, plan: core.Plan[T]) -> T:
        """Carry out a plan and give its result."""
        try:
            request = next(plan)
            while True:
                request = plan.send(self.send(request))
        except StopIteration as done:
            result: T = done.value
            return result

    def send(self, request: core.Request) -> core.Response:
        """Send one request and read its whole answer."""
        attempt = moved = 0
        while True:
            response = self._open(request, attempt)
            try:
                whole = core.Response(response.status, response.read())
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
                response.close()
            time.sleep(delay)

    def stream(self, source: Source[T]) -> Iterator[T]:
        """The items of a stream, taken up again when the connection is lost."""
        attempt = 0
        while True:
            response = self._open(source.request(), 0)
            lost: Exception = EOFError("the connection was closed")
            try:
                if response.status >= 400:
                    raise core.error_of(response.status, response.read())
                try:
                    for chunk in response.iter_stream():
                        for item in source.feed(chunk):
                            attempt = 0
                            yield item
                except FAILURES as error:
                    lost = error
                if source.ended():
                    return
            finally:
                response.close()
            if not source.take_up():
                raise core.cut_off(lost) from lost
            time.sleep(core.RETRY_DELAYS[min(attempt, len(core.RETRY_DELAYS) - 1)])
            attempt += 1

    def content(
        self, request: core.Request, headers: dict[str, str] | None = None
    ) -> Iterator[bytes]:
        """The bytes of one answer as they come; its headers are put into `headers` before."""
        response = self._open(request, 0)
        try:
            if response.status >= 400:
                raise core.error_of(response.status, response.read())
            if headers is not None:
                for name, value in response.headers:
                    headers[name.decode("latin-1").lower()] = value.decode("latin-1")
            try:
                yield from response.iter_stream()
            except FAILURES as error:
                raise core.cut_off(error) from error
        finally:
            response.close()

    def _open(self, request: core.Request, attempt: int) -> httpcore.Response:
        """Send a request and read the head of its answer."""
        while True:
            try:
                return self._pool.handle_request(http_request(self._origin, request))
            except FAILURES as error:
                sent = not isinstance(error, NOT_SENT)
                delay = core.retry_delay(request, attempt, sent=sent)
                if delay is None:
                    raise core.unreachable(self.url, error, sent=sent) from error
            time.sleep(delay)
            attempt += 1


def content_of(data: Any) -> bytes | Iterable[bytes]:
    """What a caller gives as data, as request content: bytes, text, an open binary file, or an
    iterable of bytes."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    if hasattr(data, "read"):
        return _file_chunks(data)
    if isinstance(data, Iterable):
        return data
    raise SojournError(f"{type(data).__name__} is not data", next_step="Give bytes or a file.")


def _file_chunks(file: Any) -> Iterator[bytes]:
    read = getattr(file, "read1", file.read)  # what is there now, not only full pieces
    while chunk := read(PIECE):
        yield chunk.encode() if isinstance(chunk, str) else chunk
