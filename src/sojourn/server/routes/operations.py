"""/v1/operations: what verbs do, while and after they do it."""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import Interrupted, OperationNotFound
from sojourn.server.answers import json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.server.routes.verbs import FINISHED
from sojourn.wire.api import OperationInfo


@endpoint(
    "GET",
    "/v1/operations/{operation}",
    "Get an operation, waiting for its end if asked",
    answers={200: OperationInfo},
    query={
        "wait": Query("float", "Seconds to wait for its end.", default=0.0, low=0, high=600),
    },
    errors=(OperationNotFound,),
)
async def get(call: Call) -> ASGIApp:
    name = str(call.parameters["operation"])
    operation = await call.service.operation(call.who, name)
    wait: float = call.query["wait"]
    if wait > 0 and operation.state not in FINISHED:
        try:
            with call.shutdown.cancellable():
                operation = await call.service.wait(call.who, name, wait)
        except Interrupted:
            return json_answer(operation)  # the server stops: say how far it was
    return json_answer(operation)


ENDPOINTS: list[Endpoint] = [get]
