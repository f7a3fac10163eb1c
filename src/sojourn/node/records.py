"""What a node remembers of its sandboxes, on its own disk.

Guarantee: a record is durable before anything of the sandbox exists, so whatever a crash leaves
behind can be named, adopted or removed by reading the records alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sojourn.errors import IntegrityError
from sojourn.model import LayerRef, Limits, MemoryRef
from sojourn.model.snapshots import SnapshotConfig

_FILE = "record.json"


class SandboxRecord(msgspec.Struct, frozen=True):
    """One placement of a session on this node. `layers` are lowest first."""

    sandbox: str
    session: str
    epoch: int
    driver: str
    layers: list[LayerRef]
    memory: MemoryRef | None
    config: SnapshotConfig
    limits: Limits
    created_at: float


def fsync_directory(path: Path) -> None:
    """Make entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_record(directory: Path, record: SandboxRecord) -> None:
    """Write a sandbox's record durably; the directory must exist."""
    temporary = directory / (_FILE + ".new")
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / _FILE)
    fsync_directory(directory)
    fsync_directory(directory.parent)


def read_record(directory: Path) -> SandboxRecord | None:
    """The record in a sandbox's directory; None when it was never finished.

    Raises IntegrityError when what is there cannot be read.
    """
    try:
        data = (directory / _FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=SandboxRecord)
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"the record of sandbox {directory.name} cannot be read: {error}",
            object=f"sandbox {directory.name}",
        ) from error
