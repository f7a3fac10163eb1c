"""Sandboxes of a node that lost its lease, frozen by the watchdog, with every driver."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import driver_rig
import pytest
from driver_rig import Box, Rig, driver_guest, eventually

from sojourn.node.isolation import processes
from sojourn.node.isolation.cgroups import (
    CgroupTree,
    Hierarchies,
    asked_to_freeze,
    detect,
    is_frozen,
)
from support.watchdogs import stand_in_node

__all__ = ["driver_guest"]

pytestmark = pytest.mark.privileged

STANDSTILL = 0.3


@pytest.fixture(params=["gvisor", "bubblewrap"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, driver_guest: Path) -> Iterator[Rig]:
    yield from driver_rig.rig(request.param, tmp_path, driver_guest)


def _counting(rig: Rig) -> tuple[Box, Path]:
    box = rig.started()
    box.ok("append /log")
    log = box.upper / "log"
    eventually("the log grows", lambda: log.exists() and log.stat().st_size > 20)
    return box, log


def _grows(log: Path) -> None:
    size = log.stat().st_size
    eventually("the log grows", lambda: log.stat().st_size > size)


def _stands(log: Path) -> None:
    size = log.stat().st_size
    time.sleep(STANDSTILL)
    assert log.stat().st_size == size


def _unbroken(log: Path) -> None:
    lines = log.read_text().splitlines()
    assert lines == [str(number) for number in range(len(lines))]


def test_a_stopped_node_has_its_sandboxes_frozen_and_they_go_on_when_it_does(
    rig: Rig, tmp_path: Path
) -> None:
    box, log = _counting(rig)
    paused = rig.started()
    paused.ok("append /log")
    paused_log = paused.upper / "log"
    eventually("it is there", paused_log.exists)
    paused.detach()
    rig.driver.freeze(paused.spec)
    groups = CgroupTree(rig.scope).freezers
    with stand_in_node(tmp_path / "lease", groups) as node:
        _grows(log)
        os.kill(node.pid, signal.SIGSTOP)
        eventually("all is frozen", lambda: all(map(is_frozen, groups)))
        _stands(log)
        os.kill(node.pid, signal.SIGCONT)
        _grows(log)
        assert box.ok("ping")
        # What was paused by itself stays so, and is what the driver takes it for.
        _stands(paused_log)
        assert rig.driver.status(paused.spec).frozen
        rig.driver.thaw(paused.spec)
        _grows(paused_log)
    for one in (box, paused):
        rig.driver.destroy(one.spec)
    for each in (log, paused_log):
        _unbroken(each)


def test_everything_can_be_ended_while_it_is_frozen(rig: Rig, tmp_path: Path) -> None:
    box, log = _counting(rig)
    other = rig.started()
    rig.driver.freeze(other.spec)
    tree = CgroupTree(rig.scope)
    assert tree.freeze_all(time.monotonic() + 5)
    _stands(log)
    assert tree.kill_all(time.monotonic() + 20) == []
    assert not any(map(asked_to_freeze, tree.freezers))
    _unbroken(log)
    for one in (box, other):
        assert not rig.driver.status(one.spec).alive
        rig.driver.destroy(one.spec)
        assert rig.leftovers(one) == []


def test_what_starts_in_a_frozen_tree_does_not_run(rig: Rig, tmp_path: Path) -> None:
    tree = CgroupTree(rig.scope)
    tree.prepare()
    assert tree.freeze_all(time.monotonic() + 5)
    assert tree.thaw_all(time.monotonic() + 5)
    box, log = _counting(rig)
    assert tree.freeze_all(time.monotonic() + 5)
    ran = tmp_path / "ran"
    # As the driver starts what belongs to a sandbox.
    later = processes.spawn(["touch", str(ran)], cgroups=rig.group(box).directories)
    time.sleep(STANDSTILL)
    assert not ran.exists()
    assert tree.thaw_all(time.monotonic() + 5)
    assert later.wait(timeout=20) == 0
    assert ran.exists()
    _grows(log)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_each_version_of_the_freezer_alone(version: str, tmp_path: Path) -> None:
    found = detect()
    if version == "v1":
        one = Hierarchies({n: p for n, p in found.v1.items() if n == "freezer"}, None, frozenset())
    else:
        one = Hierarchies({}, found.v2, frozenset())
    tree = CgroupTree(f"test-{os.getpid()}-{version}", one)
    if not tree.can_freeze:
        pytest.skip(f"this host has no freezer of {version}")
    tree.prepare()
    logs = [tmp_path / name for name in ("one", "two")]
    groups = [tree.group(log.name) for log in logs]
    program = "n=0; while :; do echo $n >> %s; n=$((n+1)); sleep 0.002; done"
    running = []
    try:
        for group, log in zip(groups, logs, strict=True):
            for directory in group.directories:
                directory.mkdir()
            command = ["/bin/sh", "-c", program % log]
            running.append(processes.spawn(command, cgroups=group.directories))
            eventually("it counts", log.exists)
        assert groups[1].freeze(time.monotonic() + 5)
        assert tree.freeze_all(time.monotonic() + 5)
        assert groups[0].frozen() and groups[1].frozen()
        _stands(logs[0])
        assert tree.thaw_all(time.monotonic() + 5)
        _grows(logs[0])
        _stands(logs[1])
        assert groups[1].frozen() and not groups[0].frozen()
        assert tree.freeze_all(time.monotonic() + 5)
        before = [log.read_bytes() for log in logs]
    finally:
        assert tree.kill_all(time.monotonic() + 20) == []
        for process in running:
            process.wait()
        for group in groups:
            assert group.remove(time.monotonic() + 5)
        tree.remove()
    assert [log.read_bytes() for log in logs] == before
