"""Writing chunks that are there already into new packs: of mostly dead packs, and in repairs.

Guarantee: what is written is named and acknowledged like any upload's: a new pack is put before the
index that names it. At most one pack of 16 MiB and its encoded blocks are held for each kind.
"""

from __future__ import annotations

from sojourn.repository.domains import Domain
from sojourn.repository.packs import (
    BLOCK_BYTES,
    BLOCK_CHUNKS,
    PackBuilder,
    PackInfo,
    encode_block,
)


class Rewriter:
    """Collects chunks into packs of one kind. `finish` puts what is left and writes the index."""

    def __init__(self, domain: Domain, kind: int) -> None:
        self._domain = domain
        self._kind = kind
        self._builder = PackBuilder(domain.keys, kind)
        self._parts: list[bytes] = []
        self._chunks: list[tuple[bytes, int]] = []
        self._raw = 0
        self._infos: list[PackInfo] = []
        self.written: set[bytes] = set()
        self.stored_bytes = 0

    def add(self, name: bytes, data: bytes) -> None:
        """Take in a chunk under its name."""
        if self._raw and self._raw + len(data) > BLOCK_BYTES:
            self._block()
        self._parts.append(data)
        self._chunks.append((name, len(data)))
        self._raw += len(data)
        if self._raw >= BLOCK_BYTES or len(self._parts) >= BLOCK_CHUNKS:
            self._block()

    def finish(self) -> list[PackInfo]:
        """Put what is left, write an index that names all new packs; answers them."""
        self._block()
        self._pack()
        if self._infos:
            self._domain.write_index(self._infos)
        return self._infos

    def _block(self) -> None:
        if not self._parts:
            return
        builder = self._builder
        block = encode_block(self._parts, self._domain.keys, builder.salt, builder.block_count)
        builder.add(block, self._chunks)
        self._parts, self._chunks, self._raw = [], [], 0
        if builder.full:
            self._pack()

    def _pack(self) -> None:
        if not self._builder.block_count:
            return
        data, info = self._builder.finish()
        self._domain.backend.put(self._domain.pack_key(info.id), data)
        self._infos.append(info)
        self.written.add(info.id)
        self.stored_bytes += len(data)
        self._builder = PackBuilder(self._domain.keys, self._kind)
