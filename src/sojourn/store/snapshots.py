"""Snapshot manifests on disk: the last thing written of a snapshot and the first thing read.

Guarantee: a manifest that can be read is the one published, and its fingerprint is the one of what
it refers to. It appears and changes by one rename, after a sync.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from sojourn.errors import Conflict, IntegrityError, InvalidRequest, SnapshotNotFound
from sojourn.model.snapshots import Snapshot
from sojourn.store.copying import disk_errors, sync_path
from sojourn.store.envelopes import read_checked, write_checked
from sojourn.store.fingerprints import fingerprint
from sojourn.store.staging import Staging

KIND = b"SNAP"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def object_name(snapshot: str) -> str:
    """How errors and faults name a snapshot."""
    return f"snapshot {snapshot}"


class Snapshots:
    """The snapshot manifests of one store."""

    def __init__(self, root: Path, staging: Staging) -> None:
        self.root = root
        self._staging = staging

    def _path(self, snapshot: str) -> Path:
        if not _NAME.fullmatch(snapshot):
            raise InvalidRequest(f"{snapshot!r} is not a snapshot id.")
        return self.root / snapshot

    def write(self, snapshot: Snapshot, *, replace: bool = False) -> None:
        """Write a manifest durably. The same one again is fine; another under its id is not."""
        path = self._path(snapshot.id)
        name = object_name(snapshot.id)
        wanted = fingerprint(snapshot.layers, snapshot.memory, snapshot.config, snapshot.format)
        if snapshot.fingerprint != wanted:
            raise IntegrityError(
                f"The fingerprint of {name} is not the one of its content.", object=name
            )
        if not replace and path.exists():
            if self.read(snapshot.id) == snapshot:
                return
            raise Conflict(f"Another {name} is stored already.", snapshot=snapshot.id)
        with disk_errors("storing a snapshot"):
            staged = self._staging.new()
            try:
                write_checked(KIND, staged / "manifest", msgspec.msgpack.encode(snapshot))
                (staged / "manifest").replace(path)
                sync_path(self.root)
            finally:
                self._staging.drop(staged)

    def read(self, snapshot: str) -> Snapshot:
        """Read and check a manifest. Raises SnapshotNotFound, IntegrityError."""
        try:
            path = self._path(snapshot)
        except InvalidRequest:
            raise SnapshotNotFound(f"There is no snapshot {snapshot!r}.") from None
        name = object_name(snapshot)
        try:
            payload = read_checked(KIND, path, name)
        except FileNotFoundError:
            raise SnapshotNotFound(f"There is no {name}.", snapshot=snapshot) from None
        except OSError as error:
            raise IntegrityError(
                f"{name} cannot be read: {error.strerror}.", object=name
            ) from error
        try:
            found = msgspec.msgpack.decode(payload, type=Snapshot)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{name} is malformed: {error}", object=name) from None
        if found.id != snapshot:
            raise IntegrityError(f"{name} holds the manifest of {found.id}.", object=name)
        if found.fingerprint != fingerprint(found.layers, found.memory, found.config, found.format):
            raise IntegrityError(
                f"The fingerprint of {name} is not the one of its content.", object=name
            )
        return found

    def delete(self, snapshot: str) -> None:
        """Remove a manifest. Idempotent."""
        self._path(snapshot).unlink(missing_ok=True)
        sync_path(self.root)

    def ids(self) -> list[str]:
        """The names of all manifests, readable or not."""
        return sorted(path.name for path in self.root.iterdir())

    def all(self) -> list[Snapshot]:
        """Every manifest. Raises IntegrityError naming the first that cannot be read."""
        return [self.read(name) for name in self.ids()]
