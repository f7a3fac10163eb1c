"""The database in one SQLite file.

Guarantee: what `sojourn.database.base` promises. WAL with full sync; all writes go through one
thread, in order; reads never wait for it. Several processes may have the file open: SQLite's lock
and the compare-and-swap keep them apart, though only one server is meant to.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from pathlib import Path

from sojourn.database.engine import Engine
from sojourn.database.sql_database import SqlDatabase
from sojourn.database.sqlite.failures import closed, translate
from sojourn.database.sqlite.reader import SqliteReader
from sojourn.database.sqlite.writer import SqliteWriter
from sojourn.errors import HostUnfit, StorageFull


async def open_sqlite(path: Path) -> SqlDatabase:
    """Open the file, creating or migrating it. Raises HostUnfit (newer, not writable),
    IntegrityError (damaged), StorageFull, Unreachable (locked)."""
    loop = asyncio.get_running_loop()
    try:
        writer = await asyncio.to_thread(SqliteWriter, path, loop)
    except sqlite3.Error as error:
        raise translate(error, path) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"no room for the database {path}: {error}") from error
        raise HostUnfit(
            f"the database {path} cannot be opened: {error}",
            next_step=f"Give the server's user the right to write {path.parent}.",
        ) from error
    try:
        engine = Engine(writer=writer, reader=SqliteReader(path), closed=lambda: closed(path))
        return SqlDatabase(engine, loop)
    except BaseException as error:
        await writer.close()
        if isinstance(error, sqlite3.Error):
            raise translate(error, path) from error
        raise
