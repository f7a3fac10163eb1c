"""Who owns a data directory.

Guarantee: one server at a time, or one recovery; a process that was killed leaves no lock behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sojourn.errors import HostUnfit


@contextlib.contextmanager
def data_lock(data: Path) -> Iterator[None]:
    """Own a data directory; the kernel lets go of it when the process ends, however it ends.

    Raises HostUnfit when another server owns it.
    """
    descriptor = os.open(data / "server.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostUnfit(
                f"another server uses the data directory {data}",
                next_step="Stop it, or give this one another directory (--data).",
            ) from None
        yield
    finally:
        os.close(descriptor)
