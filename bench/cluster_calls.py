"""What nodes and servers ask of a cluster's database, as the measure of it calls them.

Each call is made in the name of the node whose session it is about, through one of a few database
objects: whose name a change is made in is settled when it is asked for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import msgspec

from bench import cluster_rows
from sojourn.database import SnapshotRecord
from sojourn.database.base import Database
from sojourn.database.sql_database import cursor_of
from sojourn.database.writes import (
    AppendEvent,
    FinishOperation,
    InsertSession,
    InsertSnapshot,
    SetStep,
    UpdateSession,
)
from sojourn.model import Limits, Policy, Session, SessionState, SnapshotKind, new_id
from sojourn.model.nodes import Node, Resources

LEASE = 15.0
HELD = LEASE * 20  # what is asked for: on a busy machine no node is to be lost by itself
RUNNING, SUSPENDED = SessionState.RUNNING, SessionState.SUSPENDED


class Cluster:
    """Some database objects and the nodes they speak for, and one that is a server's."""

    def __init__(self, server: Database, databases: list[Database], nodes: list[Node]) -> None:
        self.server = server
        self.databases = databases
        self.fences = {node.id: node.fence for node in nodes}
        self.renewals: list[float] = []
        self._turn = 0

    def as_node(self, node: str | None = None) -> tuple[Database, str]:
        """A database that speaks for a node in the next call, which takes its name at once."""
        self._turn += 1
        database = self.databases[self._turn % len(self.databases)]
        node = node or random.choice(list(self.fences))
        database.fence(self.fences[node])
        return database, node

    async def renew(self) -> None:
        """Renew the leases of all, spread over time, until it is cancelled."""
        nodes = list(self.fences)
        pause = LEASE / 5 / len(nodes)
        due = time.perf_counter()
        while True:
            for number, node in enumerate(nodes):
                due += pause
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                began = time.perf_counter()
                database = self.databases[number % len(self.databases)]
                used = Resources(cpus=4.0, sessions=50)
                await database.renew_node(self.fences[node], lease=HELD, used=used)
                self.renewals.append(time.perf_counter() - began)


def new_session(node: str) -> Session:
    now = time.time()
    return Session(
        id=new_id("ses"),
        tenant=f"ten_{random.randrange(cluster_rows.TENANTS)}",
        name=None,
        labels={"user": "1"},
        template="debian",
        env={},
        limits=Limits(),
        policy=Policy(),
        driver="gvisor",
        state=SessionState.CREATING,
        epoch=0,
        head=None,
        parent_session=None,
        forked_from=None,
        sandbox=None,
        node=None,
        idle_deadline=None,
        lifetime_deadline=None,
        cause=None,
        created_at=now,
        updated_at=now,
        holder=node,
    )


# -- what is measured: each answers when its last transaction is acknowledged --------------------


async def create(cluster: Cluster, made: list[Session]) -> None:
    """begin with the session's row and a key; commit as running with an event."""
    database, node = cluster.as_node()
    session = new_session(node)
    operation, _ = await database.begin(
        tenant=session.tenant,
        session=session.id,
        verb="create",
        request={"actor": "tenant", "template": "debian"},
        server=node,
        key=new_id("key"),
        creates=True,
        also=[InsertSession(session)],
        holder=node,
    )
    made.append(await _placed(cluster, session, operation.id, "create"))


async def _placed(cluster: Cluster, session: Session, operation: str, verb: str) -> Session:
    database, node = cluster.as_node(session.holder)
    changes = {
        "state": RUNNING,
        "epoch": session.epoch + 1,
        "sandbox": new_id("sbx").replace("_", "-"),
        "node": node,
        "idle_deadline": time.time() + 900,
    }
    results = await database.commit(
        [
            FinishOperation(operation),
            AppendEvent(session.id, verb, actor="tenant", operation=operation),
            UpdateSession(session.id, {session.state}, session.epoch, changes),
        ]
    )
    placed: Session = results[-1]
    return placed


async def turn(cluster: Cluster, made: list[Session]) -> None:
    """The event of a turn."""
    session = random.choice(made)
    database, _ = cluster.as_node(session.holder)
    details = {"command": "python3 -c pass", "exit_code": 0}
    await database.append_event(AppendEvent(session.id, "turn", actor="tenant", details=details))


async def suspend(cluster: Cluster, made: list[Session]) -> None:
    """begin; the step with the plan of the seal; commit with a snapshot and an event; the mark that
    the object store has it."""
    session = made.pop(0)
    database, node = cluster.as_node(session.holder)
    operation, _ = await database.begin(
        tenant=session.tenant,
        session=session.id,
        verb="suspend",
        request={"actor": "tenant"},
        server=node,
        holder=node,
    )
    taken = snapshot(session)
    database, _ = cluster.as_node(node)
    await database.commit([SetStep(operation.id, "sealed", {"plan": msgspec.to_builtins(taken)})])
    changes = {
        "state": SUSPENDED,
        "head": taken.id,
        "sandbox": None,
        "node": None,
        "idle_deadline": None,
    }
    database, _ = cluster.as_node(node)
    results = await database.commit(
        [
            InsertSnapshot(taken),
            FinishOperation(operation.id),
            AppendEvent(session.id, "suspend", actor="tenant", operation=operation.id),
            UpdateSession(session.id, {RUNNING}, session.epoch, changes),
        ]
    )
    database, _ = cluster.as_node(node)
    await database.mark_durable(taken.id, fingerprint=taken.fingerprint, at=time.time())
    made.append(results[-1])


def snapshot(session: Session) -> SnapshotRecord:
    name = new_id("snp")
    return SnapshotRecord(
        id=name,
        session=session.id,
        tenant=session.tenant,
        parent=session.head,
        kind=SnapshotKind.SUSPEND,
        label=None,
        created_at=time.time(),
        fingerprint=f"{name:0>64}",
        has_memory=True,
        memory_bytes=20_000_000,
        layer_bytes=100_000,
        layers=[f"{name}{part:036}" for part in range(6)],
        image=f"{name:0>64}",
        node=session.holder,
    )


async def resume(cluster: Cluster, made: list[Session]) -> None:
    """begin; commit as running."""
    session = made.pop(0)
    database, node = cluster.as_node(session.holder)
    operation, _ = await database.begin(
        tenant=session.tenant,
        session=session.id,
        verb="resume",
        request={"actor": "tenant"},
        server=node,
        holder=node,
    )
    made.append(await _placed(cluster, session, operation.id, "resume"))


async def release(cluster: Cluster, made: list[Session]) -> None:
    session = made.pop(0)
    assert session.holder is not None
    database, node = cluster.as_node(session.holder)
    fence = cluster.fences[node]
    made.append(await database.release_session(session.id, fence, session.epoch))


async def take(cluster: Cluster, made: list[Session]) -> None:
    session = made.pop(0)
    database, node = cluster.as_node()
    made.append(await database.take_session(session.id, cluster.fences[node], session.epoch))


async def by_id(cluster: Cluster, made: list[Session]) -> None:
    session = random.choice(made)
    database, _ = cluster.as_node()
    await database.get_session(session.tenant, session.id)


async def due(cluster: Cluster, made: list[Session]) -> None:
    """What a node's timers ask every second."""
    database, node = cluster.as_node()
    await database.due_sessions(time.time(), holder=node)


async def undurable(cluster: Cluster, made: list[Session]) -> None:
    """What a node's sender asks."""
    database, node = cluster.as_node()
    await database.undurable_snapshots(limit=100, node=node)


async def unfinished(cluster: Cluster, made: list[Session]) -> None:
    """What a node asks every two seconds."""
    database, node = cluster.as_node()
    await database.unfinished_operations(server=node)


async def kept(cluster: Cluster, made: list[Session]) -> None:
    """What a node's disk must keep: asked now and then."""
    database, node = cluster.as_node()
    await database.references(holder=node)


async def removable(cluster: Cluster, made: list[Session]) -> None:
    """What nobody needs any more, of a node's sessions."""
    database, node = cluster.as_node()
    await database.removable_snapshots(holder=node)


async def behind(cluster: Cluster, made: list[Session]) -> None:
    """What a node's metrics and a tenant's status ask: how far the object store is behind."""
    database, node = cluster.as_node()
    await database.durability(None, holder=node, waiting=True)


async def counts(cluster: Cluster, made: list[Session]) -> None:
    """A tenant's status."""
    database, _ = cluster.as_node()
    await database.count_sessions("ten_7")


async def all_counts(cluster: Cluster, made: list[Session]) -> None:
    """The operator's status."""
    database, _ = cluster.as_node()
    await database.count_sessions()


async def lost(cluster: Cluster, made: list[Session]) -> None:
    """What each server asks every second; nobody is lost."""
    assert await cluster.server.lose_node(LEASE) is None


Call = Callable[[Cluster, list[Session]], Awaitable[None]]
CHANGES: list[tuple[str, Call]] = [
    ("create", create),
    ("turn", turn),
    ("suspend", suspend),
    ("release", release),
    ("take", take),
    ("resume", resume),
]
READS: list[tuple[str, Call]] = [
    ("session by id", by_id),
    ("sessions of a node that are due", due),
    ("snapshots of a node to be sent", undurable),
    ("operations of a node", unfinished),
    ("what a node's disk must keep", kept),
    ("snapshots of a node that nobody needs", removable),
    ("how far the object store is behind, a node", behind),
    ("counts of sessions, one tenant", counts),
    ("counts of sessions, all", all_counts),
    ("looking for lost nodes", lost),
]


# -- lists and lost nodes ------------------------------------------------------------------------


def pages(size: int, began: float) -> list[tuple[str, Call]]:
    """Pages of lists: the first one, and one from the middle of the table."""
    middle = new_session("")
    middle = msgspec.structs.replace(
        middle, id=f"ses_{size // 2:024}", created_at=began + size // 2
    )

    def page(**asked: object) -> Call:
        async def call(cluster: Cluster, made: list[Session]) -> None:
            database, _ = cluster.as_node()
            await database.list_sessions(limit=100, **asked)  # type: ignore[arg-type]

        return call

    deep = cursor_of(middle)
    return [
        ("first page of 100, one tenant", page(tenant="ten_7")),
        ("page of 100 half way down, one tenant", page(tenant="ten_7", after=deep)),
        ("page of 100 half way down, all tenants", page(tenant=None, after=deep)),
        ("page of 100, by a label", page(tenant="ten_7", labels={"team": "7"})),
        ("page of 100, sessions of a node", page(tenant=None, holder="nod_7")),
    ]


async def lose(cluster: Cluster, server: Database, name: str) -> tuple[float, float, int]:
    """Seconds until a node is fenced and its live sessions are moved, until all are, and how many
    those are."""
    await server.stop_node(cluster.fences.pop(name))
    began = time.perf_counter()
    while (node := await server.lose_node(0.0)) is None or node.id != name:
        await asyncio.sleep(0.001)
    first, total = 0.0, 0
    while moved := await server.fail_over(name):
        total += len(moved)
        first = first or time.perf_counter() - began
    return first, time.perf_counter() - began, total
