"""Named points where a test may end the process, as a power cut would.

Guarantee: without SOJOURN_CRASH_AT in the environment a point costs one comparison and does
nothing. With `SOJOURN_CRASH_AT=suspend.kill` the process sends itself SIGKILL when it reaches that
point; `suspend.kill:3` does so the third time. Each step of each operation has one point before
its first effect and one after its record is durable, so tests can prove that every crash converges.
"""

from __future__ import annotations

import os
import signal

_target, _, _count = os.environ.get("SOJOURN_CRASH_AT", "").partition(":")
_left = int(_count or 1) if _target else 0


def reach(point: str) -> None:
    """Mark a point as reached."""
    global _left
    if not _target or point != _target:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
