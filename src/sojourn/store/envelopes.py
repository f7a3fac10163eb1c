"""Checked files: every file of the store that holds records carries its own length and checksum.

Guarantee: a record that is read is byte for byte the one written, or IntegrityError names the
object; a truncated, flipped, grown or foreign file is told before a byte of it is interpreted, and
no more memory is taken than the file really has. Writing replaces a file whole or not at all.

Layout (72 bytes, then the payload): magic `SJRN`, kind (4 bytes), version (u16), reserved (u16),
reserved (u32), payload length (u64), BLAKE3 of the payload (32), first 16 bytes of the BLAKE3 of
the 56 bytes before.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from blake3 import blake3

from sojourn.errors import IntegrityError

_HEAD = struct.Struct("<4s4sHHIQ32s")
_CHECK = 16
HEADER_BYTES = _HEAD.size + _CHECK
MAGIC = b"SJRN"
LIMIT = 1 << 30  # a manifest of several million entries; more is no file of ours


def wrap(kind: bytes, payload: bytes, version: int = 1) -> bytes:
    """The file's bytes for a payload."""
    head = _HEAD.pack(MAGIC, kind, version, 0, 0, len(payload), blake3(payload).digest())
    return head + blake3(head).digest(_CHECK) + payload


def unwrap(kind: bytes, data: bytes, name: str, version: int = 1) -> bytes:
    """The payload of a file's bytes. Raises IntegrityError naming `name`."""
    _, size, digest = _header(kind, data[:HEADER_BYTES], name, version)
    payload = data[HEADER_BYTES:]
    if len(payload) != size:
        raise IntegrityError(
            f"{name} holds {len(payload)} bytes where {size} were written.", object=name
        )
    if blake3(payload).digest() != digest:
        raise IntegrityError(f"{name} differs from what was written (checksum).", object=name)
    return payload


def _header(kind: bytes, data: bytes, name: str, version: int) -> tuple[int, int, bytes]:
    if len(data) < HEADER_BYTES:
        raise IntegrityError(f"{name} is cut off inside its header.", object=name)
    head = data[: _HEAD.size]
    if blake3(head).digest(_CHECK) != data[_HEAD.size : HEADER_BYTES]:
        raise IntegrityError(f"{name} has a damaged header.", object=name)
    magic, found, written, _, _, size, digest = _HEAD.unpack(head)
    if magic != MAGIC or found != kind:
        raise IntegrityError(f"{name} is not a file of its kind.", object=name)
    if written != version:
        raise IntegrityError(
            f"{name} has format {written}; this version reads format {version}.",
            object=name,
            next_step="Use a version of Sojourn that knows this format.",
        )
    return written, size, digest


def read_checked(kind: bytes, path: Path, name: str, version: int = 1) -> bytes:
    """The payload of a checked file. Raises FileNotFoundError, IntegrityError."""
    with path.open("rb") as file:
        actual = os.fstat(file.fileno()).st_size
        head = file.read(HEADER_BYTES)
        _, size, _ = _header(kind, head, name, version)
        if size > LIMIT or actual != HEADER_BYTES + size:
            raise IntegrityError(
                f"{name} holds {actual - HEADER_BYTES} bytes where {size} were written.",
                object=name,
            )
        return unwrap(kind, head + file.read(size + 1), name, version)


def write_checked(
    kind: bytes, path: Path, payload: bytes, version: int = 1, *, sync: bool = True
) -> None:
    """Write a new file at `path`; the caller puts it in place and syncs the directory."""
    with path.open("wb") as file:
        file.write(wrap(kind, payload, version))
        file.flush()
        if sync:
            os.fsync(file.fileno())
