"""What tests of many nodes share: nodes that have started, and sessions they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from sojourn.database import Database, SnapshotRecord, open_database
from sojourn.database.writes import InsertSession, InsertSnapshot, UpdateSession
from sojourn.model import Session
from sojourn.model.nodes import Fence, Node, Resources
from support.databases import RUNNING, SUSPENDED, Harness, make_session, make_snapshot

LONG = 600.0


async def start(db: Database, id: str, *, lease: float = LONG) -> Node:
    """A new incarnation of a node."""
    return await db.start_node(
        id,
        address=f"{id}:7000",
        capacity=Resources(cpus=8.0, memory_bytes=1 << 34, sessions=100),
        runtime="runsc-1",
        cpu=["avx2", "sse4_2"],
        version="1.0",
        lease=lease,
    )


async def joined(db: Database, id: str, *, lease: float = LONG) -> Node:
    """A node that has joined and started."""
    await db.add_node(id, f"name-{id}")
    return await start(db, id, lease=lease)


@contextlib.asynccontextmanager
async def opened(database: Harness, fence: Fence | None = None) -> AsyncIterator[Database]:
    """The database once more, with connections and memories of its own, as another process has."""
    db = await open_database(database.location, fence)
    try:
        yield db
    finally:
        await db.close()


async def lose(db: Database, node: Node) -> Node:
    """End a node's lease and wait until it is lost."""
    await db.stop_node(node.fence)
    while True:
        lost = await db.lose_node(0.0)
        if lost is not None and lost.id == node.id:
            return lost
        await asyncio.sleep(0.01)


async def held(db: Database, holder: str | None, **fields: Any) -> Session:
    """A new session that a node holds."""
    session = make_session(**({"holder": holder} | fields))
    await db.commit([InsertSession(session)])
    return session


async def line(
    db: Database, session: Session, durable: list[bool], **fields: Any
) -> list[SnapshotRecord]:
    """A line of snapshots, the last one the session's head; which of them the object store has."""
    made: list[SnapshotRecord] = []
    for number, has in enumerate(durable):
        made.append(
            make_snapshot(
                session,
                parent=made[-1].id if made else None,
                created_at=session.created_at + number,
                durable_at=1.0 if has else None,
                **({"node": session.holder} | fields),
            )
        )
    head = UpdateSession(session.id, {RUNNING, SUSPENDED}, session.epoch, {"head": made[-1].id})
    await db.commit([*[InsertSnapshot(one) for one in made], head])
    return made
