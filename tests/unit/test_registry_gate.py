"""The gate of a session: commands pass, lifecycle work is alone."""

from __future__ import annotations

import asyncio

from sojourn.server.registry import Gate


def test_whoever_waited_does_not_enter_a_gate_that_was_closed_again() -> None:
    async def run() -> None:
        gate = Gate()
        entered = asyncio.Event()

        async def command() -> None:
            await gate.passed()
            assert gate.is_open
            entered.set()

        async with gate.closed("first"):
            waiting = asyncio.create_task(command())
            await asyncio.sleep(0)
        async with gate.closed("second"):  # taken before the waiting command could run
            for _ in range(5):
                await asyncio.sleep(0)
            assert not entered.is_set()
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())
