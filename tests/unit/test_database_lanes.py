"""The order of jobs that change the same thing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sojourn.database.engine import touched
from sojourn.database.postgres.lanes import Lanes
from sojourn.database.writes import AppendEvent, FinishOperation, UpdateSession

NAMES = st.frozensets(st.sampled_from("abcd"), max_size=3)


@given(st.lists(NAMES, max_size=30), st.randoms(use_true_random=False))
def test_jobs_that_share_a_name_keep_their_order_and_all_are_run(
    jobs: list[frozenset[str]], chance: object
) -> None:
    running: list[int] = []
    finished: list[int] = []
    lanes: Lanes[tuple[int, frozenset[str]]] = Lanes(lambda job: running.append(job[0]))
    added = [(number, names) for number, names in enumerate(jobs)]
    for job in added:
        lanes.add(job, job[1])
    while running:
        # None runs beside an earlier one that shares a name, nor before it.
        for number in running:
            for earlier in range(number):
                if jobs[earlier] & jobs[number]:
                    assert earlier in finished
        number = running.pop(chance.randrange(len(running)))  # type: ignore[attr-defined]
        finished.append(number)
        lanes.finished(added[number])
    assert sorted(finished) == list(range(len(jobs)))
    assert len(lanes) == 0


def test_jobs_with_nothing_in_common_run_at_once() -> None:
    running: list[str] = []
    lanes: Lanes[str] = Lanes(running.append)
    for name in ("a", "b", "c"):
        lanes.add(name, [name])
    lanes.add("none", [])
    assert running == ["a", "b", "c", "none"]


def test_what_writes_touch_is_named() -> None:
    items = [
        UpdateSession("ses_1", set(), 1, {}),
        AppendEvent("ses_2", "turn"),
        FinishOperation("opr_1"),
    ]
    found = touched(items, sessions=["ses_3"], keys=["ten_a key"])
    assert set(found.names()) == {"ses_1", "ses_2", "ses_3", "opr_1", "key ten_a key"}
    assert found.sessions == {"ses_1", "ses_2", "ses_3"}
