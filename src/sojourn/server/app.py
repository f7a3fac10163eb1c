"""The HTTP API as one application, and how it is served.

Guarantee: every failure is answered with an error body, also for addresses and methods that do
not exist and for requests that are not HTTP at all; what a failure inside looks like stays in the
log. A stop ends streams with a typed error, finishes what is under way and leaves no address
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sojourn.errors import HostUnfit, InvalidRequest, NotFound, SojournError, TooLarge, to_body
from sojourn.model.paths import server_file
from sojourn.server.answers import Shutdown, internal_error
from sojourn.server.base import SessionService
from sojourn.server.e2b.ids import load_key
from sojourn.server.e2b.lazy import LazyE2B
from sojourn.server.e2b.settings import Settings
from sojourn.server.endpoints import Endpoint, build
from sojourn.server.health_listener import health_listener
from sojourn.server.listening import listen
from sojourn.server.observed import Observed, by_token
from sojourn.server.openapi import openapi_handler
from sojourn.server.routes import (
    archives,
    commands,
    events,
    files,
    networks,
    operations,
    ports,
    processes,
    secrets,
    sessions,
    snapshots,
    templates,
    trees,
)
from sojourn.server.routes import (
    service as service_routes,
)
from sojourn.wire.api import ServerAddress

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that a request never meets a closing one."""
STOP_SECONDS = 20
MAX_HEAD = 1 << 20
"""Bytes of a request's head that are read; many more than one piece of what comes."""

_log = logging.getLogger(__name__)


def all_endpoints() -> list[Endpoint]:
    """Every endpoint of the API."""
    return [
        *service_routes.ENDPOINTS,
        *sessions.ENDPOINTS,
        *snapshots.ENDPOINTS,
        *networks.ENDPOINTS,
        *archives.ENDPOINTS,
        *operations.ENDPOINTS,
        *events.ENDPOINTS,
        *commands.ENDPOINTS,
        *processes.ENDPOINTS,
        *files.ENDPOINTS,
        *trees.ENDPOINTS,
        *ports.ENDPOINTS,
        *secrets.ENDPOINTS,
        *templates.ENDPOINTS,
    ]


def _error_response(
    error: SojournError, status: int, headers: dict[str, str] | None = None
) -> Response[bytes]:
    return Response(
        msgspec.json.encode(to_body(error), enc_hook=repr),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


def _on_sojourn_error(_request: Request[Any, Any, Any], error: SojournError) -> Response[bytes]:
    return _error_response(error, error.status)


def _on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar itself refuses: unknown addresses and methods, malformed requests."""
    where = f"{request.scope['method']} {request.scope['path']}"
    if error.status_code == 404:
        step = "See /v1/openapi.json."
        if f"{request.scope['path']}/".startswith("/v1/nodes/"):
            step = "A server of one machine (`sojourn up`) has no nodes; those of a cluster have."
        return _error_response(NotFound(f"there is no {where}", next_step=step), 404)
    if error.status_code == 405:
        refused = InvalidRequest(f"there is no {where}", next_step="See /v1/openapi.json.")
        return _error_response(refused, 405, error.headers)
    if error.status_code == 413:
        return _error_response(TooLarge(error.detail), 413)
    if error.status_code < 500:
        return _error_response(InvalidRequest(error.detail), error.status_code)
    return _error_response(internal_error(error), 500)


def _on_any_error(_request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return _error_response(internal_error(error), 500)


def create_app(service: SessionService, *, shutdown: Shutdown | None = None) -> Litestar:
    """The API over a service. `shutdown` ends long answers when it begins."""
    declared = all_endpoints()
    return endpoint_app(service, declared, shutdown or Shutdown(), openapi_handler(declared))


def endpoint_app(
    service: SessionService,
    declared: list[Endpoint],
    shutdown: Shutdown,
    *more: HTTPRouteHandler,
) -> Litestar:
    """An application of these endpoints; whatever else is asked gets an error body."""
    return Litestar(
        [*(build(one, service, shutdown) for one in declared), *more],
        exception_handlers={
            SojournError: _on_sojourn_error,
            HTTPException: _on_http_error,
            Exception: _on_any_error,
        },
        openapi_config=None,
        debug=False,
        logging_config=None,
    )


class ApiProtocol(HttpToolsProtocol):
    """uvicorn's protocol, saying also of malformed HTTP what was wrong in the API's own form. The
    head of a request is bounded: each piece of a longer one is joined to all of it so far, and one
    client without a token could hold up everybody."""

    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)  # with the end of the request before, maybe
        if self._head_bytes > MAX_HEAD:
            self._refuse(
                b"431 Request Header Fields Too Large",
                TooLarge(f"the head of the request is over {MAX_HEAD} bytes", limit=MAX_HEAD),
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", InvalidRequest("the request is not valid HTTP/1.1"))

    def _refuse(self, status: bytes, error: SojournError) -> None:
        body = msgspec.json.encode(to_body(error))
        self.transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)
        )
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server, whose stop begins with the end of streams and whose exit is clean."""

    def __init__(
        self, config: uvicorn.Config, shutdown: Shutdown, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._shutdown = shutdown
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutdown.begin()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the business of `serve`."""
        yield


def make_server(
    service: SessionService,
    *,
    ready: Callable[[], None] = lambda: None,
    e2b_key: bytes | None = None,
    e2b: Settings | None = None,
    around: Callable[[Any], Any] | None = None,
    context: ssl.SSLContext | None = None,
    protocol: type[HttpToolsProtocol] | None = None,
) -> uvicorn.Server:
    """A server of the API, not yet started; `serve(sockets=[...])` runs it. With `e2b_key`, of
    which the tokens of sandboxes are made, E2B's clients are answered too. `around` puts something
    in front of all of it, for servers that are in front of this one."""
    shutdown = Shutdown(again=around is not None)
    app: Any = create_app(service, shutdown=shutdown)
    if e2b_key is not None:
        app = LazyE2B(app, service, e2b_key, shutdown, e2b)
    app = Observed(app, by_token(service.authenticate))
    if around is not None:
        app = around(app)
    return serve_app(app, shutdown, ready, context=context, protocol=protocol or ApiProtocol)


def serve_app(
    app: Any,
    shutdown: Shutdown,
    ready: Callable[[], None] = lambda: None,
    *,
    context: ssl.SSLContext | None = None,
    protocol: type[HttpToolsProtocol] = ApiProtocol,
) -> uvicorn.Server:
    """A server of any application, not yet started; over TLS with a `context`."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        backlog=1024,
    )
    config.load()
    config.ssl = context
    return _Server(config, shutdown, ready)


def _publish(place: Path, content: bytes) -> None:
    """Write a small file whole; where there is no room for a new one, over the old one's bytes."""
    fresh = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(place)
    except OSError:
        fresh.unlink(missing_ok=True)
        # Trailing spaces are fine in JSON, a file that was shortened first could not be filled.
        size = place.stat().st_size
        with place.open("r+b") as file:
            file.write(content.ljust(size))


@contextlib.contextmanager
def published_address(data: Path, url: str) -> Generator[Callable[[], None], None, None]:
    """Tell clients of this host where the server is: from when what this gives is called, for as
    long as it is there. Raises HostUnfit when another server tells its own address there."""
    data.mkdir(parents=True, exist_ok=True)
    place = server_file(data)
    content = msgspec.json.encode(ServerAddress(url, os.getpid()))

    def publish() -> None:
        try:
            _publish(place, content)
        except OSError as error:
            _not_told(place, error)

    with _address_lock(place):
        try:
            yield publish
        finally:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                told = msgspec.json.decode(place.read_bytes(), type=ServerAddress)
                if told.pid == os.getpid():
                    place.unlink()


def _not_told(place: Path, error: OSError) -> None:
    # On a full disk the server is what room can be made with: it serves, even if clients of this
    # host have to be told its address.
    _log.error("the server's address is not in %s: %s", place, error.strerror)


@contextlib.contextmanager
def _address_lock(place: Path) -> Generator[None, None, None]:
    """A server of a cluster may share the directory of a node, so the directory's own lock does
    not tell whether another server has its address there."""
    try:
        descriptor = os.open(f"{place}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _not_told(place, error)
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostUnfit(
                f"another server tells its address in {place}",
                next_step="Stop it, or give this one another directory (--data).",
            ) from None
        yield
    finally:
        os.close(descriptor)


async def serve(
    open_service: Callable[[], AbstractAsyncContextManager[SessionService]],
    *,
    data: Path,
    address: str,
    ready: Callable[[str], None],
    e2b: Settings | None = None,
    health: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called with the URL once requests are answered.
    `health` is where probes and scrapes are answered without a token."""
    found, url = listen(address)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(found.close)
        service = await stack.enter_async_context(open_service())
        publish = stack.enter_context(published_address(data, url))
        await stack.enter_async_context(health_listener(health))
        _log.info(
            "E2B's clients: E2B_API_URL=%s E2B_SANDBOX_URL=%s E2B_API_KEY=$(cat %s)",
            *(url, url, data / "token"),
        )

        def answering() -> None:
            publish()
            ready(url)

        server = make_server(service, ready=answering, e2b_key=load_key(data), e2b=e2b)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
            stack.callback(loop.remove_signal_handler, number)
        await server.serve(sockets=[found])


def run(
    open_service: Callable[[], AbstractAsyncContextManager[SessionService]],
    *,
    data: Path,
    address: str,
    e2b: Settings | None = None,
    health: str | None = None,
) -> None:
    """Serve in this process, saying `ready URL` on standard output."""
    import uvloop

    def ready(url: str) -> None:
        sys.stdout.write(f"ready {url}\n")
        sys.stdout.flush()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(open_service, data=data, address=address, ready=ready, e2b=e2b, health=health)
        )
