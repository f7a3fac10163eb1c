"""Sessions that hold templates: apart from sessions by name, list and count, and yet kept alike."""

from __future__ import annotations

import msgspec
import pytest

from sojourn.database import Database
from sojourn.database.writes import InsertSession, UpdateSession
from sojourn.errors import InvalidRequest, NameTaken, SessionNotFound, TemplateNotFound
from sojourn.model import SessionKind, SessionState
from support.databases import SUSPENDED, Harness, insert_session, make_session


def test_templates_are_no_sessions(database: Harness) -> None:
    async def work(db: Database) -> None:
        session = await insert_session(db, make_session(name="same"))
        template = msgspec.structs.replace(
            make_session(name="same", tenant=session.tenant, state=SessionState.SUSPENDED),
            kind=SessionKind.TEMPLATE,
        )
        await db.commit([InsertSession(template)])
        assert (await db.get_session(session.tenant, "same")).id == session.id
        assert (await db.get_session(None, "same")).id == session.id
        assert await db.get_template(session.tenant, "same") == template
        assert (await db.get_session(None, template.id)) == template
        with pytest.raises(TemplateNotFound):
            await db.get_template("ten_other", "same")
        page = await db.list_sessions(session.tenant)
        assert [one.id for one in page.items] == [session.id]
        page = await db.list_sessions(None, kind=SessionKind.TEMPLATE)
        assert [one.id for one in page.items] == [template.id]
        both = {one.id for one in (await db.list_sessions(None, kind=None)).items}
        assert both == {session.id, template.id}
        assert sum((await db.count_sessions(session.tenant)).values()) == 1
        again = msgspec.structs.replace(template, id=make_session().id)
        with pytest.raises(NameTaken):
            await db.commit([InsertSession(again)])
        change = UpdateSession(
            template.id, {SUSPENDED}, template.epoch, changes={"kind": SessionKind.SESSION}
        )
        with pytest.raises(InvalidRequest):
            await db.commit([change])
        await db.commit(
            [
                UpdateSession(
                    template.id,
                    {SUSPENDED},
                    template.epoch,
                    changes={"state": SessionState.DELETED},
                )
            ]
        )
        with pytest.raises(TemplateNotFound):
            await db.get_template(session.tenant, "same")
        with pytest.raises(SessionNotFound):
            await db.get_session(None, template.id)
        await db.commit([InsertSession(again)])

    database.run(work)
