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
from sojourn.repository.marking import add_image, add_layer
from sojourn.repository.tombstones import Tombstones

LONGEST = 12 * 3600.0  # seconds since the last look, after which everything is looked at anew


class Exposed(NamedTuple):
    """The layers and images (ids) that must be sent again."""

    layers: frozenset[str]
    images: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.layers or self.images)


class _View:
    """One domain as the publisher knows it."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.tombstones = Tombstones(domain)
        self.packs: dict[str, frozenset[bytes]] = {}  # by layer or image: where its chunks are
        self.any = False

    def look(self) -> None:
        self.any = bool(self.tombstones.look())

    def refresh(self) -> None:
        self.packs.clear()
        self.domain.forget()
        self.domain.index.refresh()

    def safe(self, id: str, present: bool, walk: Callable[[Domain, str, set[bytes]], None]) -> bool:
        """Whether a layer or image stands outside everything that tombstones name."""
        if not present:
            return False
        if not self.any:
            return True
        index = self.domain.index
        known = self.packs.get(id)
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
        self.packs[id] = frozenset(packs)
        return True


class Reliance:
    """Looks at tombstones for publishers into `own`, whose lowest layers lie in `shared`. Kept for
    as long as the domains are: it remembers what it has looked up. Safe for many threads."""

    def __init__(self, own: Domain, shared: Domain) -> None:
        self._own = _View(own)
        self._shared = _View(shared) if shared is not own else self._own
        self._last: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Before anything is looked up for a snapshot: from here on nothing that a tombstone names
        now is found by uploads into these domains."""
        with self._lock:
            now = _uptime()
            stale = self._last is not None and now - self._last > LONGEST
            for view in self._views():
                if stale:
                    view.refresh()
                view.look()
            self._last = now

    def note(self, domain: Domain, id: str, packs: Iterable[bytes]) -> None:
        """A layer or image was sent just now; `packs` hold all its chunks (those an upload wrote
        and those it relied on)."""
        with self._lock:
            for view in self._views():
                if view.domain is domain:
                    view.packs[id] = frozenset(packs)

    def exposed(self, snapshot: Snapshot) -> Exposed:
        """After the snapshot was written: what of it is to be sent again, and then asked again. It
        counts as durable once this is nothing.

        Asked before the snapshot is written as well, it keeps one that is cut off right after
        from being there without all it needs."""
        with self._lock:
            return self._exposed(snapshot)

    def _exposed(self, snapshot: Snapshot) -> Exposed:
        now = _uptime()
        late = self._last is None or now - self._last > LONGEST
        self._last = now
        for view in self._views():
            if late:
                view.refresh()
            view.look()
            if late:
                view.any = True  # tombstones may have come and gone meanwhile: look everything up
            elif view.any:
                view.domain.index.refresh()  # rewritten packs are named by new indexes
        layers = set()
        for number, layer in enumerate(snapshot.layers):
            view = self._own if number else self._shared
            if not view.safe(layer.id, view.domain.has_layer(layer.id), add_layer):
                layers.add(layer.id)
        images = set()
        if snapshot.memory is not None:
            image = snapshot.memory.id
            if not self._own.safe(image, self._own.domain.has_image(image), add_image):
                images.add(image)
        return Exposed(frozenset(layers), frozenset(images))

    def _views(self) -> tuple[_View, ...]:
        return (self._own,) if self._own is self._shared else (self._own, self._shared)


def _uptime() -> float:
    """Seconds that no setting of a clock moves, and that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
