"""/v1/sessions/{ref}/effects and /network: what left a session, and changes of what it reaches. The
whole policy is part of the session itself."""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import InvalidRequest, SessionNotFound, Unreachable
from sojourn.server.answers import json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.wire.api import EffectPage, SessionInfo
from sojourn.wire.networks import NetworkChange


@endpoint(
    "GET",
    "/v1/sessions/{ref}/effects",
    "List what left a session and cannot be taken back, oldest first, a page at a time",
    answers={200: EffectPage},
    query={
        "all": Query("bool", "Also requests that only read.", default=False),
        "limit": Query("int", "Effects on a page.", default=100, low=1, high=1000),
        "cursor": Query("str", "`next` of the page before."),
    },
    errors=(SessionNotFound, InvalidRequest),
)
async def effects(call: Call) -> ASGIApp:
    page = await call.service.effects(
        call.who,
        call.ref,
        all=call.query["all"],
        cursor=call.query["cursor"],
        limit=call.query["limit"],
    )
    return json_answer(page)


@endpoint(
    "PATCH",
    "/v1/sessions/{ref}/network",
    "Change of a session's network policy what is named, and nothing else",
    body=NetworkChange,
    answers={200: SessionInfo},
    errors=(SessionNotFound, InvalidRequest, Unreachable),
    example={"allow": [{"name": "api", "domains": ["api.example.com"]}], "grant": ["API_KEY"]},
)
async def change_network(call: Call, body: NetworkChange) -> ASGIApp:
    return json_answer(await call.service.change_network(call.who, call.ref, body))


ENDPOINTS: list[Endpoint] = [effects, change_network]
