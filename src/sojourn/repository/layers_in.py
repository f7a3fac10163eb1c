"""Restoring a layer: its manifest from segments, and its tree exactly as it was sealed.

Guarantee: `restore_layer` makes what the manifest of the layer's id says and nothing else, below a
root that it makes itself and that is closed to others until the end; every file's bytes are
compared with the manifest's digest, or IntegrityError names the path and the tree is gone again.
No link is followed: the manifest is refused unless every parent is a directory of its own, each is
made here and must be new, and everything is reached from the root's descriptor. What the format's
rules leave open but no tree can have (`flaw_of_tree`) is refused before anything is made.

The caller syncs the tree. Memory: that of `downloads`, and some 500 bytes for each entry.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from blake3 import blake3

from sojourn.errors import HostUnfit, IntegrityError
from sojourn.repository.cutting import SMALL_FILE, decode_recipe
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.large_files import LargeFiles
from sojourn.repository.layers import decode_layer, join_segments
from sojourn.repository.packs import CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT
from sojourn.repository.sealed import LAYER
from sojourn.repository.sparse import PAGE, write_all, write_at
from sojourn.store.copying import disk_errors
from sojourn.store.layers import object_name
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
    Manifest,
    whiteout,
)
from sojourn.store.trees import Directories, remove_tree, split

_SPAN = 3000  # bytes of path handed to the kernel at once
_NAME = 255
_TARGET = 4095
_XATTR_NAME, _XATTR_VALUE = 255, 65536
_NAMESPACES = (b"user.", b"trusted.", b"security.", b"system.posix_acl_")
_OVERLAY = b"trusted.overlay."
_OVERLAY_KEPT = frozenset({b"trusted.overlay.opaque", b"trusted.overlay.whiteout"})
_NO_ID = (1 << 32) - 1  # for chown: leave it as it is
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_SPECIAL = 0o7000
_EMPTY = blake3(b"").digest()
_INHERITED = ("system.posix_acl_default", "system.posix_acl_access")


def read_manifest(domain: Domain, layer: str) -> Manifest:
    """The manifest of a layer, proven by its id. Raises ObjectMissing, IntegrityError."""
    record = decode_layer(domain.get_root(LAYER, domain.layer_key(layer)), layer)
    found = _contents(domain, CHUNK_SEGMENT, record.segments, object_name(layer))
    return join_segments(record, (found[content] for content in record.segments))


def restore_layer(domain: Domain, layer: str, root: Path) -> Manifest:
    """Make a layer's tree at `root`, which must not be there. On failure it is removed again.

    Raises ObjectMissing, IntegrityError, StoreUnreachable, StorageFull, HostUnfit (this disk cannot
    hold such a tree)."""
    manifest = read_manifest(domain, layer)
    name = object_name(layer)
    cause = flaw_of_tree(manifest)
    if cause is not None:
        raise IntegrityError(f"The manifest of {name} cannot be a tree: {cause}.", object=name)
    with disk_errors("restoring a layer"):
        root.mkdir(mode=0o700)
    try:
        with disk_errors("restoring a layer"):
            try:
                _Restore(domain, manifest, root).run()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise HostUnfit(
                    f"The node's disk does not take {name} as it is: {error.strerror}.",
                    next_step="Restore as root, on a file system with attributes, devices, hard "
                    "links and times in nanoseconds.",
                    object=name,
                ) from error
    except BaseException:
        remove_tree(root)
        raise
    return manifest


def flaw_of_tree(manifest: Manifest) -> str | None:
    """What of a consistent manifest no tree can have or would mean something else on this host, if
    anything."""
    for entry in manifest.entries:
        kind = entry.type
        if (
            kind == FILE
            and not entry.xattrs
            and 0 <= entry.uid < _NO_ID
            and 0 <= entry.gid < _NO_ID
            and not entry.major
            and not entry.minor
            and -(1 << 63) <= entry.mtime_s < 1 << 63
            and len(entry.path) - entry.path.rfind(b"/") - 1 <= _NAME
            and entry.size < 1 << 63
        ):
            continue  # almost all
        cause = _flaw(entry)
        if cause is not None:
            return f"{cause} of {entry.path!r}"
    return None


def _flaw(entry: Entry) -> str | None:
    kind = entry.type
    if kind == WHITEOUT and entry != whiteout(entry.path):
        return "properties of the whiteout"
    if len(split(entry.path)[1]) > _NAME:
        return "length of the name"
    if not 0 <= entry.mode <= 0o7777 or not 0 <= entry.mtime_ns < 1_000_000_000:
        return "mode or time"  # the root is no other rule's
    if not (0 <= entry.uid < _NO_ID and 0 <= entry.gid < _NO_ID):
        return "owner"
    if not -(1 << 63) <= entry.mtime_s < 1 << 63 or not 0 <= entry.size < 1 << 63:
        return "time or size"
    if kind != FILE and (entry.size or entry.digest):
        return "size"
    if kind == SYMLINK and entry.mode != 0o777:
        return "mode of the link"
    if len(entry.target) > _TARGET or b"\0" in entry.target:
        return "target"
    if kind in (CHAR, BLOCK):
        if not (0 <= entry.major < 1 << 12 and 0 <= entry.minor < 1 << 20):
            return "device number"
        if kind == CHAR and not entry.major and not entry.minor:
            return "device number (a whiteout's)"
    elif entry.major or entry.minor:
        return "device number"
    return _flaw_of_attributes(entry.xattrs)


def _flaw_of_attributes(xattrs: tuple[tuple[bytes, bytes], ...]) -> str | None:
    previous = b""
    for key, value in xattrs:
        if key <= previous:
            return "order of attributes"
        previous = key
        if not key.startswith(_NAMESPACES) or b"\0" in key or len(key) > _XATTR_NAME:
            return f"attribute {key!r}"
        if len(value) > _XATTR_VALUE:
            return f"size of attribute {key!r}"
        if key.startswith(_OVERLAY) and key not in _OVERLAY_KEPT:
            return f"attribute {key!r} (of this host's overlays)"
    return None


def _contents(domain: Domain, kind: int, contents: list[bytes], name: str) -> dict[bytes, bytes]:
    """Chunks of metadata by their content ids. Those of segments are proven; a recipe is by the
    file that it gives."""
    asked = {domain.keys.chunk_name(kind, content): content for content in contents}
    found: dict[bytes, bytes] = {}
    for chunk, data in Reader(domain).chunks(asked, needed_by=name):
        content = asked[chunk]
        if kind == CHUNK_SEGMENT and blake3(data).digest() != content:
            raise IntegrityError(f"A segment of {name} is not the one of its name.", object=name)
        found[content] = data
    return found


def _umask() -> int:
    """The process's mask, which cannot be asked for without setting it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o777  # not told: every mode is set


class _Restore:
    """One restore."""

    def __init__(self, domain: Domain, manifest: Manifest, root: Path) -> None:
        self._domain = domain
        self._manifest = manifest
        self._name = object_name(manifest.id)
        self._deep = Directories(root)
        self._root = self._deep.get(b"")
        self._uid, self._gid = os.geteuid(), os.getegid()
        # Modes with none of these bits are right from the making on.
        self._mode_later = _umask() | _SPECIAL
        self._small: dict[bytes, list[Entry]] = {}
        self._large: list[Entry] = []
        self._links: list[Entry] = []
        self._directories: list[Entry] = []

    def run(self) -> None:
        try:
            self._prepare_root()
            self._make_entries()
            self._write_files()
            for entry in self._links:
                self._link(entry)
            # Children move their directory's times, so directories are finished last.
            for entry in reversed(self._directories):
                self._finish_directory(entry)
        finally:
            self._deep.close()

    def _at(self, path: bytes) -> tuple[int, bytes]:
        """A descriptor, and where the path is below it."""
        if len(path) <= _SPAN:
            return self._root, path
        return self._deep.parent(path)

    def _prepare_root(self) -> None:
        """Take back what the root got from the directory it was made in and would hand on."""
        for key in _INHERITED:
            try:
                os.removexattr(self._root, key)
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                    raise
        os.fchmod(self._root, 0o700)
        os.fchown(self._root, self._uid, self._gid)

    # -- everything but contents ------------------------------------------------------------
    def _make_entries(self) -> None:
        chunk_name = self._domain.keys.chunk_name
        small = self._small
        for entry in self._manifest.entries:
            kind = entry.type
            if entry.link is not None:
                self._links.append(entry)
            elif kind == FILE:
                if entry.size == 0:
                    if entry.digest != _EMPTY:
                        raise self._differs(entry)
                    self._write_small(entry, b"")
                elif entry.size > SMALL_FILE:
                    self._large.append(entry)
                else:
                    name = chunk_name(CHUNK_DATA, entry.digest)
                    same = small.get(name)
                    if same is None:
                        small[name] = [entry]
                    else:
                        same.append(entry)
            elif kind == DIRECTORY:
                self._directories.append(entry)
                if entry.path:
                    fd, path = self._at(entry.path)
                    os.mkdir(path, self._directory_mode(entry), dir_fd=fd)
            else:
                self._make_special(entry)

    def _directory_mode(self, entry: Entry) -> int:
        """Its own where it can be entered with that, and nothing of it comes later."""
        mode = entry.mode
        return mode if mode & 0o700 == 0o700 and not mode & self._mode_later else 0o700

    def _make_special(self, entry: Entry) -> None:
        fd, path = self._at(entry.path)
        kind = entry.type
        if kind == WHITEOUT:
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0), dir_fd=fd)
            return
        if kind == SYMLINK:
            os.symlink(entry.target, path, dir_fd=fd)
        elif kind in (FIFO, SOCKET):
            os.mknod(path, FORMATS[kind] | 0o600, dir_fd=fd)
        else:
            device = os.makedev(entry.major, entry.minor)
            os.mknod(path, FORMATS[kind] | 0o600, device, dir_fd=fd)
        self._dress(entry, fd, path, chmod=kind != SYMLINK)

    def _dress(self, entry: Entry, fd: int, path: bytes, *, chmod: bool) -> None:
        """Owner, attributes, mode and times of what cannot be opened, in the order in which none
        undoes another."""
        if entry.uid != self._uid or entry.gid != self._gid:
            os.chown(path, entry.uid, entry.gid, dir_fd=fd, follow_symlinks=False)
        if entry.xattrs:
            where = b"/proc/self/fd/%d/%s" % (fd, path)
            for key, value in entry.xattrs:
                os.setxattr(where, key, value, follow_symlinks=False)
        if chmod:
            os.chmod(path, entry.mode, dir_fd=fd)
        os.utime(path, ns=(entry.mtime, entry.mtime), dir_fd=fd, follow_symlinks=False)

    def _link(self, entry: Entry) -> None:
        first = entry.link or b""
        if len(first) <= _SPAN or len(entry.path) <= _SPAN:
            source, old = self._at(first)
            fd, path = self._at(entry.path)
            os.link(old, path, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
            return
        source, old = self._deep.parent(first)
        source = os.dup(source)  # the next look-up may drop it
        try:
            fd, path = self._deep.parent(entry.path)
            os.link(old, path, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(source)

    def _finish_directory(self, entry: Entry) -> None:
        if not entry.path:
            self._dress_open(entry, self._root, chmod=True)
        elif entry.xattrs or len(entry.path) > _SPAN:
            self._dress_open(entry, self._deep.get(entry.path), chmod=True)
        else:
            chmod = entry.mode != self._directory_mode(entry)
            self._dress(entry, self._root, entry.path, chmod=chmod)

    def _dress_open(self, entry: Entry, fd: int, *, chmod: bool) -> None:
        if entry.uid != self._uid or entry.gid != self._gid:
            os.fchown(fd, entry.uid, entry.gid)
        for key, value in entry.xattrs:
            os.setxattr(fd, key, value)
        if chmod or entry.xattrs:
            os.fchmod(fd, entry.mode)
        mtime = entry.mtime
        os.utime(fd, ns=(mtime, mtime))

    # -- contents ---------------------------------------------------------------------------
    def _write_files(self) -> None:
        small = self._small
        large = LargeFiles(self._open_large, self._finish_large)
        try:
            for entry, recipe in self._recipes():
                large.add(entry, recipe, self._domain.keys)
            names = chain(small, large.names())
            for name, data in Reader(self._domain).chunks(names, needed_by=self._name):
                same = small.get(name)
                if same is not None:
                    if len(data) != same[0].size or blake3(data).digest() != same[0].digest:
                        raise self._differs(same[0])
                    for entry in same:
                        self._write_small(entry, data)
                large.take(name, data)
            large.finish()
        finally:
            large.close()

    def _recipes(self) -> Iterator[tuple[Entry, list[tuple[bytes, int]]]]:
        wanted = list({entry.digest for entry in self._large})
        found = _contents(self._domain, CHUNK_RECIPE, wanted, self._name) if wanted else {}
        for entry in self._large:
            where = f"/{os.fsdecode(entry.path)} of {self._name}"
            yield entry, decode_recipe(found[entry.digest], entry.size, where)

    def _write_small(self, entry: Entry, data: bytes) -> None:
        path = entry.path
        mode = entry.mode
        root = self._root
        if len(path) > _SPAN:
            root, path = self._deep.parent(path)
        fd = os.open(path, _CREATE, mode & 0o777, dir_fd=root)
        try:
            size = len(data)
            if size >= PAGE:
                if write_at(fd, data, 0):
                    os.ftruncate(fd, size)
            elif size and os.write(fd, data) != size:
                write_all(fd, data, 0)
            self._dress_open(entry, fd, chmod=mode & self._mode_later != 0)
        finally:
            os.close(fd)

    def _open_large(self, entry: Entry, *, create: bool) -> int:
        fd, path = self._at(entry.path)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        return os.open(path, flags, 0o600, dir_fd=fd)

    def _finish_large(self, entry: Entry, fd: int, digest: bytes) -> None:
        if digest != entry.digest:
            raise self._differs(entry)
        os.ftruncate(fd, entry.size)
        self._dress_open(entry, fd, chmod=True)

    def _differs(self, entry: Entry) -> IntegrityError:
        path = "/" + os.fsdecode(entry.path)
        return IntegrityError(
            f"{path!r} of {self._name} differs from what was put away.",
            object=self._name,
            path=path,
        )
