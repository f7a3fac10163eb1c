"""Failures over HTTP: every error class round-trips, nothing ever answers without an error body."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from sojourn.client import core
from sojourn.errors import SojournError, all_errors
from sojourn.server.app import all_endpoints
from sojourn.server.endpoints import Endpoint
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


ENDPOINTS = all_endpoints()
PRIVATE = [one for one in ENDPOINTS if not one.public]
NAMES = [f"{one.method} {one.path}" for one in PRIVATE]


def body_of(raw: bytes) -> dict[str, Any]:
    """An error body, checked to be one."""
    body = json.loads(raw)
    assert set(body) == {"code", "message", "next_step", "details"}
    assert body["code"] in all_errors() and body["message"]
    return dict(body)


@pytest.mark.parametrize("code", sorted(all_errors()))
def test_every_error_round_trips(
    api: Any, rig: HttpRig, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "MOVED_DELAYS", ())  # what passes is told, too
    kind = all_errors()[code]
    given = kind("what happened", next_step="what to do", path="/x", count=3, deep={"a": [1]})
    rig.service.fail_next("status", given)
    with pytest.raises(SojournError) as caught:
        api.status()
    assert type(caught.value) is kind
    assert caught.value.message == "what happened" and caught.value.next_step == "what to do"
    assert caught.value.details == {"path": "/x", "count": 3, "deep": {"a": [1]}}
    rig.service.fail_next("status", given)
    status, _, raw = rig.raw("GET", "/v1/status")
    assert status == kind.status and body_of(raw)["code"] == code


@pytest.mark.parametrize("code", sorted(all_errors()))
def test_every_error_round_trips_through_a_stream(work: Any, rig: HttpRig, code: str) -> None:
    kind = all_errors()[code]
    rig.service.fail_next("exec", kind("what happened", path="/x"))
    with pytest.raises(SojournError) as caught:
        work.exec(["true"])
    assert type(caught.value) is kind and caught.value.details["path"] == "/x"


def test_what_fails_inside_stays_in_the_log(rig: HttpRig, caplog: pytest.LogCaptureFixture) -> None:
    rig.service.fail_next("status", RuntimeError("secret thing"))
    status, _, raw = rig.raw("GET", "/v1/status")
    body = body_of(raw)
    assert status == 500 and body["code"] == "internal"
    assert b"secret" not in raw and b"Traceback" not in raw
    assert body["details"]["id"] in caplog.text and "secret thing" in caplog.text


def test_details_that_are_no_json_do_not_hide_the_error(rig: HttpRig) -> None:
    rig.service.fail_next("status", SojournError("odd", path=object()))
    status, _, raw = rig.raw("GET", "/v1/status")
    assert status == 500 and body_of(raw)["message"] == "odd"


def target_of(one: Endpoint, session: str, other: str = "x") -> str:
    path = one.path.replace("{ref}", session).replace("{process}", "1").replace("{port}", "1")
    for name in ("operation", "snapshot", "turn", "token", "secret", "template"):
        path = path.replace(f"{{{name}}}", other)
    values = [f"{name}=/x" for name, query in one.query.items() if query.required]
    if "mode" in one.query and one.query["mode"].required:
        values = ["path=/x", "mode=644"]
    return path + ("?" + "&".join(values) if values else "")


def body_for(one: Endpoint) -> bytes | None:
    if one.body is None:
        return None
    if isinstance(one.body, str):
        return b""
    return json.dumps(one.example or {}).encode()


@pytest.mark.parametrize("one", PRIVATE, ids=NAMES)
def test_a_wrong_token_is_refused_first(rig: HttpRig, one: Endpoint) -> None:
    target = target_of(one, "x").partition("?")[0]
    for token in (None, "wrong", "token-a ", "token-\u00ff"):
        status, _, raw = rig.raw(one.method, target + "?bad=1", b"not json", token=token)
        if token == "token-a ":
            assert status != 401  # outer blanks are no part of a header's value
            continue
        assert status == 401 and body_of(raw)["code"] == "unauthenticated", token
    for header in ("Basic dG9rZW4tYQ==", "token-a", "Bearer", ""):
        status, _, raw = rig.raw(one.method, target, b"", token=None, authorization=header)
        assert status == 401 and body_of(raw)["code"] == "unauthenticated", header


@pytest.mark.parametrize(
    "one",
    [one for one in PRIVATE if "{ref}" in one.path],
    ids=[name for name in NAMES if "{ref}" in name],
)
def test_another_tenant_sees_nothing(rig: HttpRig, work: Any, one: Endpoint) -> None:
    work.update(name="mine")
    for ref in (work.id, "mine"):
        target = target_of(one, ref)
        status, _, raw = rig.raw(one.method, target, body_for(one), token="token-b")
        assert status == 404 and body_of(raw)["code"] == "session_not_found", target
    work.update(name=None)


def test_another_tenant_sees_no_template(rig: HttpRig, work: Any) -> None:
    work.to_template("theirs")
    for method in ("GET", "DELETE"):
        for ref in ("theirs", "theirs@1"):
            status, _, raw = rig.raw(method, f"/v1/templates/{ref}", token="token-b")
            assert status == 404 and body_of(raw)["code"] == "template_not_found"
    status, _, raw = rig.raw("GET", "/v1/templates", token="token-b")
    assert status == 200 and b"theirs" not in raw


def test_another_tenant_sees_no_operation(rig: HttpRig, work: Any) -> None:
    operation = json.loads(rig.raw("POST", f"/v1/sessions/{work.id}/pause")[2])["id"]
    assert rig.raw("GET", f"/v1/operations/{operation}")[0] == 200
    status, _, raw = rig.raw("GET", f"/v1/operations/{operation}", token="token-b")
    assert status == 404 and body_of(raw)["code"] == "operation_not_found"
    for method, target, body in [
        ("GET", "/v1/tokens", None),
        ("POST", "/v1/tokens", b'{"tenant": "x"}'),
        ("DELETE", "/v1/tokens/x", None),
    ]:
        status, _, raw = rig.raw(method, target, body, token="token-b")
        assert status == 403 and body_of(raw)["code"] == "forbidden"
    assert json.loads(rig.raw("GET", "/v1/sessions", token="token-b")[2])["items"] == []


def test_the_openapi_document_is_served_to_anyone(rig: HttpRig) -> None:
    status, headers, raw = rig.raw("GET", "/v1/openapi.json", token=None)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(raw)["openapi"] == "3.1.0"


def test_addresses_and_methods_that_are_not_there(rig: HttpRig) -> None:
    for method, target, wanted in [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/none", 404),
        ("GET", "/v1/sessions/x/processes/abc", 404),
        ("GET", "/v1/sessions//exec", 404),
        ("PUT", "/v1/health", 405),
        ("DELETE", "/v1/sessions", 405),
        ("HEAD", "/v1/status", 405),
        ("PATCH", "/v1/openapi.json", 405),
    ]:
        status, headers, raw = rig.raw(method, target)
        assert status == wanted, target
        if method != "HEAD":
            body_of(raw)
        if wanted == 405:
            assert "GET" in headers["allow"] or "POST" in headers["allow"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"unknown": 1}', "unknown"),
        (b'{"limits": {"cpu": 1}}', "limits.cpu"),
        (b'{"limits": {"cpus": "2"}}', "limits.cpus"),
        (b'{"labels": {"a": 1}}', "labels[...]"),
        (b'{"name": 5}', "name"),
        (b'{"policy": {"auto_snapshot": "never"}}', "policy.auto_snapshot"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"{", "body"),
        (b'{"name": "\xff"}', "body"),
        (b"{}{}", "body"),
        (b"[" * 100_000, "body"),
    ],
)
def test_a_bad_body_names_its_field(rig: HttpRig, body: bytes, field: str) -> None:
    status, _, raw = rig.raw("POST", "/v1/sessions", body)
    found = body_of(raw)
    assert (status, found["code"], found["details"]["field"]) == (400, "invalid_request", field)


@pytest.mark.parametrize(
    "query",
    ["wait=x", "wait=-1", "wait=601", "wait=nan", "wait=inf", "wait=1&wait=2", "other=1", "wait="],
)
def test_a_bad_query_names_its_parameter(rig: HttpRig, query: str) -> None:
    status, _, raw = rig.raw("POST", f"/v1/sessions?{query}", b"{}")
    found = body_of(raw)
    assert (status, found["code"]) == (400, "invalid_request")
    assert found["details"]["field"] == query.partition("=")[0]


@pytest.mark.parametrize("value", ["x", "durably", "601"])
def test_a_bad_wait_is_told_both_forms(rig: HttpRig, value: str) -> None:
    _, _, raw = rig.raw("POST", f"/v1/sessions?wait={value}", b"{}")
    message = body_of(raw)["message"]
    assert "`durable`" in message and ("number" in message or "0 to 600" in message)


def test_bodies_are_bounded(rig: HttpRig, work: Any) -> None:
    for headers in ({}, {"transfer_encoding": "chunked"}):
        body = b'{"name": "' + b"x" * (9 * 1024 * 1024) + b'"}'
        if headers:
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        status, _, raw = rig.raw("POST", "/v1/sessions", body, **headers)
        assert status == 413 and body_of(raw)["code"] == "too_large"
    stdin = json.dumps({"argv": ["cat"], "stdin": "A" * 1_500_000}).encode()
    status, _, raw = rig.raw("POST", f"/v1/sessions/{work.id}/exec", stdin)
    assert status == 413 and body_of(raw)["details"]["field"] == "stdin"


def test_output_as_json_is_bounded_and_says_so(rig: HttpRig, work: Any) -> None:
    request = {"shell": "head -c 1000 /dev/zero; echo err >&2", "max_output": 100}
    status, _, raw = rig.raw("POST", f"/v1/sessions/{work.id}/exec", json.dumps(request).encode())
    found = json.loads(raw)
    assert (status, found["truncated"], found["exit_code"]) == (200, True, 0)
    assert len(found["stdout"]) == 136 and found["stderr"] == "ZXJyCg=="  # base64


def test_verbs_over_plain_http(rig: HttpRig) -> None:
    status, _, raw = rig.raw("POST", "/v1/sessions", b'{"name": "plain"}')
    made = json.loads(raw)
    assert status == 201 and made["state"] == "succeeded"
    rig.service.slow = 0.2
    try:
        status, _, raw = rig.raw("POST", "/v1/sessions/plain/pause?wait=0")
        pending = json.loads(raw)
        assert (status, pending["state"]) == (202, "running")
        status, _, raw = rig.raw("GET", f"/v1/operations/{pending['id']}?wait=10")
        assert json.loads(raw)["state"] == "succeeded"
        status, _, raw = rig.raw("DELETE", "/v1/sessions/plain?wait=0")
        assert status == 202
        status, _, raw = rig.raw("GET", f"/v1/operations/{json.loads(raw)['id']}?wait=10")
        assert json.loads(raw)["result"] is None
    finally:
        rig.service.slow = 0.0
    assert rig.raw("GET", "/v1/sessions/plain")[0] == 404
    rig.raw("POST", "/v1/sessions", b'{"name": "plain"}')
    status, _, raw = rig.raw("DELETE", "/v1/sessions/plain")
    assert (status, raw) == (204, b"")
    for key in ("", "x" * 256, "tab\there"):
        status, _, raw = rig.raw("POST", "/v1/sessions", b"{}", Idempotency_Key=key)
        assert status == 400 and body_of(raw)["details"]["field"] == "Idempotency-Key"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v1/health HTTP/9.9\r\n\r\n",
        b"BREW /v1/health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nhost: \xff\xfe bad host\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xff\r\n\r\n",
        b"GET /v1/%ff%00 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer token-a\r\n\r\n",
        b"GET /v1/sessions/%zz HTTP/1.1\r\nhost: x\r\nauthorization: Bearer token-a\r\n\r\n",
        b"GET /v1/sessions?limit=%zz HTTP/1.1\r\nhost: x\r\nauthorization: Bearer token-a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://[bad/ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET * HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"TRACE /v1/status HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer token-a\r\n"
        b"content-type: text/xml\r\ncontent-length: 4\r\n\r\n<a/>",
        b"GET /v1/status HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
)
def test_odd_requests_are_refused_with_an_error_body(rig: HttpRig, request_bytes: bytes) -> None:
    port = int(rig.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(request_bytes)
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := raw.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 4"), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"content-length: 0" not in head:
        body_of(body)
    assert rig.raw("GET", "/v1/health")[0] == 200
