"""Owning a database on PostgreSQL, where what waits for it meets faults of its own."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import psycopg
import pytest

from sojourn.database.postgres import signals
from sojourn.database.postgres.signals import PostgresSignals
from sojourn.errors import SojournError


class Connection:
    """One that has the lock to give, and no notices."""

    def __init__(self, notices: list[str]) -> None:
        self._notices = notices

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closed."""

    async def execute(self, query: str, parameters: object = None) -> Any:
        async def fetchone() -> tuple[bool]:
            return (True,)

        return types.SimpleNamespace(fetchone=fetchone)

    async def notifies(self) -> Any:
        for payload in self._notices:
            yield types.SimpleNamespace(payload=payload, channel="sojourn_events")
        await asyncio.Event().wait()


def made(heard: Any = None) -> PostgresSignals:
    place: Any = types.SimpleNamespace(settings={}, shown="somewhere")
    reader: Any = None
    found = PostgresSignals(place, asyncio.get_running_loop(), reader, lambda error: None)
    if heard is not None:
        found.listen(heard)
    return found


def test_whoever_waits_to_own_is_told_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(**_: object) -> Any:
        raise RuntimeError("out of the blue")

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connect)

    async def main() -> None:
        owner = made()
        async with asyncio.timeout(10):
            with pytest.raises(SojournError, match="out of the blue"):
                await owner.own()
        await owner.close()

    asyncio.run(main())


def test_a_fault_of_a_listener_does_not_give_the_database_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals, "_PAUSES", (0.0,))
    taken: list[int] = []

    async def connect(**_: object) -> Any:
        taken.append(1)
        return Connection(["other ses_1"])

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connect)

    async def main() -> None:
        calls: list[object] = []
        again = asyncio.Event()

        def heard(sessions: object) -> None:
            calls.append(sessions)
            if sessions is not None and len(taken) == 1:
                raise RuntimeError("a fault of the listener")
            if sessions is not None:
                again.set()

        owner = made(heard)
        async with asyncio.timeout(10):
            await owner.own()
            await again.wait()
        assert calls[-1] == ["ses_1"]
        await owner.close()

    asyncio.run(main())
