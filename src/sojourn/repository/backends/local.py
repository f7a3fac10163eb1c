"""Objects in a local directory: one file each.

Guarantee: that of `backends.base`, and after a power cut too. An object is written to a temporary
file beside the others, synced, and only then given its name; its directory, and directories newly
made for it, are synced before the put is acknowledged. What is under a key is therefore always a
whole object. Conditional writes hold between processes: whatever changes or removes an object that
is there does so under one advisory lock of the directory.

    #lock      the lock; its absence tells a directory that is not (or no longer) a store
    #staging/  temporaries; each is locked by its writer while it lives, so that what a crashed
               one left is told from the rest without clocks or process ids, and removed

`#` is in no key, so neither is ever listed or named.

This does not go through obstore's LocalStore, which was looked at first (0.12): it syncs neither
files nor directories, has no conditional replace (`PutMode::Update` is not implemented), tells
versions by times in microseconds, and leaves its temporaries between the objects. What remained
for it were reads, which are one `pread` each here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sojourn.errors import (
    Conflict,
    IntegrityError,
    InvalidRequest,
    ObjectMissing,
    SojournError,
    StorageFull,
    StoreRefused,
    StoreUnreachable,
)
from sojourn.repository.backends.base import ObjectInfo
from sojourn.repository.backends.object_keys import check_key, check_prefix, check_ranges, is_key

LOCK = "#lock"
STAGING = "#staging"
_LOCK_WAIT = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MOST = 1 << 30  # bytes asked of one system call


class LocalBackend:
    """Implements `sojourn.repository.backends.base.Backend` in a directory. The directory is made
    when it is not there."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._known: set[str] = set()  # directories that are there and synced
        self._guard = threading.Lock()
        with self._failures("opening the store"):
            _make_root(self._root)
            try:
                self._make_marks()
                self._sweep()
            except OSError as error:
                # A store that may only be read is one too: putting will say what is wrong.
                if error.errno not in _REFUSED or not (self._root / LOCK).exists():
                    raise

    def _make_marks(self) -> None:
        with contextlib.suppress(FileExistsError):
            (self._root / STAGING).mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        os.close(os.open(self._root / LOCK, flags, mode=0o600))
        _sync_directory(self._root)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    # -- writing ----------------------------------------------------------------------------
    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        path = self._path(key)
        with self._failures(f"writing {key}"):
            if create and path.exists():
                version = self._compare(key, data)
            else:
                version = self._put(key, path, data, create, replaces)
            # Also where another one wrote the same: it may not have come to this yet.
            _sync_directory(path.parent)
            return version

    def _put(self, key: str, path: Path, data: bytes, create: bool, replaces: str | None) -> str:
        with self._staged(data) as (temporary, descriptor):
            for again in (True, False):
                self._make_parents(key)
                try:
                    if create:
                        return self._link(key, path, temporary, descriptor, data)
                    return self._rename(key, path, temporary, descriptor, replaces)
                except FileNotFoundError:
                    if not again:
                        raise
                    with self._guard:
                        self._known.clear()  # someone removed a directory
        raise AssertionError("unreachable")

    def _compare(self, key: str, data: bytes) -> str:
        """A create that finds an object: the version of the same bytes, or Conflict."""
        try:
            there, version = self._read(key, limit=None)
        except ObjectMissing:
            raise Conflict(f"{key} was removed while it was written.", key=key) from None
        if there != data:
            raise Conflict(f"{key} is there already, with other content.", key=key)
        return version

    def _link(self, key: str, path: Path, temporary: Path, descriptor: int, data: bytes) -> str:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return self._compare(key, data)
        return _version(os.fstat(descriptor))

    def _rename(
        self, key: str, path: Path, temporary: Path, descriptor: int, replaces: str | None
    ) -> str:
        with self._locked():
            try:
                before: os.stat_result | None = path.stat(follow_symlinks=False)
            except FileNotFoundError:
                before = None
            if replaces is not None and (before is None or _version(before) != replaces):
                raise Conflict(f"{key} was changed by someone else.", key=key)
            now = os.fstat(descriptor)
            if before is not None and now.st_mtime_ns <= before.st_mtime_ns:
                # Inodes are used again and clocks are coarse or set back: only a time that grows
                # with every write makes each version another one.
                later = before.st_mtime_ns + 1
                os.utime(descriptor, ns=(later, later))
                os.fsync(descriptor)
                now = os.fstat(descriptor)
            temporary.rename(path)
            return _version(now)

    @contextlib.contextmanager
    def _staged(self, data: bytes) -> Iterator[tuple[Path, int]]:
        """A synced temporary file with this content, locked; gone afterwards."""
        temporary, descriptor = self._new_temporary()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view[:_MOST]) :]
            os.fsync(descriptor)
            yield temporary, descriptor
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            os.close(descriptor)

    def _new_temporary(self) -> tuple[Path, int]:
        while True:
            temporary = self._root / STAGING / secrets.token_hex(16)
            try:
                descriptor = os.open(temporary, _NEW, mode=0o600)
            except FileNotFoundError:
                self._check_there()
                temporary.parent.mkdir(mode=0o700, exist_ok=True)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink:
                    return temporary, descriptor
            except BaseException:
                os.close(descriptor)
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
                raise
            os.close(descriptor)  # a sweep was faster than the lock: begin again

    def _make_parents(self, key: str) -> None:
        """Make the directories of a key. Each is synced into its parent the first time this
        process uses it, whoever made it: its maker may not have come to it."""
        parts = key.split("/")[:-1]
        directory = "/".join(parts)
        if directory in self._known:
            return
        self._check_there()
        at = self._root
        for part in parts:
            parent, at = at, at / part
            try:
                at.mkdir(mode=0o700)
            except FileExistsError:
                if at.is_symlink():  # would lead out of the store
                    raise StoreRefused(
                        f"{at} is a symbolic link; nothing is written there."
                    ) from None
            _sync_directory(parent)
        with self._guard:
            self._known.add(directory)

    def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        if not paths:
            return
        with self._failures("removing objects"):
            parents = set()
            with self._locked():
                for path in paths:
                    with contextlib.suppress(
                        FileNotFoundError, NotADirectoryError, IsADirectoryError
                    ):
                        path.unlink()
                        parents.add(path.parent)
            for parent in parents:
                _sync_directory(parent)

    # -- reading ----------------------------------------------------------------------------
    def get(self, key: str, *, limit: int | None = None) -> tuple[bytes, str]:
        check_key(key)
        with self._failures(f"reading {key}"):
            return self._read(key, limit)

    def _read(self, key: str, limit: int | None) -> tuple[bytes, str]:
        with self._opened(key) as (descriptor, found):
            if limit is not None and found.st_size > limit:
                raise IntegrityError(
                    f"{key} has {found.st_size} bytes, more than the {limit} it may have.",
                    object=key,
                )
            return _read_at(descriptor, key, 0, found.st_size), _version(found)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_key(key)
        check_ranges(list(ranges))
        with self._failures(f"reading {key}"), self._opened(key) as (descriptor, found):
            for offset, length in ranges:
                if length and offset + length > found.st_size:
                    raise IntegrityError(
                        f"{key} has {found.st_size} bytes, too few for {offset}+{length}.",
                        object=key,
                    )
            return [_read_at(descriptor, key, offset, length) for offset, length in ranges]

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        check_key(key)
        check_ranges([(0, length)])
        with self._failures(f"reading {key}"), self._opened(key) as (descriptor, found):
            start = max(0, found.st_size - length)
            return _read_at(descriptor, key, start, found.st_size - start), found.st_size

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._failures(f"looking for {key}"), self._opened(key) as (_, found):
            return _info(key, found)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        try:
            descriptor = os.open(self._root / key, _READ)
        except (FileNotFoundError, NotADirectoryError):
            self._check_there()
            raise ObjectMissing(f"There is no object {key}.", key=key) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ObjectMissing(f"There is no object {key}.", key=key)
            yield descriptor, found
        finally:
            os.close(descriptor)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """In the order of the keys."""
        check_prefix(prefix)
        with self._failures(f"listing {prefix or 'the store'}"):
            self._check_there()
            yield from self._walk(prefix, missing=True)

    def _walk(self, prefix: str, *, missing: bool) -> Iterator[ObjectInfo]:
        found: list[tuple[str, os.stat_result | None]] = []
        try:
            with os.scandir(self._root / prefix) as entries:
                for entry in entries:
                    if not is_key(prefix + entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        found.append((entry.name + "/", None))
                    elif entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # removed just now
                            found.append((entry.name, entry.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            if missing:
                return
            raise
        found.sort(key=lambda pair: pair[0])
        for name, facts in found:
            if facts is None:
                yield from self._walk(prefix + name, missing=False)
            else:
                yield _info(prefix + name, facts)

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        """Nothing is held open."""

    # -- the directory ----------------------------------------------------------------------
    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _check_there(self) -> None:
        """An absent object is only believed where the store itself is present: a file system that
        is not mounted must not look like a store without objects."""
        if not (self._root / LOCK).exists():
            raise StoreUnreachable(
                f"{self._root} is not the store it was: is its file system mounted?",
                url=self.url,
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The directory's lock, between threads and processes."""
        self._check_there()
        descriptor = os.open(self._root / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _LOCK_WAIT
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreUnreachable(
                            f"Another process holds the lock of {self._root}.", url=self.url
                        ) from None
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove the temporaries of writers that are gone."""
        with os.scandir(self._root / STAGING) as entries:
            names = [entry.path for entry in entries]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    with contextlib.suppress(BlockingIOError):  # its writer lives
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        Path(name).unlink()
                finally:
                    os.close(descriptor)

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except SojournError:
            raise
        except OSError as error:
            cause = os.strerror(error.errno or 0)
            where = f"{doing} in {self._root}"
            if error.errno in _FULL:
                raise StorageFull(
                    f"The object store has no room: {where}.",
                    next_step="Free space in the store's directory and try again.",
                    cause=cause,
                ) from error
            if error.errno in _REFUSED:
                raise StoreRefused(f"{cause}: {where}.", cause=cause) from error
            if error.errno in {errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY}:
                raise Conflict(f"A key is the beginning of another: {where}.") from error
            if error.errno == errno.ENOENT:
                self._check_there()
            raise StoreUnreachable(f"{cause}: {where}.", cause=cause) from error


def _make_root(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise InvalidRequest(f"The object store {root} is no directory.")
    missing = []
    at = root
    while not at.exists():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_at(descriptor: int, key: str, offset: int, length: int) -> bytes:
    pieces = []
    while length:
        piece = os.pread(descriptor, min(length, _MOST), offset)
        if not piece:
            raise IntegrityError(f"{key} was cut off while it was read.", object=key)
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, found.st_mtime, _version(found))
