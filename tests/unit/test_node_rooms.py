"""A node's own word about its room."""

from __future__ import annotations

from typing import Any

import pytest

from sojourn.errors import CapacityExhausted
from sojourn.model import Limits, SessionState
from sojourn.model.nodes import Resources
from sojourn.server.cluster.scheduler import Settings
from sojourn.server.context import Context
from sojourn.server.nodes.identity import NodeIdentity, NodeSettings
from sojourn.server.registry import ActiveSession, Registry
from support.databases import make_session

ONE = Limits(cpus=1.0)


def node(cpus: float, overcommit: Settings) -> NodeIdentity:
    made: Any = NodeIdentity.__new__(NodeIdentity)
    made.settings = NodeSettings("nod_me", "127.0.0.1:1", overcommit=overcommit)
    made.capacity = Resources(cpus=cpus)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(("factor", "fits"), [(1.0, 2), (4.0, 8)])
def test_limits_add_up_to_as_much_as_the_operator_says(factor: float, fits: int) -> None:
    found = node(2.0, Settings(cpus=factor))
    found.require_room(Resources(cpus=fits - 1.0), ONE)
    with pytest.raises(CapacityExhausted):
        found.require_room(Resources(cpus=float(fits)), ONE)


def test_sessions_made_at_once_do_not_keep_each_other_out() -> None:
    context: Any = Context.__new__(Context)
    context.node = node(2.0, Settings(cpus=1.0))
    context.registry = Registry(context, lambda _: None)

    def held(at: float, state: SessionState) -> ActiveSession:
        session = make_session(created_at=at, state=state, limits=ONE)
        return context.registry.hold(session)  # type: ignore[no-any-return]

    running = held(1.0, SessionState.RUNNING)
    first, second, third = (held(at, SessionState.CREATING) for at in (2.0, 3.0, 4.0))
    context.require_room(ONE, but=first.id)
    for late in (second, third):
        with pytest.raises(CapacityExhausted):
            context.require_room(ONE, but=late.id)
    with pytest.raises(CapacityExhausted):
        context.require_room(ONE)  # one more: all that are being made count
    context.registry.drop(running)
    context.require_room(ONE, but=second.id)
