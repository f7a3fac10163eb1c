"""Room kept back so that a full disk can be made free again.

Guarantee: while the disk is full, what frees space or ends acknowledged work (deletions, steps and
ends of operations) can still be recorded, as long as the reserve lasts. Deleting a session is a
write too; without this a full disk could only be cured from outside.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

_log = logging.getLogger(__name__)
SIZE = 1 << 20
RETRY_SECONDS = 30.0


class Reserve:
    """A file of allocated blocks beside the database, removed when they are needed.

    Used by the writer's thread alone.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(f"{database.name}.reserve")
        self._held = False
        self._tried_at = float("-inf")
        self.renew()

    def release(self) -> bool:
        """Give the blocks back to the file system; whether there were any."""
        if not self._held:
            return False
        self._held = False
        self._tried_at = time.monotonic()
        self._path.unlink(missing_ok=True)
        _log.warning("the disk of %s is full; the reserve is in use", self._path.parent)
        return True

    def renew(self) -> None:
        """Allocate the reserve when it is missing and the disk has plenty of room."""
        if self._held or time.monotonic() < self._tried_at + RETRY_SECONDS:
            return
        self._tried_at = time.monotonic()
        try:
            self._allocate()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._path.unlink(missing_ok=True)
            _log.warning("no reserve beside %s: %s", self._path, error)

    def _allocate(self) -> None:
        state = os.statvfs(self._path.parent)
        present = self._path.stat().st_blocks * 512 if self._path.exists() else 0
        if present >= SIZE:
            self._held = True
            return
        if state.f_bavail * state.f_frsize < 4 * SIZE:
            return
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
        finally:
            os.close(descriptor)
        self._held = True
