"""Host processes: bounded commands, exact identity, deaths that count."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from sojourn.node.isolation import processes


def test_command_gets_nothing_of_the_server(tmp_path: Path) -> None:
    os.environ["SERVER_SECRET"] = "x"
    try:
        output = tmp_path / "out"
        done = processes.run(["sh", "-c", "env; cat; pwd"], output=output, timeout=20)
    finally:
        del os.environ["SERVER_SECRET"]
    assert done == processes.Finished(0, False)
    names = {line.partition("=")[0] for line in output.read_text().splitlines() if "=" in line}
    assert names <= {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert output.read_text().endswith("/\n")


def test_timeout_takes_the_whole_group(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {mark}; wait"
    done = processes.run(["sh", "-c", script], timeout=0.5)
    assert done.timed_out
    child = int(mark.read_text())
    deadline = time.monotonic() + 10
    while processes.alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes.alive(child)


def test_exit_status_is_passed_on() -> None:
    assert processes.run(["sh", "-c", "exit 7"], timeout=20).status == 7
    assert processes.run(["sh", "-c", "kill -9 $$"], timeout=20).status == -9


def test_missing_group_stops_the_command(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    done = processes.run(
        ["touch", os.fspath(mark)], cgroups=[tmp_path / "no-such-group"], timeout=20
    )
    assert done.status == 125
    assert not mark.exists()


def test_group_is_joined_before_the_command(tmp_path: Path) -> None:
    group = tmp_path / "group with space"
    group.mkdir()
    output = tmp_path / "out"
    processes.run(["sh", "-c", "echo $$"], cgroups=[group], output=output, timeout=20)
    assert (group / "cgroup.procs").read_text() == output.read_text()


def test_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while processes.state(child.pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.001)
    assert processes.state(child.pid) == "Z"
    assert not processes.alive(child.pid)
    processes.reap(child.pid)
    assert processes.state(child.pid) is None
    child.returncode = 0


def test_a_recycled_id_is_not_hit() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        answers = [[child.pid], []]  # at the second look the number is another's
        processes.kill(lambda: answers.pop(0))
        assert not answers and not processes.await_end(child.pid, 0.2)
        processes.kill(lambda: [child.pid])
        assert child.wait(10) == -9
    finally:
        child.kill()
        child.wait()


def test_end_outruns_forks() -> None:
    child = subprocess.Popen(["sh", "-c", "while :; do sleep 0.001 & done"], start_new_session=True)

    def group() -> list[int]:
        found = []
        for pid in processes.all_pids():
            try:
                if os.getpgid(pid) == child.pid:
                    found.append(pid)
            except ProcessLookupError:
                continue
        return found

    try:
        assert processes.end(group, time.monotonic() + 20) == []
        assert [pid for pid in group() if processes.alive(pid)] == []
    finally:
        child.kill()
        child.wait()


def test_end_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        monkeypatch.setattr(processes, "kill", lambda pid: None)  # as if it were stuck in a call
        assert processes.end(lambda: [child.pid], time.monotonic()) == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_names_with_parentheses_are_read(tmp_path: Path) -> None:
    program = tmp_path / "odd) R 1 (name"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "600"])
    try:
        deadline = time.monotonic() + 10
        while processes.command_line(child.pid)[:1] != [os.fspath(program)]:
            assert time.monotonic() < deadline
        assert processes.parent(child.pid) == os.getpid()
        assert processes.alive(child.pid)
        found = dict(processes.mentioning([os.fspath(program)]))
        assert child.pid in found
    finally:
        child.kill()
        child.wait()


def test_gone_processes_raise_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert processes.state(child.pid) is None
    assert processes.start_time(child.pid) is None
    assert processes.command_line(child.pid) == []
    assert not processes.is_first(child.pid)
    processes.kill(lambda: [child.pid])
