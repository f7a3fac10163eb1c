"""What the gVisor driver promises beyond the contract: interrupted calls, versions, secrets."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import driver_rig
import pytest
from driver_rig import Rig, driver_guest, eventually

from sojourn.errors import CaptureFailed, SandboxLost, SojournError
from sojourn.node import tools
from sojourn.node.isolation import gvisor_state, urpc
from sojourn.node.isolation.gvisor import GVisorDriver

__all__ = ["driver_guest"]

pytestmark = [
    pytest.mark.privileged,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]


@pytest.fixture
def rig(tmp_path: Path, driver_guest: Path) -> Iterator[Rig]:
    yield from driver_rig.rig("gvisor", tmp_path, driver_guest)


def _mark(rig: Rig, word: str) -> None:
    spec = rig.boxes[-1].spec
    (spec.directory / "driver" / spec.sandbox / "frozen").write_text(word)


@pytest.mark.parametrize("noted", ["freezing", "thawing", ""])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_crash_between_the_note_and_the_call_is_settled(
    rig: Rig, noted: str, frozen: bool
) -> None:
    """The kernel counts stops: one too many is never thawed, one too few is a panic."""
    box = rig.started()
    box.ok("append /log")
    if frozen:
        rig.driver.freeze(box.spec)
    _mark(rig, noted)
    successor = rig.another()
    for _ in range(2):
        successor.freeze(box.spec)
        assert successor.status(box.spec).frozen
        successor.thaw(box.spec)
        assert not successor.status(box.spec).frozen
        box.ok("ping")


def test_older_and_newer_runsc_are_driven_by_command(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = urpc.call

    def refuse(path: Path, method: str, arg: object = None, **options: Any) -> Any:
        if method.startswith("containerManager."):
            raise urpc.UnknownMethod(f"{method}: unknown method")
        return real(path, method, arg, **options)

    box = rig.started()
    box.ok("write /file text")
    box.detach()
    monkeypatch.setattr(urpc, "call", refuse)
    image = rig.base / "image"
    image.mkdir()
    rig.driver.freeze(box.spec)
    rig.driver.checkpoint(box.spec, image)
    assert rig.driver.status(box.spec).alive
    rig.driver.thaw(box.spec)
    box.attach()
    box.ok("ping")
    rig.end(box)
    again = rig.box(over=box)
    rig.driver.restore(again.spec, image)
    again.attach()
    assert again.ok("read /file") == "text"


def test_memory_of_before_there_was_a_network_is_restored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images lie in stores for long: those taken with the runtime's own empty network go on."""
    with monkeypatch.context() as before:
        before.setattr(
            "sojourn.node.isolation.gvisor._network_flags",
            lambda: ["--network=none", "--net-disconnect-ok"],
        )
        box = rig.started()
        box.ok("write /file text")
        box.detach()
        image = rig.base / "image"
        image.mkdir()
        rig.driver.freeze(box.spec)
        rig.driver.checkpoint(box.spec, image)
    rig.end(box)
    again = rig.box(over=box)
    rig.driver.restore(again.spec, image)
    again.attach()
    assert again.ok("read /file") == "text"


def test_a_kernel_that_does_not_answer_is_not_alive(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.node.isolation.gvisor._PROBE_TIMEOUT", 0.2)
    monkeypatch.setattr("sojourn.node.isolation.gvisor._CALL_TIMEOUT", 0.2)
    box = rig.started()
    sentry = _part(rig, "boot")
    os.kill(sentry, signal.SIGSTOP)
    status = rig.driver.status(box.spec)
    assert not status.alive and status.cause == "the sandbox kernel does not answer"
    with pytest.raises(SandboxLost):
        rig.driver.freeze(box.spec)
    rig.driver.destroy(box.spec)
    assert rig.leftovers(box) == []


def _part(rig: Rig, word: str) -> int:
    spec = rig.boxes[-1].spec
    for pid in rig.driver.status(spec).pids:
        if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            return pid
    raise AssertionError(f"no process {word}")


@pytest.mark.parametrize("part", ["boot", "gofer"])
def test_killing_either_process_ends_the_sandbox(rig: Rig, part: str) -> None:
    box = rig.started()
    os.kill(_part(rig, part), signal.SIGKILL)
    eventually("seen dead", lambda: not rig.driver.status(box.spec).alive)
    eventually("all processes gone", lambda: rig.group(box).pids() == set())
    rig.driver.destroy(box.spec)
    assert rig.leftovers(box) == []


def test_environment_on_disk_is_private(rig: Rig) -> None:
    box = rig.started(env={"TOKEN": "hidden-value"})
    for path in (box.spec.directory / "driver").rglob("*"):
        if path.is_file() and "hidden-value" in path.read_text(errors="replace"):
            assert path.stat().st_mode & 0o077 == 0
    for path in rig.state.iterdir():
        if path.is_file() and "hidden-value" in path.read_text(errors="replace"):
            assert path.stat().st_mode & 0o007 == 0


def test_a_long_data_directory_works(rig: Rig, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 120) / ("e" * 120)
    driver = GVisorDriver(rig.driver._runsc, long, rig.scope)  # type: ignore[attr-defined]
    short = gvisor_state.open_state(long)
    try:
        box = rig.box()
        box.listen()
        driver.start(box.spec)
        box.attach()
        box.detach()
        driver.freeze(box.spec)
        assert driver.status(box.spec).frozen
        driver.destroy(box.spec)
        assert rig.leftovers(box) == []
        assert short != long and short.resolve() == long
    finally:
        short.unlink()


def test_runtime_names_the_version(rig: Rig) -> None:
    assert rig.driver.runtime.startswith("runsc ")
    assert any(character.isdigit() for character in rig.driver.runtime)


def _checkpoint_in_background(rig: Rig) -> tuple[threading.Thread, list[BaseException]]:
    """A checkpoint whose pages go into a pipe nobody reads yet, so that it lasts."""
    box = rig.boxes[-1]
    image = rig.base / "image"
    image.mkdir()
    os.mkfifo(image / "pages.img")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            rig.driver.checkpoint(box.spec, image)
        except SojournError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    eventually("the checkpoint is under way", lambda: (image / "checkpoint.img").exists())
    return thread, failures


def test_destroy_ends_a_checkpoint_under_way(rig: Rig) -> None:
    box = rig.started()
    box.ok("heap 20")
    box.detach()
    rig.driver.freeze(box.spec)
    thread, failures = _checkpoint_in_background(rig)
    assert rig.driver.status(box.spec).alive
    rig.driver.destroy(box.spec)
    thread.join(30)
    assert not thread.is_alive()
    assert rig.leftovers(box) == []
    assert [type(failure) for failure in failures] in ([CaptureFailed], [SandboxLost])
    if isinstance(failures[0], CaptureFailed):
        assert failures[0].details["sandbox_alive"] is False


@pytest.mark.privileged
def test_a_closed_driver_leaves_no_group_and_no_short_name(tmp_path: Path) -> None:
    state = tmp_path / ("long" * 20) / "state"
    driver = GVisorDriver(tools.runsc_path(), state, f"t{os.getpid():x}close")
    short = gvisor_state.open_state(state)
    assert short.is_symlink()
    driver.close()
    assert not short.is_symlink()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/sojourn-t{os.getpid():x}close"))


def test_short_names_of_directories_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    gone = tmp_path / ("gone" * 20)
    stale = gvisor_state.open_state(gone)
    gone.rmdir()
    other = tmp_path / ("here" * 20)
    kept = gvisor_state.open_state(other)
    assert not stale.is_symlink()
    gvisor_state.close_state(kept)
    assert not kept.is_symlink()
