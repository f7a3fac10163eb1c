"""The server does what the table of verbs (sojourn.lifecycle) says of running, paused and
suspended sessions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import WrongState
from sojourn.lifecycle import Command, Verb, decide
from sojourn.model import SessionState
from support.databases import make_session

STATES = (SessionState.RUNNING, SessionState.PAUSED, SessionState.SUSPENDED)


def expected(session: Session, verb: Verb) -> SessionState | None:
    """The state the table leads to; None when it refuses."""
    info = session.refresh().info
    record = make_session(
        id=info.id,
        driver=info.driver,
        state=SessionState(info.state),
        epoch=info.epoch,
        head=info.head,
    )
    try:
        return decide(record, Command(verb)).state
    except WrongState:
        return None


def bring_to(session: Session, state: SessionState) -> None:
    """Have a session in a state, from whichever it is in."""
    if session.refresh().state == state:
        return
    session.resume()
    if state is SessionState.PAUSED:
        session.pause()
    elif state is SessionState.SUSPENDED:
        session.suspend()


def fork_and_forget(session: Session) -> None:
    for child in session.fork(start=False):
        child.delete()


ACTIONS: dict[Verb, Callable[[Session], object]] = {
    Verb.EXEC: lambda session: session.exec(["true"]),
    Verb.FILES: lambda session: session.files.exists("/etc"),
    Verb.RUN_CODE: lambda session: session.run_code("1"),
    Verb.UPDATE: lambda session: session.update(labels={"a": "b"}),
    Verb.KEEP_ALIVE: lambda session: session.keep_alive(2000),
    Verb.PAUSE: lambda session: session.pause(),
    Verb.SUSPEND: lambda session: session.suspend(),
    Verb.RESUME: lambda session: session.resume(),
    Verb.SNAPSHOT: lambda session: session.snapshot(),
    Verb.ROLLBACK: lambda session: session.rollback("start"),
    Verb.FORK: fork_and_forget,
}


@pytest.mark.parametrize("state", STATES)
def test_a_verb_leads_where_the_table_says(client: Sojourn, state: SessionState) -> None:
    session = client.sessions.create()
    try:
        session.snapshot(label="start")
        for verb, action in ACTIONS.items():
            bring_to(session, state)
            wanted = expected(session, verb)
            if wanted is None:
                with pytest.raises(WrongState):
                    action(session)
                wanted = state
            else:
                action(session)
            assert session.refresh().state == wanted, verb
    finally:
        session.delete()
