"""What the repository knows of sessions, so that a lost database can be made anew from it.

Guarantee: a session's record is written after the snapshots it names, never to a lower epoch, and
never over another writer's; what is read back is one of the records written, whole.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from sojourn.errors import IntegrityError
from sojourn.model import Session, Snapshot
from sojourn.store.fingerprints import fingerprint

T = TypeVar("T")

SESSION, TENANT, SNAPSHOT = b"SESS", b"TENT", b"SNAP"


class SnapshotNote(msgspec.Struct, frozen=True):
    """What of a visible snapshot stands in no manifest. `turn` is the event it was taken after;
    `parent` the one before it in the tree now, where that is told: what lay between may have been
    given up, and manifests do not change."""

    id: str
    label: str | None = None
    thinned: bool = False
    turn: int | None = None
    parent: str | msgspec.UnsetType | None = msgspec.UNSET


class SessionRecord(msgspec.Struct, frozen=True):
    """A session as it was when the record was written, and the snapshots of its own in its tree
    that were durable then. Its head is one of the tenant's durable snapshots, or None. `owner` is
    the database (its server id) that has the session; only a recovery changes it."""

    session: Session
    snapshots: list[SnapshotNote]
    written_at: float
    owner: str


class TenantRecord(msgspec.Struct, frozen=True):
    """A tenant's name and id."""

    id: str
    name: str
    created_at: float


def decode_session(payload: bytes, session: str) -> SessionRecord:
    """A session's record. Raises IntegrityError."""
    name = f"session record {session}"
    found = _decode(payload, SessionRecord, name)
    if found.session.id != session:
        raise IntegrityError(f"{name} holds the record of {found.session.id}.", object=name)
    return found


def decode_tenant(payload: bytes, tenant: str) -> TenantRecord:
    """A tenant's record. Raises IntegrityError."""
    name = f"tenant record {tenant}"
    found = _decode(payload, TenantRecord, name)
    if found.id != tenant:
        raise IntegrityError(f"{name} holds the record of {found.id}.", object=name)
    return found


def decode_snapshot(payload: bytes, snapshot: str) -> Snapshot:
    """A snapshot's manifest, proven by its fingerprint. Raises IntegrityError."""
    name = f"snapshot {snapshot}"
    found = _decode(payload, Snapshot, name)
    if found.id != snapshot:
        raise IntegrityError(f"{name} holds the manifest of {found.id}.", object=name)
    if not found.layers or found.fingerprint != fingerprint(
        found.layers, found.memory, found.config, found.format
    ):
        raise IntegrityError(
            f"The fingerprint of {name} is not the one of its content.", object=name
        )
    return found


def _decode(payload: bytes, kind: type[T], name: str) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{name} is malformed: {error}", object=name) from None
