"""What a sandbox uses at this moment.

Guarantee: figures read when they are asked for: memory as the sandbox's own kernel counts it, the
rest from the host; nothing is recorded over time, so there is one sample and no history.
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
        if words and words[0].isdigit() and len(words[0]) < 20:
            found[name] = int(words[0]) * 1024
    return found


async def now(service: SessionService, who: Principal, info: SessionInfo) -> dict[str, Any]:
    """One sample."""
    began = time.monotonic()
    before = await service.usage(who, info.id)
    await asyncio.sleep(_SAMPLE_SECONDS)
    after = await service.usage(who, info.id)
    took = time.monotonic() - began
    async with service.files(who, info.id, "files.read /proc/meminfo", mutates=False) as guest:
        found = memory(await read_whole(guest, b"/proc/meminfo"))
    at = time.time()
    cpus = info.limits.cpus
    spent = max(0.0, after.cpu_seconds - before.cpu_seconds)
    total = found.get("MemTotal", info.limits.memory_bytes)
    free = found.get("MemAvailable", found.get("MemFree", total))
    return {
        "timestamp": stamp(at),
        "timestampUnix": int(at),
        "cpuCount": max(1, round(cpus)),
        "cpuUsedPct": round(100.0 * spent / took / cpus, 2),
        "memUsed": max(0, total - free),
        "memTotal": total,
        "memCache": found.get("Cached", 0),
        "diskUsed": after.disk_bytes,
        "diskTotal": info.limits.disk_bytes,
    }
