"""Taking over the unfinished operations of servers that are gone."""

from __future__ import annotations

import asyncio
import time

from sojourn.database import Database, Operation, open_database
from support.databases import Harness, insert_session, make_session


async def begin(db: Database, server: str) -> Operation:
    session = await insert_session(db, make_session())
    operation, _ = await db.begin(
        tenant="ten_a", session=session.id, verb="suspend", request={}, server=server
    )
    return operation


def test_what_others_left_unfinished_is_claimed_oldest_first(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        left = [await begin(db, "gone") for _ in range(3)]
        own = await begin(db, "me")
        done = await begin(db, "gone")
        await db.finish(done.id)
        after = time.time() + 1
        assert await db.claim("me", before=left[0].updated_at) == []
        first = await db.claim("me", before=after, limit=2)
        assert [one.id for one in first] == [one.id for one in left[:2]]
        assert {one.server for one in first} == {"me"}
        assert await db.get_operation(None, first[0].id) == first[0]
        assert [one.id for one in await db.claim("me", before=after)] == [left[2].id]
        assert await db.claim("me", before=after) == []
        assert (await db.get_operation(None, own.id)) == own

    database.run(scenario)


def test_of_many_that_claim_at_once_each_gets_others(database: Harness) -> None:
    async def scenario(db: Database) -> None:
        left = [await begin(db, "gone") for _ in range(40)]
        before = time.time()
        others = [await open_database(database.location) for _ in range(2)]
        try:
            claims = [
                each.claim(f"server-{n}", before=before, limit=5)
                for n, each in enumerate([db, *others] * 3)
            ]
            found = [one.id for part in await asyncio.gather(*claims) for one in part]
        finally:
            for other in others:
                await other.close()
        assert len(found) == len(set(found))
        assert set(found) <= {one.id for one in left}
        rest = await db.claim("last", before=before)
        assert len(found) + len(rest) == 40

    database.run(scenario)
