"""/v1/health, status and tokens: the server itself."""

from __future__ import annotations

from importlib.metadata import version

from litestar.types import ASGIApp

from sojourn.errors import Forbidden, InvalidRequest, NotFound
from sojourn.server.answers import empty_answer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.wire.api import CreateToken, HealthInfo, StatusInfo, TokenInfo

_HEALTH = HealthInfo("ok", version("sojourn"))


@endpoint(
    "GET", "/v1/health", "Tell that the server serves", answers={200: HealthInfo}, public=True
)
async def health(call: Call) -> ASGIApp:
    return json_answer(_HEALTH)


@endpoint("GET", "/v1/status", "The server at a glance", answers={200: StatusInfo})
async def status(call: Call) -> ASGIApp:
    return json_answer(await call.service.status(call.who))


@endpoint(
    "POST",
    "/v1/tokens",
    "Make a token for a tenant (operator)",
    body=CreateToken,
    answers={201: TokenInfo},
    errors=(Forbidden, InvalidRequest),
    example={"tenant": "acme"},
)
async def create_token(call: Call, body: CreateToken) -> ASGIApp:
    return json_answer(await call.service.create_token(call.who, body.tenant), 201)


@endpoint(
    "GET",
    "/v1/tokens",
    "List tokens (operator)",
    answers={200: list[TokenInfo]},
    errors=(Forbidden,),
)
async def tokens(call: Call) -> ASGIApp:
    return json_answer(await call.service.tokens(call.who))


@endpoint(
    "DELETE",
    "/v1/tokens/{token}",
    "Revoke a token by its id (operator)",
    answers={204: None},
    errors=(Forbidden, NotFound),
)
async def revoke_token(call: Call) -> ASGIApp:
    await call.service.revoke_token(call.who, str(call.parameters["token"]))
    return empty_answer()


ENDPOINTS: list[Endpoint] = [health, status, create_token, tokens, revoke_token]
