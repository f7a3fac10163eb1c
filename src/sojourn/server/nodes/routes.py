"""What servers ask of a node besides the API: below /node/.

Guarantee: nobody but a server reaches these addresses, since the node's listener takes no other
connection; whatever fails is answered with an error body as everywhere.

    GET  /node/health                             whether it holds its lease
    POST /node/sessions/{id}/take                 hold one that nobody holds
    POST /node/sessions/{ref}/release             let go of one that is put away, once it is safe
    POST /node/sessions/{ref}/prefetch            {snapshot}: bring it; {}: a migration comes here
    POST /node/operations                         look now for what was handed over
    POST /node/evict                              {need, idle}: make room
    POST /node/refresh                            {what}: something was changed elsewhere
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

from sojourn.errors import NotFound, SojournError
from sojourn.server.answers import Answer, empty_answer, error_answer, internal_error, json_answer
from sojourn.server.cluster.callers import HEADER, decode_principal
from sojourn.server.endpoints import MAX_JSON_BODY, PRINCIPAL, decode_body
from sojourn.server.nodes.service import NodeService
from sojourn.wire.nodes import EvictRequest, PrefetchRequest, RefreshRequest


class Health(msgspec.Struct, frozen=True):
    """How the node stands."""

    node: str
    incarnation: int
    held: bool
    state: str


Handler = Callable[[NodeService, str, bytes], Awaitable[Answer]]


async def _health(node: NodeService, _ref: str, _body: bytes) -> Answer:
    identity = node.identity
    held = identity.lease.held
    told = Health(identity.id, identity.fence.incarnation, held, str(identity.state))
    return json_answer(told, 200 if held else 503)


async def _take(node: NodeService, ref: str, _body: bytes) -> Answer:
    await node.holding.hold(ref)
    return empty_answer()


async def _release(node: NodeService, ref: str, _body: bytes) -> Answer:
    await node.holding.release(ref)
    return empty_answer()


async def _prefetch(node: NodeService, ref: str, body: bytes) -> Answer:
    asked = decode_body(body, _PREFETCH)
    node.work.fetch_soon(ref, asked.snapshot)
    return Answer(202, b"", [])


async def _operations(node: NodeService, _ref: str, _body: bytes) -> Answer:
    node.identity.hint.set()
    return Answer(202, b"", [])


async def _evict(node: NodeService, _ref: str, body: bytes) -> Answer:
    asked = decode_body(body, _EVICT)
    return json_answer(await node.work.evict(asked.need, asked.idle))


async def _refresh(node: NodeService, _ref: str, body: bytes) -> Answer:
    await node.work.refresh(decode_body(body, _REFRESH).what)
    return empty_answer()


_PREFETCH = msgspec.json.Decoder(PrefetchRequest)
_EVICT = msgspec.json.Decoder(EvictRequest)
_REFRESH = msgspec.json.Decoder(RefreshRequest)
_ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "health"): _health,
    ("POST", "operations"): _operations,
    ("POST", "evict"): _evict,
    ("POST", "refresh"): _refresh,
    ("POST", "take"): _take,
    ("POST", "release"): _release,
    ("POST", "prefetch"): _prefetch,
}


_OF_SESSIONS = ("take", "release", "prefetch")


class NodeApp:
    """In front of a node's applications: its own addresses, and who asks at all others."""

    def __init__(self, inner: Any, node: NodeService) -> None:
        self._inner = inner
        self._node = node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked: Any = scope
        if asked["type"] != "http":
            await self._inner(scope, receive, send)
            return
        if asked["path"].startswith("/node/"):
            answer = await self._own(asked, receive)
            await answer(scope, receive, send)
            return
        asked[PRINCIPAL] = None
        try:
            for name, value in asked["headers"]:
                if name == HEADER:
                    asked[PRINCIPAL] = decode_principal(value)
        except SojournError as error:
            await error_answer(error)(scope, receive, send)
            return
        await self._inner(scope, receive, send)

    async def _own(self, asked: Any, receive: Receive) -> Answer:
        try:
            parts = asked["path"].split("/")[2:]
            match parts:
                case ["sessions", ref, verb] if verb in _OF_SESSIONS:
                    handler = _ROUTES.get((asked["method"], verb))
                case [verb] if verb not in _OF_SESSIONS:
                    ref, handler = "", _ROUTES.get((asked["method"], verb))
                case _:
                    ref, handler = "", None
            if handler is None:
                raise NotFound(f"there is no {asked['method']} {asked['path']}", next_step="")
            return await handler(self._node, ref, await _body(receive))
        except SojournError as error:
            return error_answer(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server is answered
            return error_answer(internal_error(error))


async def _body(receive: Receive) -> bytes:
    whole = bytearray()
    while True:
        message: Any = await receive()
        if message["type"] != "http.request":
            return bytes(whole)
        whole += message.get("body", b"")[: MAX_JSON_BODY - len(whole)]
        if not message.get("more_body"):
            return bytes(whole)
