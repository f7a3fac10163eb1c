"""The tools for files inside a session.

Guarantee: content is exact: text where it is UTF-8, else base64, in parts of a bounded size,
whatever the file's. A file is replaced whole or not at all.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from sojourn.errors import InvalidRequest
from sojourn.mcp import arguments, results
from sojourn.mcp.calls import Call, closing
from sojourn.mcp.texts import LIMIT, part
from sojourn.wire.api import FileInfo


async def read(call: Call, given: arguments.FileRead) -> results.FileReadResult:
    """file_read."""
    session = await call.session(given.session)
    size = (await session.files.stat(given.path)).size
    wanted = given.length + 1  # one more tells whether there is more
    data = b""
    if given.offset == 0:
        # Without a range, so that files whose size is not known before (in /proc) are read too.
        pieces = session.files.stream(given.path)
    else:
        pieces = session.files.stream(given.path, offset=given.offset, length=wanted)
    if given.offset != size or size == 0:
        async with closing(pieces):
            async for piece in pieces:
                data += piece[: wanted - len(data)]
                if len(data) >= wanted:
                    break
    more = len(data) > given.length
    shown = part(data[: given.length], more=more)
    if more and not shown.size:  # fewer bytes were asked for than its next character has
        shown = part(data[: given.length], more=False)
    after = given.offset + shown.size
    return results.FileReadResult(
        path=given.path,
        content=shown.text,
        encoding=shown.encoding,
        offset=given.offset,
        size=max(size, given.offset + len(data)),
        next_offset=after if more or shown.size < len(data) else None,
    )


async def write(call: Call, given: arguments.FileWrite) -> results.FileResult:
    """file_write."""
    if given.encoding == "base64":
        try:
            content = base64.b64decode(given.content, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"`content` is not base64: {error}", field="content") from error
    else:
        content = given.content.encode()
    session = await call.session(given.session, make=True)
    return _told(await session.files.write(given.path, content))


async def entries(call: Call, given: arguments.FileList) -> results.FilesResult:
    """file_list."""
    session = await call.session(given.session)
    found = await session.files.list(given.path)
    told: list[results.FileResult] = []
    room = LIMIT
    for info in found:
        one = _told(info)
        room -= len(msgspec.json.encode(one))
        if room < 0:
            break
        told.append(one)
    return results.FilesResult(path=given.path, entries=told, left_out=len(found) - len(told))


async def delete(call: Call, given: arguments.FileDelete) -> results.Done:
    """file_delete."""
    session = await call.session(given.session)
    await session.files.remove(given.path, recursive=given.recursive)
    return results.Done(session=session.id, done=f"removed {given.path}")


def _told(info: FileInfo) -> results.FileResult:
    exact = info.path_bytes
    return results.FileResult(
        path=info.path,
        type=info.type,
        size=info.size,
        mode=f"{info.mode & 0o7777:04o}",
        target=info.target,
        path_base64=None if exact is None else base64.b64encode(exact).decode(),
    )
