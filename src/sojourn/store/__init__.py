"""The snapshot store: sealed layers, memory images and snapshot manifests by content address."""

from sojourn.store.base import (
    Change,
    EntryInfo,
    Fault,
    PendingLayer,
    Scan,
    SealedLayer,
    Source,
    Store,
)
from sojourn.store.fingerprints import fingerprint
from sojourn.store.local import LocalStore

__all__ = [
    "Change",
    "EntryInfo",
    "Fault",
    "LocalStore",
    "PendingLayer",
    "Scan",
    "SealedLayer",
    "Source",
    "Store",
    "fingerprint",
]
