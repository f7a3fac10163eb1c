"""The index of a domain: which chunk lies where, for millions of chunks, in memory.

Guarantee: `find` answers in about a microsecond from any thread while others add and refresh, and
never from a pack that is to be avoided; what it answers was named by an index object or added by
this process after the store acknowledged the pack. Memory is about 55 bytes a chunk: the records
as they are stored and one sorted number.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.records import PackInfo, Place
from sojourn.repository.tables import RUN, Table, numbers_of

MAX_PACKS = 1 << 16  # packs one index object may name
_NOTHING: frozenset[bytes] = frozenset()
_RECENT = 1 << 15  # names kept in a dict before they are sorted
_THREADS = 8
_ATTEMPTS = 5

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[PackInfo])


def encode_index(infos: Sequence[PackInfo]) -> bytes:
    """The payload of an index object."""
    if len(infos) > MAX_PACKS:
        raise ValueError("too many packs for one index")
    return _encoder.encode(list(infos))


def decode_index(payload: bytes, *, name: str = "index") -> list[PackInfo]:
    """The packs of an index object, checked. Raises IntegrityError naming it."""
    try:
        infos = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{name} is malformed: {error}", object=name) from None
    if len(infos) > MAX_PACKS:
        raise IntegrityError(f"{name} names {len(infos)} packs.", object=name)
    for info in infos:
        cause = info.flaw()
        if cause is not None:
            raise IntegrityError(f"{name} is inconsistent: {cause}.", object=name)
    return infos


class Index:
    """The chunks of a domain. `listing` gives the keys of its index objects, `reading` the packs of
    one (raising ObjectMissing, IntegrityError)."""

    def __init__(
        self,
        listing: Callable[[], Iterable[str]] = tuple,
        reading: Callable[[str], list[PackInfo]] = lambda key: [],
    ) -> None:
        self._listing = listing
        self._reading = reading
        self._table = Table()
        self._lock = threading.Lock()  # of everything below and of changes of the state
        self._refreshing = threading.Lock()
        self._held: dict[bytes, PackInfo] = {}  # packs in the state, dead ones too
        self._excluded = _NOTHING
        self._named: dict[str, frozenset[bytes]] = {}  # pack ids by index object
        self._added: set[bytes] = set()  # packs that no index object names yet

    def __len__(self) -> int:
        """How many chunks it knows, duplicates counted."""
        return sum(map(len, self.packs()))

    # -- looking up -------------------------------------------------------------------------
    def find(self, name: bytes, avoid: Collection[bytes] = _NOTHING) -> Place | None:
        """Where a chunk lies, in a pack that is neither excluded nor in `avoid` (pack ids). For
        uploads; who only reads uses `locate`, to which an excluded pack is as good as any."""
        return self._table.find(name, avoid)

    def locate(self, name: bytes) -> Place | None:
        """Where a chunk lies, in any pack, one that is not excluded first."""
        return self.find(name) or next(iter(self.places(name)), None)

    def places(self, name: bytes) -> list[Place]:
        """Everywhere a chunk lies, in excluded packs too."""
        table = self._table
        return [place for place in table.places(name) if place.pack.id not in table.dead]

    def packs(self) -> list[PackInfo]:
        """All packs it knows."""
        with self._lock:
            dead = self._table.dead
            return [pack for id, pack in self._held.items() if id not in dead]

    def pack(self, id: bytes) -> PackInfo | None:
        """The pack of an id."""
        found = self._held.get(id)
        return None if found is None or id in self._table.dead else found

    def named(self) -> dict[str, frozenset[bytes]]:
        """Which packs the index objects name that were read, by their keys."""
        with self._lock:
            return dict(self._named)

    # -- changing ---------------------------------------------------------------------------
    def add(self, info: PackInfo) -> None:
        """Make a pack's chunks known. The store must have acknowledged the pack."""
        with self._lock:
            self._added.add(info.id)
            self._insert([info])

    def name(self, key: str, infos: Iterable[PackInfo]) -> None:
        """Note that the index object `key` has been written and names these packs."""
        with self._lock:
            infos = list(infos)
            self._insert(infos)
            self._name(key, infos)

    def remove(self, ids: Iterable[bytes]) -> None:
        """Forget packs."""
        with self._lock:
            self._forget(frozenset(ids))

    def exclude(self, ids: Iterable[bytes]) -> None:
        """Let `find` pass over these packs from now on: tombstones name them."""
        with self._lock:
            self._excluded |= frozenset(ids)
            self._table = self._table.changed(hidden=self._table.dead | self._excluded)

    @property
    def excluded(self) -> frozenset[bytes]:
        """The ids of the packs that `find` passes over."""
        return self._excluded

    def refresh(self, faults: list[IntegrityError] | None = None) -> None:
        """Read the index objects that are new and forget those that vanished. Damaged ones raise
        IntegrityError; with a list of `faults` they are put there and passed over."""
        with self._refreshing:
            for _ in range(_ATTEMPTS):
                before = frozenset(self._named)
                listed = frozenset(self._listing())
                if before - listed:
                    # Whoever replaces index objects writes the new ones first. A listing of many
                    # pages may miss both; one that begins now sees the new ones.
                    listed = frozenset(self._listing())
                if self._read(sorted(listed - before), faults):
                    self._drop(before - listed)
                    return
        raise IntegrityError("The index objects change faster than they can be read.", object="")

    def _read(self, keys: list[str], faults: list[IntegrityError] | None) -> bool:
        """Read index objects; False when one is gone since it was listed."""
        complete = True
        read: dict[str, list[PackInfo]] = {}
        with ThreadPoolExecutor(_THREADS, "read indexes") as pool:
            answers = {key: pool.submit(self._reading, key) for key in keys}
            try:
                for key, answer in answers.items():
                    try:
                        read[key] = answer.result()
                    except ObjectMissing:
                        complete = False
                    except IntegrityError as error:
                        _report(error, faults)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        with self._lock:
            accepted: dict[bytes, PackInfo] = {}
            for key, infos in list(read.items()):
                for info in infos:
                    known = accepted.setdefault(info.id, self._held.get(info.id, info))
                    if known != info:
                        del read[key]
                        cause = f"{key} and another index disagree about pack {info.id.hex()}."
                        _report(IntegrityError(cause, object=key), faults)
                        break
            self._insert(list(accepted.values()))
            for key, infos in read.items():
                self._name(key, infos)
        return complete

    def _drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            gone: set[bytes] = set()
            for key in keys:
                gone |= self._named.pop(key)
            self._forget(gone.difference(self._added, *self._named.values()))

    # -- with the lock held -----------------------------------------------------------------
    def _name(self, key: str, infos: list[PackInfo]) -> None:
        self._named[key] = frozenset(info.id for info in infos)
        self._added -= self._named[key]

    def _insert(self, infos: list[PackInfo]) -> None:
        table = self._table
        fresh = {info.id: info for info in infos if info.id not in self._held}
        back = table.dead.intersection(info.id for info in infos)
        if back:
            dead = table.dead - back
            table = table.changed(dead=dead, hidden=dead | self._excluded)
        bulk = sum(map(len, fresh.values())) > _RECENT
        numbers = array("Q")
        for info in fresh.values():
            base = table.append(info)
            self._held[info.id] = info
            if not bulk:
                table.remember(info, base)
                continue
            numbers.extend(numbers_of(info, base))
            if len(numbers) >= RUN:
                table = table.with_numbers(numbers)
                numbers = array("Q")
        if numbers:
            table = table.with_numbers(numbers)
        if len(table.recent) > _RECENT:
            table = table.with_recent_sorted()
        self._table = table

    def _forget(self, ids: Collection[bytes]) -> None:
        table = self._table
        dead = table.dead.union(id for id in ids if id in self._held)
        self._added.difference_update(ids)
        if sum(len(self._held[id]) for id in dead) * 4 <= table.total:
            self._table = table.changed(dead=dead, hidden=dead | self._excluded)
            return
        # Too much of the memory is for nothing: begin again with what lives. Readers go on with
        # the old table meanwhile.
        living = [info for id, info in self._held.items() if id not in dead]
        made = Index()
        made._insert(living)
        self._held = made._held
        self._table = made._table.changed(dead=_NOTHING, hidden=self._excluded)


def _report(error: IntegrityError, faults: list[IntegrityError] | None) -> None:
    if faults is None:
        raise error
    faults.append(error)
