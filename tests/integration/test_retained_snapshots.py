"""Retention on real sessions: what the policy keeps stays usable, the rest is freed and named."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SnapshotNotFound
from support.servers import ServerProcess, eventually

pytestmark = pytest.mark.privileged

FEW = {"keep_all_for": 0, "keep_last": 2, "hourly": 0, "daily": 0}


def turn(session: Session, number: int) -> str:
    """A turn that changes something; its snapshot."""
    session.exec(f"echo {number} > /root/number; echo {number} > /root/own-{number}")
    (head,) = [one.id for one in session.history() if one.current]
    return head


def named(session: Session) -> list[str]:
    """What the event log says was given up."""
    events = [event for event in session.events() if event.kind == "retention"]
    return [id for event in events for id in event.details["removed"]]


def test_the_policy_keeps_some_and_the_rest_is_freed_and_named(
    shared_server: ServerProcess, client: Sojourn
) -> None:
    session = client.sessions.create(policy={"retention": FEW})
    try:
        base = session.history()[0].id
        mine = session.snapshot("mine").id
        turns = [turn(session, number) for number in range(6)]

        def thinned() -> bool:
            return {one.id for one in session.history()} == {base, mine, *turns[-2:]}

        eventually(thinned)
        assert named(session) == turns[:-2]
        with pytest.raises(SnapshotNotFound):
            session.rollback(turns[0])

        def freed() -> bool:
            return _rows(shared_server.data, session.id) == {base, mine, *turns[-2:]}

        eventually(freed)
        history = {one.id: one.parent for one in session.history()}
        assert history == {base: None, mine: base, turns[4]: mine, turns[5]: turns[4]}
        assert session.verify().ok
        assert {change.path for change in session.diff().changes} >= {"/root/own-5"}
        session.rollback(turns[4])
        assert session.files.read("/root/number") == b"4\n"
        assert session.exec("ls /root/own-* | wc -l").stdout.strip() == b"5"
    finally:
        session.delete()


def test_what_a_fork_was_made_from_stays(client: Sojourn) -> None:
    session = client.sessions.create(policy={"retention": FEW})
    forks: list[Session] = []
    try:
        point = turn(session, 0)
        forks = session.fork(snapshot=point)
        turns = [turn(session, number) for number in range(1, 6)]
        eventually(lambda: set(named(session)) == set(turns[:-2]))
        assert point in {one.id for one in session.history()}
        forks[0].exec("echo own > /root/number")
        forks[0].rollback(point)
        assert forks[0].files.read("/root/number") == b"0\n"
    finally:
        for one in [session, *forks]:
            one.delete()


def test_another_policy_is_followed_and_none_keeps_all(client: Sojourn) -> None:
    session = client.sessions.create(policy={"retention": None})
    try:
        turns = [turn(session, number) for number in range(4)]
        assert set(turns) <= {one.id for one in session.history()}
        assert named(session) == []
        session.update(policy={"retention": FEW})
        last = turn(session, 4)
        eventually(lambda: named(session) == turns[:-1])
        assert {turns[-1], last} <= {one.id for one in session.history()}
    finally:
        session.delete()


def _rows(data: Path, session: str) -> set[str]:
    connection = sqlite3.connect(f"file:{data / 'sojourn.db'}?mode=ro", uri=True)
    try:
        query = "SELECT id FROM snapshots WHERE session = ?"
        return {row[0] for row in connection.execute(query, (session,))}
    finally:
        connection.close()
