"""/v1/sessions/{ref}/export and /v1/import: sessions as files.

Guarantee: an archive goes out whole or visibly cut off; one that comes in is looked at wholly
before a session is made of it. A key travels in a header, where nothing logs it.
"""

from __future__ import annotations

import binascii
from collections.abc import AsyncGenerator

import msgspec
from litestar.types import ASGIApp

from sojourn.errors import (
    ArchiveInvalid,
    CaptureFailed,
    CaptureRefused,
    Conflict,
    IntegrityError,
    InvalidRequest,
    NameTaken,
    SessionBusy,
    SessionNotFound,
    SnapshotNotFound,
    StorageFull,
    StoreKeyInvalid,
    UnlinkedOpenFile,
)
from sojourn.server.answers import DownloadAnswer, Head, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.wire.api import ARCHIVE_HEADER, ARCHIVE_KEY_HEADER, ARCHIVE_TYPE, SessionInfo

_KEY = {ARCHIVE_KEY_HEADER: "The secret that encrypts the archive (16 bytes or more), in base64."}


def _secret(call: Call) -> bytes | None:
    """The archive's secret. Raises InvalidRequest."""
    text = call.header(ARCHIVE_KEY_HEADER.lower().encode())
    if text is None:
        return None
    try:
        return binascii.a2b_base64(text.encode("latin-1"), strict_mode=True)
    except ValueError:
        raise InvalidRequest(
            f"the {ARCHIVE_KEY_HEADER} header is not base64", field=ARCHIVE_KEY_HEADER
        ) from None


@endpoint(
    "GET",
    "/v1/sessions/{ref}/export",
    "Download a session as an archive; one that runs is snapshotted first",
    answers={200: ARCHIVE_TYPE},
    query={"snapshot": Query("str", "One snapshot by id or label; without it the whole history.")},
    headers=_KEY,
    errors=(
        SessionNotFound,
        SnapshotNotFound,
        SessionBusy,
        Conflict,
        CaptureRefused,
        UnlinkedOpenFile,
        CaptureFailed,
        IntegrityError,
        StorageFull,
    ),
)
async def export(call: Call) -> ASGIApp:
    secret = _secret(call)
    return DownloadAnswer(_export(call, secret), call.shutdown)


async def _export(call: Call, secret: bytes | None) -> AsyncGenerator[Head | bytes, None]:
    archive = await call.service.export(call.who, call.ref, call.query["snapshot"], secret)
    try:
        yield Head(
            200,
            [
                (b"content-type", ARCHIVE_TYPE.encode()),
                (b"content-length", b"%d" % archive.info.bytes),
                (ARCHIVE_HEADER.lower().encode(), msgspec.json.encode(archive.info)),
            ],
        )
        async for piece in archive.pieces():
            yield piece
    finally:
        archive.close()


@endpoint(
    "POST",
    "/v1/import",
    "Make a session of an archive; it is suspended at the archive's newest snapshot",
    body=ARCHIVE_TYPE,
    answers={201: SessionInfo},
    query={
        "name": Query("str", "Name of the session; without it the archive's."),
        "expect": Query("str", "The digest that the export told; another archive is refused."),
    },
    headers=_KEY,
    errors=(ArchiveInvalid, NameTaken, StorageFull, StoreKeyInvalid),
)
async def import_(call: Call) -> ASGIApp:
    secret = _secret(call)
    with call.shutdown.cancellable():
        made = await call.service.import_(
            call.who,
            call.chunks(),
            name=call.query["name"],
            expect=call.query["expect"],
            secret=secret,
        )
    return json_answer(made, 201)


ENDPOINTS: list[Endpoint] = [export, import_]
