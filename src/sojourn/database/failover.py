"""Taking the sessions of a lost node from it.

Guarantee: a session goes to the newest snapshot on its line that the object store has, and says
what that loses; what was under way on the node ends with a typed error, and a deletion that had
begun is completed. Each session is moved with all that belongs to it in one transaction, by one of
those who try, and only while the node is lost: one that starts again keeps what was not taken from
it yet. What is not durable stays on record: when the lost disk comes back, it can still be sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sojourn.database.apply import put_effect
from sojourn.database.engine import Statements
from sojourn.database.records import Operation, OperationState
from sojourn.database.rows import OPERATIONS, SESSIONS, encode_json
from sojourn.database.writes import PutEffect
from sojourn.errors import ErrorBody, Interrupted, to_body
from sojourn.lifecycle import lifetime_after
from sojourn.model.network import Effect, lasting
from sojourn.model.nodes import FailedOver
from sojourn.model.sessions import Session, SessionState

_OPERATIONS = 1000  # of sessions that are not the node's any more, in one transaction


class Loss(msgspec.Struct, frozen=True):
    """A node that was lost: until when its sandboxes may have run, and what its time was then."""

    node: str
    name: str
    until: float
    now: float


class Line(msgspec.Struct, frozen=True):
    """What the object store has of the line of a session's head: the newest snapshot there (None:
    nothing), when it (or the oldest one) was taken, how many come after it, and when the head was
    taken."""

    durable: str | None
    taken_at: float
    undurable: int
    head_at: float


class Move(msgspec.Struct, frozen=True):
    """What becomes of one session."""

    session: Session
    state: SessionState
    head: str | None
    cause: str | None
    undurable: int
    lost_seconds: float


def decide(session: Session, line: Line | None, loss: Loss, *, deleting: bool) -> Move:
    """Where a session of a lost node goes. `line` is None where it has no head."""
    undurable = line.undurable if line is not None else 0
    if deleting:
        return Move(session, SessionState.DELETED, session.head, None, undurable, 0.0)
    durable = line.durable if line is not None else None
    if durable is None and (session.head is not None or session.live or not _settled(session)):
        cause = f"node {loss.name} was lost, and the object store has no snapshot of the session"
        lost = max(0.0, _until(session, line, loss) - session.created_at)
        return Move(session, SessionState.FAILED, session.head, cause, undurable, lost)
    state = session.state if _settled(session) else SessionState.SUSPENDED
    lost = 0.0 if line is None else max(0.0, _until(session, line, loss) - line.taken_at)
    hit = lost > 0.0 or not _settled(session)
    told = f"node {loss.name} was lost" if hit else session.cause
    return Move(session, state, durable, told, undurable, lost)


def _until(session: Session, line: Line | None, loss: Loss) -> float:
    """Until when the session did something, as far as that can be known."""
    return loss.until if line is None or not _settled(session) else line.head_at


def _settled(session: Session) -> bool:
    """Whether it needs no sandbox, now or soon."""
    return session.state in (SessionState.SUSPENDED, SessionState.FAILED)


def take_over(statements: Statements, node: str, limit: int) -> list[FailedOver]:
    """See `Database.fail_over`; in a transaction."""
    rows = statements.run("lost_node", {"id": node})
    if not rows:
        return []
    name, until, now = rows[0]
    loss = Loss(node, name, min(now, until if until is not None else now), now)
    rows = statements.run("sessions_of_lost_node", {"node": node, "limit": limit})
    sessions = [SESSIONS.read(row) for row in rows]
    if not sessions:
        # What is left of sessions that others hold by now, or that are deleted.
        _interrupt(statements, _operations(statements, node, None), loss)
        return []
    ids = encode_json([session.id for session in sessions])
    lines = {id: Line(*line) for id, *line in statements.run("durable_lines", {"sessions": ids})}
    operations = _operations(statements, node, ids)
    deletions = {one.session: one for one in operations if one.verb == "delete"}
    moves = [
        decide(session, lines.get(session.id), loss, deleting=session.id in deletions)
        for session in sessions
    ]
    _move(statements, moves, loss)
    _interrupt(statements, [one for one in operations if one.verb != "delete"], loss)
    _finish(statements, deletions.values(), OperationState.SUCCEEDED, None)
    _end_effects(statements, ids, loss)
    _record(statements, moves, deletions, loss)
    return [
        FailedOver(move.session.id, move.session.head, move.head, move.state, move.lost_seconds)
        for move in moves
    ]


def _operations(statements: Statements, node: str, sessions: str | None) -> list[Operation]:
    # A session has few unfinished ones: at most one that is exclusive.
    asked = {"node": node, "sessions": sessions, "limit": _OPERATIONS}
    return [OPERATIONS.read(row) for row in statements.run("operations_of_lost_node", asked)]


def _move(statements: Statements, moves: Sequence[Move], loss: Loss) -> None:
    now = time.time()
    parameters = [
        {
            "id": move.session.id,
            "state": str(move.state),
            "head": move.head,
            "cause": move.cause,
            "lifetime_deadline": lifetime_after(move.session, now),
            "now": now,
        }
        for move in moves
    ]
    statements.many("move_lost_session", parameters)


def _interrupt(statements: Statements, operations: Sequence[Operation], loss: Loss) -> None:
    error = Interrupted(
        f"node {loss.name} was lost while this was under way",
        next_step="Read the session's state and decide again.",
        node=loss.node,
    )
    _finish(statements, operations, OperationState.FAILED, to_body(error))


def _finish(
    statements: Statements,
    operations: Any,
    state: OperationState,
    error: ErrorBody | None,
) -> None:
    values = OPERATIONS.changes({"state": state, "result": None, "error": error})
    parameters = [{"id": one.id, "now": time.time(), **values} for one in operations]
    if parameters:
        statements.many("finish_operation", parameters)


def _end_effects(statements: Statements, sessions: str, loss: Loss) -> None:
    """What left the sessions and was under way: no gateway knows of it any more."""
    for (text,) in statements.run("effects_of_lost_sessions", {"sessions": sessions}):
        effect = msgspec.json.decode(text, type=Effect)
        over = msgspec.structs.replace(effect, outcome="interrupted", ended_at=loss.until)
        put_effect(statements, PutEffect(over, lasting(over)))


def _record(
    statements: Statements,
    moves: Sequence[Move],
    deletions: Mapping[str, Operation],
    loss: Loss,
) -> None:
    now = time.time()
    parameters = []
    for move in moves:
        deletion = deletions.get(move.session.id)
        details = {
            "node": loss.node,
            "head_before": move.session.head,
            "head": move.head,
            "lost_seconds": round(move.lost_seconds, 3),
            "undurable": move.undurable,
        }
        parameters.append(
            {
                "session": move.session.id,
                "at": now,
                "actor": "server",
                "kind": "node.lost" if deletion is None else deletion.verb,
                "result": str(move.state) if deletion is None else "ok",
                "details": encode_json(details),
                "before": move.session.head,
                "after": move.head,
                "operation": deletion.id if deletion is not None else None,
            }
        )
    statements.many("append_event", parameters)
