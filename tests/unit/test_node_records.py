"""Records of sessions that several nodes write to one object store: one of before never replaces a
newer one, and nobody writes for a session that is another's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sojourn.database import Database, open_database
from sojourn.database.writes import UpdateSession
from sojourn.errors import StaleEpoch
from sojourn.model import Session
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord
from sojourn.server.stored_records import StoredRecords
from support.databases import insert_session, make_session

ME, OTHER = "nod_me", "nod_other"


class Sender:
    """Writes at once; `before` is awaited before each replacement."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.before: Callable[[], Awaitable[None]] | None = None
        self.written = 0

    async def put_tenant(self, record: Any) -> None:
        self._repository.put_tenant(record)

    async def replace_session(self, record: SessionRecord, version: str | None) -> None:
        before, self.before = self.before, None
        if before is not None:
            await before()
        self._repository.replace_session(record, version)
        self.written += 1


class World:
    def __init__(self, database: Database, repository: Repository, tenant: str) -> None:
        self.database = database
        self.repository = repository
        self.tenant = tenant

    def writer(self, holder: str) -> tuple[StoredRecords, Sender]:
        sender = Sender(self.repository)
        return StoredRecords(self.database, lambda: sender, holder), sender  # type: ignore[arg-type, return-value]

    async def session(self, holder: str | None) -> Session:
        return await insert_session(self.database, make_session(tenant=self.tenant, holder=holder))

    async def change(self, session: Session, **changes: Any) -> None:
        now = await self.database.get_session(None, session.id)
        await self.database.commit([UpdateSession(now.id, {now.state}, now.epoch, changes)])

    def stored(self, session: Session) -> Session:
        return self.repository.read_session(self.tenant, session.id).session


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        repository = Repository.open((tmp_path / "objects").as_uri(), None, create=True)
        try:
            tenant = await database.create_tenant("one")
            async with asyncio.timeout(30):
                await scenario(World(database, repository, tenant.id))
        finally:
            repository.close()
            await database.close()

    asyncio.run(whole())


def test_a_record_of_before_never_replaces_a_newer_one(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session(None)
        mine, slow = world.writer(ME)
        theirs, _ = world.writer(OTHER)
        await mine.write(session.id, world.repository)
        await world.change(session, labels={"seen": "1"})

        async def overtaken() -> None:
            await world.change(session, labels={"seen": "2"})
            await theirs.write(session.id, world.repository)

        slow.before = overtaken
        await mine.write(session.id, world.repository)
        assert world.stored(session).labels == {"seen": "2"}

    run(tmp_path, scenario)


def test_a_node_writes_nothing_for_what_another_one_holds(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session(OTHER)
        mine, sender = world.writer(ME)
        await mine.write(session.id, world.repository)
        assert sender.written == 0
        # But what only its disk had, it makes known.
        await mine.write(session.id, world.repository, sent="snp_none")
        assert sender.written == 1
        assert world.stored(session).holder is None

    run(tmp_path, scenario)


def test_a_session_that_another_database_has_is_left_alone(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        session = await world.session(ME)
        mine, sender = world.writer(ME)
        await mine.write(session.id, world.repository)
        found = world.repository.read_session(world.tenant, session.id)
        other = SessionRecord(found.session, [], found.written_at, "another database")
        world.repository.put_session(other, take_over=True)
        await world.change(session, labels={"seen": "1"})
        with pytest.raises(StaleEpoch):
            await mine.write(session.id, world.repository)
        assert sender.written == 1
        assert mine.pauses.cause(session.id) is not None

    run(tmp_path, scenario)
