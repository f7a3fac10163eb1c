"""Verbs in states, and deadlines: every cell of the table is looked at."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn import lifecycle
from sojourn.errors import Conflict, SessionNotFound, WrongState
from sojourn.lifecycle import Command, Effect, Transition, Verb
from sojourn.model import Policy, Session, SessionState
from support.databases import make_session

CREATING, RUNNING, PAUSED, SUSPENDED, FAILED, DELETED = SessionState
CALLS = [Verb.EXEC, Verb.FILES, Verb.RUN_CODE]


def session(state: SessionState = RUNNING, **fields: object) -> Session:
    base = make_session(
        id="ses_1", state=state, epoch=3, head="snp_1", created_at=1000.0, updated_at=1000.0
    )
    return msgspec.structs.replace(base, **fields)


def decide(state: SessionState, verb: Verb, **fields: object) -> Transition:
    return lifecycle.decide(session(state, **fields), Command(verb))


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        (Verb.PAUSE, PAUSED),
        (Verb.SUSPEND, SUSPENDED),
        (Verb.RESUME, RUNNING),
        (Verb.DELETE, DELETED),
        *[(verb, RUNNING) for verb in CALLS],
    ],
)
def test_asking_for_what_is_already_so_succeeds_without_effect(
    verb: Verb, state: SessionState
) -> None:
    assert decide(state, verb) == Transition(state)


@pytest.mark.parametrize("state", list(SessionState))
def test_delete_works_from_every_state(state: SessionState) -> None:
    assert decide(state, Verb.DELETE, head=None).state is DELETED


@pytest.mark.parametrize("state", [CREATING, RUNNING, PAUSED, FAILED])
def test_delete_ends_whatever_sandbox_there_may_be(state: SessionState) -> None:
    assert decide(state, Verb.DELETE).effects == (Effect.END, Effect.PURGE)


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(("state", "effect"), [(PAUSED, Effect.THAW), (SUSPENDED, Effect.RESTORE)])
def test_a_call_wakes_a_session_unless_policy_or_caller_says_no(
    verb: Verb, state: SessionState, effect: Effect
) -> None:
    assert decide(state, verb) == Transition(RUNNING, (effect,))
    with pytest.raises(WrongState, match="does not resume by itself"):
        decide(state, verb, policy=Policy(auto_resume=False))
    with pytest.raises(WrongState) as refused:
        lifecycle.decide(session(state), Command(verb, wake=False))
    assert "Resume" in refused.value.next_step


@pytest.mark.parametrize("verb", CALLS)
def test_a_running_session_serves_calls_whatever_the_policy(verb: Verb) -> None:
    assert decide(RUNNING, verb, policy=Policy(auto_resume=False)) == Transition(RUNNING)
    assert lifecycle.decide(session(RUNNING), Command(verb, wake=False)) == Transition(RUNNING)


def test_a_failed_session_resumes_from_its_snapshot_or_is_deleted() -> None:
    assert decide(FAILED, Verb.RESUME) == Transition(RUNNING, (Effect.RESTORE,))
    with pytest.raises(WrongState) as refused:
        decide(FAILED, Verb.RESUME, head=None)
    assert refused.value.next_step == "Delete it."


def test_suspending_keeps_a_snapshot_and_pausing_keeps_the_sandbox() -> None:
    assert decide(RUNNING, Verb.SUSPEND) == Transition(SUSPENDED, (Effect.PUT_AWAY,))
    assert decide(PAUSED, Verb.SUSPEND) == Transition(SUSPENDED, (Effect.PUT_AWAY,))
    assert decide(RUNNING, Verb.PAUSE) == Transition(PAUSED, (Effect.FREEZE,))


def test_forking_from_a_named_snapshot_leaves_the_sandbox_alone() -> None:
    for state in (RUNNING, PAUSED, SUSPENDED, FAILED):
        now = lifecycle.decide(session(state, head=None), Command(Verb.FORK, snapshot=True))
        assert now == Transition(state, (Effect.CHILDREN,))


@pytest.mark.parametrize(("state", "verb"), list(itertools.product(SessionState, Verb)))
def test_every_verb_in_every_state_is_decided_or_refused_with_a_way_on(
    state: SessionState, verb: Verb
) -> None:
    try:
        transition = decide(state, verb)
    except SessionNotFound:
        assert state is DELETED
    except WrongState as refused:
        assert state is not DELETED
        assert refused.next_step
        assert refused.details == {"session": "ses_1", "state": str(state)}
    else:
        if transition.state is CREATING:
            assert transition == Transition(state)
        if state is DELETED:
            assert transition == Transition(DELETED)
        if transition.state is not state:
            assert transition.effects, "a state changes only by doing something"


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb is not Verb.DELETE])
def test_nothing_but_delete_succeeds_on_a_deleted_session(verb: Verb) -> None:
    with pytest.raises(SessionNotFound):
        decide(DELETED, verb)


@pytest.mark.parametrize("verb", [Verb.PAUSE, Verb.SUSPEND, Verb.SNAPSHOT, *CALLS])
@pytest.mark.parametrize("state", [CREATING, FAILED])
def test_without_a_sandbox_or_snapshot_to_go_on_from_work_is_refused(
    verb: Verb, state: SessionState
) -> None:
    with pytest.raises(Conflict):
        decide(state, verb)


# -- deadlines --------------------------------------------------------------------------------

times = st.floats(0, 1e9, allow_nan=False)
spans = st.floats(0, 1e6, allow_nan=False)


@given(present=st.none() | times, now=times, timeout=st.none() | spans)
def test_activity_never_moves_the_idle_deadline_nearer(
    present: float | None, now: float, timeout: float | None
) -> None:
    after = lifecycle.idle_deadline(Policy(idle_timeout=timeout), present, now)
    if timeout is None:
        assert after is None
    else:
        assert after is not None
        assert after >= now + timeout
        assert present is None or after >= present


@given(present=st.none() | times, now=times, seconds=spans)
def test_keep_alive_never_moves_the_idle_deadline_nearer(
    present: float | None, now: float, seconds: float
) -> None:
    after = lifecycle.kept_alive(session(idle_deadline=present), now, seconds)
    if present is None:
        assert after is None
    else:
        assert after is not None
        assert after >= max(present, now + seconds)


def test_an_idle_session_is_suspended_and_deleted_only_where_that_was_said() -> None:
    thrown_away = session(RUNNING, policy=Policy(on_idle="delete"), idle_deadline=50.0)
    assert lifecycle.expired(thrown_away, 49.0) is None
    assert lifecycle.expired(thrown_away, 50.0, busy=True) is None
    assert lifecycle.expired(thrown_away, 50.0) is Verb.DELETE
    strict = Policy(on_expiry="delete", max_lifetime=1e6)
    for state in (RUNNING, PAUSED):
        idle = session(state, policy=strict, idle_deadline=50.0, lifetime_deadline=1e7)
        assert lifecycle.expired(idle, 49.0) is None
        assert lifecycle.expired(idle, 50.0) is Verb.SUSPEND


def test_a_session_with_calls_under_way_is_not_idle() -> None:
    assert lifecycle.expired(session(idle_deadline=50.0), 60.0, busy=True) is None


@pytest.mark.parametrize("state", [CREATING, SUSPENDED, FAILED, DELETED])
def test_only_a_session_with_a_sandbox_becomes_idle(state: SessionState) -> None:
    assert lifecycle.expired(session(state, idle_deadline=50.0), 60.0) is None


def test_at_the_end_of_its_lifetime_the_policy_decides() -> None:
    deleted = Policy(on_expiry="delete")
    for state in (CREATING, RUNNING, PAUSED, SUSPENDED, FAILED):
        over = session(state, policy=deleted, lifetime_deadline=50.0)
        assert lifecycle.expired(over, 50.0, busy=True) is Verb.DELETE
    for state in (RUNNING, PAUSED):
        assert lifecycle.expired(session(state, lifetime_deadline=50.0), 50.0) is Verb.SUSPEND
    assert lifecycle.expired(session(SUSPENDED, lifetime_deadline=50.0), 50.0) is None
    assert lifecycle.expired(session(DELETED, policy=deleted, lifetime_deadline=50.0), 50.0) is None


def test_a_spent_lifetime_does_not_put_a_resumed_session_away_again() -> None:
    over = session(RUNNING, lifetime_deadline=50.0)
    resumed = msgspec.structs.replace(over, lifetime_deadline=lifecycle.lifetime_after(over, 60.0))
    assert lifecycle.expired(resumed, 1e9) is None
    assert lifecycle.lifetime_after(over, 40.0) == 50.0


def test_pausing_keeps_the_deadline_and_waking_renews_it() -> None:
    before = session(RUNNING, idle_deadline=500.0, policy=Policy(idle_timeout=100.0))
    assert lifecycle.settled_deadline(before, PAUSED, 450.0) == 500.0
    assert lifecycle.settled_deadline(before, SUSPENDED, 450.0) is None
    assert lifecycle.settled_deadline(before, RUNNING, 450.0) == 550.0
    assert lifecycle.settled_deadline(before, RUNNING, 300.0) == 500.0


def test_first_deadlines_follow_the_policy() -> None:
    assert lifecycle.first_deadlines(Policy(idle_timeout=None), 10.0) == (None, None)
    assert lifecycle.first_deadlines(Policy(idle_timeout=5, max_lifetime=7), 10.0) == (15.0, 17.0)


def test_the_owner_may_bring_deadlines_nearer_by_another_policy() -> None:
    before = session(
        RUNNING,
        idle_deadline=5000.0,
        lifetime_deadline=9000.0,
        policy=Policy(idle_timeout=4000.0, max_lifetime=8000.0),
    )
    shorter = Policy(idle_timeout=10.0, max_lifetime=100.0)
    assert lifecycle.policy_deadlines(before, shorter, 2000.0) == (2010.0, 1100.0)
    none = Policy(idle_timeout=None, max_lifetime=None)
    assert lifecycle.policy_deadlines(before, none, 2000.0) == (None, None)
    asleep = msgspec.structs.replace(before, state=SUSPENDED, idle_deadline=None)
    assert lifecycle.policy_deadlines(asleep, shorter, 2000.0)[0] is None


def test_a_spent_lifetime_does_not_come_back_with_an_unrelated_change_of_policy() -> None:
    spent = session(RUNNING, lifetime_deadline=None, policy=Policy(max_lifetime=50.0))
    other = Policy(max_lifetime=50.0, auto_resume=False)
    assert lifecycle.policy_deadlines(spent, other, 5000.0)[1] is None
