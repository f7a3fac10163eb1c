"""Places for what is not yet published, and for what is being thrown away.

Guarantee: nothing in staging is ever referred to; leftovers of a process that ended are removed
when the next one opens the store, those of a living process are left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sojourn.store.trees import Unlink, remove_tree

_OWNER = re.compile(r"([0-9a-f]{8})-(\d+)-(\d+)")
_counter = itertools.count()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _started(pid: int) -> str | None:
    """Start time of a process, which tells it from a later one of the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


class Staging:
    """The staging directory of one process."""

    def __init__(self, root: Path, remove_file: Unlink) -> None:
        self._remove_file = remove_file
        self._emptying = threading.Lock()
        root.mkdir(mode=0o700, exist_ok=True)
        for left in root.iterdir():
            if not self._alive(left.name):
                remove_tree(left, remove_file)
        pid = os.getpid()
        self.directory = root / f"{_boot()}-{pid}-{_started(pid)}"
        self.directory.mkdir(mode=0o700, exist_ok=True)

    @staticmethod
    def _alive(name: str) -> bool:
        match = _OWNER.fullmatch(name)
        return match is not None and match[1] == _boot() and _started(int(match[2])) == match[3]

    def new(self) -> Path:
        """A fresh private directory."""
        path = self._name("new")
        path.mkdir(mode=0o700)
        return path

    def _name(self, kind: str) -> Path:
        return self.directory / f"{kind}-{next(_counter)}"

    def drop(self, path: Path) -> None:
        """Remove a directory given by `new`, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            remove_tree(path, self._remove_file)

    def trash(self, path: Path) -> Path:
        """Move a tree out of sight at once; `empty_trash` removes it later."""
        place = self._name("trash")
        path.rename(place)
        return place

    def remove(self, thrown: Path) -> int:
        """Remove one thing that `trash` moved. Returns the bytes freed."""
        with self._emptying:
            return remove_tree(thrown, self._remove_file)

    def empty_trash(self) -> int:
        """Remove what was thrown away. Returns the bytes freed."""
        freed = 0
        with self._emptying:  # two removing one tree would trip over each other
            for path in list(self.directory.glob("trash-*")):
                freed += remove_tree(path, self._remove_file)
        return freed


class Pins:
    """Ids that must outlive a collection because something is being done with them.

    A published object stays `fresh` until a snapshot refers to it (`settle`) or `grace` seconds
    passed, so that a collection between publishing a layer and its snapshot cannot take it.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def hold(self, id: str) -> None:
        """Pin until as many `release` calls."""
        with self._lock:
            self._held[id] = self._held.get(id, 0) + 1

    def release(self, id: str) -> None:
        """End one hold."""
        with self._lock:
            left = self._held.get(id, 0) - 1
            if left > 0:
                self._held[id] = left
            else:
                self._held.pop(id, None)

    def fresh(self, id: str) -> None:
        """About to be published: pin until `settle` or the end of the grace."""
        with self._lock:
            self._until[id] = time.monotonic() + self._grace

    def settle(self, id: str) -> None:
        """A snapshot refers to it now."""
        with self._lock:
            self._until.pop(id, None)

    @contextlib.contextmanager
    def held(self, ids: Iterable[str]) -> Iterator[None]:
        """Hold several ids meanwhile."""
        mine = list(ids)
        for id in mine:
            self.hold(id)
        try:
            yield
        finally:
            for id in mine:
                self.release(id)

    @contextlib.contextmanager
    def still(self) -> Iterator[set[str]]:
        """What is pinned; nothing can be pinned meanwhile (the collection decides under this)."""
        with self._lock:
            now = time.monotonic()
            for id in [id for id, until in self._until.items() if until < now]:
                del self._until[id]
            yield set(self._until) | set(self._held)
