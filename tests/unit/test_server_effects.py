"""What leaves sessions, as the server records it and finds it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.database import Database, open_database
from sojourn.database.writes import InsertSnapshot, SettleEffects, UpdateSession
from sojourn.errors import EffectsInTheWay, InvalidRequest, SessionNotFound
from sojourn.gateway.messages import Began, Ended
from sojourn.model import Session, new_id
from sojourn.model.network import Effect, NetworkPolicy, OnEffects
from sojourn.repository.session_records import SessionRecord, decode_session
from sojourn.server.effects import Effects, effect_line, require_none, told
from sojourn.server.networks import inherited, network_environment
from sojourn.server.registry import Registry
from support.databases import insert_session, make_session, make_snapshot


class Rig:
    """Effects over a database, and one session."""

    def __init__(self, database: Database, session: Session) -> None:
        self.database = database
        self.registry = Registry(database, lambda _: None)
        self.registry.hold(session)
        self.effects = Effects(database, self.registry)
        self.session = session

    def effect(self, **fields: Any) -> Effect:
        values: dict[str, Any] = {
            "id": new_id("eff"),
            "session": self.session.id,
            "sandbox": "sbx-1",
            "epoch": 1,
            "kind": "http",
            "method": "POST",
            "scheme": "https",
            "host": "api.example.com",
            "port": 443,
            "path": "/orders",
            "idempotent": False,
            "rule": "api",
            "secrets": [],
            "began_at": time.time(),
        }
        return Effect(**(values | fields))

    async def began(self, **fields: Any) -> Effect:
        effect = self.effect(**fields)
        await self.effects.handle(Began(effect))
        return effect

    async def ended(self, effect: Effect, **fields: Any) -> None:
        over = {"outcome": "done", "status": 201, "ended_at": time.time()} | fields
        await self.effects.handle(Ended(msgspec.structs.replace(effect, **over)))

    async def snapshot(self) -> str:
        taken = make_snapshot(self.session, parent=self.session.head)
        results = await self.database.commit(
            [
                InsertSnapshot(taken),
                SettleEffects(self.session.id, taken.id, time.time()),
                UpdateSession(self.session.id, {self.session.state}, 1, {"head": taken.id}),
            ]
        )
        self.session = results[-1]
        self.registry.update(self.session)
        return taken.id

    async def events(self) -> list[tuple[str, str | None, str]]:
        found = await self.database.list_events(self.session.id)
        return [(one.kind, one.result, one.details["path"]) for one in found]


def run(tmp_path: Path, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        try:
            await scenario(Rig(database, await insert_session(database, make_session())))
        finally:
            await database.close()

    asyncio.run(whole())


def test_what_is_about_to_leave_is_on_record_first(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        head = await rig.snapshot()
        active = rig.registry.hold(rig.session)
        active.commands.append(["curl", "https://api.example.com/orders"])
        effect = await rig.began()
        (event,) = await rig.database.list_events(rig.session.id)
        assert (event.kind, event.before, event.actor) == ("network.request", head, "session")
        assert event.details["id"] == effect.id
        assert event.details["during"] == [["curl", "https://api.example.com/orders"]]
        await rig.ended(effect)
        page = await rig.effects.page(rig.session, all=False, cursor=None, limit=10)
        (found,) = page.items
        assert (found.status, found.outcome, found.snapshot, found.lasting) == (
            201, "done", head, True,
        )  # fmt: skip
        assert await rig.events() == [
            ("network.request", "ok", "/orders"),
            ("network.response", "done", "/orders"),
        ]

    run(tmp_path, scenario)


def test_what_only_read_is_told_once_and_holds_up_nothing(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        base = await rig.snapshot()
        await rig.ended(rig.effect(method="GET", path="/read", idempotent=True), status=200)
        assert (await rig.effects.left(rig.session, base)).count == 0
        assert (await rig.effects.page(rig.session, all=False, cursor=None, limit=10)).items == []
        page = await rig.effects.page(rig.session, all=True, cursor=None, limit=10)
        assert [one.path for one in page.items] == ["/read"]
        assert await rig.events() == [("network.request", "done", "/read")]

    run(tmp_path, scenario)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "post"])
def test_repeatable_is_not_undone(tmp_path: Path, method: str) -> None:
    async def scenario(rig: Rig) -> None:
        base = await rig.snapshot()
        await rig.ended(await rig.began(method=method, idempotent=method in ("PUT", "DELETE")))
        assert (await rig.effects.left(rig.session, base)).count == 1

    run(tmp_path, scenario)


def test_ends_are_written_in_batches_whatever_was_deleted_meanwhile(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        base = await rig.snapshot()
        for number in range(450):
            await rig.ended(rig.effect(path=f"/{number}"))
        await rig.ended(rig.effect(session="ses_gone"))
        await rig.ended(rig.effect(path="/last"))
        left = await rig.effects.left(rig.session, base)
        assert left.count == 451 and len(left.effects) == 200
        assert told(left)["effects"] == 451 and len(told(left)["requests"]) == 20

    run(tmp_path, scenario)


class Slow:
    """A database whose commits wait until they may go on."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.go = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    async def commit(self, writes: Any, *, durable: bool = True) -> list[Any]:
        await self.go.wait()
        return await self._database.commit(writes, durable=durable)


def test_who_looks_sees_what_is_being_written_too(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        slow: Any = Slow(rig.database)
        rig.effects = Effects(slow, rig.registry)
        await rig.ended(rig.effect())
        writing = asyncio.create_task(rig.effects.flush())
        await asyncio.sleep(0)
        looking = asyncio.create_task(
            rig.effects.page(rig.session, all=True, cursor=None, limit=10)
        )
        await asyncio.sleep(0.01)
        slow.go.set()
        assert len((await looking).items) == 1
        await writing

    run(tmp_path, scenario)


def test_the_gateway_is_not_answered_while_too_much_waits_to_be_written(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        slow: Any = Slow(rig.database)
        rig.effects = Effects(slow, rig.registry)
        told = [asyncio.create_task(rig.ended(rig.effect())) for _ in range(1500)]
        await asyncio.sleep(0.1)
        waiting = [one for one in told if not one.done()]
        assert 250 <= len(waiting) <= 500
        slow.go.set()
        await asyncio.gather(*waiting)
        page = await rig.effects.page(rig.session, all=True, cursor=None, limit=2000)
        assert len(page.items) == 1500

    run(tmp_path, scenario)


def test_nothing_leaves_a_session_that_is_not_there(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(SessionNotFound):
            await rig.began(session="ses_gone")

    run(tmp_path, scenario)


def test_what_was_under_way_is_interrupted(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        base = await rig.snapshot()
        for number in range(250):
            await rig.began(path=f"/{number}")
        await rig.ended(await rig.began(path="/done"))
        await rig.effects.interrupt()
        assert await rig.database.open_effects() == []
        page = await rig.effects.page(rig.session, all=False, cursor=None, limit=1000)
        outcomes = [one.outcome for one in page.items]
        assert outcomes == ["interrupted"] * 250 + ["done"]
        assert all(one.ended_at is not None for one in page.items)
        assert (await rig.effects.left(rig.session, base)).count == 251

    run(tmp_path, scenario)


def test_pages(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        for number in range(5):
            await rig.began(path=f"/{number}", began_at=1000.0)
        seen: list[str] = []
        cursor: str | None = None
        while True:
            page = await rig.effects.page(rig.session, all=False, cursor=cursor, limit=2)
            seen += [one.id for one in page.items]
            cursor = page.next
            if cursor is None:
                break
        assert len(seen) == len(set(seen)) == 5
        for wrong in ("", "x", "nan~"):
            with pytest.raises(InvalidRequest):
                await rig.effects.page(rig.session, all=False, cursor=wrong, limit=2)

    run(tmp_path, scenario)


def test_a_policy_refuses_to_leave_effects_behind(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        base = await rig.snapshot()
        effect = await rig.began(began_at=43391.0)
        left = await rig.effects.left(rig.session, base)
        require_none(rig.session, "rollback", left, force=False)  # it only lists
        strict = msgspec.structs.replace(
            rig.session, network=NetworkPolicy(on_effects=OnEffects.REFUSE)
        )
        require_none(strict, "rollback", left, force=True)
        with pytest.raises(EffectsInTheWay) as refused:
            require_none(strict, "rollback", left, force=False)
        assert refused.value.status == 409
        assert refused.value.details["effects"][0]["id"] == effect.id
        assert "POST api.example.com/orders open 12:03:11" in refused.value.message
        await rig.snapshot()
        require_none(
            strict, "fork", await rig.effects.left(rig.session, rig.session.head or ""), force=False
        )

    run(tmp_path, scenario)


def test_an_effect_in_one_line() -> None:
    rig = Rig.__new__(Rig)
    rig.session = make_session()
    assert (
        effect_line(rig.effect(began_at=43391.0, status=201))
        == "POST api.example.com/orders 201 12:03:11"
    )
    raw = rig.effect(began_at=0.0, kind="tcp", method="", path="", port=22, outcome="done")
    assert effect_line(raw) == "tcp api.example.com:22 done 00:00:00"


def test_forks_get_secrets_only_where_that_was_said() -> None:
    policy = NetworkPolicy(secrets=["KEY"])
    assert inherited(policy).secrets == []
    shared = msgspec.structs.replace(policy, secrets_in_forks=True)
    assert inherited(shared) == shared


def test_a_policy_goes_with_the_record_in_the_object_store() -> None:
    policy = NetworkPolicy(secrets=["KEY"], on_effects=OnEffects.REFUSE)
    session = make_session(network=policy)
    record = SessionRecord(session, [], 0.0, "srv")
    found = decode_session(msgspec.msgpack.encode(record), session.id)
    assert found.session.network == policy
    older = msgspec.to_builtins(record)
    del older["session"]["network"]  # as written before there was one
    found = decode_session(msgspec.msgpack.encode(older), session.id)
    assert found.session.network == NetworkPolicy()


def test_variables_of_commands() -> None:
    assert network_environment(NetworkPolicy(), transparent=False) == {}
    policy = msgspec.convert({"mode": "open", "secrets": ["KEY"]}, NetworkPolicy)
    seen = network_environment(policy, transparent=True)
    trusting = {
        "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO", "PIP_CERT",
    }  # fmt: skip
    assert {seen[name] for name in trusting} == {"/run/sojourn/ca.pem"}
    assert seen["KEY"] == "sojourn-secret-KEY"
    assert not [name for name in seen if "proxy" in name.lower()]
    proxied = network_environment(policy, transparent=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        assert proxied[name] == "http://127.0.0.1:3128"
    assert "127.0.0.1" in proxied["NO_PROXY"]
