"""What the database holds besides sessions: frozen rows, no I/O.

Guarantee: a record is a value read at one instant; holding it gives no right to write. Times are
seconds since 1970 (UTC).
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from sojourn.errors import ErrorBody
from sojourn.model.network import Effect, SecretUse
from sojourn.model.sessions import Session
from sojourn.model.snapshots import SnapshotKind


class Role(enum.StrEnum):
    """What a token may do: everything, or what belongs to its tenant."""

    OPERATOR = "operator"
    TENANT = "tenant"


class Tenant(msgspec.Struct, frozen=True):
    """Who owns sessions. `name` is unique."""

    id: str
    name: str
    created_at: float


class Token(msgspec.Struct, frozen=True):
    """A token as it may be shown: its secret is stored only as a hash and cannot be read back."""

    id: str
    tenant: str
    role: Role
    label: str | None
    created_at: float
    revoked_at: float | None = None


class SnapshotRecord(msgspec.Struct, frozen=True):
    """A snapshot's place in the tree; its content is described by the manifest in the store.

    `layers` (lowest first) and `image` are what collection must keep. `turn` is the sequence
    number of the event of the turn it was taken after. `hidden` ones are deleted for the user but
    kept while something needs them; `thinned` ones have lost their memory image. `durable_at` is
    when the object store had it as it is now, with all it refers to; None: not yet. `node` is whose
    disk has it, where there are several nodes.
    """

    id: str
    session: str
    tenant: str
    parent: str | None
    kind: SnapshotKind
    label: str | None
    created_at: float
    fingerprint: str
    has_memory: bool
    memory_bytes: int
    layer_bytes: int
    layers: list[str]
    image: str | None
    turn: int | None = None
    hidden: bool = False
    thinned: bool = False
    durable_at: float | None = None
    node: str | None = None


class OperationState(enum.StrEnum):
    """How far an operation is. `pending` and `running` ones are unfinished."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Operation(msgspec.Struct, frozen=True):
    """One lifecycle operation. `step` is the last step that is done, `step_number` counts them
    (0: none yet), `data` is what the next step or a reconciler needs, `server` who runs it."""

    id: str
    session: str
    tenant: str
    verb: str
    key: str | None
    digest: str
    request: dict[str, Any]
    exclusive: bool
    state: OperationState
    step: str | None
    step_number: int
    data: dict[str, Any]
    result: Any
    error: ErrorBody | None
    server: str
    created_at: float
    updated_at: float
    finished_at: float | None

    @property
    def finished(self) -> bool:
        """Whether it succeeded or failed."""
        return self.state in (OperationState.SUCCEEDED, OperationState.FAILED)


class Event(msgspec.Struct, frozen=True):
    """One line of a session's history. `sequence` counts from 1 per session without a gap."""

    session: str
    sequence: int
    at: float
    actor: str
    kind: str
    result: str | None
    details: dict[str, Any]
    before: str | None
    after: str | None
    operation: str | None


class EffectRecord(msgspec.Struct, frozen=True):
    """A request or connection that left a session, and its place in the tree: `snapshot` was the
    session's head when it began. `lasting` ones are not taken back by any rollback."""

    effect: Effect
    snapshot: str | None
    lasting: bool


class SecretRecord(msgspec.Struct, frozen=True):
    """A secret of a tenant; `value` is sealed, and nothing but the server's key opens it."""

    tenant: str
    name: str
    value: bytes
    uses: list[SecretUse]
    created_at: float
    updated_at: float


class SessionPage(msgspec.Struct, frozen=True):
    """A part of a list of sessions, newest first. `next` is the cursor of the rest, or None."""

    items: list[Session]
    next: str | None


class References(msgspec.Struct, frozen=True):
    """Every layer and memory image that a snapshot row still refers to."""

    layers: set[str]
    images: set[str]


class Removal(msgspec.Struct, frozen=True):
    """Something that is gone here and may still lie in the object store: the `snapshot` or
    `session` whose id is `object`. `id` grows and is never used again."""

    id: int
    kind: str
    tenant: str
    object: str


class ObjectStore(msgspec.Struct, frozen=True):
    """A repository by its URL (without credentials) and its own id, which no other one has."""

    url: str
    repository: str


class DurableObjects(msgspec.Struct, frozen=True):
    """What durable snapshots refer to: layer and image ids, each with the tenants whose snapshots
    do; `templates` are their lowest layers, which belong to no tenant and are not in `layers`."""

    layers: dict[str, set[str]]
    images: dict[str, set[str]]
    templates: set[str]


class Durability(msgspec.Struct, frozen=True):
    """How far a session's snapshots are in the object store.

    `waiting` counts those that are needed and not durable, `oldest_waiting` is when the oldest of
    them was taken. `durable_head_at` is when the newest durable snapshot on the head's line (the
    head or what it descends from) was taken: what a loss of this node would take the session back
    to; None when there is none.
    """

    session: str
    head: str | None
    head_durable: bool
    waiting: int
    oldest_waiting: float | None
    durable_head_at: float | None


class Pruned(msgspec.Struct, frozen=True):
    """How many rows retention removed."""

    operations: int
    keys: int
    sessions: int
