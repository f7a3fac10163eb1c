"""Whatever is sent: a typed error body, and nothing changed."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import (
    InvalidRequest,
    NameTaken,
    NotFound,
    SnapshotNotFound,
    SojournError,
    TooLarge,
    UnknownTemplate,
    all_errors,
)
from sojourn.wire.stream import FrameDecoder
from support.servers import ServerProcess


@pytest.fixture(scope="module")
def session(shared_server):  # type: ignore[no-untyped-def]
    """One session for the module."""
    with shared_server.client() as client:
        session = client.sessions.create(name="badinput", policy={"auto_snapshot": "off"})
        yield session
        session.delete()


@pytest.fixture(autouse=True)
def _nothing_changed(session: Session, client: Sojourn):  # type: ignore[no-untyped-def]
    """No request of these tests does anything."""
    session.exec("true")
    before = session.refresh().info
    names = sorted(one.id for one in client.sessions.list())
    history = session.history()
    yield
    after = session.refresh().info
    ignored = ("updated_at", "idle_deadline", "operation")
    for name in before.__struct_fields__:
        if name not in ignored:
            assert getattr(after, name) == getattr(before, name), name
    assert sorted(one.id for one in client.sessions.list()) == names
    assert session.history() == history
    assert session.exec("echo usable").text == "usable\n"


def is_error(status: int, answer: Any, *codes: str) -> None:
    assert 400 <= status < 500 or status == 501, (status, answer)
    assert set(answer) == {"code", "message", "next_step", "details"}, answer
    assert answer["message"]
    assert answer["next_step"]
    kind = all_errors()[answer["code"]]
    assert kind.status == status or status in (404, 405, 416), answer
    if codes:
        assert answer["code"] in codes, answer


NAN, INFINITY = float("nan"), float("inf")

CREATES: list[dict[str, Any]] = [
    {"template": "missing"},
    {"template": ""},
    {"template": "../debian"},
    {"template": "debian\0"},
    {"template": None},
    {"template": 5},
    {"name": ""},
    {"name": "a/b"},
    {"name": "../x"},
    {"name": "-x"},
    {"name": "x" * 64},
    {"name": "a\nb"},
    {"name": "ses_looks_like_an_id"},
    {"name": "ü"},
    {"name": 1},
    {"labels": {"": "x"}},
    {"labels": {"a": 1}},
    {"labels": ["a"]},
    {"labels": {"a\0": "b"}},
    {"labels": {f"k{n}": "v" for n in range(1000)}},
    {"labels": {"a": "x" * 100_000}},
    {"env": {"": "x"}},
    {"env": {"A=B": "x"}},
    {"env": {"A": "x\0y"}},
    {"env": {"A": None}},
    {"env": {"A": "x" * 10_000_000}},
    {"limits": {"cpus": 0}},
    {"limits": {"cpus": -1}},
    {"limits": {"cpus": NAN}},
    {"limits": {"cpus": INFINITY}},
    {"limits": {"cpus": "2"}},
    {"limits": {"memory_bytes": 0}},
    {"limits": {"memory_bytes": -5}},
    {"limits": {"memory_bytes": 1.5}},
    {"limits": {"memory_bytes": 2**70}},
    {"limits": {"pids": 0}},
    {"limits": {"pids": 1}},
    {"limits": {"disk_bytes": -1}},
    {"limits": {"unknown": 1}},
    {"limits": []},
    {"policy": {"idle_timeout": -1}},
    {"policy": {"idle_timeout": 0}},
    {"policy": {"idle_timeout": NAN}},
    {"policy": {"idle_timeout": "soon"}},
    {"policy": {"max_lifetime": 0}},
    {"policy": {"max_lifetime": 1e300}},
    {"policy": {"auto_snapshot": "sometimes"}},
    {"policy": {"on_expiry": "explode"}},
    {"policy": {"on_idle": "explode"}},
    {"policy": {"on_stop": "explode"}},
    {"policy": {"auto_memory_bytes": -1}},
    {"policy": {"retention": {"keep_last": -1}}},
    {"policy": {"retention": {"hourly": 2.5}}},
    {"policy": {"retention": {"keep_all_for": NAN}}},
    {"policy": {"retention": {"yearly": 1}}},
    {"policy": {"retention": True}},
    {"policy": {"unknown": True}},
    {"driver": "missing"},
    {"driver": "../gvisor"},
    {"cwd": "relative"},
    {"cwd": "/a\0b"},
    {"user": ""},
    {"user": "a\0b"},
    {"unknown": 1},
    {"Template": "debian"},
]


@pytest.mark.parametrize("body", CREATES, ids=lambda body: repr(body)[:60])
def test_bad_sessions_are_not_created(raw, body: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    is_error(*raw("POST", "/v1/sessions", body))


BODIES = [
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"{}{}",
    b"\xff\xfe",
    b'{"template": "debian", "template": 1}',
    b'{"a":' * 5000,
    b"[" * 100_000,
    b'{"template": NaN}',
    b'{"limits": {"cpus": NaN}}',
    b'{"limits": {"cpus": 1e999}}',
    b'{"limits": {"pids": 99999999999999999999999999}}',
    b"template=debian",
    b"\0",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body)[:40])
def test_bodies_that_are_no_json_of_the_schema(raw, session: Session, body: bytes) -> None:  # type: ignore[no-untyped-def]
    is_error(*raw("POST", "/v1/sessions", body), "invalid_request")
    for verb in ("exec", "processes", "snapshots", "fork", "rollback", "code", "suspend"):
        is_error(*raw("POST", f"/v1/sessions/{session.id}/{verb}", body), "invalid_request")
    is_error(*raw("PATCH", f"/v1/sessions/{session.id}", body), "invalid_request")


EXECS: list[dict[str, Any]] = [
    {},
    {"argv": []},
    {"argv": [""]},
    {"argv": ["a\0b"]},
    {"argv": "ls"},
    {"argv": [1]},
    {"argv": ["true"], "shell": "true"},
    {"argv": ["true"], "argv_bytes": ["dHJ1ZQ=="]},
    {"argv_bytes": ["not base64!"]},
    {"shell": "a\0b"},
    {"shell": 5},
    {"argv": ["true"], "timeout": 0},
    {"argv": ["true"], "timeout": -1},
    {"argv": ["true"], "timeout": NAN},
    {"argv": ["true"], "timeout": INFINITY},
    {"argv": ["true"], "timeout": 1e30},
    {"argv": ["true"], "timeout": "1"},
    {"argv": ["true"], "cwd": "relative"},
    {"argv": ["true"], "cwd": "/a\0b"},
    {"argv": ["true"], "cwd": ""},
    {"argv": ["true"], "cwd": "/" + "x" * 10_000},
    {"argv": ["true"], "env": {"": "x"}},
    {"argv": ["true"], "env": {"A=B": "x"}},
    {"argv": ["true"], "env": {"A": "\0"}},
    {"argv": ["true"], "env": {"A": 1}},
    {"argv": ["true"], "user": "missing-user"},
    {"argv": ["true"], "user": "a\0b"},
    {"argv": ["true"], "user": "x" * 10_000},
    {"argv": ["true"], "stdin": "not base64!"},
    {"argv": ["true"], "max_output": -1},
    {"argv": ["true"], "max_output": 2**40},
    {"argv": ["true"], "unknown": 1},
    {"argv": ["x" * 3_000_000]},
    {"argv": ["true"] * 500_000},
]


@pytest.mark.parametrize("body", EXECS, ids=lambda body: repr(body)[:60])
def test_bad_commands_are_not_started(raw, session: Session, body: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    codes = ("invalid_request", "path_invalid", "too_large", "command_not_started")
    is_error(*raw("POST", f"/v1/sessions/{session.id}/exec", body), *codes)
    is_error(*raw("POST", f"/v1/sessions/{session.id}/processes", body), *codes)
    stream = {"accept": "application/vnd.sojourn.stream"}
    status, answer = raw("POST", f"/v1/sessions/{session.id}/exec", body, headers=stream)
    if status == 200:  # the stream had begun: its last frame is the error
        [error] = FrameDecoder().feed(answer)
        assert isinstance(error, SojournError)
        assert error.code in codes
    else:
        is_error(status, answer, *codes)


@pytest.mark.parametrize(
    "body",
    [
        {"argv": ["true"], "pty": [0, 0]},
        {"argv": ["true"], "pty": [-1, 80]},
        {"argv": ["true"], "pty": [10**6, 80]},
        {"argv": ["true"], "pty": [24]},
        {"argv": ["true"], "pty": "24x80"},
        {"argv": ["true"], "keep": -1},
        {"argv": ["true"], "keep": 0},
        {"argv": ["true"], "keep": 2**50},
        {"argv": ["true"], "open_stdin": True, "stdin": "eA=="},
        {"argv": ["true"], "lossless": "yes"},
    ],
    ids=lambda body: repr(body)[:60],
)
def test_bad_processes_are_not_started(raw, session: Session, body: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    is_error(*raw("POST", f"/v1/sessions/{session.id}/processes", body), "invalid_request")


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("fork", {"n": 0}),
        ("fork", {"n": -1}),
        ("fork", {"n": 10_000}),
        ("fork", {"n": 1.5}),
        ("fork", {"n": 2**80}),
        ("fork", {"n": 2, "names": ["one"]}),
        ("fork", {"n": 2, "names": ["same", "same"]}),
        ("fork", {"n": 1, "names": ["bad/name"]}),
        ("fork", {"n": 1, "names": ["badinput"]}),
        ("fork", {"snapshot": "missing"}),
        ("fork", {"snapshot": ""}),
        ("fork", {"labels": {"": ""}}),
        ("rollback", {}),
        ("rollback", {"snapshot": "missing"}),
        ("rollback", {"snapshot": ""}),
        ("rollback", {"snapshot": None}),
        ("rollback", {"snapshot": "snp_" + "0" * 24}),
        ("rollback", {"snapshot": "../../etc/passwd"}),
        ("rollback", {"snapshot": "x\0"}),
        ("snapshots", {"label": ""}),
        ("snapshots", {"label": "x" * 10_000}),
        ("snapshots", {"label": 1}),
        ("snapshots", {"memory": "yes"}),
        ("suspend", {"memory": 1}),
        ("suspend", {"force": True}),
        ("promote", {}),
        ("code", {"code": 1}),
        ("code", {}),
        ("code", {"code": "1", "context": ""}),
        ("code", {"code": "1", "context": "x" * 1000}),
        ("code", {"code": "1", "timeout": -1}),
        ("keepalive", {"seconds": -1}),
        ("keepalive", {"seconds": 0}),
        ("keepalive", {"seconds": NAN}),
        ("keepalive", {"seconds": 1e300}),
        ("keepalive", {}),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_bad_verbs_do_nothing(raw, session: Session, verb: str, body: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    status, answer = raw("POST", f"/v1/sessions/{session.id}/{verb}", body)
    if status == 404 and answer["code"] == "not_found":
        pytest.fail(f"there is no route for {verb}")
    if status == 202 or (status == 200 and answer.get("state") == "failed"):
        # Refused by the operation itself: its error is the answer.
        status, answer = raw("GET", f"/v1/operations/{answer['id']}?wait=30")
        assert answer["state"] == "failed", answer
        assert answer["error"]["code"] in all_errors()
        return
    is_error(status, answer)


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a/b"},
        {"name": ""},
        {"labels": None},
        {"labels": {"a": 1}},
        {"limits": {"pids": -1}},
        {"limits": None},
        {"policy": {"idle_timeout": -1}},
        {"policy": None},
        {"unknown": 1},
        {"env": {"A": "B"}},
        {"state": "running"},
    ],
    ids=lambda body: repr(body)[:60],
)
def test_bad_updates_change_nothing(raw, session: Session, body: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    is_error(*raw("PATCH", f"/v1/sessions/{session.id}", body), "invalid_request")


@pytest.mark.parametrize(
    "target",
    [
        "files",
        "files?path=",
        "files?path=relative",
        "files?path=%00",
        "files?path=/a%00b",
        "files?path=%zz",
        "files?path=%2",
        "files?path=/a&path=/b",
        "files?path=/etc/passwd&unknown=1",
        "files?path=/" + "x" * 60_000,
        "files/stat?path=relative",
        "files/list?path=",
        "tree?path=relative",
        "events?after=-1",
        "events?after=x",
        "events?limit=0",
        "events?limit=99999999999",
        "processes/x",
        "processes/-1",
        "processes/999999",
        "processes/99999999999999999999999999999",
        "diff?a=missing",
        "diff?b=missing",
        "diff?limit=-1",
        "snapshots/missing",
        "nonsense",
        "%2e%2e/%2e%2e/tokens",
        "files?" + "&".join(f"q{n}=1" for n in range(2000)),
    ],
    ids=lambda target: target[:50],
)
def test_bad_queries_are_refused(raw, session: Session, target: str) -> None:  # type: ignore[no-untyped-def]
    is_error(*raw("GET", f"/v1/sessions/{session.id}/{target}"))


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/"),
        ("GET", "/v1"),
        ("GET", "/v2/sessions"),
        ("DELETE", "/v1/sessions"),
        ("PUT", "/v1/sessions"),
        ("BREW", "/v1/sessions"),
        ("GET", "/v1/sessions/%ff"),
        ("GET", "/v1/sessions/%00"),
        ("GET", "/v1/sessions/" + "x" * 5000),
        ("GET", "/v1/sessions/a%2Fb"),
        ("GET", "/v1/operations/missing"),
        ("GET", "/v1/sessions?limit=-1"),
        ("GET", "/v1/sessions?cursor=garbage"),
        ("GET", "/v1/sessions?state=nonsense"),
        ("DELETE", "/v1/sessions/missing"),
        ("POST", "/v1/sessions/missing/exec"),
        ("DELETE", "/v1/tokens/missing"),
    ],
)
def test_bad_targets_are_refused(raw, method: str, target: str) -> None:  # type: ignore[no-untyped-def]
    is_error(*raw(method, target))


def test_huge_bodies_are_refused(raw, session: Session) -> None:  # type: ignore[no-untyped-def]
    body = b'{"shell": "' + b"x" * (9 << 20) + b'"}'
    is_error(*raw("POST", f"/v1/sessions/{session.id}/exec", body), "too_large")
    is_error(*raw("POST", "/v1/sessions", b'{"name": "' + b"x" * (20 << 20)), "too_large")
    body = json.dumps({"argv": ["cat"], "stdin": "eHh4" * (1 << 19)}).encode()
    is_error(*raw("POST", f"/v1/sessions/{session.id}/exec", body), "too_large")


@pytest.mark.parametrize(
    "headers",
    [
        {"idempotency-key": ""},
        {"idempotency-key": "x" * 5000},
        {"idempotency-key": "a\tb"},
        {"content-type": "text/plain"},
        {"content-type": "\x7f"},
        {"content-length": "5"},
        {"accept": "nonsense/\x01"},
        {"x-large": "y" * 30_000},
        {"authorization": "Bearer nonsense"},
        {"range": "bytes=5-1"},
        {"host": "../../"},
        {"expect": "nonsense"},
        {"content-encoding": "gzip"},
        {"transfer-encoding": "gzip"},
        {"last-event-id": "x"},
    ],
    ids=lambda headers: repr(headers)[:50],
)
def test_garbage_in_headers_is_survived(
    shared_server: ServerProcess, session: Session, headers: dict[str, str]
) -> None:
    """Answered or refused, never a crash: the server serves on the next connection."""
    where = urlsplit(shared_server.url)
    assert where.hostname and where.port
    given = {"authorization": f"Bearer {shared_server.token}", "host": "x"} | headers
    body = b'{"n": 0}'
    given.setdefault("content-length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    with socket.create_connection((where.hostname, where.port), timeout=20) as link:
        head = f"POST /v1/sessions/{session.id}/fork HTTP/1.1\r\n{lines}\r\n".encode()
        link.sendall(head + body)
        answer = b""
        with contextlib.suppress(OSError):  # what is refused at once is closed at once
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(65536):
                answer += piece
    assert answer == b"" or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]


@pytest.mark.parametrize(
    "raw_bytes",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v1/sessions HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/sessions HTTP/1.1\r\ncontent-length: 10\r\ncontent-length: 20\r\n\r\n0123456789",
        b"x" * 200_000,
    ],
    ids=lambda value: repr(value[:30]),
)
def test_bytes_that_are_no_http_are_survived(
    shared_server: ServerProcess, client: Sojourn, raw_bytes: bytes
) -> None:
    where = urlsplit(shared_server.url)
    assert where.hostname and where.port
    with socket.create_connection((where.hostname, where.port), timeout=20) as link:
        try:
            link.sendall(raw_bytes)
            link.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := link.recv(65536):
                answer += piece
        except OSError:  # the server has left already
            answer = b""
    assert b" 200 " not in answer.split(b"\r\n", 1)[0]
    assert b" 500 " not in answer.split(b"\r\n", 1)[0]
    assert client.health().status == "ok"


def test_names_are_taken_once(client: Sojourn, session: Session) -> None:
    with pytest.raises(NameTaken):
        client.sessions.create(name="badinput")
    with pytest.raises(NameTaken):
        session.fork(1, names=["badinput"])
    other = client.sessions.create(name="badinput-2")
    try:
        with pytest.raises(NameTaken):
            other.update(name="badinput")
        assert other.refresh().name == "badinput-2"
    finally:
        other.delete()
    # A deleted session's name is free.
    again = client.sessions.create(name="badinput-2")
    again.delete()


def test_snapshots_of_others_are_not_found(client: Sojourn, session: Session) -> None:
    other = client.sessions.create()
    try:
        theirs = other.snapshot("theirs")
        for attempt in (
            lambda: session.rollback(theirs.id),
            lambda: session.fork(1, snapshot=theirs.id),
            lambda: session.diff(theirs.id, None),
            lambda: session.diff(None, theirs.id),
            lambda: session.verify(theirs.id),
            lambda: session.delete_snapshot(theirs.id),
            lambda: session.rollback("theirs"),
        ):
            with pytest.raises(SnapshotNotFound):
                attempt()
    finally:
        other.delete()


def test_the_sdk_refuses_what_makes_no_sense(client: Sojourn, session: Session) -> None:
    for attempt, kind in (
        (lambda: client.sessions.create(template="missing"), UnknownTemplate),
        (lambda: client.sessions.get("missing"), NotFound),
        (lambda: client.sessions.get(""), SojournError),
        (lambda: client.sessions.get("a/b"), SojournError),
        (lambda: client.sessions.get("../tokens"), SojournError),
        (lambda: session.exec("true", timeout=-1), InvalidRequest),
        (lambda: session.exec("true", timeout=float("nan")), InvalidRequest),
        (lambda: session.exec("true", timeout=float("inf")), InvalidRequest),
        (lambda: session.fork(0), InvalidRequest),
        (lambda: session.fork(10_000), InvalidRequest),
        (lambda: session.exec(["x" * 5_000_000]), TooLarge),
        (lambda: session.snapshot("x" * 1000), InvalidRequest),
        (lambda: session.keep_alive(-5), InvalidRequest),
        (lambda: session.keep_alive(float("nan")), InvalidRequest),
    ):
        with pytest.raises(kind) as raised:
            attempt()
        assert raised.value.code != "internal"
        assert raised.value.next_step
