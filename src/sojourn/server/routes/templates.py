"""/v1/templates and /v1/sessions/{ref}/template: what sessions start from.

Guarantee: an image is looked at wholly before a template is made of it; the server fetches nothing
on anyone's behalf, images are sent to it.
"""

from __future__ import annotations

from litestar.types import ASGIApp

from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    ImageInvalid,
    IntegrityError,
    InvalidRequest,
    NameTaken,
    SessionBusy,
    SessionNotFound,
    StorageFull,
    TemplateNotFound,
    TooLarge,
    UnlinkedOpenFile,
    WrongState,
)
from sojourn.server.answers import empty_answer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.server.routes.verbs import VERB_QUERY, verb_answer, verb_answers
from sojourn.wire.api import IMAGE_TYPE, TemplateInfo, TemplateRequest


@endpoint(
    "GET",
    "/v1/templates",
    "List templates: those of the node and the newest versions of those that were built",
    answers={200: list[TemplateInfo]},
)
async def list_(call: Call) -> ASGIApp:
    return json_answer(await call.service.templates(call.who))


@endpoint(
    "GET",
    "/v1/templates/{template}",
    "Show a template: NAME (the newest version) or NAME@VERSION",
    answers={200: TemplateInfo},
    errors=(TemplateNotFound, IntegrityError),
)
async def show(call: Call) -> ASGIApp:
    return json_answer(await call.service.template(call.who, str(call.parameters["template"])))


@endpoint(
    "POST",
    "/v1/templates/{template}",
    "Make a version of a template of an image: an OCI layout or a `docker save`, as a tar",
    body=IMAGE_TYPE,
    answers={201: TemplateInfo},
    query={
        "tag": Query("str", "Which image, where the tar holds several."),
        "source": Query("str", "Where the image comes from, to be told later."),
        "start": Query("bool", "Sessions start the image's command by themselves."),
    },
    errors=(ImageInvalid, NameTaken, InvalidRequest, TooLarge, StorageFull),
)
async def build(call: Call) -> ASGIApp:
    with call.shutdown.cancellable():
        made = await call.service.build_template(
            call.who,
            str(call.parameters["template"]),
            call.chunks(),
            tag=call.query["tag"],
            source=call.query["source"],
            start=bool(call.query["start"]),
        )
    return json_answer(made, 201)


@endpoint(
    "DELETE",
    "/v1/templates/{template}",
    "Remove a version of a template, or all of it; sessions made from it go on",
    answers={204: None},
    errors=(TemplateNotFound, InvalidRequest),
)
async def remove(call: Call) -> ASGIApp:
    await call.service.remove_template(call.who, str(call.parameters["template"]))
    return empty_answer()


@endpoint(
    "POST",
    "/v1/sessions/{ref}/template",
    "Make a version of a template of a session's present state; the session runs on",
    body=TemplateRequest,
    answers=verb_answers(),
    query=VERB_QUERY,
    key=True,
    errors=(
        SessionNotFound,
        InvalidRequest,
        NameTaken,
        WrongState,
        SessionBusy,
        CaptureRefused,
        UnlinkedOpenFile,
        CaptureFailed,
        StorageFull,
    ),
    example={"name": "warm", "memory": True},
)
async def from_session(call: Call, body: TemplateRequest) -> ASGIApp:
    operation = await call.service.make_template(call.who, call.ref, body, call.key)
    return await verb_answer(call, operation)


ENDPOINTS: list[Endpoint] = [list_, show, build, remove, from_session]
