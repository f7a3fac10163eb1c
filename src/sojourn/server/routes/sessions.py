"""/v1/sessions: the sessions themselves and the verbs that move them."""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    Conflict,
    EffectsInTheWay,
    IdempotencyMismatch,
    InvalidRequest,
    NameTaken,
    NodeNotFound,
    QuotaExceeded,
    ResumeFailed,
    SessionBusy,
    SessionNotFound,
    SnapshotNotFound,
    StorageFull,
    StoreUnreachable,
    UnknownTemplate,
    UnlinkedOpenFile,
    Unsupported,
    WrongState,
)
from sojourn.server.answers import json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import DURABLE, Query
from sojourn.server.routes.verbs import (
    FINISHED,
    LONGEST_WAIT,
    VERB_QUERY,
    verb_answer,
    verb_answers,
)
from sojourn.wire.api import (
    CreateSession,
    DurabilityInfo,
    ForkRequest,
    KeepAlive,
    PromoteRequest,
    ResumeRequest,
    RollbackRequest,
    SessionInfo,
    SessionPage,
    SnapshotInfo,
    SnapshotRequest,
    SuspendRequest,
    TurnInfo,
    TurnRequest,
    UpdateSession,
)
from sojourn.wire.nodes import MigrateRequest

MAX_PAGE = 1000

_VERB_ERRORS = (SessionNotFound, SessionBusy, WrongState, IdempotencyMismatch)
_CAPTURE_ERRORS = (CaptureRefused, UnlinkedOpenFile, CaptureFailed, StorageFull, Unsupported)


@endpoint(
    "POST",
    "/v1/sessions",
    "Create a session and start its sandbox",
    body=CreateSession,
    answers=verb_answers(201),
    query=VERB_QUERY,
    key=True,
    errors=(
        InvalidRequest,
        UnknownTemplate,
        NameTaken,
        IdempotencyMismatch,
        QuotaExceeded,
        ResumeFailed,
    ),
    example={"template": "debian", "name": "work", "labels": {"team": "a"}, "env": {"A": "1"}},
)
async def create(call: Call, body: CreateSession) -> ASGIApp:
    operation = await call.service.create(call.who, body, call.key)
    return await verb_answer(call, operation, 201)


@endpoint(
    "GET",
    "/v1/sessions",
    "List sessions, newest first, a page at a time",
    answers={200: SessionPage},
    query={
        "state": Query("str", "Only sessions in this state."),
        "label": Query("str", "Only sessions with this label, as `key=value`.", many=True),
        "limit": Query("int", "Sessions on a page.", default=100, low=1, high=MAX_PAGE),
        "cursor": Query("str", "`next` of the page before."),
    },
    errors=(InvalidRequest,),
)
async def list_sessions(call: Call) -> ASGIApp:
    labels = {}
    for label in call.query["label"]:
        key, equals, value = label.partition("=")
        if not key or not equals:
            raise InvalidRequest(f"the label {label!r} is not `key=value`", field="label")
        labels[key] = value
    page = await call.service.list(
        call.who,
        state=call.query["state"],
        labels=labels,
        limit=call.query["limit"],
        cursor=call.query["cursor"],
    )
    return json_answer(page)


@endpoint(
    "GET",
    "/v1/sessions/{ref}",
    "Get a session by id or name",
    answers={200: SessionInfo},
    errors=(SessionNotFound,),
)
async def get(call: Call) -> ASGIApp:
    return json_answer(await call.service.get(call.who, call.ref))


@endpoint(
    "PATCH",
    "/v1/sessions/{ref}",
    "Change a session's name, labels, limits, policy or network",
    body=UpdateSession,
    answers={200: SessionInfo},
    errors=(SessionNotFound, NameTaken, InvalidRequest),
    example={"name": "other", "labels": {"team": "b"}},
)
async def update(call: Call, body: UpdateSession) -> ASGIApp:
    return json_answer(await call.service.update(call.who, call.ref, body))


@endpoint(
    "DELETE",
    "/v1/sessions/{ref}",
    "Delete a session from any state, with its history",
    answers=verb_answers(204),
    query=VERB_QUERY,
    key=True,
    errors=(SessionNotFound, SessionBusy),
)
async def delete(call: Call) -> ASGIApp:
    return await verb_answer(call, await call.service.delete(call.who, call.ref, call.key), 204)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/keepalive",
    "Push the idle deadline away",
    body=KeepAlive,
    answers={200: SessionInfo},
    errors=(SessionNotFound, InvalidRequest),
    example={"seconds": 3600},
)
async def keep_alive(call: Call, body: KeepAlive) -> ASGIApp:
    return json_answer(await call.service.keep_alive(call.who, call.ref, body.seconds))


@endpoint(
    "POST",
    "/v1/sessions/{ref}/pause",
    "Freeze a session in memory",
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(*_VERB_ERRORS, Unsupported),
)
async def pause(call: Call) -> ASGIApp:
    operation = await call.service.pause(call.who, call.ref, call.key)
    if call.query["wait"] == DURABLE and operation.state not in FINISHED:
        operation = await call.service.wait(call.who, operation.id, LONGEST_WAIT)
    if call.query["wait"] == DURABLE and operation.state == "succeeded":
        # What is frozen now is what has to be safe: a pause by itself takes no snapshot.
        key = f"{call.key}/durable" if call.key else None
        taken = await call.service.snapshot(call.who, call.ref, SnapshotRequest(), key)
        taken = await call.service.wait(call.who, taken.id, LONGEST_WAIT)
        if taken.state == "failed":
            return await verb_answer(call, taken)
    return await verb_answer(call, operation)


@endpoint(
    "GET",
    "/v1/sessions/{ref}/durability",
    "Tell how far a session is in the object store, or wait until it is there",
    answers={200: DurabilityInfo},
    query={
        "wait": Query(
            "float",
            "Seconds to wait until it is durable; 0 only looks.",
            default=0,
            low=0,
            high=600,
        ),
        "snapshot": Query("str", "A snapshot of its tree by id or label; else its head."),
    },
    errors=(SessionNotFound, SnapshotNotFound, Unsupported, StoreUnreachable, StorageFull),
)
async def durability(call: Call) -> ASGIApp:
    with call.shutdown.cancellable():
        found = await call.service.durable(
            call.who, call.ref, call.query["snapshot"], call.query["wait"]
        )
    return json_answer(found)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/suspend",
    "Put a session away: a snapshot is taken and the sandbox ends",
    body=SuspendRequest,
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(*_VERB_ERRORS, *_CAPTURE_ERRORS),
    example={"memory": True},
)
async def suspend(call: Call, body: SuspendRequest) -> ASGIApp:
    return await verb_answer(call, await call.service.suspend(call.who, call.ref, body, call.key))


@endpoint(
    "POST",
    "/v1/sessions/{ref}/resume",
    "Let a paused, suspended or failed session run again",
    body=ResumeRequest,
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(*_VERB_ERRORS, ResumeFailed),
    example={"memory": True},
)
async def resume(call: Call, body: ResumeRequest) -> ASGIApp:
    operation = await call.service.resume(call.who, call.ref, call.key, memory=body.memory)
    return await verb_answer(call, operation)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/rollback",
    "Go back to a snapshot of the session's history",
    body=RollbackRequest,
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(*_VERB_ERRORS, SnapshotNotFound, ResumeFailed, EffectsInTheWay),
    example={"snapshot": "before-upgrade"},
)
async def rollback(call: Call, body: RollbackRequest) -> ASGIApp:
    operation = await call.service.rollback(
        call.who, call.ref, body.snapshot, call.key, force=body.force
    )
    return await verb_answer(call, operation)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/fork",
    "Make new sessions that go on from a snapshot, or from now",
    body=ForkRequest,
    answers=verb_answers(201),
    query=VERB_QUERY,
    key=True,
    errors=(
        *_VERB_ERRORS,
        *_CAPTURE_ERRORS,
        SnapshotNotFound,
        NameTaken,
        ResumeFailed,
        EffectsInTheWay,
    ),
    example={"n": 2, "names": ["left", "right"]},
)
async def fork(call: Call, body: ForkRequest) -> ASGIApp:
    operation = await call.service.fork(call.who, call.ref, body, call.key)
    return await verb_answer(call, operation, 201)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/promote",
    "Make a fork's head the head of the session it was forked from",
    body=PromoteRequest,
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(*_VERB_ERRORS, Conflict),
)
async def promote(call: Call, _body: PromoteRequest) -> ASGIApp:
    return await verb_answer(call, await call.service.promote(call.who, call.ref, call.key))


@endpoint(
    "POST",
    "/v1/sessions/{ref}/migrate",
    "Move a session to another node, under the same id and address",
    body=MigrateRequest,
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(*_VERB_ERRORS, *_CAPTURE_ERRORS, Conflict, NodeNotFound, StoreUnreachable),
    example={"node": "node-2"},
)
async def migrate(call: Call, body: MigrateRequest) -> ASGIApp:
    operation = await call.service.migrate(call.who, call.ref, body.node, call.key)
    return await verb_answer(call, operation)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/turns",
    "Begin a group of calls that counts as one turn",
    body=TurnRequest,
    answers={201: TurnInfo},
    errors=(SessionNotFound,),
    example={"label": "refactor"},
)
async def begin_turn(call: Call, body: TurnRequest) -> ASGIApp:
    turn = await call.service.begin_turn(call.who, call.ref, body.label)
    return json_answer(TurnInfo(turn), 201)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/turns/{turn}/end",
    "End a turn; answers its snapshot, or null when nothing changed",
    answers={200: SnapshotInfo | None},
    errors=(SessionNotFound,),
)
async def end_turn(call: Call) -> ASGIApp:
    turn = str(call.parameters["turn"])
    return json_answer(await call.service.end_turn(call.who, call.ref, turn))


ENDPOINTS: list[Endpoint] = [
    create,
    list_sessions,
    get,
    update,
    delete,
    keep_alive,
    durability,
    pause,
    suspend,
    resume,
    rollback,
    fork,
    promote,
    migrate,
    begin_turn,
    end_turn,
]
