"""What is known to be lost: a mark beside each snapshot that cannot be restored whole any more.

Guarantee: a loss that a repair could not make good is written down before anything else is done
about it, named by recoveries, listed by every check, and goes away only when the chunks are back or
the snapshot is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.domains import DAMAGED, Domain
from sojourn.repository.sealed import DAMAGE

NAME_BYTES = 32


class Damage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a snapshot has lost. `objects` name layers, images and files for people; `chunks` are
    the names of lost chunks, 32 bytes each; `found_at` is by the store's clock."""

    snapshot: str
    session: str
    found_at: float
    objects: list[str]
    chunks: bytes

    def chunk_names(self) -> Iterator[bytes]:
        """The names of the lost chunks."""
        for at in range(0, len(self.chunks), NAME_BYTES):
            yield self.chunks[at : at + NAME_BYTES]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Damage)


def write_damage(domain: Domain, damage: Damage) -> None:
    """Mark a snapshot as damaged, or change what its mark says."""
    key = domain.key(DAMAGED, damage.snapshot)
    domain.put_object(DAMAGE, key, _encoder.encode(damage))


def remove_damage(domain: Domain, snapshot: str) -> None:
    """Take a mark away: the snapshot is whole again, or deleted."""
    domain.backend.delete([domain.key(DAMAGED, snapshot)])


def read_damage(domain: Domain, snapshot: str) -> Damage | None:
    """The mark of a snapshot, if it has one. Raises IntegrityError where it cannot be read."""
    key = domain.key(DAMAGED, snapshot)
    try:
        payload = domain.get_object(DAMAGE, key)
    except ObjectMissing:
        return None
    return decode_damage(payload, key)


def decode_damage(payload: bytes, key: str) -> Damage:
    """A mark from its payload. Raises IntegrityError naming the key."""
    try:
        found = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{key} is malformed: {error}", object=key) from None
    if found.snapshot != key.rpartition("/")[2] or len(found.chunks) % NAME_BYTES:
        raise IntegrityError(f"{key} is inconsistent.", object=key)
    return found


def read_damages(domain: Domain) -> dict[str, Damage]:
    """All marks of a domain, by snapshot."""
    found = {}
    for info in domain.ids(DAMAGED):
        damage = read_damage(domain, info.key.rpartition("/")[2])
        if damage is not None:
            found[damage.snapshot] = damage
    return found
