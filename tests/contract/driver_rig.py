"""Sandboxes for the driver contract: made over an empty tree, spoken to over the node's socket."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sojourn.errors import HostUnfit
from sojourn.model.sessions import Limits
from sojourn.node import mounts, tools
from sojourn.node.isolation import processes
from sojourn.node.isolation.base import Driver, SandboxSpec
from sojourn.node.isolation.bubblewrap import BubblewrapDriver
from sojourn.node.isolation.cgroups import CgroupTree, detect
from sojourn.node.isolation.gvisor import GVisorDriver

ANSWER = 30.0


def make_driver(kind: str, state: Path, scope: str) -> Driver:
    if kind == "gvisor":
        try:
            runsc = tools.runsc_path()
        except HostUnfit as error:
            pytest.skip(f"no runsc: {error}")
        return GVisorDriver(runsc, state, scope)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("no bwrap")
    return BubblewrapDriver(Path(bwrap), state, scope)


def eventually(what: str, look: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for something that has to come about; the bound only ends a hanging test."""
    deadline = time.monotonic() + seconds
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about: {what}")
        time.sleep(0.01)


class Box:
    """One sandbox and the link to its first process."""

    def __init__(self, spec: SandboxSpec, upper: Path) -> None:
        self.spec = spec
        self.upper = upper
        self._listener: socket.socket | None = None
        self._link: socket.socket | None = None

    def listen(self) -> None:
        directory = os.open(self.spec.control, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.settimeout(ANSWER)
            self._listener.bind(f"/proc/self/fd/{directory}/node.sock")
            self._listener.listen()
        finally:
            os.close(directory)

    def attach(self) -> int:
        """Take the connection; returns the counter the first process greets with."""
        if self._listener is None:
            self.listen()
        assert self._listener is not None
        self._link, _ = self._listener.accept()
        self._link.settimeout(ANSWER)
        self._lines = self._link.makefile("rb")
        word, _, count = self._lines.readline().decode().partition(" ")
        assert word == "hello"
        return int(count)

    def detach(self) -> None:
        assert self._listener is not None and self._link is not None
        self._listener.close()
        self._listener = None
        (self.spec.control / "node.sock").unlink()
        self._link.sendall(b"detach\n")
        assert self._lines.readline() == b""
        self._link.close()
        self._link = None

    def ask(self, command: str) -> str:
        """A command's answer; raises OSError or ConnectionError when the sandbox is gone."""
        assert self._link is not None
        self._link.sendall(command.encode() + b"\n")
        line = self._lines.readline().decode(errors="surrogateescape")
        if not line:
            raise ConnectionError("the sandbox hung up")
        return line.rstrip("\n")

    def ok(self, command: str) -> str:
        answer = self.ask(command)
        assert answer.startswith("ok "), f"{command}: {answer}"
        return answer.removeprefix("ok ")

    def close(self) -> None:
        for end in (self._link, self._listener):
            if end is not None:
                end.close()


class Rig:
    """What a contract test works with."""

    def __init__(self, kind: str, base: Path, scope: str, guest: Path) -> None:
        self.kind = kind
        self.base = base
        self.scope = scope
        self.guest = guest
        self.empty = base / "empty"
        self.empty.mkdir()
        self.state = base / "state"
        self.driver = make_driver(kind, self.state, scope)
        self.boxes: list[Box] = []

    def another(self, scope: str | None = None) -> Driver:
        """A second driver: of the same instance (a new server), or of another one."""
        if scope is None:
            return make_driver(self.kind, self.state, self.scope)
        return make_driver(self.kind, self.base / f"state-{scope}", scope)

    def box(self, *, over: Box | None = None, **changes: Any) -> Box:
        """A sandbox to be, over the empty tree, or over the files another one left."""
        number = len(self.boxes)
        directory = self.base / f"b{number}"
        for part in ("upper", "work", "root", "control"):
            (directory / part).mkdir(parents=True)
        lowers = [self.empty] if over is None else [over.upper, self.empty]
        root = directory / "root"
        mounts.mount_overlay(lowers, directory / "upper", directory / "work", root)
        facts: dict[str, Any] = {
            "sandbox": f"sbx_{number:024d}",
            "directory": directory,
            "root": root,
            "control": directory / "control",
            "supervisor": self.guest,
            "argv": [],
            "env": {"PATH": "/bin", "GREETING": "good day"},
            "hostname": "probe",
            "limits": Limits(memory_bytes=256 * 1024**2, pids=64),
        }
        box = Box(SandboxSpec(**(facts | changes)), directory / "upper")
        self.boxes.append(box)
        return box

    def started(self, **changes: Any) -> Box:
        box = self.box(**changes)
        box.listen()
        self.driver.start(box.spec)
        box.attach()
        return box

    def end(self, box: Box) -> None:
        """Destroy and unmount, so that its upper can be a lower."""
        self.driver.destroy(box.spec)
        mounts.unmount(box.spec.root)

    def group(self, box: Box) -> Any:
        return CgroupTree(self.scope).group(box.spec.sandbox)

    def leftovers(self, box: Box) -> list[str]:
        """Everything of a sandbox that is still on the host."""
        left = [f"process {pid}" for pid in self.group(box).pids()]
        for pid in processes.all_pids():
            words = " ".join(processes.command_line(pid))
            if os.fspath(box.spec.directory) in words and processes.alive(pid):
                left.append(f"process {pid}: {words}")
        left += [f"cgroup {path}" for path in self.group(box).directories if path.exists()]
        left += [f"state {path}" for path in self.state.glob(f"*{box.spec.sandbox}*")]
        if (box.spec.directory / "driver").exists():
            left.append("driver files")
        return left

    def limit_file(self, box: Box, v1: tuple[str, str], v2: str) -> str:
        """A limit as the kernel shows it."""
        found = detect()
        controller, name = v1
        part = f"sojourn-{self.scope}/{box.spec.sandbox}"
        if controller in found.v1:
            return (found.v1[controller] / part / name).read_text().strip()
        assert found.v2 is not None
        return (found.v2 / part / v2).read_text().strip()

    def close(self) -> None:
        for box in self.boxes:
            box.close()
            self.driver.destroy(box.spec)
        self.driver.sweep(set())
        mounts.cleanup_mounts(self.base)
        CgroupTree(self.scope).remove()


@pytest.fixture(scope="session")
def driver_guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of `tests/support/driver_guest.c`, built with the host's compiler."""
    source = Path(__file__).parents[1] / "support" / "driver_guest.c"
    entering = Path(__file__).parents[2] / "supervisor" / "enter.c"
    program = tmp_path_factory.mktemp("guest") / "guest"
    subprocess.run(
        ["cc", "-D_GNU_SOURCE", "-static", "-O1", "-o", program, source, entering], check=True
    )
    return program


def rig(kind: str, base: Path, guest: Path) -> Iterator[Rig]:
    scope = f"test-{os.getpid()}-{os.urandom(3).hex()}"
    made = Rig(kind, base, scope, guest)
    try:
        yield made
    finally:
        made.close()
