"""/v1/sessions/{ref}/ports: what of a session is reached from outside."""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import (
    Conflict,
    HostUnfit,
    InvalidRequest,
    PortNotFound,
    QuotaExceeded,
    SessionNotFound,
    Unreachable,
)
from sojourn.server.answers import empty_answer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.wire.networks import ExposePort, PortInfo


@endpoint(
    "POST",
    "/v1/sessions/{ref}/ports",
    "Expose a port of a session; as it is when it is exposed so already",
    body=ExposePort,
    answers={200: PortInfo},
    errors=(SessionNotFound, InvalidRequest, Conflict, QuotaExceeded, HostUnfit, Unreachable),
    example={"port": 8000},
)
async def expose(call: Call, body: ExposePort) -> ASGIApp:
    return json_answer(await call.service.ports.expose(call.who, call.ref, body))


@endpoint(
    "GET",
    "/v1/sessions/{ref}/ports",
    "List the exposed ports of a session with their addresses and tokens",
    answers={200: list[PortInfo]},
    errors=(SessionNotFound,),
)
async def list_ports(call: Call) -> ASGIApp:
    return json_answer(await call.service.ports.list(call.who, call.ref))


@endpoint(
    "DELETE",
    "/v1/sessions/{ref}/ports/{port}",
    "Expose a port no longer; its open connections end",
    answers={204: None},
    errors=(SessionNotFound, PortNotFound),
)
async def unexpose(call: Call) -> ASGIApp:
    port = int(call.parameters["port"])
    await call.service.ports.unexpose(call.who, call.ref, port)
    return empty_answer()


ENDPOINTS: list[Endpoint] = [expose, list_ports, unexpose]
