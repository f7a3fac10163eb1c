"""C78, C83, C85 and the event log: who sees what."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore
import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import NotFound, SessionNotFound
from support.raw import request
from support.servers import ServerProcess, eventually


@pytest.fixture(scope="module")
def session(shared_server):  # type: ignore[no-untyped-def]
    """One session for the module, of the operator's tenant."""
    with shared_server.client() as client:
        session = client.sessions.create(name="apitest", labels={"purpose": "api"})
        yield session
        session.delete()


@pytest.fixture(scope="module")
def stranger(shared_server: ServerProcess) -> Iterator[str]:
    """Another tenant's token."""
    with shared_server.client() as client:
        made = client.tokens.create("stranger")
        assert made.token
        yield made.token
        client.tokens.revoke(made.id)


@pytest.fixture(scope="module")
def document(shared_server: ServerProcess) -> dict[str, Any]:
    status, found = request(shared_server.url, "GET", "/v1/openapi.json")
    assert status == 200
    return found  # type: ignore[no-any-return]


def routes(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, methods in sorted(document["paths"].items())
        for method, operation in methods.items()
    ]


# -- C78: filters ---------------------------------------------------------------------------------


def test_c78_every_state_can_be_asked_for(client: Sojourn, session: Session) -> None:
    label = {"run": "c78"}
    sessions = [client.sessions.create(labels=label) for _ in range(3)]
    try:
        running, paused, suspended = sessions
        paused.pause()
        suspended.suspend()
        for one, state in ((running, "running"), (paused, "paused"), (suspended, "suspended")):
            found = client.sessions.list(state=state, labels=label)
            assert [item.id for item in found] == [one.id]
            assert found[0].state == state
        both = client.sessions.list(state="paused,suspended", labels=label)
        assert {item.id for item in both} == {paused.id, suspended.id}
        assert client.sessions.list(state="failed", labels=label) == []
        assert client.sessions.list(labels={"run": "other"}) == []
        assert len(client.sessions.list(labels=label, limit=2)) == 2
        [fork] = suspended.fork(1, start=False)
        assert fork.state == "suspended"
        assert fork.id in {item.id for item in client.sessions.list(state="suspended")}
        fork.delete()
        assert paused.refresh().state == "paused", "a listing wakes nobody"
    finally:
        for one in sessions:
            one.delete()
    assert client.sessions.list(labels=label) == []


def test_c78_unknown_states_and_labels_are_refused(raw) -> None:  # type: ignore[no-untyped-def]
    for target in (
        "state=sleeping",
        "state=",
        "label=noequals",
        "limit=0",
        "limit=x",
    ):
        status, answer = raw("GET", f"/v1/sessions?{target}")
        assert (status, answer["code"]) == (400, "invalid_request"), (target, answer)


# -- C83: tenants ---------------------------------------------------------------------------------


def fill(path: str, operation: dict[str, Any], known: dict[str, str]) -> str:
    """A path with its parameters and required queries filled in."""
    target = re.sub(r"\{(\w+)\}", lambda found: known[found[1]], path)
    queries = [
        f"{parameter['name']}={known.get(parameter['name'], '1')}"
        for parameter in operation["parameters"]
        if parameter["in"] == "query" and parameter["required"]
    ]
    return target + ("?" + "&".join(queries) if queries else "")


def body_of(operation: dict[str, Any]) -> tuple[bytes | None, str]:
    if "requestBody" not in operation:
        return None, "application/json"
    [(kind, content)] = list(operation["requestBody"]["content"].items())[:1]
    if kind != "application/json":
        return b"x", kind
    return json.dumps(content.get("example", {})).encode(), kind


def test_c83_no_route_shows_or_touches_what_is_another_tenants(
    shared_server: ServerProcess, session: Session, stranger: str, document: dict[str, Any]
) -> None:
    process = session.spawn("sleep 1000")
    session.files.write("/srv/mine", b"mine")
    taken = session.snapshot("mine")
    operation_id = [event.operation for event in session.events() if event.operation][-1]
    known = {
        "process": str(process.id),
        "snapshot": taken.id,
        "operation": str(operation_id),
        "turn": "trn_x",
        "token": "tok_x",
        "port": "8000",
        "path": "/srv/mine",
        "to": "/srv/stolen",
        "mode": "777",
    }
    before = (session.refresh().info, len(session.history()), session.events())
    tried = 0
    for ref in (session.id, "apitest"):
        for method, path, operation in routes(document):
            if "{ref}" not in path and "{operation}" not in path:
                continue
            target = fill(path, operation, known | {"ref": ref})
            content, kind = body_of(operation)
            status, answer = request(
                shared_server.url, method, target, content, stranger, {"content-type": kind}
            )
            assert status == 404, (method, target, status, answer)
            assert answer["code"] in ("session_not_found", "operation_not_found"), (target, answer)
            assert "mine" not in json.dumps(answer).replace("/srv/mine", "")
            tried += 1
    assert tried > 50
    after = (session.refresh().info, len(session.history()), session.events())
    assert after == before
    assert process.refresh().running
    assert session.files.read("/srv/mine") == b"mine"
    with shared_server.client(stranger) as other:
        assert other.sessions.list() == []
        # A name of another tenant is free for this one, and means its own session.
        own = other.sessions.create(name="apitest")
        assert other.sessions.get("apitest").id == own.id
        with pytest.raises(NotFound):
            own.rollback(taken.id)
        with pytest.raises(NotFound):
            own.fork(1, snapshot=taken.id)
        with pytest.raises(NotFound):
            own.diff(taken.id, None)
        with pytest.raises(NotFound):
            own.verify(taken.id)
        with pytest.raises(NotFound):
            own.delete_snapshot(taken.id)
        own.delete()
    assert session.refresh().state == "running"
    process.kill()


def test_c83_the_operators_routes_are_the_operators(
    shared_server: ServerProcess, stranger: str
) -> None:
    for method, target, content in (
        ("GET", "/v1/tokens", None),
        ("POST", "/v1/tokens", b'{"tenant": "mallory"}'),
        ("DELETE", "/v1/tokens/tok_x", None),
    ):
        status, answer = request(shared_server.url, method, target, content, stranger)
        assert (status, answer["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "given",
    [
        None,
        "Bearer wrong",
        "Bearer ",
        "Bearer",
        "Basic dXNlcjpwYXNz",
        "",
        "Bearer " + "x" * 5000,
        "Bearer a b",
        "bearer\ttoken",
    ],
)
def test_every_route_wants_a_token(
    shared_server: ServerProcess, session: Session, document: dict[str, Any], given: str | None
) -> None:
    named = ("operation", "snapshot", "turn", "token", "to", "mode", "secret", "template")
    known = dict.fromkeys(named, "x")
    known |= {"ref": session.id, "process": "1", "port": "1", "path": "/srv"}
    headers = {} if given is None else {"authorization": given}
    for method, path, operation in routes(document):
        if operation.get("security") == []:
            continue
        status, answer = request(
            shared_server.url, method, fill(path, operation, known), b"{bad", None, headers
        )
        assert (status, answer["code"]) == (401, "unauthenticated"), (method, path, answer)
        assert answer["next_step"]


def test_a_revoked_token_is_worthless_at_once(shared_server: ServerProcess) -> None:
    with shared_server.client() as client:
        made = client.tokens.create("shortlived")
        with shared_server.client(made.token) as other:
            own = other.sessions.create()
            own.delete()
            client.tokens.revoke(made.id)
            status, answer = request(shared_server.url, "GET", "/v1/sessions", None, made.token)
            assert (status, answer["code"]) == (401, "unauthenticated")
        assert made.id not in {token.id for token in client.tokens.list()}
        assert all(token.token is None for token in client.tokens.list())


# -- C85: secrets ---------------------------------------------------------------------------------


def test_c85_nothing_of_the_server_is_in_the_session(
    shared_server: ServerProcess, session: Session
) -> None:
    """Neither its environment, its token, its files nor its command line."""
    token = shared_server.token
    environ = dict(
        pair.split("=", 1)
        for pair in Path(f"/proc/{shared_server.pid}/environ").read_text().split("\0")
        if "=" in pair
    )
    inside = session.exec("cat /proc/*/environ | tr '\\0' '\\n'; env").text
    assert token not in inside
    for name, value in environ.items():
        if name.startswith("SOJOURN") or "PYTEST" in name:
            assert f"{name}=" not in inside
        if len(value) > 20 and name not in ("PATH",):
            assert value not in inside, name
    data = str(shared_server.data)
    shown = session.exec(
        "cat /proc/mounts /proc/self/mountinfo /proc/*/cmdline /proc/*/maps 2>/dev/null;"
        " ls -la /run/sojourn /run/sojourn/*; cat /run/sojourn/*/* 2>/dev/null | head -c 100000"
    ).text
    assert data not in shown
    assert token not in shown
    assert os.uname().nodename not in session.exec("hostname").text


def test_c85_host_descriptors_and_devices_are_out_of_reach(session: Session) -> None:
    open_ones = session.exec("ls -l /proc/self/fd | awk '{print $NF}'").text
    assert "sojourn.db" not in open_ones
    assert session.exec("ls /dev").text.split() and "sda" not in session.exec("ls /dev").text
    done = session.exec("mkdir -p /mnt/x && mount -t ext4 /dev/sda1 /mnt/x")
    assert done.exit_code != 0


# -- the event log --------------------------------------------------------------------------------


def test_the_event_log_tells_who_did_what_between_which_snapshots(session: Session) -> None:
    last = session.events()[-1].seq
    session.exec("echo logged > /srv/logged")
    session.exec("exit 5")
    session.files.write("/srv/file", b"x")
    taken = session.snapshot("in the log")
    session.suspend()
    session.resume()
    events = [event for event in session.events(after=last)]
    assert [event.seq for event in events] == sorted(event.seq for event in events)
    by_kind = {event.kind: event for event in events}
    assert {"exec", "files.write", "snapshot", "suspend", "resume"} <= by_kind.keys()
    commands = [event for event in events if event.kind == "exec"]
    assert commands[0].details["command"] == ["echo logged > /srv/logged"]
    assert commands[1].details["exit_code"] == 5
    assert commands[0].snapshot_after != commands[0].snapshot_before
    assert by_kind["files.write"].details["path"] == "/srv/file"
    named = [event for event in events if event.snapshot_after == taken.id]
    assert named and named[0].details["label"] == "in the log"
    assert by_kind["suspend"].snapshot_before == taken.id
    assert all(event.actor and event.result == "ok" and event.at > 0 for event in events)
    for event, following in itertools.pairwise(events):
        assert event.at <= following.at + 1


def read_sse(
    server: ServerProcess, session: Session, wanted: int, headers: dict[str, str], query: str = ""
) -> list[tuple[int, dict[str, Any]]]:
    given = {"authorization": f"Bearer {server.token}", "accept": "text/event-stream"} | headers
    found: list[tuple[int, dict[str, Any]]] = []
    buffer = b""
    target = f"{server.url}/v1/sessions/{session.id}/events{query}"
    with httpcore.stream("GET", target, headers=given) as answer:
        assert answer.status == 200
        assert dict(answer.headers)[b"content-type"].startswith(b"text/event-stream")
        for piece in answer.iter_stream():
            buffer += piece
            while b"\n\n" in buffer:
                block, _, buffer = buffer.partition(b"\n\n")
                if block.startswith(b":"):
                    continue
                lines = dict(line.split(b": ", 1) for line in block.split(b"\n"))
                found.append((int(lines[b"id"]), json.loads(lines[b"data"])))
                if len(found) == wanted:
                    return found
    return found


def test_the_event_log_can_be_followed_and_taken_up(
    shared_server: ServerProcess, session: Session
) -> None:
    session.exec("true")
    listed = session.events()
    first = read_sse(shared_server, session, len(listed), {})
    assert [number for number, _ in first] == [event.seq for event in listed]
    middle = listed[len(listed) // 2].seq
    rest = [event.seq for event in listed if event.seq > middle]
    again = read_sse(shared_server, session, len(rest), {"last-event-id": str(middle)})
    assert [number for number, _ in again] == rest
    again = read_sse(shared_server, session, len(rest), {}, f"?after={middle}")
    assert [number for number, _ in again] == rest
    # What happens later arrives by itself, once.
    got: list[tuple[int, dict[str, Any]]] = []
    last = session.events()[-1].seq

    def follow() -> None:
        got.extend(read_sse(shared_server, session, 2, {"last-event-id": str(last)}))

    follower = threading.Thread(target=follow)
    follower.start()
    session.exec("echo one")
    session.exec("echo two")
    follower.join(30)
    assert not follower.is_alive()
    assert [event["details"]["command"] for _, event in got] == [["echo one"], ["echo two"]]


def test_following_ends_when_the_session_is_deleted(client: Sojourn) -> None:
    session = client.sessions.create()
    seen: list[str] = []

    def follow() -> None:
        seen.extend(event.kind for event in session.events(follow=True))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    time.sleep(0.1)
    session.delete()
    follower.join(30)
    assert not follower.is_alive()
    assert seen[0] == "create"
    with pytest.raises(SessionNotFound):
        session.refresh()


def test_the_event_log_is_there_after_a_restart(server: ServerProcess) -> None:
    with server.client() as client:
        session = client.sessions.create()
        session.exec("echo before")
        eventually(lambda: session.refresh().info.operation is None)
        before = session.events()
    with server.restart() as client:
        session = client.sessions.get(session.id)
        assert session.events()[: len(before)] == before
        session.exec("echo after")
        numbers = [event.seq for event in session.events()]
        assert numbers == sorted(set(numbers))
        session.delete()
