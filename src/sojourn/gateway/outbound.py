"""Connections from a session to the outside: what is spoken on each, and where it goes.

Guarantee: nothing is passed on before it is known what it is and the policy allows it. A connection
to a name may not speak for another one: not by the name in a TLS greeting, not by a request's host.
"""

from __future__ import annotations

import asyncio
import ssl
import time

from sojourn.gateway.authority import Authority
from sojourn.gateway.greeting import GreetingRefused, server_name
from sojourn.gateway.http import Exchanges, Way
from sojourn.gateway.names import Host, HostRefused, read_host
from sojourn.gateway.proxying import SOCKS4, SOCKS5, Socks, SocksRefused
from sojourn.gateway.records import NotRecorded
from sojourn.gateway.rules import HTTP_PORT, TLS_PORT, Verdict, judge_greeting
from sojourn.gateway.scopes import Denied, Ground, Reached, Scope, Unreached
from sojourn.gateway.splicing import FirstLine, splice
from sojourn.gateway.streams import Metered, Reset, Secured, Stream
from sojourn.gateway.tunnels import Tunnel
from sojourn.wire.tunnels import Kind, Refusal

IDLE_SECONDS = 600
_HEAD_SECONDS = 30
_SILENCE_SECONDS = 0.3
_TLS = 0x16


class Outbound:
    """Serves what a session opens."""

    def __init__(self, scope: Scope, authority: Authority) -> None:
        self._scope, self._authority = scope, authority
        self._connections = 0

    async def serve(self, tunnel: Tunnel) -> None:
        """One tunnel, until its end."""
        limit = self._scope.policy.connections
        if 0 < limit <= self._connections:
            reason = f"the session has {limit} connections, as many as it may at a time"
            self._scope.denials.note(tunnel.host, tunnel.port, "connections", reason)
            tunnel.refuse(Refusal.QUOTA)
            return
        self._connections += 1
        scope = self._scope
        stream = Metered(
            tunnel,
            lambda size: scope.pace_out.spend(size),
            lambda size: scope.pace_in.spend(size),
        )
        ground = Ground(tunnel)
        scope.grounds.add(ground)
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.ensure_future(_watch(tunnel, stream, task))
        try:
            if tunnel.kind is Kind.PROXY:
                await self._proxy(tunnel, stream, ground)
            else:
                await self._transparent(tunnel, stream, ground)
        finally:
            watch.cancel()
            scope.grounds.discard(ground)
            self._connections -= 1

    async def _transparent(self, tunnel: Tunnel, stream: Stream, ground: Ground) -> None:
        try:
            host = read_host(tunnel.host)
        except HostRefused as error:
            self._scope.denials.note(tunnel.host, tunnel.port, "host-spelling", str(error))
            tunnel.refuse(Refusal.POLICY)
            return
        verdict = self._scope.judge(host, tunnel.port)
        if not self._speakable(verdict, tunnel.port):
            self._scope.refused(verdict, host, tunnel.port)
            tunnel.refuse(Refusal.POLICY)
            return
        await tunnel.accept()
        await self._connected(stream, host, tunnel.port, ground)

    async def _proxy(self, tunnel: Tunnel, stream: Stream, ground: Ground) -> None:
        if not self._speakable(self._scope.judge(_ANY, HTTP_PORT), HTTP_PORT):
            tunnel.refuse(Refusal.POLICY)
            return
        await tunnel.accept()
        data = await stream.read()
        stream.unread(data)
        if data[:1] in (bytes((SOCKS4,)), bytes((SOCKS5,))):
            await self._socks(stream, data[0], ground)
            return
        tunnelled = await Exchanges(stream, self._scope, Way(None, 0), ground).serve()
        if tunnelled is not None:
            await self._connected(stream, tunnelled.host, tunnelled.port, ground)

    async def _socks(self, stream: Stream, version: int, ground: Ground) -> None:
        socks = Socks(stream, version)
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                host, port = await socks.read()
        except SocksRefused:
            return
        except TimeoutError as error:
            raise Reset("a request to the proxy did not arrive in time") from error
        verdict = self._scope.judge(host, port)
        if not self._speakable(verdict, port):
            self._scope.refused(verdict, host, port)
            await socks.refuse(Refusal.POLICY)
            return
        await socks.grant()
        await self._connected(stream, host, port, ground)

    def _speakable(self, verdict: Verdict, port: int) -> bool:
        """Whether it is worth listening: where HTTP or TLS is spoken a refusal can be explained,
        and a request to a bare address may name a host that is allowed."""
        if verdict.rule == "network-none":
            return False
        return verdict.allowed or port in (HTTP_PORT, TLS_PORT)

    async def _connected(self, stream: Stream, host: Host, port: int, ground: Ground) -> None:
        verdict = self._scope.judge(host, port)
        raw = verdict.allowed and verdict.raw
        spoken = await self._listen(stream, host, port, ground) if raw else await _first(stream)
        if isinstance(spoken, Reached):
            await self._join(stream, host, port, spoken, "tcp")
        elif spoken == "tls":
            await self._tls(stream, host, port, ground)
        elif spoken == "http":
            await Exchanges(stream, self._scope, Way(host, port), ground).serve()
        elif spoken == "raw":
            await self._raw(stream, host, port, ground, "tcp")

    async def _listen(self, stream: Stream, host: Host, port: int, ground: Ground) -> str | Reached:
        """What is spoken, by the first bytes; or a connection, where the other end is to speak
        first."""
        reading = asyncio.ensure_future(stream.read())
        try:
            done, _ = await asyncio.wait([reading], timeout=_SILENCE_SECONDS)
            if not done:
                reached = await self._reach_raw(host, port, ground, "tcp")
                listening = asyncio.ensure_future(reached.connection.read())
                try:
                    await asyncio.wait([reading, listening], return_when=asyncio.FIRST_COMPLETED)
                    if listening.done():
                        reached.connection.unread(listening.result())
                        if reading.done():
                            stream.unread(reading.result())
                        else:
                            reading.cancel()
                            await asyncio.gather(reading, return_exceptions=True)
                        return reached
                except BaseException:
                    reached.connection.reset()
                    raise
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
                # It was the program that spoke first after all, so what it says decides.
                reached.connection.close()
                ground.clear()
            data = reading.result()
        finally:
            reading.cancel()
        return await self._first_line(stream, data)

    async def _first_line(self, stream: Stream, data: bytes) -> str:
        """Tell HTTP from other protocols. A line that does not become whole is passed on, and
        watched on its way."""
        if not data:
            return ""
        if data[0] == _TLS:
            stream.unread(data)
            return "tls"
        first = FirstLine()
        first.feed(data)
        try:
            while first.http is None:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    more = await stream.read()
                if not more:
                    break
                data += more
                first.feed(more)
        except TimeoutError:
            first.http = None
        stream.unread(data)
        return "http" if first.http else "raw"

    async def _reach_raw(self, host: Host, port: int, ground: Ground, kind: str) -> Reached:
        try:
            reached = await self._scope.reach(host, port)
        except Denied as error:
            self._scope.refused(error.verdict, host, port)
            raise Reset(str(error)) from error
        except Unreached as error:
            raise Reset(str(error)) from error
        verdict = reached.verdict
        if not (verdict.raw if kind == "tcp" else not verdict.inspect):
            reached.connection.reset()
            raise Reset("the policy was changed meanwhile")
        # At once: a change of the policy ends it also while nobody has spoken yet.
        ground.stand_on(host, port, reached.addresses, raw=kind == "tcp")
        return reached

    async def _raw(self, stream: Stream, host: Host, port: int, ground: Ground, kind: str) -> None:
        reached = await self._reach_raw(host, port, ground, kind)
        await self._join(stream, host, port, reached, kind)

    async def _join(
        self, stream: Stream, host: Host, port: int, reached: Reached, kind: str
    ) -> None:
        record = self._scope.recorder.new(
            kind=kind, scheme=kind, host=str(host), port=port, rule=reached.verdict.rule
        )
        try:
            await record.begin()
            first = FirstLine() if kind == "tcp" and host.name is not None else None
            await splice(stream, reached.connection, record, first=first)
            record.end("done")
        except NotRecorded as error:
            record.end("failed")
            raise Reset("the connection could not be put on record") from error
        except BaseException:
            record.end("failed")
            reached.connection.reset()
            raise
        reached.connection.close()

    async def _tls(self, stream: Stream, said: Host, port: int, ground: Ground) -> None:
        sni = await self._greeting(stream)
        host = self._meant(said, sni, port)
        verdict = self._scope.judge(host, port)
        mismatch = judge_greeting(said, sni)
        if verdict.allowed and not verdict.inspect:
            if mismatch is not None or (host.name is not None and sni is None):
                reason = "the name in a TLS greeting is not the connection's"
                self._scope.denials.note(host, port, "name-mismatch", reason)
                raise Reset(reason)
            ground.inspected = False
            await self._raw(stream, host, port, ground, "tls")
            return
        ground.inspected = True
        shown = sni if sni is not None else host
        secured = Secured(stream, self._authority.context(str(shown)))
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                await secured.greet()
        except ssl.SSLError as error:
            raise Reset(f"TLS with the session failed: {error.reason}") from error
        except TimeoutError as error:
            raise Reset("TLS did not begin in time") from error
        tls_name = None if sni is None else sni.name
        way = Way(host, port, tls=True, tls_name=tls_name, mismatch=mismatch)
        await Exchanges(secured, self._scope, way, ground).serve()

    async def _greeting(self, stream: Stream) -> Host | None:
        data = b""
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                while True:
                    more = await stream.read()
                    if not more:
                        raise Reset("a TLS greeting broke off")
                    data += more
                    whole, name = server_name(data)
                    if whole:
                        break
            sni = None if name is None else read_host(name)
        except (GreetingRefused, HostRefused, TimeoutError) as error:
            raise Reset(f"a TLS greeting cannot be read: {error}") from error
        if sni is not None and sni.name is None:
            raise Reset("a TLS greeting asks for an address")
        stream.unread(data)
        return sni

    def _meant(self, said: Host, sni: Host | None, port: int) -> Host:
        """The host a TLS connection is for. One to a bare address that no rule allows may be for
        a name that is allowed: then it goes to that name's own addresses."""
        if said.address is None or sni is None or self._scope.judge(said, port).allowed:
            return said
        return sni


async def _first(stream: Stream) -> str:
    """What is spoken where it is HTTP or TLS or nothing."""
    data = await stream.read()
    stream.unread(data)
    if not data:
        return ""
    return "tls" if data[0] == _TLS else "http"


# Whether a session has any network does not depend on the host.
_ANY = Host(name="a.invalid")


async def _watch(tunnel: Tunnel, stream: Metered, task: asyncio.Task[object]) -> None:
    """End what does not move. The time a tunnel is parked does not count."""
    while True:
        left = stream.moved_at + IDLE_SECONDS - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        elif tunnel.is_parked:
            stream.moved_at = time.monotonic()
        else:
            task.cancel()
            return
