"""Objects in a local directory: one file each.

Guarantee: that of `backends.base`, and after a power cut too. An object is written to a temporary
file beside the others, synced, and only then given its name; its directory, and directories newly
made for it, are synced before the put is acknowledged. What is under a key is therefore always a
whole object. Conditional writes hold between processes: whatever changes or removes an object that
is there does so under the one lock of the directory.

    #lock      the lock; its absence tells a directory that is not (or no longer) a store
    #staging/  temporaries (see directories.py)

`#` is in no key, so neither is ever listed or named.

Below the directory there are directories and regular files alone. Anything else under a name that a
key could have (a link, a pipe) is damage, or leads out of the store: whoever comes to it, reading,
writing, removing or listing, is told IntegrityError, so no two of them can differ about it. The
directory itself may be a link.

This does not go through obstore's LocalStore: as of 0.12 that has no conditional replace
(`PutMode::Update` is not implemented for it), and whether it syncs files and directories was not
traced. What remained for it were reads, which are one `pread` each here.
"""

from __future__ import annotations

import contextlib
import errno
import os
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
from sojourn.repository.backends.directories import Directory, make_root, sync_directory
from sojourn.repository.backends.object_keys import check_key, check_prefix, check_ranges, is_key

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NESTED = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PIECE = 1 << 30  # bytes asked of one system call
_BATCH = 256  # deletions under one hold of the lock


class LocalBackend:
    """Implements `sojourn.repository.backends.base.Backend` in a directory. With `create` it is
    made a store when it is none; otherwise nothing is made, and StoreUnreachable raised."""

    def __init__(self, root: Path, *, create: bool = True) -> None:
        self._root = root.absolute()
        self._directory = Directory(self._root)
        self._known: set[str] = set()  # directories that are there and synced
        self._guard = threading.Lock()
        with self._failures("opening the store"):
            try:
                if create:
                    make_root(self._root)
                elif self._root.exists() and not self._root.is_dir():
                    raise NotADirectoryError(self._root)
            except (NotADirectoryError, FileExistsError):
                raise InvalidRequest(f"The object store {self._root} is no directory.") from None
            try:
                if create:
                    self._directory.prepare()
                else:
                    self._directory.take_up()
            except OSError as error:
                # A store that may only be read is one too: putting will say what is wrong.
                if error.errno not in _REFUSED or not self._directory.is_store():
                    raise

    @property
    def url(self) -> str:
        return self._root.as_uri()

    # -- writing ----------------------------------------------------------------------------
    def put(
        self, key: str, data: bytes, *, create: bool = False, replaces: str | None = None
    ) -> str:
        path = self._root / check_key(key)
        with self._failures(f"writing {key}"):
            version = self._same(key, data) if create else None
            if version is None:
                version = self._put(key, path, data, create, replaces)
            # Also where another one wrote the same: it may not have come to this yet.
            sync_directory(path.parent)
            return version

    def _put(self, key: str, path: Path, data: bytes, create: bool, replaces: str | None) -> str:
        with self._directory.staged(data) as (temporary, descriptor):
            for _ in range(2):
                self._check_way(key)
                self._make_parents(key)
                try:
                    if create:
                        os.link(temporary, path)
                        return _version(os.fstat(descriptor))
                    return self._rename(key, path, temporary, descriptor, replaces)
                except FileExistsError:
                    if path.is_dir():
                        raise IsADirectoryError(errno.EISDIR, "a directory", str(path)) from None
                    version = self._same(key, data)
                    if version is not None:
                        return version
                except FileNotFoundError:
                    with self._guard:
                        self._known.clear()  # someone removed a directory
        raise StoreUnreachable(f"{key} or its directory is removed all the time.", key=key)

    def _same(self, key: str, data: bytes) -> str | None:
        """The version of the object that is there, when it has these bytes; None where there is
        none; otherwise Conflict."""
        try:
            with self._opened(key) as (descriptor, found):
                if found.st_size == len(data) and _read(descriptor, key, 0, len(data)) == data:
                    return _version(found)
        except ObjectMissing:
            return None
        raise Conflict(f"{key} is there already, with other content.", key=key)

    def _rename(
        self, key: str, path: Path, temporary: Path, descriptor: int, replaces: str | None
    ) -> str:
        with self._directory.locked():
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

    def _make_parents(self, key: str) -> None:
        """Make the directories of a key. Each is synced into its parent the first time this
        process uses it, whoever made it: its maker may not have come to it."""
        parts = key.split("/")[:-1]
        directory = "/".join(parts)
        if directory in self._known:
            return
        self._directory.require()
        at = self._root
        for part in parts:
            parent, at = at, at / part
            with contextlib.suppress(FileExistsError):
                at.mkdir(mode=0o700)
            sync_directory(parent)
        with self._guard:
            self._known.add(directory)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        parents = set()
        with self._failures("removing objects"):
            for start in range(0, len(keys), _BATCH):
                with self._directory.locked():
                    for key in keys[start : start + _BATCH]:
                        self._check_way(key)
                        path = self._root / key
                        if _unlink(path):
                            parents.add(path.parent)
            for parent in parents:
                sync_directory(parent)

    # -- reading ----------------------------------------------------------------------------
    def get(self, key: str, *, limit: int | None = None) -> tuple[bytes, str]:
        with self._failures(f"reading {key}"), self._opened(key) as (descriptor, found):
            if limit is not None and found.st_size > limit:
                raise IntegrityError(
                    f"{key} has {found.st_size} bytes, more than the {limit} it may have.",
                    object=key,
                )
            return _read(descriptor, key, 0, found.st_size), _version(found)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_ranges(ranges)
        with self._failures(f"reading {key}"), self._opened(key) as (descriptor, found):
            for offset, length in ranges:
                if length and offset + length > found.st_size:
                    raise IntegrityError(
                        f"{key} has {found.st_size} bytes, too few for {offset}+{length}.",
                        object=key,
                    )
            return [_read(descriptor, key, offset, length) for offset, length in ranges]

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        check_ranges([(0, length)])
        with self._failures(f"reading {key}"), self._opened(key) as (descriptor, found):
            start = max(0, found.st_size - length)
            return _read(descriptor, key, start, found.st_size - start), found.st_size

    def head(self, key: str) -> ObjectInfo:
        with self._failures(f"looking for {key}"), self._opened(key) as (_, found):
            return _info(key, found)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        check_key(key)
        self._check_way(key)
        try:
            descriptor = os.open(self._root / key, _READ)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            self._directory.require()
            raise ObjectMissing(f"There is no object {key}.", key=key) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ObjectMissing(f"There is no object {key}.", key=key)
            yield descriptor, found
        finally:
            os.close(descriptor)

    def _check_way(self, key: str) -> None:
        """Raise IntegrityError where something other than a directory or file lies at the key or
        on the way to it."""
        at = str(self._root)
        name = ""
        for part in key.split("/"):
            at = f"{at}/{part}"
            name = f"{name}/{part}" if name else part
            try:
                mode = os.lstat(at).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise _stranger(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """In the order of the keys."""
        check_prefix(prefix)
        with self._failures(f"listing {prefix or 'everything'}"):
            self._directory.require()
            if prefix:
                self._check_way(prefix[:-1])
            try:
                found = self._entries(prefix)
            except (FileNotFoundError, NotADirectoryError):
                return
            yield from self._below(prefix, found)

    def _below(
        self, prefix: str, found: Sequence[tuple[str, os.stat_result | None]]
    ) -> Iterator[ObjectInfo]:
        for name, facts in found:
            if facts is None:
                yield from self._below(prefix + name, self._entries(prefix + name))
            else:
                yield _info(prefix + name, facts)

    def _entries(self, prefix: str) -> Sequence[tuple[str, os.stat_result | None]]:
        """Objects of one directory with their facts, directories with a slash after their name:
        that is where they stand in the order of whole keys."""
        found: list[tuple[str, os.stat_result | None]] = []
        with os.scandir(self._root / prefix) as entries:
            for entry in entries:
                if not is_key(prefix + entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.name + "/", None))
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed just now
                    continue
                if not stat.S_ISREG(facts.st_mode):
                    raise _stranger(prefix + entry.name)
                found.append((entry.name, facts))
        found.sort(key=lambda pair: pair[0])
        return found

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        """Nothing is held open."""

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
            if error.errno in _NESTED:
                raise Conflict(f"A key is the beginning of another: {where}.") from error
            if error.errno == errno.ENOENT:
                self._directory.require()
            raise StoreUnreachable(f"{cause}: {where}.", cause=cause) from error


def _stranger(name: str) -> IntegrityError:
    return IntegrityError(
        f"{name} in the object store is neither a file nor a directory.",
        next_step="Find out who put it there; take it away or bring back what it stands for.",
        object=name,
    )


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return True


def _read(descriptor: int, key: str, offset: int, length: int) -> bytes:
    pieces = []
    while length:
        piece = os.pread(descriptor, min(length, _PIECE), offset)
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
