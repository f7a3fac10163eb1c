"""A domain: the repository as one tenant's data (or the shared templates) sees it.

Guarantee: every object is read and written sealed, for its own key and with the domain's keys, and
every error names the object. What is remembered as present was seen in the store or acknowledged
by it; `forget` drops what is remembered, for when a tombstone may have taken it away.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from blake3 import blake3

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.repository.backends.base import Backend, ObjectInfo
from sojourn.repository.indexes import Index, decode_index, encode_index
from sojourn.repository.keys import DomainKeys
from sojourn.repository.records import PackInfo, pack_key
from sojourn.repository.sealed import (
    DAMAGE,
    IMAGE,
    INDEX,
    LAYER,
    SESSION,
    SNAPSHOT,
    TOMBSTONE,
    largest,
    seal,
    unseal,
)

log = logging.getLogger(__name__)

LAYERS, IMAGES, SNAPSHOTS, SESSIONS = "layers", "images", "snapshots", "sessions"
PACKS, INDEXES, TOMBSTONES = "packs", "indexes", "tombstones"
COPIES, DAMAGED = "copies", "damaged"
KINDS = {
    LAYERS: LAYER,
    IMAGES: IMAGE,
    SNAPSHOTS: SNAPSHOT,
    SESSIONS: SESSION,
    TOMBSTONES: TOMBSTONE,
    INDEXES: INDEX,
    DAMAGED: DAMAGE,
}
_GROUPS = frozenset(KINDS) | {PACKS, COPIES}
_INDEX_BYTES = 32 << 20  # records in one index object; half of what a reader takes


class Domain:
    """One domain of an open repository. Safe for many threads."""

    def __init__(self, backend: Backend, keys: DomainKeys) -> None:
        self.backend = backend
        self.keys = keys
        self.name = keys.domain
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # its own: reading the index may wait for the store
        self._index: Index | None = None
        self._present: set[str] = set()
        self._avoided: set[str] = set()  # keys of root objects that tombstones name

    def __repr__(self) -> str:
        return f"<domain {self.name!r} of {self.backend.url}>"

    # -- keys -------------------------------------------------------------------------------
    def key(self, group: str, name: str) -> str:
        """The key of an object by its group (`layers`, ...) and its name there."""
        if group not in _GROUPS:
            raise ValueError(f"no objects are called {group}")
        if group == PACKS:
            return self.pack_key(name)
        return f"{self.name}/{group}/{name}"

    def pack_key(self, id: bytes | str) -> str:
        """The key of a pack."""
        return pack_key(self.name, id)

    def layer_key(self, layer: str) -> str:
        """The key of a layer by its id."""
        return self.key(LAYERS, self.keys.object_name(LAYERS, layer))

    def image_key(self, image: str) -> str:
        """The key of a memory image by its id."""
        return self.key(IMAGES, self.keys.object_name(IMAGES, image))

    def snapshot_key(self, snapshot: str) -> str:
        """The key of a snapshot."""
        return self.key(SNAPSHOTS, snapshot)

    def session_key(self, session: str) -> str:
        """The key of a session's record."""
        return self.key(SESSIONS, session)

    def copies_prefix(self, key: str) -> str:
        """Where the copies of a layer or image lie whose own key is `key`. They are written while
        a tombstone names that key: whoever removes it may do so at any time, and would take what
        was written there anew for what it had marked."""
        return f"{self.name}/{COPIES}/{key.rpartition('/')[2]}/"

    # -- sealed objects ---------------------------------------------------------------------
    def get_object(self, kind: bytes, key: str) -> bytes:
        """The payload of a sealed object. Raises ObjectMissing, IntegrityError naming the key."""
        return self.read_object(kind, key)[0]

    def read_object(self, kind: bytes, key: str) -> tuple[bytes, str]:
        """Payload and version, for `put_object(replaces=...)`."""
        data, version = self.backend.get(key, limit=largest(kind))
        return unseal(kind, data, self.keys, self._place(kind, key), name=key), version

    def put_object(
        self,
        kind: bytes,
        key: str,
        payload: bytes,
        *,
        create: bool = False,
        replaces: str | None = None,
    ) -> str:
        """Seal and write an object; answers its version. As `Backend.put`."""
        data = seal(kind, payload, self.keys, self._place(kind, key))
        return self.backend.put(key, data, create=create, replaces=replaces)

    def _place(self, kind: bytes, key: str) -> bytes:
        # An index's key comes from its bytes, so it cannot be in them; the key proves it instead.
        return f"{self.name}/{INDEXES}/".encode() if kind == INDEX else key.encode()

    def ids(self, group: str) -> Iterator[ObjectInfo]:
        """All objects of a group: `layers`, `images`, `snapshots`, `sessions`, `packs`, `indexes`
        or `tombstones`. The last part of the key is the id (of layers and images the name)."""
        if group not in _GROUPS:
            raise ValueError(f"no objects are called {group}")
        return self.backend.list(f"{self.name}/{group}/")

    # -- the index --------------------------------------------------------------------------
    @property
    def index(self) -> Index:
        """The index of all packs, read at the first use."""
        index = self._index
        if index is None:
            with self._loading:
                index = self._index
                if index is None:
                    index = self.new_index()
                    self._refresh(index)
                    self._index = index
        return index

    def refresh_index(self) -> IntegrityError | None:
        """Read what others wrote to the index. What cannot be read is passed over, so that one bad
        index object does not stop those who need nothing of it; the first is given back, for who
        then misses something."""
        return self._refresh(self.index)

    def _refresh(self, index: Index) -> IntegrityError | None:
        faults: list[IntegrityError] = []
        index.refresh(faults)
        for fault in faults:
            log.warning("passed over: %s", fault.message)
        return faults[0] if faults else None

    def with_index(self, index: Index) -> Domain:
        """The same domain with another index, for who must go on where one cannot be read."""
        made = Domain(self.backend, self.keys)
        made._index = index
        return made

    def new_index(self) -> Index:
        """Another index of this domain, not read yet."""
        return Index(self._index_keys, self.read_index)

    def _index_keys(self) -> list[str]:
        return [info.key for info in self.ids(INDEXES)]

    def read_index(self, key: str) -> list[PackInfo]:
        """The packs an index object names. Raises ObjectMissing, IntegrityError."""
        data, _ = self.backend.get(key, limit=largest(INDEX))
        if blake3(data).hexdigest() != key.rpartition("/")[2]:
            raise IntegrityError(f"{key} differs from what was written (name).", object=key)
        payload = unseal(INDEX, data, self.keys, self._place(INDEX, key), name=key)
        return decode_index(payload, name=key)

    def write_index(self, infos: Sequence[PackInfo]) -> list[str]:
        """Write index objects (mostly one) that name these packs, all of them acknowledged, and
        make them known to the index in memory. Answers the keys."""
        keys = []
        for part in _portions(infos):
            data = seal(INDEX, encode_index(part), self.keys, self._place(INDEX, ""))
            key = self.key(INDEXES, blake3(data).hexdigest())
            self.backend.put(key, data)
            keys.append(key)
            index = self._index
            if index is not None:
                index.name(key, part)
        return keys

    # -- what is there ----------------------------------------------------------------------
    def has_layer(self, layer: str) -> bool:
        """Whether the store has a layer. Only what is there is remembered."""
        return self._has(self.layer_key(layer))

    def has_image(self, image: str) -> bool:
        """Whether the store has a memory image. Only what is there is remembered."""
        return self._has(self.image_key(image))

    def _has(self, key: str) -> bool:
        with self._lock:
            if key in self._present:
                return True
            avoided = key in self._avoided
        if avoided:
            listed = self.backend.list(self.copies_prefix(key))
            return any(info.key not in self._avoided for info in listed)
        try:
            self.backend.head(key)
        except ObjectMissing:
            return False
        self.note(key)
        return True

    def put_root(self, kind: bytes, key: str, payload: bytes) -> str:
        """Write a layer's or image's root object at its key, or as a copy of it where the key is
        avoided; answers the key it has got."""
        with self._lock:
            avoided = key in self._avoided
        if not avoided:
            self.put_object(kind, key, payload)
            self.note(key)
            return key
        copy = self.copies_prefix(key) + os.urandom(8).hex()
        self.put_object(kind, copy, payload)
        return copy

    def get_root(self, kind: bytes, key: str) -> bytes:
        """The payload of a layer's or image's root object, or of a copy of it. Raises
        ObjectMissing naming the key, IntegrityError."""
        try:
            return self.get_object(kind, key)
        except ObjectMissing as missing:
            for info in self.backend.list(self.copies_prefix(key)):
                try:
                    return self.get_object(kind, info.key)
                except ObjectMissing:
                    continue  # removed since it was listed
            raise missing

    def avoid(self, keys: Iterable[str]) -> None:
        """From now on take the root objects with these keys for absent: tombstones name them."""
        with self._lock:
            self._avoided.update(keys)
            self._present.difference_update(self._avoided)

    def note(self, key: str) -> None:
        """Remember that the store acknowledged this layer or image."""
        with self._lock:
            if key not in self._avoided:
                self._present.add(key)

    def forget(self, keys: Iterable[str] | None = None) -> None:
        """Forget what is remembered as present: these keys, or all."""
        with self._lock:
            if keys is None:
                self._present.clear()
            else:
                self._present.difference_update(keys)


def _portions(infos: Sequence[PackInfo]) -> Iterator[list[PackInfo]]:
    part: list[PackInfo] = []
    size = 0
    for info in infos:
        more = len(info.blocks) + len(info.chunks)
        if part and size + more > _INDEX_BYTES:
            yield part
            part, size = [], 0
        part.append(info)
        size += more
    if part:
        yield part
