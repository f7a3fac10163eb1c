"""Each kind of write, performed inside an open transaction.

Guarantee: a function here either does all of its write or raises and leaves the rest to the
rollback of its caller; nothing here commits. Violations that callers can cause are looked for
and raised as typed errors before a constraint of the schema would have to stop them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sojourn.database import writes
from sojourn.database.engine import Duplicate, Statements
from sojourn.database.records import Operation, OperationState, SnapshotRecord
from sojourn.database.rows import OPERATIONS, SESSIONS, SNAPSHOTS, encode_json
from sojourn.errors import (
    Conflict,
    InvalidRequest,
    NameTaken,
    NotFound,
    OperationNotFound,
    SessionNotFound,
    SnapshotNotFound,
    StaleEpoch,
    WrongState,
)
from sojourn.model.sessions import Session, SessionState

_FIXED = {"id", "tenant", "kind", "created_at"}
_SNAPSHOT_CHANGES = {
    "label",
    "hidden",
    "kind",
    "turn",
    "thinned",
    "has_memory",
    "memory_bytes",
    "image",
    "fingerprint",
    "durable_at",
    "node",
}
_THINNING = {"image", "has_memory", "fingerprint"}


def apply(statements: Statements, items: Sequence[writes.Write]) -> list[Any]:
    """Perform all in order, then check what they refer to. One result per write."""
    results = [_PERFORM[type(item)](statements, item) for item in items]
    for item in items:
        _check_references(statements, item)
    return results


def _check_references(statements: Statements, item: writes.Write) -> None:
    snapshot: str | None = None
    if isinstance(item, writes.InsertSession):
        snapshot = item.session.head
    elif isinstance(item, writes.UpdateSession):
        snapshot = item.changes.get("head")
    elif isinstance(item, writes.InsertSnapshot):
        snapshot = item.snapshot.parent
        if not statements.run("session_row", {"id": item.snapshot.session}):
            raise SessionNotFound(f"session {item.snapshot.session} does not exist")
    if snapshot is not None and not statements.run("snapshot_row", {"id": snapshot}):
        raise SnapshotNotFound(f"snapshot {snapshot} does not exist", snapshot=snapshot)


# -- sessions -------------------------------------------------------------------------------


def _name_taken(name: str | None) -> NameTaken:
    return NameTaken(f"another session is named {name!r}", name=name)


def insert_session(statements: Statements, item: writes.InsertSession) -> Session:
    try:
        statements.run("insert_session", SESSIONS.write(item.session))
    except Duplicate as error:
        if error.column == "sessions.name":
            raise _name_taken(item.session.name) from error
        if error.column == "sessions.id":
            raise Conflict(f"session {item.session.id} exists already") from error
        raise
    return item.session


def update_session(statements: Statements, item: writes.UpdateSession) -> Session:
    wrong = item.changes.keys() & _FIXED | item.changes.keys() - set(SESSIONS.fields)
    if wrong:
        raise InvalidRequest(f"a session's {', '.join(sorted(wrong))} cannot be changed")
    if item.changes.get("epoch", item.expect_epoch) < item.expect_epoch:
        raise InvalidRequest("the epoch of a session never shrinks")
    changes = {**item.changes, "updated_at": time.time()}
    if changes.get("state") == SessionState.DELETED:
        changes["holder"] = None  # what is left of it anybody may remove
    parameters = SESSIONS.changes(changes)
    parameters["where_id"] = item.id
    parameters["expect_epoch"] = item.expect_epoch
    parameters["expect_state"] = encode_json([str(state) for state in item.expect_state])
    try:
        rows = statements.run(
            "update_session", parameters, assignments=SESSIONS.assignments(changes)
        )
    except Duplicate as error:
        if error.column == "sessions.name":
            raise _name_taken(item.changes.get("name")) from error
        raise
    if rows:
        return SESSIONS.read(rows[0])
    raise _swap_refused(statements, item)


def _swap_refused(
    statements: Statements, item: writes.UpdateSession
) -> SessionNotFound | StaleEpoch | WrongState:
    """Why the compare-and-swap found nothing; read in the same transaction, so it is true."""
    rows = statements.run("session_row", {"id": item.id})
    found = SESSIONS.read(rows[0]) if rows else None
    if found is None or found.state is SessionState.DELETED:
        return SessionNotFound(f"session {item.id} does not exist", session=item.id)
    if found.epoch != item.expect_epoch:
        return StaleEpoch(
            f"session {item.id} is at epoch {found.epoch}, the writer at {item.expect_epoch}",
            session=item.id,
            epoch=found.epoch,
            expected=item.expect_epoch,
        )
    expected = sorted(str(state) for state in item.expect_state)
    return WrongState(
        f"session {item.id} is {found.state}, not {' or '.join(expected)}",
        next_step="Fetch the session again and decide by its state.",
        session=item.id,
        state=str(found.state),
        expected=expected,
    )


# -- snapshots ------------------------------------------------------------------------------


def insert_snapshot(statements: Statements, item: writes.InsertSnapshot) -> None:
    try:
        statements.run("insert_snapshot", SNAPSHOTS.write(item.snapshot))
    except Duplicate as error:
        if error.column == "snapshots.id":
            raise Conflict(f"snapshot {item.snapshot.id} exists already") from error
        raise


def update_snapshot(statements: Statements, item: writes.UpdateSnapshot) -> SnapshotRecord:
    wrong = item.changes.keys() - _SNAPSHOT_CHANGES
    if wrong or not item.changes:
        raise InvalidRequest(f"a snapshot's {', '.join(sorted(wrong)) or 'nothing'} cannot change")
    changes = item.changes
    if changes.keys() & _THINNING:
        # What the object store was given is out of date by the same statement.
        changes = {"durable_at": None, **changes}
    rows = statements.run(
        "update_snapshot",
        {**SNAPSHOTS.changes(changes), "where_id": item.id},
        assignments=SNAPSHOTS.assignments(changes),
    )
    if not rows:
        raise SnapshotNotFound(f"snapshot {item.id} does not exist", snapshot=item.id)
    return SNAPSHOTS.read(rows[0])


def delete_snapshot(statements: Statements, item: writes.DeleteSnapshot) -> bool:
    users = statements.run("snapshot_users", {"id": item.id})
    if users:
        kind, user = users[0]
        raise Conflict(
            f"snapshot {item.id} is needed by {kind} {user}",
            next_step="Hide it; it is removed when nothing needs it any more.",
            snapshot=item.id,
            **{f"needed_by_{kind}": user},
        )
    statements.run("pass_children_on", {"id": item.id})
    return bool(statements.run("delete_snapshot", {"id": item.id}))


# -- operations -----------------------------------------------------------------------------


def _not_unfinished(statements: Statements, operation: str) -> Conflict | OperationNotFound:
    rows = statements.run("operation_row", {"id": operation})
    if not rows:
        return OperationNotFound(f"operation {operation} does not exist", operation=operation)
    found = OPERATIONS.read(rows[0])
    return Conflict(
        f"operation {operation} is already {found.state}",
        next_step="Stop: another operation has taken over, or this one is done.",
        operation=operation,
        state=str(found.state),
    )


def set_step(statements: Statements, item: writes.SetStep) -> Operation:
    rows = statements.run("operation_to_step", {"id": item.operation})
    if not rows:
        raise _not_unfinished(statements, item.operation)
    data = {**OPERATIONS.read(rows[0]).data, **item.data}
    changed = statements.run(
        "set_step",
        {
            "id": item.operation,
            "step": item.step,
            "data": encode_json(data),
            "server": item.server,
            "now": time.time(),
        },
    )
    if not changed:
        raise _not_unfinished(statements, item.operation)
    return OPERATIONS.read(changed[0])


def finish_operation(statements: Statements, item: writes.FinishOperation) -> Operation:
    state = OperationState.SUCCEEDED if item.error is None else OperationState.FAILED
    parameters = OPERATIONS.changes({"state": state, "result": item.result, "error": item.error})
    changed = statements.run(
        "finish_operation",
        {"id": item.operation, "now": time.time(), **parameters},
    )
    if not changed:
        raise _not_unfinished(statements, item.operation)
    return OPERATIONS.read(changed[0])


# -- events ---------------------------------------------------------------------------------


def append_event(statements: Statements, item: writes.AppendEvent) -> int:
    rows = statements.run(
        "append_event",
        {
            "session": item.session,
            "at": time.time() if item.at is None else item.at,
            "actor": item.actor,
            "kind": item.kind,
            "result": item.result,
            "details": encode_json(item.details),
            "before": item.before,
            "after": item.after,
            "operation": item.operation,
        },
    )
    if not rows:
        raise SessionNotFound(f"session {item.session} does not exist", session=item.session)
    return int(rows[0][0])


def link_event(statements: Statements, item: writes.LinkEvent) -> None:
    rows = statements.run(
        "link_event",
        {
            "session": item.session,
            "sequence": item.sequence,
            "before": item.before,
            "after": item.after,
        },
    )
    if not rows:
        raise NotFound(f"session {item.session} has no event {item.sequence}")


# -- effects --------------------------------------------------------------------------------


def put_effect(statements: Statements, item: writes.PutEffect) -> bool:
    effect = item.effect
    rows = statements.run(
        "put_effect",
        {
            "id": effect.id,
            "session": effect.session,
            "began_at": effect.began_at,
            "outcome": effect.outcome,
            "lasting": item.lasting,
            "effect": encode_json(effect),
        },
    )
    return bool(rows)


def settle_effects(statements: Statements, item: writes.SettleEffects) -> None:
    parameters = {"session": item.session, "until": item.until}
    if item.snapshot is not None:
        statements.run("link_effects", parameters | {"snapshot": item.snapshot})
    statements.run("settle_effects", parameters)


_PERFORM: dict[type, Callable[[Statements, Any], Any]] = {
    writes.InsertSession: insert_session,
    writes.UpdateSession: update_session,
    writes.InsertSnapshot: insert_snapshot,
    writes.UpdateSnapshot: update_snapshot,
    writes.DeleteSnapshot: delete_snapshot,
    writes.SetStep: set_step,
    writes.FinishOperation: finish_operation,
    writes.AppendEvent: append_event,
    writes.LinkEvent: link_event,
    writes.PutEffect: put_effect,
    writes.SettleEffects: settle_effects,
}
