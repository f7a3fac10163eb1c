"""Name servers that do not answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from sojourn.gateway import resolving
from sojourn.gateway.addresses import Address
from sojourn.gateway.resolving import Outside


def test_a_session_takes_no_more_threads_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "CONNECT_SECONDS", 0.05)
    answers, started = threading.Event(), threading.Semaphore(0)

    def lookup(self: Outside, name: str) -> list[Address]:
        started.release()
        answers.wait(30)
        return []

    monkeypatch.setattr(Outside, "_lookup", lookup)

    async def run() -> None:
        outside, slots, others = Outside(), asyncio.Semaphore(2), asyncio.Semaphore(2)
        first = [outside.resolve("a.test", slots) for _ in range(2)]
        assert all(
            isinstance(outcome, TimeoutError)
            for outcome in await asyncio.gather(*first, return_exceptions=True)
        )
        # Nobody waits for these two threads any more, but they are there.
        third = asyncio.ensure_future(outside.resolve("b.test", slots))
        with pytest.raises(TimeoutError):
            await outside.resolve("c.test", others)
        assert all(started.acquire(timeout=30) for _ in range(3))
        assert not started.acquire(blocking=False)
        monkeypatch.setattr(resolving, "CONNECT_SECONDS", 30)
        answers.set()
        assert await third == []
        outside.close()

    asyncio.run(run())


def test_a_gateway_loads_no_resolver_that_it_does_not_use() -> None:
    """It is half of what there is to load, and the first session with a network waits for it."""
    program = "import sys, sojourn.gateway.worker; sys.exit('dns' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
