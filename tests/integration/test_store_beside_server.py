"""Keeping the object store by commands while a server sends to it and gives up history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.servers import ServerProcess, eventually

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("small_template"),
]

FEW = {"keep_all_for": 0, "keep_last": 2, "hourly": 0, "daily": 0, "explicit": False}
TURN = "head -c 3000000 /dev/urandom > /root/blob; echo {} > /root/number"


def sojourn(server: ServerProcess, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sojourn.cli.main", *words, "--store", server.store, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SOJOURN_DATA": str(server.data)},
    )


def done(command: subprocess.Popen[str]) -> Any:
    """What a command that must succeed tells."""
    out, err = command.communicate(timeout=180)
    assert command.returncode == 0, out + err
    return json.loads(out)


def test_history_that_is_given_up_leaves_a_store_that_stays_whole(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    server = ServerProcess(tmp_path / "data", store=objects.as_uri())
    session = server.start().sessions.create(name="kept", policy={"retention": FEW})
    try:
        session.snapshot("start")
        for number in range(4):
            session.rollback("start")
            session.exec(TURN.format(number))
            session.suspend(wait="durable")
        history = {one.id for one in session.history()}

        def left() -> bool:
            (tenant,) = objects.glob("ten_*")
            return {one.name for one in (tenant / "snapshots").iterdir()} == history

        eventually(left)
        found = done(sojourn(server, "store", "gc", "--grace", "0"))
        assert found["snapshots"] == len(history)
        assert found["bytes"] > 2 * 3_000_000, "what branches that were given up had written"
        assert done(sojourn(server, "store", "gc", "--dry-run"))["dead_bytes"] < 3_000_000
        assert not done(sojourn(server, "store", "check", "--read-data"))["damaged"]

        for number in range(5, 7):
            collecting = sojourn(server, "store", "gc", "--grace", "0")
            checking = sojourn(server, "store", "check")
            session.exec(TURN.format(number))
            session.suspend(wait="durable")
            done(collecting)
            assert not done(checking)["damaged"]
        assert not done(sojourn(server, "store", "check", "--read-data"))["damaged"]

        server.stop()
        server.data = tmp_path / "another"
        assert done(sojourn(server, "recover", "--data", str(server.data)))["faults"] == []
        session = server.start().sessions.get("kept")
        assert session.verify().ok
        assert session.files.read("/root/number") == b"6\n"
        assert session.info.policy.retention is not None
    finally:
        server.remove()
