"""Directory trees on the node's disk: looking, opening and removing, whatever their shape.

Guarantee: names are raw bytes, links are never followed, paths may be longer than the kernel takes
in one call and deeper than Python recurses. A scan reads no content; two scans are equal only if
nothing was changed in between, because the change time cannot be set from inside a session.

Two limits of change times are dealt with here, both by the caller's help:
- A kernel before 6.13 stamps changes with a coarse clock (up to 10 ms), so a change right after a
  scan may carry the same stamp. Entries whose stamp is younger than `window_ns` at the scan are
  `recent`: their content decides, not their times. Where the file system gives every change
  after a look its own stamp (probed by `stamps_are_fine`), the window is zero.
- Pages of a writable mapping that are already dirty change without a new stamp. Such files are
  open for writing; captures take them anew and flush them, so that the next write is stamped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from sojourn.errors import CaptureFailed

# What the host shows of an entry, as a plain tuple because thousands are made per scan.
Facts = tuple[int, int, int, int, int, int, int, int, int]
MODE, INODE, NLINK, UID, GID, SIZE, MTIME, CTIME, RDEV = range(9)

Extra = tuple[tuple[tuple[bytes, bytes], ...], bytes]  # extended attributes, symlink target

COARSE_WINDOW_NS = 20_000_000
# What can be looked at, and read, in the time of waking a thread.
_QUICK_ENTRIES, _QUICK_BYTES = 64, 65536
_SPAN = 3000  # bytes of path handed to the kernel at once (PATH_MAX is 4096)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# Overlay's own bookkeeping that belongs to this host, not to the session's files.
_HOST_XATTRS = frozenset(
    b"trusted.overlay." + name for name in (b"origin", b"impure", b"nlink", b"upper", b"uuid")
)
_FOREIGN_XATTRS = frozenset(b"trusted.overlay." + name for name in (b"redirect", b"metacopy"))


def facts_of(s: os.stat_result) -> Facts:
    """The facts of one stat result."""
    return (
        s.st_mode,
        s.st_ino,
        s.st_nlink,
        s.st_uid,
        s.st_gid,
        s.st_size,
        s.st_mtime_ns,
        s.st_ctime_ns,
        s.st_rdev,
    )


def join(directory: bytes, name: bytes) -> bytes:
    """The relative path of `name` in `directory` (b"" is the root)."""
    return directory + b"/" + name if directory else name


def split(path: bytes) -> tuple[bytes, bytes]:
    """Directory and name of a relative path."""
    directory, _, name = path.rpartition(b"/")
    return directory, name


def open_directory(path: Path | bytes) -> int:
    """A descriptor of a directory given by its host path."""
    return os.open(path, _DIRECTORY)


def open_below(root: int, path: bytes) -> int:
    """A descriptor of the directory at `path` below `root`; paths of any length work."""
    if not path:
        return os.open(b".", _DIRECTORY, dir_fd=root)
    if len(path) <= _SPAN:
        return os.open(path, _DIRECTORY, dir_fd=root)
    current = root
    try:
        while path:
            if len(path) <= _SPAN:
                part, path = path, b""
            else:
                cut = path.rfind(b"/", 0, _SPAN)
                part, path = path[:cut], path[cut + 1 :]
            following = os.open(part, _DIRECTORY, dir_fd=current)
            if current != root:
                os.close(current)
            current = following
    except BaseException:
        if current != root:
            os.close(current)
        raise
    return current


def names_in(directory: int) -> list[bytes]:
    """The names in an open directory, as raw bytes."""
    return os.listdir(b"/proc/self/fd/%d" % directory)  # noqa: PTH208 (raw bytes)


def read_extra(directory: int, name: bytes, mode: int) -> Extra:
    """Extended attributes (without the host's own) and symlink target of one entry."""
    where = b"/proc/self/fd/%d/%s" % (directory, name) if name else b"/proc/self/fd/%d" % directory
    follow = not name  # the descriptor itself is reached through its link
    found = []
    try:
        listed = os.listxattr(where, follow_symlinks=follow)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        listed = []
    for label in listed:
        key = os.fsencode(label)
        if key in _HOST_XATTRS:
            continue
        if key in _FOREIGN_XATTRS:
            raise CaptureFailed(
                "An overlay entry refers to another layer, which makes its layer incomplete.",
                path=os.fsdecode(name),
                attribute=label,
                next_step="Mount overlays without redirect_dir and metacopy.",
            )
        found.append((key, os.getxattr(where, label, follow_symlinks=follow)))
    found.sort()
    target = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(mode) else b""
    return tuple(found), target


class Directories:
    """Open directory descriptors below a root, a bounded number of them kept."""

    def __init__(self, root: Path, keep: int = 64) -> None:
        self._root = open_directory(root)
        self._keep = keep
        self._open: dict[bytes, int] = {}

    def __enter__(self) -> Directories:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: bytes) -> int:
        """The descriptor of a directory; valid until `keep` others were asked for."""
        if not path:
            return self._root
        found = self._open.pop(path, None)
        if found is None:
            if len(self._open) >= self._keep:
                oldest = next(iter(self._open))
                os.close(self._open.pop(oldest))
            parent, name = split(path)
            held = self._open.get(parent) if parent else self._root
            if held is None:
                found = open_below(self._root, path)
            else:
                found = os.open(name, _DIRECTORY, dir_fd=held)
        self._open[path] = found
        return found

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """Descriptor of the directory holding `path`, and its name therein."""
        directory, name = split(path)
        return self.get(directory), name

    def close(self) -> None:
        """Close all."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1


class LocalScan:
    """The state of a tree at one instant. Implements `sojourn.store.base.Scan`.

    `entries` holds the facts by relative path (b"" the root), `listings` the names of every
    directory, `extras` what a capture read besides. `layer` and `digests` are known once a layer
    was made of this state.
    `recent` are paths whose times prove nothing yet; `unchanged` settles them by content.
    """

    def __init__(self, taken_ns: int, window_ns: int) -> None:
        self.taken_ns = taken_ns
        self.window_ns = window_ns
        self.entries: dict[bytes, Facts] = {}
        self.listings: list[tuple[bytes, frozenset[bytes]]] = []
        self.extras: dict[bytes, Extra] = {}
        self.digests: Mapping[bytes, bytes] = {}
        self.layer = ""  # the layer that was made from this state
        self.recent: set[bytes] = set()
        self.allocated = 0
        self.changed: list[bytes] = []  # paths that are not as an earlier scan saw them
        self.torn = False  # an entry went away during the scan

    @property
    def bytes(self) -> int:
        """Allocated bytes under the tree."""
        return self.allocated

    @property
    def quick(self) -> bool:
        """Whether `unchanged` takes no longer than a thread takes to wake up."""
        if len(self.entries) > _QUICK_ENTRIES:
            return False
        return sum(self.entries[path][SIZE] for path in self.recent) <= _QUICK_BYTES


def scan_tree(
    root: Path,
    window_ns: int,
    *,
    full: bool = False,
    earlier: LocalScan | None = None,
    extras: Mapping[bytes, Extra] | None = None,
) -> LocalScan:
    """Look at every entry below `root`.

    `full` reads attributes and targets too, where neither the `earlier` scan of the same tree (for
    entries that did not change since) nor `extras` know them. Without it they are read for recent
    entries only, whose times do not do. `changed` then lists what differs from `earlier`.
    """
    scan = LocalScan(time.time_ns(), window_ns)
    none: dict[bytes, Facts] = {}
    known = earlier.entries if earlier is not None else none
    known_extras = earlier.extras if earlier is not None else {}
    unsure = earlier.recent if earlier is not None else set()
    given = extras if extras is not None else {}
    border = scan.taken_ns - window_ns if window_ns else 1 << 100
    entries = scan.entries
    allocated = 0
    seen: set[int] = set()
    base = open_directory(root)
    try:
        s = os.fstat(base)
        device = s.st_dev
        entries[b""] = facts = facts_of(s)
        if facts[CTIME] >= border:
            scan.recent.add(b"")
        if full or facts[CTIME] >= border:
            scan.extras[b""] = read_extra(base, b"", s.st_mode)
        if known.get(b"") != facts:
            scan.changed.append(b"")
        pending = [b""]
        while pending:
            directory = pending.pop()
            try:
                fd = open_below(base, directory)
            except (FileNotFoundError, NotADirectoryError):
                scan.torn = True
                continue
            try:
                names = names_in(fd)
                scan.listings.append((directory, frozenset(names)))
                prefix = directory + b"/" if directory else b""
                for name in names:
                    try:
                        s = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        scan.torn = True  # the tree is live
                        continue
                    mode = s.st_mode
                    path = prefix + name
                    facts = (
                        mode,
                        s.st_ino,
                        s.st_nlink,
                        s.st_uid,
                        s.st_gid,
                        s.st_size,
                        s.st_mtime_ns,
                        s.st_ctime_ns,
                        s.st_rdev,
                    )
                    entries[path] = facts
                    if s.st_dev != device:
                        raise CaptureFailed(
                            "Another file system is mounted inside the session's files.",
                            path=os.fsdecode(path),
                            next_step="Unmount it; only the session's own tree can be captured.",
                        )
                    if s.st_nlink == 1 or mode & 0o170000 == 0o040000:
                        allocated += s.st_blocks
                    elif s.st_ino not in seen:
                        seen.add(s.st_ino)
                        allocated += s.st_blocks
                    if mode & 0o170000 == 0o040000:
                        pending.append(path)
                    recent = facts[CTIME] >= border
                    if recent:
                        scan.recent.add(path)
                    extra: Extra | None = None
                    if known.get(path) == facts and path not in unsure:
                        extra = known_extras.get(path)
                    else:
                        scan.changed.append(path)
                        extra = given.get(path)
                    if full or recent:
                        if extra is None:
                            try:
                                extra = read_extra(fd, name, mode)
                            except FileNotFoundError:
                                scan.torn = True
                                continue
                        scan.extras[path] = extra
            finally:
                os.close(fd)
    finally:
        os.close(base)
    scan.allocated = allocated * 512
    return scan


def same_as(root: Path, since: LocalScan, hash_file: Callable[[int, bytes], bytes]) -> bool:
    """Whether the tree is as `since` saw it. `hash_file(directory, name)` reads recent files.

    Looks only at what the scan knew, so a tree that is being changed costs no more.
    """
    now = time.time_ns()
    entries = since.entries
    settled: list[bytes] = []
    try:
        base = open_directory(root)
    except FileNotFoundError:
        return False
    try:
        if facts_of(os.fstat(base)) != entries[b""]:
            return False
        if b"" in since.recent and read_extra(base, b"", stat.S_IFDIR) != since.extras[b""]:
            return False
        for directory, listing in since.listings:
            fd = open_below(base, directory)
            try:
                names = names_in(fd)
                if len(names) != len(listing) or not listing.issuperset(names):
                    return False
                prefix = directory + b"/" if directory else b""
                for name in names:
                    s = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    path = prefix + name
                    known = entries.get(path)
                    if known is None:
                        return False
                    if facts_of(s) != known:
                        return False
                    if path in since.recent and not _same_content(
                        fd, name, path, known, since, hash_file
                    ):
                        return False
            finally:
                os.close(fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENODATA):
            return False  # it went away while being looked at
        raise
    finally:
        os.close(base)
    # Content was compared after the window of these stamps had passed: from now on a change shows.
    settled.extend(p for p in since.recent if entries[p][CTIME] < now - since.window_ns)
    since.recent.difference_update(settled)
    return True


def _same_content(
    directory: int,
    name: bytes,
    path: bytes,
    facts: Facts,
    since: LocalScan,
    hash_file: Callable[[int, bytes], bytes],
) -> bool:
    mode = facts[MODE]
    if read_extra(directory, name, mode) != since.extras.get(path):
        return False
    if not stat.S_ISREG(mode) or facts[SIZE] == 0:
        return True
    digest = since.digests.get(path)
    return digest is not None and hash_file(directory, name) == digest


def stamps_are_fine(directory: Path) -> bool:
    """Whether each change after a look gets its own change time on this file system.

    Sixteen writes within a millisecond must carry sixteen stamps; a coarse clock gives one or two.
    Where nothing can be written (a full disk) the clock is taken for a coarse one.
    """
    name = directory / f".stamps-{os.getpid()}-{time.monotonic_ns()}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(4):
            begun = time.monotonic_ns()
            stamps = set()
            for _ in range(16):
                os.pwrite(fd, b"x", 0)
                stamps.add(os.fstat(fd).st_ctime_ns)
            if time.monotonic_ns() - begun < 1_000_000:
                return len(stamps) == 16
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    finally:
        os.close(fd)
        name.unlink()


Unlink = Callable[[int, bytes, os.stat_result], None]


def unlink(directory: int, name: bytes, _: os.stat_result) -> None:
    """Remove one name."""
    os.unlink(name, dir_fd=directory)


def remove_tree(root: Path, remove_file: Unlink = unlink) -> int:
    """Remove a directory tree (or one file) of any depth. Returns the bytes given back.

    `remove_file(directory, name, stat)` unlinks what is no directory.
    """
    freed = 0
    try:
        base = open_directory(root)
    except NotADirectoryError:
        freed = root.lstat().st_blocks * 512
        root.unlink()
        return freed
    except FileNotFoundError:
        return 0
    try:
        freed += os.fstat(base).st_blocks * 512
        stack: list[tuple[bytes, bool]] = [(b"", False)]
        while stack:
            directory, emptied = stack.pop()
            if emptied:
                parent, name = split(directory)
                fd = open_below(base, parent)
                try:
                    os.rmdir(name, dir_fd=fd)
                finally:
                    os.close(fd)
                continue
            if directory:
                stack.append((directory, True))
            fd = open_below(base, directory)
            try:
                for name in names_in(fd):
                    s = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISDIR(s.st_mode):
                        stack.append((join(directory, name), False))
                        freed += s.st_blocks * 512
                    else:
                        remove_file(fd, name, s)
                        freed += s.st_blocks * 512 if s.st_nlink == 1 else 0
            finally:
                os.close(fd)
    finally:
        os.close(base)
    with contextlib.suppress(FileNotFoundError):
        root.rmdir()
    return freed
