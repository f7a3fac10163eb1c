"""Whether a snapshot that was just written can be counted on while others collect.

Guarantee: what `exposed` finds nothing against has all its layers, images and chunks in objects
that no tombstone names, looked at after the snapshot was written. Any later collection reads the
snapshot before it removes anything; so nothing of it is ever removed while it exists.

A layer that was found in the store and not sent is not trusted by its presence alone: whoever wrote
it may not have come to look at the tombstones yet, and its chunks may be on their way out though it
is not. While there are tombstones, what it needs is looked up chunk by chunk (once in a process;
then only the packs are compared). Without any, presence is enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sojourn.errors import IntegrityError, ObjectMissing
from sojourn.model.snapshots import Snapshot
from sojourn.repository.domains import Domain
from sojourn.repository.needs import add_image, add_layer
from sojourn.repository.tombstones import Tombstones

LONGEST = 12 * 3600.0  # seconds since the last look, after which everything is looked at anew


class Exposed(NamedTuple):
    """The layers and images (ids) that must be sent again."""

    layers: frozenset[str]
    images: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.layers or self.images)


class Watch:
    """The tombstones of a domain, for those who publish into it. Kept for as long as the domain
    is: it remembers what was looked up. Safe for many threads."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self._tombstones = Tombstones(domain)
        self._packs: dict[str, frozenset[bytes]] = {}  # by layer or image: where its chunks are
        self._suspect = False  # whether presence alone proves nothing
        self._last: float | None = None
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Before anything is looked up for a snapshot: from here on nothing that a tombstone names
        now is found by uploads into this domain."""
        with self._lock:
            if self._last is not None and _uptime() - self._last > LONGEST:
                self._refresh()
            self._look()

    def note(self, id: str, packs: Iterable[bytes]) -> None:
        """A layer or image was sent just now; `packs` hold all its chunks (those its upload wrote
        and those it relied on)."""
        with self._lock:
            self._packs[id] = frozenset(packs)

    def exposed_layers(self, layers: Iterable[str]) -> frozenset[str]:
        """Which of these layers do not stand whole outside everything that tombstones name now."""
        with self._lock:
            self._again()
            has = self.domain.has_layer
            return frozenset(id for id in layers if not (has(id) and self._safe(id, add_layer)))

    def exposed_image(self, image: str) -> bool:
        """The same for a memory image, by what the last look found."""
        with self._lock:
            return not (self.domain.has_image(image) and self._safe(image, add_image))

    def _look(self) -> None:
        self._suspect = bool(self._tombstones.look())
        self._last = _uptime()

    def _again(self) -> None:
        late = self._last is None or _uptime() - self._last > LONGEST
        if late:
            self._refresh()
        self._look()
        if late:
            self._suspect = True  # tombstones may have come and gone meanwhile
        elif self._suspect:
            self.domain.refresh_index()  # rewritten packs are named by new indexes

    def _refresh(self) -> None:
        self._packs.clear()
        self.domain.forget()
        self.domain.refresh_index()

    def _safe(self, id: str, walk: Callable[[Domain, str, set[bytes]], None]) -> bool:
        if not self._suspect:
            return True
        index = self.domain.index
        known = self._packs.get(id)
        if known is not None and known.isdisjoint(index.excluded):
            return True
        chunks: set[bytes] = set()
        try:
            walk(self.domain, id, chunks)
        except (ObjectMissing, IntegrityError):
            return False  # sent again, whatever it is that is wrong with it
        packs = set()
        for name in chunks:
            place = index.find(name)
            if place is None:
                return False
            packs.add(place.pack.id)
        self._packs[id] = frozenset(packs)
        return True


def exposed(own: Watch, shared: Watch, snapshot: Snapshot) -> Exposed:
    """What of a snapshot is to be sent again, and then asked again. `own` is its domain's, `shared`
    that of its lowest layer.

    It counts as durable once this is nothing after it was written. Asked before as well, it keeps a
    send that is cut off right after from leaving a snapshot that is not whole.
    """
    layers = shared.exposed_layers([snapshot.layers[0].id])
    layers |= own.exposed_layers(layer.id for layer in snapshot.layers[1:])
    memory = snapshot.memory
    images = frozenset([memory.id] if memory is not None and own.exposed_image(memory.id) else [])
    return Exposed(layers, images)


def _uptime() -> float:
    """Seconds that no setting of a clock moves, and that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
