"""Where a client writes what it receives.

Guarantee: a regular file is replaced whole, past every link that leads to it; a pipe or a device is
written to and never replaced, because whoever opened it or made it goes on using it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from sojourn.errors import FileConflict


def replaced(path: Path) -> Path | None:
    """The file to put in place of what the path names, past every link; None where a pipe or
    device is to be written to. Raises FileConflict for a directory and for a socket."""
    place = Path(os.path.realpath(path))
    try:
        found = path.stat()
    except FileNotFoundError:
        return place  # a link may well lead to a file that is not there yet
    if stat.S_ISDIR(found.st_mode) or stat.S_ISSOCK(found.st_mode):
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "socket"
        raise FileConflict(f"{path} is a {kind}.", next_step="Name a file.", path=str(path))
    if not stat.S_ISREG(found.st_mode):
        return None
    # An open file without a name (/proc/self/fd/N) is none that could be replaced.
    if not place.exists() or not os.path.samestat(place.stat(), found):
        raise FileConflict(
            f"{path} names a file that was removed.",
            next_step="Name a file.",
            path=str(path),
        )
    return place


def open_special(path: Path) -> BinaryIO:
    """A pipe or device, for writing. Waits for who reads a pipe."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # just put there: it is not ours to overwrite in parts
        raise FileConflict(f"{path} changed just now.", next_step="Try again.", path=str(path))
    return os.fdopen(descriptor, "wb", buffering=0)
