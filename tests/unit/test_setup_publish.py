"""Publishing is all or nothing, whoever else publishes and whenever it is cut off."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sojourn.errors import HostUnfit, StorageFull
from sojourn.node.setup.commands import clean_environment, run_command
from sojourn.node.setup.publish import exclusive, point, publish

PUBLISHER = """
import os, sys
from pathlib import Path
from sojourn.node.setup.publish import publish
target, counter = Path(sys.argv[1]), sys.argv[2]

def build(staging):
    with open(counter, "a") as file:
        file.write("built\\n")
    for number in range(200):
        (staging / str(number)).write_text(str(number))

sys.stdin.read()
publish(target, build, print)
assert len(list(target.iterdir())) == 200
"""


def nothing(_line: str) -> None:
    return


def left_over(directory: Path) -> list[str]:
    return [path.name for path in directory.glob(".staging-*")]


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    target, counter = tmp_path / "tools" / "thing", tmp_path / "counter"
    command = [sys.executable, "-c", PUBLISHER, str(target), str(counter)]
    publishers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(3)]
    for publisher in publishers:  # all are loaded and wait for the start
        assert publisher.stdin is not None
        publisher.stdin.close()
    assert [publisher.wait(60) for publisher in publishers] == [0, 0, 0]
    assert counter.read_text() == "built\n"
    assert left_over(target.parent) == []


def test_a_published_directory_is_not_built_again(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    assert publish(target, lambda staging: (staging / "a").touch(), nothing)
    assert not publish(target, lambda staging: pytest.fail("built again"), nothing)
    assert [path.name for path in target.iterdir()] == ["a"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(staging: Path) -> None:
        (staging / "half").touch()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        publish(tmp_path / "thing", build, nothing)
    assert not (tmp_path / "thing").exists()
    assert left_over(tmp_path) == []


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    def build(staging: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageFull):
        publish(tmp_path / "thing", build, nothing)
    assert left_over(tmp_path) == []


INTERRUPTED = """
import sys, time
from pathlib import Path
from sojourn.node.setup.publish import publish

def build(staging):
    (staging / "half").touch()
    print("half done", flush=True)
    time.sleep(600)

publish(Path(sys.argv[1]), build, print)
"""


def test_a_killed_build_leaves_no_target_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(target)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half done\n"
    finally:
        process.kill()
        process.communicate()
    assert not target.exists()
    assert len(left_over(tmp_path)) == 1
    assert publish(target, lambda staging: (staging / "whole").touch(), nothing)
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert left_over(tmp_path) == []


def test_what_another_target_stages_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / ".staging-other-abc"
    other.mkdir()
    publish(tmp_path / "thing", lambda staging: None, nothing)
    assert other.is_dir()


def test_waiting_for_the_lock_is_told(tmp_path: Path) -> None:
    lock = tmp_path / ".thing.lock"
    told = threading.Event()
    entered = threading.Event()

    def second() -> None:
        with exclusive(lock, lambda line: told.set()):
            entered.set()

    thread = threading.Thread(target=second)
    with exclusive(lock, nothing):
        thread.start()
        assert told.wait(30)
        assert not entered.is_set()
    thread.join(30)
    assert entered.is_set()


def test_a_lock_is_not_handed_to_programs(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock", nothing):
        lock = (tmp_path / "lock").stat()
        mine = []
        for name in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one that lists the directory is gone
                if os.path.samestat(os.fstat(int(name.name)), lock):
                    mine.append(int(name.name))
        assert len(mine) == 1
        assert fcntl.fcntl(mine[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_point_switches_over(tmp_path: Path) -> None:
    link = tmp_path / "current"
    for name in ("one", "two", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        point(link, name)
        assert str(link.readlink()) == name
    assert left_over(tmp_path) == []


# -- programs run for a set-up --------------------------------------------------------------


def test_output_and_lines_come_through() -> None:
    lines: list[str] = []
    output = run_command(["sh", "-c", "echo a; echo b >&2"], what="x", on_line=lines.append)
    assert sorted(output.splitlines()) == ["a", "b"]
    assert sorted(lines) == ["a", "b"]


def test_a_failure_carries_the_last_words() -> None:
    with pytest.raises(HostUnfit) as caught:
        run_command(
            ["sh", "-c", "for i in $(seq 100); do echo line $i; done; echo why >&2; exit 3"],
            what="the build",
            next_step="do this",
        )
    assert "the build failed" in caught.value.message
    assert caught.value.message.endswith("why")
    assert "line 1\n" not in caught.value.message
    assert caught.value.next_step == "do this"


def test_a_missing_program_is_a_failure() -> None:
    with pytest.raises(HostUnfit, match="no-such-program"):
        run_command(["no-such-program"], what="x")


def test_a_program_ends_with_its_set_up() -> None:
    code = (
        "from sojourn.node.setup.commands import run_command\n"
        "run_command(['sh', '-c', 'echo $$; exec sleep 600'], what='x',"
        " on_line=lambda line: print(line, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        sleeper = int(process.stdout.readline())
        watch = os.pidfd_open(sleeper)
    finally:
        process.kill()
        process.communicate()
    try:
        import select

        gone = select.poll()
        gone.register(watch, select.POLLIN)
        assert gone.poll(30_000), "the program outlived its set-up"
    except BaseException:
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        raise
    finally:
        os.close(watch)


def test_secrets_of_the_environment_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOJOURN_TOKEN", "secret")
    monkeypatch.setenv("http_proxy", "http://proxy")
    monkeypatch.setenv("PATH", "/usr/bin")
    environment = clean_environment({"EXTRA": "1"})
    assert "SOJOURN_TOKEN" not in environment
    assert environment["http_proxy"] == "http://proxy"
    assert environment["EXTRA"] == "1"
    assert "/usr/sbin" in environment["PATH"]
