"""Retention: what is kept, what is given up, and that asking often changes nothing."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.errors import InvalidRequest
from sojourn.model import Policy, Retention, SnapshotKind
from sojourn.retention import DAY, HOUR, WEEK, decide, is_subject
from sojourn.server.checks import MAX_KEPT, check_policy
from sojourn.server.retentions import recovery_point
from support.databases import make_session, make_snapshot

AUTO, EXPLICIT, SUSPEND, FORK, BASE = SnapshotKind
NOW = 1_800_000_000.0 // WEEK * WEEK


class Point(msgspec.Struct, frozen=True):
    id: str
    created_at: float
    kind: SnapshotKind = AUTO
    label: str | None = None


def removed(
    points: list[Point], policy: Retention | None, *, needed: tuple[str, ...] = (), now: float = NOW
) -> set[str]:
    return set(decide(points, needed, policy, now).remove)


def every(seconds: float, count: int) -> list[Point]:
    """`count` automatic snapshots, p0 the newest, taken `seconds` apart up to now."""
    return [Point(f"p{n}", NOW - 1.0 - n * seconds) for n in range(count)]


NOTHING = Retention(keep_all_for=0.0, keep_last=0, hourly=0, daily=0, weekly=0)


# -- what each rule keeps -----------------------------------------------------------------------


def test_without_a_policy_all_are_kept() -> None:
    decision = decide(every(WEEK, 500), [], None, NOW)
    assert (decision.remove, decision.again_at) == ([], None)


def test_the_default_keeps_the_last_hour_then_hours_of_a_day_then_days_of_a_month() -> None:
    points = every(60.0, 60 * 24 * 60)  # one a minute for sixty days
    gone = removed(points, Retention())
    kept = [p for p in points if p.id not in gone]
    ages = [NOW - p.created_at for p in kept]
    assert [age for age in ages if age < HOUR] == [60.0 * n + 1.0 for n in range(60)]
    # Full hours and days: NOW is where a day begins.
    hours = [age for age in ages if HOUR <= age < DAY]
    assert hours == [HOUR * n + 1.0 for n in range(1, 24)]
    assert [age for age in ages if age >= DAY] == [DAY * n + 1.0 for n in range(1, 30)]


def test_the_newest_are_kept_whatever_their_age() -> None:
    points = every(WEEK, 10)
    policy = msgspec.structs.replace(NOTHING, keep_last=3)
    assert {p.id for p in points} - removed(points, policy) == {"p0", "p1", "p2"}


def test_hours_without_snapshots_do_not_count() -> None:
    """A session that was put away for long, or a clock that jumped, loses no more for it."""
    points = every(1800.0, 8)
    policy = msgspec.structs.replace(NOTHING, hourly=3)
    assert removed(points, policy, now=NOW + 1000 * DAY) == removed(points, policy)
    assert {p.id for p in points} - removed(points, policy) == {"p0", "p2", "p4"}


def test_weeks_begin_on_monday() -> None:
    monday = 1_767_571_200.0  # 2026-01-05T00:00:00Z
    points = [Point("sunday", monday - 1.0), Point("monday", monday), Point("later", monday + DAY)]
    policy = msgspec.structs.replace(NOTHING, weekly=5)
    assert removed(points, policy) == {"monday"}


def test_what_is_needed_is_kept() -> None:
    points = every(1.0, 4)
    assert removed(points, NOTHING, needed=("p2", "elsewhere")) == {"p0", "p1", "p3"}


@pytest.mark.parametrize(
    ("point", "policy", "subject"),
    [
        (Point("a", 0.0, AUTO), NOTHING, True),
        (Point("a", 0.0, AUTO, "mine"), NOTHING, False),
        (Point("a", 0.0, AUTO, "mine"), msgspec.structs.replace(NOTHING, labelled=False), True),
        (Point("a", 0.0, BASE), msgspec.structs.replace(NOTHING, explicit=False), False),
        *[
            (Point("a", 0.0, kind), msgspec.structs.replace(NOTHING, explicit=explicit), subject)
            for kind in (EXPLICIT, SUSPEND, FORK)
            for explicit, subject in ((True, False), (False, True))
        ],
        (Point("a", 0.0, EXPLICIT, "x"), msgspec.structs.replace(NOTHING, labelled=False), False),
        (Point("a", 0.0, EXPLICIT, "x"), msgspec.structs.replace(NOTHING, explicit=False), False),
    ],
)
def test_labelled_and_explicit_ones_are_kept_unless_said_otherwise(
    point: Point, policy: Retention, subject: bool
) -> None:
    assert is_subject(point, policy) is subject
    assert removed([point], policy) == ({"a"} if subject else set())


def test_it_says_when_there_will_be_more() -> None:
    points = every(600.0, 4)
    policy = msgspec.structs.replace(NOTHING, keep_all_for=HOUR)
    decision = decide(points, [], policy, NOW)
    assert (decision.remove, decision.again_at) == ([], points[-1].created_at + HOUR)
    assert decision.again_at is not None
    assert decide(points, [], policy, decision.again_at - 1.0).remove == []
    assert decide(points, [], policy, decision.again_at + 1.0).remove == ["p3"]


def test_what_a_clock_that_was_set_back_dated_ahead_counts_as_new() -> None:
    points = [Point("ahead", NOW + DAY), *every(600.0, 2)]
    policy = msgspec.structs.replace(NOTHING, keep_all_for=60.0)
    assert removed(points, policy) == {"p1"}


# -- properties ---------------------------------------------------------------------------------

counts = st.integers(0, 4)
policies = st.builds(
    Retention,
    keep_all_for=st.sampled_from([0.0, 60.0, HOUR, 3 * DAY]),
    keep_last=counts,
    hourly=counts,
    daily=counts,
    weekly=counts,
    labelled=st.booleans(),
    explicit=st.booleans(),
)
# Close together and far apart, also exactly where spans begin.
times = st.one_of(
    st.integers(0, 40).map(lambda n: NOW - n * HOUR),
    st.floats(0, 60 * DAY).map(lambda age: NOW - age),
    st.floats(-DAY, HOUR).map(lambda age: NOW - age),
)
histories = st.lists(
    st.tuples(times, st.sampled_from(SnapshotKind), st.sampled_from([None, None, "label"])),
    max_size=40,
).map(lambda rows: [Point(f"p{n:02}", at, kind, label) for n, (at, kind, label) in enumerate(rows)])
needs = st.sets(st.integers(0, 39).map(lambda n: f"p{n:02}"), max_size=4)
laters = st.floats(0, 100 * DAY)


@given(histories, needs, policies)
def test_only_subjects_that_nothing_needs_are_given_up_and_oldest_first(
    points: list[Point], needed: set[str], policy: Retention
) -> None:
    ids = decide(points, needed, policy, NOW).remove
    by_id = {point.id: point for point in points}
    assert len(set(ids)) == len(ids)
    assert not needed & set(ids)
    assert all(is_subject(by_id[id], policy) for id in ids)
    ages = [by_id[id].created_at for id in ids]
    assert ages == sorted(ages)


@given(histories, needs, policies)
def test_no_more_are_kept_than_the_rules_can_keep(
    points: list[Point], needed: set[str], policy: Retention
) -> None:
    gone = set(decide(points, needed, policy, NOW).remove)
    kept = [p for p in points if is_subject(p, policy) and p.id not in gone | needed]
    recent = [p for p in kept if p.created_at > NOW - policy.keep_all_for]
    bound = policy.keep_last + policy.hourly + policy.daily + policy.weekly
    assert len(kept) - len(recent) <= bound


@given(histories, needs, policies)
def test_asking_again_gives_up_nothing(
    points: list[Point], needed: set[str], policy: Retention
) -> None:
    gone = set(decide(points, needed, policy, NOW).remove)
    left = [point for point in points if point.id not in gone]
    assert decide(left, needed, policy, NOW).remove == []


@given(histories, needs, policies, laters)
def test_it_does_not_matter_when_it_was_asked_before(
    points: list[Point], needed: set[str], policy: Retention, later: float
) -> None:
    first = set(decide(points, needed, policy, NOW).remove)
    left = [point for point in points if point.id not in first]
    second = set(decide(left, needed, policy, NOW + later).remove)
    assert first | second == set(decide(points, needed, policy, NOW + later).remove)


@given(histories, histories, needs, policies)
def test_what_is_given_up_stays_so_whatever_comes(
    points: list[Point], more: list[Point], needed: set[str], policy: Retention
) -> None:
    more = [msgspec.structs.replace(point, id=f"q{point.id}") for point in more]
    first = set(decide(points, needed, policy, NOW).remove)
    assert first <= set(decide([*points, *more], needed, policy, NOW).remove)


@given(histories.flatmap(lambda points: st.tuples(st.just(points), st.permutations(points))))
def test_the_order_in_which_they_are_given_does_not_matter(
    both: tuple[list[Point], list[Point]],
) -> None:
    assert decide(both[0], [], Retention(), NOW) == decide(both[1], [], Retention(), NOW)


@given(histories, needs, policies, laters)
def test_nothing_more_is_given_up_before_the_time_it_says(
    points: list[Point], needed: set[str], policy: Retention, later: float
) -> None:
    decision = decide(points, needed, policy, NOW)
    if decision.again_at is None or NOW + later < decision.again_at - 1.0:
        assert decide(points, needed, policy, NOW + later).remove == decision.remove


# -- what a loss of the node would take a session back to -----------------------------------------


def test_the_recovery_point_is_the_newest_durable_one_on_the_line_of_the_head() -> None:
    session = make_session()
    root = make_snapshot(session, id="root", durable_at=1.0)
    middle = make_snapshot(session, id="middle", parent="root", durable_at=2.0)
    aside = make_snapshot(session, id="aside", parent="root", durable_at=3.0)
    later = make_snapshot(session, id="later", parent="middle")
    head = make_snapshot(session, id="head", parent="later")
    records = [root, middle, aside, later, head]
    assert recovery_point(records, "head") == "middle"
    assert recovery_point(records, "aside") == "aside"
    assert recovery_point(records, "elsewhere") is None
    assert recovery_point(records, None) is None
    assert recovery_point([later, head], "head") is None


# -- what may be asked for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"keep_all_for": -1.0},
        {"keep_all_for": math.inf},
        {"keep_all_for": math.nan},
        {"keep_last": -1},
        {"hourly": MAX_KEPT + 1},
        {"daily": -5},
        {"weekly": 2**70},
    ],
)
def test_rules_that_make_no_sense_are_refused_by_name(fields: dict[str, float]) -> None:
    policy = Policy(retention=Retention(**fields))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        check_policy(policy)
    assert caught.value.details["field"] == f"policy.retention.{next(iter(fields))}"


@pytest.mark.parametrize("retention", [None, Retention(), NOTHING])
def test_sensible_rules_pass(retention: Retention | None) -> None:
    assert check_policy(Policy(retention=retention)).retention == retention
