"""One layer of an image as a tree in memory, and then on disk.

Guarantee: names are only ever looked up in the tree that is being made and in the layers below it,
as in a root directory that cannot be left: nothing in an image leads out of it. Members take effect
in their order, the last of a name wins; what a whiteout hides is what the layers below have. The
tree on disk is made at the end, of directories that were made for it, so no link is followed there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from sojourn.errors import ImageInvalid
from sojourn.store.manifests import DIRECTORY, FILE, OPAQUE, SYMLINK
from sojourn.store.manifests import Entry as Stored
from sojourn.store.views import View
from sojourn.wire.tar import Entry

MAX_DEPTH = 255
_MAX_LINKS = 40
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_CAPABILITY = b"security.capability"
_MOST_OWNER = 2**32 - 2  # the one above means "leave it as it is"


class Inode:
    """A file, whatever its names: its attributes, and where its content was put."""

    __slots__ = ("content", "gid", "mode", "mtime", "target", "type", "uid", "xattrs")

    def __init__(
        self,
        type: str,
        mode: int,
        uid: int,
        gid: int,
        mtime: int,
        xattrs: tuple[tuple[bytes, bytes], ...] = (),
        target: bytes = b"",
        content: int | None = None,
    ) -> None:
        self.type = type
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime = mtime
        self.xattrs = xattrs
        self.target = target
        self.content = content


class Directory:
    """A directory of the layer. `lower`: what the layers below have in it shows through."""

    __slots__ = ("children", "hidden", "inode", "lower")

    def __init__(self, inode: Inode, lower: bool) -> None:
        self.inode = inode
        self.lower = lower
        self.children: dict[bytes, Directory | Inode] = {}
        self.hidden: set[bytes] = set()  # names whose lower entry is not there any more


Node = Directory | Inode
Lower = Callable[[bytes], Stored | None]
CopyUp = Callable[[bytes, Stored], int]
"""Gives the content of a lower layer's file a place of its own: its number."""


class LayerTree:
    """Takes the members of one layer; `below` are the layers under it."""

    def __init__(self, below: View | None, copy_up: CopyUp) -> None:
        self._below = below
        self._copy_up = copy_up
        root = self._lower(b"")
        inode = _of_stored(root) if root is not None else Inode("dir", 0o755, 0, 0, 0)
        self.root = Directory(inode, root is not None)
        self.left_out = 0  # devices and attributes that a sandbox has no use for
        self.entries = 0

    def _lower(self, path: bytes) -> Stored | None:
        if self._below is None:
            return None
        found = self._below.lookup(path)
        return None if found is None else found[1]

    # -- looking names up -------------------------------------------------------------------

    def _child(self, directory: Directory, path: bytes, name: bytes) -> Node | Stored | None:
        """What a directory shows under a name; of a lower layer where this one has nothing."""
        node = directory.children.get(name)
        if node is not None:
            return node
        if not directory.lower or name in directory.hidden:
            return None
        return self._lower(_join(path, name))

    def _enter(self, directory: Directory, path: bytes, name: bytes) -> Directory | bytes | None:
        """The directory under a name, made one of this layer; a link's target; None: nothing."""
        found = self._child(directory, path, name)
        if found is None:
            return None
        if isinstance(found, Directory):
            return found
        if isinstance(found, Stored):
            if found.type == DIRECTORY:
                made = Directory(_of_stored(found), True)
                directory.children[name] = made
                self.entries += 1
                return made
            if found.type == SYMLINK:
                return found.target
        elif found.type == "symlink":
            return found.target
        raise ImageInvalid(f"{_shown(_join(path, name))} is used as a directory and is none")

    def parent(self, name: bytes) -> tuple[Directory, bytes, bytes]:
        """The directory of a member, with its path, and the member's own name; made where nothing
        is. Links on the way lead where they would inside. Raises ImageInvalid."""
        parts = name.split(b"/")
        return (*self._walk(parts[:-1], name), parts[-1])

    def _walk(self, parts: list[bytes], name: bytes) -> tuple[Directory, bytes]:
        line: list[tuple[Directory, bytes]] = [(self.root, b"")]
        pending = list(reversed(parts))
        links = 0
        while pending:
            part = pending.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if len(line) > 1:
                    line.pop()
                continue
            directory, path = line[-1]
            found = self._enter(directory, path, part)
            if isinstance(found, bytes):
                links += 1
                if links > _MAX_LINKS:
                    raise ImageInvalid(f"{_shown(name)} leads through too many links")
                if found.startswith(b"/"):
                    del line[1:]
                pending.extend(reversed(found.split(b"/")))
                continue
            if found is None:
                found = self._make(directory, part, Inode("dir", 0o755, 0, 0, 0))
            if len(line) > MAX_DEPTH:
                raise ImageInvalid(f"{_shown(name)} is more than {MAX_DEPTH} directories deep")
            line.append((found, _join(path, part)))
        return line[-1]

    def _make(self, directory: Directory, name: bytes, inode: Inode) -> Directory:
        _check_name(name)
        made = Directory(inode, False)
        directory.children[name] = made
        self.entries += 1
        return made

    # -- members ----------------------------------------------------------------------------

    def add(self, entry: Entry, content: int | None) -> None:
        """Take a member; `content` is the number of a file's content. Raises ImageInvalid."""
        if entry.name == b".":
            if entry.type != "dir":
                raise ImageInvalid("the root of a layer is no directory")
            self.root.inode = self._inode(entry, None)
            return
        directory, path, name = self.parent(entry.name)
        if name.startswith(_WHITEOUT):
            self._whiteout(directory, name, entry)
            return
        _check_name(name)
        if entry.type == "dir":
            self._add_directory(directory, path, name, entry)
        elif entry.type == "hardlink":
            self._put(directory, name, self._linked(entry))
        elif entry.type in ("char", "block"):
            # A sandbox has devices of its own; a node of another machine's is none of them.
            self.left_out += 1
            self._remove(directory, name)
        else:
            self._put(directory, name, self._inode(entry, content))

    def _put(self, directory: Directory, name: bytes, inode: Inode) -> None:
        if name not in directory.children:
            self.entries += 1
        directory.children[name] = inode

    def _remove(self, directory: Directory, name: bytes) -> None:
        directory.children.pop(name, None)
        directory.hidden.add(name)

    def _add_directory(self, directory: Directory, path: bytes, name: bytes, entry: Entry) -> None:
        present = directory.children.get(name)
        inode = self._inode(entry, None)
        if isinstance(present, Directory):
            present.inode = inode
            return
        lower = self._child(directory, path, name) if present is None else None
        merges = isinstance(lower, Stored) and lower.type == DIRECTORY
        if present is None:
            self.entries += 1
        directory.children[name] = Directory(inode, merges)

    def _whiteout(self, directory: Directory, name: bytes, entry: Entry) -> None:
        if name == _OPAQUE:
            self._cover(directory)
            return
        if name.startswith(_WHITEOUT * 2):
            return  # what a storage driver of old kept for itself
        hidden = name[len(_WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise ImageInvalid(f"{_shown(entry.name)} hides nothing that can be named")
        directory.hidden.add(hidden)
        child = directory.children.get(hidden)
        if isinstance(child, Directory):
            self._cover(child)  # it hides what is below, not what this layer has

    def _cover(self, directory: Directory) -> None:
        """Nothing of the layers below shows in a directory any more, nor in those inside it."""
        if directory is self.root and self._below is not None:
            # The kernel does not look for the mark of an opaque directory on a root.
            for manifest in self._below.manifests:
                directory.hidden.update(p for p in manifest.paths if p and b"/" not in p)
        pending = [directory]
        while pending:
            one = pending.pop()
            one.lower = one is self.root
            pending += [node for node in one.children.values() if isinstance(node, Directory)]

    def _linked(self, entry: Entry) -> Inode:
        """The file that a hard link is another name of."""
        directory, path, name = self.parent(entry.target)
        found = self._child(directory, path, name)
        if isinstance(found, Stored) and found.type in (FILE, SYMLINK):
            inode = _of_stored(found)
            if found.type == FILE:
                inode.content = self._copy_up(_join(path, name), found)
            self._put(directory, name, inode)
            return inode
        if isinstance(found, Inode):
            return found
        raise ImageInvalid(
            f"{_shown(entry.name)} is a hard link to {_shown(entry.target)}, which is no file"
        )

    def _inode(self, entry: Entry, content: int | None) -> Inode:
        kept = []
        for key, value in entry.xattrs:
            own = key.startswith(b"user.") and not key.startswith(b"user.overlay.")
            if own or (key == _CAPABILITY and entry.type == "file"):
                kept.append((key, value))
            else:
                self.left_out += 1
        if entry.uid > _MOST_OWNER or entry.gid > _MOST_OWNER:
            raise ImageInvalid(f"{_shown(entry.name)} is owned by nobody that can be")
        return Inode(
            entry.type,
            entry.mode & 0o7777,
            entry.uid,
            entry.gid,
            entry.mtime_ns,
            tuple(kept),
            entry.target,
            content,
        )

    # -- on disk ----------------------------------------------------------------------------

    def write(self, upper: Path, contents: Path) -> None:
        """Make the tree in `upper`, an empty directory; the contents are moved from `contents`,
        where each has its number for a name."""
        placed: dict[int, bytes] = {}
        source = os.open(contents, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._write(os.fsencode(upper), self.root, b"", source, placed)
        finally:
            os.close(source)

    def _write(
        self, top: bytes, root: Directory, start: bytes, source: int, placed: dict[int, bytes]
    ) -> None:
        # Depth and names are bounded, and every directory on the way was made here.
        pending: list[tuple[Directory, bytes, bool]] = [(root, start, False)]
        while pending:
            directory, path, done = pending.pop()
            place = top + (b"/" + path if path else b"")
            if done:
                _finish(place, directory.inode)
                continue
            pending.append((directory, path, True))
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for name in sorted(directory.hidden - directory.children.keys()):
                    if directory.lower and self._lower(_join(path, name)) is not None:
                        os.mknod(name, stat.S_IFCHR, 0, dir_fd=fd)
                if not directory.lower and self._hides(path):
                    os.setxattr(fd, OPAQUE, b"y")
                for name, node in sorted(directory.children.items()):
                    if isinstance(node, Directory):
                        os.mkdir(name, 0o700, dir_fd=fd)
                        pending.append((node, _join(path, name), False))
                    else:
                        _place(fd, name, node, source, top, _join(path, name), placed)
            finally:
                os.close(fd)

    def _hides(self, path: bytes) -> bool:
        """Whether the layers below show a directory here that has to be hidden."""
        found = self._lower(path) if path else None
        return found is not None and found.type == DIRECTORY


def _place(
    fd: int,
    name: bytes,
    inode: Inode,
    source: int,
    top: bytes,
    path: bytes,
    placed: dict[int, bytes],
) -> None:
    known = placed.get(id(inode))
    if known is not None:
        os.link(known, name, dst_dir_fd=fd, follow_symlinks=False)
        return
    placed[id(inode)] = top + b"/" + path
    if inode.type == "file":
        if inode.content is None:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=fd))
        else:
            os.rename(b"%d" % inode.content, name, src_dir_fd=source, dst_dir_fd=fd)
    elif inode.type == "symlink":
        os.symlink(inode.target, name, dir_fd=fd)
    else:
        os.mkfifo(name, 0o600, dir_fd=fd)
    os.chown(name, inode.uid, inode.gid, dir_fd=fd, follow_symlinks=False)
    if inode.type == "file":
        _set_attributes(top + b"/" + path, inode)
    if inode.type != "symlink":
        os.chmod(name, inode.mode, dir_fd=fd)  # after the owner: that takes set-uid bits away
    os.utime(name, ns=(inode.mtime, inode.mtime), dir_fd=fd, follow_symlinks=False)


def _set_attributes(place: bytes, inode: Inode) -> None:
    for key, value in inode.xattrs:
        try:
            os.setxattr(place, key, value, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.EIO:
                raise
            shown = key[:100].decode("utf-8", "replace")
            raise ImageInvalid(
                f"attribute {shown!r} of a file cannot be set: {error.strerror}"
            ) from error


def _finish(place: bytes, inode: Inode) -> None:
    """A directory's attributes, once all that is in it is there."""
    os.chown(place, inode.uid, inode.gid, follow_symlinks=False)
    _set_attributes(place, inode)
    os.chmod(place, inode.mode)  # noqa: PTH101 - a path of bytes
    os.utime(place, ns=(inode.mtime, inode.mtime), follow_symlinks=False)


def _of_stored(entry: Stored) -> Inode:
    kept = tuple((k, v) for k, v in entry.xattrs if not k.startswith(b"trusted.overlay."))
    kind = {DIRECTORY: "dir", SYMLINK: "symlink"}.get(entry.type, "file")
    return Inode(kind, entry.mode, entry.uid, entry.gid, entry.mtime, kept, entry.target)


def _check_name(name: bytes) -> None:
    if len(name) > 255:
        raise ImageInvalid("the image holds a name of over 255 bytes")


def _join(path: bytes, name: bytes) -> bytes:
    return path + b"/" + name if path else name


def _shown(path: bytes) -> str:
    return repr(path[:200].decode("utf-8", "replace"))
