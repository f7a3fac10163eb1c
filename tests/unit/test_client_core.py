"""The client's core as values: what is asked, how answers are read, what may be repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.client import core, core_commands, core_files, core_sessions
from sojourn.errors import (
    CaptureFailed,
    Interrupted,
    InvalidRequest,
    SessionElsewhere,
    SessionNotFound,
    SojournError,
    Unreachable,
    to_body,
)
from sojourn.wire import stream
from sojourn.wire.api import OperationInfo
from sojourn.wire.guest import Output


def drive(plan: Any, *answers: tuple[int, Any]) -> tuple[Any, list[core.Request]]:
    """Carry out a plan with prepared answers; its result and what it asked."""
    asked = [next(plan)]
    for status, value in answers:
        body = value if isinstance(value, bytes) else msgspec.json.encode(value)
        try:
            asked.append(plan.send(core.Response(status, body)))
        except StopIteration as done:
            return done.value, asked
    raise AssertionError(f"the plan asks on: {asked[-1]}")


def operation(state: str, result: Any = None, error: Any = None) -> OperationInfo:
    return OperationInfo("opn_1", "ses_1", "v", state, None, 0.0, None, result, error)


def test_a_verb_is_waited_for_and_carries_one_key() -> None:
    result, asked = drive(
        core_sessions.fork(
            "s/1", n=1, snapshot=None, names=None, labels=None, start=True, force=False, key=None
        ),
        (202, operation("pending")),
        (200, operation("running")),
        (200, operation("succeeded", [])),
    )
    assert result == ([], None)
    assert asked[0].target == "/v1/sessions/s%2F1/fork?wait=60"
    assert [one.target for one in asked[1:]] == ["/v1/operations/opn_1?wait=60"] * 2
    assert all(one.repeatable for one in asked)
    assert len(dict(asked[0].headers)[b"idempotency-key"]) == 32


def test_keys_differ() -> None:
    first, second = (
        next(core_sessions.simple_verb("s", "pause")),
        next(core_sessions.simple_verb("s", "pause")),
    )
    assert dict(first.headers)[b"idempotency-key"] != dict(second.headers)[b"idempotency-key"]


def test_a_verb_that_fails_later_raises_its_error() -> None:
    error = msgspec.to_builtins(to_body(CaptureFailed("no", path="/x")))
    with pytest.raises(CaptureFailed) as caught:
        drive(
            core_sessions.simple_verb("s", "pause"),
            (202, operation("running")),
            (200, operation("failed", error=error)),
        )
    assert caught.value.details == {"path": "/x", "operation": "opn_1"}


def test_a_delete_that_is_done_answers_nothing() -> None:
    result, asked = drive(core_sessions.delete("s"), (204, b""))
    assert result is None and asked[0].method == b"DELETE"
    assert (
        drive(
            core_sessions.delete("s"), (202, operation("running")), (200, operation("succeeded"))
        )[0]
        is None
    )


def test_errors_of_answers() -> None:
    body = to_body(SessionNotFound("gone", session="s"))
    with pytest.raises(SessionNotFound, match="gone"):
        drive(core_sessions.get_session("s"), (404, body))
    with pytest.raises(SojournError, match="no error body"):
        drive(core_sessions.get_session("s"), (502, b"<html>Bad gateway</html>"))
    with pytest.raises(SojournError, match="not understood"):
        drive(core_sessions.get_session("s"), (200, b"[]"))


def test_paths_and_values_are_quoted() -> None:
    assert core.session_path("a b/../c?") == "/v1/sessions/a%20b%2F..%2Fc%3F"
    assert core.session_path("..") == "/v1/sessions/%2E%2E"
    assert core.query_text({"a": b"/\xff +&", "b": None, "c": True, "d": [1, "x="]}) == (
        "?a=/%FF%20%2B%26&c=true&d=1&d=x%3D"
    )
    assert core.raw_path("/caf\u00e9\udcff") == b"/caf\xc3\xa9\xff"
    assert core.raw_path(Path("/x")) == b"/x"
    with pytest.raises(InvalidRequest):
        core.session_path("")


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("ls | wc", {"shell": "ls | wc"}),
        (["ls", "-l"], {"argv": ["ls", "-l"]}),
        (("ls", b"\xff"), {"argv_bytes": [b"ls", b"\xff"]}),
        (["\udcff"], {"argv_bytes": [b"\xff"]}),
        (["\u00e9"], {"argv": ["\u00e9"]}),
    ],
)
def test_commands(command: Any, fields: dict[str, Any]) -> None:
    assert core_commands.command_fields(command) == fields


@pytest.mark.parametrize("command", [b"ls", 5, None, [1]])
def test_what_is_no_command(command: Any) -> None:
    with pytest.raises(InvalidRequest):
        core_commands.command_fields(command)


def test_retries_are_only_for_what_may_be_repeated() -> None:
    read = core.Request(b"GET", "/", repeatable=True)
    command = core.Request(b"POST", "/")
    upload = core.Request(b"PUT", "/", content=iter([b"x"]), repeatable=True)
    assert core.retry_delay(read, 0, sent=True) is not None
    assert core.retry_delay(command, 0, sent=False) is not None
    assert core.retry_delay(command, 0, sent=True) is None
    assert core.retry_delay(upload, 0, sent=True) is None
    assert core.retry_delay(read, len(core.RETRY_DELAYS), sent=False) is None


def source(**given: Any) -> core_commands.FrameSource:
    return core_commands.FrameSource("s", **given)


def test_a_command_is_sent_once_and_taken_up_by_its_id() -> None:
    lost = source(body=b"{}")
    assert lost.request().method == b"POST" and not lost.request().repeatable
    assert not lost.take_up()
    lost.feed(stream.encode_started(stream.Started(7, 70)))
    lost.feed(stream.encode_output(Output(1, 0, b"abc")) + stream.encode_output(Output(2, 0, b"e")))
    assert lost.take_up()
    again = lost.request()
    assert again.target == "/v1/sessions/s/processes/7/output?stdout=3&stderr=1&follow=true"
    assert again.repeatable


def test_half_a_frame_is_dropped_when_the_stream_is_taken_up() -> None:
    lost = source(process=7)
    lost.request()
    raw = stream.encode_output(Output(1, 0, b"abc"))
    assert lost.feed(raw + raw[:9]) == [Output(1, 0, b"abc")]
    assert lost.take_up() and "stdout=3" in lost.request().target
    assert lost.feed(stream.encode_output(Output(1, 3, b"d"))) == [Output(1, 3, b"d")]


def test_taking_up_ends_when_nothing_comes() -> None:
    lost = source(process=7)
    tries = 0
    while lost.take_up():
        tries += 1
        assert tries <= core_commands.MAX_REATTACH
    assert tries == core_commands.MAX_REATTACH


def test_a_stream_follows_its_session_to_another_node() -> None:
    moved = Interrupted("it moves")
    moved.details["moved"] = True
    running = source(body=b"{}")
    running.request()
    running.feed(stream.encode_started(stream.Started(7, 70)))
    piece = stream.encode_output(Output(1, 0, b"abc"))
    assert running.feed(piece + stream.encode_error(moved)) == [Output(1, 0, b"abc")]
    assert not running.ended() and running.take_up()
    assert "/processes/7/output?stdout=3" in running.request().target
    # Any other end is told.
    with pytest.raises(Interrupted):
        running.feed(stream.encode_error(Interrupted("it was paused")))
    # One that waited for a session that left has begun nothing: it is asked again, once.
    waiting = source(body=b"{}")
    waiting.request()
    assert waiting.feed(stream.encode_error(SessionElsewhere("it is elsewhere"))) == []
    assert not waiting.ended() and waiting.take_up()
    assert waiting.request().method == b"POST"
    assert not waiting.take_up()


def test_results() -> None:
    told: list[bytes] = []
    collector = core_commands.Collector(told.append, None)
    for item in [Output(1, 0, b"a"), Output(2, 0, b"e"), Output(1, 1, b"b\xff")]:
        collector.take(item)
    collector.take(stream.Ended(3, 143, 15, False, "limit", 1.5))
    result = collector.result()
    assert (result.stdout, result.stderr, told) == (b"ab\xff", b"e", [b"a", b"b\xff"])
    assert (result.text, result.ok, result.exit_code, result.signal) == ("ab\ufffd", False, 143, 15)
    assert (result.reason, result.process, result.duration) == ("limit", 3, 1.5)
    with pytest.raises(SojournError):
        core_commands.Collector(None, None).result()


def test_events_are_taken_up_after_the_last_one() -> None:
    events = core_files.event_source("s", 0)
    event = {"seq": 4, "session": "s", "at": 0, "actor": "a", "kind": "k", "result": "ok"}
    event |= {"details": {}, "snapshot_before": None, "snapshot_after": None, "operation": None}
    raw = b": heartbeat\n\nid: 4\nevent: event\ndata: " + json.dumps(event).encode() + b"\n\n"
    found = events.feed(raw[:30]) + events.feed(raw[30:] + b"id: 5\nev")
    assert [one.seq for one in found] == [4]
    assert events.take_up() and not events.ended()
    assert dict(events.request().headers)[b"last-event-id"] == b"4"
    assert events.feed(b"event: end\ndata: {}\n\n") == [] and events.ended()
    with pytest.raises(SessionNotFound):
        body = msgspec.json.encode(to_body(SessionNotFound("gone")))
        core_files.event_source("s", 0).feed(b"event: error\ndata: " + body + b"\n\n")
    for malformed in (b"event: error\ndata: x\n\n", b"event: event\ndata: {}\n\n"):
        with pytest.raises(SojournError, match="not understood"):
            core_files.event_source("s", 0).feed(malformed)


def test_watches_are_not_taken_up_silently() -> None:
    assert not core_files.watch_source("s", "/x", recursive=False).take_up()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SOJOURN_DATA", str(tmp_path))
    yield tmp_path


def test_the_server_is_found(data: Path) -> None:
    (data / "server.json").write_text('{"url": "http://127.0.0.1:5", "pid": 1}')
    (data / "token").write_text("secret\n")
    assert core.find_server(None, None, {}) == core.Address("http://127.0.0.1:5", "secret")
    named = {"SOJOURN_URL": "http://x:1/", "SOJOURN_TOKEN": "t"}
    assert core.find_server(None, None, named) == core.Address("http://x:1", "t")
    assert core.find_server("http://y:2", None, named) == core.Address("http://y:2", "t")
    assert core.find_server(None, "mine", {}) == core.Address("http://127.0.0.1:5", "mine")
    # The local token is for the local server alone.
    assert core.find_server("http://y:2", None, {}) == core.Address("http://y:2", None)


def test_no_server(data: Path) -> None:
    with pytest.raises(Unreachable):
        core.find_server(None, None, {})
    (data / "server.json").write_text("broken")
    with pytest.raises(Unreachable):
        core.find_server(None, None, {})
