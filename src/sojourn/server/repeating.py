"""Work that is done again and again for as long as a process serves.

Guarantee: whatever one round raises is in the log, and never the end of the rounds after it: a loop
that has ended is noticed by nobody until what it looks after is missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sojourn.errors import SojournError

log = logging.getLogger(__name__)


async def repeat(
    every: float, work: Callable[[], Awaitable[object]], what: str, *, at_once: bool = True
) -> None:
    """Do `work`, again `every` seconds after its end; the first time now, or (not `at_once`) after
    as long. `what` names it in the log."""
    while True:
        if at_once:
            try:
                await work()
            except (SojournError, OSError) as error:
                log.warning("%s: %s", what, error)
            except Exception:
                log.exception("a fault in: %s", what)
        at_once = True
        await asyncio.sleep(every)
