"""A writer whose transactions are counted and timed.

Guarantee: nothing of what it passes on is changed; a measurement ends with the job's future,
whether anybody still waits for it or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from sojourn.database.engine import NOTHING, Statements, Touched, Writer
from sojourn.database.fences import Fences
from sojourn.errors import SojournError
from sojourn.model.nodes import Fence
from sojourn.telemetry import declared

T = TypeVar("T")


class MeasuredWriter:
    """See `sojourn.database.engine.Writer`."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        self.fences: Fences = inner.fences

    def submit(
        self,
        work: Callable[[Statements], T],
        *,
        durable: bool,
        touches: Touched = NOTHING,
        urgent: bool = False,
        fence: Fence | msgspec.UnsetType | None = msgspec.UNSET,
        apart: bool = False,
        then: Callable[[T], None] | None = None,
    ) -> asyncio.Future[T]:
        """Queue a job."""
        began = time.perf_counter()
        future = self._inner.submit(
            work,
            durable=durable,
            touches=touches,
            urgent=urgent,
            fence=fence,
            apart=apart,
            then=then,
        )

        def ended(done: asyncio.Future[T]) -> None:
            seconds = time.perf_counter() - began
            declared.DATABASE_SECONDS.observe(seconds, "yes" if durable else "no")
            declared.DATABASE_TRANSACTIONS.add(_result(done))

        future.add_done_callback(ended)
        return future

    async def close(self) -> None:
        """Finish what is queued and let go. Idempotent."""
        await self._inner.close()


def _result(done: asyncio.Future[T]) -> str:
    if done.cancelled():
        return "cancelled"
    error = done.exception()
    if error is None:
        return "ok"
    return error.code if isinstance(error, SojournError) else "internal"
