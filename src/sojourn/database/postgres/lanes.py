"""The order of jobs that change the same thing.

Guarantee: of two jobs that name the same thing the one submitted first is run and finished first,
and so two jobs of one process never wait for each other in the database; jobs that name nothing in
common run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

J = TypeVar("J")


class _Place(Generic[J]):
    __slots__ = ("before", "behind", "job", "names")

    def __init__(self, job: J, names: tuple[str, ...]) -> None:
        self.job = job
        self.names = names
        self.before = 0  # how many it waits for
        self.behind: list[_Place[J]] = []


class Lanes(Generic[J]):
    """Used by the event loop alone. `start` is called with jobs that may run at once."""

    def __init__(self, start: Callable[[J], None]) -> None:
        self._start = start
        self._last: dict[str, _Place[J]] = {}
        self._places: dict[int, _Place[J]] = {}

    def __len__(self) -> int:
        """How many jobs are not finished."""
        return len(self._places)

    def add(self, job: J, names: Iterable[str]) -> None:
        """Start it now, or when all before it that share a name are finished."""
        place = _Place(job, tuple(set(names)))
        self._places[id(job)] = place
        for name in place.names:
            last = self._last.get(name)
            if last is not None:
                last.behind.append(place)
                place.before += 1
            self._last[name] = place
        if not place.before:
            self._start(job)

    def finished(self, job: J) -> None:
        """Start those that waited for it alone."""
        place = self._places.pop(id(job))
        for name in place.names:
            if self._last[name] is place:
                del self._last[name]
        for behind in place.behind:
            behind.before -= 1
            if not behind.before:
                self._start(behind.job)
