"""/v1/sessions/{ref}/tree: whole directory trees as tar streams.

Guarantee: a tree goes out and in with names, links, hardlinks, pipes, modes, owners and times as
they are. What is unpacked stays in the target directory: names that are absolute or hold `..`, and
members that would pass through a symbolic link, are refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
from litestar.types import ASGIApp

from sojourn.errors import (
    FileConflict,
    FileMissing,
    InvalidRequest,
    PathInvalid,
    SojournError,
    TooLarge,
)
from sojourn.node.guest import Guest
from sojourn.server.answers import DownloadAnswer, Head, json_answer
from sojourn.server.endpoints import Call, Endpoint, endpoint
from sojourn.server.queries import Query
from sojourn.server.routes.files import PATH, WRITE_ERRORS, event_name
from sojourn.wire import tar
from sojourn.wire.api import TreeInfo
from sojourn.wire.guest import Stat

SMALL_FILE = 256 * 1024
"""Files up to this size are read whole before their header is written, so that one that changes
meanwhile still arrives consistent."""

PIECE = 256 * 1024

_PACKED = frozenset({"file", "dir", "symlink", "fifo", "char", "block"})


# -- out ----------------------------------------------------------------------------------------


@endpoint(
    "GET",
    "/v1/sessions/{ref}/tree",
    "Download a directory (or one file) as a tar stream",
    answers={200: tar.MEDIA_TYPE},
    query={"path": PATH},
    errors=(*WRITE_ERRORS, TooLarge),
)
async def download(call: Call) -> ASGIApp:
    return DownloadAnswer(_download(call), call.shutdown)


async def _download(call: Call) -> AsyncGenerator[Head | bytes, None]:
    path: bytes = call.query["path"]
    access = call.service.files(call.who, call.ref, event_name("download", path), mutates=False)
    async with access as guest:
        top = await guest.stat(path)
        yield Head(200, [(b"content-type", tar.MEDIA_TYPE.encode())])
        held = bytearray()
        async for piece in pack(guest, path, top):
            held += piece
            if len(held) >= PIECE:
                yield bytes(held)
                held.clear()
        yield bytes(held) + tar.END


async def pack(guest: Guest, path: bytes, top: Stat) -> AsyncIterator[bytes]:
    """The members of the tree at `path`, without the end mark. Names are relative to it; a file is
    a tree of its own, under its own name. Sockets cannot be packed and are left out."""
    base = path.rstrip(b"/")
    if top.type != "dir":
        async for piece in _pack_one(guest, top, path, base.rpartition(b"/")[2], {}):
            yield piece
        return
    yield tar.encode_entry(_entry(top, b"."))
    linked: dict[tuple[int, int, int], bytes] = {}
    async for stat in guest.walk(path):
        name = stat.path[len(base) :].lstrip(b"/")
        if name and stat.type in _PACKED:
            async for piece in _pack_one(guest, stat, stat.path, name, linked):
                yield piece


async def _pack_one(
    guest: Guest,
    stat: Stat,
    path: bytes,
    name: bytes,
    linked: dict[tuple[int, int, int], bytes],
) -> AsyncIterator[bytes]:
    if stat.nlink > 1 and stat.type != "dir":
        # The size and time guard against equal inode numbers on another file system.
        key = (stat.inode, stat.size, stat.mtime_ns)
        first = linked.setdefault(key, name)
        if first != name:
            yield tar.encode_entry(_entry(stat, name, "hardlink", target=first))
            return
    if stat.type != "file":
        yield tar.encode_entry(_entry(stat, name))
        return
    if stat.size <= SMALL_FILE:
        try:
            content = b"".join([chunk async for chunk in guest.read(path, 0, SMALL_FILE)])
        except FileMissing:
            return  # removed since it was listed
        yield tar.encode_entry(_entry(stat, name, size=len(content)))
        yield content + tar.padding(len(content))
        return
    yield tar.encode_entry(_entry(stat, name, size=stat.size))
    left = stat.size
    async for chunk in guest.read(path, 0, left):
        yield chunk[:left]
        left -= len(chunk[:left])
    if left:
        raise FileConflict("a file became shorter while it was packed", missing=left)
    yield tar.padding(stat.size)


def _entry(
    stat: Stat, name: bytes, kind: str | None = None, *, size: int = 0, target: bytes = b""
) -> tar.Entry:
    return tar.Entry(
        name,
        kind or stat.type,
        stat.mode,
        stat.uid,
        stat.gid,
        size,
        stat.mtime_ns,
        target or stat.target or b"",
        (stat.rdev >> 8) & 0xFFF,
        (stat.rdev & 0xFF) | ((stat.rdev >> 12) & 0xFFF00),
    )


# -- in -----------------------------------------------------------------------------------------


@endpoint(
    "PUT",
    "/v1/sessions/{ref}/tree",
    "Upload a tar stream and unpack it into a directory, which is made",
    body=tar.MEDIA_TYPE,
    answers={200: TreeInfo},
    query={
        "path": PATH,
        "owner": Query("str", "UID:GID for all that is unpacked; without it as in the tar."),
    },
    errors=(*WRITE_ERRORS, TooLarge),
)
async def upload(call: Call) -> ASGIApp:
    path: bytes = call.query["path"]
    owner = None if call.query["owner"] is None else parse_owner(call.query["owner"])
    access = call.service.files(call.who, call.ref, event_name("upload", path), mutates=True)
    with call.shutdown.cancellable():
        async with access as guest:
            unpacked = Unpacking(guest, path, owner)
            await unpacked.run(call.chunks())
    return json_answer(TreeInfo(unpacked.members, unpacked.bytes))


def parse_owner(text: str) -> tuple[int, int]:
    """UID:GID, or UID for both. Raises InvalidRequest."""
    parts = text.split(":")
    if len(parts) > 2 or not all(
        part.isascii() and part.isdigit() and int(part) < 2**32 - 1 for part in parts
    ):
        raise InvalidRequest(f"the owner {text!r} is not UID:GID", field="owner")
    return int(parts[0]), int(parts[-1])


class _Facts(msgspec.Struct, frozen=True):
    """What a file gets once it is written, and a directory once everything in it is."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


class Unpacking:
    """Writes one tar stream into a directory of a session."""

    def __init__(self, guest: Guest, path: bytes, owner: tuple[int, int] | None) -> None:
        self._guest = guest
        self._base = path.rstrip(b"/")
        self._owner = owner
        self._real: set[bytes] = {b"."}  # names known to be directories, not links to some
        self._facts: dict[bytes, _Facts] = {}
        self.members = 0
        self.bytes = 0

    async def run(self, chunks: AsyncIterator[bytes]) -> None:
        """Unpack. What was written before a failure stays. Raises what Decoder and Guest raise."""
        events = self._events(chunks)
        await self._guest.mkdir(self._base or b"/", parents=True)
        async for event in events:
            if isinstance(event, tar.Entry):
                await self._member(event, events)
        for name in sorted(self._facts, reverse=True):  # children first: writing moves times
            await self._settle(self._path(name), None, self._facts[name])

    async def _events(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[tar.Event]:
        decoder = tar.Decoder()
        async for chunk in chunks:
            for event in decoder.feed(chunk):
                yield event
        if not decoder.complete:
            raise InvalidRequest("the tar stream ends in the middle", field="body")

    def _path(self, name: bytes) -> bytes:
        return self._base + b"/" + name if name != b"." else self._base or b"/"

    async def _member(self, entry: tar.Entry, events: AsyncIterator[tar.Event]) -> None:
        self.members += 1
        uid, gid = self._owner or (entry.uid, entry.gid)
        if entry.type == "dir":
            await self._directory(entry.name)
            self._facts[entry.name] = _Facts(entry.mode, uid, gid, entry.mtime_ns)
            return
        if entry.name == b".":
            raise PathInvalid("the tar would replace the directory it is unpacked into")
        await self._directory(entry.name.rpartition(b"/")[0] or b".")
        path = self._path(entry.name)
        present = await self._present(path)
        if present is not None and present.type == "dir":
            shown = entry.name.decode("utf-8", "replace")
            raise FileConflict(f"the tar's member {shown!r} stands where a directory is")
        if entry.type == "hardlink":
            await self._directory(entry.target.rpartition(b"/")[0] or b".", make=False)
            if present is not None:
                await self._guest.remove(path)
            await self._guest.link(self._path(entry.target), path)
            return
        if present is not None and (entry.type != "file" or present.type != "file"):
            await self._guest.remove(path)
        written: Stat | None = None
        if entry.type == "file":
            data: bytes | AsyncIterator[bytes] = _content(events)
            if entry.size <= SMALL_FILE:
                data = b"".join([piece async for piece in _content(events)])
            written = await self._guest.write_file(path, data, mode=entry.mode)
            self.bytes += entry.size
        elif entry.type == "symlink":
            await self._guest.symlink(entry.target, path)
        else:
            device = _device(entry.major, entry.minor)
            await self._guest.mknod(path, entry.type, entry.mode, device)
        if entry.type == "symlink":
            await self._guest.chown(path, uid, gid)
            await self._guest.utime(path, entry.mtime_ns)
        else:
            await self._settle(path, written, _Facts(entry.mode, uid, gid, entry.mtime_ns))

    async def _settle(self, path: bytes, written: Stat | None, facts: _Facts) -> None:
        """Set owner, mode and time, as far as `written` does not show them already."""
        if written is None or (written.uid, written.gid) != (facts.uid, facts.gid):
            await self._guest.chown(path, facts.uid, facts.gid)
            written = None  # a change of owner takes set-id bits away
        if written is None or written.mode != facts.mode:
            await self._guest.chmod(path, facts.mode)
        await self._guest.utime(path, facts.mtime_ns)

    async def _present(self, path: bytes) -> Stat | None:
        try:
            return await self._guest.stat(path, follow=False)
        except FileMissing:
            return None

    async def _directory(self, name: bytes, *, make: bool = True) -> None:
        """Make sure that `name` and all above it are directories and no links.

        Raises PathInvalid when one is a link: the tar, or the session, would lead outside."""
        if name in self._real:
            return
        parts = name.split(b"/")
        for count in range(1, len(parts) + 1):
            part = b"/".join(parts[:count])
            if part in self._real:
                continue
            shown = part.decode("utf-8", "replace")
            present = await self._present(self._path(part))
            if present is None and make:
                await self._guest.mkdir(self._path(part), parents=False)
            elif present is None:
                raise FileMissing(f"the tar links to {shown!r}, which is not there", member=shown)
            elif present.type == "symlink":
                raise PathInvalid(f"the tar would pass through the link {shown!r}", member=shown)
            elif present.type != "dir":
                raise FileConflict(f"{shown!r} is not a directory", member=shown)
            self._real.add(part)


def _device(major: int, minor: int) -> int:
    return ((major & 0xFFF) << 8) | (minor & 0xFF) | ((minor & 0xFFF00) << 12)


async def _content(events: AsyncIterator[tar.Event]) -> AsyncIterator[bytes]:
    """A file's content, up to the end of its member."""
    async for event in events:
        if isinstance(event, tar.EntryEnd):
            return
        if isinstance(event, bytes):
            yield event
    raise SojournError("a tar member was decoded without its end")


ENDPOINTS: list[Endpoint] = [download, upload]
