"""HTTP/1.1 between a session and the outside: read whole heads, judged, and written anew.

Guarantee: what goes out was built here from what was understood, so no request hides in another.
Each request is judged by itself and goes where its own host says. Bodies stream in both directions;
one that does not move holds up nothing but itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from http import HTTPStatus

import h11
import msgspec

from sojourn.gateway.answers import Refused, denied, malformed, render, unreached
from sojourn.gateway.exchanges import Event, Exchange
from sojourn.gateway.heads import absolute, has_body, host_header, outgoing, wants_websocket
from sojourn.gateway.messages import Granted
from sojourn.gateway.names import Host, HostRefused, read_authority
from sojourn.gateway.records import NotRecorded, Record, idempotent
from sojourn.gateway.rules import Verdict, judge_request
from sojourn.gateway.scopes import Denied, Ground, Scope, Unreached
from sojourn.gateway.secrets import Placed, place
from sojourn.gateway.streams import Connection, Reset, Stream

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30
_DRAIN_BYTES = 4 << 20


class Way(msgspec.Struct, frozen=True):
    """What is known of a connection before its first request: the host it was opened to (None: an
    HTTP proxy is spoken to), and whether TLS was opened on it, for which name; `mismatch`: that
    name is not the host's, and every request is told so."""

    said: Host | None
    port: int
    tls: bool = False
    tls_name: str | None = None
    mismatch: Verdict | None = None


class Tunnelled(msgspec.Struct, frozen=True):
    """A proxy's CONNECT was granted: the stream is now one to this host."""

    host: Host
    port: int


class _Upstream:
    """A connection outside that requests of one guest connection go over, one after another."""

    def __init__(self, key: tuple[Host, int, bool], connection: Connection, rule: str) -> None:
        self.key, self.connection, self.rule = key, connection, rule
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self.used = False

    @property
    def fresh(self) -> bool:
        """Whether another request may go over it."""
        return (
            self.http.our_state is h11.IDLE and not self.connection.over and self.connection.quiet
        )


class Exchanges:
    """The requests of one connection from a session."""

    def __init__(self, guest: Stream, scope: Scope, way: Way, ground: Ground) -> None:
        self._guest, self._scope, self._way, self._ground = guest, scope, way, ground
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._upstream: _Upstream | None = None
        self._json = False

    async def serve(self) -> Tunnelled | None:
        """Until the connection ends, or becomes a tunnel."""
        try:
            while True:
                try:
                    granted = await self._exchange()
                except Refused as refused:
                    await self._refuse(refused)
                    granted = None
                if granted is not None:
                    return granted
                if not self._again():
                    await self._finish()
                    return None
        except (ConnectionError, TimeoutError):
            self._guest.reset()
            return None
        finally:
            if self._upstream is not None:
                self._upstream.connection.close()

    def _again(self) -> bool:
        """Whether another request may follow."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def _finish(self) -> None:
        await self._guest.end()
        # To close before the program does would be to reset it, and much of the answer may still
        # wait for a program that reads slowly. What it still sends is for nobody.
        with contextlib.suppress(ConnectionError):
            left = _DRAIN_BYTES
            while left > 0 and (data := await self._guest.read()):
                left -= len(data)

    async def _exchange(self) -> Tunnelled | None:
        request = await self._head()
        if request is None:
            return None
        self._json = any(b"json" in value for key, value in request.headers if key == b"accept")
        if request.method == b"CONNECT":
            return await self._connect(request)
        if self._way.mismatch is not None:
            raise self._denied(self._way.mismatch, self._way.said, self._way.port)
        host, port, target, said = self._authority(request)
        verdict = self._scope.judge(host, port)
        if not verdict.allowed:
            raise self._denied(verdict, host, port)
        self._count(host, port)
        upgrade = wants_websocket(request)
        granted = self._scope.granted
        placed = place(granted, host.name, self._way.tls, target, outgoing(request.headers))
        if placed.scrubber is not None and upgrade:
            # A compressed stream cannot be searched for values.
            placed.headers = [
                pair for pair in placed.headers if pair[0].lower() != b"sec-websocket-extensions"
            ]
        method = request.method.decode("ascii")
        record = self._scope.recorder.new(
            kind="websocket" if upgrade else "http",
            method=method,
            scheme="https" if self._way.tls else "http",
            host=str(host),
            port=port,
            path=target.partition(b"?")[0].decode("ascii", "replace"),
            rule=verdict.rule,
            secrets_used=placed.names,
        )
        out = self._outgoing_head(request, said, placed, upgrade)
        await self._send(out, host, port, placed, record, granted)
        return None

    async def _head(self) -> h11.Request | None:
        """The next request's head. Raises Refused."""
        try:
            if self._http.trailing_data[0] == b"":
                data = await self._guest.read()
                if not data:
                    return None
                self._http.receive_data(data)
            async with asyncio.timeout(HEAD_SECONDS):
                event = await self._guest_event()
        except TimeoutError:
            raise malformed("a request's head did not arrive in time", 408) from None
        if isinstance(event, h11.ConnectionClosed):
            return None
        assert isinstance(event, h11.Request)
        if event.http_version not in (b"1.0", b"1.1"):
            raise malformed("only HTTP/1.1 and HTTP/1.0 are spoken here", 505)
        size = sum(len(key) + len(value) + 4 for key, value in event.headers)
        if size + len(event.target) > HEAD_BYTES:
            raise malformed("a request's head is too large", 431)
        return event

    async def _guest_event(self) -> Event:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise malformed(str(error), error.error_status_hint) from None
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._guest.read())
            elif event is h11.PAUSED:
                raise Reset("bytes follow where none may")
            else:
                assert isinstance(event, Event)
                return event

    async def _connect(self, request: h11.Request) -> Tunnelled:
        if self._way.said is not None:
            raise malformed("this connection is no proxy's", 405)
        try:
            host, port = read_authority(request.target, 0)
        except HostRefused as error:
            raise malformed(str(error)) from error
        if port == 0:
            raise malformed("CONNECT needs a port")
        verdict = self._scope.judge(host, port)
        if not verdict.allowed:
            raise self._denied(verdict, host, port)
        while not isinstance(await self._guest_event(), h11.EndOfMessage):
            pass
        answer = self._http.send(h11.Response(status_code=200, headers=[], reason=b"OK"))
        assert answer is not None
        await self._guest.write(answer)
        self._guest.unread(self._http.trailing_data[0])
        return Tunnelled(host, port)

    def _authority(self, request: h11.Request) -> tuple[Host, int, bytes, bytes]:
        """Where a request goes, its target there, and the host it names. Raises Refused."""
        way = self._way
        hosts = [value for key, value in request.headers if key == b"host"]
        if len(hosts) > 1:
            raise malformed("a request names two hosts")
        if sum(key in (b"content-length", b"transfer-encoding") for key, _ in request.headers) > 1:
            raise malformed("a request has two lengths")
        target = request.target
        default = 443 if way.tls else 80
        try:
            named = None
            if target.startswith(b"/") or (target == b"*" and request.method == b"OPTIONS"):
                if way.said is None:
                    raise malformed("a proxy needs the whole address of a request")
            else:
                named, target = absolute(target, way.tls)
            if way.said is not None:
                default = way.port if named is None else default
            if hosts:
                said = read_authority(hosts[0], default)
            elif named is not None:
                said = read_authority(named, default)
            elif way.said is not None:
                said = (way.said, way.port)
            else:
                raise malformed("a request names no host")
            if named is not None and read_authority(named, default) != said:
                raise malformed("a request names two hosts")
        except HostRefused as error:
            name = hosts[0] if hosts else way.said or ""
            self._scope.denials.note(name, way.port, "host-spelling", str(error))
            raise Refused(
                403,
                "network_denied",
                str(error),
                "Name the host plainly.",
                rule="host-spelling",
            ) from error
        host, port = said
        header = host_header(host, port, way.tls)
        if way.said is None:
            return host, port, target, header
        return self._agreed(way.said, host, port), way.port, target, header

    def _agreed(self, said: Host, host: Host, port: int) -> Host:
        """Which of the connection's host and the request's is gone to; they agree, or the
        connection was opened to a bare address."""
        way = self._way
        if said.address is not None and port == way.port and host != said:
            if self._scope.judge(said, port).allowed:
                return said
            return host
        refused = judge_request(said, way.port, host, port)
        if refused is not None:
            raise self._denied(refused, host, port)
        return host

    def _denied(self, verdict: Verdict, host: Host | None, port: int) -> Refused:
        """The answer to what the policy says no to, which is on record."""
        self._scope.denials.note(host or "", port, verdict.rule, verdict.reason)
        return denied(verdict)

    def _count(self, host: Host, port: int) -> None:
        wait = self._scope.rate.take()
        if wait > 0:
            rule = "requests-per-minute"
            reason = "the session has made as many requests as it may in a minute"
            self._scope.denials.note(host, port, rule, reason)
            raise Refused(
                429,
                "quota_exceeded",
                reason,
                "Wait as long as Retry-After says.",
                rule=rule,
                retry_after=int(wait) + 1,
            )

    async def _reach(self, host: Host, port: int) -> _Upstream:
        key = (host, port, self._way.tls)
        upstream = self._upstream
        if upstream is not None:
            if upstream.key == key and upstream.fresh:
                upstream.used = True
                return upstream
            upstream.connection.close()
            self._upstream = None
        tls_name = None
        if self._way.tls:
            tls_name = host.name or self._way.tls_name or str(host)
        try:
            reached = await self._scope.reach(host, port, tls_name)
        except Denied as error:
            raise self._denied(error.verdict, host, port) from error
        except Unreached as error:
            raise unreached(error.reason) from error
        self._upstream = _Upstream(key, reached.connection, reached.verdict.rule)
        self._ground.stand_on(host, port, reached.addresses)
        return self._upstream

    async def _send(
        self,
        head: h11.Request,
        host: Host,
        port: int,
        placed: Placed,
        record: Record,
        granted: Sequence[Granted],
    ) -> None:
        repeatable = idempotent(head.method.decode()) and not has_body(head)
        try:
            # The record and the connection are made at the same time: each takes a while.
            recorded, reached = await asyncio.gather(
                record.begin(), self._reach(host, port), return_exceptions=True
            )
            for outcome in (recorded, reached):
                if isinstance(outcome, BaseException):
                    raise outcome
            assert isinstance(reached, _Upstream)
            if placed.names and self._scope.granted != granted:
                raise Refused(
                    503,
                    "secrets_changed",
                    "the session's secrets were changed before the request was sent",
                    "Try again.",
                )
            try:
                await self._run(head, reached, placed, record)
            except Refused:
                if not (repeatable and reached.used):
                    raise
                # A connection that was kept open may end just when it is used again.
                await self._run(head, await self._reach(host, port), placed, record)
            record.end("done")
        except NotRecorded:
            record.end("failed")
            raise Refused(
                503,
                "not_recorded",
                "the request could not be put on record, so it was not sent",
                "Try again in a moment.",
            ) from None
        except BaseException:
            record.end("failed")
            raise

    async def _run(
        self, head: h11.Request, upstream: _Upstream, placed: Placed, record: Record
    ) -> None:
        http = upstream.http
        try:
            exchange = Exchange(self._guest, self._http, upstream.connection, http, placed, record)
            await exchange.run(head)
        finally:
            if http.our_state is h11.DONE and http.their_state is h11.DONE:
                http.start_next_cycle()
            else:
                if http.our_state is h11.SWITCHED_PROTOCOL or http.their_state is h11.CLOSED:
                    upstream.connection.close()
                else:
                    upstream.connection.reset()
                self._upstream = None

    def _outgoing_head(
        self, request: h11.Request, host: bytes, placed: Placed, upgrade: bool
    ) -> h11.Request:
        headers = [(b"host", host), *placed.headers]
        if upgrade:
            headers += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        try:
            return h11.Request(method=request.method, target=placed.target, headers=headers)
        except h11.LocalProtocolError:
            # Its text would hold the header, and with it a secret.
            raise unreached("a secret's value cannot stand in a request") from None

    async def _refuse(self, refused: Refused) -> None:
        """Answer in the gateway's own name."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            raise Reset("an answer was under way") from refused
        headers, body = render(refused, json=self._json)
        if self._http.their_state is h11.SEND_BODY:
            # A request without a body is over: its connection may go on.
            try:
                over = isinstance(self._http.next_event(), h11.EndOfMessage)
            except h11.RemoteProtocolError:
                over = False
            if not over:
                headers.append((b"connection", b"close"))
        reason = HTTPStatus(refused.status).phrase.encode()
        answer = h11.Response(status_code=refused.status, headers=headers, reason=reason)
        out = self._http.send(answer) or b""
        out += self._http.send(h11.Data(data=body)) or b""
        out += self._http.send(h11.EndOfMessage()) or b""
        await self._guest.write(out)
