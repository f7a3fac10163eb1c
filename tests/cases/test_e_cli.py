"""C56, C57: the command line ends as the command did, and its own failures are told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sojourn.client import Session
from sojourn.errors import all_errors
from support.servers import ServerProcess


@pytest.fixture(scope="module")
def session(shared_server):  # type: ignore[no-untyped-def]
    """One session for the module."""
    with shared_server.client() as client:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        yield session
        session.delete()


class Cli:
    """Runs `sojourn` as a user would."""

    def __init__(self, server: ServerProcess) -> None:
        self.environment = os.environ | {"SOJOURN_URL": server.url, "SOJOURN_TOKEN": server.token}

    def __call__(
        self, *words: str, stdin: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "sojourn.cli.main", *words],
            input=stdin,
            capture_output=True,
            timeout=100,
            env=self.environment | environment,
        )


@pytest.fixture(scope="module")
def cli(shared_server: ServerProcess) -> Cli:
    return Cli(shared_server)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["sh", "-c", "exit 42"], 42),
        (["true"], 0),
        (["false"], 1),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
    ],
)
def test_c56_the_exit_code_is_the_commands(
    cli: Cli, session: Session, words: list[str], code: int
) -> None:
    done = cli("session", "exec", session.id, "--", *words)
    assert (done.returncode, done.stdout) == (code, b"")


def test_c56_streams_are_passed_on_byte_for_byte(cli: Cli, session: Session) -> None:
    script = "cat; printf '\\377\\000err' >&2; exit 3"
    data = bytes(range(256)) * 64
    done = cli("session", "exec", "-i", session.id, "--", "sh", "-c", script, stdin=data)
    assert (done.returncode, done.stdout, done.stderr) == (3, data, b"\xff\0err")


def test_c57_failures_of_the_tool_have_codes_of_their_own(cli: Cli, session: Session) -> None:
    kinds = all_errors()
    for words, code in (
        (["session", "exec", "missing", "--", "true"], "session_not_found"),
        (["session", "exec", session.id, "--", "/no/such"], "command_not_started"),
        (["session", "rollback", session.id, "missing"], "snapshot_not_found"),
        (["session", "create", "--template", "missing"], "unknown_template"),
    ):
        done = cli(*words)
        assert done.returncode == kinds[code].exit_code, (words, done)
        assert done.returncode not in (0, 1, 2)
        assert done.stdout == b""
        assert code.encode() in done.stderr
        told = cli(*words[:2], "--json", *words[2:]) if words[1] != "exec" else None
        if told is not None:
            assert json.loads(told.stderr)["code"] == code
            assert told.returncode == done.returncode


def test_c57_no_server_and_a_wrong_token(cli: Cli, session: Session, tmp_path: Path) -> None:
    done = cli("session", "ls", SOJOURN_URL="http://127.0.0.1:9")
    assert done.returncode == all_errors()["unreachable"].exit_code
    done = cli("session", "ls", SOJOURN_TOKEN="wrong")
    assert done.returncode == all_errors()["unauthenticated"].exit_code
    done = cli(
        "session", "ls", SOJOURN_URL="", SOJOURN_TOKEN="", SOJOURN_DATA=str(tmp_path / "none")
    )
    assert done.returncode >= 100
    assert b"Traceback" not in done.stderr


def test_c57_wrong_usage_is_told_apart_from_a_command(cli: Cli) -> None:
    for words in (
        ["session", "exec"],
        ["nonsense"],
        ["session", "create", "--label", "noequals"],
        ["session", "ls", "--no-such-option"],
    ):
        done = cli(*words)
        assert done.returncode == all_errors()["invalid_request"].exit_code, (words, done)
        assert b"Traceback" not in done.stderr


def test_c57_every_error_has_its_own_reserved_exit_code() -> None:
    for code, kind in all_errors().items():
        assert kind.exit_code >= 100 or code == "internal", code
        assert kind.exit_code < 126, code
    for code, kind in all_errors().items():
        assert kind.exit_code not in (0, 2), code
