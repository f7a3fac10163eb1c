"""A process that sends is ended when it does nothing at all, and only then."""

from __future__ import annotations

import asyncio
import sys

import pytest

from sojourn.server import sender


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(sender, "_HUNG_SECONDS", 1.0)


async def wait_for(program: str, answer_after: float) -> bytes:
    """What waiting for the answer of a process that runs `program` gives."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", program)
    exchanged = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(answer_after, exchanged.set_result, b"answer")
    try:
        await sender._while_it_works(process.pid, exchanged)
        return await exchanged
    finally:
        exchanged.cancel()
        process.kill()
        await process.wait()


def test_one_that_does_nothing_is_given_up() -> None:
    with pytest.raises(TimeoutError, match="done nothing"):
        asyncio.run(wait_for("import time; time.sleep(60)", 30))


def test_one_that_works_is_waited_for() -> None:
    assert asyncio.run(wait_for("while True: pass", 3)) == b"answer"
