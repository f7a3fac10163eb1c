"""Sandboxes, tenants, tokens, settings, and the database as a whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from database_cases import (
    CONNECTORS,
    RUNNING,
    Harness,
    make_sandbox,
    make_session,
    make_snapshot,
)

from sojourn.database import Database, Role, SandboxState, open_database
from sojourn.errors import (
    Conflict,
    InvalidRequest,
    NameTaken,
    NotFound,
    SessionNotFound,
    StaleEpoch,
    Unauthenticated,
)


@pytest.fixture(params=CONNECTORS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    return Harness(request.param, tmp_path)


# -- sandboxes ----------------------------------------------------------------------------------


def test_a_sandbox_reads_back_equal_and_is_listed_by_node_and_session(database: Harness) -> None:
    session = make_session()
    sandbox = make_sandbox(session)

    async def write(db: Database) -> None:
        await db.insert_session(session)
        await db.put_sandbox(sandbox)

    async def read(db: Database) -> None:
        assert await db.get_sandbox(sandbox.id) == sandbox
        assert await db.get_sandbox("sbx_none") is None
        assert await db.list_sandboxes() == [sandbox]
        assert await db.list_sandboxes(node="local", session=session.id) == [sandbox]
        assert await db.list_sandboxes(node="other") == []
        assert await db.set_sandbox_state(sandbox.id, SandboxState.LIVE)
        found = await db.get_sandbox(sandbox.id)
        assert found is not None
        assert found.state is SandboxState.LIVE
        assert await db.delete_sandbox(sandbox.id)
        assert not await db.delete_sandbox(sandbox.id)
        assert not await db.set_sandbox_state(sandbox.id, SandboxState.LIVE)
        assert await db.list_sandboxes() == []

    database.run(write)
    database.run(read)


def test_a_session_has_one_sandbox_that_is_not_ending(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await db.insert_session(make_session())
        first, second = make_sandbox(session), make_sandbox(session)
        await db.put_sandbox(first)
        await db.put_sandbox(first)
        with pytest.raises(Conflict):
            await db.put_sandbox(second)
        await db.set_sandbox_state(first.id, SandboxState.ENDING)
        await db.put_sandbox(second)
        with pytest.raises(Conflict):
            await db.set_sandbox_state(first.id, SandboxState.LIVE)
        stolen = make_sandbox(await db.insert_session(make_session()), id=second.id)
        with pytest.raises(Conflict):
            await db.put_sandbox(stolen)
        assert {s.id for s in await db.list_sandboxes(session=session.id)} == {first.id, second.id}

    database.run(scenario)


def test_a_sandbox_of_an_older_placement_is_refused(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await db.insert_session(make_session(epoch=4))
        for epoch in (3, 5):
            with pytest.raises(StaleEpoch):
                await db.put_sandbox(make_sandbox(session, epoch=epoch))
        with pytest.raises(SessionNotFound):
            await db.put_sandbox(make_sandbox(make_session()))
        assert await db.list_sandboxes() == []

    database.run(scenario)


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
    files = list(database.location.parent.iterdir())
    assert files
    assert not any(secret.encode() in file.read_bytes() for file in files)


# -- settings and the whole ---------------------------------------------------------------------


def test_the_server_id_is_made_once(database: Harness) -> None:
    async def scenario(db: Database) -> str:
        ids = await asyncio.gather(*[db.server_id() for _ in range(5)])
        assert len(set(ids)) == 1
        return ids[0]

    assert database.run(scenario) == database.run(scenario)


def test_settings_are_kept(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        assert await db.get_setting("k") is None
        await db.set_setting("k", "v")
        await db.set_setting("k", "w")

    database.run(scenario)
    assert database.run(lambda db: db.get_setting("k")) == "w"


def test_a_sound_database_is_found_sound_and_its_backup_opens(
    database: Harness, tmp_path: Path
) -> None:
    async def scenario(db: Database) -> str:
        session = await db.insert_session(make_session())
        await db.insert_snapshot(make_snapshot(session))
        assert await db.check() == []
        await db.backup(tmp_path / "copy.db")
        with pytest.raises(InvalidRequest):
            await db.backup(tmp_path / "copy.db")
        await db.insert_session(make_session(name="later"))
        return session.id

    id = database.run(scenario)

    async def read() -> None:
        copy = await open_database(tmp_path / "copy.db")
        try:
            assert (await copy.get_session(None, id)).state is RUNNING
            with pytest.raises(SessionNotFound):
                await copy.get_session("ten_a", "later")
        finally:
            await copy.close()

    asyncio.run(read())


def test_a_change_whose_caller_was_cancelled_is_still_whole(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = make_session()
        task = asyncio.ensure_future(db.insert_session(session))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await db.set_setting("after", "it")
        assert await db.get_session(None, session.id) == session

    database.run(scenario)
