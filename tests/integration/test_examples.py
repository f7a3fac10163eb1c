"""The examples run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import ServerProcess

pytestmark = pytest.mark.privileged
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("examples") / "data")
    server.start()
    yield server
    with server.client() as client:
        assert not list(client.sessions.list())  # each deletes what it made
    server.remove()


def run(name: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=os.environ | {"SOJOURN_STORE": "none"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_parallel_attempts(own: ServerProcess) -> None:
    told = run("parallel_attempts.py", SOJOURN_URL=own.url, SOJOURN_TOKEN=own.token)
    assert "recursive: passed\nwrong: failed\nloop: passed\nbest: loop\n" in told
    assert told.endswith("in the session: 1 loop\n")


def test_rollouts(own: ServerProcess) -> None:
    told = run("rollouts.py", SOJOURN_URL=own.url, SOJOURN_TOKEN=own.token)
    assert told.count("generation") == 2
    place, steps, reward = eval(told.split("kept: ")[1])
    assert (steps, reward) == (10, -abs(50 - place))  # the second began where the first ended


def test_a_research_agent_outlives_its_server() -> None:
    told = run("research_agent.py")
    assert "widest gap is 34" in told
    assert told.count("\n- ") + told.startswith("- ") == 3
    assert "['collect', 'measure', 'cut off', 'conclude']" in told


def test_every_example_is_run() -> None:
    names = {one.name for one in EXAMPLES.glob("*.py")}
    assert names == {"parallel_attempts.py", "research_agent.py", "rollouts.py"}
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in names)
