"""What a running session uses on this host.

Guarantee: read from the host when it is asked for, so nothing inside the session has a say in it;
processes that end meanwhile count no more, so the processors' time is good for short differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from sojourn.node.sandboxes import Sandbox
from sojourn.server.base import Usage
from sojourn.server.quotas import allocated_bytes

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int], proc: Path = Path("/proc")) -> float:
    """Processor time of host processes, those that are gone left out."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            # The name in brackets may hold anything; the numbers begin behind the last bracket.
            fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


async def usage(sandbox: Sandbox) -> Usage:
    """What one sandbox uses."""
    sealed = sum(layer.bytes for layer in sandbox.record.layers[1:])
    disk = await asyncio.to_thread(allocated_bytes, sandbox.upper)
    status = await asyncio.to_thread(sandbox.status)
    spent = await asyncio.to_thread(cpu_seconds, status.pids)
    return Usage(spent, sealed + disk)
