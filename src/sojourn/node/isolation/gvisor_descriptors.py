"""What files a gVisor sandbox holds open on the host.

Guarantee: every file of the root tree that a process inside has open shows here, because the
sandbox's kernel holds a host descriptor for each. It may show more: the kernel keeps descriptors
of files it saw lately. For what must be looked at again that is harmless; for what stands in the
way of a checkpoint it does not happen, because an unlinked file nobody has open is let go at once.

Both processes of the sandbox see the root tree at `/root` of their own file system.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from sojourn.node.isolation.long_paths import (
    Inode,
    described,
    find,
    inode_of,
    is_removed,
    target_of,
)

_TREE = "/root/"
_DELETED = " (deleted)"
# Binds below the tree are not part of it.
_BOUND = ("/root/run/sojourn/",)


def _open_in_tree(pid: int) -> Iterator[tuple[Path, str | None]]:
    """Descriptors of a process that lead into the root tree, with where they lead; None where that
    is deeper than can be said (of all that a sandbox sees only the root tree can be that deep)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = target_of(entry)
                if target is None or (target.startswith(_TREE) and not target.startswith(_BOUND)):
                    yield entry, target


def _path(target: str) -> str:
    return "/" + target.removeprefix(_TREE).removesuffix(_DELETED)


def unlinked(pids: Iterable[int], root: Path) -> list[str]:
    """Absolute paths (inside) under which files were opened that they no longer have.

    Another name (a hard link) does not help: the checkpoint keeps the name it was opened by.
    """
    found: set[str] = set()
    named: set[Inode] = set()
    for pid in pids:
        for entry, target in _open_in_tree(pid):
            if target is None:
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat()
                    if facts.st_nlink == 0 or (stat.S_ISDIR(facts.st_mode) and is_removed(entry)):
                        found.add(described(inode_of(facts)))
                    elif stat.S_ISREG(facts.st_mode):
                        named.add(inode_of(facts))
            elif target.endswith(_DELETED) and not _named_so(entry, root, target):
                found.add(_path(target))
    found.update(described(inode) for inode, names in find(root, named).items() if not names)
    return sorted(found)


def _named_so(entry: Path, root: Path, target: str) -> bool:
    """Whether the file's name merely looks like the kernel's mark of a lost one."""
    try:
        there = (root / target.removeprefix(_TREE)).lstat()
        return os.path.samestat(there, entry.stat())
    except OSError:
        return False


def writable(pids: Iterable[int], root: Path) -> list[str]:
    """Root-relative paths of regular files that are open for writing and still in the tree."""
    found: set[str] = set()
    deep: set[Inode] = set()
    for pid in pids:
        for entry, target in _open_in_tree(pid):
            if target and target.endswith(_DELETED) and not _named_so(entry, root, target):
                continue
            with contextlib.suppress(FileNotFoundError):
                facts = entry.stat()
                if stat.S_ISREG(facts.st_mode) and _writes(pid, entry.name):
                    if target is None:
                        deep.add(inode_of(facts))
                    else:
                        found.add(target.removeprefix(_TREE))
    for names in find(root, deep).values():
        found.update(names)
    return sorted(found)


def _writes(pid: int, descriptor: str) -> bool:
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            flags = int(value, 8)
            return not flags & os.O_PATH and flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
    return False
