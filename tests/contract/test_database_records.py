"""Tenants, tokens, the id of the installation, and the database as a whole."""

from __future__ import annotations

import asyncio

import pytest

from sojourn.database import Database, Role
from sojourn.database.writes import AppendEvent
from sojourn.errors import (
    Conflict,
    InvalidRequest,
    NameTaken,
    NotFound,
    Unauthenticated,
)
from support.databases import (
    Harness,
    insert_session,
    insert_snapshot,
    make_session,
    make_snapshot,
)

# -- tenants and tokens -------------------------------------------------------------------------


def test_tenants_have_unique_names(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        tenant = await db.create_tenant("acme")
        with pytest.raises(NameTaken):
            await db.create_tenant("acme")
        assert await db.get_tenant("acme") == await db.get_tenant(tenant.id) == tenant
        with pytest.raises(NotFound):
            await db.get_tenant("other")
        assert await db.list_tenants() == [tenant]

    database.run(scenario)


def test_a_token_is_verified_until_it_is_revoked(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        tenant = await db.create_tenant("acme")
        token, secret = await db.create_token(tenant.id, Role.TENANT, label="laptop")
        operator, other = await db.create_token(tenant.id, Role.OPERATOR)
        assert await db.verify_token(secret) == token
        assert (await db.verify_token(other)).role is Role.OPERATOR
        for wrong in ("", "x", secret[:-1], secret + "x", token.id, "\udcff\x00é"):
            with pytest.raises(Unauthenticated):
                await db.verify_token(wrong)
        assert await db.revoke_token(token.id)
        assert not await db.revoke_token(token.id)
        assert not await db.revoke_token("tok_none")
        with pytest.raises(Unauthenticated):
            await db.verify_token(secret)
        assert await db.verify_token(other) == operator
        listed = await db.list_tokens(tenant.id)
        assert [(t.id, t.revoked_at is None) for t in listed] == [
            (token.id, False),
            (operator.id, True),
        ]
        assert await db.list_tokens("ten_none") == []

    database.run(scenario)


def test_a_given_secret_is_registered_and_kept_only_as_a_hash(database: Harness) -> None:
    secret = "s" * 40

    async def scenario(db: Database) -> None:
        tenant = await db.create_tenant("acme")
        with pytest.raises(InvalidRequest):
            await db.create_token(tenant.id, Role.TENANT, secret="short")
        with pytest.raises(NotFound):
            await db.create_token("ten_none", Role.TENANT)
        token, same = await db.create_token(tenant.id, Role.TENANT, secret=secret)
        assert same == secret
        assert await db.verify_token(secret) == token
        with pytest.raises(Conflict):
            await db.create_token(tenant.id, Role.TENANT, secret=secret)

    database.run(scenario)
    assert database.holds(b"acme")
    assert not database.holds(secret.encode())


# -- the whole ----------------------------------------------------------------------------------


def test_the_server_id_is_made_once(database: Harness) -> None:
    async def scenario(db: Database) -> str:
        ids = await asyncio.gather(*[db.server_id() for _ in range(5)])
        assert len(set(ids)) == 1
        return ids[0]

    assert database.run(scenario) == database.run(scenario)


def test_a_sound_database_is_found_sound(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        await insert_snapshot(db, make_snapshot(session))

    database.run(scenario)
    assert database.flaws() == []


def test_a_change_whose_caller_was_cancelled_is_still_whole(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = make_session()
        task = asyncio.ensure_future(insert_session(db, session))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await db.append_event(AppendEvent(session.id, "after it"))
        assert await db.get_session(None, session.id) == session

    database.run(scenario)
