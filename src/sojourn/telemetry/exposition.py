"""The metrics in Prometheus' text format, or OpenMetrics' where that is asked for.

Guarantee: Prometheus' package is loaded at the first scrape and never before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sojourn.telemetry import declared
from sojourn.telemetry.metrics import Counter, Gauge, Histogram, Metric, every

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

assert declared.SESSIONS  # importing it declares them all


class _Collector:
    def collect(self) -> Iterator[Family]:
        for metric in every():
            yield _family(metric)


def _family(metric: Metric) -> Family:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    family: Any
    if isinstance(metric, Counter):
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        _fill(family, metric.values(), metric.labels)
    elif isinstance(metric, Gauge):
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        _fill(family, metric.values(), ())
    else:
        assert isinstance(metric, Histogram)
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, sample in metric.samples().items():
            buckets, below = [], 0
            for bound, count in zip((*metric.bounds, float("inf")), sample.counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
            family.add_metric(labels, buckets, sample.total)
    found: Family = family
    return found


def _fill(family: Any, values: dict[tuple[str, ...], float], labels: tuple[str, ...]) -> None:
    for key, value in values.items():
        family.add_metric(key, value)
    if not values and not labels and isinstance(family.samples, list) and family.type == "counter":
        family.add_metric((), 0)  # a counter without labels is there from the start


def render(accept: str) -> tuple[bytes, str]:
    """All metrics in the form that an `Accept` header asks for, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector())
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
