"""Files of a session over the link.

Guarantee: a file is replaced whole or not at all; reading gives the bytes of one file, in pieces,
with bounded memory; paths are bytes and are never interpreted on the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from sojourn.errors import FileMissing, InvalidRequest, PathInvalid
from sojourn.node.link_connection import Connection, encode
from sojourn.node.link_errors import display
from sojourn.wire import frames
from sojourn.wire.frames import Op, Reader
from sojourn.wire.guest import Stat, WatchEvent

_PATH_MOST = 4095
_WHOLE = 256 << 10
_HAS_MODE, _APPEND, _PARENTS, _HAS_USER = 1, 2, 4, 8


def _path(path: bytes) -> bytes:
    if not path.startswith(b"/") or b"\0" in path or len(path) > _PATH_MOST:
        raise PathInvalid(f"{display(path[:200])!r} is no absolute path of at most 4095 bytes")
    return frames.text(path)


def _mode(mode: int) -> bytes:
    if not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"{mode:#o} is no file mode")
    return mode.to_bytes(4, "little")


def _write_body(path: bytes, mode: int | None, user: str | None, flags: int) -> bytes:
    if mode is not None:
        flags |= _HAS_MODE
    if user is not None:
        flags |= _HAS_USER
    name = encode(lambda: frames.text((user or "").encode()))
    return _path(path) + bytes([flags]) + _mode(mode or 0) + name


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + name if directory.endswith(b"/") else directory + b"/" + name


class FileCalls(Connection):
    """The part of `Guest` that deals with files."""

    async def stat(self, path: bytes, *, follow: bool = True) -> Stat:
        """The status of a file, of a link itself unless `follow`."""
        return frames.read_stat(await self.call(Op.STAT, _path(path) + bytes([follow])), path)

    async def list(self, path: bytes) -> list[Stat]:
        """Entries of a directory, sorted by name."""
        identifier, future = self.submit(Op.LIST, _path(path))
        try:
            bodies = await future
        except asyncio.CancelledError:
            self.abandon(identifier)
            raise
        found = []
        for body in bodies:
            reader = Reader(body)
            for _ in range(reader.u32()):
                name = reader.text()
                found.append(frames.read_stat(reader, _join(path, name)))
        found.sort(key=lambda stat: stat.path)
        return found

    async def walk(self, path: bytes) -> AsyncIterator[Stat]:
        """The tree below, parents before children, links not followed."""
        generation = self.generation
        ahead = [iter(await self.list(path))]
        while ahead:
            stat = next(ahead[-1], None)
            if stat is None:
                ahead.pop()
                continue
            yield stat
            self.check(generation)
            if stat.type == "dir":
                try:
                    ahead.append(iter(await self.list(stat.path)))
                except FileMissing:
                    continue  # removed meanwhile

    async def read(
        self, path: bytes, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """A regular file's bytes, in pieces."""
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest("offset and length are not negative")
        generation = self.generation
        name = _path(path)
        inode = 0
        while length is None or length > 0:
            self.check(generation)
            asked = frames.PIECE if length is None else min(frames.PIECE, length)
            body = name + frames.pair(offset, inode) + asked.to_bytes(4, "little")
            reader = await self.call(Op.READ, body)
            inode, size = reader.u64(), reader.u64()
            data = reader.blob()
            if not data:
                return
            offset += len(data)
            if length is not None:
                length -= len(data)
            yield data
            # Files of /proc have no size, and give short pieces before their end.
            if size and len(data) < asked and offset >= size:
                return

    async def write_file(
        self,
        path: bytes,
        data: AsyncIterator[bytes] | bytes,
        *,
        mode: int | None = None,
        user: str | None = None,
        append: bool = False,
        parents: bool = True,
    ) -> Stat:
        """Write a file; see `Guest.write_file`."""
        head = _write_body(path, mode, user, (append and _APPEND) | (parents and _PARENTS))
        pieces = _pieces(data)
        first = await anext(pieces, b"")
        second = await anext(pieces, None)
        if second is None:
            answer = await self.call(Op.WRITE_FILE, head + frames.blob(first))
            return frames.read_stat(answer, path)
        generation = self.generation
        handle = frames.number((await self.call(Op.WRITE_BEGIN, head)).u64())
        try:
            offset = 0
            for_now = [first, second]
            while for_now:
                self.check(generation)
                piece = for_now.pop(0)
                field = handle + frames.number(offset) + frames.blob(piece)
                await self.call(Op.WRITE_DATA, field)
                offset += len(piece)
                if not for_now and (further := await anext(pieces, None)) is not None:
                    for_now.append(further)
            self.check(generation)
            return frames.read_stat(await self.call(Op.WRITE_END, handle), path)
        except BaseException:
            # Also when the source of the data failed or the caller is gone.
            self.post(Op.WRITE_ABORT, handle)
            raise

    async def mkdir(self, path: bytes, *, mode: int = 0o755, parents: bool = True) -> None:
        """Make a directory; with `parents` also those above it, and it may be there already."""
        await self.call(Op.MKDIR, _path(path) + _mode(mode) + bytes([parents]))

    async def remove(self, path: bytes, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or with `recursive` a tree."""
        await self.call(Op.REMOVE, _path(path) + bytes([recursive]))

    async def move(self, source: bytes, target: bytes) -> None:
        """Move a file or tree, also between file systems; a file at the target is replaced."""
        await self.call(Op.MOVE, _path(source) + _path(target))

    async def chmod(self, path: bytes, mode: int) -> None:
        """Set the lower 12 bits of the mode; links are followed."""
        await self.call(Op.CHMOD, _path(path) + _mode(mode))

    async def chown(self, path: bytes, uid: int, gid: int, *, follow: bool = False) -> None:
        """Set owner and group, by number."""
        if not (0 <= uid < 2**32 and 0 <= gid < 2**32):
            raise InvalidRequest("user and group numbers are 32-bit")
        ids = uid.to_bytes(4, "little") + gid.to_bytes(4, "little")
        await self.call(Op.CHOWN, _path(path) + ids + bytes([follow]))

    async def utime(self, path: bytes, mtime_ns: int) -> None:
        """Set the modification time, of a link itself."""
        if not -(2**63) <= mtime_ns < 2**63:
            raise InvalidRequest("the time is out of range")
        await self.call(Op.UTIME, _path(path) + mtime_ns.to_bytes(8, "little", signed=True))

    async def symlink(self, target: bytes, path: bytes) -> None:
        """Make a symbolic link at `path`."""
        if not target or len(target) > _PATH_MOST:
            raise PathInvalid("the target of a link has 1 to 4095 bytes")
        await self.call(Op.SYMLINK, encode(lambda: frames.text(target)) + _path(path))

    async def link(self, existing: bytes, path: bytes) -> None:
        """Make a hard link at `path`."""
        await self.call(Op.LINK, _path(existing) + _path(path))

    async def mknod(self, path: bytes, type: str, mode: int, rdev: int = 0) -> None:
        """Make a fifo, socket, device or empty file."""
        letter = frames.TYPE_LETTERS.get(type)
        if letter is None or type in ("dir", "symlink"):
            raise InvalidRequest(f"{type!r} cannot be made this way")
        body = _path(path) + bytes([letter]) + _mode(mode) + frames.number(rdev)
        await self.call(Op.MKNOD, body)

    async def watch(self, path: bytes, *, recursive: bool = False) -> AsyncIterator[WatchEvent]:
        """Changes below a directory from now on."""
        generation = self.generation
        handle = frames.number((await self.call(Op.WATCH, _path(path) + bytes([recursive]))).u64())
        after = 0
        try:
            while True:
                self.check(generation)
                reader = await self.call(Op.WATCH_READ, handle + frames.number(after))
                first, events = frames.read_events(reader)
                for event in events[max(0, after - first) :]:
                    yield event
                after = first + len(events)
        finally:
            self.post(Op.WATCH_END, handle)


async def _pieces(data: AsyncIterator[bytes] | bytes) -> AsyncIterator[bytes]:
    """The data in pieces of one size, the last one perhaps shorter, none empty."""
    if isinstance(data, bytes | bytearray | memoryview):
        for at in range(0, len(data), _WHOLE):
            yield bytes(data[at : at + _WHOLE])
        return
    gathered = bytearray()
    async for part in data:
        gathered += part
        while len(gathered) >= _WHOLE:
            yield bytes(gathered[:_WHOLE])
            del gathered[:_WHOLE]
    if gathered:
        yield bytes(gathered)
