"""The metadata database: who owns consistency.

Guarantee: callers see only `Database`, its records and its writes; which engine is behind them is
decided by the URL, here.
"""

from __future__ import annotations

from pathlib import Path

from sojourn.database.base import Database
from sojourn.database.records import (
    Durability,
    DurableObjects,
    EffectRecord,
    Event,
    ObjectStore,
    Operation,
    OperationState,
    Pruned,
    References,
    Removal,
    Role,
    SessionPage,
    SnapshotRecord,
    Tenant,
    Token,
)
from sojourn.database.sqlite.database import open_sqlite
from sojourn.errors import Unsupported
from sojourn.model.nodes import Fence

__all__ = [
    "Database",
    "Durability",
    "DurableObjects",
    "EffectRecord",
    "Event",
    "ObjectStore",
    "Operation",
    "OperationState",
    "Pruned",
    "References",
    "Removal",
    "Role",
    "SessionPage",
    "SnapshotRecord",
    "Tenant",
    "Token",
    "database_place",
    "open_database",
]


def database_place(location: str | Path) -> str:
    """Where a database is, for people: without a password or any other setting."""
    told = str(location)
    if told.startswith(("postgresql://", "postgres://")):
        from sojourn.database.postgres.place import read_place  # only where it is needed

        return read_place(told).shown
    return told.removeprefix("sqlite://")


async def open_database(location: str | Path, fence: Fence | None = None) -> Database:
    """Open the database at a path or URL (`sqlite:///absolute/path`, `postgresql://...`), with a
    fence in the name of a node."""
    database = await _open(location)
    if fence is not None:
        database.fence(fence)
    return database


async def _open(location: str | Path) -> Database:
    text = str(location)
    if text.startswith(("postgresql://", "postgres://")):
        # Where it is not used nothing of it is loaded.
        from sojourn.database.postgres.database import open_postgres

        return await open_postgres(text)
    if text.startswith("sqlite://"):
        text = text.removeprefix("sqlite://")
    elif "://" in text:
        kind = text.split("://", 1)[0]
        raise Unsupported(
            f"databases of kind {kind} are not supported",
            next_step="Give a path, sqlite:///path or postgresql://host/database.",
        )
    return await open_sqlite(Path(text))
