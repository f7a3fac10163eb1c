"""The table behind an index: names of chunks to places, for many readers and one writer.

Guarantee: a reader that took a table sees all that was in it when it did, whatever a writer does
meanwhile: parts that others could see half changed are replaced, the rest only grows. Beside the
records of the packs a chunk takes 8 bytes: the first 32 bits of its name and its ordinal in one
number, in sorted runs. Names are hashes, so a small table of where each beginning starts leaves few
numbers to search; the whole name is compared in the records.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from typing import Any

from sojourn.repository.records import CHUNK, NAME_BYTES, WHERE, PackInfo, Place

RUN = 1 << 23  # numbers in a sorted run
_PIECE = 1 << 15  # numbers sorted in one call
_BUCKET = 13  # bits of the size of a bucket
_BITS = 32
_ORDINAL = (1 << _BITS) - 1
_RECORD = CHUNK.size
_WORDS = CHUNK.size // 4


class _Run:
    """A sorted run of numbers."""

    __slots__ = ("fan", "numbers", "shift")

    def __init__(self, numbers: array[int]) -> None:
        self.numbers = numbers
        bits = min(_BITS, max(1, len(numbers).bit_length() - 4))
        self.shift = _BITS - bits  # of the 32 bits of a name
        fan = array("I")
        at = 0
        for beginning in range((1 << bits) + 1):
            at = bisect_left(numbers, beginning << (_BITS + self.shift), at)
            fan.append(at)
        self.fan = fan


class Table:
    """Packs by the ordinals of their chunks, and what finds the ordinals of a name."""

    __slots__ = ("bases", "dead", "hidden", "packs", "recent", "runs", "total")

    def __init__(self) -> None:
        self.packs: list[PackInfo] = []
        self.bases: list[int] = []  # the ordinal of each pack's first chunk
        self.total = 0
        self.dead: frozenset[bytes] = frozenset()  # packs that are no more
        self.hidden: frozenset[bytes] = frozenset()  # these, and those that are excluded
        self.recent: dict[bytes, int | tuple[int, ...]] = {}
        self.runs: tuple[_Run, ...] = ()

    def changed(self, **parts: Any) -> Table:
        """A copy with other parts."""
        made = Table()
        for slot in self.__slots__:
            setattr(made, slot, parts.get(slot, getattr(self, slot)))
        return made

    def find(self, name: bytes, avoid: Collection[bytes]) -> Place | None:
        """A place of a name in a pack that is neither hidden nor avoided. All in one function:
        it is called for every chunk of every capture."""
        hidden = self.hidden
        if self.recent and (found := self.recent.get(name)) is not None:
            for ordinal in found if isinstance(found, tuple) else (found,):
                pack, at = self._record(ordinal)
                if pack.id not in hidden and pack.id not in avoid:
                    return Place(pack, *pack.where(at))
        if len(name) != NAME_BYTES:
            return None
        first = int.from_bytes(name[:4], "little")
        low = first << _BITS
        for run in self.runs:
            bucket = first >> run.shift
            fan = run.fan
            end = fan[bucket + 1]
            numbers = run.numbers
            index = bisect_left(numbers, low, fan[bucket], end)
            while index < end:
                number = numbers[index]
                if number >> _BITS != first:
                    break
                ordinal = number & _ORDINAL
                which = bisect_right(self.bases, ordinal) - 1
                pack = self.packs[which]
                at = (ordinal - self.bases[which]) * _RECORD
                if (
                    pack.chunks.startswith(name, at)
                    and pack.id not in hidden
                    and pack.id not in avoid
                ):
                    return Place(pack, *WHERE.unpack_from(pack.chunks, at + NAME_BYTES))
                index += 1
        return None

    def places(self, name: bytes) -> Iterator[Place]:
        """Every place of a name, in dead and excluded packs too."""
        if len(name) != NAME_BYTES:
            return
        found = self.recent.get(name)
        if found is not None:
            for ordinal in found if isinstance(found, tuple) else (found,):
                pack, at = self._record(ordinal)
                yield Place(pack, *pack.where(at))
        first = int.from_bytes(name[:4], "little")
        for run in self.runs:
            bucket = first >> run.shift
            end = run.fan[bucket + 1]
            index = bisect_left(run.numbers, first << _BITS, run.fan[bucket], end)
            while index < end and (number := run.numbers[index]) >> _BITS == first:
                pack, at = self._record(number & _ORDINAL)
                if pack.chunks.startswith(name, at * _RECORD):
                    yield Place(pack, *pack.where(at))
                index += 1

    def _record(self, ordinal: int) -> tuple[PackInfo, int]:
        which = bisect_right(self.bases, ordinal) - 1
        return self.packs[which], ordinal - self.bases[which]

    # -- for the one writer -----------------------------------------------------------------
    def append(self, info: PackInfo) -> int:
        """Give a pack's chunks their ordinals; they are not found before a name leads to them."""
        base = self.total
        if base + len(info) > _ORDINAL:
            raise ValueError("more chunks than an index can number")
        self.packs.append(info)
        self.bases.append(base)  # after the pack: a reader searches here first
        self.total = base + len(info)
        return base

    def remember(self, info: PackInfo, base: int) -> None:
        """Let the names of a pack be found, by the dict."""
        recent = self.recent
        for ordinal, name in enumerate(info.names(), base):
            other = recent.setdefault(name, ordinal)
            if other != ordinal:
                recent[name] = (*(other if isinstance(other, tuple) else (other,)), ordinal)

    def with_numbers(self, numbers: array[int]) -> Table:
        """A table that has these numbers too, in sorted runs."""
        runs = list(self.runs)
        parts = [
            array("Q", sorted(numbers[at : at + _PIECE])) for at in range(0, len(numbers), _PIECE)
        ]
        size = len(numbers)
        # Runs of one size are joined, so that there are few and each number is moved seldom.
        while runs and len(runs[-1].numbers) <= 2 * size and len(runs[-1].numbers) + size <= RUN:
            parts.append(runs.pop().numbers)
            size += len(parts[-1])
        return self.changed(runs=(*runs, _Run(_joined(parts, size))))

    def with_recent_sorted(self) -> Table:
        """A table whose dict is empty and its names in a sorted run."""
        numbers = array("Q")
        for name, found in self.recent.items():
            low = int.from_bytes(name[:4], "little") << _BITS
            ordinals = found if isinstance(found, tuple) else (found,)
            numbers.extend(low | ordinal for ordinal in ordinals)
        return self.with_numbers(numbers).changed(recent={})


def _joined(parts: list[array[int]], size: int) -> array[int]:
    """Sorted arrays as one. Bucket by bucket: sorting all in one call would hold up every other
    thread of the process for as long as it takes, and take 44 bytes for each number."""
    bits = max(0, size.bit_length() - _BUCKET)
    shift = 2 * _BITS - bits
    buckets = [array("Q") for _ in range(1 << bits)]
    for part in parts:
        at = 0
        for number, bucket in enumerate(buckets, 1):
            end = bisect_left(part, number << shift, at)
            bucket.extend(part[at:end])
            at = end
    joined = array("Q")
    buckets.reverse()
    while buckets:
        joined.extend(sorted(buckets.pop()))
    return joined


def numbers_of(info: PackInfo, base: int) -> list[int]:
    """The numbers of a pack's chunks, whose ordinals begin at `base`."""
    firsts = info.words()[0::_WORDS]
    return [first << _BITS | ordinal for ordinal, first in enumerate(firsts, base)]
