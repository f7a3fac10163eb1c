"""Tombstones: what a collection has marked, and what that means for whoever publishes.

Guarantee: nothing is removed but what a tombstone names, and a tombstone stays until long after
the last removal. So whoever publishes a snapshot and finds, after writing it, that all it needs
also stands somewhere no tombstone names, has it for good. Which steps in which order make that so
is in docs/formats/repository.md (Collection).

A tombstone goes through three states, each change by compare-and-swap on the object's version:

    named     written before the second reading; nothing of it is removed yet
    removing  the second reading is done: the list is final, and is being removed by somebody
    done      all of it is removed; kept for KEPT seconds
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from sojourn.errors import Conflict, IntegrityError, ObjectMissing
from sojourn.repository.backends.object_keys import is_key
from sojourn.repository.domains import COPIES, IMAGES, LAYERS, TOMBSTONES, Domain
from sojourn.repository.sealed import TOMBSTONE

NAMED, REMOVING, DONE = "named", "removing", "done"
# Seconds a finished tombstone is kept. An upload begins anew after half a day, and the store's
# clock may be a day wrong: a week is more than both.
KEPT = 7 * 86400.0
ID_BYTES = 32
_STATES = {NAMED, REMOVING, DONE}
ROOTS = frozenset({LAYERS, IMAGES, COPIES})


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a collection marked: ids of packs, 32 bytes each, and keys of root objects. `writer`
    is new with each writing, so that a swap whose answer was lost is known again."""

    state: str
    packs: bytes
    roots: list[str]
    writer: str

    def pack_ids(self) -> Iterator[bytes]:
        """The ids of the packs it names."""
        for at in range(0, len(self.packs), ID_BYTES):
            yield self.packs[at : at + ID_BYTES]


class Found(NamedTuple):
    """A tombstone as it stands in the store."""

    key: str
    version: str
    modified: float
    tombstone: Tombstone


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Tombstone)


def tombstone(state: str, packs: Iterable[bytes], roots: Iterable[str]) -> Tombstone:
    """A tombstone in a state."""
    return Tombstone(state, b"".join(sorted(packs)), sorted(roots), secrets.token_hex(8))


def encode_tombstone(value: Tombstone) -> bytes:
    """The payload of a tombstone."""
    return _encoder.encode(value)


def decode_tombstone(payload: bytes, name: str) -> Tombstone:
    """A tombstone from its payload; `name` is its key. Raises IntegrityError naming it."""
    try:
        found = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{name} is malformed: {error}", object=name) from None
    if found.state not in _STATES or len(found.packs) % ID_BYTES:
        raise IntegrityError(f"{name} is inconsistent.", object=name)
    domain = name.partition("/")[0]
    for root in found.roots:
        place, _, rest = root.partition("/")
        if place != domain or rest.partition("/")[0] not in ROOTS or not is_key(root):
            # Removing is what a tombstone is for: it must not reach anything else.
            raise IntegrityError(f"{name} names {root!r}, which is no such object.", object=name)
    return found


class Tombstones:
    """The tombstones of a domain as this process knows them. For one thread at a time."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self._known: dict[str, Found] = {}

    def look(self) -> list[Found]:
        """All tombstones there are now; only new and changed ones are read. What they name is no
        longer found by the domain's uploads: its index passes over the packs, its layers and
        images count as absent and would be written as copies.

        One that cannot be read raises IntegrityError: what it names is not known, so nothing may
        be relied upon."""
        found: dict[str, Found] = {}
        for info in self.domain.ids("tombstones"):
            known = self._known.get(info.key)
            if known is None or known.version != info.version:
                try:
                    value, version = read_tombstone(self.domain, info.key)
                except ObjectMissing:
                    continue  # its time was over between the listing and now
                known = Found(info.key, version, info.modified, value)
            elif known.modified != info.modified:
                known = known._replace(modified=info.modified)
            found[info.key] = known
        self._known = found
        roots, packs = names(found.values())
        if packs:
            self.domain.index.exclude(packs)
        if roots:
            self.domain.avoid(roots)
        return list(found.values())


def names(found: Iterable[Found]) -> tuple[set[str], set[bytes]]:
    """Everything tombstones name: keys of root objects, ids of packs."""
    roots: set[str] = set()
    packs: set[bytes] = set()
    for each in found:
        roots.update(each.tombstone.roots)
        packs.update(each.tombstone.pack_ids())
    return roots, packs


def read_tombstone(domain: Domain, key: str) -> tuple[Tombstone, str]:
    """A tombstone and its version. Raises ObjectMissing, IntegrityError."""
    payload, version = domain.read_object(TOMBSTONE, key)
    return decode_tombstone(payload, key), version


def write_tombstone(domain: Domain, value: Tombstone) -> str:
    """Write a new tombstone; answers its key."""
    key = domain.key(TOMBSTONES, secrets.token_hex(16))
    domain.put_object(TOMBSTONE, key, encode_tombstone(value), create=True)
    return key


def swap(domain: Domain, old: Found, new: Tombstone) -> Found | None:
    """Put another content in a tombstone's place, if it still is as it was found. None where
    somebody else has changed or removed it."""
    try:
        domain.put_object(TOMBSTONE, old.key, encode_tombstone(new), replaces=old.version)
    except Conflict:
        pass  # somebody else's, or our own whose answer was lost: looked at below
    except ObjectMissing:
        return None
    try:
        now, version = read_tombstone(domain, old.key)
    except ObjectMissing:
        return None
    if now.writer != new.writer:
        return None
    return old._replace(version=version, tombstone=now)
