"""What a policy did not let out, as the gateway counts it and the server keeps it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sojourn.database import open_database
from sojourn.gateway import denials
from sojourn.gateway.denials import MOST_KINDS, Denials
from sojourn.gateway.messages import Began, Ended, Withheld
from sojourn.gateway.records import Recorder
from sojourn.model.network import Denial
from sojourn.server.effects import DENIED, Effects
from sojourn.server.registry import Registry
from support.databases import insert_session, make_session


class Told:
    """The server that is told."""

    def __init__(self) -> None:
        self.denials: list[Denial] = []

    async def request(self, body: Began | Ended | Withheld) -> None:
        assert isinstance(body, Withheld)
        self.denials.append(body.denial)

    async def until(self, count: int) -> list[Denial]:
        async with asyncio.timeout(20):
            while len(self.denials) < count:
                await asyncio.sleep(0.005)
        return self.denials


def rig() -> tuple[Told, Denials]:
    told = Told()
    return told, Denials(Recorder(told, "ses", "sbx", 3))


def test_the_first_is_told_at_once_and_further_ones_as_a_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(denials, "WINDOW_SECONDS", 0.2)

    async def scenario() -> None:
        told, counted = rig()
        for _ in range(1000):
            counted.note("a.example", 443, "no-rule", "no rule allows a.example")
        counted.note("a.example", 444, "no-rule", "no rule allows a.example")
        found = await told.until(2)
        assert [(one.host, one.port, one.rule, one.count) for one in found] == [
            ("a.example", 443, "no-rule", 1),
            ("a.example", 444, "no-rule", 1),
        ]
        assert (found[0].session, found[0].sandbox, found[0].epoch) == ("ses", "sbx", 3)
        assert found[0].reason == "no rule allows a.example"
        (*_, repeated) = await told.until(3)
        assert (repeated.port, repeated.count) == (443, 999)
        # It is known already: what comes in the next minute is one count more, not two.
        counted.note("a.example", 443, "no-rule", "no rule allows a.example")
        counted.note("a.example", 443, "no-rule", "no rule allows a.example")
        assert len(told.denials) == 3
        (*_, again) = await told.until(4)
        assert again.count == 2 and again.first_at <= again.last_at
        await asyncio.sleep(0.5)
        assert len(told.denials) == 4
        counted.note("a.example", 443, "no-rule", "no rule allows a.example")
        assert [one.count for one in await told.until(5)] == [1, 1, 999, 2, 1]

    asyncio.run(scenario())


def test_what_a_program_tries_does_not_fill_the_record() -> None:
    async def scenario() -> None:
        told, counted = rig()
        for number in range(10_000):
            counted.note(f"{number}.example", 443, "no-rule", "x" * 10_000)
        found = await told.until(MOST_KINDS + 1)
        assert found[-1].host == "" and found[-1].rule == ""
        counted.close()
        found = await told.until(MOST_KINDS + 2)
        assert sum(one.count for one in found) == 10_000
        assert all(len(one.reason) <= 500 for one in found)

    asyncio.run(scenario())


def test_a_host_is_kept_as_text() -> None:
    async def scenario() -> None:
        told, counted = rig()
        counted.note(b"\xff\x00\x1b[2Jevil" + b"x" * 1000, 1, "host-spelling", "no host")
        (found,) = await told.until(1)
        assert found.host.isprintable() and "evil" in found.host and len(found.host) == 255

    asyncio.run(scenario())


def test_the_server_keeps_them_as_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        try:
            session = await insert_session(database, make_session())
            registry = Registry(database, lambda _: None)
            registry.hold(session).commands.append(["curl", "https://a.example/"])
            effects = Effects(database, registry)
            denial = Denial(
                session.id, "sbx", 1, "a.example", 443, "no-rule", "no rule allows it", 7, 1.0, 2.0
            )
            await effects.handle(Withheld(denial))
            await effects.handle(Withheld(Denial("ses_gone", "sbx", 1, "", 0, "", "", 1, 1.0, 1.0)))
            await effects.flush()
            (event,) = await database.list_events(session.id, kinds=[DENIED])
            assert (event.kind, event.actor, event.result) == (DENIED, "session", "no-rule")
            assert event.details["host"] == "a.example" and event.details["count"] == 7
            assert event.details["during"] == [["curl", "https://a.example/"]]
            assert await database.list_effects(session.id, all=True) == []
        finally:
            await database.close()

    asyncio.run(scenario())
