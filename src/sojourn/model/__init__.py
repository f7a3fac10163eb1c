"""Frozen values that every layer speaks in; no I/O happens here."""

from sojourn.model.ids import derived_id, new_id
from sojourn.model.sessions import (
    AutoSnapshot,
    Limits,
    Policy,
    Retention,
    Session,
    SessionKind,
    SessionState,
    without_sandbox,
)
from sojourn.model.snapshots import LayerRef, MemoryRef, Snapshot, SnapshotKind

__all__ = [
    "AutoSnapshot",
    "LayerRef",
    "Limits",
    "MemoryRef",
    "Policy",
    "Retention",
    "Session",
    "SessionKind",
    "SessionState",
    "Snapshot",
    "SnapshotKind",
    "derived_id",
    "new_id",
    "without_sandbox",
]
