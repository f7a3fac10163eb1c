"""Counters and histograms of this process.

Guarantee: any thread may count, at the cost of one lock; a label takes values from a bounded set
alone (verbs, states, codes, kinds), so the number of series is bounded whatever users do: beyond
`MOST_SERIES` of a metric further ones are counted together under `other`.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

import msgspec

MOST_SERIES = 1000

Labels = tuple[str, ...]

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
SHORT_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip


class Sample(msgspec.Struct, frozen=True):
    """A histogram's series: how many fell into each bucket (the last has no bound), and their
    sum."""

    counts: tuple[int, ...]
    total: float


class Metric:
    """What all kinds have in common. `name` is without the suffix that Prometheus adds."""

    kind = ""

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        self.name, self.help, self.labels = name, help, labels
        self._lock = threading.Lock()
        ALL.append(self)

    def _key(self, labels: Labels, known: object) -> Labels:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        assert isinstance(known, dict)
        if labels in known or len(known) < MOST_SERIES:
            return labels
        return ("other",) * len(labels)


ALL: list[Metric] = []
"""Every metric, in the order of their declaration."""


class Counter(Metric):
    """Something that only grows."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        super().__init__(name, help, labels)
        self._values: dict[Labels, float] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        """Count."""
        with self._lock:
            key = self._key(labels, self._values)
            self._values[key] = self._values.get(key, 0) + amount

    def values(self) -> dict[Labels, float]:
        """All series."""
        with self._lock:
            return dict(self._values)


class Histogram(Metric):
    """How long, or how large, things were."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, labels: Labels = (), bounds: tuple[float, ...] = SECONDS
    ) -> None:
        super().__init__(name, help, labels)
        self.bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Note one."""
        at = bisect.bisect_left(self.bounds, value)
        with self._lock:
            key = self._key(labels, self._counts)
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(self.bounds) + 1)
                self._totals[key] = 0.0
            counts[at] += 1
            self._totals[key] += value

    def time(self, *labels: str) -> _Timing:
        """Around what is to be timed, however it ends."""
        return _Timing(self, labels)

    def samples(self) -> dict[Labels, Sample]:
        """All series."""
        with self._lock:
            return {
                key: Sample(tuple(counts), self._totals[key])
                for key, counts in self._counts.items()
            }


class _Timing:
    __slots__ = ("_began", "_histogram", "_labels")

    def __init__(self, histogram: Histogram, labels: Labels) -> None:
        self._histogram, self._labels = histogram, labels

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._histogram.observe(time.perf_counter() - self._began, *self._labels)


class Gauge(Metric):
    """How something stands. Asked for when it is scraped: whoever knows it has registered itself
    with `tell`, and is forgotten when it takes its registration back."""

    kind = "gauge"

    def __init__(self, name: str, help: str, labels: Labels = ()) -> None:
        super().__init__(name, help, labels)
        self._sources: list[Callable[[], dict[Labels, float]]] = []

    def tell(self, source: Callable[[], dict[Labels, float]]) -> Callable[[], None]:
        """Ask `source` at each scrape, until the answer is called."""
        with self._lock:
            self._sources.append(source)

        def stop() -> None:
            with self._lock:
                if source in self._sources:
                    self._sources.remove(source)

        return stop

    def values(self) -> dict[Labels, float]:
        """All series; what two sources tell of one is added."""
        with self._lock:
            sources = list(self._sources)
        found: dict[Labels, float] = {}
        for source in sources:
            for labels, value in source().items():
                key = self._key(labels, found)
                found[key] = found.get(key, 0) + value
        return found


def named(name: str) -> Metric:
    """A metric by its name. Raises KeyError."""
    for metric in ALL:
        if metric.name == name:
            return metric
    raise KeyError(name)


def every() -> Iterator[Metric]:
    """All metrics that are declared."""
    yield from ALL
