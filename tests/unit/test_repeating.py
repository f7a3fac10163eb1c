"""Rounds go on, whatever one of them raises."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sojourn.errors import Unreachable
from sojourn.server.repeating import repeat


def test_no_round_is_the_end_of_those_after_it(caplog: pytest.LogCaptureFixture) -> None:
    raised: list[Exception] = [Unreachable("away"), OSError("full"), KeyError("a fault")]

    async def scenario() -> None:
        done = asyncio.Event()

        async def work() -> None:
            if raised:
                raise raised.pop(0)
            done.set()

        task = asyncio.create_task(repeat(0.001, work, "a look"))
        async with asyncio.timeout(30):
            await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    said = [(record.levelname, record.getMessage()[:12]) for record in caplog.records]
    assert said == [
        ("WARNING", "a look: away"),
        ("WARNING", "a look: full"),
        ("ERROR", "a fault in: "),
    ]


def test_the_first_round_may_come_later() -> None:
    async def scenario() -> None:
        rounds: list[None] = []

        async def work() -> None:
            rounds.append(None)

        task = asyncio.create_task(repeat(3600.0, work, "a look", at_once=False))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not rounds
        task.cancel()

    asyncio.run(scenario())
