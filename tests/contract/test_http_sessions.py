"""Sessions, verbs, history and events through both client twins over a real socket."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sojourn import (
    CaptureFailed,
    Conflict,
    IdempotencyMismatch,
    InvalidRequest,
    Limits,
    NameTaken,
    NotFound,
    SessionNotFound,
    SnapshotNotFound,
    UnknownTemplate,
)
from sojourn.model import new_id
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


def test_create_get_list_update_delete(api: Any) -> None:
    made = api.sessions.create(
        name="first", labels={"k": "v"}, env={"A": "1"}, limits={"cpus": 1}, policy={}
    )
    assert made.id.startswith("ses_") and made.name == "first" and made.state == "running"
    assert made.info.limits == Limits(cpus=1) and made.info.env == {"A": "1"}
    assert api.sessions.get("first").id == api.sessions.get(made.id).id == made.id
    assert [one.id for one in api.sessions.list(labels={"k": "v"})] == [made.id]
    assert api.sessions.list(labels={"k": "w"}) == []
    assert made.update(name=None, labels={}).name is None
    with pytest.raises(SessionNotFound):
        api.sessions.get("first")
    before = made.info.idle_deadline
    assert made.keep_alive(60).info.idle_deadline > (before or 0)
    made.delete()
    with pytest.raises(SessionNotFound):
        made.refresh()


def test_all_pages_are_listed(api: Any) -> None:
    made = [api.sessions.create(labels={"many": "yes"}) for _ in range(7)]
    listed = api.sessions.list(labels={"many": "yes"})
    assert [one.id for one in listed] == [one.id for one in made]
    assert len(api.sessions.list(labels={"many": "yes"}, limit=3)) == 3
    for one in made:
        one.delete()


def test_pages_follow_their_cursor(rig: HttpRig, monkeypatch: pytest.MonkeyPatch, api: Any) -> None:
    monkeypatch.setattr("sojourn.client.core_sessions.PAGE", 2)
    made = [api.sessions.create(labels={"paged": "yes"}) for _ in range(5)]
    before = rig.service.calls["list"]
    listed = api.sessions.list(labels={"paged": "yes"})
    assert [one.id for one in listed] == [one.id for one in made]
    assert rig.service.calls["list"] == before + 3
    for one in made:
        one.delete()


def test_the_same_key_makes_one_session(api: Any) -> None:
    key = new_id("key")
    first = api.sessions.create(idempotency_key=key)
    assert api.sessions.create(idempotency_key=key).id == first.id
    with pytest.raises(IdempotencyMismatch):
        api.sessions.create(idempotency_key=key, labels={"x": "y"})
    first.delete()


def test_refusals_are_typed(api: Any, work: Any) -> None:
    with pytest.raises(UnknownTemplate):
        api.sessions.create(template="none")
    with pytest.raises(InvalidRequest, match="limits"):
        api.sessions.create(limits={"cpu": 1})
    with pytest.raises(InvalidRequest):
        api.sessions.get("")
    with pytest.raises(NotFound):
        api.sessions.get("a/b")
    api.sessions.create(name="twice")
    with pytest.raises(NameTaken):
        api.sessions.create(name="twice")
    api.sessions.get("twice").delete()
    with pytest.raises(Conflict):
        work.promote()


def test_verbs_move_the_session(work: Any) -> None:
    assert work.pause().state == "paused"
    assert work.resume().state == "running"
    assert work.suspend().state == "suspended"
    assert work.resume().refresh().state == "running"


def test_history_rollback_fork_promote(work: Any) -> None:
    first = work.snapshot("one")
    second = work.snapshot(memory=False)
    assert work.head == second.id and not second.memory
    assert [one.label for one in work.history()] == ["one", None]
    assert work.rollback("one").head == first.id
    assert work.rollback(second).head == second.id
    with pytest.raises(SnapshotNotFound):
        work.rollback("none")
    children = work.fork(2, snapshot="one", names=["left", "right"])
    assert [child.name for child in children] == ["left", "right"]
    assert children[0].info.forked_from == "one"
    assert children[0].promote().id == work.id
    assert work.diff("one", text=True).text == {"/x": "diff"}
    assert work.verify().ok and work.verify(first).snapshots == 2
    work.delete_snapshot(first)
    assert [one.id for one in work.history()] == [second.id]
    for child in children:
        child.delete()


def test_a_turn_takes_its_snapshot_at_its_end(work: Any) -> None:
    with work.turn("group") as turn:
        assert turn.snapshot is None
    assert turn.snapshot.kind == "auto"


def test_a_long_operation_is_waited_for(
    api: Any, work: Any, rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.client.core.WAIT_SECONDS", 0.02)
    rig.service.slow = 0.1
    try:
        assert work.pause().state == "paused"
        made = api.sessions.create()
    finally:
        rig.service.slow = 0.0
    made.delete()


def test_a_failed_operation_raises_its_error(work: Any, rig: HttpRig) -> None:
    def fail() -> None:
        raise CaptureFailed("the disk said no", snapshot="snp_1")

    original = rig.service._snapshot
    rig.service._snapshot = lambda *_given: fail()
    try:
        with pytest.raises(CaptureFailed, match="the disk said no") as caught:
            work.snapshot()
    finally:
        rig.service._snapshot = original
    assert caught.value.details["snapshot"] == "snp_1"
    assert caught.value.details["operation"].startswith("opn_")


def test_events_are_listed_and_followed(work: Any) -> None:
    work.pause()
    listed = work.events()
    assert [event.kind for event in listed] == ["create", "pause"]
    assert [event.kind for event in work.events(after=1)] == ["pause"]
    later = threading.Timer(0.05, work.resume)
    later.start()
    seen = []
    for event in work.events(follow=True):
        seen.append(event.kind)
        if event.kind == "resume":
            break
    later.join()
    assert seen == ["create", "pause", "resume"]


def test_service_facts(api: Any) -> None:
    assert api.health().status == "ok"
    assert api.status().node == "fake"
    assert [one.name for one in api.templates.list()] == ["debian"]
    made = api.tokens.create("c")
    assert made.token and made.id in [one.id for one in api.tokens.list()]
    api.tokens.revoke(made.id)
    assert made.id not in [one.id for one in api.tokens.list()]
