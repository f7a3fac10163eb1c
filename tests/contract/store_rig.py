"""What the store's tests share: building trees, looking at them the kernel's way, snapshots."""

# Raw byte names: pathlib does not take them.
# ruff: noqa: PTH101, PTH102
# ruff: noqa: PTH123, PTH211

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sojourn.model import new_id
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotConfig, SnapshotKind
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore
from sojourn.store.views import View

CONFIG = SnapshotConfig(template="base", env={"A": "1"}, user="root", cwd="/", hostname="box")

Seen = dict[bytes, tuple[Any, ...]]


def look(root: Path) -> Seen:
    """Everything a session can see of a tree, by relative path, read with plain calls."""
    seen: Seen = {}
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen[b""] = _look_at(fd, b".")
        _look_into(fd, b"", seen)
    finally:
        os.close(fd)
    return seen


def _look_into(directory: int, prefix: bytes, seen: Seen) -> None:
    for text in os.listdir(directory):
        name = os.fsencode(text)
        path = prefix + name
        seen[path] = _look_at(directory, name)
        if seen[path][0] != "whiteout" and stat.S_ISDIR(seen[path][0]):
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            try:
                _look_into(fd, path + b"/", seen)
            finally:
                os.close(fd)


def _look_at(directory: int, name: bytes) -> tuple[Any, ...]:
    s = os.stat(name, dir_fd=directory, follow_symlinks=False)
    where = b"/proc/self/fd/%d/%s" % (directory, name)
    content: Any = None
    if stat.S_ISREG(s.st_mode):
        with open(where, "rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
    elif stat.S_ISLNK(s.st_mode):
        content = os.readlink(name, dir_fd=directory)
    elif stat.S_ISCHR(s.st_mode) or stat.S_ISBLK(s.st_mode):
        content = s.st_rdev
    xattrs = tuple(
        sorted(
            (key, os.getxattr(where, key, follow_symlinks=False))
            for key in os.listxattr(where, follow_symlinks=False)
            if not key.startswith("trusted.overlay.")
        )
    )
    if stat.S_ISCHR(s.st_mode) and s.st_rdev == 0:
        return ("whiteout",)  # a session sees none of its properties
    return (s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns, content, xattrs)


def seen_by_model(store: LocalStore, snapshot: Snapshot) -> Seen:
    """What the store says of a snapshot without looking at a tree, in the form of `look`."""
    kinds = {
        "f": stat.S_IFREG,
        "d": stat.S_IFDIR,
        "l": stat.S_IFLNK,
        "p": stat.S_IFIFO,
        "s": stat.S_IFSOCK,
        "c": stat.S_IFCHR,
        "b": stat.S_IFBLK,
    }
    seen: Seen = {}
    manifests = store._manifests(snapshot)
    view = View(manifests)
    for path in sorted({entry.path for manifest in manifests for entry in manifest.entries}):
        found = view.lookup(path)
        if found is None:
            continue
        entry = found[1]
        content: Any = None
        if entry.type == "f":
            content = hashlib.sha256(store.read_file(snapshot, b"/" + path)).digest()
        elif entry.type == "l":
            content = entry.target
        elif entry.type in "cb":
            content = os.makedev(entry.major, entry.minor)
        xattrs = tuple(
            sorted(
                (os.fsdecode(key), value)
                for key, value in entry.xattrs
                if not key.startswith(b"trusted.overlay.")
            )
        )
        mode = entry.mode | kinds[entry.type]
        seen[path] = (mode, entry.uid, entry.gid, entry.mtime, content, xattrs)
    return seen


def snapshot_of(
    layers: Sequence[LayerRef], memory: MemoryRef | None = None, parent: str | None = None
) -> Snapshot:
    """An unpublished snapshot over layers."""
    return Snapshot(
        id=new_id("snp"),
        session="ses_0",
        parent=parent,
        kind=SnapshotKind.EXPLICIT,
        label=None,
        created_at=time.time(),
        layers=list(layers),
        memory=memory,
        config=CONFIG,
        fingerprint=fingerprint(layers, memory, CONFIG),
    )


def capture(store: LocalStore, upper: Path) -> LayerRef:
    """Capture and publish at once."""
    return store.capture_layer(upper, since=None, suspects=set()).publish()


def hostile_tree(root: Path) -> None:
    """A tree with one of everything that was ever lost by somebody's store."""
    root.mkdir()
    base = os.fsencode(root)

    def at(name: bytes) -> bytes:
        return base + b"/" + name

    def write(name: bytes, data: bytes, mode: int = 0o644) -> None:
        fd = os.open(at(name), os.O_WRONLY | os.O_CREAT, mode)
        os.write(fd, data)
        os.close(fd)

    write(b"plain", b"content\n")
    write(b"empty", b"")
    write(b"\xff\xfe not text \n newline", b"raw name")
    write(b"n" * 255, b"long name")
    write(b"setuid", b"#!", 0o755)
    os.chown(at(b"setuid"), 1000, 1001)
    os.chmod(at(b"setuid"), 0o4755)
    os.mkdir(at(b"sticky"))
    os.chmod(at(b"sticky"), 0o3777)
    os.mkdir(at(b"shut"), 0o000)
    os.symlink(b"../../etc/passwd", at(b"outside"))
    os.symlink(b"dangling\xff", at(b"broken"))
    os.lchown(at(b"broken"), 12, 34)
    os.mkfifo(at(b"pipe"), 0o640)
    os.mknod(at(b"socket"), stat.S_IFSOCK | 0o755)
    os.mknod(at(b"null"), stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(at(b"disk"), stat.S_IFBLK | 0o660, os.makedev(8, 1))
    os.mknod(at(b"gone"), stat.S_IFCHR, os.makedev(0, 0))
    os.mkdir(at(b"whole"))
    os.setxattr(at(b"whole"), "trusted.overlay.opaque", b"y")
    write(b"whole/inside", b"only this")
    write(b"a-first", b"linked")
    os.link(at(b"a-first"), at(b"z-last"))
    os.mkdir(at(b"links"))
    os.link(at(b"a-first"), at(b"links/third"))
    os.symlink(b"t", at(b"links/sym"))
    os.link(at(b"links/sym"), at(b"links/sym2"), follow_symlinks=False)
    write(b"attributes", b"x")
    os.setxattr(at(b"attributes"), "user.note", b"\x00\xffbytes")
    os.setxattr(at(b"attributes"), "trusted.mark", b"kept")
    # a file capability: cap_net_raw=ep, version 2
    os.setxattr(
        at(b"attributes"),
        "security.capability",
        bytes.fromhex("0100000200200000000000000000000000000000"),
    )
    acl = bytes.fromhex(
        "0200000001000600ffffffff02000400e803000004000400ffffffff10000600ffffffff20000000ffffffff"
    )
    write(b"acl", b"x")
    os.setxattr(at(b"acl"), "system.posix_acl_access", acl)
    os.mkdir(at(b"acl-dir"))
    os.setxattr(at(b"acl-dir"), "system.posix_acl_default", acl)
    write(b"acl-dir/child", b"inherits")
    fd = os.open(at(b"sparse"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.ftruncate(fd, 64 * 1024 * 1024)
    os.pwrite(fd, b"island", 20 * 1024 * 1024)
    os.close(fd)
    write(b"dense", os.urandom(300_000))
    deep = base
    fd = os.open(base, os.O_RDONLY)
    for _ in range(40):
        os.mkdir(b"d" * 200, dir_fd=fd)
        below = os.open(b"d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        deep += b"/" + b"d" * 200
    bottom = os.open(b"bottom", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd)
    os.write(bottom, b"8000 bytes of path")
    os.close(bottom)
    os.close(fd)
    for name in (b"plain", b"empty", b"broken", b"links", b"pipe", b"sparse"):
        os.utime(at(name), ns=(5, 1_234_567_890_123_456_789), follow_symlinks=False)
    os.utime(at(b"acl"), ns=(5, -1_500_000_001), follow_symlinks=False)
