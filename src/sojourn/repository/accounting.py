"""What the snapshots, sessions and tenants of a repository take, and what it holds in all.

Guarantee: every stored byte of every pack is counted once: as needed by one snapshot alone, as
shared, or as dead. A chunk's stored bytes are its part of its block's. One pass: each layer, image,
segment and recipe is read once, whatever number of snapshots refers to it.

Memory: some 150 bytes for each chunk, and four for each time one is referred to.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import msgspec

from sojourn.model.snapshots import Snapshot
from sojourn.repository.backends.base import Backend
from sojourn.repository.cutting import SMALL_FILE, decode_recipe
from sojourn.repository.domains import Domain
from sojourn.repository.downloads import Reader
from sojourn.repository.images import decode_image
from sojourn.repository.inventory import Inventory, survey
from sojourn.repository.marking import SHARED, read_snapshots
from sojourn.repository.needs import decode_segment, read_layer
from sojourn.repository.records import BLOCK, CHUNK_DATA, CHUNK_RECIPE, CHUNK_SEGMENT
from sojourn.repository.sealed import IMAGE
from sojourn.store.manifests import FILE


class Usage(msgspec.Struct):
    """What something takes. `logical` are the bytes of its files and memory as a restore writes
    them; `unique` the stored bytes that nothing else needs: deleting it frees them; `shared` those
    that others need too."""

    logical: int = 0
    unique: int = 0
    shared: int = 0


class Totals(msgspec.Struct):
    """What a repository or domain holds. `raw` are the bytes of needed chunks before compression,
    `used` what they take in packs, `dead` what nothing needs; `pack_bytes` is all of it, with the
    packs' own records."""

    snapshots: int = 0
    packs: int = 0
    pack_bytes: int = 0
    chunks: int = 0
    logical: int = 0
    raw: int = 0
    used: int = 0
    dead: int = 0

    @property
    def deduplication(self) -> float:
        """How many times the needed chunks would be stored without deduplication."""
        return self.logical / self.raw if self.raw else 1.0

    @property
    def compression(self) -> float:
        """How many times larger the needed chunks are than what they take."""
        return self.raw / self.used if self.used else 1.0


class Accounts(msgspec.Struct):
    """The result: by snapshot id, session id, tenant (domain), and in all."""

    snapshots: dict[str, Usage]
    sessions: dict[str, Usage]
    tenants: dict[str, Usage]
    domains: dict[str, Totals]
    total: Totals


def account(
    backend: Backend,
    domain: Callable[[str], Domain],
    *,
    shared: str = SHARED,
) -> Accounts:
    """Count a whole repository, whose domains `domain` opens by name. Raises IntegrityError naming
    what cannot be read, StoreUnreachable."""
    lying = survey(backend)
    names = sorted({*lying, shared})
    books = {name: _Book(domain(name)) for name in names}
    held = {name: list(read_snapshots(books[name].domain)) for name in names}
    for name, snapshots in held.items():
        for snapshot in snapshots:
            for number, layer in enumerate(snapshot.layers):
                books[name if number else shared].layer(layer.id, snapshot)
            if snapshot.memory is not None:
                books[name].image(snapshot.memory.id, snapshot)
    accounts = Accounts({}, {}, {}, {}, Totals())
    for name, book in books.items():
        book.read()
        totals = book.weigh(lying.get(name, Inventory()), accounts)
        totals.snapshots = len(held[name])
        accounts.domains[name] = totals
    for name, snapshots in held.items():
        if snapshots:
            _usages(name, snapshots, books[name], books[shared], accounts)
    for totals in accounts.domains.values():
        for field in totals.__struct_fields__:
            total = getattr(accounts.total, field) + getattr(totals, field)
            setattr(accounts.total, field, total)
    return accounts


def _usages(
    name: str, snapshots: list[Snapshot], own: _Book, shared: _Book, accounts: Accounts
) -> None:
    """Fill in logical and shared bytes, where `weigh` has left the unique ones."""
    tenant = accounts.tenants.setdefault(name, Usage())
    by_session: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        by_session.setdefault(snapshot.session, []).append(snapshot)
        usage = accounts.snapshots.setdefault(snapshot.id, Usage())
        usage.logical = _logical(snapshot)
        usage.shared = max(0, _needed([snapshot], own, shared) - usage.unique)
    for session, group in by_session.items():
        usage = accounts.sessions.setdefault(session, Usage())
        usage.logical += sum(map(_logical, group))
        usage.shared += max(0, _needed(group, own, shared) - usage.unique)
    tenant.logical = sum(map(_logical, snapshots))
    tenant.unique = accounts.domains[name].used if own is not shared else 0
    tenant.shared = shared.size_of({snapshot.layers[0].id for snapshot in snapshots})
    accounts.domains[name].logical = tenant.logical


def _logical(snapshot: Snapshot) -> int:
    memory = snapshot.memory.bytes if snapshot.memory is not None else 0
    return sum(layer.bytes for layer in snapshot.layers) + memory


def _needed(group: Iterable[Snapshot], own: _Book, shared: _Book) -> int:
    """Stored bytes of all that a group of snapshots needs."""
    lowest: set[str] = set()
    others: set[str] = set()
    for snapshot in group:
        lowest.add(snapshot.layers[0].id)
        others.update(layer.id for layer in snapshot.layers[1:])
        if snapshot.memory is not None:
            others.add(snapshot.memory.id)
    return shared.size_of(lowest) + own.size_of(others)


_MANY = 0xFFFFFFFF


class _Book:
    """The chunks of one domain: who needs each, and what it takes."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self._names: list[str] = []  # of snapshots and sessions, by number
        self._numbers: dict[str, int] = {}
        self._layers: dict[str, int] = {}  # owner of each layer and image
        self._images: dict[str, int] = {}
        self._ordinals: dict[bytes, int] = {}
        self._owners = array("Q")
        self._sizes = array("d")
        self._parts: dict[str, list[array[int]]] = {}  # of a layer or image: ordinals of its chunks
        self._known: dict[frozenset[str], int] = {}

    def layer(self, id: str, snapshot: Snapshot) -> None:
        """Note that a snapshot needs a layer."""
        self._own(self._layers, id, snapshot)

    def image(self, id: str, snapshot: Snapshot) -> None:
        """Note that a snapshot needs an image."""
        self._own(self._images, id, snapshot)

    def _own(self, place: dict[str, int], id: str, snapshot: Snapshot) -> None:
        owner = self._number(snapshot.session) << 32 | self._number(snapshot.id)
        known = place.get(id)
        place[id] = owner if known is None else _merged(known, owner)

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        return number

    def _chunk(self, name: bytes, owner: int) -> int:
        ordinal = self._ordinals.get(name)
        if ordinal is None:
            ordinal = self._ordinals[name] = len(self._owners)
            self._owners.append(owner)
            self._sizes.append(0.0)
        elif self._owners[ordinal] != owner:
            self._owners[ordinal] = _merged(self._owners[ordinal], owner)
        return ordinal

    def read(self) -> None:
        """Read the layers and images, then all segments, then all recipes."""
        domain = self.domain
        chunk_name = domain.keys.chunk_name
        read = Reader(domain).chunks
        contents: dict[bytes, array[int]] = {}  # of a segment or recipe: ordinals
        segments: dict[bytes, int] = {}
        for id, owner in self._layers.items():
            listed = [chunk_name(CHUNK_SEGMENT, each) for each in read_layer(domain, id).segments]
            for name in listed:
                segments[name] = _merged(segments.get(name, owner), owner)
                contents.setdefault(name, array("I"))
            self._parts[id] = [contents[name] for name in listed]
        large: dict[bytes, tuple[int, int]] = {}
        within: dict[bytes, list[bytes]] = {}
        for name, data in read(segments, needed_by="the accounts"):
            owner, part = segments[name], contents[name]
            part.append(self._chunk(name, owner))
            for entry in decode_segment(data, name):
                if entry.type != FILE or not entry.size or entry.link is not None:
                    continue
                if entry.size <= SMALL_FILE:
                    part.append(self._chunk(chunk_name(CHUNK_DATA, entry.digest), owner))
                    continue
                recipe = chunk_name(CHUNK_RECIPE, entry.digest)
                known, _ = large.get(recipe, (owner, 0))
                large[recipe] = _merged(known, owner), entry.size
                within.setdefault(recipe, []).append(name)
        for recipe, data in read(large, needed_by="the accounts"):
            owner, size = large[recipe]
            ordinals = [self._chunk(recipe, owner)]
            for content, _ in decode_recipe(data, size, f"chunk {recipe.hex()}"):
                ordinals.append(self._chunk(chunk_name(CHUNK_DATA, content), owner))
            for segment in within[recipe]:
                contents[segment].extend(ordinals)
        for id, owner in self._images.items():
            root = decode_image(domain.get_root(IMAGE, domain.image_key(id)), id)
            names = (chunk_name(CHUNK_DATA, content) for content in root.chunk_ids())
            self._parts[id] = [array("I", (self._chunk(name, owner) for name in names))]

    def weigh(self, lying: Inventory, accounts: Accounts) -> Totals:
        """Go through all packs: what each chunk takes, and who alone needs it."""
        totals = Totals(packs=len(lying.packs), pack_bytes=lying.pack_bytes)
        unique: dict[int, float] = {}
        used = kept = 0.0
        seen = bytearray(len(self._owners))
        for pack in self.domain.index.packs():
            if pack.id not in lying.packs:
                continue
            totals.chunks += len(pack)
            before = used
            rates = [block.stored / block.raw for block in map(pack.block, range(pack.block_count))]
            for name, number, _, length in pack.records():
                ordinal = self._ordinals.get(name)
                if ordinal is None or seen[ordinal]:
                    continue  # of no use, or no more than another copy
                seen[ordinal] = 1
                stored = length * rates[number]
                self._sizes[ordinal] = stored
                used += stored
                totals.raw += length
                owner = self._owners[ordinal]
                unique[owner] = unique.get(owner, 0.0) + stored
            if used > before:  # its header and footer are no one's and not dead
                kept += pack.size - sum(block[1] for block in BLOCK.iter_unpack(pack.blocks))
        totals.used = round(used)
        totals.dead = max(0, round(totals.pack_bytes - used - kept))
        for owner, size in unique.items():
            session, snapshot = owner >> 32, owner & 0xFFFFFFFF
            if snapshot != _MANY:
                found = accounts.snapshots.setdefault(self._names[snapshot], Usage())
                found.unique += round(size)
            if session != _MANY:
                found = accounts.sessions.setdefault(self._names[session], Usage())
                found.unique += round(size)
        return totals

    def size_of(self, ids: Iterable[str]) -> int:
        """Stored bytes of the chunks of layers and images, each counted once."""
        wanted = frozenset(ids)
        known = self._known.get(wanted)
        if known is None:
            ordinals: set[int] = set()
            for id in wanted:
                for part in self._parts.get(id, ()):
                    ordinals.update(part)
            known = self._known[wanted] = round(sum(map(self._sizes.__getitem__, ordinals)))
        return known


def _merged(one: int, other: int) -> int:
    """The owner of what two owners need: the upper half a session, the lower a snapshot."""
    if one == other:
        return one
    session = one >> 32 if one >> 32 == other >> 32 else _MANY
    snapshot = one & _MANY if one & _MANY == other & _MANY else _MANY
    return session << 32 | snapshot
