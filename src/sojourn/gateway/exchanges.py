"""One HTTP request on its way out, and its answer on the way in.

Guarantee: bodies stream, in both directions at the same time; an answer that breaks off does not
look whole, and no value of a secret is in what is passed on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence

import h11

from sojourn.gateway.answers import Refused, unreached
from sojourn.gateway.heads import HOP, NOT_IN_TRAILERS, named_by_connection
from sojourn.gateway.records import Record
from sojourn.gateway.secrets import Headers, Placed
from sojourn.gateway.splicing import splice
from sojourn.gateway.streams import Connection, Reset, Stream

_BODYLESS = (204, 304)
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_PIECE = 64 << 10
Event = (
    h11.Request
    | h11.Response
    | h11.InformationalResponse
    | h11.Data
    | h11.EndOfMessage
    | h11.ConnectionClosed
)


class Exchange:
    """One request and its answer, once it may leave."""

    def __init__(
        self,
        guest: Stream,
        guest_http: h11.Connection,
        outside: Connection,
        outside_http: h11.Connection,
        placed: Placed,
        record: Record,
    ) -> None:
        self._guest, self._guest_http = guest, guest_http
        self._outside, self._outside_http = outside, outside_http
        self._scrubber = placed.scrubber
        self._record = record
        self._answered = False
        self._method = b""

    async def run(self, head: h11.Request) -> None:
        """Raises Refused while nothing was answered yet, else ConnectionError."""
        self._method = head.method
        sending = asyncio.ensure_future(self._send(head))
        try:
            await self._answer(sending)
        except (ConnectionError, TimeoutError, h11.ProtocolError) as error:
            if self._answered:
                # What has been passed on must not look whole.
                raise Reset("the answer broke off") from None
            raise Refused(
                502,
                "upstream_failed",
                _why(error),
                "Try again if the request may be repeated.",
            ) from None
        finally:
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, head: h11.Request) -> None:
        try:
            await self._write_outside(self._outside_http.send(head))
            while True:
                event = await self._next(self._guest_http, self._guest)
                if isinstance(event, h11.Data):
                    self._record.request_bytes += len(event.data)
                    await self._write_outside(self._outside_http.send(event))
                elif isinstance(event, h11.EndOfMessage):
                    headers = [
                        pair for pair in event.headers if pair[0].lower() not in NOT_IN_TRAILERS
                    ]
                    end = h11.EndOfMessage(headers=headers)
                    await self._write_outside(self._outside_http.send(end))
                    return
                else:
                    raise Reset("the request broke off")
        except (ConnectionError, TimeoutError, h11.ProtocolError):
            # The server may have answered before it took all, so the answer is waited for; a
            # request that breaks off on this side is not to look whole on the other.
            if self._guest_http.their_state is not h11.DONE and not self._outside.over:
                self._outside.reset()

    async def _write_outside(self, data: bytes | None) -> None:
        if data:
            await self._outside.write(data)

    async def _answer(self, sending: asyncio.Future[None]) -> None:
        while True:
            event = await self._next(self._outside_http, self._outside)
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    await sending
                    await self._switch(event)
                    return
                if self._guest_http.their_http_version != b"1.0":
                    await self._write_guest(
                        h11.InformationalResponse(
                            status_code=event.status_code, headers=self._incoming(event.headers)
                        )
                    )
            elif isinstance(event, h11.Response):
                await self._body(event)
                return
            else:
                raise Reset("the server closed the connection without an answer")

    async def _body(self, response: h11.Response) -> None:
        self._record.status = response.status_code
        scrubber = self._scrubber
        headers = self._incoming(response.headers)
        decoder = None
        if scrubber is not None and not self._has_no_body(response):
            headers, decoder = _searchable(headers)
        self._answered = True
        await self._write_guest(
            h11.Response(
                status_code=response.status_code,
                headers=headers,
                reason=self._clean(bytes(response.reason)),
            )
        )
        while True:
            event = await self._next(self._outside_http, self._outside)
            if isinstance(event, h11.Data):
                self._record.response_bytes += len(event.data)
                for data in decoder.feed(bytes(event.data)) if decoder else (bytes(event.data),):
                    cleaned = data if scrubber is None else scrubber.feed(data)
                    if cleaned:
                        await self._write_guest(h11.Data(data=cleaned))
            elif isinstance(event, h11.EndOfMessage):
                if decoder is not None:
                    decoder.check_end()
                rest = b"" if scrubber is None else scrubber.last()
                if rest:
                    await self._write_guest(h11.Data(data=rest))
                trailers = [
                    pair for pair in event.headers if pair[0].lower() not in NOT_IN_TRAILERS
                ]
                await self._write_guest(h11.EndOfMessage(headers=self._clean_headers(trailers)))
                return
            else:
                raise Reset("the answer broke off")

    async def _switch(self, event: h11.InformationalResponse) -> None:
        self._record.status = 101
        self._answered = True
        headers = self._clean_headers(
            [pair for pair in event.headers if pair[0].lower() not in HOP]
        )
        headers += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        await self._write_guest(h11.InformationalResponse(status_code=101, headers=headers))
        self._guest.unread(self._guest_http.trailing_data[0])
        self._outside.unread(self._outside_http.trailing_data[0])
        await splice(self._guest, self._outside, self._record, scrubber=self._scrubber)

    def _has_no_body(self, response: h11.Response) -> bool:
        return self._method == b"HEAD" or response.status_code in _BODYLESS

    def _incoming(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        dropped = HOP | named_by_connection(headers)
        if any(key == b"transfer-encoding" for key, _ in headers):
            # Of two lengths the encoding counted; the other one would be passed on as the truth.
            dropped |= {b"content-length"}
        return self._clean_headers([pair for pair in headers if pair[0] not in dropped])

    def _clean_headers(self, headers: Headers) -> Headers:
        scrubber = self._scrubber
        if scrubber is None:
            return headers
        return [
            (key, scrubber.whole(value)) for key, value in headers if not scrubber.named_in(key)
        ]

    def _clean(self, data: bytes) -> bytes:
        return data if self._scrubber is None else self._scrubber.whole(data)

    async def _write_guest(
        self, event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
    ) -> None:
        data = self._guest_http.send(event)
        if data:
            await self._guest.write(data)

    @staticmethod
    async def _next(http: h11.Connection, stream: Stream) -> Event:
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.read())
            elif event is h11.PAUSED:
                raise Reset("bytes follow where none may")
            else:
                assert isinstance(event, Event)
                return event


class _Decoder:
    """Opens a body that was compressed although it was asked not to be."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of at most 64 KiB, one at a time, so that a small body that becomes a large one is
        never held whole."""
        full = False
        while data or full:
            if self._zlib.eof:
                # Files of gzip may stand one behind another, and are one body.
                self._zlib = zlib.decompressobj(_GZIP_OR_ZLIB)
            try:
                piece = self._zlib.decompress(data, _PIECE)
            except zlib.error:
                raise Reset("a compressed answer is damaged") from None
            data = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail
            # With a piece as large as it may be, more may be ready without further input.
            full = len(piece) == _PIECE and not self._zlib.eof
            if piece:
                yield piece

    def check_end(self) -> None:
        """Raises Reset when it is not whole."""
        if not self._zlib.eof:
            raise Reset("a compressed answer is cut off")


def _searchable(headers: Headers) -> tuple[Headers, _Decoder | None]:
    """Headers of a body that will be searched and changed. Raises Refused."""
    encodings = [value.strip().lower() for key, value in headers if key == b"content-encoding"]
    decoder = None
    if encodings and encodings != [b"identity"]:
        if encodings in ([b"gzip"], [b"x-gzip"], [b"deflate"]):
            decoder = _Decoder()
        else:
            raise unreached("the server compresses an answer that may hold a secret")
    dropped = {b"content-length", b"content-encoding", b"content-md5", b"digest", b"repr-digest"}
    return [pair for pair in headers if pair[0].lower() not in dropped], decoder


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the server sent nothing for too long"
    if isinstance(error, h11.ProtocolError):
        return "the server's answer is no HTTP/1.1"
    return str(error) or "the server closed the connection"
