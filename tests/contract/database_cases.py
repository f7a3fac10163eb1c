"""What the database contract tests share: a database to run a scenario against, and records.

Every test of the contract takes the `database` fixture, so that it runs on each connector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from sojourn.database import (
    Database,
    SandboxRecord,
    SandboxState,
    SnapshotRecord,
    open_database,
)
from sojourn.model import Limits, Policy, Session, SessionState, SnapshotKind, new_id

T = TypeVar("T")
RUNNING, PAUSED, SUSPENDED = SessionState.RUNNING, SessionState.PAUSED, SessionState.SUSPENDED
CONNECTORS = ["sqlite"]


class Harness:
    """Runs scenarios, each with the database freshly opened and closed after it."""

    def __init__(self, connector: str, directory: Path) -> None:
        self.location = {"sqlite": directory / "sojourn.db"}[connector]

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


def make_sandbox(session: Session, **fields: Any) -> SandboxRecord:
    values: dict[str, Any] = {
        "id": new_id("sbx"),
        "session": session.id,
        "epoch": session.epoch,
        "node": "local",
        "driver": "gvisor",
        "directory": "/var/lib/sojourn/sandboxes/x",
        "spec": {"root": "/x/root", "limits": {"cpus": 2.0}, "argv": ["a"]},
        "state": SandboxState.PLACING,
        "created_at": time.time(),
    }
    return SandboxRecord(**(values | fields))
