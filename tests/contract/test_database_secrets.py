"""Secrets of tenants and exposed ports of sessions, on each engine."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from sojourn.database import Database
from sojourn.database.records import SecretRecord
from sojourn.database.writes import UpdateSession
from sojourn.errors import Conflict, SessionNotFound
from sojourn.model import Session, SessionState
from sojourn.model.network import SecretPlace, SecretUse
from sojourn.model.ports import ExposedPort, PortKind
from support.databases import Harness, insert_session, make_session

USES = [SecretUse(["api.example.com", "*.example.org"], SecretPlace.QUERY, "key")]


def secret(tenant: str, name: str, value: bytes = b"\x00\xffsealed") -> SecretRecord:
    now = time.time()
    return SecretRecord(tenant, name, value, USES, now, now)


def port(session: Session, number: int, **fields: Any) -> ExposedPort:
    values: dict[str, Any] = {
        "session": session.id,
        "port": number,
        "tenant": session.tenant,
        "kind": PortKind.HTTP,
        "public": False,
        "token": "c2VhbGVk",
        "sources": [],
        "listens_at": None,
        "created_at": time.time(),
    }
    return ExposedPort(**(values | fields))


def test_a_secret_is_kept_as_it_is_and_replaced_by_name(database: Harness) -> None:
    async def scenario(found: Database) -> None:
        first = await found.put_secret(secret("ten_a", "TOKEN"))
        assert await found.list_secrets("ten_a") == [first]
        assert first.value == b"\x00\xffsealed" and first.uses == USES
        second = await found.put_secret(
            msgspec.structs.replace(
                secret("ten_a", "TOKEN", b"new"), uses=[SecretUse(["a.example"])]
            )
        )
        assert second.created_at == first.created_at and second.updated_at >= first.updated_at
        assert await found.list_secrets("ten_a") == [second] and second.value == b"new"

    database.run(scenario)


def test_secrets_are_their_tenants_and_go(database: Harness) -> None:
    async def scenario(found: Database) -> None:
        assert not await found.anything_sealed()
        for tenant in ("ten_a", "ten_b"):
            for name in ("B", "A"):
                await found.put_secret(secret(tenant, name))
        assert await found.anything_sealed()
        assert not await found.delete_secret("ten_c", "A")
        assert await found.delete_secret("ten_a", "A") and not await found.delete_secret(
            "ten_a", "A"
        )
        assert [one.name for one in await found.list_secrets("ten_a")] == ["B"]
        assert [one.name for one in await found.list_secrets("ten_b")] == ["A", "B"]

    database.run(scenario)


def test_a_port_is_exposed_once_whoever_asks(database: Harness) -> None:
    async def scenario(found: Database) -> None:
        session = await insert_session(found, make_session())
        asked = [port(session, 8000, token=f"t{number}") for number in range(10)]
        given = await asyncio.gather(*(found.put_port(one) for one in asked))
        assert len(set(one.token for one in given)) == 1
        assert await found.list_ports() == await found.list_ports(session.id) == [given[0]]
        assert given[0] in asked

    database.run(scenario)


def test_a_number_of_the_host_is_one_ports(database: Harness) -> None:
    async def scenario(found: Database) -> None:
        session = await insert_session(found, make_session())
        kind = {"kind": PortKind.TCP, "public": True, "token": "", "listens_at": 5000}
        first = await found.put_port(port(session, 1, sources=["10.0.0.0/8"], **kind))
        assert first.sources == ["10.0.0.0/8"] and first.public
        with pytest.raises(Conflict):
            await found.put_port(port(session, 2, **kind))
        assert not await found.anything_sealed()
        assert await found.delete_port(session.id, 1) and not await found.delete_port(session.id, 1)
        await found.put_port(port(session, 2, **kind))

    database.run(scenario)


def test_a_deleted_session_exposes_nothing(database: Harness) -> None:
    async def scenario(found: Database) -> None:
        kept = await insert_session(found, make_session())
        gone = await insert_session(found, make_session())
        for session in (kept, gone):
            await found.put_port(port(session, 8000))
        await found.commit(
            [
                UpdateSession(
                    id=gone.id,
                    expect_state={gone.state},
                    expect_epoch=gone.epoch,
                    changes={"state": SessionState.DELETED},
                )
            ]
        )
        assert [one.session for one in await found.list_ports()] == [kept.id]
        with pytest.raises(SessionNotFound):
            await found.put_port(port(gone, 8000))

    database.run(scenario)
