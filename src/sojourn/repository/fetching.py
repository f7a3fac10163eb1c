"""Reading many chunks, pack by pack, for marking, rewriting and accounting.

Guarantee: what is given is what was put away under that name's record, opened and compared with the
block's digest and seal; each block is fetched once, however many chunks of it are asked for. A pack
that vanished is looked for elsewhere once (a collection may have rewritten it); what is nowhere
raises IntegrityError naming the chunk. At most THREADS pieces of BATCH bytes are held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.blocks import open_block
from sojourn.repository.domains import Domain
from sojourn.repository.records import PackInfo, Place

THREADS = 4
BATCH = 8 << 20

_Wanted = dict[int, list[tuple[bytes, int, int]]]  # by block: name, offset, length
_Piece = tuple[PackInfo, list[int], _Wanted]


def chunk_object(name: bytes) -> str:
    """How errors name a chunk."""
    return f"chunk {name.hex()}"


def missing(name: bytes) -> IntegrityError:
    """The error for a chunk that is nowhere."""
    return IntegrityError(
        f"{chunk_object(name)} is in no pack.",
        object=chunk_object(name),
        next_step="Run `sojourn store check`, then `sojourn store repair`.",
    )


def fetch(domain: Domain, names: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Name and bytes of each chunk, in the order of the packs. Raises IntegrityError."""
    wanted, gone = _plan(domain, names, frozenset())
    if gone:
        domain.index.refresh()
        more, gone = _plan(domain, gone, frozenset())
        if gone:
            raise missing(gone[0])
        for pack, blocks in more.items():
            for number, chunks in blocks.items():
                wanted.setdefault(pack, {}).setdefault(number, []).extend(chunks)
    lost: list[bytes] = []
    vanished: set[bytes] = set()
    infos = {id: info for id in wanted if (info := domain.index.pack(id)) is not None}
    for id in wanted.keys() - infos.keys():  # forgotten between the look and now
        lost.extend(name for chunks in wanted.pop(id).values() for name, _, _ in chunks)
    pieces = (piece for id, blocks in wanted.items() for piece in _pieces(infos[id], blocks))
    with ThreadPoolExecutor(THREADS, "fetch chunks") as pool:
        running: deque[tuple[_Piece, Future[list[tuple[bytes, bytes]]]]] = deque()
        try:
            for piece in pieces:
                running.append((piece, pool.submit(_read, domain, piece)))
                if len(running) > THREADS:
                    yield from _result(running, lost, vanished)
            while running:
                yield from _result(running, lost, vanished)
        finally:
            for _, future in running:
                future.cancel()
    if lost:
        yield from _elsewhere(domain, lost, vanished)


def _plan(
    domain: Domain, names: Iterable[bytes], avoid: frozenset[bytes]
) -> tuple[dict[bytes, _Wanted], list[bytes]]:
    wanted: dict[bytes, _Wanted] = {}
    gone = []
    for name in names:
        place = _place(domain, name, avoid)
        if place is None:
            gone.append(name)
            continue
        blocks = wanted.setdefault(place.pack.id, {})
        blocks.setdefault(place.block, []).append((name, place.offset, place.length))
    return wanted, gone


def _place(domain: Domain, name: bytes, avoid: frozenset[bytes]) -> Place | None:
    found = domain.index.find(name, avoid)
    if found is not None:
        return found
    for place in domain.index.places(name):
        if place.pack.id not in avoid:
            return place
    return None


def _pieces(pack: PackInfo, blocks: _Wanted) -> Iterator[_Piece]:
    numbers: list[int] = []
    size = 0
    for number in sorted(blocks):
        stored = pack.block(number).stored
        if numbers and size + stored > BATCH:
            yield pack, numbers, blocks
            numbers, size = [], 0
        numbers.append(number)
        size += stored
    if numbers:
        yield pack, numbers, blocks


def _read(domain: Domain, piece: _Piece) -> list[tuple[bytes, bytes]]:
    pack, numbers, blocks = piece
    ranges = [(block.offset, block.stored) for block in map(pack.block, numbers)]
    found = []
    read = domain.backend.get_ranges(domain.pack_key(pack.id), ranges)
    for number, stored in zip(numbers, read, strict=True):
        raw = open_block(stored, pack, number, domain.keys)
        for name, offset, length in blocks[number]:
            found.append((name, raw[offset : offset + length]))
    return found


def _result(
    running: deque[tuple[_Piece, Future[list[tuple[bytes, bytes]]]]],
    lost: list[bytes],
    vanished: set[bytes],
) -> Iterator[tuple[bytes, bytes]]:
    (pack, numbers, blocks), future = running.popleft()
    try:
        yield from future.result()
    except ObjectMissing:
        vanished.add(pack.id)
        lost.extend(name for number in numbers for name, _, _ in blocks[number])


def _elsewhere(
    domain: Domain, names: list[bytes], vanished: set[bytes]
) -> Iterator[tuple[bytes, bytes]]:
    domain.index.refresh()
    wanted, gone = _plan(domain, names, frozenset(vanished))
    if gone:
        raise missing(gone[0])
    for id, blocks in wanted.items():
        pack = domain.index.pack(id)
        for piece in _pieces(pack, blocks) if pack is not None else ():
            try:
                yield from _read(domain, piece)
            except ObjectMissing:
                raise missing(next(iter(blocks.values()))[0][0]) from None
        if pack is None:
            raise missing(next(iter(blocks.values()))[0][0])
