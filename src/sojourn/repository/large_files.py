"""Putting files of many chunks together, whichever chunk comes first.

Guarantee: a file is finished exactly once, when all of its chunks are written, and then with the
BLAKE3 of its bytes from first to last: taken from the chunks as they come in order, and read back
from the disk for those that came before their turn. A bounded number of files is open at once.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from blake3 import blake3

from sojourn.errors import IntegrityError
from sojourn.repository.cutting import LARGEST, ZEROS, file_hasher, zeros_id
from sojourn.repository.keys import DomainKeys
from sojourn.repository.packs import CHUNK_DATA
from sojourn.repository.sparse import write_at
from sojourn.store.manifests import Entry

_OPEN = 64


class Opener(Protocol):
    """Opens a file for reading and writing."""

    def __call__(self, entry: Entry, *, create: bool) -> int:
        """The descriptor."""


class Finisher(Protocol):
    """Told of a file that is complete."""

    def __call__(self, entry: Entry, fd: int, digest: bytes) -> None:
        """Compare and dress it."""


class _File:
    """One file under way. `state` holds for each chunk whether it is missing, zeros or written."""

    __slots__ = ("entry", "hasher", "lengths", "made", "next", "offsets", "state")

    def __init__(self, entry: Entry, recipe: list[tuple[bytes, int]]) -> None:
        self.entry = entry
        self.hasher: blake3 = file_hasher()
        self.lengths = [length for _, length in recipe]
        self.offsets: list[int] = []
        self.state = bytearray(len(recipe))
        self.next = 0
        self.made = False
        at = 0
        for length in self.lengths:
            self.offsets.append(at)
            at += length


_ZERO, _WRITTEN = 1, 2


class LargeFiles:
    """The large files of one restore."""

    def __init__(self, open_file: Opener, finish: Finisher) -> None:
        self._open_file = open_file
        self._finish = finish
        self._targets: dict[bytes, list[tuple[_File, int]]] = {}
        self._complete: list[_File] = []  # nothing but zeros: needs no chunk
        self._held: OrderedDict[_File, int] = OrderedDict()

    def add(self, entry: Entry, recipe: list[tuple[bytes, int]], keys: DomainKeys) -> None:
        """Take in a file with the content ids and lengths of its chunks."""
        file = _File(entry, recipe)
        zeros = False
        for number, (content, length) in enumerate(recipe):
            # Zeros are cut to the largest chunks and what is left of them behind these; others
            # are told by their bytes.
            zeros = (zeros or length == LARGEST) and content == zeros_id(length)
            if zeros:
                file.state[number] = _ZERO
                continue
            name = keys.chunk_name(CHUNK_DATA, content)
            self._targets.setdefault(name, []).append((file, number))
        if all(file.state):
            self._complete.append(file)

    def names(self) -> Iterator[bytes]:
        """Names of all chunks that are needed."""
        return iter(self._targets)

    def take(self, name: bytes, data: bytes) -> None:
        """Write a chunk wherever it belongs."""
        for file, number in self._targets.pop(name, ()):
            if len(data) != file.lengths[number]:
                raise IntegrityError(
                    "A chunk is not as long as a recipe says.",
                    path="/" + os.fsdecode(file.entry.path),
                )
            fd = self._descriptor(file)
            write_at(fd, data, file.offsets[number])
            file.state[number] = _WRITTEN
            if number == file.next:
                file.hasher.update(data)
                file.next += 1
            self._advance(file, fd)

    def _advance(self, file: _File, fd: int) -> None:
        """Hash what is there in order, and finish the file when that is all of it."""
        count = len(file.lengths)
        while file.next < count and (state := file.state[file.next]):
            length = file.lengths[file.next]
            if state == _ZERO:
                file.hasher.update(memoryview(ZEROS)[:length])
            else:
                file.hasher.update(os.pread(fd, length, file.offsets[file.next]))
            file.next += 1
        if file.next == count:
            self._finish(file.entry, fd, file.hasher.digest())
            os.close(self._held.pop(file))

    def finish(self) -> None:
        """After the last chunk: make the files that needed none."""
        for file in self._complete:
            self._advance(file, self._descriptor(file))

    def close(self) -> None:
        """Close all descriptors."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _descriptor(self, file: _File) -> int:
        fd = self._held.get(file)
        if fd is not None:
            self._held.move_to_end(file)
            return fd
        if len(self._held) >= _OPEN:
            os.close(self._held.popitem(last=False)[1])
        fd = self._open_file(file.entry, create=not file.made)
        file.made = True
        self._held[file] = fd
        return fd
