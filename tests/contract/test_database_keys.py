"""What an idempotency key stands for, and who may supersede whom."""

from __future__ import annotations

import pytest

from sojourn.database import Database
from sojourn.errors import SessionBusy
from support.databases import Harness, insert_session, make_session


def test_a_key_names_its_operation_for_its_tenant_alone(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        assert await db.keyed_operation(session.tenant, "once") is None
        operation, _ = await db.begin(
            tenant=session.tenant,
            session=session.id,
            verb="delete",
            request={},
            server="srv",
            key="once",
        )
        known = await db.keyed_operation(session.tenant, "once")
        assert known is not None and known.id == operation.id
        assert await db.keyed_operation("ten_other", "once") is None
        await db.finish(operation.id)
        known = await db.keyed_operation(session.tenant, "once")
        assert known is not None and known.finished

    database.run(scenario)


def test_a_deletion_does_not_supersede_a_deletion(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        session = await insert_session(db, make_session())
        facts = {"tenant": session.tenant, "session": session.id, "request": {}, "server": "srv"}
        first, _ = await db.begin(verb="delete", supersede=True, **facts)
        with pytest.raises(SessionBusy) as refused:
            await db.begin(verb="delete", supersede=True, **facts)
        assert refused.value.details["operation"] == first.id
        assert not (await db.get_operation(None, first.id)).finished

    database.run(scenario)
