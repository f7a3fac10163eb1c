"""Whatever a crash interrupted, one decision puts the sandbox into someone's hands or ends it."""

from __future__ import annotations

import itertools

import pytest
from test_lifecycle import CREATING, DELETED, FAILED, PAUSED, RUNNING, SUSPENDED, session

from sojourn.lifecycle import Action, Found, Host, Verb, reconcile
from sojourn.model import SessionState

VERBS: list[str | None] = [None, *map(str, Verb)]
CASES = list(itertools.product(SessionState, VERBS, [False, True], Host))


@pytest.mark.parametrize("host", Host)
def test_a_running_session_keeps_its_living_sandbox(host: Host) -> None:
    decision = reconcile(session(RUNNING), None, False, Found(host, "killed"))
    assert (
        decision.action
        == {
            Host.ALIVE: Action.ADOPT,
            Host.FROZEN: Action.THAW_AND_ADOPT,
            Host.GONE: Action.TO_SUSPENDED,
        }[host]
    )


@pytest.mark.parametrize("host", Host)
def test_a_paused_session_stays_frozen(host: Host) -> None:
    decision = reconcile(session(PAUSED), None, False, Found(host))
    assert (
        decision.action
        == {
            Host.ALIVE: Action.FREEZE_AND_ADOPT,
            Host.FROZEN: Action.ADOPT,
            Host.GONE: Action.TO_SUSPENDED,
        }[host]
    )


def test_a_lost_sandbox_is_explained() -> None:
    told = reconcile(session(RUNNING), None, False, Found(Host.GONE, "memory limit exceeded"))
    untold = reconcile(session(RUNNING), None, False, Found(Host.GONE))
    assert told.cause == "memory limit exceeded"
    assert untold.cause


@pytest.mark.parametrize("verb", [verb for verb in Verb if verb not in (Verb.DELETE,)])
@pytest.mark.parametrize("state", [RUNNING, PAUSED])
@pytest.mark.parametrize("host", [Host.ALIVE, Host.FROZEN])
def test_no_operation_gives_up_a_living_sandbox(
    state: SessionState, verb: Verb, host: Host
) -> None:
    action = reconcile(session(state), str(verb), False, Found(host)).action
    assert action in (Action.ADOPT, Action.THAW_AND_ADOPT, Action.FREEZE_AND_ADOPT)


@pytest.mark.parametrize("state", [RUNNING, PAUSED])
def test_a_seal_goes_forward_while_nothing_ran_since(state: SessionState) -> None:
    for host in (Host.FROZEN, Host.GONE):
        assert reconcile(session(state), "suspend", True, Found(host)).action is Action.LEAVE


def test_a_seal_is_void_when_the_sandbox_went_on() -> None:
    decision = reconcile(session(RUNNING), "suspend", True, Found(Host.ALIVE))
    assert decision.action is Action.UNSEAL_AND_ADOPT


def test_an_interrupted_creation_is_made_again_or_failed() -> None:
    for verb in ("create", "fork"):
        assert reconcile(session(CREATING), verb, False, Found(Host.GONE)).action is Action.LEAVE
    assert reconcile(session(CREATING), None, False, Found(Host.GONE)).action is Action.TO_FAILED


@pytest.mark.parametrize("state", [SUSPENDED, FAILED, DELETED])
def test_sessions_at_rest_stay(state: SessionState) -> None:
    assert reconcile(session(state), None, False, Found(Host.GONE)).action is Action.NONE


@pytest.mark.parametrize(("state", "verb", "sealed", "host"), CASES)
def test_every_case_is_decided(
    state: SessionState, verb: str | None, sealed: bool, host: Host
) -> None:
    decision = reconcile(session(state), verb, sealed, Found(host))
    if decision.action in (Action.TO_SUSPENDED, Action.TO_FAILED):
        assert decision.cause
        assert host is Host.GONE or state is CREATING
