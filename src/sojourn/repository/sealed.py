"""Sealed objects: root objects, indexes and footers carry kind, length and proof of themselves.

Guarantee: a payload that is read is byte for byte the one that was sealed, of this kind and for
this place, or IntegrityError names the object; nothing is interpreted or allocated on the word of a
header that is over its kind's limit. In an encrypted repository an object that is not encrypted is
refused, so nobody without the key can put one in. docs/formats/repository.md gives the bytes.
"""

from __future__ import annotations

import hmac
import os
import struct

from blake3 import blake3

from sojourn.errors import IntegrityError, TooLarge
from sojourn.repository import cipher
from sojourn.repository.compression import compress, decompress
from sojourn.repository.keys import DomainKeys

CONFIG, WRAPPED, INDEX, FOOTER = b"CONF", b"WKEY", b"INDX", b"FOOT"
LAYER, IMAGE, SNAPSHOT, SESSION = b"LAYR", b"IMAG", b"SNAP", b"SESS"
TENANT, TOMBSTONE, DAMAGE = b"TENT", b"TOMB", b"DAMG"

# Bytes of the largest payload of each kind.
LIMITS = {
    CONFIG: 64 << 10,
    WRAPPED: 4 << 10,
    INDEX: 64 << 20,
    FOOTER: 8 << 20,
    LAYER: 64 << 20,
    IMAGE: 256 << 20,
    SNAPSHOT: 16 << 20,
    SESSION: 16 << 20,
    TENANT: 64 << 10,
    TOMBSTONE: 64 << 20,
    DAMAGE: 64 << 20,
}

MAGIC = b"SJRS"
FORMAT = 1
COMPRESSED, ENCRYPTED = 1, 2
SALT_BYTES = 32
HEADER = struct.Struct("<4s4sBBHQ32s")
_PLAIN_TAG, _SEALED_TAG = 32, 16
_WORTHWHILE = 64  # a frame's own overhead eats what a shorter payload would save


def largest(kind: bytes) -> int:
    """Bytes of the largest sealed object of a kind: what is not smaller compressed is kept as it
    is, so no body is longer than its payload."""
    return HEADER.size + LIMITS[kind] + _PLAIN_TAG


def seal(
    kind: bytes, payload: bytes, keys: DomainKeys, place: bytes, *, salt: bytes | None = None
) -> bytes:
    """A payload's sealed form for a place. `salt` must not have sealed anything before under these
    keys; without one it is random. Raises TooLarge above the kind's limit."""
    if len(payload) > LIMITS[kind]:
        raise TooLarge(
            f"An object of kind {kind.decode()} would have {len(payload)} bytes; "
            f"at most {LIMITS[kind]} are kept.",
            place=place.decode(errors="replace"),
        )
    flags = 0
    body = payload
    if len(payload) >= _WORTHWHILE:
        packed = compress(payload)
        if len(packed) < len(payload):
            body, flags = packed, COMPRESSED
    if salt is None:
        salt = os.urandom(SALT_BYTES)
    if keys.sealing is not None:
        flags |= ENCRYPTED
    header = HEADER.pack(MAGIC, kind, FORMAT, flags, 0, len(payload), salt)
    if keys.sealing is None:
        return b"".join((header, body, _plain_tag(keys, header, place, body)))
    # The key encrypts this object and no other: it comes from the salt.
    return header + cipher.encrypt(keys.object_key(salt), body, header + place)


def unseal(kind: bytes, data: bytes, keys: DomainKeys, place: bytes, *, name: str) -> bytes:
    """The payload of a sealed object. Raises IntegrityError with `name` as its object."""
    if len(data) < HEADER.size:
        raise IntegrityError(f"{name} is cut off inside its header.", object=name)
    header = data[: HEADER.size]
    magic, found, format, flags, reserved, length, salt = HEADER.unpack(header)
    if magic != MAGIC or found != kind:
        raise IntegrityError(f"{name} is not an object of its kind.", object=name)
    if format != FORMAT:
        raise IntegrityError(
            f"{name} has format {format}; this version reads format {FORMAT}.",
            object=name,
            next_step="Use a version of Sojourn that knows this format.",
        )
    if flags & ~(COMPRESSED | ENCRYPTED) or reserved:
        raise IntegrityError(f"{name} has a damaged header.", object=name)
    encrypted = keys.sealing is not None
    if bool(flags & ENCRYPTED) != encrypted:
        state = "not encrypted" if encrypted else "encrypted"
        raise IntegrityError(f"{name} is {state}, unlike its repository.", object=name)
    tag = _SEALED_TAG if encrypted else _PLAIN_TAG
    size = len(data) - HEADER.size - tag
    compressed = bool(flags & COMPRESSED)
    if length > LIMITS[kind] or size < 0 or (size >= length if compressed else size != length):
        raise IntegrityError(f"{name} is not of the length it declares.", object=name)
    body: bytes | memoryview = memoryview(data)[HEADER.size :]
    if encrypted:
        try:
            body = cipher.decrypt(keys.object_key(salt), body, header + place)
        except cipher.Refused:
            raise _changed(name) from None
    else:
        body, proof = body[:size], body[size:]
        if not hmac.compare_digest(_plain_tag(keys, header, place, body), proof):
            raise _changed(name)
    if not compressed:
        return bytes(body)
    try:
        return decompress(body, length)
    except ValueError as error:
        raise IntegrityError(f"{name} is damaged: {error}.", object=name) from None


def _plain_tag(keys: DomainKeys, header: bytes, place: bytes, body: bytes | memoryview) -> bytes:
    hasher = blake3(header, key=keys.naming)
    # The place's length goes in, or bytes could be moved between place and body unseen.
    hasher.update(len(place).to_bytes(4, "little"))
    hasher.update(place)
    hasher.update(body)
    return hasher.digest()


def _changed(name: str) -> IntegrityError:
    return IntegrityError(f"{name} differs from what was written (seal).", object=name)
