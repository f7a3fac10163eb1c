"""A listener of its own for probes and scrapes: /health, /ready and /metrics, plain HTTP.

Guarantee: it answers nothing else, needs no token and holds no connection for long; so it belongs
on an address that only the machine or the cluster reaches. It answers while the event loop does:
that is what a liveness probe wants to know.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from sojourn.server.listening import listen
from sojourn.telemetry import scraping

_MOST_HEAD = 16 << 10
_SECONDS = 15.0


@contextlib.asynccontextmanager
async def health_listener(
    address: str | None, ready: Callable[[], bool] = lambda: True
) -> AsyncIterator[str | None]:
    """Listen at HOST:PORT (port 0 takes a free one) and give its URL; without an address not.
    `ready` says whether requests should come here now. Raises InvalidRequest."""
    if address is None:
        yield None
        return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                    answer = await _answer(head, ready)
                except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    answer = _plain(400, b"no request")
                writer.write(answer)
                await writer.drain()
        writer.close()

    found, url = listen(address)
    server = await asyncio.start_server(serve, sock=found, limit=_MOST_HEAD)
    async with server:
        yield url


async def _answer(head: bytes, ready: Callable[[], bool]) -> bytes:
    line, *lines = head.split(b"\r\n")
    words = line.split()
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return _plain(405, b"only GET is answered")
    path = words[1].partition(b"?")[0]
    if path == b"/health":
        return _plain(200, b"ok", words[0])
    if path == b"/ready":
        there = ready()
        return _plain(200 if there else 503, b"ready" if there else b"not ready", words[0])
    if path != b"/metrics":
        return _plain(404, b"there are /health, /ready and /metrics")
    accept = b",".join(
        value
        for name, _, value in (one.partition(b":") for one in lines)
        if name.lower() == b"accept"
    )
    body, content_type = await scraping.scrape(accept.decode("latin-1"))
    return _plain(200, body, words[0], content_type.encode())


def _plain(
    status: int, body: bytes, method: bytes = b"GET", content_type: bytes = b"text/plain"
) -> bytes:
    head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    text = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 405: b"Method Not Allowed"}
    named = text.get(status, b"Service Unavailable")
    return head % (status, named, content_type, len(body)) + (b"" if method == b"HEAD" else body)
