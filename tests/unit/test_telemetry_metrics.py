"""Metrics: what is counted is what is told, in Prometheus' own reading of it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as read_text

from sojourn.telemetry import declared, exposition, metrics, scraping
from sojourn.telemetry.metrics import Counter, Gauge, Histogram

DOCS = Path(__file__).parents[2] / "docs" / "observability.md"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Metrics of a test are its own."""
    monkeypatch.setattr(metrics, "ALL", [])
    yield


def _samples(accept: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, kind = exposition.render(accept)
    read = read_openmetrics if "openmetrics" in kind else read_text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in read(body.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_each_kind_is_read_as_it_was_counted(accept: str) -> None:
    counter = Counter("sojourn_things", "Things.", ("kind",))
    counter.add("a")
    counter.add("a", amount=2.5)
    counter.add('odd "\\\n')
    Counter("sojourn_nothing_yet", "Nothing.")
    histogram = Histogram("sojourn_seconds", "Seconds.", ("verb",), (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value, "x")
    Gauge("sojourn_level", "Level.").tell(lambda: {(): 3.0})

    assert _samples(accept) == {
        ("sojourn_things_total", (("kind", "a"),)): 3.5,
        ("sojourn_things_total", (("kind", 'odd "\\\n'),)): 1.0,
        ("sojourn_nothing_yet_total", ()): 0.0,
        ("sojourn_seconds_bucket", (("le", "0.1"), ("verb", "x"))): 2.0,
        ("sojourn_seconds_bucket", (("le", "1.0"), ("verb", "x"))): 3.0,
        ("sojourn_seconds_bucket", (("le", "+Inf"), ("verb", "x"))): 4.0,
        ("sojourn_seconds_count", (("verb", "x"),)): 4.0,
        ("sojourn_seconds_sum", (("verb", "x"),)): pytest.approx(7.65),
        ("sojourn_level", ()): 3.0,
    }


def test_gauges_are_asked_as_long_as_they_are_told() -> None:
    gauge = Gauge("sojourn_level", "Level.", ("kind",))
    stop = gauge.tell(lambda: {("a",): 1.0, ("b",): 2.0})
    gauge.tell(lambda: {("a",): 10.0})
    assert gauge.values() == {("a",): 11.0, ("b",): 2.0}
    stop()
    stop()
    assert gauge.values() == {("a",): 10.0}


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_SERIES", 3)
    counter = Counter("sojourn_things", "Things.", ("a", "b"))
    for number in range(10):
        counter.add(str(number), "x")
    counter.add("0", "x")
    assert counter.values() == {
        ("0", "x"): 2,
        ("1", "x"): 1,
        ("2", "x"): 1,
        ("other", "other"): 7,
    }
    with pytest.raises(ValueError, match="labels"):
        counter.add("alone")


def test_threads_lose_no_count() -> None:
    counter = Counter("sojourn_things", "Things.", ("kind",))
    histogram = Histogram("sojourn_seconds", "Seconds.")

    def work() -> None:
        for _ in range(5000):
            counter.add("a")
            with histogram.time():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.values() == {("a",): 20000}
    assert sum(histogram.samples()[()].counts) == 20000


def test_who_cannot_answer_keeps_nobody_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "_ASK_SECONDS", 0.05)
    asked = []
    gauge = Gauge("sojourn_level", "Level.")

    async def fails() -> None:
        raise OSError("the database is away")

    async def hangs() -> None:
        await asyncio.sleep(60)

    async def answers() -> None:
        asked.append(1)

    stops = [scraping.before(look) for look in (fails, hangs, answers)]
    gauge.tell(lambda: {(): 1.0})
    try:
        body, _ = asyncio.run(scraping.scrape(""))
    finally:
        for stop in stops:
            stop()
    assert asked == [1] and b"sojourn_level 1.0" in body
    asyncio.run(scraping.scrape(""))
    assert asked == [1]


def test_the_docs_describe_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", DOCS.read_text(), re.M)
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    there = {}
    for value in vars(declared).values():
        if isinstance(value, metrics.Metric):
            suffix = "_total" if value.kind == "counter" else ""
            there[value.name + suffix] = (value.kind, value.labels)
    assert told == there
