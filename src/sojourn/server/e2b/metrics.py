"""What a sandbox uses at this moment.

Guarantee: figures of the sandbox's own kernel, read when they are asked for; nothing is recorded
over time, so there is one sample and no history.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sojourn.server.base import Principal, SessionService
from sojourn.server.e2b.schemas import stamp
from sojourn.server.e2b.users import read_whole
from sojourn.wire.api import SessionInfo

_SAMPLE_SECONDS = 0.1


def memory(text: bytes) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    found = {}
    for line in text.decode("ascii", "replace").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def ticks(text: bytes) -> tuple[int, int]:
    """Busy and all ticks of the processors, of /proc/stat."""
    for line in text.decode("ascii", "replace").splitlines():
        words = line.split()
        if words[:1] == ["cpu"] and all(word.isdigit() for word in words[1:]):
            numbers = [int(word) for word in words[1:]]
            return sum(numbers) - sum(numbers[3:5]), sum(numbers)
    return 0, 0


def share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Percent of the processors that were busy in between."""
    spent = after[1] - before[1]
    return round(100.0 * (after[0] - before[0]) / spent, 2) if spent > 0 else 0.0


async def now(service: SessionService, who: Principal, info: SessionInfo) -> dict[str, Any]:
    """One sample."""
    async with service.files(who, info.id, "files.read /proc", mutates=False) as guest:
        first = ticks(await read_whole(guest, b"/proc/stat"))
        await asyncio.sleep(_SAMPLE_SECONDS)
        second = ticks(await read_whole(guest, b"/proc/stat"))
        found = memory(await read_whole(guest, b"/proc/meminfo"))
    at = time.time()
    total = found.get("MemTotal", info.limits.memory_bytes)
    cached = found.get("Cached", 0)
    return {
        "timestamp": stamp(at),
        "timestampUnix": int(at),
        "cpuCount": max(1, round(info.limits.cpus)),
        "cpuUsedPct": share(first, second),
        "memUsed": max(0, total - found.get("MemAvailable", found.get("MemFree", 0))),
        "memTotal": total,
        "memCache": cached,
        "diskUsed": 0,
        "diskTotal": info.limits.disk_bytes,
    }
