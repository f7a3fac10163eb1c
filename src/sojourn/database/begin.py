"""Beginning an operation: the same request with the same key happens once.

Guarantee: everything here runs in one transaction that either nothing runs beside, or that unique
indexes make begin anew when another one was first; so of many callers with one key exactly one gets
a new operation, and of many callers that want a session for themselves exactly one gets it.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec

from sojourn.database.apply import apply
from sojourn.database.base import KEY_LIFETIME
from sojourn.database.engine import Statements
from sojourn.database.records import Operation, OperationState
from sojourn.database.rows import OPERATIONS, SESSIONS, encode_json
from sojourn.database.writes import FinishOperation, Write
from sojourn.errors import (
    IdempotencyMismatch,
    Interrupted,
    SessionBusy,
    SessionElsewhere,
    SessionNotFound,
    to_body,
)
from sojourn.model.sessions import SessionState


class Beginning(msgspec.Struct, frozen=True):
    """What is asked for; the fields are those of `Database.begin`."""

    id: str
    tenant: str
    session: str
    verb: str
    request: dict[str, Any]
    server: str
    key: str | None
    exclusive: bool
    supersede: bool
    creates: bool
    also: tuple[Write, ...]
    holder: str | None = None

    def digest(self) -> str:
        """What makes two requests the same. A creating one brings a new session id each time."""
        subject = None if self.creates else self.session
        return hashlib.sha256(encode_json([self.verb, subject, self.request]).encode()).hexdigest()


def begin(statements: Statements, asked: Beginning) -> tuple[Operation, bool]:
    """The operation and whether it is new; see `Database.begin`."""
    now = time.time()
    digest = asked.digest()
    if asked.key is not None:
        known = _known(statements, asked.tenant, asked.key, digest, now)
        if known is not None:
            return known, False
    if asked.holder is not None:
        _check_holder(statements, asked.session, asked.holder)
    if asked.exclusive:
        _take_session(statements, asked)
    apply(statements, asked.also)
    if not statements.run("session_row", {"id": asked.session}):
        raise SessionNotFound(f"session {asked.session} does not exist", session=asked.session)
    operation = Operation(
        id=asked.id,
        session=asked.session,
        tenant=asked.tenant,
        verb=asked.verb,
        key=asked.key,
        digest=digest,
        request=asked.request,
        exclusive=asked.exclusive,
        state=OperationState.PENDING,
        step=None,
        step_number=0,
        data={},
        result=None,
        error=None,
        server=asked.server,
        created_at=now,
        updated_at=now,
        finished_at=None,
    )
    statements.run("insert_operation", OPERATIONS.write(operation))
    if asked.key is not None:
        statements.run(
            "insert_key",
            {
                "tenant": asked.tenant,
                "key": asked.key,
                "digest": digest,
                "operation": operation.id,
                "expires_at": now + KEY_LIFETIME,
            },
        )
    return operation, True


def _known(
    statements: Statements, tenant: str, key: str, digest: str, now: float
) -> Operation | None:
    rows = statements.run("find_key", {"tenant": tenant, "key": key})
    if not rows:
        return None
    stored, id, expires_at = rows[0]
    found = statements.run("operation_row", {"id": id})
    if not found:
        return None  # it was dropped, with its key, since the key was read
    operation = OPERATIONS.read(found[0])
    if expires_at <= now and operation.finished:
        statements.run("delete_key", {"tenant": tenant, "key": key})
        return None
    if stored != digest:
        raise IdempotencyMismatch(
            f"the idempotency key was used for another request ({operation.verb})",
            operation=operation.id,
            verb=operation.verb,
        )
    return operation


def _check_holder(statements: Statements, session: str, holder: str) -> None:
    """Raise SessionElsewhere for a session that is there and another's, or nobody's."""
    rows = statements.run("session_row", {"id": session})
    found = SESSIONS.read(rows[0]) if rows else None
    if found is not None and found.state is not SessionState.DELETED and found.holder != holder:
        raise elsewhere(session, found.holder)


def elsewhere(session: str, holder: str | None) -> SessionElsewhere:
    """The error for a session that is not this node's."""
    who = f"node {holder}" if holder is not None else "no node"
    return SessionElsewhere(f"session {session} is held by {who}", session=session, holder=holder)


def _take_session(statements: Statements, asked: Beginning) -> None:
    rows = statements.run("exclusive_operation", {"session": asked.session})
    if not rows:
        return
    holder = OPERATIONS.read(rows[0])
    if not asked.supersede or holder.verb == asked.verb:
        # One deletion does not end another: whoever asked first is told of its success.
        raise SessionBusy(
            f"session {asked.session} is held by {holder.verb} ({holder.id})",
            session=asked.session,
            operation=holder.id,
            verb=holder.verb,
        )
    error = Interrupted(
        f"{holder.verb} was superseded by {asked.verb}",
        next_step="Read the session's state and decide again.",
        operation=holder.id,
        superseded_by=asked.id,
    )
    apply(statements, [FinishOperation(holder.id, error=to_body(error))])
