"""Serving many clients over streamable HTTP.

Guarantee: nothing is answered without the bearer token, which is compared in constant time, nor to
a page in a browser that came by another name than ours (DNS rebinding): names in Host and Origin
have to be known. Each connection has its own session; it is suspended when the client ends the
connection, and all of them are when this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request

from sojourn.errors import ErrorBody, Forbidden, InvalidRequest, SojournError, Unauthenticated
from sojourn.mcp.own_sessions import OwnSession, Server, Sessions, Settings
from sojourn.mcp.server import Context, client_name, protocol_server

PATH = "/mcp"
SESSION_HEADER = "sojourn-session"
CONNECTION_HEADER = "mcp-session-id"
MAX_BODY = 16 * 1024 * 1024
MAX_CONNECTIONS = 1_000
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
STOP_SECONDS = 3

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """Lets through what has the token and comes by a known name; and sees connections end."""

    def __init__(self, app: App, token: str, names: Iterable[str], sessions: Sessions) -> None:
        self._app = app
        self._token = token.encode()
        self._names = frozenset(name.lower() for name in names)
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # its start and end: there are no web sockets here
            await self._app(scope, receive, send)
            return
        try:
            self.check(scope["headers"])
        except SojournError as error:
            await _refuse(error, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, watched)
        if scope["method"] == "DELETE" and 200 <= status < 300:
            connection = _header(scope["headers"], CONNECTION_HEADER.encode())
            if connection is not None:
                await self._sessions.ended(connection.decode("latin-1"))

    def check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises Forbidden and Unauthenticated."""
        host = _header(headers, b"host")
        if host is None or _name(b"//" + host) not in self._names:
            raise Forbidden(
                "the request came by a name that is not known here",
                next_step="Use the address that was told at the start, or allow it: --allow-host.",
            )
        origin = _header(headers, b"origin")
        if origin is not None and _name(origin) not in self._names:
            raise Forbidden(
                "the request comes from a page of another origin",
                next_step="Serve the page from a name that --allow-host allows.",
            )
        scheme, _, given = (_header(headers, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise Unauthenticated(
                "the bearer token is missing or wrong",
                next_step="Send `Authorization: Bearer TOKEN` with the token of `sojourn mcp`: that"
                " of --token-file, else that of the Sojourn server.",
            )


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """A header's value; one that is there twice is none that could be trusted."""
    found = [value for key, value in headers if key == name]
    if len(found) > 1:
        raise InvalidRequest(f"the header {name.decode()} is there more than once")
    return found[0] if found else None


def _name(address: bytes) -> str | None:
    try:
        return urlsplit(address.decode("ascii")).hostname
    except ValueError:
        return None


async def _refuse(error: SojournError, send: Send) -> None:
    content = msgspec.json.encode(ErrorBody(error.code, error.message, error.next_step))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        (b"connection", b"close"),
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def listen(address: str) -> socket.socket:
    """A socket that listens at HOST:PORT. Raises InvalidRequest."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if not host or not 0 <= int(port) < 65536:
            raise ValueError(f"{address!r} is not HOST:PORT")
        (family, kind, _, _, where), *_ = socket.getaddrinfo(host, int(port), type=1)
        made = socket.socket(family, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(where)
            made.listen(128)
        except OSError:
            made.close()
            raise
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"cannot listen on {address}: {error}",
            next_step="Give a free address of this machine as HOST:PORT, such as 127.0.0.1:0.",
            field="http",
        ) from error
    return made


def known_names(host: str, allowed: Iterable[str]) -> set[str]:
    """The names under which this server is reached."""
    names = {host.lower().removeprefix("[").removesuffix("]"), *allowed}
    local = host in LOOPBACK or host in {"0.0.0.0", "::", ""}
    return names | LOOPBACK if local else names


async def serve(
    address: str,
    settings: Settings,
    *,
    token: str | None,
    allowed: Iterable[str],
    ready: Callable[[str], None],
) -> None:
    """Serve until a signal ends it; `ready` is told the address. Raises Unreachable when there is
    no Sojourn server, Unauthenticated when there is no token, InvalidRequest for an address."""
    server = Server()
    await server.check()
    token = token or server.token
    if not token:
        raise Unauthenticated("there is no token that clients could show")
    sessions = Sessions(server, settings)

    def own_of(context: Context) -> OwnSession:
        request: Request | None = context.request
        if request is None:
            raise InvalidRequest("the call came without its HTTP request")
        headers = request.headers
        return sessions.of_call(
            headers.get(SESSION_HEADER), headers.get(CONNECTION_HEADER), client_name(context)
        )

    protocol = protocol_server(sessions, own_of)
    app = protocol.streamable_http_app(
        streamable_http_path=PATH,
        max_request_body_size=MAX_BODY,
        max_sessions=MAX_CONNECTIONS,
        # Guard does it, for every path and by exact names.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    host = address.rpartition(":")[0]
    with listen(address) as listening:
        guard = Guard(app, token, known_names(host, allowed), sessions)
        web = _Web(
            uvicorn.Config(
                guard,
                log_level="warning",
                ws="none",
                timeout_graceful_shutdown=STOP_SECONDS,
                server_header=False,
                date_header=False,
            )
        )
        web.on_start = lambda: ready(f"http://{host}:{listening.getsockname()[1]}{PATH}")
        try:
            await web.serve(sockets=[listening])
        finally:
            await sessions.close()


class _Web(uvicorn.Server):
    """Tells when it serves, and ends on a signal without dying of it: sessions are put away
    afterwards."""

    on_start: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()
