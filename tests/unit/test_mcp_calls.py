"""What clients are told of the tools, what is let through, and how failures are told."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sojourn.cli.main import run
from sojourn.client import core
from sojourn.errors import (
    Forbidden,
    HostUnfit,
    InvalidRequest,
    SessionNotFound,
    SojournError,
    Unauthenticated,
    Unreachable,
    all_errors,
)
from sojourn.mcp import failures
from sojourn.mcp.http import Guard, known_names, listen
from sojourn.mcp.own_sessions import Sessions, plain_name
from sojourn.mcp.server import checked
from sojourn.mcp.tools import TOOLS

READING = {
    "exec_output",
    "process_list",
    "process_output",
    "file_read",
    "file_list",
    "history",
    "diff",
    "network_get",
    "session_list",
    "session_get",
}
DESTROYING = {
    "exec",
    "run_code",
    "process_kill",
    "file_write",
    "file_delete",
    "rollback",
    "network_set",
    "session_delete",
}


def test_annotations_say_what_each_tool_may_do() -> None:
    notes = {name: entry.tool.annotations for name, entry in TOOLS.items()}
    assert {name for name, note in notes.items() if note and note.read_only_hint} == READING
    assert {name for name, note in notes.items() if note and note.destructive_hint} == DESTROYING
    once = {name for name, note in notes.items() if note and not note.idempotent_hint}
    assert once == {"exec", "run_code", "snapshot", "rollback", "fork", "session_create"}


@pytest.mark.parametrize("name", TOOLS)
def test_schemas_are_plain(name: str) -> None:
    """One piece, every parameter described, nothing a simple client would stumble over."""
    tool = TOOLS[name].tool
    assert tool.output_schema is not None and tool.output_schema["type"] == "object"
    for schema in (tool.input_schema, tool.output_schema):
        text = json.dumps(schema)
        assert "$ref" not in text and "anyOf" not in text and "null" not in text
    assert tool.input_schema["additionalProperties"] is False
    for field, about in tool.input_schema["properties"].items():
        assert about["description"] and about["type"], field
    assert tool.description is not None and len(tool.description) < 400
    assert len(tool.input_schema["properties"]) <= 5


def test_null_is_left_out_and_nothing_unknown_passes() -> None:
    given = {"command": "x", "cwd": None, "timeout": None, "background": None}
    found = checked(TOOLS["exec"], given)
    assert (found.cwd, found.timeout, found.background) == (None, 120.0, False)
    for wrong in ({"command": "x", "cmd": 1}, {"command": "\ud800"}, {"command": None}, {}):
        with pytest.raises(InvalidRequest, match="arguments of exec") as raised:
            checked(TOOLS["exec"], wrong)
        assert "command" in raised.value.next_step


@pytest.mark.parametrize("code", all_errors())
def test_every_error_is_told_with_a_next_step(code: str) -> None:
    result = failures.failed(all_errors()[code]("because", pid=1))
    (content,) = result.content
    told = json.loads(content.text)["error"]  # type: ignore[union-attr]
    assert result.is_error and result.structured_content is None
    assert (told["code"], told["message"], told["details"]) == (code, "because", {"pid": 1})
    assert told["next_step"] and "sojourn session" not in told["next_step"]


def test_a_failure_of_our_own_tells_no_more_than_its_kind() -> None:
    error = failures.unexpected("exec", RuntimeError("the token is tok_secret"))
    told = json.dumps(failures.body(error))
    assert "RuntimeError" in told and "tok_secret" not in told
    special = SessionNotFound("gone", next_step="Ask the one who deleted it.")
    assert failures.body(special)["next_step"] == "Ask the one who deleted it."
    long = failures.body(SojournError("x" * 10**6, effects=["e" * 100] * 1000))
    assert len(json.dumps(long)) < 10_000


def guard(*names: str) -> Guard:
    async def app(*_given: Any) -> None:
        raise AssertionError("not reached")

    return Guard(app, "secret", names or ("127.0.0.1", "localhost", "::1"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "origin", "fine"),
    [
        ("127.0.0.1:1", None, True),
        ("LOCALHOST", None, True),
        ("[::1]:80", "http://[::1]:3000", True),
        ("localhost", "https://localhost", True),
        (None, None, False),
        ("", None, False),
        ("localhost.evil.example", None, False),
        ("evil.example:80", None, False),
        ("[::1", None, False),
        ("localhost@evil.example", None, False),
        ("localhost", "http://evil.example", False),
        ("localhost", "null", False),
        ("localhost", "", False),
        ("localhost", "http://localhost@evil.example", False),
        ("localhost", "file://", False),
    ],
)
def test_only_known_names_are_let_through(host: str | None, origin: str | None, fine: bool) -> None:
    headers = [(b"authorization", b"bearer secret")]
    headers += [(b"host", host.encode())] if host is not None else []
    headers += [(b"origin", origin.encode())] if origin is not None else []
    if fine:
        guard().check(headers)
        return
    with pytest.raises(Forbidden):
        guard().check(headers)


@pytest.mark.parametrize("given", [None, "", "secret", "Bearer", "Bearer x", "Basic secret"])
def test_only_the_token_is_let_through(given: str | None) -> None:
    headers = [(b"host", b"localhost")]
    headers += [(b"authorization", given.encode())] if given is not None else []
    with pytest.raises(Unauthenticated) as raised:
        guard().check(headers)
    assert "secret" not in str(raised.value)
    twice = [(b"host", b"localhost"), *[(b"authorization", b"Bearer secret")] * 2]
    with pytest.raises(InvalidRequest):
        guard().check(twice)


def test_names_of_a_listening_address() -> None:
    assert known_names("127.0.0.1", []) == {"127.0.0.1", "localhost", "::1"}
    assert known_names("192.0.2.7", ["tools.example"]) == {"192.0.2.7", "tools.example"}
    assert "::1" in known_names("[::1]", [])


def test_whose_session_a_call_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "find_server", lambda *_: core.Address("http://127.0.0.1:1", None))
    from sojourn.mcp.own_sessions import REMEMBERED, Server, Settings

    server = Server()
    found = Sessions(server, Settings())
    one = found.of_call(None, "connection-1", "Some Client! 2.0")
    assert one is found.of_call(None, "connection-1", "Some Client! 2.0")
    assert one.name.startswith("mcp-some-client-2-0-") and "connection-1" not in one.name
    assert found.of_call(None, "connection-2", "x").name != one.name
    assert found.of_call("mine", "connection-1", "x") is found.of_call("mine", None, "x")
    with pytest.raises(InvalidRequest, match="no session of its own"):
        found.of_call(None, None, "x")
    for number in range(REMEMBERED):
        found.of_call(None, f"other-{number}", "x")
    again = found.of_call(None, "connection-1", "Some Client! 2.0")
    assert again is not one and again.name == one.name  # forgotten, and found by its name
    chosen = Sessions(server, Settings("all"))
    assert chosen.of_call(None, "a", "x") is chosen.of_call(None, None, "y")
    assert plain_name("\u00e9\u00e9") == "client" and len(plain_name("x" * 99)) == 30


@pytest.mark.parametrize("more", [[], ["--http", "127.0.0.1:0"]])
def test_without_a_server_it_says_what_to_do(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("SOJOURN_URL", "SOJOURN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOJOURN_DATA", str(tmp_path))
    assert run(["mcp", *more]) == Unreachable.exit_code
    told = capsys.readouterr()
    assert told.out == "" and "sojourn up" in told.err and "Traceback" not in told.err
    monkeypatch.setenv("SOJOURN_URL", "http://127.0.0.1:1")  # named, and nobody there
    assert run(["mcp", *more]) == Unreachable.exit_code


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sojourn.mcp
    import sojourn.mcp.stdio

    for name in ("http", "stdio"):
        monkeypatch.delattr(sojourn.mcp, name)
        monkeypatch.delitem(sys.modules, f"sojourn.mcp.{name}")
    monkeypatch.setitem(sys.modules, "mcp.server.transport_security", None)
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert run(["mcp"]) == HostUnfit.exit_code
    assert "sojourn[mcp]" in capsys.readouterr().err


def test_wrong_usage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("\n")
    for wrong in (
        ["--token-file", str(tmp_path / "empty")],
        ["--http", "127.0.0.1:0", "--token-file", str(tmp_path / "empty")],
        ["--http", "127.0.0.1:0", "--token-file", str(tmp_path / "none")],
        ["--allow-host", "x"],
        ["--network", "everything"],
    ):
        assert run(["mcp", *wrong]) == InvalidRequest.exit_code, wrong
    assert capsys.readouterr().out == ""
    for address in ("127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":0", "192.0.2.1:0"):
        with pytest.raises(InvalidRequest, match="cannot listen"):
            listen(address)


def test_the_page_lists_every_tool_and_what_it_may_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| .+ \| (\w+) \|$", page, re.MULTILINE))
    assert list(told) == list(TOOLS)
    for name, may in told.items():
        note = TOOLS[name].tool.annotations
        assert note is not None
        assert note.read_only_hint == (may == "read"), name
        assert note.destructive_hint == (may == "destroy"), name
