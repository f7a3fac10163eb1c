"""Files as E2B's clients see them.

Guarantee: what a link itself is and what it leads to are both told; names of owners are those the
sandbox's own programs see.
"""

from __future__ import annotations

import posixpath
import stat as modes
from datetime import UTC, datetime
from typing import Any

from sojourn.errors import FileConflict, Forbidden, NotFound, PathInvalid
from sojourn.node.guest import Guest
from sojourn.server.e2b.users import Accounts
from sojourn.wire.guest import Stat

_TYPES = {
    "file": "FILE_TYPE_FILE",
    "dir": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",  # only where it leads nowhere
}
_LETTERS = {
    "dir": "d",
    "symlink": "L",
    "fifo": "p",
    "socket": "S",
    "char": "Dc",
    "block": "D",
}
_FORMATS = {"dir": modes.S_IFDIR, "symlink": modes.S_IFLNK}


def text(path: bytes) -> str:
    """A path as a message carries it; what is no UTF-8 shows as U+FFFD."""
    return path.decode("utf-8", "replace")


def permissions(stat: Stat) -> str:
    """The mode in letters, as E2B's agent writes it."""
    special = "".join(
        letter for bit, letter in ((0o4000, "u"), (0o2000, "g"), (0o1000, "t")) if stat.mode & bit
    )
    letters = modes.filemode(modes.S_IFREG | (stat.mode & 0o777))[1:]
    return (_LETTERS.get(stat.type, "") + special or "-") + letters


async def entry(guest: Guest, stat: Stat, known: Accounts) -> dict[str, Any]:
    """One file; for a link also what it leads to."""
    leads_to = stat
    if stat.type == "symlink":
        try:
            leads_to = await guest.stat(stat.path)
        except (NotFound, FileConflict, PathInvalid, Forbidden):
            leads_to = stat  # it leads nowhere
    found: dict[str, Any] = {
        "name": text(posixpath.basename(stat.path.rstrip(b"/"))) or "/",
        "type": _TYPES.get(leads_to.type, "FILE_TYPE_UNSPECIFIED"),
        "path": text(stat.path),
        "size": str(stat.size),
        "mode": stat.mode & 0o777,
        "permissions": permissions(stat),
        "owner": known.user(stat.uid),
        "group": known.group(stat.gid),
        "modifiedTime": _time(stat.mtime_ns),
    }
    if stat.type == "symlink":
        found["isSymlink"] = True
        found["symlinkTarget"] = text(stat.target or b"")
    return found


def _time(nanoseconds: int) -> str:
    # A time outside what a message can carry is shown as the nearest it can.
    bounded = min(max(nanoseconds, -62_135_596_800 * 10**9), 253_402_300_799 * 10**9)
    seconds, rest = divmod(bounded, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    year, _, days = moment.partition("-")
    return f"{int(year):04d}-{days}.{rest:09d}Z"
