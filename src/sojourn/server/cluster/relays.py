"""HTTP for exposed ports: one client's connection, carried request by request to the nodes that
hold the sessions it asks for.

Guarantee: each request goes to the node of the session that it names, also where one connection
names several; it is written anew from what was understood, with the client's address as seen here.
Whether whoever asks may get in, the node decides. Bodies pass both ways as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import h11
import msgspec

from sojourn.errors import (
    InvalidRequest,
    NodeUnavailable,
    PortNotFound,
    SojournError,
    to_body,
)
from sojourn.gateway import port_requests as requests
from sojourn.gateway.heads import HOP, named_by_connection
from sojourn.gateway.port_requests import Headers
from sojourn.server.splicing import IDLE_SECONDS, Streams, splice

log = logging.getLogger(__name__)

MAX_HEAD = 64 << 10
HEAD_SECONDS = 15.0
KEEP_ALIVE_SECONDS = 75.0
ANSWER_SECONDS = 660.0
REACH_SECONDS = 45.0
_AGAIN_SECONDS = 0.25
_PIECE = 64 << 10

Dial = Callable[[str], Awaitable[tuple[str, Callable[[], Awaitable[Streams]]]]]
"""For a session: the node it is at, and what opens a tunnel there."""

_UNKNOWN = PortNotFound(
    "nothing is exposed at this address, or not to you",
    next_step="Check the address and its token.",
)


class _Tunnel:
    """A tunnel over which HTTP is spoken with a node."""

    def __init__(self, node: str, streams: Streams) -> None:
        self.node = node
        self.reader, self.writer = streams
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

    async def send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        data = self.http.send(event)
        if data:
            self.writer.write(data)
            await self.writer.drain()

    async def event(self, seconds: float) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            async with asyncio.timeout(seconds):
                data = await self.reader.read(_PIECE)
            if not data and self.http.their_state is h11.SEND_RESPONSE:
                raise ConnectionError("the node ended the connection without an answer")
            self.http.receive_data(data)

    def again(self) -> bool:
        """Make ready for another request; whether it can take one."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        if self.reader.at_eof() or self.writer.is_closing():
            return False
        self.http.start_next_cycle()
        return not self.http.trailing_data[0]

    def close(self) -> None:
        self.writer.transport.abort()


class Relay:
    """One connection of a client."""

    def __init__(self, streams: Streams, address: str, domain: str, dial: Dial) -> None:
        self._reader, self._writer = streams
        self._address = address
        self._domain = domain
        self._dial = dial
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._tunnel: _Tunnel | None = None

    async def serve(self) -> None:
        """All its requests; its connection is closed then."""
        try:
            while await self._request():
                self._http.start_next_cycle()
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(HEAD_SECONDS):
                    await self._writer.wait_closed()
        except (OSError, EOFError, TimeoutError, h11.ProtocolError) as error:
            # What is cut off must not look whole, also where the end of a connection is an end.
            log.debug("a connection to an exposed port broke: %s", error)
        finally:
            self._drop()
            self._writer.transport.abort()

    def _drop(self) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None

    # -- the client's side ------------------------------------------------------------------

    async def _event(self, seconds: float) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            async with asyncio.timeout(seconds):
                data = await self._reader.read(_PIECE)
            self._http.receive_data(data)
            if self._http.their_state is h11.IDLE:
                seconds = min(seconds, HEAD_SECONDS)  # the rest of a head that has begun

    async def _send(
        self, event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
    ) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def _request(self) -> bool:
        """The next request; whether another one may follow."""
        try:
            event = await self._event(KEEP_ALIVE_SECONDS)
        except h11.RemoteProtocolError as error:
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                told = InvalidRequest(f"the request is not valid HTTP: {error}")
                await self._refuse(told, error.error_status_hint)
            return False
        if not isinstance(event, h11.Request):
            return False
        try:
            await self._pass(event)
        except SojournError as error:
            await self._refuse(error)
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _refuse(self, error: SojournError, status: int | None = None) -> None:
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise ConnectionError(error.message)
        body = msgspec.json.encode(to_body(error), enc_hook=repr)
        code = status or error.status
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"%d" % len(body)),
            (b"x-sojourn-error", error.code.encode()),
        ]
        if code == 503:
            headers.append((b"retry-after", b"1"))
        if self._http.their_state is not h11.DONE:
            headers.append((b"connection", b"close"))
        await self._send(h11.Response(status_code=code, headers=headers))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    # -- one exchange -----------------------------------------------------------------------

    async def _pass(self, request: h11.Request) -> None:
        headers: Headers = list(request.headers)
        bare = not any(
            key == b"transfer-encoding" or (key == b"content-length" and value != b"0")
            for key, value in headers
        )
        if bare:
            await self._event(HEAD_SECONDS)  # its end, so that an answer ends the exchange
        wanted = requests.read_request(request.target, headers, self._domain)
        if wanted is None:
            raise _UNKNOWN
        sent = h11.Request(
            method=request.method,
            target=request.target,
            headers=_relayed(headers, self._address),
        )
        node, connect = await self._dial(wanted.session)
        kept = self._tunnel
        if kept is None or kept.node != node or not bare or not kept.again():
            self._drop()
            kept = None
        safe = bare and request.method in requests.SAFE
        if kept is not None and safe:
            try:
                await kept.send(sent)
                await kept.send(h11.EndOfMessage())
                await self._answer(kept, await self._head(kept))
                return
            except (OSError, h11.ProtocolError):
                self._drop()
                if self._http.our_state is not h11.SEND_RESPONSE:
                    raise
                # It was closed between the two requests; nothing was answered yet.
        self._drop()
        tunnel = self._tunnel = await self._reach(wanted.session, node, connect)
        await tunnel.send(sent)
        if bare:
            await tunnel.send(h11.EndOfMessage())
            await self._answer(tunnel, await self._head(tunnel))
        else:
            await self._with_body(tunnel)

    async def _reach(
        self, session: str, node: str, connect: Callable[[], Awaitable[Streams]]
    ) -> _Tunnel:
        """A tunnel to a session's node. One that does not answer may be lost, and the session be
        another's soon: that is waited for. Raises NodeUnavailable."""
        end = time.monotonic() + REACH_SECONDS
        while True:
            try:
                return _Tunnel(node, await connect())
            except (OSError, TimeoutError) as error:
                if time.monotonic() >= end:
                    raise NodeUnavailable(
                        f"the session's node cannot be reached: {error}"
                    ) from error
            await asyncio.sleep(_AGAIN_SECONDS)
            node, connect = await self._dial(session)

    async def _with_body(self, tunnel: _Tunnel) -> None:
        sending = asyncio.create_task(self._body(tunnel))
        try:
            await self._answer(tunnel, await self._head(tunnel))
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _body(self, tunnel: _Tunnel) -> None:
        try:
            while True:
                event = await self._event(IDLE_SECONDS)
                if isinstance(event, h11.Data):
                    await tunnel.send(event)
                elif isinstance(event, h11.EndOfMessage):
                    await tunnel.send(h11.EndOfMessage())
                    return
                else:
                    raise ConnectionError("the client left within its request")
        except (OSError, TimeoutError, h11.ProtocolError):
            tunnel.close()  # half a body must not pass for a whole one
            raise

    async def _head(self, tunnel: _Tunnel) -> h11.Response | h11.InformationalResponse:
        while True:
            event = await tunnel.event(ANSWER_SECONDS)
            if isinstance(event, h11.Response):
                return event
            if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("the node answered no HTTP")

    async def _answer(
        self, tunnel: _Tunnel, answer: h11.Response | h11.InformationalResponse
    ) -> None:
        given: Headers = list(answer.headers)
        headers = [(key, value) for key, value in given if key not in HOP]
        if isinstance(answer, h11.InformationalResponse):
            await self._switch(tunnel, answer, given, headers)
            return
        await self._send(
            h11.Response(status_code=answer.status_code, reason=answer.reason, headers=headers)
        )
        while True:
            event = await tunnel.event(IDLE_SECONDS)
            if isinstance(event, h11.Data):
                await self._send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._send(h11.EndOfMessage())
                return
            else:
                raise ConnectionError("the answer broke off")

    async def _switch(
        self, tunnel: _Tunnel, answer: h11.InformationalResponse, given: Headers, headers: Headers
    ) -> None:
        """From here on another protocol is spoken: bytes."""
        protocol = requests.upgrade_of(given) or b"unknown"
        headers += [(b"connection", b"upgrade"), (b"upgrade", protocol)]
        await self._send(h11.InformationalResponse(status_code=101, headers=headers))
        self._tunnel = None
        early, _ = self._http.trailing_data
        if early:
            tunnel.writer.write(early)
        early, _ = tunnel.http.trailing_data
        if early:
            self._writer.write(early)
        await splice((self._reader, self._writer), (tunnel.reader, tunnel.writer))
        raise EOFError("the other protocol has ended")


def _relayed(headers: Headers, client: str) -> Headers:
    """A request's headers as a node gets them."""
    dropped = HOP | named_by_connection(headers) | {requests.CLIENT, b"expect"}
    sent = [(key, value) for key, value in headers if key not in dropped]
    sent.append((requests.CLIENT, client.encode("ascii", "replace")))
    upgrade = requests.upgrade_of(headers)
    if upgrade is not None:
        sent += [(b"connection", b"upgrade"), (b"upgrade", upgrade)]
    if any(key == b"transfer-encoding" for key, _ in headers):
        sent = [(key, value) for key, value in sent if key != b"content-length"]
        sent.append((b"transfer-encoding", b"chunked"))
    return sent
