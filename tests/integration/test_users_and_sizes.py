"""A session's own user, and the size no file of it grows beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import DiskQuotaExceeded, NameTaken
from support.servers import ServerProcess


def test_a_session_runs_as_its_user_in_its_home(client: Sojourn) -> None:
    session = client.sessions.create(user="agent", cwd="/home/agent")
    try:
        told = session.exec('id -un; pwd; echo "$HOME"').text.split()
        assert told == ["agent", "/home/agent", "/home/agent"]
        code = session.run_code("import os; (os.getuid(), os.getcwd(), os.environ['HOME'])")
        assert code.text == "(1000, '/home/agent', '/home/agent')"
    finally:
        session.delete()


def test_a_home_given_by_the_environment_wins(client: Sojourn) -> None:
    session = client.sessions.create(user="agent", env={"HOME": "/tmp"})
    try:
        assert session.exec('echo "$HOME"').text.strip() == "/tmp"
    finally:
        session.delete()


def test_no_file_grows_beyond_the_disk_limit(client: Sojourn) -> None:
    session = client.sessions.create(limits={"disk_bytes": 20 << 20})
    try:
        wrote = session.exec("dd if=/dev/zero of=/root/big bs=1M count=40 status=none")
        assert not wrote.ok
        assert session.files.stat("/root/big").size == 20 << 20
        session.files.remove("/root/big")
        with pytest.raises(DiskQuotaExceeded):
            session.files.write("/root/big", b"\0" * (21 << 20))
        assert not session.files.exists("/root/big")
        assert session.exec("true").ok
    finally:
        session.delete()


def test_limits_of_a_refused_update_are_taken_back(
    client: Sojourn, shared_server: ServerProcess, session: Session
) -> None:
    other = client.sessions.create(name="has-the-name")
    try:
        before = bounds(shared_server, session)
        with pytest.raises(NameTaken):
            session.update(name="has-the-name", limits={"pids": 77})
        assert bounds(shared_server, session) == before
        assert session.refresh().info.limits.pids == 512
        session.update(limits={"pids": 77})
        assert bounds(shared_server, session) != before
    finally:
        other.delete()


def bounds(server: ServerProcess, session: Session) -> set[str]:
    """What the kernel bounds the sandbox's processes to."""
    records = (server.data / "sandboxes").glob("*/record.json")
    name = next(r.parent.name for r in records if session.id in r.read_text())
    found = {file.read_text() for file in Path("/sys/fs/cgroup").glob(f"**/{name}/pids.max")}
    return found or pytest.skip("no controller of process numbers")  # type: ignore[return-value]
