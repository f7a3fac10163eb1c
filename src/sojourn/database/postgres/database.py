"""The database on a PostgreSQL server.

Guarantee: what `sojourn.database.base` promises, also between several processes, and while the
server is restarted: calls wait for it for half a minute. How transactions are kept apart and why
so is told in `transactions`.
"""

from __future__ import annotations

import asyncio

from sojourn.database.engine import Engine
from sojourn.database.postgres.connections import Connection
from sojourn.database.postgres.failures import closed
from sojourn.database.postgres.migrate import migrate
from sojourn.database.postgres.place import read_place
from sojourn.database.postgres.reader import PostgresReader
from sojourn.database.postgres.signals import PostgresSignals
from sojourn.database.postgres.writer import PostgresWriter
from sojourn.database.sql_database import SqlDatabase

_MIGRATION_SECONDS = 3600.0


async def open_postgres(url: str) -> SqlDatabase:
    """Open the database, making or migrating its tables. Raises InvalidRequest (the URL), HostUnfit
    (newer, refused, something else), Unreachable."""
    loop = asyncio.get_running_loop()
    place = read_place(url)
    reader = PostgresReader(place)
    try:

        def work(connection: Connection) -> None:
            migrate(connection, place.shown)

        await reader.run(work, _MIGRATION_SECONDS)
        writer = PostgresWriter(place, loop)
    except BaseException:
        await reader.close()
        raise
    engine = Engine(
        writer=writer,
        reader=reader,
        closed=lambda: closed(place.shown),
        signals=PostgresSignals(place, loop, reader, writer.refuse),
    )
    return SqlDatabase(engine, loop)
