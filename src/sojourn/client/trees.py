"""Trees of the caller's own machine, packed into tar streams and unpacked from them.

Guarantee: a tree that comes from a session, which may be hostile, is written inside the given
directory and nowhere else, whatever names and links it holds: every step goes through an open
directory that was entered without following a link. Set-user-id bits, owners and device nodes of a
session are not taken over unless the caller asks for owners.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat as modes
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sojourn.client.targets import open_special, replaced
from sojourn.errors import FileConflict, FileMissing, InvalidRequest, PathInvalid, SojournError
from sojourn.wire import tar
from sojourn.wire.api import TreeInfo

PIECE = 256 * 1024
_HELD = 512 * 1024
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


# -- packing ------------------------------------------------------------------------------------


def pack(path: Path) -> Iterator[bytes]:
    """The directory `path` as a tar stream. Sockets are left out."""
    held = bytearray()
    for piece in _members(os.fsencode(path)):
        held += piece
        if len(held) >= _HELD:
            yield bytes(held)
            held.clear()
    yield bytes(held) + tar.END


def _members(root: bytes) -> Iterator[bytes]:
    linked: dict[tuple[int, int], bytes] = {}
    waiting = [(root, b".")]  # no recursion: a tree may be deeper than Python's stack
    while waiting:
        path, name = waiting.pop()
        found = os.lstat(path)
        kind = _kind(found.st_mode)
        if kind is None:
            continue
        target = b""
        if kind != "dir" and found.st_nlink > 1:
            first = linked.setdefault((found.st_dev, found.st_ino), name)
            if first != name:
                kind, target = "hardlink", first
        if kind == "symlink":
            target = os.readlink(path)  # noqa: PTH115 - the path is bytes
        if kind == "file":
            yield from _file(path, name, found)
            continue
        yield tar.encode_entry(_entry(name, kind, found, 0, target))
        if kind == "dir":
            above = b"" if name == b"." else name + b"/"
            for child in sorted(os.listdir(path), reverse=True):  # noqa: PTH208 - bytes
                waiting.append((path + b"/" + child, above + child))


def _kind(mode: int) -> str | None:
    for test, kind in (
        (modes.S_ISREG, "file"),
        (modes.S_ISDIR, "dir"),
        (modes.S_ISLNK, "symlink"),
        (modes.S_ISFIFO, "fifo"),
        (modes.S_ISCHR, "char"),
        (modes.S_ISBLK, "block"),
    ):
        if test(mode):
            return kind
    return None


def _entry(name: bytes, kind: str, found: os.stat_result, size: int, target: bytes) -> tar.Entry:
    return tar.Entry(
        name,
        kind,
        modes.S_IMODE(found.st_mode),
        found.st_uid,
        found.st_gid,
        size,
        found.st_mtime_ns,
        target,
        os.major(found.st_rdev),
        os.minor(found.st_rdev),
    )


def _file(path: bytes, name: bytes, found: os.stat_result) -> Iterator[bytes]:
    with open(path, "rb") as file:  # noqa: PTH123 - the path is bytes
        size = os.fstat(file.fileno()).st_size
        yield tar.encode_entry(_entry(name, "file", found, size, b""))
        left = size
        while left:
            chunk = file.read(min(left, PIECE))
            if not chunk:
                shown = os.fsdecode(path)
                raise FileConflict(f"{shown} became shorter while it was read", path=shown)
            yield chunk
            left -= len(chunk)
        yield tar.padding(size)


# -- unpacking ----------------------------------------------------------------------------------


class Unpacker:
    """Writes a tar stream, given in pieces, into a directory of this machine.

    Use as a context manager; `finish` sets what directories get last and tells what was done.
    """

    def __init__(self, directory: Path, *, owners: bool = False) -> None:
        self._owners = owners
        self._decoder = tar.Decoder()
        directory.mkdir(parents=True, exist_ok=True)
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._parent: tuple[bytes, int] = (b".", self._root)
        self._file: int | None = None
        self._entry: tar.Entry | None = None
        self._later: list[tar.Entry] = []
        self._members = 0
        self._bytes = 0
        self._skipped: list[str] = []

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._parent[1] != self._root:
            os.close(self._parent[1])
        os.close(self._root)

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream. Raises PathInvalid, FileConflict or InvalidRequest."""
        for event in self._decoder.feed(data):
            try:
                if isinstance(event, tar.Entry):
                    self._begin(event)
                elif isinstance(event, bytes):
                    self._write(event)
                else:
                    self._end()
            except OSError as error:
                raise _local_error(error, self._entry) from error

    def finish(self) -> TreeInfo:
        """The stream is at its end."""
        if not self._decoder.complete:
            raise InvalidRequest("the tree was cut off", next_step="Ask for it again.")
        for entry in reversed(self._later):  # children first: writing moves times
            try:
                handle = self._enter(entry.name)
                self._settle(handle, entry)
            except OSError as error:
                raise _local_error(error, entry) from error
        return TreeInfo(self._members, self._bytes, self._skipped)

    def _begin(self, entry: tar.Entry) -> None:
        self._entry = entry
        self._members += 1
        if entry.type == "dir":
            self._enter(entry.name)
            self._later.append(entry)
            return
        above, _, last = entry.name.rpartition(b"/")
        if last == b".":
            raise PathInvalid("the tree would replace the directory it is written to")
        parent = self._enter(above or b".")
        if entry.type in {"char", "block"}:
            self._skipped.append(entry.name.decode("utf-8", "replace"))
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(last, dir_fd=parent)
        if entry.type == "symlink":
            os.symlink(entry.target, last, dir_fd=parent)
            if self._owners:
                os.chown(last, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
            self._set_time(last, entry, parent)
        elif entry.type == "fifo":
            os.mkfifo(last, entry.mode & 0o777, dir_fd=parent)
            self._set_time(last, entry, parent)
        elif entry.type == "hardlink":
            self._link(entry, last)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = os.open(last, flags, 0o600, dir_fd=parent)

    def _link(self, entry: tar.Entry, last: bytes) -> None:
        """A hardlink to an earlier member, both sides held open so that neither path is walked."""
        above, _, existing = entry.target.rpartition(b"/")
        source = os.dup(self._enter(above or b"."))
        try:
            parent = self._enter(entry.name.rpartition(b"/")[0] or b".")
            os.link(existing, last, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return  # content of a member that is skipped
        _write_all(self._file, data)
        self._bytes += len(data)

    def _end(self) -> None:
        if self._file is None or self._entry is None:
            return
        try:
            self._settle(self._file, self._entry)
        finally:
            os.close(self._file)
            self._file = None

    def _settle(self, handle: int, entry: tar.Entry) -> None:
        if self._owners:
            os.fchown(handle, entry.uid, entry.gid)
        os.fchmod(handle, entry.mode if self._owners else entry.mode & 0o777)
        os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))

    def _set_time(self, last: bytes, entry: tar.Entry, parent: int) -> None:
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(last, ns=times, dir_fd=parent, follow_symlinks=False)

    def _enter(self, name: bytes) -> int:
        """A directory below the root, made if missing, entered part by part without links."""
        if name == b".":
            return self._root
        if self._parent[0] == name:
            return self._parent[1]
        handle = self._root
        for part in name.split(b"/"):
            try:
                # What exists is opened next, where a link or a file is refused.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=handle)
                deeper = os.open(part, _ENTER, dir_fd=handle)
            finally:
                if handle != self._root:
                    os.close(handle)
            handle = deeper
        if self._parent[1] != self._root:
            os.close(self._parent[1])
        self._parent = (name, handle)
        return handle


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _local_error(error: OSError, entry: tar.Entry | None) -> SojournError:
    shown = "" if entry is None else entry.name.decode("utf-8", "replace")
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        return PathInvalid(
            f"{shown!r} would pass through a link or replace what stands there", member=shown
        )
    if isinstance(error, FileNotFoundError):
        return FileMissing(f"{shown!r}: {error.strerror}", member=shown)
    return _unwritable(error, shown)


def _unwritable(error: OSError, shown: str) -> FileConflict:
    return FileConflict(
        f"cannot write {shown!r}: {error.strerror}",
        next_step="Check the local directory.",
        member=shown,
    )


class Saving:
    """Writes one file's content, given in pieces, replacing the file whole or not at all. A pipe or
    a device is written to. Raises FileConflict."""

    def __init__(self, target: Path, mode: int) -> None:
        self._target = target
        self._mode = mode
        self._size = 0
        self._fresh: Path | None = None
        self._file: BinaryIO
        self._replaced = replaced(target)
        try:
            if self._replaced is None:
                self._file = open_special(target)
                return
            name = f".{self._replaced.name[:200]}.{secrets.token_hex(8)}.part"
            self._fresh = self._replaced.with_name(name)
            self._file = self._fresh.open("xb", buffering=0)
        except OSError as error:
            raise _unwritable(error, str(target)) from error

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        if self._fresh is not None:
            self._fresh.unlink(missing_ok=True)

    def feed(self, data: bytes) -> None:
        """Take a piece of the content. Raises FileConflict."""
        try:
            _write_all(self._file.fileno(), data)
        except OSError as error:
            raise _unwritable(error, str(self._target)) from error
        self._size += len(data)

    def finish(self) -> TreeInfo:
        """The content is complete. Raises FileConflict."""
        try:
            if self._fresh is not None and self._replaced is not None:
                os.fchmod(self._file.fileno(), self._mode & 0o777)
                self._file.close()
                self._fresh.replace(self._replaced)
            self._file.close()
        except OSError as error:
            raise _unwritable(error, str(self._target)) from error
        return TreeInfo(1, self._size)
