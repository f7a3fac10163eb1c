"""Bytes on disk: copies that keep holes and share blocks where possible, and syncing.

Guarantee: a copy has exactly the source's bytes and size, holes stay holes; what `sync_*` returned
from survives a power cut. A full disk is StorageFull wherever it shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from sojourn.errors import StorageFull

_FICLONE = 0x40049409
_PIECE = 1 << 20
_SMALL = 1 << 16
_NO_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}
)
_NO_RANGE = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn a full disk or an exhausted quota into StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"No room on the node's disk while {doing}.", cause=os.strerror(error.errno or 0)
            ) from error
        raise


class Copier:
    """Copies file contents within one file system; learns what that file system can do."""

    def __init__(self) -> None:
        self.clones = True
        self.ranges = True

    def copy(self, source: int, target: int, size: int, allocated: int) -> int:
        """Copy `size` bytes between open files (target new and empty). Returns bytes written."""
        if size == 0:
            return 0
        if self.clones and size > _SMALL:
            try:
                fcntl.ioctl(target, _FICLONE, source)
                return 0
            except OSError as error:
                if error.errno not in _NO_CLONE:
                    raise
                self.clones = False
        if size <= _SMALL and allocated >= size:
            return self._plain(source, target, 0, size)
        if allocated >= size:
            return self._range(source, target, 0, size)
        os.ftruncate(target, size)
        written = 0
        at = 0
        while at < size:
            try:
                start = os.lseek(source, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break  # only a hole is left
                raise
            end = min(os.lseek(source, start, os.SEEK_HOLE), size)
            if end <= start:
                break
            written += self._range(source, target, start, end)
            at = end
        return written

    def _range(self, source: int, target: int, start: int, end: int) -> int:
        at = start
        while at < end and self.ranges:
            try:
                count = os.copy_file_range(source, target, end - at, at, at)
            except OSError as error:
                if error.errno not in _NO_RANGE:
                    raise
                self.ranges = False
                break
            if count == 0:
                return at - start  # the source is shorter than it was: the caller compares sizes
            at += count
        return at - start + self._plain(source, target, at, end)

    @staticmethod
    def _plain(source: int, target: int, start: int, end: int) -> int:
        at = start
        while at < end:
            data = os.pread(source, min(_PIECE, end - at), at)
            if not data:
                break
            view = memoryview(data)
            while view:
                count = os.pwrite(target, view, at)
                view = view[count:]
                at += count
        return at - start


def flush_mapped(fd: int) -> None:
    """Write out a file's dirty pages, so that the next write through a mapping faults again and
    moves the change time. No metadata is committed: this is about seeing, not about surviving."""
    if _libc.sync_file_range(fd, 0, 0, 7) != 0:  # wait before, write, wait after
        code = ctypes.get_errno()
        if code in (errno.ESPIPE, errno.EINVAL, errno.ENOSYS):
            os.fdatasync(fd)
            return
        raise OSError(code, os.strerror(code))


_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_EVERY_SECONDS = 0.02


@contextlib.contextmanager
def written_early(directory: Path) -> Iterator[None]:
    """Around the writing of large files into a directory by someone else: begin to write their
    pages to the disk meanwhile, so that syncing them afterwards has little left to wait for.

    Nothing depends on it; a disk that refuses is met again, and reported, by the sync.
    """
    done = threading.Event()

    def start_writing() -> None:
        while not done.wait(_EVERY_SECONDS):
            # A file, or all of them, may go while this looks.
            with contextlib.suppress(FileNotFoundError):
                for file in directory.iterdir():
                    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        _libc.sync_file_range(fd, 0, 0, _START_WRITING)
                    finally:
                        os.close(fd)

    thread = threading.Thread(target=start_writing, name="early writing")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def sync_filesystem(directory: Path) -> None:
    """Make everything on the directory's file system survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Sync one file or directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Write a file that is there whole and synced, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_path(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
