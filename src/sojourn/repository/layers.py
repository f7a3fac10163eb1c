"""A layer in the repository: its root object, and its manifest cut into segments.

Guarantee: what is decoded here obeys the format's bounds, and a manifest joined from segments is
the one of the layer's id or refused with IntegrityError, before anything acts on it. Segments begin
where the paths say so, not at fixed counts, so that two layers of almost the same tree share almost
all of their segments.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec
from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.model.snapshots import LayerRef
from sojourn.store.layers import object_name
from sojourn.store.manifests import FORMAT, Entry, Manifest

SEGMENT_DIVISOR = 256
SEGMENT_ENTRIES = 4096
SEGMENT_ATTRIBUTES = 1 << 20  # bytes: an attribute may be as large as a thousand entries
DIGEST = 32
_LEAST_ENTRY = 15  # an entry of 14 fields takes no less
_ID = re.compile(r"[0-9a-f]{64}")

Bytes: TypeAlias = bytes  # the name is taken by a field below

_encoder = msgspec.msgpack.Encoder()


class LayerObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The root object of a layer. `segments` are the content ids of its segments, in order."""

    id: str
    bytes: int
    entries: int
    segments: list[Bytes]

    @property
    def ref(self) -> LayerRef:
        """The reference that snapshots hold."""
        return LayerRef(id=self.id, bytes=self.bytes, entries=self.entries)


_decoder = msgspec.msgpack.Decoder(LayerObject)


def encode_layer(layer: LayerObject) -> bytes:
    """The payload of a layer's root object."""
    return _encoder.encode(layer)


def decode_layer(payload: bytes, layer: str) -> LayerObject:
    """The root object of the layer with this id. Raises IntegrityError."""
    name = object_name(layer)
    try:
        found = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"The record of {name} is malformed: {error}", object=name) from None
    cause = _flaw(found, layer)
    if cause is not None:
        raise IntegrityError(f"The record of {name} is inconsistent: {cause}.", object=name)
    return found


def _flaw(found: LayerObject, layer: str) -> str | None:
    if not _ID.fullmatch(found.id) or found.id != layer:
        return "it is of another layer"
    if found.bytes < 0 or found.entries < 0:
        return "negative numbers"
    if any(len(segment) != DIGEST for segment in found.segments):
        return "a segment's id is no digest"
    if not 0 < len(found.segments) <= found.entries + 1:
        return "more or fewer segments than its entries can fill"
    return None


def segments_of(manifest: Manifest) -> Iterator[tuple[bytes, bytes]]:
    """The segments of a manifest in order, as (content id, encoded entries)."""
    entries = manifest.entries
    crc32 = zlib.crc32
    start = heavy = 0
    for at, entry in enumerate(entries):
        count = at - start
        if count and (
            count == SEGMENT_ENTRIES
            or heavy >= SEGMENT_ATTRIBUTES
            or not crc32(entry.path) % SEGMENT_DIVISOR
        ):
            yield _segment(entries[start:at])
            start = at
            heavy = 0
        if entry.xattrs:
            heavy += sum(len(key) + len(value) for key, value in entry.xattrs)
    yield _segment(entries[start:])


def _segment(entries: list[Entry]) -> tuple[bytes, bytes]:
    data = _encoder.encode(entries)
    return blake3(data).digest(), data


def layer_object(manifest: Manifest, segments: Iterable[bytes]) -> LayerObject:
    """The root object of a manifest whose segments have these content ids."""
    ref = manifest.ref
    return LayerObject(id=ref.id, bytes=ref.bytes, entries=ref.entries, segments=list(segments))


def join_segments(layer: LayerObject, segments: Iterable[bytes]) -> Manifest:
    """The manifest of a layer from its segments' bytes in order, proven by the layer's id.

    The segments' bytes are joined without decoding them one by one: the id is over the bytes, so
    they are proven before they are interpreted. Raises IntegrityError.
    """
    name = object_name(layer.id)
    total = 0
    bodies = []
    for data in segments:
        count, begin = _array_header(data, name)
        if count * _LEAST_ENTRY > len(data):
            raise IntegrityError(f"A segment of {name} is cut off.", object=name)
        total += count
        bodies.append(memoryview(data)[begin:])
    if total != layer.entries + 1:
        raise IntegrityError(
            f"{name} has {total - 1} entries where {layer.entries} were written.", object=name
        )
    encoded = b"".join([b"\x92", _encoder.encode(FORMAT), _header_of(total), *bodies])
    manifest = Manifest.decode(encoded, name, layer.id)
    if manifest.ref != layer.ref:
        raise IntegrityError(f"The record of {name} tells another size.", object=name)
    return manifest


def _array_header(data: bytes, name: str) -> tuple[int, int]:
    """Number of elements of an encoded array, and where they begin."""
    first = data[0] if data else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F, 1
    if first == 0xDC and len(data) >= 3:
        return int.from_bytes(data[1:3], "big"), 3
    if first == 0xDD and len(data) >= 5:
        return int.from_bytes(data[1:5], "big"), 5
    raise IntegrityError(f"A segment of {name} is no list of entries.", object=name)


def _header_of(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")
