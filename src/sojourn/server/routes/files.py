"""/v1/sessions/{ref}/files: single files and directories inside a session.

Guarantee: contents are streamed both ways, whatever their size; a file is replaced whole or not
at all, also when the client dies in the middle. Paths are exact bytes.
"""

from __future__ import annotations

import re
import stat as modes
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from litestar.types import ASGIApp

from sojourn.errors import (
    DiskQuotaExceeded,
    FileConflict,
    FileMissing,
    Forbidden,
    InvalidRequest,
    PathInvalid,
    SessionBusy,
    SessionNotFound,
    StorageFull,
)
from sojourn.server.answers import (
    DownloadAnswer,
    Head,
    empty_answer,
    error_answer,
    json_answer,
)
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.server.routes.events import SSE, event_stream, sse
from sojourn.server.views import show
from sojourn.wire.api import FileChange, FileInfo
from sojourn.wire.guest import Stat

OCTETS = "application/octet-stream"
SMALL_FILE = 1024 * 1024
MAX_MODE = 0o7777

PATH = Query("path", "Absolute path inside the session, percent-encoded bytes.", required=True)
ERRORS = (SessionNotFound, SessionBusy, PathInvalid, FileMissing, FileConflict, Forbidden)
WRITE_ERRORS = (*ERRORS, StorageFull, DiskQuotaExceeded)


def file_info(stat: Stat) -> FileInfo:
    """A file as the API shows it."""
    path, path_bytes = show(stat.path)
    target, target_bytes = (None, None) if stat.target is None else show(stat.target)
    return FileInfo(
        path=path,
        type=stat.type,
        mode=stat.mode,
        uid=stat.uid,
        gid=stat.gid,
        size=stat.size,
        mtime_ns=stat.mtime_ns,
        nlink=stat.nlink,
        target=target,
        path_bytes=path_bytes,
        target_bytes=target_bytes,
    )


def event_name(verb: str, path: bytes) -> str:
    """What the event log says of a file operation."""
    return f"files.{verb} {path.decode('utf-8', 'replace')}"


@endpoint(
    "GET",
    "/v1/sessions/{ref}/files",
    "Read a file, or a range of it",
    answers={200: OCTETS, 206: OCTETS},
    query={"path": PATH},
    errors=ERRORS,
)
async def read(call: Call) -> ASGIApp:
    return DownloadAnswer(_read(call, call.header(b"range")), call.shutdown)


async def _read(call: Call, wanted: str | None) -> AsyncGenerator[Head | bytes, None]:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("read", path), mutates=False)
    async with access as guest:
        stat = await guest.stat(path)
        if stat.type != "file":
            raise FileConflict(
                f"{path.decode('utf-8', 'replace')} is not a regular file but a {stat.type}",
                type=stat.type,
            )
        headers = [(b"content-type", OCTETS.encode()), (b"accept-ranges", b"bytes")]
        if stat.size == 0:
            # Also files of /proc say that they are empty: what they hold shows when read.
            started = False
            async for chunk in guest.read(path):
                if not started:
                    yield Head(200, headers)
                started = True
                yield chunk
            if not started:
                yield Head(200, headers)
            return
        first, end = 0, stat.size
        status = 200
        if wanted is not None:
            try:
                span = parse_range(wanted, stat.size)
            except InvalidRequest as error:
                refused = error_answer(error, 416)
                headers = [*refused.headers, (b"content-range", b"bytes */%d" % stat.size)]
                yield Head(refused.status, headers)
                yield refused.body
                return
            if span is not None:
                status, (first, end) = 206, span
                about = b"bytes %d-%d/%d" % (first, end - 1, stat.size)
                headers.append((b"content-range", about))
        if end - first <= SMALL_FILE:
            # Read before its length is said: a file that is written to all the time changes
            # between the look at it and the reading.
            data = b"".join([chunk async for chunk in guest.read(path, first, end - first)])
            data = data[: end - first]
            if status == 200 or len(data) == end - first:
                yield Head(status, [*headers, (b"content-length", b"%d" % len(data))])
                yield data
                return
            raise FileConflict("the file became shorter while it was read", size=stat.size)
        yield Head(status, [*headers, (b"content-length", b"%d" % (end - first))])
        left = end - first
        async for chunk in guest.read(path, first, left):
            yield chunk[:left]
            left -= len(chunk[:left])
        if left:
            raise FileConflict("the file became shorter while it was read", missing=left)


_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """First and end offset of a single byte range; None when the header asks for something else,
    which HTTP says to ignore. Raises InvalidRequest for one outside the file."""
    found = _RANGE.fullmatch(header.replace(" ", ""))
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        first, end = max(size - int(found[2]), 0), size
    else:
        first, end = int(found[1]), min(int(found[2]) + 1, size) if found[2] else size
        if found[2] and int(found[2]) < first:
            return None
    if first >= size or end <= first:
        raise InvalidRequest(
            f"the range {header!r} is outside the file's {size} bytes",
            next_step="Ask for a range inside the file's size.",
            size=size,
        )
    return first, end


@endpoint(
    "PUT",
    "/v1/sessions/{ref}/files",
    "Write a file; parent directories are made",
    body=OCTETS,
    answers={200: FileInfo},
    query={
        "path": PATH,
        "mode": Query("octal", "Mode in octal, such as 644.", low=0, high=MAX_MODE),
        "user": Query("str", "Owner, a name or number; without it the session's user."),
        "append": Query("bool", "Add to the file instead of replacing it.", default=False),
    },
    errors=WRITE_ERRORS,
)
async def write(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    if path.endswith(b"/"):
        raise PathInvalid("the path names a directory", field="path")
    length = call.header(b"content-length")
    data: bytes | AsyncIterator[bytes]
    if length is not None and length.isdigit() and int(length) <= SMALL_FILE:
        data = await call.body(SMALL_FILE)
    else:
        data = call.chunks()
    access = call.service.files(call.who, call.ref, event_name("write", path), mutates=True)
    with call.shutdown.cancellable():
        async with access as guest:
            stat = await guest.write_file(
                path,
                data,
                mode=call.query["mode"],
                user=call.query["user"],
                append=call.query["append"],
            )
    return json_answer(file_info(stat))


@endpoint(
    "DELETE",
    "/v1/sessions/{ref}/files",
    "Remove a file, or a directory with what it holds",
    answers={204: None},
    query={
        "path": PATH,
        "recursive": Query("bool", "Remove a directory that is not empty.", default=False),
    },
    errors=ERRORS,
)
async def remove(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    if not path.strip(b"/"):
        raise PathInvalid("the root directory cannot be removed", field="path")
    access = call.service.files(call.who, call.ref, event_name("remove", path), mutates=True)
    async with access as guest:
        await guest.remove(path, recursive=call.query["recursive"])
    return empty_answer()


@endpoint(
    "GET",
    "/v1/sessions/{ref}/files/list",
    "List a directory, sorted by name",
    answers={200: list[FileInfo]},
    query={"path": PATH},
    errors=ERRORS,
)
async def list_files(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("list", path), mutates=False)
    async with access as guest:
        found = await guest.list(path)
    return json_answer([file_info(stat) for stat in found])


@endpoint(
    "GET",
    "/v1/sessions/{ref}/files/stat",
    "Look at one file",
    answers={200: FileInfo},
    query={
        "path": PATH,
        "follow": Query("bool", "Follow a symbolic link to what it names.", default=True),
    },
    errors=ERRORS,
)
async def stat_file(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("stat", path), mutates=False)
    async with access as guest:
        found = await guest.stat(path, follow=call.query["follow"])
    return json_answer(file_info(found))


@endpoint(
    "POST",
    "/v1/sessions/{ref}/files/move",
    "Move or rename a file or directory",
    answers={204: None},
    query={"path": PATH, "to": Query("path", "The new path.", required=True)},
    errors=WRITE_ERRORS,
)
async def move(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("move", path), mutates=True)
    async with access as guest:
        await guest.move(path, call.query["to"])
    return empty_answer()


@endpoint(
    "POST",
    "/v1/sessions/{ref}/files/mkdir",
    "Make a directory",
    answers={204: None},
    query={
        "path": PATH,
        "mode": Query("octal", "Mode in octal.", default=0o755, low=0, high=MAX_MODE),
        "parents": Query("bool", "Make missing parents; an existing one is fine.", default=True),
    },
    errors=WRITE_ERRORS,
)
async def mkdir(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("mkdir", path), mutates=True)
    async with access as guest:
        await guest.mkdir(path, mode=call.query["mode"], parents=call.query["parents"])
    return empty_answer()


@endpoint(
    "POST",
    "/v1/sessions/{ref}/files/chmod",
    "Change a file's mode",
    answers={204: None},
    query={
        "path": PATH,
        "mode": Query("octal", "Mode in octal.", required=True, low=0, high=MAX_MODE),
    },
    errors=ERRORS,
)
async def chmod(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("chmod", path), mutates=True)
    async with access as guest:
        await guest.chmod(path, modes.S_IMODE(call.query["mode"]))
    return empty_answer()


@endpoint(
    "GET",
    "/v1/sessions/{ref}/files/watch",
    "Follow changes under a directory (SSE)",
    answers={200: SSE},
    query={
        "path": PATH,
        "recursive": Query("bool", "Also below its directories.", default=False),
    },
    errors=ERRORS,
)
async def watch(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("stat", path), mutates=False)
    async with access as guest:  # a missing path is an answer, not a stream
        stat = await guest.stat(path)
    if stat.type != "dir":
        refused = FileConflict("only directories can be watched", type=stat.type)
        return error_answer(refused)
    return event_stream(_watch(call, path), call.shutdown)


async def _watch(call: Call, path: bytes) -> AsyncIterator[bytes]:
    access = call.service.files(call.who, call.ref, event_name("watch", path), mutates=False)
    async with access as guest:
        async for change in guest.watch(path, recursive=call.query["recursive"]):
            shown, exact = show(change.path)
            found = FileChange(change.kind, shown, change.is_dir, exact)
            yield sse("change", msgspec.json.encode(found))
    yield sse("end", b"{}")


ENDPOINTS: list[Endpoint] = [
    read,
    write,
    remove,
    list_files,
    stat_file,
    move,
    mkdir,
    chmod,
    watch,
]
