"""What SQLite's errors mean for a caller.

Guarantee: no sqlite3 error leaves the package; a full disk, a damaged file, a foreign lock and a
file we may not write are told apart, because each wants another cure.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sojourn.errors import (
    Conflict,
    HostUnfit,
    IntegrityError,
    SojournError,
    StorageFull,
    Unreachable,
)

_ROOM = 1 << 20  # below this an I/O error or a file that cannot be made is a full disk


def _full(path: Path) -> bool:
    try:
        state = os.statvfs(path.parent)
    except OSError:
        return False
    return state.f_bavail * state.f_frsize < _ROOM or (state.f_files > 0 and state.f_favail == 0)


def damaged(path: Path, cause: str) -> IntegrityError:
    """The error for a database file that cannot be trusted."""
    return IntegrityError(
        f"the database {path} is damaged: {cause}",
        next_step=(
            f"Stop the server, keep a copy of {path}, and put back a backup of it; without one, "
            f"`sqlite3 {path} .recover` saves what is readable. Snapshots in the store are whole."
        ),
        object="database",
        path=str(path),
    )


def busy(error: sqlite3.Error) -> bool:
    """Whether another process held the lock for longer than we wait."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def translate(error: sqlite3.Error, path: Path) -> SojournError:
    """The typed error for one of SQLite's."""
    name = getattr(error, "sqlite_errorname", "") or ""
    cause = str(error)
    if name == "SQLITE_FULL" or (
        name.startswith(("SQLITE_IOERR", "SQLITE_CANTOPEN")) and _full(path)
    ):
        return StorageFull(f"no room for the database {path}: {cause}", path=str(path))
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR")):
        return damaged(path, f"{cause} ({name})")
    if busy(error):
        return Unreachable(
            f"another process holds the database {path}: {cause}",
            next_step="End the other process that uses this data directory, then try again.",
            path=str(path),
        )
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return HostUnfit(
            f"the database {path} cannot be written: {cause}",
            next_step=f"Give the server's user the right to write {path.parent} and the file.",
            path=str(path),
        )
    if name.startswith("SQLITE_CONSTRAINT"):
        return Conflict(f"the database refused the change: {cause}")
    if isinstance(error, sqlite3.ProgrammingError) and "closed" in cause:
        return closed(path)
    return SojournError(f"the database {path} failed: {cause} ({name or type(error).__name__})")


def closed(path: Path) -> Unreachable:
    """The error for a call after `close`."""
    return Unreachable(
        f"the database {path} is closed", next_step="The server is stopping; try again later."
    )
