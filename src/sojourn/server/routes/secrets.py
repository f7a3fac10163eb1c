"""/v1/secrets: secrets go in, and never out."""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import InvalidRequest, SecretNotFound, SecretsKeyInvalid, TooLarge
from sojourn.server.answers import empty_answer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.wire.networks import SecretInfo, SetSecret


@endpoint(
    "PUT",
    "/v1/secrets/{secret}",
    "Set a secret of the tenant; sessions that may use it have it at once",
    body=SetSecret,
    answers={200: SecretInfo},
    errors=(InvalidRequest, TooLarge, SecretsKeyInvalid),
    example={"value": "the value", "uses": [{"domains": ["api.example.com"]}]},
)
async def set_secret(call: Call, body: SetSecret) -> ASGIApp:
    name = str(call.parameters["secret"])
    return json_answer(await call.service.secrets.set(call.who, name, body))


@endpoint(
    "GET",
    "/v1/secrets",
    "List the tenant's secrets, without their values",
    answers={200: list[SecretInfo]},
)
async def list_secrets(call: Call) -> ASGIApp:
    return json_answer(await call.service.secrets.list(call.who))


@endpoint(
    "DELETE",
    "/v1/secrets/{secret}",
    "Remove a secret; no session has it from then on",
    answers={204: None},
    errors=(SecretNotFound,),
)
async def delete_secret(call: Call) -> ASGIApp:
    await call.service.secrets.delete(call.who, str(call.parameters["secret"]))
    return empty_answer()


ENDPOINTS: list[Endpoint] = [set_secret, list_secrets, delete_secret]
