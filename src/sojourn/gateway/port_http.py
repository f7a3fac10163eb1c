"""HTTP into a session: one client's connection to the address that all exposed ports share.

Guarantee: a request reaches only the port it names, and only when that is public or the request
bears its token; to everybody else a port that exists and one that does not look the same. What goes
inside and comes back is written anew from what was understood, so no two readers of it differ.
Bodies are passed on as they come, in both directions at once, and never held whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import h11
import msgspec

from sojourn.errors import (
    Interrupted,
    InvalidRequest,
    PortNotFound,
    PortSilent,
    SojournError,
    to_body,
)
from sojourn.gateway import port_requests as requests
from sojourn.gateway.inbound import Dialled
from sojourn.gateway.port_requests import Headers, Wanted
from sojourn.gateway.port_streams import splice
from sojourn.gateway.streams import Stream

if TYPE_CHECKING:
    from sojourn.gateway.ports import Client, Exposed, Ports

MAX_HEAD = 64 << 10
HEAD_SECONDS = 15.0
KEEP_ALIVE_SECONDS = 75.0
ANSWER_SECONDS = 600.0
IDLE_SECONDS = 3600.0
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 4 << 20
log = logging.getLogger(__name__)

_NOBODY = b"\0" * 32  # the digest of no token
_UNKNOWN = PortNotFound(
    "nothing is exposed at this address, or not to you",
    next_step="Check the address and its token.",
)


class _Inside:
    """A tunnel over which HTTP is spoken with a program inside."""

    def __init__(self, exposed: Exposed, dialled: Dialled) -> None:
        self.exposed = exposed
        self.stream: Stream = dialled.stream
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._dialled = dialled

    async def send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.write(data)
            self.exposed.moved()

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            data = await self.stream.read()
            if not data and self.http.their_state is h11.SEND_RESPONSE:
                raise ConnectionError("the program closed its connection without an answer")
            self.exposed.moved()
            self.http.receive_data(data)

    def again(self) -> bool:
        """Make ready for another request; whether it can take one."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return not self.http.trailing_data[0]

    def close(self) -> None:
        self._dialled.close()


class HttpClient:
    """One connection of a client. `deadline` (monotonic) is when it is given up; `waiting` says
    that it is between requests."""

    def __init__(self, ports: Ports, stream: Client, address: str) -> None:
        self._ports = ports
        self._stream = stream
        self._address = address
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._inside: _Inside | None = None
        self._answering: Exposed | None = None
        self.deadline = time.monotonic() + HEAD_SECONDS
        self.waiting = True

    def expire(self) -> None:
        """Give it up: too slow, too idle, or its port is no longer exposed."""
        self._stream.reset()
        if self._inside is not None:
            self._inside.stream.reset()

    async def serve(self) -> None:
        """All its requests."""
        try:
            while await self._request():
                self._http.start_next_cycle()
        except ConnectionError as error:
            # The client left, or what was under way inside broke after the answer began. Where
            # the end of a connection is the end of an answer, it must be no plain end.
            log.debug("a connection to an exposed port broke: %s", error)
            if self._http.their_http_version != b"1.1":
                self._stream.reset()
        finally:
            self._drop()
        await self._linger()

    def _drop(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None

    async def _linger(self) -> None:
        """Close so that the client gets the whole answer: what it still sends is read for a while,
        since bytes that nobody reads would break the connection under the answer."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._stream.end()
            async with asyncio.timeout(_LINGER_SECONDS):
                left = _LINGER_BYTES
                while left > 0 and (data := await self._stream.read()):
                    left -= len(data)
        self._stream.close()

    def _moved(self) -> None:
        self.deadline = time.monotonic() + IDLE_SECONDS
        if self._answering is not None:
            self._answering.moved()

    # -- the client's side ------------------------------------------------------------------

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            data = await self._stream.read()
            if self._answering is not None:
                self._moved()
            elif data and self.waiting:
                # The first bytes of a request: the rest of its head is not waited for for ever.
                self.waiting = False
                self.deadline = time.monotonic() + HEAD_SECONDS
            self._http.receive_data(data)

    async def _send(
        self, event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
    ) -> None:
        data = self._http.send(event)
        if data:
            await self._stream.write(data)
            self._moved()

    async def _request(self) -> bool:
        """The next request; whether another one may follow."""
        if self._http.states[h11.CLIENT] is not h11.IDLE:
            return False
        try:
            event = await self._event()
        except h11.RemoteProtocolError as error:
            await self._malformed(error)
            return False
        if not isinstance(event, h11.Request):
            return False
        self.waiting = False
        self.deadline = time.monotonic() + IDLE_SECONDS
        headers: Headers = list(event.headers)
        if self._ports.relayed:
            headers = self._from_server(headers)
        bare = _bare(headers)
        if _length(event, headers) > MAX_HEAD:
            # The library bounds only a head that has not come to its end.
            long = InvalidRequest(f"the head of the request is longer than {MAX_HEAD} bytes")
            await self._refuse(long, 431)
            return False
        try:
            if bare:
                await self._event()  # its end, so that an answer ends the exchange
            again = await self._answer(event, headers, bare)
        except SojournError as error:
            await self._refuse(error)
            again = self._http.our_state is h11.DONE
        except h11.ProtocolError as error:
            # Also a switch of protocols that nobody asked for, or before the request's end.
            await self._refuse(SojournError(f"what came from inside is not HTTP: {error}"), 502)
            again = False
        finally:
            self._answering = None
        self.waiting = True
        self.deadline = time.monotonic() + KEEP_ALIVE_SECONDS
        return again and self._http.their_state is h11.DONE and self._http.our_state is h11.DONE

    def _from_server(self, headers: Headers) -> Headers:
        """What a server that carries requests here says of this one is not its client's."""
        said = requests.value_of(headers, requests.CLIENT)
        if said is not None:
            self._address = said.decode("latin-1")
        return [(key, value) for key, value in headers if key != requests.CLIENT]

    async def _malformed(self, error: h11.RemoteProtocolError) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = error.error_status_hint
            await self._refuse(InvalidRequest(f"the request is not valid HTTP: {error}"), status)

    async def _refuse(self, error: SojournError, status: int | None = None) -> None:
        """Answer with an error body, unless an answer has begun: then that is broken off."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise ConnectionError(error.message)
        body = msgspec.json.encode(to_body(error), enc_hook=repr)
        headers = [
            (b"content-type", b"application/json"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"%d" % len(body)),
            (b"x-sojourn-error", error.code.encode()),
        ]
        code = status or _status(error)
        if code == 503:
            headers.append((b"retry-after", b"1"))
        if self._http.their_state is not h11.DONE:
            headers.append((b"connection", b"close"))
        await self._send(h11.Response(status_code=code, headers=headers))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    # -- one exchange -----------------------------------------------------------------------

    async def _answer(self, request: h11.Request, headers: Headers, bare: bool) -> bool:
        wanted = requests.read_request(request.target, headers, self._ports.domain)
        exposed = None if wanted is None else self._ports.find(wanted.session, wanted.port)
        if wanted is not None and exposed is None and not wanted.prefix:
            exposed = await self._ports.ask(wanted.session, wanted.port)
        if wanted is None or exposed is None:
            requests.token_fits(b"", _NOBODY)
            raise _UNKNOWN
        opened: str | None = "public"
        if exposed.digest:
            opened = requests.opened_by(wanted, exposed.digest, request.method, headers)
            if opened is None:
                raise _UNKNOWN
        if opened == "query" and not wanted.prefix and requests.wants_page(request.method, headers):
            await self._redirect(wanted)
            return True
        self._answering = exposed
        with exposed.serving(self._stream):
            return await self._pass(request, headers, bare, wanted, exposed, opened)

    async def _redirect(self, wanted: Wanted) -> None:
        """Have a browser show the token as a cookie, and not in the address."""
        assert wanted.query is not None
        await self._send(
            h11.Response(
                status_code=303,
                headers=[
                    (b"location", b"/" + wanted.target.lstrip(b"/\\")),
                    (b"set-cookie", requests.access_cookie(wanted.query)),
                    (b"cache-control", b"no-store"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"content-length", b"0"),
                ],
            )
        )
        await self._send(h11.EndOfMessage())

    async def _pass(
        self,
        request: h11.Request,
        headers: Headers,
        bare: bool,
        wanted: Wanted,
        exposed: Exposed,
        opened: str | None,
    ) -> bool:
        chunked = any(key == b"transfer-encoding" for key, _ in headers)
        sent = h11.Request(
            method=request.method,
            target=wanted.target,
            headers=requests.inside_headers(
                wanted,
                opened,
                headers,
                self._address,
                chunked=chunked,
                scheme=self._ports.scheme.encode(),
            ),
        )
        if not bare or request.method not in requests.SAFE:
            # What may not be asked twice goes over no connection that may have been closed.
            self._drop()
        reused = self._inside is not None and self._inside.exposed is exposed
        inside = await self._connected(exposed)
        try:
            await inside.send(sent)
            if bare:
                await inside.send(h11.EndOfMessage())
                answer = await self._head(inside)
            else:
                return await self._with_body(inside, wanted, opened)
        except ConnectionError as error:
            self._drop()
            if not reused:
                raise _broken(error) from error
            # The program had closed a connection that was kept for the next request.
            inside = await self._connected(exposed)
            try:
                await inside.send(sent)
                await inside.send(h11.EndOfMessage())
                answer = await self._head(inside)
            except ConnectionError as again:
                self._drop()
                raise _broken(again) from again
        exposed.answered(self._stream)
        return await self._return(inside, answer, wanted, opened)

    async def _connected(self, exposed: Exposed) -> _Inside:
        """The tunnel that is kept for this port, or a new one."""
        kept = self._inside
        if kept is not None:
            if kept.exposed is exposed and kept.again():
                return kept
            self._drop()
        self._inside = _Inside(exposed, await self._ports.dial(exposed))
        return self._inside

    async def _with_body(self, inside: _Inside, wanted: Wanted, opened: str | None) -> bool:
        """Pass the body on while the answer is waited for, and passed on, too."""
        sending = asyncio.create_task(self._body(inside))
        try:
            answer = await self._head(inside)
            assert self._answering is not None
            self._answering.answered(self._stream)
            again = await self._return(inside, answer, wanted, opened)
            return again and sending.done()
        finally:
            sending.cancel()
            # What ended it is known by what the answer met; the client's own end is met by both.
            await asyncio.gather(sending, return_exceptions=True)

    async def _body(self, inside: _Inside) -> None:
        try:
            while True:
                event = await self._event()
                if isinstance(event, h11.Data):
                    await inside.send(event)
                elif isinstance(event, h11.EndOfMessage):
                    await inside.send(h11.EndOfMessage())
                    return
                else:
                    raise ConnectionError("the client left within its request")
        except (h11.RemoteProtocolError, ConnectionError):
            # Half a body must not pass for a whole one.
            inside.stream.reset()
            raise

    async def _head(self, inside: _Inside) -> h11.Response | h11.InformationalResponse:
        """The answer's head, or that of a switch of protocols."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while True:
                    event = await inside.event()
                    if isinstance(event, h11.Response):
                        return event
                    if isinstance(event, h11.InformationalResponse):
                        if event.status_code == 101:
                            return event
                        continue
                    raise ConnectionError("the program closed its connection without an answer")
        except TimeoutError:
            self._drop()
            raise PortSilent(
                f"the program inside did not answer within {ANSWER_SECONDS:.0f} s"
            ) from None

    async def _return(
        self,
        inside: _Inside,
        answer: h11.Response | h11.InformationalResponse,
        wanted: Wanted,
        opened: str | None,
    ) -> bool:
        headers = requests.outside_headers(wanted, list(answer.headers))
        if isinstance(answer, h11.InformationalResponse):
            await self._switch(inside, answer, headers)
            return False
        if opened == "query" and not wanted.prefix:
            assert wanted.query is not None
            headers.append((b"set-cookie", requests.access_cookie(wanted.query)))
        await self._send(
            h11.Response(status_code=answer.status_code, reason=answer.reason, headers=headers)
        )
        while True:
            try:
                event = await inside.event()
            except h11.RemoteProtocolError as error:
                raise ConnectionError(str(error)) from error
            if isinstance(event, h11.Data):
                await self._send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._send(h11.EndOfMessage())
                return True
            else:
                raise ConnectionError("the answer broke off")

    async def _switch(
        self, inside: _Inside, answer: h11.InformationalResponse, headers: Headers
    ) -> None:
        """From here on another protocol is spoken: bytes."""
        protocol = requests.upgrade_of(list(answer.headers)) or b"unknown"
        headers += [(b"connection", b"upgrade"), (b"upgrade", protocol)]
        await self._send(h11.InformationalResponse(status_code=101, headers=headers))
        early, _ = self._http.trailing_data
        if early:
            await inside.stream.write(early)
        early, _ = inside.http.trailing_data
        if early:
            await self._stream.write(early)
        await splice(self._stream, inside.stream, self._moved)


def _length(request: h11.Request, headers: Headers) -> int:
    """Bytes of a request's head, nearly."""
    return len(request.target) + sum(len(name) + len(value) + 4 for name, value in headers)


def _bare(headers: Headers) -> bool:
    """Whether a request has no body."""
    chunked = any(key == b"transfer-encoding" for key, _ in headers)
    return not chunked and requests.value_of(headers, b"content-length") in (None, b"0")


def _broken(error: ConnectionError) -> SojournError:
    return Interrupted(
        f"the connection into the session ended before an answer: {error}",
        next_step="Ask again: the session was put away, or its program closed the connection.",
    )


def _status(error: SojournError) -> int:
    # A state that forbids waking passes: to a client of the port it is unavailable, no conflict.
    return 503 if error.status in (409, 422) else error.status
