"""Nodes that write, take, give away and are lost in the middle of it, all at once: whatever comes
of it, a session is written by one node at a time, and what was acknowledged stays."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from sojourn.database import Database
from sojourn.database.writes import AppendEvent, InsertSnapshot, UpdateSession
from sojourn.errors import (
    Conflict,
    NodeFenced,
    SessionElsewhere,
    StaleEpoch,
    WrongState,
)
from sojourn.model import Session
from sojourn.model.nodes import Node
from support.databases import RUNNING, SUSPENDED, Harness, make_snapshot
from support.nodes import LONG, held, joined, opened, start

SESSIONS, LOSSES = 5, 6
REFUSED = (SessionElsewhere, StaleEpoch, WrongState, Conflict)


class Actor:
    """A node that does whatever comes to its mind with the sessions it believes to hold."""

    def __init__(self, db: Database, node: Node, dice: random.Random) -> None:
        self.db, self.node, self.dice = db, node, dice
        self.held: dict[str, Session] = {}
        self.acknowledged: list[tuple[str, int]] = []  # session, sequence of a write
        self.restarts = 0

    async def run(self, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                await self.step()
            except NodeFenced:
                self.restarts += 1
                self.node = await start(self.db, self.node.id)
                self.db.fence(self.node.fence)
                await self.reload()
            except REFUSED:
                await self.reload()

    async def reload(self) -> None:
        page = await self.db.list_sessions(None, holder=self.node.id)
        self.held = {session.id: session for session in page.items}

    async def step(self) -> None:
        session = self.dice.choice(list(self.held.values())) if self.held else None
        act = self.dice.random()
        if session is None or act < 0.15:
            await self.take()
        elif session.state is SUSPENDED and act < 0.4:
            released = await self.db.release_session(session.id, self.node.fence, session.epoch)
            assert released.holder is None
            del self.held[session.id]
        elif session.state is SUSPENDED:
            await self.write(session, state=RUNNING, epoch=session.epoch + 1)
        elif act < 0.6:
            await self.suspend(session)
        else:
            await self.write(session, labels={"step": str(act)})

    async def take(self) -> None:
        free = (await self.db.list_sessions(None, holder="")).items
        if free:
            chosen = self.dice.choice(free)
            taken = await self.db.take_session(chosen.id, self.node.fence, chosen.epoch)
            self.held[taken.id] = taken

    async def suspend(self, session: Session) -> None:
        durable = self.dice.random() < 0.6
        row = make_snapshot(
            session,
            parent=session.head,
            node=self.node.id,
            durable_at=1.0 if durable else None,
        )
        await self.db.commit([InsertSnapshot(row)])
        await self.write(session, state=SUSPENDED, head=row.id)

    async def write(self, session: Session, **changes: object) -> None:
        details = {
            "node": self.node.id,
            "incarnation": self.node.incarnation,
            "epoch": changes.get("epoch", session.epoch),
        }
        swap = UpdateSession(session.id, {session.state}, session.epoch, changes)
        updated, sequence = await self.db.commit(
            [swap, AppendEvent(session.id, "write", details=details)]
        )
        self.held[session.id] = updated
        self.acknowledged.append((session.id, sequence))


async def lose_some(
    server: Database, nodes: list[str], dice: random.Random, over: asyncio.Event
) -> None:
    """End leases and take what their nodes held, until that was something so many times."""
    losses = 0
    while losses < LOSSES:
        await asyncio.sleep(0.03)
        node = await server.get_node(dice.choice(nodes))
        try:
            await server.stop_node(node.fence)
        except NodeFenced:
            continue
        await asyncio.sleep(0.002)
        lost = await server.lose_node(0.0)
        while lost is not None and (moved := await server.fail_over(lost.id, limit=2)):
            losses += bool(moved)
    over.set()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_session_is_one_nodes_at_a_time_whatever_happens(database: Harness, seed: int) -> None:
    async def scenario(server: Database) -> None:
        dice = random.Random(seed)
        nodes = [await joined(server, f"nod_{name}", lease=LONG) for name in "ab"]
        ids = [(await held(server, None, state=SUSPENDED)).id for _ in range(SESSIONS)]
        async with opened(database, nodes[0].fence) as one, opened(database, nodes[1].fence) as two:
            actors = [
                Actor(db, node, random.Random(dice.random()))
                for db, node in zip((one, two), nodes, strict=True)
            ]
            names = [node.id for node in nodes]
            over = asyncio.Event()
            await asyncio.gather(
                *[actor.run(over) for actor in actors], lose_some(server, names, dice, over)
            )
        acknowledged = defaultdict(set)
        for actor in actors:
            for id, sequence in actor.acknowledged:
                acknowledged[id].add(sequence)
        assert acknowledged
        for id in ids:
            events = await server.list_events(id)
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
            writes = [event for event in events if event.kind == "write"]
            assert acknowledged[id] <= {event.sequence for event in writes}
            # Epochs only grow along the log, and each is one node's.
            epochs = [event.details["epoch"] for event in writes]
            assert epochs == sorted(epochs)
            writers = defaultdict(set)
            for event in writes:
                writers[event.details["epoch"]].add(event.details["node"])
            assert all(len(who) == 1 for who in writers.values())

    database.run(scenario)
    assert database.flaws() == []
