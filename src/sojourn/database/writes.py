"""The changes a database can be asked to make, as values.

Guarantee: a list of writes given to `Database.commit` is applied whole or not at all, in order.
They are values rather than calls so that one caller can compose what belongs together (session
compare-and-swap, snapshot, end of the operation, event) without holding a transaction open
across awaits. `Database.commit` answers with one result per write, as noted on each.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from sojourn.database.records import SnapshotRecord
from sojourn.errors import ErrorBody
from sojourn.model.network import Effect
from sojourn.model.sessions import Session, SessionState


class InsertSession(msgspec.Struct, frozen=True):
    """-> Session. Raises NameTaken when a live session of the tenant has the name."""

    session: Session


class UpdateSession(msgspec.Struct, frozen=True):
    """-> Session after the change. One compare-and-swap on (state, epoch).

    `changes` maps fields of Session to new values; `id`, `tenant` and `created_at` cannot change,
    `updated_at` is set by itself, `epoch` never shrinks, and `deleted` is final; nobody holds a
    deleted session.
    Raises SessionNotFound, StaleEpoch, WrongState, NameTaken.
    """

    id: str
    expect_state: Collection[SessionState]
    expect_epoch: int
    changes: dict[str, Any]


class InsertSnapshot(msgspec.Struct, frozen=True):
    """-> None. Raises SnapshotNotFound when the parent is gone."""

    snapshot: SnapshotRecord


class UpdateSnapshot(msgspec.Struct, frozen=True):
    """-> SnapshotRecord. `changes` may set label, hidden, kind, turn, durable_at, and on thinning
    also thinned, has_memory, memory_bytes, image, fingerprint: a snapshot whose image, has_memory
    or fingerprint is set is not durable any more, unless durable_at is given too.
    Raises SnapshotNotFound."""

    id: str
    changes: dict[str, Any]


class DeleteSnapshot(msgspec.Struct, frozen=True):
    """-> bool: whether there was one. The children of a hidden one become those of its parent.
    Raises Conflict while it is a live session's head, or has children and is not hidden."""

    id: str


class SetStep(msgspec.Struct, frozen=True):
    """-> Operation. Record that a step is done, before the next one begins; `data` is merged into
    what is there. `server` says who runs it from now on. Raises OperationNotFound, Conflict when it
    is finished already (superseded)."""

    operation: str
    step: str
    data: dict[str, Any] = {}
    server: str | None = None


class FinishOperation(msgspec.Struct, frozen=True):
    """-> Operation. Succeeded with `result`, or failed with `error`. Raises as SetStep does."""

    operation: str
    result: Any = None
    error: ErrorBody | None = None


class AppendEvent(msgspec.Struct, frozen=True):
    """-> int: the event's sequence number in its session. Raises SessionNotFound."""

    session: str
    kind: str
    actor: str = "server"
    result: str | None = None
    details: dict[str, Any] = {}
    before: str | None = None
    after: str | None = None
    operation: str | None = None
    at: float | None = None


class LinkEvent(msgspec.Struct, frozen=True):
    """-> None. Name the snapshots before and after an event that was appended earlier."""

    session: str
    sequence: int
    before: str | None = None
    after: str | None = None


class PutEffect(msgspec.Struct, frozen=True):
    """-> bool: whether there is such a session. Record that something leaves a session, or how it
    ended; its place in the tree is that of the first time. `lasting` as in EffectRecord."""

    effect: Effect
    lasting: bool


class SettleEffects(msgspec.Struct, frozen=True):
    """-> None. What the session did until then (seconds since 1970) and is in no snapshot yet comes
    before `snapshot`, which is committed along; without one it is on no line any more."""

    session: str
    snapshot: str | None
    until: float


Write = (
    InsertSession
    | UpdateSession
    | InsertSnapshot
    | UpdateSnapshot
    | DeleteSnapshot
    | SetStep
    | FinishOperation
    | AppendEvent
    | LinkEvent
    | PutEffect
    | SettleEffects
)
