"""Control groups on every layout of hierarchies, by directories that stand for them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from sojourn.errors import HostUnfit, QuotaExceeded
from sojourn.node.isolation import cgroups
from sojourn.node.isolation.cgroups import CgroupTree, GroupLimits, Hierarchies

LIMITS = GroupLimits(cpus=1.5, memory_bytes=1000, pids=7, whole=True)
V2_FILES = (
    "cpu.max",
    "memory.max",
    "memory.swap.max",
    "memory.oom.group",
    "memory.events",
    "pids.max",
    "pids.events",
    "cgroup.procs",
    "cgroup.freeze",
    "cgroup.events",
    "cgroup.kill",
    "cgroup.subtree_control",
    "cgroup.controllers",
)


def _fill(directory: Path, names: tuple[str, ...] = V2_FILES) -> None:
    """What the kernel would put into a new group."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch()


@pytest.fixture
def unified(tmp_path: Path) -> Hierarchies:
    for level in ("", "sojourn-t", "sojourn-t/sbx_1"):
        _fill(tmp_path / level)
    return Hierarchies({}, tmp_path, frozenset({"cpu", "memory", "pids", "io"}))


class TestDetection:
    def test_unified(self, tmp_path: Path) -> None:
        top = tmp_path / "cgroup"
        _fill(top)
        (top / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        table = tmp_path / "mountinfo"
        table.write_text(f"30 23 0:26 / {top} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
        found = cgroups.detect(table)
        assert found.v1 == {} and found.v2 == top
        assert CgroupTree("t", found).hard_limits
        assert CgroupTree("t", found).can_freeze

    def test_separate_and_joint_controllers(self, tmp_path: Path) -> None:
        table = tmp_path / "mountinfo"
        table.write_text(
            "31 30 0:27 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "32 30 0:28 / /c/memory rw - cgroup cgroup rw,memory\n"
            "33 30 0:29 / /c/systemd rw - cgroup cgroup rw,name=systemd\n"
        )
        found = cgroups.detect(table)
        assert found.v1 == {"cpu": Path("/c/cpu,cpuacct"), "memory": Path("/c/memory")}
        tree = CgroupTree("t", found)
        assert not tree.hard_limits  # no pids controller
        assert not tree.can_freeze

    def test_both_versions_together(self, tmp_path: Path) -> None:
        top = tmp_path / "unified"
        _fill(top)
        table = tmp_path / "mountinfo"
        table.write_text(
            f"30 23 0:26 / {top} rw - cgroup2 cgroup2 rw\n"
            "31 30 0:27 / /c/cpu rw - cgroup cgroup rw,cpu\n"
            "32 30 0:28 / /c/memory rw - cgroup cgroup rw,memory\n"
            "33 30 0:29 / /c/pids rw - cgroup cgroup rw,pids\n"
        )
        tree = CgroupTree("t", cgroups.detect(table))
        assert tree.hard_limits and tree.can_freeze
        assert top / "sojourn-t" / "sbx_1" in tree.group("sbx_1").directories

    def test_nothing_mounted(self, tmp_path: Path) -> None:
        table = tmp_path / "mountinfo"
        table.write_text("37 35 0:5 / /proc rw - proc proc rw\n")
        tree = CgroupTree("t", cgroups.detect(table))
        assert not tree.hard_limits and not tree.can_freeze
        group = tree.group("sbx_1")
        tree.prepare()
        group.create(LIMITS)
        assert group.directories == [] and group.pids() == set()
        assert group.kill(time.monotonic() + 1) == []
        assert group.remove(time.monotonic() + 1)


class TestUnified:
    def test_controllers_are_handed_down(self, unified: Hierarchies) -> None:
        CgroupTree("t", unified).prepare()
        assert unified.v2 is not None
        # Each word replaces the one before in a plain file; the last one shows all were tried.
        for level in ("", "sojourn-t"):
            text = (unified.v2 / level / "cgroup.subtree_control").read_text()
            assert "pids" in text

    def test_processes_move_down_where_the_kernel_wants_it(
        self, unified: Hierarchies, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert unified.v2 is not None
        top = unified.v2
        (top / "cgroup.procs").write_text("11\n")
        _fill(top / "sojourn-host")
        real = Path.write_text

        def write(path: Path, text: str, *args: object) -> int:
            moved = (top / "sojourn-host" / "cgroup.procs").read_text()
            if path == top / "cgroup.subtree_control" and not moved:
                raise OSError(16, "Device or resource busy")
            return real(path, text)

        monkeypatch.setattr(Path, "write_text", write)
        CgroupTree("t", unified).prepare()
        assert (top / "sojourn-host" / "cgroup.procs").read_text() == "11"

    def test_limits(self, unified: Hierarchies) -> None:
        group = CgroupTree("t", unified).group("sbx_1")
        group.create(LIMITS)
        directory = group.directories[0]
        shown = {name: (directory / name).read_text() for name in (*V2_FILES[:4], "pids.max")}
        assert shown == {
            "cpu.max": "150000 100000",
            "memory.max": "1000",
            "memory.swap.max": "0",
            "memory.oom.group": "1",
            "pids.max": "7",
        }

    def test_limit_below_what_is_used_is_refused(self, unified: Hierarchies) -> None:
        group = CgroupTree("t", unified).group("sbx_1")
        group.create(LIMITS)
        (group.directories[0] / "memory.current").write_text("1001\n")
        with pytest.raises(QuotaExceeded):
            group.change(LIMITS)
        (group.directories[0] / "memory.current").write_text("999\n")
        group.change(LIMITS)

    def test_missing_controllers_leave_the_rest(self, tmp_path: Path) -> None:
        _fill(tmp_path / "sojourn-t" / "sbx_1", ("cgroup.procs", "pids.max"))
        tree = CgroupTree("t", Hierarchies({}, tmp_path, frozenset({"pids"})))
        tree.group("sbx_1").create(LIMITS)
        assert (tmp_path / "sojourn-t" / "sbx_1" / "pids.max").read_text() == "7"
        assert not tree.hard_limits

    def test_events_are_read(self, unified: Hierarchies) -> None:
        group = CgroupTree("t", unified).group("sbx_1")
        directory = group.directories[0]
        assert group.memory_kills() == 0
        (directory / "memory.events").write_text("low 0\nmax 4\noom 2\noom_kill 3\n")
        (directory / "cgroup.events").write_text("populated 1\nfrozen 1\n")
        assert (group.memory_kills(), group.frozen()) == (3, True)

    def test_freeze_that_does_not_come_about_is_told(self, unified: Hierarchies) -> None:
        group = CgroupTree("t", unified).group("sbx_1")
        (group.directories[0] / "cgroup.events").write_text("frozen 0\n")
        assert group.freeze(time.monotonic()) is False
        assert (group.directories[0] / "cgroup.freeze").read_text() == "1"


class TestVersionOne:
    def test_raising_and_lowering_memory_with_swap(self, tmp_path: Path) -> None:
        top = tmp_path / "memory"
        directory = top / "sojourn-t" / "sbx_1"
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cgroup.procs")
        _fill(directory, names)
        group = CgroupTree("t", Hierarchies({"memory": top}, None, frozenset())).group("sbx_1")
        group.limit(LIMITS)
        assert [(directory / name).read_text() for name in names[:2]] == ["1000", "1000"]

    def test_oom_count(self, tmp_path: Path) -> None:
        top = tmp_path / "memory"
        _fill(top / "sojourn-t" / "sbx_1", ("memory.oom_control",))
        group = CgroupTree("t", Hierarchies({"memory": top}, None, frozenset())).group("sbx_1")
        (top / "sojourn-t" / "sbx_1" / "memory.oom_control").write_text(
            "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
        )
        assert group.memory_kills() == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\nb", "x y"])
def test_names_cannot_lead_elsewhere(unified: Hierarchies, name: str) -> None:
    with pytest.raises(ValueError, match="cgroup name"):
        CgroupTree(name, unified)
    with pytest.raises(ValueError, match="cgroup name"):
        CgroupTree("t", unified).group(name)


def test_kernel_refusal_names_file_and_value(unified: Hierarchies) -> None:
    group = CgroupTree("t", unified).group("sbx_1")
    file = group.directories[0] / "memory.max"
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(HostUnfit, match=r"memory\.max"):
        group.limit(LIMITS)


def test_a_group_that_goes_while_it_is_written_counts_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "cgroup.freeze"
    control.touch()

    def gone(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(os, "write", gone)
    with pytest.raises(FileNotFoundError):
        cgroups._write(control, "0")
    cgroups._write(control, "0", optional=True)
