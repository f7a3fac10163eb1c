"""The watchdog's process beside a node that comes, hangs and goes; directories stand for groups."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import HostUnfit
from sojourn.node import watchdog
from sojourn.node.isolation.processes import alive
from sojourn.node.watchdog import Watchdog
from sojourn.wire.lease_file import now
from support.servers import eventually
from support.watchdogs import stand_in_node

SECOND = 1_000_000_000


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """What a group of the v1 freezer looks like."""
    made = tmp_path / "group"
    made.mkdir()
    (made / "freezer.state").write_text("THAWED")
    (made / "cgroup.procs").write_text("")
    return made


@pytest.fixture
def node(tmp_path: Path, group: Path) -> Iterator[Watchdog]:
    made = Watchdog(tmp_path / "lease", [group])
    yield made
    (group / "cgroup.procs").write_text("")
    made.close()
    eventually(lambda: not _watched(made.path))


def _watched(path: Path) -> bool:
    """Whether somebody holds the watchdog's lock."""
    try:
        with path.with_name("lease.watchdog").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _state(group: Path) -> str:
    return (group / "freezer.state").read_text()


def _events(path: Path) -> list[str]:
    lines = path.with_name("lease.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def test_it_freezes_at_the_deadline_and_thaws_when_it_is_renewed(
    node: Watchdog, group: Path
) -> None:
    node.start()
    eventually(lambda: _state(group) == "FROZEN")  # nothing was held yet
    node.hold(now() + SECOND // 2)
    node.thaw()
    eventually(lambda: _state(group) == "THAWED")
    eventually(lambda: _state(group) == "FROZEN")
    assert now() >= node.deadline
    node.hold(now() + 60 * SECOND)
    eventually(lambda: _state(group) == "THAWED")  # by itself
    node.expire()
    assert _state(group) == "FROZEN"
    node.thaw()  # nothing allows it
    assert _state(group) == "FROZEN"
    eventually(lambda: _events(node.path)[-2:] == ["thawed", "frozen"])


def test_what_somebody_thaws_past_the_deadline_is_frozen_again(node: Watchdog, group: Path) -> None:
    node.start()
    eventually(lambda: _state(group) == "FROZEN")
    (group / "freezer.state").write_text("THAWED")
    eventually(lambda: _state(group) == "FROZEN")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_node_that_hangs_or_dies_keeps_nothing_running(
    tmp_path: Path, group: Path, how: signal.Signals
) -> None:
    (group / "cgroup.procs").write_text("1\n")  # a sandbox is left
    path = tmp_path / "lease"
    with stand_in_node(path, [group]) as holder:
        eventually(lambda: _state(group) == "THAWED" and _watched(path))
        os.kill(holder.pid, how)
        eventually(lambda: _state(group) == "FROZEN")
        assert _watched(path)
        if how is signal.SIGSTOP:
            os.kill(holder.pid, signal.SIGCONT)
            eventually(lambda: _state(group) == "THAWED")
    eventually(lambda: _state(group) == "FROZEN")
    (group / "cgroup.procs").write_text("")
    eventually(lambda: not _watched(path))
    assert _state(group) == "THAWED"
    assert _events(path)[-1] == "ended"


def test_signals_to_its_group_do_not_end_it_and_the_next_node_takes_it_over(
    node: Watchdog, group: Path
) -> None:
    node.start()
    pid = node.pid
    assert pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert os.getpgid(pid) != os.getpgid(0)
    (group / "cgroup.procs").write_text("1\n")
    deadline = now() + 60 * SECOND
    node.hold(deadline)
    node.close()
    again = Watchdog(node.path, [group])
    again.start()
    assert again.pid == pid and alive(pid)
    assert again.deadline == deadline
    again.close()


def test_nothing_is_held_without_one(node: Watchdog, group: Path) -> None:
    node.start()
    first = node.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    eventually(lambda: node.pid is None)
    node.hold(now() + 60 * SECOND)
    assert node.pid not in (None, first)
    eventually(lambda: _state(group) == "THAWED")


def test_one_for_other_groups_is_replaced(node: Watchdog, group: Path, tmp_path: Path) -> None:
    (group / "cgroup.procs").write_text("1\n")
    node.start()
    first = node.pid
    node.close()
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "freezer.state").write_text("THAWED")
    other = Watchdog(node.path, [moved])
    other.start()
    try:
        assert other.pid not in (None, first)
        eventually(lambda: _state(moved) == "FROZEN")
    finally:
        other.close()


def test_two_nodes_do_not_hold_one_file(
    node: Watchdog, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    monkeypatch.setattr(watchdog, "_START_SECONDS", 0.05)
    with pytest.raises(HostUnfit, match="another node"):
        Watchdog(node.path, [group]).start()


def test_a_host_without_a_freezer_is_no_host_for_a_node(tmp_path: Path) -> None:
    with pytest.raises(HostUnfit, match="freezer"):
        Watchdog(tmp_path / "lease", []).start()


def test_one_that_does_not_start_is_told(
    node: Watchdog, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_MODULE", "sojourn.node.absent")
    with pytest.raises(HostUnfit, match="does not start"):
        node.start()
    assert "absent" in node.path.with_name("lease.log").read_text()


def test_its_log_is_bounded(node: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_MOST_LOG", 100)
    node.path.with_name("lease.log").write_text("x" * 101)
    node.start()
    eventually(lambda: _events(node.path))
    assert node.path.with_name("lease.log.old").read_text() == "x" * 101
