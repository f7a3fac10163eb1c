"""Named points where a test may end the process, as a power cut would.

Guarantee: without SOJOURN_CRASH_AT in the environment a point costs one comparison and does
nothing. With `SOJOURN_CRASH_AT=suspend.kill` the process sends itself SIGKILL when it reaches that
point; `suspend.kill:3` does so the third time. Each step of each operation has one point before
its first effect and one after its record is durable, so tests can prove that every crash converges.

`SOJOURN_CRASH_AT=@/some/file` reads the same words from that file once it is there, so that a
server that runs can be told; the file is gone when the process is.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_told = os.environ.get("SOJOURN_CRASH_AT", "")
_reached: dict[str, int] = {}


def reach(point: str) -> None:
    """Mark a point as reached."""
    if not _told:
        return
    told = _told
    if told.startswith("@"):
        told = ""
        with contextlib.suppress(FileNotFoundError):
            told = Path(_told[1:]).read_text()
    target, _, count = told.partition(":")
    if point != target:
        return
    _reached[told] = _reached.get(told, 0) + 1
    if _reached[told] == int(count or 1):
        if _told.startswith("@"):
            Path(_told[1:]).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
