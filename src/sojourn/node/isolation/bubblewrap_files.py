"""What files processes in a mount namespace of their own hold open.

Guarantee: of the root tree only, by the mount the descriptors belong to, so that a file of a
memory file system with the same path is never mistaken for one of the tree.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from sojourn.node.isolation.long_paths import Inode, described, find, inode_of, target_of
from sojourn.node.mounts import Mount, read_mounts

_DELETED = " (deleted)"


def _mounts(pid: int) -> list[Mount]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return read_mounts(Path(f"/proc/{pid}/mountinfo"))
    return []


def _root_mount(mounts: list[Mount]) -> int | None:
    return next((mount.id for mount in reversed(mounts) if mount.target == Path("/")), None)


def _open(pid: int) -> Iterator[tuple[Path, str | None, int]]:
    """Descriptors in the root tree: entry, path (None when too long to be said), flags."""
    root = _root_mount(_mounts(pid))
    if root is None:
        return
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                facts = {}
                info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                for line in info.splitlines():
                    name, _, value = line.partition(":")
                    facts[name] = value.strip()
                if facts.get("mnt_id") == str(root):
                    yield entry, target_of(entry), int(facts["flags"], 8)


def unlinked(pids: Iterable[int]) -> list[str]:
    """Absolute paths (inside) under which files were opened that they no longer have."""
    found: set[str] = set()
    for pid in pids:
        for entry, target, _ in _open(pid):
            if target is None:
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat()
                    if facts.st_nlink == 0:
                        found.add(described(inode_of(facts)))
            elif target.endswith(_DELETED) and not _named_so(pid, entry, target):
                found.add(target.removesuffix(_DELETED))
    return sorted(found)


def _named_so(pid: int, entry: Path, target: str) -> bool:
    """Whether the file's name merely looks like the kernel's mark of a lost one."""
    try:
        there = Path(f"/proc/{pid}/root{target}").lstat()
        return os.path.samestat(there, entry.stat())
    except OSError:
        return False


def writable(pids: Iterable[int]) -> list[str]:
    """Root-relative paths of regular files open or mapped for writing and still in the tree."""
    found: set[str] = set()
    for pid in pids:
        deep: set[Inode] = set()
        for entry, target, flags in _open(pid):
            if target and target.endswith(_DELETED) and not _named_so(pid, entry, target):
                continue
            with contextlib.suppress(FileNotFoundError):
                writes = flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
                facts = entry.stat()
                if writes and not flags & os.O_PATH and stat.S_ISREG(facts.st_mode):
                    if target is None:
                        deep.add(inode_of(facts))
                    else:
                        found.add(target.lstrip("/"))
        with contextlib.suppress(FileNotFoundError):  # the process ended
            for names in find(Path(f"/proc/{pid}/root"), deep).values():
                found.update(names)
        found.update(_mapped(pid))
    return sorted(found)


def _mapped(pid: int) -> Iterator[str]:
    """Shared writable mappings; they outlive the descriptor they were made from."""
    elsewhere = {mount.target for mount in _mounts(pid)} - {Path("/")}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[1].startswith(b"rw-s") and fields[5].startswith(b"/"):
                path = Path(os.fsdecode(fields[5]).removesuffix(_DELETED))
                # Shared memory without a name goes by /dev/zero, a memory file by /memfd:name.
                foreign = path in elsewhere or not elsewhere.isdisjoint(path.parents)
                if not foreign and not path.name.startswith("memfd:"):
                    yield os.fspath(path).lstrip("/")
