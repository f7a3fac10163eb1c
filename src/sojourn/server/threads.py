"""Work that blocks, beside the event loop.

Guarantee: when whoever waits gives up, the work is told and waited for, so nothing that it uses is
closed under it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Work in a thread that is told to stop, and waited for, when this is given up."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # what it ended with is of no interest to anyone
        raise
