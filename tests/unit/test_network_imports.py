"""An archive decides nothing about what its session may reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sojourn.model import SessionState
from sojourn.model.network import NetworkMode, NetworkPolicy
from sojourn.repository.archives import Archive
from sojourn.repository.session_records import SessionRecord
from sojourn.server import imports
from sojourn.server.base import Principal
from support.databases import make_session


def test_an_imported_session_has_no_network_and_says_so() -> None:
    old = make_session(network=NetworkPolicy(NetworkMode.OPEN, secrets=["KEY"]), template="debian")
    held: Any = SimpleNamespace(record=SessionRecord(old, [], 0.0, ""), snapshots=[], digest="d")
    archive = cast(Archive, held)
    who = Principal(tenant="ten_b", actor="someone", role="tenant")
    made = imports._session(who, archive, "name")
    assert made.network == NetworkPolicy()
    assert made.state is SessionState.SUSPENDED
    event = imports._event(who, archive, made)
    assert event.details["network"] == "none"
    assert event.details["network_before"] == "open"
