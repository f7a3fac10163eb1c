"""Keeping publications and collections of one store apart.

Guarantee: a collection begins only when nothing is being published and holds newcomers off, so
what is published but not yet referred to is never taken for garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class StoreGuard:
    """Keeps collection away from snapshots whose parts are published but not yet referred to."""

    def __init__(self) -> None:
        self._publishing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._collecting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Around everything from the first published part to the committed reference."""
        async with self._collecting:
            self._publishing += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._publishing -= 1
            if self._publishing == 0:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncIterator[None]:
        """Around a collection: begins when nothing is being published and holds newcomers off."""
        async with self._collecting:
            await self._idle.wait()
            yield
