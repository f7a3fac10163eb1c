"""E2B's interfaces beside the server's own, at one address.

Guarantee: what E2B's clients ask is answered here, everything else by the API as if this were not
there. Before a route runs, the API key is checked (control plane), or a token of that very sandbox
(its agent); to whoever has neither, no sandbox exists. Every failure has a body its client reads.

One address for all of it, because the SDKs take one address for the control plane (E2B_API_URL)
and one for sandboxes (E2B_SANDBOX_URL), name the sandbox in a header, and drop any path of the
latter when they sign the address of a file. None of these paths begins with /v1.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, cast

from litestar.types import ASGIApp, Receive, Scope, Send

from sojourn.errors import (
    CapacityExhausted,
    NodeFenced,
    NodeUnavailable,
    NotFound,
    SessionElsewhere,
    SessionNotFound,
    SojournError,
    Unauthenticated,
)
from sojourn.server.answers import Answer, Shutdown, error_answer, internal_error
from sojourn.server.base import Principal, SessionService
from sojourn.server.e2b import connect, failures, ids
from sojourn.server.e2b.calls import JSON, Call, Route, nothing
from sojourn.server.e2b.contents import Contents, expired
from sojourn.server.e2b.control import Control
from sojourn.server.e2b.drains import Drains
from sojourn.server.e2b.filesystem import Filesystem
from sojourn.server.e2b.interpreters import Interpreters
from sojourn.server.e2b.processes import Processes
from sojourn.server.e2b.rooms import Rooms
from sojourn.server.e2b.sandboxes import Sandboxes
from sojourn.server.e2b.settings import TEMPLATE, Settings
from sojourn.server.e2b.watchers import Watchers
from sojourn.server.endpoints import PRINCIPAL, caller

API, FILES, CODE, UNARY, STREAM = "api", "files", "code", "unary", "stream"
_ENDING = frozenset({"pause", "suspend", "delete"})
_FOR_SERVERS = (SessionElsewhere, CapacityExhausted, NodeUnavailable, NodeFenced)
"""What a node says to a server before it begins anything; the server then asks another one."""
_log = logging.getLogger(__name__)
_HOST = re.compile(rb"(\d{1,5})-(ses-[0-9a-z]{24})\.")
_S = r"(?P<sandbox>[^/]+)"


def _not_begun(error: SojournError) -> bool:
    # What an operation met that is on record is its answer, wherever it is asked again.
    return isinstance(error, _FOR_SERVERS) and "operation" not in error.details


class _Declared:
    """A route: what it serves, and in which style its failures are told."""

    def __init__(self, style: str, method: str, path: str, route: Route) -> None:
        self.style = style
        self.method = method
        self.path = re.compile(path)
        self.route = route


class E2B:
    """The ASGI application in front of the API's own."""

    def __init__(
        self,
        inner: ASGIApp,
        service: SessionService,
        key: bytes,
        shutdown: Shutdown,
        settings: Settings | None = None,
    ) -> None:
        self._inner = inner
        self._service = service
        self._shutdown = shutdown
        self._tokens = ids.Tokens(key)
        sandboxes = Sandboxes(service, self._tokens, settings or Settings())
        self._sandboxes = sandboxes
        self._begun: asyncio.Task[None] | None = None
        self._drains = Drains(service)
        rooms = Rooms(sandboxes, self._drains)
        self._watchers = Watchers(rooms)
        self._routes = self._declare(
            Control(sandboxes, rooms),
            Processes(rooms, self._drains),
            Filesystem(rooms, self._watchers),
            Contents(rooms),
            Interpreters(rooms),
        )

    def _declare(
        self,
        control: Control,
        processes: Processes,
        filesystem: Filesystem,
        contents: Contents,
        interpreters: Interpreters,
    ) -> dict[str, list[_Declared]]:
        box = rf"(?:/v2)?/sandboxes/{_S}"
        declared = [
            _Declared(API, "POST", r"(?:/v2)?/sandboxes", control.create),
            _Declared(API, "GET", r"(?:/v2)?/sandboxes", control.list),
            _Declared(API, "GET", box, control.get),
            _Declared(API, "DELETE", box, control.kill),
            _Declared(API, "POST", rf"{box}/timeout", control.set_timeout),
            _Declared(API, "POST", rf"{box}/refreshes", control.refresh),
            _Declared(API, "POST", rf"{box}/pause", control.pause),
            _Declared(API, "POST", rf"{box}/(?:connect|resume)", control.connect),
            _Declared(API, "POST", rf"{box}/fork", control.fork),
            _Declared(API, "POST", rf"{box}/snapshots", control.snapshot),
            _Declared(API, "GET", rf"{box}/metrics", control.metrics),
            _Declared(API, "PUT", rf"{box}/network", control.network),
            _Declared(API, "GET", r"/snapshots", control.snapshots),
            _Declared(API, "GET", r"/templates/aliases/(?P<template>[^/]+)", control.template),
            _Declared(API, "DELETE", r"/templates/(?P<template>[^/]+)", control.delete_template),
            _Declared(
                API,
                "*",
                r"(?:/v[23])?/(?P<what>sandboxes|templates|volumes|secrets|teams|nodes|access-tokens"
                r"|api-keys)(?:/.*)?",
                control.refuse,
            ),
            _Declared(FILES, "GET", r"/health", self._health),
            _Declared(FILES, "GET", r"/files", contents.read),
            _Declared(FILES, "POST", r"/files", contents.write),
            _Declared(CODE, "POST", r"/execute", interpreters.execute),
            _Declared(CODE, "POST", r"/contexts", interpreters.create),
            _Declared(CODE, "GET", r"/contexts", interpreters.list),
            _Declared(CODE, "DELETE", r"/contexts/(?P<context>[^/]+)", interpreters.remove),
            _Declared(CODE, "POST", r"/contexts/(?P<context>[^/]+)/restart", interpreters.restart),
        ]
        declared += [
            _Declared(STREAM, "POST", f"/{path}", route)
            for path, route in {
                r"process\.Process/Start": processes.start,
                r"process\.Process/Connect": processes.connect,
                r"filesystem\.Filesystem/WatchDir": filesystem.watch_dir,
            }.items()
        ]
        declared += [
            _Declared(UNARY, "POST", f"/{path}", _unary(route))
            for path, route in {
                r"process\.Process/List": processes.list,
                r"process\.Process/Update": processes.update,
                r"process\.Process/SendInput": processes.send_input,
                r"process\.Process/StreamInput": processes.stream_input,
                r"process\.Process/SendSignal": processes.send_signal,
                r"process\.Process/CloseStdin": processes.close_stdin,
                r"filesystem\.Filesystem/Stat": filesystem.stat,
                r"filesystem\.Filesystem/MakeDir": filesystem.make_dir,
                r"filesystem\.Filesystem/Move": filesystem.move,
                r"filesystem\.Filesystem/ListDir": filesystem.list_dir,
                r"filesystem\.Filesystem/Remove": filesystem.remove,
                r"filesystem\.Filesystem/CreateWatcher": filesystem.create_watcher,
                r"filesystem\.Filesystem/GetWatcherEvents": filesystem.watcher_events,
                r"filesystem\.Filesystem/RemoveWatcher": filesystem.remove_watcher,
            }.items()
        ]
        found: dict[str, list[_Declared]] = {}
        for one in declared:
            found.setdefault(one.method, []).append(one)
        return found

    # -- requests ---------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        found = None if path.startswith("/v1/") else self._find(str(scope.get("method")), path)
        if found is None:
            await self._inner(scope, receive, send)
            return
        declared, groups = found
        call = Call(scope, receive, self._service, self._shutdown, groups)
        try:
            await self._identify(call, declared.style)
            answer = await declared.route(call)
            await answer(scope, receive, send)
        except SojournError as error:
            if PRINCIPAL in scope and _not_begun(error):
                await error_answer(error)(scope, receive, send)
                return
            await self._failure(call, declared.style, error)(scope, receive, send)
        except Exception as error:  # noqa: BLE001
            # Whatever goes wrong inside is answered in the form this client reads.
            told = internal_error(error)
            await self._failure(call, declared.style, told)(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[_Declared, dict[str, str]] | None:
        for declared in [*self._routes.get(method, ()), *self._routes["*"]]:
            found = declared.path.fullmatch(path)
            if found is not None:
                return declared, found.groupdict()
        return None

    def start(self) -> None:
        """Begin to serve, from within the event loop."""
        self._begun = asyncio.create_task(self._begin(), name="sandboxes of before")

    async def stop(self) -> None:
        """End what runs in the background."""
        if self._begun is not None:
            self._begun.cancel()
            await asyncio.gather(self._begun, return_exceptions=True)
        await self._watchers.stop()
        await self._drains.stop()

    async def exposes(self, session: str, port: int) -> Principal | None:
        """Who exposes a port that a request names; None: nobody."""
        return await self._sandboxes.exposes(session, port)

    async def _begin(self) -> None:
        """Take up what an earlier server served: ports that are asked for, output nobody reads."""
        for tenant, session in await self._service.every():
            who = ids.principal(tenant)
            try:
                info = await self._service.get(who, session)
                if TEMPLATE not in info.labels:
                    continue
                await self._sandboxes.domain()
                self._drains.watch(who, session)
            except SojournError as error:
                _log.debug("session %s is not taken up: %s", session, error)
        await self._drains.run()

    async def _health(self, call: Call) -> ASGIApp:
        """GET /health: whether the sandbox runs."""
        name = ids.sandbox_id(call.session)
        try:
            info = await self._service.get(call.who, call.session)
            if info.operation is not None:
                # Clients ask this when a connection broke: what counts is where it is going.
                under_way = await self._service.operation(call.who, info.operation)
                if under_way.verb in _ENDING:
                    await self._sandboxes.settled(call.who, info)
                    info = await self._service.get(call.who, call.session)
        except SessionNotFound:
            raise failures.not_running(name, "it was killed or reached its timeout") from None
        if info.state not in ("running", "creating"):
            raise failures.not_running(name, f"it is {info.state}")
        return nothing()

    # -- who asks ---------------------------------------------------------------------------

    async def _identify(self, call: Call, style: str) -> None:
        if style == API:
            if PRINCIPAL in call.scope:
                call.who = await caller(call.scope, self._service)
                return
            key = call.header(b"x-api-key")
            if key is not None and not key.isascii():
                key = None
            call.who = await self._service.authenticate(key)
            return
        if "signature" in call.query and call.path == "/files":
            await self._signed(call)
            return
        session = ids.session_id(_named(call) or "")
        purposes = (ids.ACCESS, ids.TRAFFIC) if style == CODE else (ids.ACCESS,)
        token = call.header(b"x-access-token")
        if token is None and style == CODE:
            token = call.header(b"e2b-traffic-access-token")
        if token is None:
            raise Unauthenticated(
                "no token of the sandbox was given", next_step="Connect to the sandbox for one."
            )
        who = None if session is None else self._tokens.check(token, session, *purposes)
        if who is None or session is None:
            # Whether there is such a sandbox is nobody's business who cannot open it.
            raise NotFound("there is no such sandbox, or this is not its token", next_step="")
        call.groups["session"] = session
        call.who = who

    async def _signed(self, call: Call) -> None:
        """Which sandbox a signed address is of: a signature opens one file of one sandbox."""
        expiration = call.query.get("signature_expiration")
        given = call.query["signature"]
        if expired(expiration):
            raise Unauthenticated("signature is already expired", next_step="Sign it anew.")
        operation = "read" if call.method == "GET" else "write"
        path, user = call.query.get("path", ""), call.query.get("username", "")
        named = ids.session_id(_named(call) or "")
        async for tenant, session in self._sandboxes.known.each():
            if named is not None and session != named:
                continue
            wanted = self._tokens.signature(tenant, session, path, operation, user, expiration)
            if ids.same(wanted, given):
                call.groups["session"] = session
                call.who = ids.principal(tenant)
                return
        raise Unauthenticated("invalid signature", next_step="Sign it anew.")

    # -- failures ---------------------------------------------------------------------------

    def _failure(self, call: Call, style: str, error: SojournError) -> Answer:
        session = call.groups.get("session")
        sandbox = ids.sandbox_id(session) if session else _named(call) or call.sandbox
        if style == API:
            return Answer(failures.api_status(error), failures.api_body(error), [JSON])
        if style in (FILES, CODE):
            status = failures.file_status(error)
            stopping = self._shutdown.stopping
            message = failures.rpc_message(error, sandbox, stopping=stopping)
            return Answer(status, connect.encode({"code": status, "message": message}), [JSON])
        told = connect.error_object(error, sandbox, stopping=self._shutdown.stopping)
        if style == STREAM and not isinstance(error, (NotFound, Unauthenticated)):
            headers = [(b"content-type", connect.STREAM.encode())]
            return Answer(200, connect.end(told), headers)
        return Answer(failures.rpc_status(told["code"]), connect.encode(told), [JSON])


def _named(call: Call) -> str | None:
    """The sandbox id a request is for, by its header, else by its host."""
    name = call.header(b"e2b-sandbox-id")
    if name is not None:
        return name
    found = _HOST.match(call.headers.get(b"host", b""))
    return None if found is None else found[2].decode()


def _unary(method: Any) -> Route:
    """A method that answers one message, also to a stream of them."""

    async def route(call: Call) -> ASGIApp:
        streamed = (call.header(b"content-type") or "").startswith(connect.STREAM)
        with call.shutdown.cancellable():
            message = await method(call)
        if streamed:
            headers = [(b"content-type", connect.STREAM.encode())]
            return Answer(200, connect.envelope(message) + connect.end(), headers)
        return Answer(200, connect.encode(message), [JSON])

    return cast(Route, route)
