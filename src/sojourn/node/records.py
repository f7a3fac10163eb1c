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
from sojourn.store.copying import sync_path

_FILE = "record.json"
_SALVAGED = "salvaged.json"


class SandboxRecord(msgspec.Struct, frozen=True):
    """One placement of a session on this node. `layers` are lowest first. `network` says whether
    connections leave it as tunnels to the gateway (what they may reach is decided there)."""

    sandbox: str
    session: str
    epoch: int
    driver: str
    layers: list[LayerRef]
    memory: MemoryRef | None
    config: SnapshotConfig
    limits: Limits
    created_at: float
    network: bool = False


def stacked(layers: list[LayerRef], layer: LayerRef) -> list[LayerRef]:
    """The layers with one more on top.

    Layers are named by content, and the same change may be made twice (a file touched and put
    back). An overlay takes no directory twice, and the lower of two equal layers shows nowhere:
    whatever it holds or hides, the upper one does at the same place.
    """
    return [*(one for one in layers if one.id != layer.id), layer]


def write_record(directory: Path, record: SandboxRecord) -> None:
    """Write a sandbox's record durably; the directory must exist."""
    _write(directory, _FILE, record)
    sync_path(directory.parent)


def write_salvaged(directory: Path, layer: LayerRef) -> None:
    """Note durably what the files of a dead sandbox were hashed to, before they move."""
    _write(directory, _SALVAGED, layer)


def read_salvaged(directory: Path) -> LayerRef | None:
    """What the files of a dead sandbox were hashed to, if that was done."""
    try:
        return msgspec.json.decode((directory / _SALVAGED).read_bytes(), type=LayerRef)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"the note of what was salvaged of {directory.name} cannot be read: {error}",
            object=f"sandbox {directory.name}",
        ) from error


def _write(directory: Path, name: str, value: msgspec.Struct) -> None:
    temporary = directory / (name + ".new")
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / name)
    sync_path(directory)


def read_record(directory: Path) -> SandboxRecord | None:
    """The record in a sandbox's directory; None when it was never finished.

    Raises IntegrityError when what is there cannot be read.
    """
    try:
        data = (directory / _FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return msgspec.json.decode(data, type=SandboxRecord)
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"the record of sandbox {directory.name} cannot be read: {error}",
            object=f"sandbox {directory.name}",
        ) from error
