"""Downloading chunks: found by the index, fetched in few and large requests, opened in threads.

Guarantee: every chunk that was asked for is handed out exactly once, with the bytes its pack was
written with, or an error is raised: IntegrityError names the pack, the block and what needs it. A
damaged block or a missing pack is no end where another pack holds the chunk too; that it was needed
is logged. A pack that is gone was collected or rewritten: the index is read again before it counts
as missing.

Memory is bounded whatever is asked for: at most `WINDOW` units are requested, opened or waiting
to be handed out. A unit is `UNIT` bytes of stored and of opened blocks, or one larger block; so
that is some 64 MiB, beside 200 bytes for each name asked for. Who takes chunks slowly slows the
reading.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.domains import Domain
from sojourn.repository.packs import PackInfo, Place, open_block

log = logging.getLogger(__name__)

REQUESTS = 6  # at once
WINDOW = 8
UNIT = 4 << 20
GAP = 128 << 10  # unwanted bytes that are read sooner than asked around

Wanted = tuple[bytes, int, int]  # name, offset in the block, length
_Where = tuple[bytes, int]  # pack id, number of the block
_Failed = tuple[int, list[Wanted], IntegrityError | ObjectMissing]  # a block, and why


class _Unit(msgspec.Struct, gc=False):
    """What one request fetches: blocks of one pack, near to one another, and what is wanted of
    each."""

    pack: PackInfo
    blocks: list[tuple[int, list[Wanted]]]


class _Opened(msgspec.Struct, gc=False):
    """What came of a unit: opened blocks, and what could not be had with the reason."""

    blocks: list[tuple[bytes, list[Wanted]]]
    failed: list[_Failed]


class Reader:
    """Reads chunks of one domain. Safe for many threads."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def chunks(
        self, names: Iterable[bytes], *, needed_by: str = "a reader"
    ) -> Iterator[tuple[bytes, bytes]]:
        """The chunks of these names, each once, in the order in which they lie in their packs
        (packs in the order in which the names lead to them).

        Raises IntegrityError, StoreUnreachable, StoreRefused. Closing the iterator early ends the
        reading."""
        return _Reading(self._domain, needed_by).run(names)


class _Reading:
    """One call of `chunks`."""

    def __init__(self, domain: Domain, needed_by: str) -> None:
        self._domain = domain
        self._needed_by = needed_by
        self._bad: dict[_Where, str] = {}  # blocks that could not be had, with the cause
        self._refreshed: set[bytes] = set()  # packs after whose absence the index was read again
        self._queue: deque[_Unit] = deque()

    def run(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        self._plan(self._places(names))
        running: deque[Future[_Opened]] = deque()
        units: deque[_Unit] = deque()
        pool = ThreadPoolExecutor(REQUESTS, "read chunks")
        try:
            while self._queue or running:
                while self._queue and len(running) < WINDOW:
                    unit = self._queue.popleft()
                    units.append(unit)
                    running.append(pool.submit(self._fetch, unit))
                opened = running.popleft().result()
                unit = units.popleft()
                for raw, wanted in opened.blocks:
                    for name, offset, length in wanted:
                        yield name, raw[offset : offset + length]
                if opened.failed:
                    self._find_elsewhere(unit.pack, opened.failed)
        finally:
            pool.shutdown(cancel_futures=True)

    # -- planning ---------------------------------------------------------------------------
    def _places(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, Place]]:
        index = self._domain.index
        unknown = []
        locate = index.locate
        for name in dict.fromkeys(names):
            place = locate(name)
            if place is None:
                unknown.append(name)
            else:
                yield name, place
        fault: IntegrityError | None = None
        if unknown:
            fault = self._domain.refresh_index()  # others may have written them since it was read
        for name in unknown:
            place = locate(name)
            if place is None:
                raise self._unknown(name, fault)
            yield name, place

    def _unknown(self, name: bytes, fault: IntegrityError | None) -> IntegrityError:
        """No index names a chunk. One that cannot be read may be the one that did."""
        if fault is None:
            return IntegrityError(
                f"Chunk {name.hex()}, needed by {self._needed_by}, is in no pack.",
                object=self._needed_by,
                chunk=name.hex(),
            )
        lost = IntegrityError(
            f"Chunk {name.hex()}, needed by {self._needed_by}, cannot be found: {fault.message}",
            object=fault.details.get("object"),
            chunk=name.hex(),
            needed_by=self._needed_by,
            next_step="`sojourn store repair` indexes the packs anew.",
        )
        lost.__cause__ = fault
        return lost

    def _plan(self, places: Iterable[tuple[bytes, Place]]) -> None:
        packs: dict[bytes, tuple[PackInfo, dict[int, list[Wanted]]]] = {}
        for name, (pack, block, offset, length) in places:
            found = packs.get(pack.id)
            if found is None:
                found = packs[pack.id] = (pack, {})
            wanted = found[1].get(block)
            if wanted is None:
                found[1][block] = [(name, offset, length)]
            else:
                wanted.append((name, offset, length))
        for pack, blocks in packs.values():
            self._queue.extend(_units(pack, blocks))

    # -- in threads -------------------------------------------------------------------------
    def _fetch(self, unit: _Unit) -> _Opened:
        """Fetch and open a unit's blocks. Raises what says nothing about the blocks themselves
        (the store cannot be reached, ...)."""
        try:
            stored = self._stored(unit)
        except ObjectMissing as error:
            return _Opened([], [(number, wanted, error) for number, wanted in unit.blocks])
        except IntegrityError as error:
            if len(unit.blocks) == 1:
                return _Opened([], [(*unit.blocks[0], error)])
            # A pack that is cut off still has its first blocks.
            parts = [self._fetch(_Unit(unit.pack, [block])) for block in unit.blocks]
            return _Opened(
                [opened for part in parts for opened in part.blocks],
                [failed for part in parts for failed in part.failed],
            )
        opened: list[tuple[bytes, list[Wanted]]] = []
        failed: list[_Failed] = []
        for (number, wanted), data in zip(unit.blocks, stored, strict=True):
            try:
                raw = open_block(data, unit.pack, number, self._domain.keys)
            except IntegrityError as error:
                failed.append((number, wanted, error))
            else:
                opened.append((raw, wanted))
        return _Opened(opened, failed)

    def _stored(self, unit: _Unit) -> list[memoryview]:
        """The stored bytes of each block."""
        blocks = [unit.pack.block(number) for number, _ in unit.blocks]
        start, end = blocks[0].offset, blocks[-1].offset + blocks[-1].stored
        key = self._domain.pack_key(unit.pack.id)
        data = memoryview(self._domain.backend.get_ranges(key, [(start, end - start)])[0])
        return [data[block.offset - start :][: block.stored] for block in blocks]

    # -- what could not be had --------------------------------------------------------------
    def _find_elsewhere(self, pack: PackInfo, failed: list[_Failed]) -> None:
        """Plan the chunks of bad blocks anew from other packs. Raises IntegrityError."""
        key = self._domain.pack_key(pack.id)
        for number, _, error in failed:
            self._bad[pack.id, number] = error.message
        missing = any(isinstance(error, ObjectMissing) for _, _, error in failed)
        if missing and pack.id not in self._refreshed:
            self._refreshed.add(pack.id)
            self._domain.refresh_index()
        found: list[tuple[bytes, Place]] = []
        for number, wanted, error in failed:
            for name, _, _ in wanted:
                place = self._good_place(name)
                if place is None:
                    raise self._lost(key, number, name, error)
                found.append((name, place))
            log.warning(
                "block %d of %s cannot be used (%s); %s gets %d chunks from other packs",
                number,
                key,
                error.message,
                self._needed_by,
                len(wanted),
            )
        self._plan(found)

    def _good_place(self, name: bytes) -> Place | None:
        """A place of a chunk that was not found bad."""
        for place in self._domain.index.places(name):
            if (place.pack.id, place.block) not in self._bad:
                return place
        return None

    def _lost(self, key: str, number: int, name: bytes, error: Exception) -> IntegrityError:
        cause = (
            "the pack is missing" if isinstance(error, ObjectMissing) else str(error).rstrip(".")
        )
        lost = IntegrityError(
            f"Block {number} of {key}, needed by {self._needed_by}, cannot be read: {cause}.",
            object=key,
            block=number,
            chunk=name.hex(),
            needed_by=self._needed_by,
            next_step="`sojourn store check` lists what is damaged; "
            "`sojourn store repair` brings back what another copy has.",
        )
        lost.__cause__ = error
        return lost


def _units(pack: PackInfo, blocks: dict[int, list[Wanted]]) -> Iterator[_Unit]:
    unit = _Unit(pack, [])
    size = 0
    end = -1
    for number in sorted(blocks):
        block = pack.block(number)
        more = max(block.stored, block.raw)
        if unit.blocks and (size + more > UNIT or block.offset - end > GAP):
            yield unit
            unit, size = _Unit(pack, []), 0
        elif unit.blocks:
            size += block.offset - end
        unit.blocks.append((number, blocks[number]))
        size += more
        end = block.offset + block.stored
    if unit.blocks:
        yield unit
