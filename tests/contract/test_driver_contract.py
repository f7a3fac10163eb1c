"""The contract of `sojourn.node.isolation.base.Driver`, held by every driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import driver_rig
import pytest
from driver_rig import Box, Rig, driver_guest, eventually

from sojourn.errors import CaptureFailed, CaptureRefused, ResumeFailed, SandboxLost, StorageFull
from sojourn.model.sessions import Limits
from sojourn.node.isolation import processes
from sojourn.node.isolation.base import Capability
from sojourn.node.isolation.cgroups import CgroupTree

__all__ = ["driver_guest"]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture(params=["gvisor", "bubblewrap"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, driver_guest: Path) -> Iterator[Rig]:
    yield from driver_rig.rig(request.param, tmp_path, driver_guest)


def needs(rig: Rig, *capabilities: Capability) -> None:
    missing = set(capabilities) - rig.driver.capabilities
    if missing:
        pytest.skip(f"the driver cannot do {', '.join(sorted(missing))}")


def put_away(rig: Rig, box: Box, name: str = "image") -> Path:
    box.detach()
    rig.driver.freeze(box.spec)
    image = rig.base / name
    image.mkdir()
    rig.driver.checkpoint(box.spec, image)
    return image


# -- what is inside -----------------------------------------------------------------------------


def test_supervisor_starts_with_the_environment_of_the_session_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_SECRET", "not for guests")
    box = rig.started()
    seen = dict(pair.split("=", 1) for pair in box.ok("env").split("\x1f") if pair)
    added = {name: seen.pop(name) for name in ("HOME", "PWD") if name in seen}
    assert seen == box.spec.env
    assert set(added.values()) <= {"/"}
    assert box.ok("hostname") == "probe"


def test_environment_is_not_in_the_process_list(rig: Rig) -> None:
    box = rig.started(env={"TOKEN": "hidden-value"})
    assert "TOKEN=hidden-value" in box.ok("env")
    for pid in rig.group(box).pids():
        assert "hidden-value" not in " ".join(processes.command_line(pid))


def test_environment_cannot_reach_into_the_runtime(rig: Rig) -> None:
    box = rig.started(env={"LD_PRELOAD": "/nowhere.so", "BASH_ENV": "/nowhere", "PATH": "/none"})
    assert "LD_PRELOAD=/nowhere.so" in box.ok("env")


def test_users_inside_are_told_apart(rig: Rig) -> None:
    box = rig.started()
    assert box.ask("as 1000 /tmp/mine") == "ok 0"
    assert box.ask("as 1000 /not-mine") == "error Permission denied"


def test_binds_are_read_only(rig: Rig) -> None:
    box = rig.started()
    assert box.ask("write /run/sojourn/node/x 1").startswith("error")
    assert box.ask("write /run/sojourn/supervisor 1").startswith("error")
    assert not (box.spec.control / "x").exists()


def test_host_settings_cannot_be_written(rig: Rig) -> None:
    box = rig.started()
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    box.ask("write /proc/sys/kernel/core_pattern |/evil")
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


def test_first_process_cannot_fill_a_host_file_by_its_output(rig: Rig) -> None:
    box = rig.started()
    before = sum(path.stat().st_size for path in box.spec.directory.rglob("driver/**/*"))
    for _ in range(20):
        box.ask("stdout " + "x" * 4000)
    after = sum(path.stat().st_size for path in box.spec.directory.rglob("driver/**/*"))
    assert after == before


# -- freezing -----------------------------------------------------------------------------------


def test_freeze_stops_everything_and_thaw_goes_on(rig: Rig) -> None:
    needs(rig, Capability.FREEZE)
    box = rig.started()
    box.ok("append /log")
    log = box.upper / "log"
    eventually("the log grows", lambda: log.exists() and log.stat().st_size > 20)
    box.detach()

    rig.driver.freeze(box.spec)
    status = rig.driver.status(box.spec)
    assert status.alive and status.frozen
    size = log.stat().st_size
    time.sleep(0.05)
    assert log.stat().st_size == size

    rig.driver.thaw(box.spec)
    assert not rig.driver.status(box.spec).frozen
    eventually("the log grows again", lambda: log.stat().st_size > size)
    lines = log.read_text().splitlines()
    assert lines == [str(number) for number in range(len(lines))]


def test_freeze_and_thaw_are_idempotent(rig: Rig) -> None:
    needs(rig, Capability.FREEZE)
    box = rig.started()
    rig.driver.thaw(box.spec)
    for _ in range(3):
        rig.driver.freeze(box.spec)
    for _ in range(3):
        rig.driver.thaw(box.spec)
    box.ok("ping")
    assert rig.driver.status(box.spec).alive


def test_freeze_of_a_lost_sandbox_says_so(rig: Rig) -> None:
    needs(rig, Capability.FREEZE)
    box = rig.started()
    rig.end(box)
    with pytest.raises(SandboxLost):
        rig.driver.freeze(box.spec)
    with pytest.raises(SandboxLost):
        rig.driver.thaw(box.spec)


def test_a_new_server_finds_the_frozen_sandbox_frozen(rig: Rig) -> None:
    needs(rig, Capability.FREEZE)
    box = rig.started()
    rig.driver.freeze(box.spec)
    successor = rig.another()
    assert successor.status(box.spec).frozen
    successor.freeze(box.spec)
    successor.thaw(box.spec)
    box.ok("ping")


# -- memory -------------------------------------------------------------------------------------


def test_checkpoint_leaves_the_sandbox_frozen_and_alive(rig: Rig) -> None:
    needs(rig, Capability.LIVE_CHECKPOINT)
    box = rig.started()
    count = int(box.ok("ping"))
    put_away(rig, box)
    status = rig.driver.status(box.spec)
    assert status.alive and status.frozen
    rig.driver.thaw(box.spec)
    assert box.attach() >= count


def test_restore_goes_on_where_the_image_was_taken(rig: Rig) -> None:
    needs(rig, Capability.MEMORY)
    box = rig.started()
    box.ok("heap 20")
    box.ok("keep /file content")
    total = box.ok("sum")
    count = int(box.ok("ping"))
    image = put_away(rig, box)
    rig.end(box)

    again = rig.box(over=box)
    rig.driver.restore(again.spec, image)
    assert again.attach() >= count
    assert again.ok("sum") == total
    assert again.ok("read /file") == "content"


def test_one_image_gives_sandboxes_of_their_own(rig: Rig) -> None:
    needs(rig, Capability.MEMORY)
    box = rig.started()
    box.ok("write /file before")
    image = put_away(rig, box)
    rig.end(box)
    forks = [rig.box(over=box) for _ in range(2)]
    for number, fork in enumerate(forks):
        rig.driver.restore(fork.spec, image)
        fork.attach()
        fork.ok(f"write /file fork-{number}")
    assert [fork.ok("read /file") for fork in forks] == ["fork-0", "fork-1"]
    assert (box.upper / "file").read_text() == "before"


def test_checkpoint_of_a_running_sandbox_is_refused(rig: Rig) -> None:
    needs(rig, Capability.MEMORY)
    box = rig.started()
    image = rig.base / "image"
    image.mkdir()
    with pytest.raises(CaptureRefused):
        rig.driver.checkpoint(box.spec, image)
    box.ok("ping")


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("hold /f text", "/f"),
        ("gonecwd /d", "/d"),
        ("deleted /program", "/program"),
        ("othername /one /two", "/one"),
    ],
)
def test_what_breaks_a_checkpoint_is_seen_first_and_survived(
    rig: Rig, command: str, path: str
) -> None:
    needs(rig, Capability.LIVE_CHECKPOINT)
    box = rig.started()
    box.ok(command)
    box.detach()
    rig.driver.freeze(box.spec)
    assert rig.driver.unlinked_files(box.spec) == [path]
    image = rig.base / "image"
    image.mkdir()
    # A runtime that can save such files is welcome; one that cannot must leave the sandbox whole.
    try:
        rig.driver.checkpoint(box.spec, image)
    except CaptureFailed as error:
        assert error.details["sandbox_alive"] is True
    rig.driver.thaw(box.spec)
    box.attach()
    box.ok("ping")


@pytest.mark.parametrize(
    "commands",
    [
        ["hold /tmp/f text"],
        ["fifo /fifo"],
        ["bind /socket"],
        ["pty"],
        ["mkdir /d", "inotify /d"],
        ["memfd"],
        ["flock /lock"],
        ["mapw /mapped text"],
        ["write /a b", "unlink /a"],
        ["oddname"],
        ["trap"],
        ["stop"],
    ],
    ids=lambda commands: commands[-1].split()[0] + commands[-1].split(" ", 1)[-1][:4],
)
def test_what_does_not_break_a_checkpoint(rig: Rig, commands: list[str]) -> None:
    needs(rig, Capability.MEMORY)
    box = rig.started()
    for command in commands:
        box.ok(command)
    image = put_away(rig, box)
    assert rig.driver.unlinked_files(box.spec) == []
    rig.end(box)
    again = rig.box(over=box)
    rig.driver.restore(again.spec, image)
    again.attach()
    again.ok("ping")
    if commands[-1].startswith("mapw"):
        assert again.ok("mapr") == "m"


def test_full_disk_fails_the_checkpoint_and_nothing_else(rig: Rig) -> None:
    needs(rig, Capability.LIVE_CHECKPOINT)
    box = rig.started()
    box.ok("heap 20")
    total = box.ok("sum")
    box.detach()
    rig.driver.freeze(box.spec)
    small = rig.base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", small], check=True)
    with pytest.raises(StorageFull):
        rig.driver.checkpoint(box.spec, small)
    rig.driver.thaw(box.spec)
    box.attach()
    assert box.ok("sum") == total


def test_restore_of_a_damaged_image_leaves_nothing(rig: Rig) -> None:
    needs(rig, Capability.MEMORY)
    box = rig.started()
    image = put_away(rig, box)
    rig.end(box)
    for name in sorted(path.name for path in image.glob("*.img")):
        again = rig.box(over=box)
        good = (image / name).read_bytes()
        (image / name).write_bytes(good[: len(good) // 2])
        with pytest.raises(ResumeFailed) as caught:
            rig.driver.restore(again.spec, image)
        assert len(caught.value.message) < 1000
        assert rig.leftovers(again) == []
        (image / name).write_bytes(good)
    whole = rig.box(over=box)
    rig.driver.restore(whole.spec, image)
    whole.attach()


def test_restore_uses_the_supervisor_of_the_image(rig: Rig, tmp_path: Path) -> None:
    needs(rig, Capability.MEMORY)
    old = tmp_path / "old-supervisor"
    old.write_bytes(rig.guest.read_bytes())
    old.chmod(0o755)
    box = rig.started(supervisor=old)
    image = put_away(rig, box)
    rig.end(box)
    # An upgrade: the path now holds another program, which could not go on in the old one's memory.
    taken = (image / "supervisor").read_text()
    old.write_bytes(rig.guest.read_bytes() + b"newer")
    again = rig.box(over=box, supervisor=old)
    rig.driver.restore(again.spec, image)
    assert (
        again.spec.directory / "driver" / again.spec.sandbox / "supervisor"
    ).read_text() == taken
    again.attach()
    again.ok("append /log")

    (image / "supervisor").write_text("0" * 32)
    with pytest.raises(ResumeFailed, match="supervisor"):
        rig.driver.restore(rig.box(over=box).spec, image)


# -- what is open -------------------------------------------------------------------------------


def test_writable_files_are_those_of_the_tree(rig: Rig) -> None:
    needs(rig, Capability.FREEZE)
    (rig.empty / "lower").write_text("from below")
    box = rig.started()
    for command in ("keep /a 1", "mapw /b 1", "open /lower", "keep /tmp/c 1"):
        box.ok(command)
    box.ok("oddname")
    box.ok("mkdir /dir")
    box.ok("keep /dir/d 1")
    box.detach()
    rig.driver.freeze(box.spec)
    assert rig.driver.writable_files(box.spec) == ["a", "b", "dir/d", "odd (deleted)"]


# -- ending -------------------------------------------------------------------------------------


def test_destroy_leaves_nothing_and_can_be_repeated(rig: Rig) -> None:
    box = rig.started()
    box.ok("append /log")
    box.ok("spin")
    rig.driver.destroy(box.spec)
    assert rig.leftovers(box) == []
    rig.driver.destroy(box.spec)
    status = rig.driver.status(box.spec)
    assert not status.alive and status.pids == []


def test_destroy_of_a_frozen_sandbox(rig: Rig) -> None:
    needs(rig, Capability.FREEZE)
    box = rig.started()
    rig.driver.freeze(box.spec)
    rig.driver.destroy(box.spec)
    assert rig.leftovers(box) == []


def test_destroy_of_a_sandbox_that_never_was(rig: Rig) -> None:
    box = rig.box()
    rig.driver.destroy(box.spec)
    assert rig.leftovers(box) == []


def test_start_after_destroy_under_the_same_name(rig: Rig) -> None:
    box = rig.started()
    rig.driver.destroy(box.spec)
    box.close()
    (box.spec.control / "node.sock").unlink()
    box.listen()
    rig.driver.start(box.spec)
    box.attach()
    box.ok("ping")


def test_whatever_part_is_killed_the_rest_goes_away(rig: Rig) -> None:
    parts = len(rig.driver.status(rig.started().spec).pids)
    for number in range(parts):
        box = rig.started()
        pids = rig.driver.status(box.spec).pids
        os.kill(pids[min(number, len(pids) - 1)], signal.SIGKILL)
        rig.driver.destroy(box.spec)
        assert rig.leftovers(box) == []


def test_death_of_a_named_part_is_seen(rig: Rig) -> None:
    """Any of the processes the host can tell apart: the sandbox goes on without it, or is dead."""
    first = rig.started()
    names = [processes.command_line(pid)[:1] for pid in rig.driver.status(first.spec).pids]
    for number in [index for index, name in enumerate(names) if name]:
        box = rig.started()
        os.kill(rig.driver.status(box.spec).pids[number], signal.SIGKILL)

        def settled(box: Box = box) -> bool:
            with contextlib.suppress(OSError):
                return box.ask("ping").startswith("ok") and rig.driver.status(box.spec).alive
            return not rig.driver.status(box.spec).alive

        eventually("dead or going on", settled)
        status = rig.driver.status(box.spec)
        assert status.alive or status.cause


def test_destroy_with_the_state_partly_gone(rig: Rig) -> None:
    for pattern in ("*.state", "*.sock", "*.json", "*"):
        box = rig.started()
        for path in rig.state.glob(pattern):
            if path.is_file() or path.is_socket():
                path.unlink()
        rig.driver.destroy(box.spec)
        assert rig.leftovers(box) == []


def test_failed_start_leaves_nothing_and_says_why(rig: Rig, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("not a program")
    broken.chmod(0o755)
    box = rig.box(supervisor=broken)
    with pytest.raises(ResumeFailed) as caught:
        rig.driver.start(box.spec)
    assert "without a message" not in caught.value.message
    assert rig.leftovers(box) == []

    missing = rig.box(supervisor=tmp_path / "missing")
    with pytest.raises(ResumeFailed):
        rig.driver.start(missing.spec)
    assert rig.leftovers(missing) == []


def test_status_tells_how_the_first_process_ended(rig: Rig) -> None:
    box = rig.started()
    with pytest.raises(OSError):
        box.ask("exit 3")
    eventually("seen dead", lambda: not rig.driver.status(box.spec).alive)
    assert "first process" in (rig.driver.status(box.spec).cause or "")


# -- sweeping -----------------------------------------------------------------------------------


def test_sweep_ends_all_but_the_kept(rig: Rig) -> None:
    kept, lost = rig.started(), rig.started()
    assert rig.another().sweep({kept.spec.sandbox}) == [lost.spec.sandbox]
    assert [entry for entry in rig.leftovers(lost) if entry != "driver files"] == []
    assert rig.driver.status(kept.spec).alive
    kept.ok("ping")


def test_sweep_finds_sandboxes_without_state_files(rig: Rig) -> None:
    box = rig.started()
    if not rig.group(box).directories:
        pytest.skip("without cgroups the state files are all there is")
    for path in rig.state.iterdir():
        if path.is_file() or path.is_socket():
            path.unlink()
    assert rig.driver.sweep(set()) == [box.spec.sandbox]
    assert not rig.group(box).exists()


def test_instances_do_not_see_each_other(rig: Rig) -> None:
    box = rig.started()
    scope = f"{rig.scope}-other"
    stranger = rig.another(scope)
    try:
        assert stranger.sweep(set()) == []
        assert rig.driver.status(box.spec).alive
        assert not stranger.status(box.spec).alive
    finally:
        CgroupTree(scope).remove()
    box.ok("ping")


_STARTER = """
import pathlib, sys
import driver_rig
from sojourn.node.isolation.base import SandboxSpec
import msgspec
spec = msgspec.json.decode(sys.stdin.buffer.read(), type=SandboxSpec, dec_hook=lambda t, v: t(v))
driver = driver_rig.make_driver(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])
print("go", flush=True)
driver.start(spec)
print("started", flush=True)
"""


@pytest.mark.parametrize("after", [0.0, 0.03, 0.08, 0.15])
def test_a_server_killed_while_starting_leaves_what_a_sweep_ends(rig: Rig, after: float) -> None:
    import msgspec

    box = rig.box()
    encoded = msgspec.json.encode(box.spec, enc_hook=os.fspath)
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER, rig.kind, rig.state, rig.scope],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(encoded)
        server.stdin.close()
        assert server.stdout.readline() == b"go\n"
        time.sleep(after)
        server.kill()
    # What the dead server had started goes on starting; it ends at the latest with the second.
    successor = rig.another()
    successor.sweep(set())
    successor.destroy(box.spec)
    assert rig.leftovers(box) == []
    box.listen()
    rig.driver.start(box.spec)
    box.attach()


# -- limits -------------------------------------------------------------------------------------


def test_memory_hog_ends_with_the_cause(rig: Rig) -> None:
    needs(rig, Capability.HARD_LIMITS)
    box = rig.started(limits=Limits(memory_bytes=64 * 1024**2, pids=64))
    box.ok("eat")

    def ended() -> bool:
        status = rig.driver.status(box.spec)
        if not status.alive:
            assert status.cause == "memory limit exceeded"
            return True
        # A driver whose kernel is the host's may lose the hog alone.
        return Capability.MEMORY not in rig.driver.capabilities and rig.group(box).memory_kills()

    eventually("the hog is killed", ended)
    if rig.driver.status(box.spec).alive:
        box.ok("ping")


def test_fork_bomb_stays_in_its_limits(rig: Rig) -> None:
    needs(rig, Capability.HARD_LIMITS)
    box = rig.started(limits=Limits(memory_bytes=1024**3, pids=8))
    most = int(rig.limit_file(box, ("pids", "pids.max"), "pids.max"))
    with contextlib.suppress(OSError):
        made = int(box.ok("fork 100000"))
        assert made <= most
    status = rig.driver.status(box.spec)
    assert status.alive or status.cause
    rig.driver.destroy(box.spec)
    assert rig.leftovers(box) == []


def test_limits_are_the_kernels_and_can_change(rig: Rig) -> None:
    needs(rig, Capability.HARD_LIMITS)
    box = rig.started(limits=Limits(cpus=0.5, memory_bytes=128 * 1024**2, pids=64))

    def shown() -> tuple[float, int, int]:
        quota = rig.limit_file(box, ("cpu", "cpu.cfs_quota_us"), "cpu.max").split()[0]
        memory = rig.limit_file(box, ("memory", "memory.limit_in_bytes"), "memory.max")
        pids = rig.limit_file(box, ("pids", "pids.max"), "pids.max")
        return int(quota) / 100_000, int(memory), int(pids)

    cpus, memory, pids = shown()
    assert cpus == 0.5
    assert 128 * 1024**2 <= memory <= 256 * 1024**2
    assert pids >= 64
    rig.driver.update_limits(box.spec, Limits(cpus=1.5, memory_bytes=512 * 1024**2, pids=128))
    assert shown()[0] == 1.5
    assert shown()[1] - memory >= 384 * 1024**2
    assert shown()[2] > pids
    rig.driver.update_limits(box.spec, Limits(cpus=0.5, memory_bytes=128 * 1024**2, pids=64))
    assert shown() == (cpus, memory, pids)


def test_memory_inside_is_what_the_session_may_use(rig: Rig) -> None:
    needs(rig, Capability.MEMORY)
    box = rig.started(limits=Limits(memory_bytes=192 * 1024**2, pids=64))
    assert int(box.ok("memory")) == 192 * 1024**2
    image = put_away(rig, box)
    rig.end(box)
    again = rig.box(over=box, limits=Limits(memory_bytes=192 * 1024**2, pids=64))
    rig.driver.restore(again.spec, image)
    again.attach()
    assert int(again.ok("memory")) == 192 * 1024**2
