"""How much a session may use of its network at a time."""

from __future__ import annotations

from sojourn.gateway.quotas import Pace, Rate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_second_is_in_advance_and_the_rest_waits() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    assert pace.spend(1000) == 0
    assert pace.spend(500) == 0.5
    clock.now += 1.5
    assert pace.spend(1000) == 0
    pace.change(0)
    assert pace.spend(10**9) == 0


def test_over_time_no_more_passes_than_the_rate() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    passed = 0
    while clock.now < 110:
        passed += 300
        clock.now += pace.spend(300)
    assert 9_000 <= passed <= 11_600


def test_no_minute_has_more_requests_than_allowed() -> None:
    clock = Clock()
    rate = Rate(3, clock)
    taken = []
    while clock.now < 400:
        wait = rate.take()
        if wait == 0:
            taken.append(clock.now)
        clock.now += wait or 1
    for at in taken:
        assert sum(at <= other < at + 60 for other in taken) <= 3
    assert len(taken) >= 12


def test_a_lower_limit_holds_at_once() -> None:
    clock = Clock()
    rate = Rate(10, clock)
    for _ in range(5):
        assert rate.take() == 0
    rate.change(2)
    assert rate.take() == 60
    rate.change(0)
    assert rate.take() == 0
