"""How verbs answer: an operation that is waited for.

Guarantee: a verb's answer says how the operation ended when that was within `wait` seconds, and
names the operation otherwise (202), so that a client can go on asking; a failed operation answers
with its error's status and body, `details.operation` naming it. With `wait=durable` success also
means that the object store has the session's head.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sojourn.errors import ErrorBody, Interrupted, SojournError, from_body
from sojourn.server.answers import Answer, empty_answer, error_answer, json_answer
from sojourn.server.endpoints import Call
from sojourn.server.queries import DURABLE, Query
from sojourn.wire.api import OperationInfo

WAIT = Query(
    "wait",
    "Seconds to wait for the operation before answering 202; `durable` waits until it is done and"
    " the session's newest snapshot is in the object store.",
    default=120.0,
    low=0,
    high=600,
)
VERB_QUERY = {"wait": WAIT}

LONGEST_WAIT = 600.0
FINISHED = frozenset({"succeeded", "failed"})


def operation_error(operation: OperationInfo) -> SojournError:
    """The error of a failed operation."""
    error = from_body(msgspec.convert(operation.error, ErrorBody))
    error.details["operation"] = operation.id
    return error


async def verb_answer(call: Call, operation: OperationInfo, done: int = 200) -> Answer:
    """Wait for the operation and answer."""
    durable = call.query["wait"] == DURABLE
    wait: float = LONGEST_WAIT if durable else call.query["wait"]
    if operation.state not in FINISHED and wait > 0:
        try:
            with call.shutdown.cancellable():
                operation = await call.service.wait(call.who, operation.id, wait)
        except Interrupted:
            return json_answer(operation, 202)  # the server stops; the operation outlives it
    if operation.state == "failed":
        return error_answer(operation_error(operation))
    if operation.state != "succeeded":
        return json_answer(operation, 202)
    if durable and done != 204:
        result = operation.result
        taken = result["id"] if operation.verb == "snapshot" and isinstance(result, dict) else None
        with call.shutdown.cancellable():
            found = await call.service.durable(call.who, operation.session, taken, LONGEST_WAIT)
        if taken is not None:
            # The operation was recorded before the object store had it.
            shown = {**result, "durable_at": found.durable_at}
            operation = msgspec.structs.replace(operation, result=shown)
    return empty_answer() if done == 204 else json_answer(operation, done)


def verb_answers(done: int = 200) -> dict[int, Any]:
    """The declared answers of a verb."""
    return {done: None if done == 204 else OperationInfo, 202: OperationInfo}
