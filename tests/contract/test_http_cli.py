"""The command line against a real server: exit codes, exact bytes, JSON, clean-up."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from sojourn import Sojourn
from sojourn.cli.main import run
from sojourn.errors import SessionNotFound, StoreUnreachable
from sojourn.model import Retention
from sojourn.wire.api import DurabilityInfo, SnapshotInfo
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


@pytest.fixture
def client(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sojourn]:
    monkeypatch.setenv("SOJOURN_URL", rig.url)
    monkeypatch.setenv("SOJOURN_TOKEN", "token-a")
    with Sojourn(rig.url, "token-a") as found:
        yield found


@pytest.fixture
def box(client: Sojourn) -> Iterator[Any]:
    session = client.sessions.create()
    yield session
    session.delete()


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    # A run of the suite in the background has its children ignore Ctrl-C.
    plain = ["env", "--default-signal=INT", sys.executable, "-m", "sojourn.cli.main"]
    return subprocess.Popen([*plain, *arguments], **options)


def sojourn(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "sojourn.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """One command in this process: exit code, output, error output."""
    capsys.readouterr()
    code = run(arguments)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_exit_codes_are_the_commands_own(box: Any) -> None:
    done = sojourn("session", "exec", box.id, "sh", "-c", "echo out; echo err >&2; exit 42")
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n", b"err\n")
    assert sojourn("session", "exec", box.id, "--", "true").returncode == 0
    assert sojourn("session", "exec", "-c", "kill -TERM $$", box.id).returncode == 128 + 15


def test_a_missing_session_has_a_code_of_its_own(client: Sojourn) -> None:
    done = sojourn("session", "exec", "nowhere", "true")
    assert done.returncode == SessionNotFound.exit_code
    assert done.stdout == b"" and b"[session_not_found]" in done.stderr
    done = sojourn("session", "exec", "--json", "nowhere", "true")
    assert done.returncode == SessionNotFound.exit_code
    assert json.loads(done.stderr)["code"] == "session_not_found"


def test_no_server_has_a_code_of_its_own(tmp_path: Path) -> None:
    environment = os.environ | {"SOJOURN_DATA": str(tmp_path)}
    for name in ("SOJOURN_URL", "SOJOURN_TOKEN"):
        environment.pop(name, None)
    process = start("session", "ls", env=environment)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 118 and out == b"" and b"[unreachable]" in error


def test_bytes_pass_unchanged_both_ways(box: Any) -> None:
    data = bytes(range(256)) * 8192
    done = sojourn("session", "exec", "-i", box.id, "cat", stdin=data)
    assert done.returncode == 0 and done.stdout == data
    done = sojourn("session", "exec", "-i", box.id, "wc", "-c", stdin=b"")
    assert done.stdout.split() == [b"0"]
    done = sojourn("session", "exec", box.id, "cat", stdin=b"not passed on")
    assert done.stdout == b""


def test_odd_arguments_pass_unchanged(box: Any) -> None:
    process = start(
        "session",
        "exec",
        box.id,
        "printf",
        "%s|",
        "-x",
        "--json",
        b"\xff".decode("utf-8", "surrogateescape"),
    )
    out, _ = process.communicate(timeout=60)
    assert out == b"-x|--json|\xff|"


def test_exec_as_json(box: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys, "session", "exec", "--json", "-e", "A=b", box.id, "sh", "-c", "echo $A; exit 3"
    )
    found = json.loads(out)
    assert (code, found["exit_code"], found["stdout"]) == (3, 3, "Ygo=")


def test_interrupt_reaches_the_command(box: Any) -> None:
    process = start(
        "session",
        "exec",
        "-c",
        "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.02; done",
        box.id,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, b"caught\n")


def test_run_leaves_nothing(client: Sojourn) -> None:
    before = [one.id for one in client.sessions.list()]
    done = sojourn("run", "--", "sh", "-c", "echo $$; exit 9")
    assert done.returncode == 9 and done.stdout.strip().isdigit()
    done = sojourn("run", "/no/such/program")
    assert done.returncode == 107
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process = start("run", "--shell", "echo ready; sleep 60")
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (made,) = [one for one in client.sessions.list() if one.id not in before]
        assert made.info.policy.on_idle == "delete"  # of a client that is killed nobody else does
        process.send_signal(sent)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert [one.id for one in client.sessions.list()] == before


def test_run_interrupted_while_its_session_is_made(client: Sojourn, rig: HttpRig) -> None:
    before = [one.id for one in client.sessions.list()]
    rig.service.slow = 1.0
    try:
        creates = rig.service.calls["create"]
        process = start("run", "true")
        while rig.service.calls["create"] == creates:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        rig.service.slow = 0.0
    assert process.returncode == 130
    assert [one.id for one in client.sessions.list()] == before


def test_sessions(client: Sojourn, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys,
        "session",
        "create",
        "--name",
        "cli",
        "--label",
        "a=b",
        "-e",
        "X=1",
        "--cpus",
        "1",
        "--memory-mib",
        "512",
        "--idle-timeout",
        "0",
        "--max-lifetime",
        "60",
        "--on-expiry",
        "delete",
        "--no-auto-snapshot",
        "--keep",
        "last=3,daily=7",
    )
    assert code == 0
    made = client.sessions.get(out.strip())
    assert made.name == "cli" and made.labels == {"a": "b"} and made.info.env == {"X": "1"}
    assert made.info.limits.memory_bytes == 512 * 1024**2 and made.info.limits.cpus == 1
    policy = made.info.policy
    assert (policy.idle_timeout, policy.max_lifetime, policy.on_expiry) == (None, 60, "delete")
    assert policy.auto_snapshot == "off"
    assert policy.retention == Retention(
        keep_all_for=0, keep_last=3, hourly=0, daily=7, weekly=0, labelled=True, explicit=True
    )
    assert "cli" in said(capsys, "session", "ls", "--label", "a=b")[1]
    assert json.loads(said(capsys, "session", "ls", "--json", "--label", "a=c")[1]) == []
    assert made.id in said(capsys, "session", "info", "cli")[1]
    assert json.loads(said(capsys, "session", "get", "cli", "--json")[1])["id"] == made.id
    for verb, state in (("pause", "paused"), ("resume", "running"), ("suspend", "suspended")):
        code, out, _ = said(capsys, "session", verb, "cli")
        assert (code, out) == (0, f"{made.id} {state}\n")
    assert said(capsys, "session", "keepalive", "cli", "60")[0] == 0
    assert said(capsys, "session", "update", "cli", "--name", "other")[0] == 0
    code, out, _ = said(capsys, "session", "rm", "other", "--json")
    assert (code, json.loads(out)) == (0, [made.id])
    assert said(capsys, "session", "get", "other")[0] == 103
    # One that is not there keeps none of the others.
    again = said(capsys, "session", "create", "--name", "again")[1].split()[0]
    code, out, err = said(capsys, "session", "rm", "nosuch", again)
    assert (code, out) == (103, f"{again}\n") and "nosuch" in err


def test_history(box: Any, client: Sojourn, capsys: pytest.CaptureFixture[str]) -> None:
    first = said(capsys, "session", "snapshot", box.id, "--label", "one")[1].strip()
    second = json.loads(said(capsys, "session", "snapshot", box.id, "--files-only", "--json")[1])
    assert not second["memory"]
    listed = said(capsys, "session", "history", box.id)[1]
    assert first in listed and "one" in listed
    assert said(capsys, "session", "diff", box.id, "one", "--text")[0] == 0
    assert first in said(capsys, "session", "rollback", box.id, "one")[1]
    forks = said(capsys, "session", "fork", box.id, "-n", "2", "--snapshot", "one")[1].split()
    assert len(forks) == 2
    assert box.id in said(capsys, "session", "promote", forks[0])[1]
    assert said(capsys, "session", "rm", *forks)[0] == 0
    assert said(capsys, "verify", box.id)[0] == 0
    assert json.loads(said(capsys, "session", "verify", box.id, "--json")[1])["ok"]
    assert "create" in said(capsys, "session", "events", box.id)[1]


def test_durable_waits_for_the_object_store(
    box: Any, rig: HttpRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    original = rig.service.durable

    async def noted(who: Any, ref: str, snapshot: str | None, timeout: float) -> DurabilityInfo:
        waits.append(timeout)
        return await original(who, ref, snapshot, timeout)

    monkeypatch.setattr(rig.service, "durable", noted)
    for verb in ("snapshot", "pause", "suspend"):
        assert said(capsys, "session", verb, box.id)[0] == 0
        assert waits == []
        assert said(capsys, "session", verb, "--durable", box.id)[0] == 0
        assert len(waits) == 1 and waits.pop() > 60

    async def away(*_given: Any) -> DurabilityInfo:
        raise StoreUnreachable("not in the object store after 600 s")

    monkeypatch.setattr(rig.service, "durable", away)
    code, out, told = said(capsys, "session", "snapshot", "--durable", box.id)
    assert (code, out) == (StoreUnreachable.exit_code, "") and "[store_unreachable]" in told


def test_history_tells_what_is_durable(
    box: Any, rig: HttpRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = box.snapshot("sent").id, box.snapshot("unsent").id
    original = rig.service.history

    async def marked(*given: Any) -> list[SnapshotInfo]:
        return [
            msgspec.structs.replace(one, durable_at=1.0 if one.label == "sent" else None)
            for one in await original(*given)
        ]

    monkeypatch.setattr(rig.service, "history", marked)
    heading, *rows = said(capsys, "session", "history", box.id)[1].splitlines()
    at = heading.index("DURABLE")
    told = (
        {row[at:].split()[0] for row in rows if first in row},
        {row[at:].split()[0] for row in rows if second in row},
    )
    assert told == ({"yes"}, {"no"})


def test_info_tells_policy_and_durability(
    box: Any, rig: HttpRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    box.snapshot()
    shown = said(capsys, "session", "info", box.id)[1]
    policy = r"^policy +snapshots turn, suspend after 900 idle s, adopt on stop"
    assert re.search(policy, shown, re.M)
    assert re.search(r"^keeps +for=3600,last=10,hourly=24,daily=30$", shown, re.M)
    assert re.search(r"^durable +yes, up to its head$", shown, re.M)

    async def behind(*_given: Any) -> DurabilityInfo:
        return DurabilityInfo(box.id, "snp_1", False, 1, 7.0, None)

    monkeypatch.setattr(rig.service, "durable", behind)
    shown = said(capsys, "session", "info", box.id)[1]
    assert re.search(r"^durable +no; 1 snapshot waits, for up to 7 s$", shown, re.M)


def test_verify_fails_with_the_code_of_damage(
    box: Any, rig: HttpRig, capsys: pytest.CaptureFixture[str]
) -> None:
    from sojourn.wire.api import FaultInfo, VerifyReport

    original = rig.service.verify

    async def bad(*_given: Any) -> VerifyReport:
        fault = FaultInfo("layer x", "/f\x1b[2J", "differs", "snp_1")
        return VerifyReport(box.id, False, 1, 1, 1, [fault])

    rig.service.verify = bad
    try:
        code, out, _ = said(capsys, "verify", box.id)
    finally:
        rig.service.verify = original
    assert code == 112 and "/f\\x1b[2J" in out and "\x1b" not in out


def test_processes(box: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    process = box.spawn("echo out; echo err >&2; exit 6")
    process.wait()
    capfdbinary.readouterr()
    assert run(["session", "attach", box.id, str(process.id)]) == 6
    assert capfdbinary.readouterr() == (b"out\n", b"err\n")
    assert run(["session", "logs", box.id, str(process.id)]) == 0
    assert capfdbinary.readouterr() == (b"out\n", b"err\n")
    sleeper = box.spawn(["sleep", "60"])
    assert run(["session", "kill", "-s", "TERM", box.id, str(sleeper.id)]) == 0
    assert sleeper.wait().signal == 15
    assert run(["session", "ps", box.id]) == 0
    assert b"ended 143" in capfdbinary.readouterr().out
    assert run(["session", "code", box.id, "1+1"]) == 0
    assert capfdbinary.readouterr().out == b"'1+1'\n"


def test_copying(box: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_bytes(b"x")
    (tree / "link").symlink_to("sub/file")
    assert said(capsys, "session", "cp", str(tree), f"{box.id}:/up")[0] == 0
    assert box.files.read("/up/sub/file") == b"x"
    assert box.files.stat("/up/link", follow=False).target == "sub/file"
    assert said(capsys, "session", "cp", str(tree), f"{box.id}:/up")[0] == 0
    assert box.files.exists("/up/tree/sub/file")
    assert said(capsys, "session", "cp", f"{tree}/.", f"{box.id}:/flat")[0] == 0
    assert box.files.exists("/flat/sub/file")
    assert said(capsys, "session", "cp", str(tree / "sub" / "file"), f"{box.id}:/up/")[0] == 0
    assert box.files.read("/up/file") == b"x"
    down = tmp_path / "down"
    code, out, _ = said(capsys, "session", "cp", "--json", f"{box.id}:/up/tree", str(down))
    assert code == 0 and json.loads(out)["bytes"] == 1
    assert os.readlink(down / "link") == "sub/file"  # noqa: PTH115 - the text itself
    assert said(capsys, "session", "cp", f"{box.id}:/up/sub/file", str(down))[0] == 0
    assert (down / "file").read_bytes() == b"x"
    assert said(capsys, "session", "cp", "a", "b")[0] == 101
    assert said(capsys, "session", "cp", str(tmp_path / "none"), f"{box.id}:/x")[0] == 101
    assert said(capsys, "session", "cp", f"{box.id}:/none", str(down))[0] == 103
    for arguments in (("x" * 300, f"{box.id}:/x"), (f"{box.id}:/up", str(down / "file"))):
        code, _, told = said(capsys, "session", "cp", *arguments)
        assert code == 101 and told.startswith("Error: ") and "Traceback" not in told


def test_service(client: Sojourn, capsys: pytest.CaptureFixture[str]) -> None:
    assert "debian" in said(capsys, "template", "ls")[1]
    shown = said(capsys, "status")[1]
    assert "fake" in shown and re.search(r"^database +/fake/sojourn.db$", shown, re.M)
    made = json.loads(said(capsys, "token", "create", "someone", "--json")[1])
    assert made["token"] and made["id"] in said(capsys, "token", "ls")[1]
    assert said(capsys, "token", "revoke", made["id"])[0] == 0
    assert said(capsys, "token", "revoke", made["id"])[0] == 103


def test_wrong_usage_has_a_code_of_its_own(
    client: Sojourn, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["session", "exec"],
        ["session", "none"],
        ["session", "create", "--env", "x"],
        ["run"],
    ):
        assert said(capsys, *arguments)[0] == 101, arguments


def test_every_command_has_help() -> None:
    from sojourn.cli.session import command

    for name, sub in command.commands.items():
        shown = CliRunner().invoke(sub, ["--help"])
        assert shown.exit_code == 0 and sub.help, name


def test_a_terminal(box: Any) -> None:
    """Keys go in, output comes out, and the local terminal is given back as it was."""
    import termios

    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    process = start(
        "session",
        "sh",
        box.id,
        "sh",
        "-c",
        "echo ready; read -r line; echo got $line; exit 4",
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    read = b""
    sent = False
    while b"got word" not in read:
        read += os.read(leader, 4096)
        if b"ready" in read and not sent:
            os.write(leader, b"word\n")
            sent = True
    assert process.wait(timeout=60) == 4
    assert termios.tcgetattr(follower) == before
    os.close(leader)
    os.close(follower)


def test_leaving_a_terminal_keeps_it_running(box: Any) -> None:
    leader, follower = pty.openpty()
    process = start(
        "session",
        "sh",
        box.id,
        "sh",
        "-c",
        "echo ready; sleep 60",
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    read = b""
    while b"ready" not in read:
        read += os.read(leader, 4096)
    os.write(leader, b"\x1d")
    while b"left running" not in read:
        read += os.read(leader, 4096)
    assert process.wait(timeout=60) == 0
    (running,) = [one for one in box.processes() if one.running]
    assert f"--process {running.id}".encode() in read
    running.kill()
    os.close(leader)
    os.close(follower)
