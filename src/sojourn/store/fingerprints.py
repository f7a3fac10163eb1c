"""Content addresses: what is hashed, with which context, for files, layers, images and snapshots.

Guarantee: equal addresses mean equal content; addresses of different kinds of object never meet,
because each kind hashes under a context of its own (BLAKE3 key derivation).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from sojourn.model.snapshots import LayerRef, MemoryRef, SnapshotConfig

_LAYER = "sojourn 2025 layer manifest v1"
_IMAGE = "sojourn 2025 memory image v1"
_SNAPSHOT = "sojourn 2025 snapshot v1"
_PIECE = 1 << 20  # stays in the processor's cache between the read and the hash
_SMALL = 1 << 16

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def layer_digest(encoded: bytes) -> bytes:
    """Digest of a layer's canonical entries."""
    return blake3(encoded, derive_key_context=_LAYER).digest()


def image_digest(files: dict[str, tuple[int, str]]) -> str:
    """Id of a memory image from its files' names, sizes and content hashes."""
    listed = sorted((name.encode(), size, digest) for name, (size, digest) in files.items())
    return blake3(_encoder.encode(listed), derive_key_context=_IMAGE).hexdigest()


def fingerprint(
    layers: Sequence[LayerRef],
    memory: MemoryRef | None,
    config: SnapshotConfig,
    format: int = 1,
) -> str:
    """The fingerprint of a snapshot: over format, layer ids in order, memory id and config."""
    content = (
        format,
        [layer.id for layer in layers],
        memory.id if memory is not None else None,
        config,
    )
    return blake3(_encoder.encode(content), derive_key_context=_SNAPSHOT).hexdigest()


def hash_open_file(fd: int) -> bytes:
    """Content hash of an open regular file from its start.

    Read through a buffer, not mapped: a disk error or a truncation then is an error, not a signal.
    """
    start = os.pread(fd, _SMALL, 0)
    hasher = blake3(start)
    if len(start) < _SMALL:
        return hasher.digest()
    buffer = bytearray(_PIECE)
    view = memoryview(buffer)
    offset = len(start)
    while count := os.preadv(fd, [buffer], offset):
        hasher.update(view[:count])
        offset += count
    return hasher.digest()


def hash_entry(directory: int, name: bytes) -> bytes:
    """Content hash of the regular file `name` in an open directory."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
    try:
        return hash_open_file(fd)
    finally:
        os.close(fd)
