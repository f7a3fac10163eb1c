"""Whatever a crash interrupted, deciding again and again leads to a stable session.

The test plays the host: it does what each decision says and shows the result to the next one.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_lifecycle import CREATING, DELETED, FAILED, PAUSED, RUNNING, SUSPENDED, session

from sojourn.lifecycle import STEPS, Action, Decision, Found, Host, Unfinished, reconcile
from sojourn.model import SessionState

# States a session can be in while the verb is unfinished: the last step commits the new state.
STARTS = {
    "create": [CREATING],
    "resume": [PAUSED, SUSPENDED, FAILED, RUNNING],
    "rollback": [RUNNING, PAUSED, SUSPENDED, FAILED],
    "pause": [RUNNING, PAUSED],
    "suspend": [RUNNING, PAUSED],
    "snapshot": [RUNNING, PAUSED],
    "fork": [RUNNING, PAUSED, SUSPENDED],
    "promote": [RUNNING, PAUSED, SUSPENDED],
    "delete": list(SessionState),
    "unheard_of": [RUNNING, PAUSED, SUSPENDED, FAILED],
}
ENDS = {
    "create": RUNNING,
    "resume": RUNNING,
    "rollback": RUNNING,
    "pause": PAUSED,
    "suspend": SUSPENDED,
    "delete": DELETED,
}
STABLE = {
    RUNNING: Host.ALIVE,
    PAUSED: Host.FROZEN,
    SUSPENDED: Host.GONE,
    FAILED: Host.GONE,
    DELETED: Host.GONE,
}


@dataclasses.dataclass
class World:
    """A session, its host and what is where: `work` names where the newest work is held."""

    state: SessionState
    operation: Unfinished | None
    host: Host
    published: bool
    head: str | None
    outcome: str | None = None
    work_in_sandbox: bool = False
    work_lost: bool = False

    def decide(self) -> Decision:
        return reconcile(
            session(self.state, head=self.head),
            self.operation,
            Found(self.host, self.published, None),
        )

    def perform(self, decision: Decision) -> None:
        getattr(self, f"_{decision.action}")(decision)

    def _end_sandbox(self) -> None:
        if self.host is not Host.GONE and self.work_in_sandbox:
            self.work_lost = True
        self.host = Host.GONE

    def _none(self, decision: Decision) -> None:
        pass

    def _adopt(self, decision: Decision) -> None:
        assert self.host is not Host.GONE

    def _thaw_and_adopt(self, decision: Decision) -> None:
        assert self.host is Host.FROZEN
        self.host = Host.ALIVE

    def _freeze_and_adopt(self, decision: Decision) -> None:
        assert self.host is Host.ALIVE
        self.host = Host.FROZEN

    def _roll_forward(self, decision: Decision) -> None:
        assert self.operation is not None
        verb = self.operation.verb
        if verb in ("suspend", "snapshot", "fork", "promote"):
            assert self.published or self.operation.reached("publish")
            self.head = "snp_new"
            if verb == "suspend":
                # The published snapshot was taken of this frozen sandbox.
                assert self.host is not Host.ALIVE or self.operation.reached("kill")
                self.work_in_sandbox = False
        if verb == "delete":
            self.work_in_sandbox = False
        if verb == "pause":
            self.host = Host.FROZEN
        if verb in ("create", "resume", "rollback"):
            assert self.host is not Host.GONE
            self.host = Host.ALIVE
        self._finish("succeeded")

    def _restart(self, decision: Decision) -> None:
        assert self.operation is not None
        verb = self.operation.verb
        assert verb in ("create", "rollback")
        assert decision.after in (None, *STEPS[verb])
        self.work_in_sandbox = self.work_in_sandbox and verb != "rollback"
        self._end_sandbox()
        self.host = Host.ALIVE
        self._finish("succeeded")

    def _finish(self, outcome: str) -> None:
        assert self.operation is not None
        self.outcome = outcome
        if outcome == "succeeded":
            self.state = ENDS.get(self.operation.verb, self.state)
            if STABLE[self.state] is Host.GONE:
                self._end_sandbox()
        self.operation = None

    def _roll_back(self, decision: Decision) -> None:
        assert self.operation is not None
        assert not self.operation.reached("kill")
        assert decision.cause
        self._finish("failed")

    def _to_suspended(self, decision: Decision) -> None:
        assert self.host is Host.GONE
        assert self.head is not None
        assert decision.cause
        self.state = SUSPENDED

    def _to_failed(self, decision: Decision) -> None:
        assert self.host is Host.GONE
        assert self.head is None
        assert decision.cause
        self.state = FAILED

    def _reap(self, decision: Decision) -> None:
        self._end_sandbox()


def settle(world: World) -> None:
    """Decide and do until it is stable; then once more, which must change nothing."""
    for _ in range(5):
        decision = world.decide()
        world.perform(decision)
        if decision.settles and world.operation is None and world.decide().settles:
            break
    else:
        pytest.fail(f"not stable after five decisions: {world}")
    for _ in range(2):
        world.perform(world.decide())
    before = dataclasses.replace(world)
    world.perform(world.decide())
    assert world == before


@st.composite
def worlds(draw: st.DrawFn) -> World:
    verb = draw(st.sampled_from([None, *STARTS]))
    if verb is None:
        state = draw(st.sampled_from(list(SessionState)))
        operation = None
    else:
        state = draw(st.sampled_from(STARTS[verb]))
        step = draw(st.sampled_from([None, *STEPS.get(verb, ("odd",))[:-1], "no_such_step"]))
        operation = Unfinished(verb, step)
    host = draw(st.sampled_from(list(Host)))
    snapshots = verb in ("suspend", "snapshot", "fork", "promote")
    published = snapshots and draw(st.booleans())
    head = draw(st.sampled_from([None, "snp_1"]))
    # A resume or rollback needs a snapshot to go to, and a session without sandbox has one.
    if state is SUSPENDED or verb in ("resume", "rollback"):
        head = "snp_1"
    return World(
        state,
        operation,
        host,
        published,
        head,
        work_in_sandbox=state in (RUNNING, PAUSED) and host is not Host.GONE,
    )


@given(world=worlds())
def test_every_crash_converges_to_a_stable_session(world: World) -> None:
    settle(world)
    assert world.operation is None
    assert world.state is not CREATING
    assert world.host is STABLE[world.state]


@given(world=worlds())
def test_no_work_in_a_sandbox_is_given_up_unless_its_owner_asked(world: World) -> None:
    operation, host = world.operation, world.host
    had_work = world.work_in_sandbox
    # What contradicts itself (a sandbox still there after it was recorded as ended) is left out.
    ended = operation is not None and (operation.reached("kill") or operation.reached("stop"))
    settle(world)
    if had_work and not ended:
        assert not world.work_lost
        if operation is None or operation.verb not in ("delete", "rollback"):
            kept = world.state in (RUNNING, PAUSED)
            put_away = world.state is SUSPENDED and world.head == "snp_new"
            assert kept or put_away, (host, world)


@given(world=worlds())
def test_an_operation_whose_snapshot_is_published_succeeds(world: World) -> None:
    operation = world.operation
    stale = operation is not None and operation.verb == "suspend" and world.host is Host.ALIVE
    published = world.published or (operation is not None and operation.reached("publish"))
    settle(world)
    if operation is not None and published and not stale:
        assert world.outcome == "succeeded"
        assert world.head == "snp_new"


@given(world=worlds())
def test_an_acknowledged_delete_is_carried_out(world: World) -> None:
    asked = world.operation is not None and world.operation.verb == "delete"
    settle(world)
    assert (world.state is DELETED) >= asked


def decision(
    state: SessionState, operation: Unfinished | None, host: Host, **found: object
) -> Decision:
    return reconcile(session(state), operation, Found(host, **found))


@pytest.mark.parametrize("step", [None, "freeze", "checkpoint", "seal"])
def test_a_suspend_is_undone_before_its_snapshot_is_published(step: str | None) -> None:
    undone = decision(RUNNING, Unfinished("suspend", step), Host.FROZEN)
    assert undone.action is Action.ROLL_BACK
    assert decision(RUNNING, None, Host.FROZEN).action is Action.THAW_AND_ADOPT


@pytest.mark.parametrize("step", ["publish", "kill", "take"])
@pytest.mark.parametrize("host", [Host.FROZEN, Host.GONE])
def test_a_suspend_is_completed_once_its_snapshot_is_published(step: str, host: Host) -> None:
    assert decision(RUNNING, Unfinished("suspend", step), host).action is Action.ROLL_FORWARD


def test_a_snapshot_published_but_not_recorded_counts_as_published() -> None:
    forward = decision(RUNNING, Unfinished("suspend", "seal"), Host.FROZEN, published=True)
    assert forward.action is Action.ROLL_FORWARD


def test_a_sandbox_that_ran_on_after_the_snapshot_is_not_given_up_for_it() -> None:
    undone = decision(RUNNING, Unfinished("suspend", "publish"), Host.ALIVE)
    assert undone.action is Action.ROLL_BACK


def test_a_sandbox_that_died_leaves_its_session_at_the_head_with_the_cause() -> None:
    for state in (RUNNING, PAUSED):
        lost = decision(state, None, Host.GONE, cause="memory limit exceeded")
        assert lost == Decision(Action.TO_SUSPENDED, cause="memory limit exceeded")


def test_a_session_that_never_had_a_snapshot_fails_with_the_cause() -> None:
    lost = reconcile(session(RUNNING, head=None), None, Found(Host.GONE, cause="killed"))
    assert lost == Decision(Action.TO_FAILED, cause="killed")


def test_a_paused_session_is_adopted_frozen() -> None:
    assert decision(PAUSED, None, Host.FROZEN).action is Action.ADOPT
    assert decision(PAUSED, None, Host.ALIVE).action is Action.FREEZE_AND_ADOPT


def test_a_sandbox_of_a_suspended_session_is_reaped() -> None:
    for state in (SUSPENDED, FAILED, DELETED, CREATING):
        assert decision(state, None, Host.ALIVE).action is Action.REAP


def test_a_resume_goes_on_when_its_sandbox_runs_and_is_undone_when_not() -> None:
    begun = Unfinished("resume", "start")
    assert decision(SUSPENDED, begun, Host.ALIVE).action is Action.ROLL_FORWARD
    assert decision(SUSPENDED, begun, Host.GONE).action is Action.ROLL_BACK
    assert decision(SUSPENDED, Unfinished("resume", "mount"), Host.ALIVE).action is Action.ROLL_BACK


def test_a_creation_is_made_again_when_its_sandbox_is_gone() -> None:
    assert decision(CREATING, Unfinished("create", "start"), Host.GONE).action is Action.RESTART
    assert decision(CREATING, Unfinished("create", "start"), Host.ALIVE).action is (
        Action.ROLL_FORWARD
    )


def test_a_rollback_that_stopped_the_sandbox_goes_where_it_was_to_go() -> None:
    again = Decision(Action.RESTART, after="stop")
    assert decision(RUNNING, Unfinished("rollback", "stop"), Host.GONE) == again
    assert decision(RUNNING, Unfinished("rollback"), Host.GONE) == again
    assert decision(RUNNING, Unfinished("rollback"), Host.ALIVE).action is Action.ROLL_BACK
