"""What a node's process is told by others at once, so that it need not wait for its next look."""

from __future__ import annotations

import asyncio

from sojourn.database import Database, open_database
from sojourn.database.writes import AppendEvent
from support.databases import Harness, PostgresHarness, insert_session, make_session


def test_a_node_hears_what_it_is_told_and_nothing_else(postgres: PostgresHarness) -> None:
    postgres.server.empty(postgres.name)

    async def scenario(here: Database) -> None:
        other = await open_database(postgres.location)
        heard: asyncio.Queue[str | None] = asyncio.Queue()
        try:
            here.hear_node("nod_here", heard.put_nowait)
            async with asyncio.timeout(20):
                assert await heard.get() is None  # what came before is not known
                session = await insert_session(other, make_session())
                await other.append_event(AppendEvent(session.id, "turn"))
                other.tell_node("nod_there", "ses_1")
                other.tell_node("nod_here", "ses_2")
                assert await heard.get() == "ses_2"
                # Whoever follows a log hears of it, too, on the same connection.
                follow = here.follow_events(session.id)
                assert (await anext(follow)).kind == "turn"
                next_one = asyncio.ensure_future(anext(follow))
                assert await heard.get() is None  # it listens anew
                await other.append_event(AppendEvent(session.id, "more"))
                assert (await next_one).kind == "more"
                other.tell_node("nod_here", "ses_3")
                assert await heard.get() == "ses_3"
            assert heard.empty()
        finally:
            await other.close()

    postgres.run(scenario)


def test_where_nobody_else_is_nothing_is_told(database: Harness) -> None:
    async def scenario(here: Database) -> None:
        here.tell_node("nod_there", "ses_1")
        assert await here.list_nodes() == []

    database.run(scenario)
