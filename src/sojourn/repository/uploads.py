"""Uploading chunks: deduplicate, join to blocks, compress and seal in threads, put as packs.

Guarantee: when `flush` has returned, every chunk that was added or found known is acknowledged by
the store and named by an index there; when anything fails, the first error is raised to the caller,
the threads end, and what was put meanwhile is at worst an unreferenced pack. Indexes are written
along the way, so an upload that is begun again sends what is missing and no more.

Memory is bounded whatever is uploaded and however slow the store is: at most `2 * encoders + 2`
blocks wait or are encoded (a block is 1 MiB, or one chunk of up to 4 MiB), and at most `PACKS`
packs of 16 MiB are being filled or put, of which `UPLOADERS` are held twice for a moment. On two
cores that is some 60 MiB usually and 170 MiB at the most, besides 100 bytes for each chunk that no
index names yet. Whoever adds faster than the store takes waits in `add`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from sojourn.errors import IntegrityError, Interrupted, ObjectMissing, SojournError, TooLarge
from sojourn.repository.domains import PACKS as PACK_GROUP
from sojourn.repository.domains import Domain
from sojourn.repository.packs import (
    BLOCK_BYTES,
    BLOCK_CHUNKS,
    BLOCK_LIMITS,
    CHUNK_DATA,
    DATA,
    MAX_BLOCKS,
    MAX_CHUNKS,
    META,
    PACK_BYTES,
    EncodedBlock,
    PackBuilder,
    PackInfo,
    encode_block,
    pack_id,
    read_footer,
)
from sojourn.repository.tombstones import Tombstones, names

log = logging.getLogger(__name__)

UPLOADERS = 3
PACKS = 5  # two being filled (data and metadata), three being put
INDEX_EVERY = 8  # packs: what is sent again at most after a cut
_MOST_ENCODERS = 8
_SEAL = 64  # what a block may take beyond its raw bytes
_FOOTERS = 8

Part = bytes | memoryview


class _Pack:
    """A pack that is being filled. Its blocks are numbered when they are handed to the encoders
    and end in any order. `expected` is never less than the size it will have."""

    __slots__ = ("blocks", "builder", "chunks", "closed", "count", "expected", "kind", "pending")

    def __init__(self, builder: PackBuilder, kind: int) -> None:
        self.builder = builder
        self.kind = kind
        self.blocks: list[EncodedBlock | None] = []
        self.chunks: list[list[tuple[bytes, int]]] = []
        self.count = 0
        self.expected = builder.size
        self.pending = 0
        self.closed = False


class _Filling:
    """The chunks that will be the next block of a kind of pack."""

    __slots__ = ("chunks", "parts", "raw")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.chunks: list[tuple[bytes, int]] = []
        self.raw = 0


class Upload:
    """One upload into one domain, used by one thread.

    `relied` are the ids of packs in which chunks were found that were not sent therefore, `written`
    those of acknowledged packs of its own; `sent_bytes` counts the content of new chunks,
    `stored_bytes` what packs of them take.
    """

    def __init__(
        self, domain: Domain, *, level: int | None = None, encoders: int | None = None
    ) -> None:
        self.domain = domain
        self.relied: set[bytes] = set()
        self.written: set[bytes] = set()
        self.sent_bytes = 0
        self.stored_bytes = 0
        self._keys = domain.keys
        self._index = domain.index
        self._level = level
        self._names: set[bytes] = set()  # taken in by this upload, not yet named by an index
        self._filling = {DATA: _Filling(), META: _Filling()}
        self._open: dict[int, _Pack] = {}
        count = encoders or min(len(os.sched_getaffinity(0)), _MOST_ENCODERS)
        self._most_blocks = 2 * count + 2
        self._encoders = ThreadPoolExecutor(count, "encode chunks")
        self._uploaders = ThreadPoolExecutor(UPLOADERS, "put packs")
        # Of everything below the lock, and what waits for it.
        self._changed = threading.Condition()
        self._blocks = 0
        self._packs = 0
        self._indexing = 0
        self._acknowledged: list[PackInfo] = []
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self._end()

    # -- what callers say -------------------------------------------------------------------
    def has(self, kind: int, content: bytes) -> bool:
        """Whether a chunk is in the store or on its way there; then this upload relies on it."""
        return self.knows(self._keys.chunk_name(kind, content))

    def add(self, kind: int, content: bytes, data: Part) -> bool:
        """Take a chunk in, unless it is known. False when it was. A view is copied.

        `content` is the content id of `data`; the caller answers for that."""
        name = self._keys.chunk_name(kind, content)
        if self.knows(name):
            return False
        self.put(kind, name, data)
        return True

    def knows(self, name: bytes) -> bool:
        """`has` for a chunk's name."""
        # In this order: a name is in the index before it leaves the set.
        if name in self._names:
            return True
        place = self._index.find(name)
        if place is None:
            return False
        self.relied.add(place.pack.id)
        return True

    def put(self, kind: int, name: bytes, data: Part) -> None:
        """Take in a chunk that `knows` has just denied. Raises TooLarge."""
        pack_kind = DATA if kind == CHUNK_DATA else META
        filling = self._filling[pack_kind]
        length = len(data)
        if length > BLOCK_LIMITS[pack_kind]:
            raise TooLarge(f"A chunk of {length} bytes is over what a block may hold.")
        if filling.raw and filling.raw + length > BLOCK_BYTES:
            self._submit(pack_kind)
            filling = self._filling[pack_kind]
        filling.parts.append(data if isinstance(data, bytes) else bytes(data))
        filling.chunks.append((name, length))
        filling.raw += length
        self._names.add(name)
        self.sent_bytes += length
        if filling.raw >= BLOCK_BYTES or len(filling.parts) >= BLOCK_CHUNKS:
            self._submit(pack_kind)

    def flush(self) -> None:
        """Return when everything is acknowledged and indexed. More may be added after it.

        Raises the first error of the upload: StoreUnreachable, StorageFull, StoreRefused.
        """
        for kind, filling in self._filling.items():
            if filling.parts:
                self._submit(kind)
        with self._changed:
            for pack in self._open.values():
                self._close(pack)
            self._open.clear()
            self._wait(lambda: self._packs == 0 and self._indexing == 0)
            rest = self._take_acknowledged()
        if rest:
            try:
                self._write_index(rest)
            except BaseException as error:
                self._fail(error)  # or a second flush would find nothing left to name
                raise
        with self._changed:
            self._raise()

    # -- blocks -----------------------------------------------------------------------------
    def _submit(self, kind: int) -> None:
        """Hand what is gathered to the encoders, as the next block of a pack."""
        filling = self._filling[kind]
        self._filling[kind] = _Filling()
        with self._changed:
            self._wait(lambda: self._blocks < self._most_blocks)
            pack = self._open.get(kind)
            if pack is None:
                self._wait(lambda: self._packs < PACKS)
                pack = self._open[kind] = _Pack(PackBuilder(self._keys, kind), kind)
                self._packs += 1
            number = len(pack.blocks)
            pack.blocks.append(None)
            pack.chunks.append(filling.chunks)
            pack.count += len(filling.chunks)
            pack.expected += filling.raw + _SEAL
            pack.pending += 1
            self._blocks += 1
            self._encoders.submit(self._encode, pack, number, filling.parts, filling.raw)
            if (
                pack.expected >= PACK_BYTES
                or pack.count > MAX_CHUNKS - BLOCK_CHUNKS
                or number + 1 >= MAX_BLOCKS
            ):
                del self._open[kind]
                self._close(pack)

    def _encode(self, pack: _Pack, number: int, parts: list[Part], raw: int) -> None:
        try:
            if self._error is not None:
                return
            salt = pack.builder.salt
            if self._level is None:
                block = encode_block(parts, self._keys, salt, number)
            else:
                block = encode_block(parts, self._keys, salt, number, self._level)
        except BaseException as error:  # noqa: BLE001 (raised again to the caller)
            self._fail(error)
            return
        with self._changed:
            pack.blocks[number] = block
            pack.expected += len(block.stored) - raw - _SEAL
            pack.pending -= 1
            self._blocks -= 1
            if pack.closed and not pack.pending:
                self._uploaders.submit(self._upload, pack)
            self._changed.notify_all()

    def _close(self, pack: _Pack) -> None:
        """No more blocks for this pack: put it once all are encoded. Under the lock."""
        pack.closed = True
        if not pack.pending:
            self._uploaders.submit(self._upload, pack)

    # -- packs ------------------------------------------------------------------------------
    def _upload(self, pack: _Pack) -> None:
        try:
            if self._error is not None:
                return
            for number, chunks in enumerate(pack.chunks):
                block = pack.blocks[number]
                assert block is not None
                pack.builder.add(block, chunks)
                pack.blocks[number] = None
            data, info = pack.builder.finish()
            size = len(data)
            self.domain.backend.put(self.domain.pack_key(info.id), data)
            del data
            full: list[PackInfo] = []
            with self._changed:
                self.stored_bytes += size
                self.written.add(info.id)
                self._packs -= 1
                self._acknowledged.append(info)
                if len(self._acknowledged) >= INDEX_EVERY:
                    full = self._take_acknowledged()
                    self._indexing += 1
                self._changed.notify_all()
            if full:
                self._write_index(full)
                with self._changed:
                    self._indexing -= 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised again to the caller)
            self._fail(error)

    def _take_acknowledged(self) -> list[PackInfo]:
        taken, self._acknowledged = self._acknowledged, []
        return taken

    def _write_index(self, infos: list[PackInfo]) -> None:
        self.domain.write_index(infos)
        for info in infos:
            self._names.difference_update(info.names())

    # -- ends -------------------------------------------------------------------------------
    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait(self, done: Callable[[], bool]) -> None:
        """Until a condition holds, under the lock. Raises the upload's error as soon as one is."""
        self._changed.wait_for(lambda: self._error is not None or done())
        self._raise()

    def _end(self) -> None:
        """Stop the threads; what waits is dropped. What is on its way to the store ends by itself,
        within the time limits of the backend."""
        with self._changed:
            broken = self._error is not None
            if not broken:
                self._error = Interrupted("the upload was left", next_step="")
            self._changed.notify_all()
        self._encoders.shutdown(wait=True, cancel_futures=True)
        self._uploaders.shutdown(wait=True, cancel_futures=True)
        if self._acknowledged and not broken:
            # The caller gave up, not the store: keep what it has taken from being sent again. That
            # is a saving and no more, and must not hide why the caller gave up.
            with contextlib.suppress(SojournError):
                self._write_index(self._take_acknowledged())


def adopt_unindexed(domain: Domain) -> int:
    """Index the packs that no index names, as an upload that was cut off leaves them. Their number.

    Packs that a tombstone names stay unnamed: they are on their way out. The order of looking makes
    that sure: a pack that is listed and then in no index, because a collection has taken it out, is
    in a tombstone, which was written before and is read last. A damaged pack is left alone; those
    of a damaged index count as named by none.
    """
    listed = {pack_id(info.key): info.key for info in domain.ids(PACK_GROUP)}
    domain.refresh_index()
    unnamed = listed.keys() - {info.id for info in domain.index.packs()}
    if not unnamed:
        return 0
    unnamed -= names(Tombstones(domain).look())[1]
    found: list[PackInfo] = []
    with ThreadPoolExecutor(_FOOTERS, "read footers") as pool:
        reads = [
            pool.submit(read_footer, domain.backend, listed[id], domain.keys) for id in unnamed
        ]
        try:
            for read in reads:
                try:
                    found.append(read.result())
                except ObjectMissing:
                    continue  # collected since it was listed
                except IntegrityError as error:
                    log.warning("a pack that no index names is left alone: %s", error.message)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if found:
        domain.write_index(found)
    return len(found)
