"""What tests of the database share: one to run a scenario against, records, and single writes.

Every test of the contract takes the `database` fixture, so that it runs on each connector.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from sojourn.database import (
    Database,
    SnapshotRecord,
    open_database,
)
from sojourn.database.writes import InsertSession, InsertSnapshot, UpdateSession
from sojourn.model import Limits, Policy, Session, SessionState, SnapshotKind, new_id
from support.postgres import PostgresServer, dangling

T = TypeVar("T")
RUNNING, PAUSED, SUSPENDED = SessionState.RUNNING, SessionState.PAUSED, SessionState.SUSPENDED
CONNECTORS = ["sqlite", "postgres"]


class Harness(ABC):
    """Runs scenarios, each with the database freshly opened and closed after it."""

    location: str | Path

    def run(self, scenario: Callable[[Database], Awaitable[T]]) -> T:
        async def whole() -> T:
            database = await open_database(self.location)
            try:
                return await scenario(database)
            finally:
                await database.close()

        # The loop the server runs on; its handles know less than those of asyncio.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(whole())

    @abstractmethod
    def flaws(self) -> list[str]:
        """What the engine finds damaged or dangling."""

    @abstractmethod
    def operation_states(self, session: str) -> dict[str, str]:
        """All operations of a session that are kept, oldest first: their states by id."""

    @abstractmethod
    def holds(self, content: bytes) -> bool:
        """Whether some bytes are anywhere in what is on disk."""


class SqliteHarness(Harness):
    """A file."""

    def __init__(self, directory: Path) -> None:
        self.location: Path = directory / "sojourn.db"

    def flaws(self) -> list[str]:
        return flaws(self.location)

    def operation_states(self, session: str) -> dict[str, str]:
        return operation_states(self.location, session)

    def holds(self, content: bytes) -> bool:
        return any(content in file.read_bytes() for file in self.location.parent.iterdir())


class PostgresHarness(Harness):
    """A database of a server that runs already."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server = server
        self.name = name
        self.location: str = server.url(name)

    def flaws(self) -> list[str]:
        with self.server.connect(self.name) as connection:
            return dangling(connection)

    def operation_states(self, session: str) -> dict[str, str]:
        query = "SELECT id, state FROM operations WHERE session = %s ORDER BY created_at, id"
        with self.server.connect(self.name) as connection:
            return {str(id): str(state) for id, state in connection.execute(query, (session,))}

    def holds(self, content: bytes) -> bool:
        with self.server.connect(self.name) as connection:
            connection.execute("CHECKPOINT")
        files = [file for file in self.server.data.rglob("*") if file.is_file()]
        return any(content in file.read_bytes() for file in files)


def make_session(**fields: Any) -> Session:
    now = time.time()
    values: dict[str, Any] = {
        "id": new_id("ses"),
        "tenant": "ten_a",
        "name": None,
        "labels": {},
        "template": "base",
        "env": {},
        "limits": Limits(),
        "policy": Policy(),
        "driver": "gvisor",
        "state": RUNNING,
        "epoch": 1,
        "head": None,
        "parent_session": None,
        "forked_from": None,
        "sandbox": None,
        "node": None,
        "idle_deadline": None,
        "lifetime_deadline": None,
        "cause": None,
        "created_at": now,
        "updated_at": now,
    }
    return Session(**(values | fields))


def make_snapshot(session: Session, **fields: Any) -> SnapshotRecord:
    values: dict[str, Any] = {
        "id": new_id("snp"),
        "session": session.id,
        "tenant": session.tenant,
        "parent": None,
        "kind": SnapshotKind.AUTO,
        "label": None,
        "created_at": time.time(),
        "fingerprint": "ff",
        "has_memory": True,
        "memory_bytes": 10,
        "layer_bytes": 20,
        "layers": ["base", "layer-1"],
        "image": "image-1",
    }
    return SnapshotRecord(**(values | fields))


# -- single writes ------------------------------------------------------------------------------


async def insert_session(database: Database, session: Session) -> Session:
    stored: Session = (await database.commit([InsertSession(session)]))[0]
    return stored


async def update_session(
    database: Database,
    id: str,
    *,
    expect_state: Collection[SessionState],
    expect_epoch: int,
    **changes: Any,
) -> Session:
    write = UpdateSession(id, expect_state, expect_epoch, changes)
    updated: Session = (await database.commit([write]))[0]
    return updated


async def insert_snapshot(database: Database, snapshot: SnapshotRecord) -> None:
    await database.commit([InsertSnapshot(snapshot)])


# -- the file below the connector ---------------------------------------------------------------


def flaws(path: Path) -> list[str]:
    """What SQLite finds damaged or dangling in a file."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
        dangling = [str(row) for row in connection.execute("PRAGMA foreign_key_check")]
    return [line for line in found if line != "ok"] + dangling


def operation_states(path: Path, session: str) -> dict[str, str]:
    """All operations of a session that a file holds, oldest first: their states by id."""
    query = "SELECT id, state FROM operations WHERE session = ? ORDER BY created_at, id"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute(query, (session,)).fetchall())
