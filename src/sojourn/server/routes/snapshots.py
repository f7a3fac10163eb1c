"""/v1/sessions/{ref}/snapshots, diff and verify: a session's history."""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    Conflict,
    IntegrityError,
    SessionBusy,
    SessionNotFound,
    SnapshotNotFound,
    StorageFull,
    UnlinkedOpenFile,
)
from sojourn.server.answers import empty_answer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.server.routes.verbs import VERB_QUERY, verb_answer, verb_answers
from sojourn.wire.api import DiffInfo, SnapshotInfo, SnapshotRequest, VerifyReport


@endpoint(
    "POST",
    "/v1/sessions/{ref}/snapshots",
    "Take a snapshot; the session runs on",
    body=SnapshotRequest,
    answers=verb_answers(201),
    query=VERB_QUERY,
    key=True,
    errors=(
        SessionNotFound,
        SessionBusy,
        CaptureRefused,
        UnlinkedOpenFile,
        CaptureFailed,
        StorageFull,
    ),
    example={"label": "before-upgrade", "memory": True},
)
async def create(call: Call, body: SnapshotRequest) -> ASGIApp:
    operation = await call.service.snapshot(call.who, call.ref, body, call.key)
    return await verb_answer(call, operation, 201)


@endpoint(
    "GET",
    "/v1/sessions/{ref}/snapshots",
    "List the snapshots of a session's history",
    answers={200: list[SnapshotInfo]},
    errors=(SessionNotFound,),
)
async def history(call: Call) -> ASGIApp:
    return json_answer(await call.service.history(call.who, call.ref))


@endpoint(
    "DELETE",
    "/v1/sessions/{ref}/snapshots/{snapshot}",
    "Delete a snapshot; what others need of it is kept",
    answers={204: None},
    errors=(SessionNotFound, SnapshotNotFound, Conflict),
)
async def delete(call: Call) -> ASGIApp:
    snapshot = str(call.parameters["snapshot"])
    await call.service.delete_snapshot(call.who, call.ref, snapshot)
    return empty_answer()


@endpoint(
    "GET",
    "/v1/sessions/{ref}/diff",
    "Compare the files of two snapshots",
    answers={200: DiffInfo},
    query={
        "a": Query("str", "Id or label; without it the parent of `b`."),
        "b": Query("str", "Id or label; without it the head."),
        "text": Query("bool", "Also give unified diffs of text files.", default=False),
        "limit": Query("int", "Most changes to give.", default=10_000, low=1, high=100_000),
    },
    errors=(SessionNotFound, SnapshotNotFound, IntegrityError),
)
async def diff(call: Call) -> ASGIApp:
    found = await call.service.diff(
        call.who,
        call.ref,
        call.query["a"],
        call.query["b"],
        text=call.query["text"],
        limit=call.query["limit"],
    )
    return json_answer(found)


@endpoint(
    "POST",
    "/v1/sessions/{ref}/verify",
    "Read every byte of a session's snapshots and compare it with what was put away",
    answers={200: VerifyReport},
    query={"snapshot": Query("str", "Only this snapshot (id or label).")},
    errors=(SessionNotFound, SnapshotNotFound),
)
async def verify(call: Call) -> ASGIApp:
    with call.shutdown.cancellable():
        report = await call.service.verify(call.who, call.ref, call.query["snapshot"])
    return json_answer(report)


ENDPOINTS: list[Endpoint] = [create, history, delete, diff, verify]
