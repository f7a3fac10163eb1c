"""Making a tree on disk from canonical entries, by sharing files of stored layers where they are.

Guarantee: the tree made has exactly the entries' canonical form. A stored file is shared (hard
link) only after the host shows it untouched since it was stored, or its content was read and found
right; so a damaged layer never spreads into a new one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from sojourn.store.copying import Copier
from sojourn.store.layers import Stored
from sojourn.store.manifests import (
    BLOCK,
    CHAR,
    DIRECTORY,
    FIFO,
    FILE,
    FORMATS,
    SOCKET,
    SYMLINK,
    WHITEOUT,
    Entry,
)
from sojourn.store.trees import Directories

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Shared(msgspec.Struct, frozen=True):
    """A file's content (and inode) in a stored layer's tree."""

    layer: str
    path: bytes


class Staged(msgspec.Struct, frozen=True):
    """A file's content in a staging file of its own, to be moved into the tree."""

    file: Path


class Builder:
    """Builds one tree at `root` (made here).

    `stored(layer)` gives a stored layer; `trust` lets one of its files be shared, or raises
    IntegrityError when its content is wrong.
    """

    def __init__(
        self,
        root: Path,
        copier: Copier,
        stored: Callable[[str], Stored],
        trust: Callable[[Stored, bytes, os.stat_result, int, bytes], None],
    ) -> None:
        self._root = root
        self._copier = copier
        self._stored = stored
        self._trust = trust
        self._layers: dict[str, tuple[Stored, Directories]] = {}
        self.shared: set[int] = set()  # inodes that got another name
        self.new = 0  # files and directories with bytes of their own

    def build(self, entries: list[Entry], sources: dict[bytes, Shared | Staged]) -> None:
        """Make every entry. `sources` holds where the content of each first-linked file is."""
        self._root.mkdir(mode=0o700)
        directories = []
        try:
            with Directories(self._root) as made:
                for entry in entries:
                    if entry.type == DIRECTORY:
                        directories.append(entry)
                        self.new += 1
                        if entry.path:
                            fd, name = made.parent(entry.path)
                            os.mkdir(name, 0o700, dir_fd=fd)
                        continue
                    fd, name = made.parent(entry.path)
                    if entry.link is not None:
                        self._link_within(made, entry.link, entry.path)
                        continue
                    source = sources.get(entry.path) if entry.type == FILE else None
                    if isinstance(source, Shared) and self._share(source, fd, name):
                        continue
                    self._make(entry, source, fd, name)
                    _dress(entry, fd, name)
                # Children move their directory's times, so directories are finished last.
                for entry in reversed(directories):
                    if entry.path:
                        fd, name = made.parent(entry.path)
                    else:
                        fd, name = made.get(b""), b""
                    _dress(entry, fd, name)
        finally:
            for _, held in self._layers.values():
                held.close()
            self._layers.clear()

    def _source(self, layer: str) -> tuple[Stored, Directories]:
        found = self._layers.get(layer)
        if found is None:
            stored = self._stored(layer)
            found = self._layers[layer] = (stored, Directories(stored.tree))
        return found

    def _share(self, source: Shared, fd: int, name: bytes) -> bool:
        stored, tree = self._source(source.layer)
        directory, old = tree.parent(source.path)
        s = os.stat(old, dir_fd=directory, follow_symlinks=False)
        self._trust(stored, source.path, s, directory, old)
        try:
            os.link(old, name, src_dir_fd=directory, dst_dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.EMLINK, errno.EXDEV, errno.EPERM):
                return False  # the inode has all the names it can have: copy instead
            raise
        self.shared.add(s.st_ino)
        return True

    def _link_within(self, made: Directories, first: bytes, path: bytes) -> None:
        source, old = made.parent(first)
        source = os.dup(source)  # the next look-up may drop it
        try:
            fd, name = made.parent(path)
            os.link(old, name, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(source)

    def _make(self, entry: Entry, source: Shared | Staged | None, fd: int, name: bytes) -> None:
        kind = entry.type
        if kind == FILE:
            self.new += 1
            if isinstance(source, Staged):
                os.rename(source.file, name, dst_dir_fd=fd)
                return
            target = os.open(name, _CREATE, 0o600, dir_fd=fd)
            try:
                if isinstance(source, Shared):
                    directory, old = self._source(source.layer)[1].parent(source.path)
                    origin = os.open(old, _READ, dir_fd=directory)
                    try:
                        s = os.fstat(origin)
                        self._copier.copy(origin, target, s.st_size, s.st_blocks * 512)
                    finally:
                        os.close(origin)
            finally:
                os.close(target)
        elif kind == SYMLINK:
            os.symlink(entry.target, name, dir_fd=fd)
        elif kind == WHITEOUT:
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=fd)
        elif kind in (FIFO, SOCKET):
            os.mknod(name, FORMATS[kind] | 0o600, dir_fd=fd)
        elif kind in (CHAR, BLOCK):
            device = os.makedev(entry.major, entry.minor)
            os.mknod(name, FORMATS[kind] | 0o600, device, dir_fd=fd)


def _dress(entry: Entry, fd: int, name: bytes) -> None:
    """Owner, attributes, mode and times, in the order in which none undoes another."""
    if entry.type == WHITEOUT:
        return
    where = b"/proc/self/fd/%d/%s" % (fd, name) if name else b"/proc/self/fd/%d" % fd
    is_link = entry.type == SYMLINK
    os.chown(where, entry.uid, entry.gid, follow_symlinks=not name)
    for key, value in entry.xattrs:
        os.setxattr(where, key, value, follow_symlinks=not name)
    if not is_link:
        os.chmod(where, entry.mode)  # noqa: PTH101 (raw bytes)
    os.utime(where, ns=(entry.mtime, entry.mtime), follow_symlinks=not name)
