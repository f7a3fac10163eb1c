"""A strange tree made inside a session, and a manifest of a tree computed inside it.

Both are Python programs for the session's own interpreter, so that what is compared is what
programs inside see, not what the store believes.
"""

from __future__ import annotations

import json
from typing import Any

from sojourn.client import Session

MAKE = r"""
import os, socket, stat, sys, time
top = os.fsencode(sys.argv[1])
os.makedirs(top)
os.chdir(top)

def put(name, data=b"", mode=0o644, uid=0, gid=0, mtime=None):
    with open(name, "wb") as file:
        file.write(data)
    os.chown(name, uid, gid)
    os.chmod(name, mode)
    if mtime is not None:
        os.utime(name, ns=(mtime, mtime))

put(b"plain", b"plain\n")
put(b"empty")
put(b"owned", b"agent's", 0o640, 1000, 1000)
put(b"strange-owner", b"x", 0o600, 123456, 654321)
put(b"set-uid", b"#!/bin/sh\n", 0o4755)
put(b"set-gid", b"#!/bin/sh\n", 0o2755, 0, 1000)
put(b"no-mode", b"secret", 0o000, 1000, 1000)
put(b"nanoseconds", b"n", mtime=1234567890123456789)
put(b"before-1970", b"n", mtime=-86400 * 10**9 + 1)
put(b"after-2038", b"n", mtime=5_000_000_000_123456789)
put(b"not-utf8-\xff\xfe", b"\xff")
put(b"line\nbreak", b"1")
put(b"-rf", b"dash")
put(b" leading and trailing ", b"2")
put("é-ü-日本-😀".encode(), b"unicode")
put(b"e\xcc\x81", b"decomposed")
put(b"\xc3\xa9", b"composed")
put(b"n" * 255, b"longest name")
put(b".wh.looks-like-a-whiteout", b"w")
put(b".wh..wh..opq", b"o")
os.link(b"plain", b"hard-1")
os.mkdir(b"sub")
os.link(b"plain", b"sub/hard-2")
if sys.argv[2] == "nodes":
    os.mkdir(b"nodes")
    os.mkfifo(b"nodes/fifo", 0o622)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"nodes/socket")
    listener.close()
os.symlink(b"plain", b"link")
os.symlink(b"/nowhere/\xff", b"dangling")
os.symlink(b"link-loop", b"link-loop")
os.lchown(b"dangling", 1000, 1000)
os.utime(b"dangling", ns=(10**18 + 7, 10**18 + 7), follow_symlinks=False)
with open(b"sparse", "wb") as file:
    file.truncate(64 << 20)
    file.seek(32 << 20)
    file.write(b"in the middle")
try:
    os.setxattr(b"plain", b"user.note", b"\x00\xffvalue")
    os.setxattr(b"sub", b"user.of-directory", b"d")
except OSError:
    pass
os.mkdir(b"sticky")
os.chmod(b"sticky", 0o1777)
os.mkdir(b"closed")
put(b"closed/inside", b"i")
os.chmod(b"closed", 0)
deep = b"deep"
os.mkdir(deep)
here = os.open(deep, os.O_RDONLY)
for level in range(300):
    os.mkdir(b"level-%03d" % level, dir_fd=here)
    below = os.open(b"level-%03d" % level, os.O_RDONLY, dir_fd=here)
    os.close(here)
    here = below
handle = os.open(b"bottom", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here)
os.write(handle, b"reached")
os.close(handle)
os.close(here)
os.utime(b"sub", ns=(10**18 + 3, 10**18 + 3))
"""

MANIFEST = r"""
import hashlib, json, os, stat, sys
top = os.fsencode(sys.argv[1])
found = {}
inodes = {}

def look(name, handle, shown):
    facts = os.lstat(name, dir_fd=handle)
    kind = stat.S_IFMT(facts.st_mode)
    one = {
        "mode": facts.st_mode,
        "owner": [facts.st_uid, facts.st_gid],
        "mtime": facts.st_mtime_ns,
    }
    if kind != stat.S_IFDIR:
        one["size"] = facts.st_size
        one["nlink"] = facts.st_nlink
        one["same"] = inodes.setdefault((facts.st_dev, facts.st_ino), shown)
    if kind == stat.S_IFLNK:
        one["target"] = os.readlink(name, dir_fd=handle).hex()
    if kind == stat.S_IFREG:
        digest = hashlib.blake2b()
        opened = os.open(name, os.O_RDONLY, dir_fd=handle)
        while piece := os.read(opened, 1 << 20):
            digest.update(piece)
        one["content"] = digest.hexdigest()[:32]
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        opened = opened if kind == stat.S_IFREG else os.open(name, os.O_RDONLY, dir_fd=handle)
        try:
            names = sorted(os.listxattr(opened))
            one["xattrs"] = {key: os.getxattr(opened, key).hex() for key in names}
        except OSError as error:
            one["xattrs"] = error.errno
    found[shown] = one
    if kind == stat.S_IFDIR:
        for child in sorted(os.listdir(opened), key=os.fsencode):
            child = os.fsencode(child)
            look(child, opened, shown + "/" + child.hex())
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        os.close(opened)

sys.setrecursionlimit(10_000)
look(top, None, ".")
json.dump(found, sys.stdout)
"""


def make_tree(session: Session, top: str, *, nodes: bool = True) -> None:
    """Make a tree with every kind of file and name; pipes and sockets, which a runtime may keep in
    its memory alone, only with `nodes`."""
    made = session.exec(["python3", "-c", MAKE, top, "nodes" if nodes else ""])
    assert made.exit_code == 0, made.stderr.decode()


def manifest(session: Session, top: str) -> dict[str, dict[str, Any]]:
    """Facts and content of every file below `top`, by the path's bytes in hexadecimal."""
    looked = session.exec(["python3", "-c", MANIFEST, top])
    assert looked.exit_code == 0, looked.stderr.decode()
    found: dict[str, dict[str, Any]] = json.loads(looked.stdout)
    return found


def differences(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What differs, in a form a failed test can show."""
    names = before.keys() | after.keys()
    return {
        "/".join(part if part == "." else repr(bytes.fromhex(part)) for part in name.split("/")): (
            before.get(name),
            after.get(name),
        )
        for name in sorted(names)
        if before.get(name) != after.get(name)
    }
