"""What is put off, and for how long."""

from __future__ import annotations

import math

import pytest

from sojourn.server import pauses
from sojourn.server.pauses import FIRST, MOST, Pauses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(pauses.time, "monotonic", lambda: now[0])
    return now


def test_each_failure_in_a_row_doubles_the_wait(clock: list[float]) -> None:
    waiting = Pauses()
    waited = []
    for _ in range(12):
        waiting.put_off("a", "cause")
        waited.append(waiting.left("a"))
    assert waited[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert waited[-1] == MOST
    waiting.clear("a")
    assert waiting.left("a") == 0
    waiting.put_off("a", "cause")
    assert waiting.left("a") == FIRST


def test_what_is_over_may_be_tried_and_is_remembered(clock: list[float]) -> None:
    waiting = Pauses()
    waiting.put_off("a", "one")
    assert waiting.over() == []
    clock[0] += FIRST
    assert (waiting.over(), waiting.left("a"), waiting.cause("a")) == (["a"], 0, "one")
    waiting.put_off("a", "two")
    assert waiting.left("a") == 2 * FIRST


def test_a_clock_that_is_set_changes_nothing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Pauses()
    waiting.put_off("a", "cause")
    monkeypatch.setattr(pauses.time, "time", lambda: -1e9)
    assert waiting.left("a") == FIRST


def test_what_is_given_up_is_tried_no_more(clock: list[float]) -> None:
    waiting = Pauses()
    waiting.give_up("a", "another's")
    clock[0] += 1e12
    assert math.isinf(waiting.left("a"))
    assert waiting.over() == []


def test_what_is_gone_is_forgotten(clock: list[float]) -> None:
    waiting = Pauses()
    waiting.put_off("a", "cause")
    waiting.put_off("b", "other")
    waiting.keep({"b"})
    assert (waiting.cause("a"), waiting.any_cause()) == (None, "other")
