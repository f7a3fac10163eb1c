"""Contents of files: GET and POST /files, also by an address that is signed.

Guarantee: contents are streamed both ways, whatever their size; a file is replaced whole or not at
all, also when its upload breaks off. Of an upload of several files those before the one that
failed are written.
"""

from __future__ import annotations

import posixpath
import re
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from litestar.types import ASGIApp
from multipart import (  # type: ignore[import-untyped]
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from sojourn.errors import FileConflict, InvalidRequest, TooLarge, Unsupported
from sojourn.node.guest import Guest
from sojourn.server.answers import DownloadAnswer, Head
from sojourn.server.e2b import users
from sojourn.server.e2b.calls import Call, answer
from sojourn.server.e2b.entries import text
from sojourn.server.e2b.rooms import Rooms

SMALL_FILE = 1024 * 1024
MAX_FILES = 10_000
MAX_EXPANDED = 64 * 1024 * 1024 * 1024
_OCTETS = b"application/octet-stream"
_METADATA = b"x-metadata-"
_ESCAPES = re.compile(r"%(0[0-9A-F]|1[0-9A-F]|22)|\\(\\)")


def unescaped(filename: str) -> str:
    """A file's name as it was before the client wrote it into a header: quotes and control
    characters are escaped there, and backslashes doubled."""
    return _ESCAPES.sub(lambda found: found[2] or chr(int(found[1], 16)), filename)


class Contents:
    """The routes of /files."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    # -- down -------------------------------------------------------------------------------

    async def read(self, call: Call) -> ASGIApp:
        """GET /files."""
        return DownloadAnswer(self._read(call), call.shutdown)

    async def _read(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        asked = call.query.get("path", "")
        async with self._rooms.files(call, "read", asked, mutates=False, owner=False) as (
            guest,
            _,
            path,
        ):
            stat = await guest.stat(path)
            if stat.type != "file":
                raise FileConflict(f"path '{text(path)}' is a {stat.type}", next_step="")
            headers = [(b"content-type", _OCTETS)]
            if stat.size == 0:
                # Files of /proc say that they are empty, and are not; or cannot be read.
                chunks = guest.read(path)
                first = await anext(chunks, b"")
                yield Head(200, headers)
                if first:
                    yield first
                async for chunk in chunks:
                    yield chunk
                return
            if stat.size <= SMALL_FILE:
                data = b"".join([chunk async for chunk in guest.read(path, 0, stat.size)])
                yield Head(200, [*headers, (b"content-length", b"%d" % len(data))])
                yield data
                return
            yield Head(200, [*headers, (b"content-length", b"%d" % stat.size)])
            left = stat.size
            async for chunk in guest.read(path, 0, left):
                yield chunk[:left]
                left -= len(chunk[:left])
            if left:
                raise FileConflict("the file became shorter while it was read", missing=left)

    # -- up ---------------------------------------------------------------------------------

    async def write(self, call: Call) -> ASGIApp:
        """POST /files."""
        if any(name.startswith(_METADATA) for name in call.headers):
            raise InvalidRequest("files have no metadata here", next_step="Write without metadata.")
        kind = call.header(b"content-type") or ""
        media, options = parse_options_header(kind)
        body = await self._body(call)
        with call.shutdown.cancellable():
            if media == "multipart/form-data":
                written = await self._write_parts(call, body, options.get("boundary", ""))
            else:
                path = call.query.get("path")
                if not path:
                    raise InvalidRequest("there is no path to write to", field="path")
                written = [await self._write_one(call, path, body)]
        return answer(written)

    async def _body(self, call: Call) -> bytes | AsyncIterator[bytes]:
        """The body as it comes, or a small one whole, which costs less to take apart."""
        coding = (call.header(b"content-encoding") or "identity").lower()
        if coding == "identity":
            length = call.header(b"content-length") or ""
            if 0 < len(length) < len(str(SMALL_FILE)):
                return await call.body()
            return call.chunks()
        if coding == "gzip":
            return _gunzip(call.chunks())
        raise Unsupported(f"bodies are not taken in {coding!r}", next_step="Send gzip or nothing.")

    async def _write_one(
        self, call: Call, asked: str, data: bytes | AsyncIterator[bytes]
    ) -> dict[str, Any]:
        async with self._rooms.files(call, "write", asked, mutates=True, owner=False) as (
            guest,
            who,
            path,
        ):
            return await _put(guest, who, path, asked, data)

    async def _write_parts(
        self, call: Call, body: bytes | AsyncIterator[bytes], boundary: str
    ) -> list[dict[str, Any]]:
        if not boundary:
            raise InvalidRequest("the form has no boundary", field="Content-Type")
        parts = _whole(body, boundary) if isinstance(body, bytes) else _Parts(body, boundary)
        written: list[dict[str, Any]] = []
        only = call.query.get("path")
        async with self._rooms.files(
            call, "write", only or "(several)", mutates=True, owner=only is None
        ) as (guest, who, _):
            async for name, data in parts:
                if len(written) >= (MAX_FILES if only is None else 1):
                    raise TooLarge(
                        f"at most {MAX_FILES} files at once, and one with a path",
                        limit=MAX_FILES,
                    )
                asked = unescaped(name) if only is None else only
                if not asked:
                    raise InvalidRequest("a file of the form has no name", field="file")
                written.append(await _put(guest, who, users.place(asked, who), asked, data))
        if not written:
            raise InvalidRequest("the form holds no file", field="file")
        return written


async def _put(
    guest: Guest,
    who: users.Account,
    path: bytes,
    asked: str,
    data: bytes | AsyncIterator[bytes],
) -> dict[str, Any]:
    if asked.endswith("/"):
        raise InvalidRequest(f"path is a directory: {text(path)}", field="path")
    whole = data if isinstance(data, bytes) else await _gathered(data)
    await guest.write_file(path, whole, user=who.name)
    return {"name": text(posixpath.basename(path)), "type": "file", "path": text(path)}


async def _gathered(data: AsyncIterator[bytes]) -> bytes | AsyncIterator[bytes]:
    """A small file whole, which costs one request to the supervisor; a larger one as it comes."""
    held = bytearray()
    async for chunk in data:
        held += chunk
        if len(held) > SMALL_FILE:
            return _after(bytes(held), data)
    return bytes(held)


async def _after(first: bytes, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in data:
        yield chunk


class _Parts:
    """The files of a form, one after the other, each as a stream."""

    def __init__(self, body: AsyncIterator[bytes], boundary: str) -> None:
        self._events = _events(body, boundary)

    async def __aiter__(self) -> AsyncIterator[tuple[str, AsyncIterator[bytes]]]:
        async for event in self._events:
            if isinstance(event, MultipartSegment):
                data = self._data()
                if event.filename is None:
                    async for _ in data:
                        pass
                    continue
                yield event.filename, data
                async for _ in data:  # what its reader left
                    pass

    async def _data(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            if event is None:
                return
            if isinstance(event, MultipartSegment):
                raise InvalidRequest("the form is not valid", field="body")
            yield bytes(event)


async def _whole(body: bytes, boundary: str) -> AsyncIterator[tuple[str, bytes]]:
    """The files of a form that is there whole."""
    name: str | None = None
    data = bytearray()
    try:
        with _parser(boundary) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    name = event.filename
                elif event is not None:
                    data += event
                else:
                    if name is not None:
                        yield name, bytes(data)
                    data.clear()
    except MultipartError as error:
        raise InvalidRequest(f"the form is not valid: {error}", field="body") from error


def _parser(boundary: str) -> PushMultipartParser:
    return PushMultipartParser(boundary, max_header_size=64 * 1024, strict=False)


async def _events(body: AsyncIterator[bytes], boundary: str) -> AsyncIterator[Any]:
    try:
        parser = _parser(boundary)
        async for chunk in body:
            for event in parser.parse(chunk):
                yield event
        parser.close()
    except MultipartError as error:
        raise InvalidRequest(f"the form is not valid: {error}", field="body") from error


async def _gunzip(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What was compressed. Raises InvalidRequest for what is cut off or no gzip."""
    inflate = zlib.decompressobj(wbits=31)
    size = 0
    try:
        async for chunk in chunks:
            while chunk:
                piece = inflate.decompress(chunk, SMALL_FILE)
                size += len(piece)
                if size > MAX_EXPANDED:
                    raise TooLarge("the content is too large", limit=MAX_EXPANDED)
                if piece:
                    yield piece
                if inflate.eof:
                    chunk = inflate.unused_data
                    if chunk:
                        inflate = zlib.decompressobj(wbits=31)  # gzip may go on with another one
                else:
                    chunk = inflate.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest(f"the content is no gzip: {error}", field="body") from error
    if not inflate.eof:
        raise InvalidRequest("the compressed content is cut off", field="body")


# -- addresses that are signed ------------------------------------------------------------------


def expired(expiration: str | None) -> bool:
    """Whether the time an address was signed for is over; one that is no number is."""
    if expiration is None:
        return False
    number = expiration.isascii() and expiration.isdigit() and len(expiration) <= 15
    return not number or int(expiration) < time.time()
