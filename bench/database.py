"""The database alone: how long a change, a read and a page take, one after the other and side by
side, among few sessions and many.

    python -m bench.database LOCATION [--rows N]

LOCATION is a path or a postgresql:// URL of an empty database; `--rows` fills one on PostgreSQL
with that many sessions first.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop

from sojourn.database import Database, SnapshotRecord, open_database
from sojourn.database.writes import AppendEvent, InsertSession, InsertSnapshot, UpdateSession
from sojourn.model import Session, SessionState, SnapshotKind, new_id, without_sandbox

TENANT = "ten_1"
TURNS = (SessionState.RUNNING, SessionState.PAUSED)

FILL = """
INSERT INTO sessions (id, tenant, name, labels, template, env, limits, policy, driver, state,
    epoch, idle_deadline, lifetime_deadline, created_at, updated_at, network)
SELECT 'ses_' || lpad(n::text, 24, '0'), 'ten_' || n %% 3,
    CASE WHEN n %% 10 = 0 THEN 'name' || n END,
    jsonb_build_object('user', (n %% 1000)::text), 'base', '{}', '{}', '{"on_expiry": "suspend"}',
    'gvisor', CASE WHEN n %% 50 = 0 THEN 'running' ELSE 'suspended' END, 1,
    CASE WHEN n %% 50 = 0 THEN 4e9 END, 4e9, n, n, '{}'
FROM generate_series(1, %s) AS n
"""


def new_session() -> Session:
    return without_sandbox(
        new_id("ses"),
        TENANT,
        labels={"user": "1"},
        template="base",
        driver="gvisor",
        state=SessionState.RUNNING,
        epoch=1,
        created_at=time.time(),
    )


def moved(session: Session) -> UpdateSession:
    to = TURNS[session.state is SessionState.RUNNING]
    changes = {"state": to, "epoch": session.epoch + 1}
    return UpdateSession(session.id, {session.state}, session.epoch, changes)


async def transition(database: Database, session: Session) -> Session:
    (changed,) = await database.commit([moved(session)])
    return changed


async def snapshot(database: Database, session: Session) -> Session:
    taken = SnapshotRecord(
        id=new_id("snp"),
        session=session.id,
        tenant=session.tenant,
        parent=session.head,
        kind=SnapshotKind.AUTO,
        label=None,
        created_at=time.time(),
        fingerprint="f",
        has_memory=True,
        memory_bytes=1,
        layer_bytes=1,
        layers=["a", "b"],
        image="i",
    )
    write = moved(session)
    write.changes["head"] = taken.id
    results = await database.commit(
        [InsertSnapshot(taken), AppendEvent(session.id, "snapshot", after=taken.id), write]
    )
    return results[-1]


async def event(database: Database, session: Session) -> Session:
    await database.append_event(AppendEvent(session.id, "turn"))
    return session


async def get(database: Database, session: Session) -> Session:
    return await database.get_session(TENANT, session.id)


async def page(database: Database, session: Session) -> Session:
    await database.list_sessions(TENANT, limit=100)
    return session


async def due(database: Database, session: Session) -> Session:
    await database.due_sessions(time.time())
    return session


MEASURED: list[tuple[str, Callable[[Database, Session], Awaitable[Session]], int]] = [
    ("state transition", transition, 400),
    ("snapshot, event, transition", snapshot, 200),
    ("event", event, 400),
    ("session by id", get, 800),
    ("page of 100", page, 60),
    ("sessions that are due", due, 100),
]


async def measure(database: Database) -> None:
    for name, call, times in MEASURED:
        for writers in (1, 8):
            sessions = [new_session() for _ in range(writers)]
            await database.commit([InsertSession(session) for session in sessions])
            took: list[float] = []

            async def work(session: Session, count: int) -> None:
                for _ in range(count):
                    began = time.perf_counter()
                    session = await call(database, session)
                    took.append(time.perf_counter() - began)

            began = time.perf_counter()
            await asyncio.gather(*[work(session, times // writers) for session in sessions])
            rate = len(took) / (time.perf_counter() - began)
            took.sort()
            half, most = (took[int(len(took) * part)] * 1000 for part in (0.5, 0.99))
            print(
                f"{name:28} {writers} at once  {rate:7.0f}/s"
                f"  p50 {half:6.2f} ms  p99 {most:6.2f} ms",
                flush=True,
            )


def fill(location: str, rows: int) -> None:
    """Straight into the table: through the interface a million would take minutes."""
    import psycopg

    with psycopg.connect(location, autocommit=True) as connection:
        connection.execute(FILL, (rows,))
        connection.execute("VACUUM ANALYZE")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("location")
    parser.add_argument("--rows", type=int, default=0)
    given = parser.parse_args()
    database = await open_database(given.location)
    try:
        if given.rows:
            await asyncio.to_thread(fill, given.location, given.rows)
        await measure(database)
    finally:
        await database.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
