"""One request on its way to a node, and its answer on its way back.

Guarantee: it is executed by one node, once: it is sent again only where the node cannot have begun
it (it could not be reached, or said that it does not hold the session or has no room), and a client
learns of every other failure. Bytes pass both ways as they come, no faster than they are taken.
When the client leaves, the node's work for it ends; when the node is lost, or this server stops, a
stream is cut off visibly, which clients answer by attaching again at their offset.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

from sojourn.errors import (
    CapacityExhausted,
    ErrorBody,
    Interrupted,
    NodeFenced,
    NodeUnavailable,
    NotFound,
    SessionElsewhere,
    SojournError,
    from_body,
)
from sojourn.model.sessions import Limits
from sojourn.server.base import Principal
from sojourn.server.cluster import callers
from sojourn.server.cluster.bodies import KEPT_BYTES, Body, ClientLeft
from sojourn.server.cluster.rooms import Rooms
from sojourn.server.cluster.routing import Kind, Style, Wanted
from sojourn.server.cluster.targets import PATIENCE_SECONDS, Target, Targets, new_need
from sojourn.server.cluster.upstream import Answer, Broken, Headers, NotSent, Upstream
from sojourn.server.endpoints import MAX_JSON_BODY
from sojourn.telemetry import tracing

_WATCH_SECONDS = 0.02
_ERROR_BYTES = 64 * 1024
_TRIES = 6
_AGAIN_SECONDS = 0.1
_NODE_SECONDS = 0.5
_LOOKED_AT = frozenset({409, 421, 503})
_NOT_BEGUN = (SessionElsewhere, NodeFenced, NodeUnavailable, CapacityExhausted)
"""What a node says before it begins anything."""
_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
    }
)
_WAKING = frozenset(
    {"exec", "code", "processes", "files", "tree", "resume", "fork", "turns", "connect"}
)


class _Making(msgspec.Struct, frozen=True):
    """What of a request for a new session its place depends on."""

    limits: Limits | None = None
    labels: dict[str, str] = {}
    metadata: dict[str, str] = {}


class Exchange:
    """One request. `answered` is awaited between the node's answer and the client's, with its
    status and who gave it."""

    def __init__(
        self,
        targets: Targets,
        upstream: Upstream,
        rooms: Rooms,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        wanted: Wanted,
        who: Principal | None,
    ) -> None:
        self._targets = targets
        self._upstream = upstream
        self._rooms = rooms
        self._scope: dict[str, Any] = dict(scope)
        self._receive = receive
        self._send = send
        self._wanted = wanted
        self._who = who
        self._tenant = None if who is None else who.tenant
        keep = MAX_JSON_BODY if wanted.kind is Kind.PLACE else KEPT_BYTES
        self._body = Body(headers, receive, keep)
        self._headers = _request_headers(self._scope["headers"], who)
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._avoid: frozenset[str] = frozenset()
        self._target: Target | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ended: Exception | None = None
        self.node: str | None = None
        """Who may be at work on it: whose answer is waited for or passed on."""
        self.since = 0.0
        """Since when, by the monotonic clock."""
        self.started = False
        """Whether the client has the head of an answer."""
        self.streaming = False
        """Whether its answer comes over time."""
        self._finished = False

    @property
    def asks(self) -> bool:
        """Whether it only asks, so that asking again does no harm."""
        return self._scope["method"] in ("GET", "HEAD")

    def end(self, cause: Exception) -> None:
        """End it from outside."""
        if self._ended is None and self._task is not None and not self._finished:
            self._ended = cause
            self._task.cancel()

    async def run(self, answered: Callable[[int, str], Any]) -> None:
        """Carry it out. Raises what is to be told to the client; ClientLeft; Broken when it has
        the head of an answer already."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        watch: asyncio.Task[None] | None = None

        def begin_watch() -> None:
            nonlocal watch
            watch = loop.create_task(self._watch())

        timer = loop.call_later(_WATCH_SECONDS, begin_watch)
        try:
            answer = await self._answer()
            try:
                await answered(answer.status, self.node or "")
                await self._pass_on(answer)
            finally:
                await answer.close()
        except asyncio.CancelledError:
            if self._ended is None or self._task is None:
                raise
            self._task.uncancel()
            raise self._ended from None
        finally:
            self._task = None
            timer.cancel()
            if watch is not None:
                watch.cancel()

    async def _watch(self) -> None:
        """End it when the client leaves, once its request is read."""
        while not self._body.complete and not self._body.empty:
            await asyncio.sleep(_WATCH_SECONDS * 5)
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientLeft())

    # -- asking -----------------------------------------------------------------------------

    async def _answer(self) -> Answer:
        """A node's answer, from whichever node that is at last."""
        if not self._body.empty:
            await self._body.begin()
        tries = 0
        while True:
            tries += 1
            target = self._target or await self._find()
            self._target = None
            try:
                answer = await self._ask(target)
            except NotSent as error:
                await self._not_reached(target, error)
                continue
            except BaseException:
                _cancel(target)
                raise
            if answer.status == 401 and self._elsewhere(target):
                await answer.close()
                self._avoid |= {target.node.id}
                continue
            if answer.status not in _LOOKED_AT:
                _settle(target, answer.status)
                return answer
            refused = await _refusal(answer)
            if isinstance(refused, Answer):
                _settle(target, answer.status)
                return refused
            self.node = None
            _cancel(target)
            if isinstance(refused, (NodeUnavailable, NodeFenced)):
                tries -= 1  # it has no lease: until it has, or another one has its sessions
            last = tries >= _TRIES or not self._body.replayable
            if last or time.monotonic() >= self._deadline:
                raise _told(refused)
            await self._refused(target, refused)

    async def _find(self) -> Target:
        wanted = self._wanted
        if wanted.kind is Kind.SESSION and wanted.ref is not None:
            return await self._targets.holder(
                self._tenant,
                wanted.ref,
                wakes=self._wakes(),
                deadline=self._deadline,
                avoid=self._avoid,
            )
        if wanted.kind is Kind.OPERATION and wanted.ref is not None:
            return await self._targets.runner(self._tenant, wanted.ref, deadline=self._deadline)
        if wanted.kind is Kind.PLACE:
            made = await self._making()
            need = new_need(made.limits, made.labels | made.metadata, self._avoid)
            return await self._targets.place(self._tenant or "", need)
        return Target(self._targets.any(self._avoid))

    async def _making(self) -> _Making:
        if (self._headers_value(b"content-type") or b"").startswith(b"application/json") or (
            not self._headers_value(b"content-type")
        ):
            try:
                return msgspec.json.decode(await self._body.whole(), type=_Making)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return _Making()  # the node says what is wrong with it
        return _Making()

    def _headers_value(self, name: bytes) -> bytes | None:
        return next((value for key, value in self._headers if key == name), None)

    def _wakes(self) -> bool:
        path = str(self._scope["path"])
        if self._who is None:
            return True  # what runs inside a sandbox
        return any(part in _WAKING for part in path.split("/")[3:])

    async def _ask(self, target: Target) -> Answer:
        scope = self._scope
        query = scope["query_string"]
        path = scope.get("raw_path") or scope["path"].encode()
        if f"{scope['path']}/".startswith("/node/"):
            raise NotFound("there is no such address")  # for servers alone, whatever led here

        def connected() -> None:
            self.node, self.since = target.node.id, time.monotonic()

        with tracing.client_span("forward", sojourn__node=target.node.id):
            return await self._upstream.send(
                target.node,
                scope["method"].encode("ascii"),
                path + b"?" + query if query else path,
                tracing.forwarded(self._headers),
                b"" if self._body.empty else self._body.content(),
                connected=connected,
            )

    def _elsewhere(self, target: Target) -> bool:
        """Whether what a node does not know may be another's: a signed address of a file names no
        sandbox, and only the node that has it knows the signature."""
        wanted = self._wanted
        signed = wanted.style is Style.E2B_FILES and b"signature=" in self._scope["query_string"]
        if not signed or wanted.ref is not None or not self._body.replayable:
            return False
        return self._targets.others(self._avoid | {target.node.id})

    async def _not_reached(self, target: Target, error: NotSent) -> None:
        """The node did not get it: another one does, or the same one when it is there again."""
        _cancel(target)
        if time.monotonic() >= self._deadline or not self._body.replayable:
            raise NodeUnavailable(
                f"the node {target.node.name} cannot be reached: {error}",
                node=target.node.id,
                retry_after=5,
            ) from None
        if self._wanted.kind is not Kind.SESSION or target.reservation is not None:
            self._avoid |= {target.node.id}
        if self._wanted.ref is not None:
            self._targets.forget(self._tenant, self._wanted.ref)
        await asyncio.sleep(_AGAIN_SECONDS)

    async def _refused(self, target: Target, refused: SojournError) -> None:
        """The node has not begun it, and said why: what to do next."""
        wanted = self._wanted
        if wanted.ref is not None:
            self._targets.forget(self._tenant, wanted.ref)
        if isinstance(refused, CapacityExhausted):
            if wanted.kind is Kind.SESSION and wanted.ref is not None:
                self._target = await self._rooms.elsewhere(self._tenant, wanted.ref, target.node)
            else:
                self._avoid |= {target.node.id}
            return
        session = refused.details.get("session")
        if isinstance(refused, SessionElsewhere) and wanted.ref is None and session is not None:
            # It names the session in a way only nodes understand.
            deadline = self._deadline
            self._target = await self._targets.holder(
                None, str(session), wakes=True, deadline=deadline, avoid=self._avoid
            )
            return
        away = isinstance(refused, (NodeUnavailable, NodeFenced))
        if away and wanted.kind in (Kind.ANY, Kind.PLACE):
            self._avoid |= {target.node.id}
            return
        await asyncio.sleep(_NODE_SECONDS if away else _AGAIN_SECONDS)

    # -- answering --------------------------------------------------------------------------

    async def _pass_on(self, answer: Answer) -> None:
        headers = [(name, value) for name, value in answer.headers if name not in _HOP]
        self.streaming = answer.header(b"content-length") is None and answer.status != 204
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self._send(start)  # type: ignore[arg-type]
        self.started = True
        async for piece in answer.pieces():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        # From here on `receive` tells of an end that is none: the answer's own.
        self._finished = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _refusal(answer: Answer) -> SojournError | Answer:
    """Why a node did not begin a request; its answer where it says something else."""
    try:
        body = await answer.read(_ERROR_BYTES)
    finally:
        await answer.close()
    try:
        error = from_body(msgspec.json.decode(body, type=ErrorBody))
    except msgspec.MsgspecError:
        return _Whole(answer, body)
    if isinstance(error, _NOT_BEGUN) and "operation" not in error.details:
        return error
    return _Whole(answer, body)  # also what a verb met that had begun and is on record


class _Whole(Answer):
    """An answer that was read."""

    def __init__(self, answer: Answer, body: bytes) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self._body = body

    async def pieces(self) -> Any:
        """The body."""
        yield self._body

    async def close(self) -> None:
        """There is nothing to close."""


def _told(error: SojournError) -> SojournError:
    """What a client is told when a node has refused for the last time."""
    if isinstance(error, CapacityExhausted):
        return error
    return NodeUnavailable(
        f"the session moves between nodes: {error.message}", retry_after=1, **error.details
    )


def _settle(target: Target, status: int) -> None:
    if target.reservation is not None:
        if status < 400:
            target.reservation.settle()
        else:
            target.reservation.cancel()


def _cancel(target: Target) -> None:
    if target.reservation is not None:
        target.reservation.cancel()


def lost(node: str) -> Interrupted:
    """What a client is told whose request was under way at a node that is gone."""
    return Interrupted(
        "the node that worked on it was lost",
        next_step="Look whether it was done, and ask again; the session goes on elsewhere.",
        node=node,
    )


def _request_headers(given: list[tuple[bytes, bytes]], who: Principal | None) -> Headers:
    named = {
        word.strip().lower()
        for name, value in given
        if name == b"connection"
        for word in value.split(b",")
    } - {b"content-length", b"host"}
    dropped = _HOP | named | {callers.HEADER}
    if who is not None:
        dropped |= {b"authorization", b"x-api-key"}
    headers = [(name, value) for name, value in given if name not in dropped]
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b""))  # HTTP/1.0 has none; 1.1 wants one
    if who is not None:
        headers.append((callers.HEADER, callers.encode_principal(who)))
    return headers


__all__ = ["Broken", "Exchange", "lost"]
