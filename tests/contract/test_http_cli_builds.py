"""Building from a Containerfile on the command line: what a failed step said, and what stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn import AsyncSojourn, Sojourn, allow
from sojourn.cli.main import run
from sojourn.client import core_builds
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


@pytest.fixture
def client(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sojourn]:
    monkeypatch.setenv("SOJOURN_URL", rig.url)
    monkeypatch.setenv("SOJOURN_TOKEN", "token-a")
    with Sojourn(rig.url, "token-a") as found:
        yield found


def containerfile(place: Path, *lines: str) -> str:
    file = place / "Containerfile"
    file.write_text("\n".join(["FROM debian", *lines, ""]))
    return str(file)


def test_a_failed_run_shows_what_it_said(
    client: Sojourn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = containerfile(tmp_path, r"RUN echo before; printf 'bad \033[2J thing\n' >&2; exit 7")
    assert run(["template", "build", "app", "--file", file]) == 101
    told = capsys.readouterr().err
    assert "before\nbad \\x1b[2J thing\n" in told
    assert "line 2: RUN ended with exit code 7 [containerfile_invalid]" in told
    assert run(["template", "build", "app", "--file", file, "--json"]) == 101
    error = json.loads(capsys.readouterr().err)
    assert error["details"]["exit_code"] == 7 and "before" in error["details"]["output"]
    assert client.sessions.list() == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_session(
    client: Sojourn, tmp_path: Path, sent: signal.Signals
) -> None:
    begun = tmp_path / "begun"
    file = containerfile(tmp_path, f"RUN touch {begun}; exec sleep 60")
    words = ["template", "build", "app", "--file", file, "--network", "allow=mirror.example.com"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sojourn.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
    )
    deadline = time.monotonic() + 30
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (session,) = client.sessions.list()
    policy = session.info.policy
    assert session.labels == {"building": "app"}
    assert session.network == allow("mirror.example.com")
    # Of a client that is killed it removes itself.
    assert (policy.on_idle, policy.idle_timeout, policy.on_expiry) == ("delete", 300, "delete")
    process.send_signal(sent)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130 and b"interrupted" in told, told
    assert client.sessions.list() == []


def test_a_cancelled_build_leaves_no_session(rig: HttpRig, client: Sojourn, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    file = containerfile(tmp_path, f"RUN touch {begun}; exec sleep 60")

    async def scenario() -> None:
        async with AsyncSojourn(rig.url, "token-a") as other:
            building = asyncio.create_task(other.templates.build_file("app", file, tmp_path))
            async with asyncio.timeout(30):
                while not begun.exists():
                    await asyncio.sleep(0.02)
            building.cancel()
            with pytest.raises(asyncio.CancelledError):
                await building

    asyncio.run(scenario())
    assert client.sessions.list() == []


def test_a_session_whose_making_was_cut_off_is_found_again(client: Sojourn, tmp_path: Path) -> None:
    file = containerfile(tmp_path, "RUN true")
    building = core_builds.Building(
        "app",
        core_builds.read(file, tmp_path, {}),
        client.templates.get("debian"),
        network=None,
        limits=None,
        cache=False,
        carry=iter,
        on_step=None,
    )
    plan = building.run(False)
    made = next(plan)
    client._transport.send(made)  # it arrived, and the answer did not
    plan.close()
    assert len(client.sessions.list()) == 1
    client._transport.run(building.end())
    assert client.sessions.list() == []
