"""Streams over a real socket: live, with signs of life, ended by a stop and by leaving."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from sojourn import Interrupted, Sojourn, Unreachable
from sojourn.wire.stream import Ended, FrameDecoder
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]

STREAM = "application/vnd.sojourn.stream"


def open_line(rig: HttpRig) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", int(rig.url.rpartition(":")[2]), timeout=20)


def begin(
    line: http.client.HTTPConnection, method: str, target: str, body: Any = None, **headers: str
) -> http.client.HTTPResponse:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    content = None if body is None else json.dumps(body).encode()
    line.request(method, target, content, given | {"authorization": "Bearer token-a"})
    return line.getresponse()


def test_a_short_command_is_answered_in_one_piece(rig: HttpRig, work: Any) -> None:
    line = open_line(rig)
    answer = begin(
        line, "POST", f"/v1/sessions/{work.id}/exec", {"argv": ["echo", "x"]}, Accept=STREAM
    )
    assert answer.status == 200 and answer.getheader("content-type") == STREAM
    raw = answer.read()
    frames = FrameDecoder().feed(raw)
    assert isinstance(frames[-1], Ended) and frames[-1].exit_code == 0
    line.close()


def test_heartbeats(rig: HttpRig, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn.server.answers.HEARTBEAT_SECONDS", 0.05)
    line = open_line(rig)
    answer = begin(
        line, "POST", f"/v1/sessions/{work.id}/exec", {"shell": "sleep 0.5"}, Accept=STREAM
    )
    assert answer.getheader("transfer-encoding") == "chunked"
    raw = answer.read()
    assert raw.count(b"\x04\0\0\0\0") >= 2
    line.close()
    line = open_line(rig)
    answer = begin(line, "GET", f"/v1/sessions/{work.id}/events", Accept="text/event-stream")
    read = b""
    while read.count(b": heartbeat") < 2:
        read += answer.read1()
    line.close()


def test_events_go_on_after_the_last_one_seen(rig: HttpRig, work: Any) -> None:
    work.pause()
    line = open_line(rig)
    answer = begin(
        line,
        "GET",
        f"/v1/sessions/{work.id}/events",
        Accept="text/event-stream",
        Last_Event_ID="1",
    )
    assert answer.getheader("content-type") == "text/event-stream"
    read = b""
    while b"\n\n" not in read:
        read += answer.read1()
    assert read.startswith(b"id: 2\nevent: event\ndata: ") and b'"pause"' in read
    line.close()
    line = open_line(rig)
    answer = begin(
        line, "GET", f"/v1/sessions/{work.id}/events", Accept="text/event-stream", Last_Event_ID="x"
    )
    assert answer.status == 400
    line.close()


def test_leaving_ends_the_work_behind_a_stream(rig: HttpRig, work: Any) -> None:
    ended = threading.Event()
    original = rig.service.follow_events

    async def follow(*given: Any, **named: Any) -> Any:
        try:
            async for event in original(*given, **named):
                yield event
        finally:
            ended.set()

    rig.service.follow_events = follow
    try:
        line = open_line(rig)
        answer = begin(line, "GET", f"/v1/sessions/{work.id}/events", Accept="text/event-stream")
        answer.read1()
        answer.close()
        line.close()
        assert ended.wait(10)
    finally:
        rig.service.follow_events = original


def test_a_failure_in_the_middle_of_a_stream_is_told(rig: HttpRig, work: Any) -> None:
    original = rig.service.output

    async def broken(*given: Any) -> Any:
        async for piece in original(*given):
            yield piece
            raise RuntimeError("secret")

    process = work.spawn("echo x; sleep 60")
    rig.service.output = broken
    try:
        line = open_line(rig)
        answer = begin(
            line, "GET", f"/v1/sessions/{work.id}/processes/{process.id}/output", Accept=STREAM
        )
        raw = answer.read()
        line.close()
    finally:
        rig.service.output = original
        process.kill()
    assert b"internal error err_" in raw and b"secret" not in raw


def test_a_stop_ends_streams_with_a_typed_error(tmp_path: Path) -> None:
    rig = HttpRig(tmp_path / "sessions")
    failed: list[BaseException] = []
    with Sojourn(rig.url, "token-a") as client:
        work = client.sessions.create()
        started = threading.Event()

        def follow() -> None:
            try:
                work.exec("echo x; sleep 60", on_stdout=lambda _data: started.set())
            except Interrupted as error:
                failed.append(error)

        rig_stopped = threading.Thread(target=follow)
        rig_stopped.start()
        assert started.wait(10)
        rig.stop()
        rig_stopped.join(10)
        assert [error.code for error in failed] == ["interrupted"]  # type: ignore[attr-defined]
        with pytest.raises(Unreachable):
            client.health()


def test_a_stop_answers_waiting_verbs(tmp_path: Path) -> None:
    rig = HttpRig(tmp_path / "sessions")
    rig.service.slow = 30.0
    line = open_line(rig)
    answers: list[int] = []

    def wait() -> None:
        answers.append(begin(line, "POST", "/v1/sessions?wait=60", {}).status)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not rig.service.calls["wait"]:
        threading.Event().wait(0.01)
    rig.stop()
    waiting.join(10)
    line.close()
    assert answers == [202]
