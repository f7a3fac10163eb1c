"""Which snapshots of a session are given up, decided without doing any of it.

Guarantee: a snapshot that any rule of the policy keeps is kept, and so is whatever is needed; of
those the rules are for there are never more than the rules can keep. What is given up once would be
given up ever after, so it does not matter how often, or when, this is asked; and a clock that
jumps costs no more than what the rule for the newest seconds keeps: hours, days and weeks are those
that have snapshots, not those before now.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from sojourn.model.sessions import Retention
from sojourn.model.snapshots import SnapshotKind

HOUR, DAY, WEEK = 3600.0, 86400.0, 7 * 86400.0
_MONDAY = 4 * DAY  # 1970 began on a Thursday
_ASKED_FOR = (SnapshotKind.EXPLICIT, SnapshotKind.SUSPEND, SnapshotKind.FORK)


class Point(Protocol):
    """What is looked at of a snapshot."""

    @property
    def id(self) -> str: ...

    @property
    def kind(self) -> SnapshotKind: ...

    @property
    def label(self) -> str | None: ...

    @property
    def created_at(self) -> float: ...


class Decision(msgspec.Struct, frozen=True):
    """Ids of what is given up, oldest first, and when more will be without another snapshot being
    taken (None: never)."""

    remove: list[str]
    again_at: float | None


def is_subject(point: Point, policy: Retention) -> bool:
    """Whether the rules are for this snapshot; all others are kept."""
    if point.label is not None and policy.labelled:
        return False
    if point.kind is SnapshotKind.AUTO:
        return True
    return point.kind in _ASKED_FOR and not policy.explicit


def decide(
    points: Sequence[Point], needed: Collection[str], policy: Retention | None, now: float
) -> Decision:
    """What to give up of a session's visible snapshots, in whatever order they are given.

    `needed` are the ids of the head and of whatever else something stands on.
    """
    if policy is None:
        return Decision([], None)
    subject = sorted(
        (point for point in points if is_subject(point, policy)),
        key=lambda point: (point.created_at, point.id),
        reverse=True,
    )
    kept = {point.id for point in subject[: policy.keep_last]}
    for seconds, count in ((HOUR, policy.hourly), (DAY, policy.daily), (WEEK, policy.weekly)):
        kept |= _newest_of_each(subject, seconds, count)
    kept.update(needed)
    # What a clock that was set back has dated into the future counts as new.
    recent = [
        point
        for point in subject
        if point.id not in kept and point.created_at > now - policy.keep_all_for
    ]
    kept.update(point.id for point in recent)
    return Decision(
        [point.id for point in reversed(subject) if point.id not in kept],
        recent[-1].created_at + policy.keep_all_for if recent else None,
    )


def _newest_of_each(newest_first: Sequence[Point], seconds: float, count: int) -> set[str]:
    """The newest of each of the newest `count` spans that have any."""
    spans: dict[float, str] = {}
    for point in newest_first:
        span = (point.created_at - _MONDAY) // seconds
        if span not in spans:
            if len(spans) == count:
                break
            spans[span] = point.id
    return set(spans.values())
