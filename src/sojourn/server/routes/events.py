"""/v1/sessions/{ref}/events: who did what to a session, as a list or as a live stream (SSE)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from litestar.types import ASGIApp

from sojourn.errors import InvalidRequest, SessionNotFound, SojournError, to_body
from sojourn.server.answers import Shutdown, StreamAnswer, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.wire.api import EventInfo

SSE = "text/event-stream"
_HEARTBEAT = b": heartbeat\n\n"


def sse(kind: str, data: bytes, number: int | None = None) -> bytes:
    """One server-sent event; `data` is JSON, which holds no line breaks."""
    head = b"" if number is None else b"id: %d\n" % number
    return head + b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _sse_error(error: SojournError) -> bytes:
    return sse("error", msgspec.json.encode(to_body(error), enc_hook=repr))


def event_stream(pieces: AsyncIterator[bytes], shutdown: Shutdown) -> StreamAnswer:
    """Server-sent events as they come; the head goes out at once, a failure is an event too."""
    return StreamAnswer(
        pieces,
        shutdown,
        media_type=SSE.encode(),
        heartbeat=_HEARTBEAT,
        encode_error=_sse_error,
        at_once=True,
    )


@endpoint(
    "GET",
    "/v1/sessions/{ref}/events",
    "List a session's events, or follow them with `Accept: text/event-stream`",
    answers={200: list[EventInfo]},
    query={
        "after": Query("int", "Only events with a greater `seq`.", default=0, low=0, high=2**62),
        "limit": Query("int", "Most events to list.", default=1000, low=1, high=1000),
        "kind": Query("str", "Of those to list only this kind.", many=True),
    },
    errors=(SessionNotFound,),
)
async def events(call: Call) -> ASGIApp:
    after: int = call.query["after"]
    if not call.accepts(SSE):
        found = await call.service.events(
            call.who,
            call.ref,
            after=after,
            limit=call.query["limit"],
            kinds=call.query["kind"],
        )
        return json_answer(found)
    last = call.header(b"last-event-id")
    if last:
        if not last.isascii() or not last.isdigit() or len(last) > 18:
            raise InvalidRequest("Last-Event-ID is not a number", field="Last-Event-ID")
        after = int(last)
    await call.service.get(call.who, call.ref)  # a missing session is an answer, not a stream
    return event_stream(_follow(call, after), call.shutdown)


async def _follow(call: Call, after: int) -> AsyncIterator[bytes]:
    async for event in call.service.follow_events(call.who, call.ref, after=after):
        yield sse("event", msgspec.json.encode(event), event.seq)
    yield sse("end", b"{}")


ENDPOINTS: list[Endpoint] = [events]
