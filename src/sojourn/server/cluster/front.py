"""The ASGI application of a server: what it answers itself, and what it has nodes answer.

Guarantee: before anything is asked of a node the caller is known, or shows a token that only the
node can check; a failure is told in the form its client reads. Secrets, templates and tokens that
were changed are in force at all nodes and servers when the change is answered; the log names a node
that does not say so within REFRESH_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from litestar.types import ASGIApp, Receive, Scope, Send

from sojourn.errors import (
    CapacityExhausted,
    NodeUnavailable,
    NotFound,
    SojournError,
    Unauthenticated,
    Unreachable,
)
from sojourn.model.nodes import Node
from sojourn.server.answers import Answer, error_answer, internal_error
from sojourn.server.auth import bearer_token
from sojourn.server.base import Principal
from sojourn.server.cluster import routing
from sojourn.server.cluster.bodies import ClientLeft
from sojourn.server.cluster.callers import Callers
from sojourn.server.cluster.forwarding import Exchange, lost
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.rooms import Rooms, refresh_all
from sojourn.server.cluster.routing import Kind, Shared, Style, Wanted
from sojourn.server.cluster.targets import Targets
from sojourn.server.cluster.upstream import Broken, Upstream
from sojourn.server.e2b import connect, failures, ids

log = logging.getLogger(__name__)

REFRESH_SECONDS = 20.0
_BEGIN_SECONDS = 5.0
_JSON = (b"content-type", b"application/json")


class Front:
    """In front of everything. `own` answers what is the server's own."""

    def __init__(
        self,
        own: ASGIApp,
        callers: Callers,
        targets: Targets,
        members: Members,
        upstream: Upstream,
        rooms: Rooms,
    ) -> None:
        self._own = own
        self._callers = callers
        self._targets = targets
        self._members = members
        self._upstream = upstream
        self._rooms = rooms
        self.ports_changed: Callable[[], Awaitable[None]] = _nothing
        """Awaited when a port was exposed, or is no longer, before that is answered."""
        self._stopping = False
        self._under_way: dict[Exchange, None] = {}
        self._telling: set[asyncio.Task[None]] = set()
        members.gone = self._gone

    # -- life -------------------------------------------------------------------------------

    def _gone(self, node: Node, until: float) -> None:
        log.warning("node %s is gone", node.name)
        self._upstream.forget(node.id)
        for exchange in list(self._under_way):
            if exchange.node == node.id and exchange.since < until:
                exchange.end(lost(node.id))

    def begin_stop(self) -> None:
        """Cut off streams, which clients attach to again at another server; the rest may end. A
        stream that begins something is given time to tell what: before, nobody could attach to
        it, nor know whether it was begun."""
        self._stopping = True
        self._cut_off(asked_only=True)
        asyncio.get_running_loop().call_later(_BEGIN_SECONDS, self._cut_off)

    def _cut_off(self, *, asked_only: bool = False) -> None:
        for exchange in list(self._under_way):
            if exchange.started and exchange.streaming and (exchange.asks or not asked_only):
                exchange.end(Broken("the server stops"))

    @property
    def under_way(self) -> int:
        """How many requests are at nodes."""
        return len(self._under_way)

    # -- requests ---------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if str(scope["type"]) != "http":
            await self._own(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        wanted = routing.classify(str(scope.get("method")), str(scope["path"]), headers)
        if wanted.kind is Kind.OWN:
            await self._own(scope, receive, send)
            return
        exchange: Exchange | None = None
        answered = False

        async def answering(status: int, node: str) -> None:
            nonlocal answered
            answered = True
            await self._answered(wanted, status, node)

        try:
            who = await self._authenticate(wanted, scope, headers)
            exchange = Exchange(
                self._targets,
                self._upstream,
                self._rooms,
                scope,
                receive,
                send,
                headers,
                wanted,
                who,
            )
            self._under_way[exchange] = None
            await exchange.run(answering)
        except ClientLeft:
            return
        except Broken as error:
            if exchange is not None and exchange.started:
                # Without its end no client takes it for whole; a stream is attached to again.
                log.info("an answer was cut off: %s", error)
                return
            told = lost(exchange.node or "") if exchange is not None else Unreachable(str(error))
            await self._tell(wanted, headers, told)(scope, receive, send)
        except SojournError as error:
            if exchange is not None and exchange.started:
                log.info("an answer was cut off: %s", error)
                return
            await self._tell(wanted, headers, error)(scope, receive, send)
        except Exception as error:
            if exchange is not None and exchange.started:
                raise
            await self._tell(wanted, headers, internal_error(error))(scope, receive, send)
        finally:
            if exchange is not None:
                self._under_way.pop(exchange, None)
                if not answered and exchange.node is not None and wanted.changes is not None:
                    # Whoever asked has left, or the node: it may have been done all the same.
                    task = asyncio.create_task(self._answered(wanted, 200, ""), name="tell nodes")
                    self._telling.add(task)
                    task.add_done_callback(self._telling.discard)

    async def _authenticate(
        self, wanted: Wanted, scope: Scope, headers: dict[bytes, bytes]
    ) -> Principal | None:
        """Who asks; None where only the node can tell. Raises Unauthenticated."""
        if wanted.shows is None:
            return None
        if wanted.shows == b"authorization":
            token = bearer_token(scope["headers"])
        else:
            value = headers.get(wanted.shows, b"")
            token = value.decode("ascii") if value.isascii() else None
        return await self._callers.authenticate(token)

    async def _answered(self, wanted: Wanted, status: int, node: str) -> None:
        """Before a client learns that something was changed, everybody else has."""
        if status >= 400 or wanted.changes is None:
            return
        if wanted.changes is Shared.PORTS:
            await self.ports_changed()
            return
        if wanted.changes is Shared.TOKENS:
            await self._callers.settle()
            return
        behind = await refresh_all(
            self._members,
            self._upstream,
            wanted.changes.value,
            node,
            seconds=REFRESH_SECONDS,
        )
        if behind:
            log.error(
                "changed %s are not in force yet on %s", wanted.changes.value, ", ".join(behind)
            )

    # -- failures ---------------------------------------------------------------------------

    def _tell(self, wanted: Wanted, headers: dict[bytes, bytes], error: SojournError) -> Answer:
        more: list[tuple[bytes, bytes]] = []
        after = error.details.get("retry_after")
        if isinstance(error, (CapacityExhausted, NodeUnavailable)) and isinstance(after, int):
            more.append((b"retry-after", b"%d" % after))
        if self._stopping:
            more.append((b"connection", b"close"))
        match wanted.style:
            case Style.E2B_API:
                status = failures.api_status(error)
                return Answer(status, failures.api_body(error), [_JSON, *more])
            case Style.E2B_FILES:
                status = failures.file_status(error)
                message = failures.rpc_message(error, _sandbox(wanted), stopping=self._stopping)
                body = connect.encode({"code": status, "message": message})
                return Answer(status, body, [_JSON, *more])
            case Style.E2B_RPC:
                return self._tell_rpc(wanted, headers, error, more)
        return error_answer(error, headers=more)

    def _tell_rpc(
        self, wanted: Wanted, headers: dict[bytes, bytes], error: SojournError, more: list[Any]
    ) -> Answer:
        told = connect.error_object(error, _sandbox(wanted), stopping=self._stopping)
        stream = connect.STREAM.encode()
        streamed = headers.get(b"content-type", b"").startswith(stream)
        if streamed and not isinstance(error, (NotFound, Unauthenticated)):
            return Answer(200, connect.end(told), [(b"content-type", stream), *more])
        return Answer(failures.rpc_status(told["code"]), connect.encode(told), [_JSON, *more])


async def _nothing() -> None:
    """Nobody listens."""


def _sandbox(wanted: Wanted) -> str:
    return "" if wanted.ref is None else ids.sandbox_id(wanted.ref)
