"""Descriptors of files deeper than the kernel can say.

Guarantee: whoever makes a directory deeper than PATH_MAX inside a session keeps nobody from looking
at what is open there: such a descriptor has no path to be read, and is found by its inode instead.
The whole tree is walked for that, so it is done only where such a descriptor is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from sojourn.store.trees import join, open_below

_PATH_MAX = 4096
# A path the kernel cannot say may be shorter from the root of the tree, by where that is mounted.
_LONG = _PATH_MAX - 256

Inode = tuple[int, int]  # device, number


def target_of(entry: Path) -> str | None:
    """Where a descriptor under /proc leads; None where that is too long to be said."""
    try:
        return os.fsdecode(entry.readlink())
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise


def inode_of(facts: os.stat_result) -> Inode:
    """What tells a file from all others."""
    return facts.st_dev, facts.st_ino


def is_removed(directory: Path) -> bool:
    """Whether an open directory is no longer in the tree. The number of its names does not tell:
    an overlay says 1 of every directory that is in several layers."""
    facts = directory.stat()
    with os.scandir(directory / "..") as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    if os.path.samestat(entry.stat(follow_symlinks=False), facts):
                        return False
    return True


def described(inode: Inode) -> str:
    """What stands for a path nobody can say."""
    return f"(a path longer than {_PATH_MAX} bytes, inode {inode[1]})"


def find(root: Path, wanted: Iterable[Inode]) -> dict[Inode, list[str]]:
    """Root-relative paths of regular files by inode, of those with long paths only. The sandbox is
    frozen: what is missing has no such name."""
    found: dict[Inode, list[str]] = {inode: [] for inode in wanted}
    if not found:
        return found
    for path, facts in _long(root):
        names = found.get(inode_of(facts))
        if names is not None and stat.S_ISREG(facts.st_mode):
            names.append(os.fsdecode(path))
    return found


def _long(root: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    # The root itself may be given as a link: /proc/PID/root is one.
    base = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        device = os.fstat(base).st_dev
        pending = [b""]
        while pending:
            path = pending.pop()
            try:
                directory = open_below(base, path)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    continue  # not frozen, and changed meanwhile
                raise
            try:
                if os.fstat(directory).st_dev != device:
                    continue  # something mounted below
                with os.scandir(directory) as entries:
                    for entry in entries:
                        below = join(path, os.fsencode(entry.name))
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(below)
                        elif len(below) >= _LONG:
                            try:
                                yield below, entry.stat(follow_symlinks=False)
                            except FileNotFoundError:
                                continue
            finally:
                os.close(directory)
    finally:
        os.close(base)
