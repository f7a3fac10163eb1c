"""Supervisors for tests: as a child of the test in a process namespace of its own (fast, sees the
host's files), and as the first process of a real sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sojourn.errors import HostUnfit
from sojourn.model.sessions import Limits
from sojourn.node import mounts, tools
from sojourn.node.isolation.base import SandboxSpec
from sojourn.node.isolation.gvisor import GVisorDriver
from sojourn.node.link import GuestLink

SOURCES = Path(__file__).parents[2] / "supervisor"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def build_supervisor(directory: Path) -> Path:
    """The supervisor built from the sources at hand."""
    try:
        return tools.supervisor_path()
    except HostUnfit:
        if shutil.which("make") is None or shutil.which("cc") is None:
            pytest.skip("no compiler")
        subprocess.run(
            ["make", "-s", "-j2", "-C", SOURCES, f"BUILD={directory}"], check=True, timeout=120
        )
        return directory / "sojourn-supervisor"


@pytest.fixture(scope="session")
def supervisor_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The supervisor's program; modules that use `hosted` or `sandboxed` import this."""
    return build_supervisor(tmp_path_factory.mktemp("supervisor"))


class HostedSupervisor:
    """A supervisor as the first process of a process namespace on the host."""

    def __init__(self, program: Path, directory: Path, *arguments: str) -> None:
        self.control = directory / "control"
        self.control.mkdir()
        self.process = subprocess.Popen(
            [
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(program, "--socket", self.control / "node.sock", *arguments),
            ],
            env={"PATH": PATH, "LANG": "C.UTF-8"},
            cwd="/",
        )

    @property
    def pid(self) -> int:
        """Its process id on the host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(children.read_text().split()[0])

    def end(self) -> None:
        """Kill it, and with it all that it has started."""
        try:
            os.kill(self.pid, signal.SIGKILL)  # the end of a namespace's first process ends all
        except (OSError, IndexError):
            self.process.kill()
        self.process.wait(30)


class Sandboxes:
    """Real sandboxes over the files of a template."""

    def __init__(self, program: Path, base: Path) -> None:
        try:
            runsc = tools.runsc_path()
            names = tools.template_names()
            if not names:
                pytest.skip("no template")
            self.template = tools.template_root(names[0])
        except HostUnfit as error:
            pytest.skip(str(error))
        self.program = program
        self.base = base
        self.scope = f"test{os.getpid()}"
        self.driver = GVisorDriver(runsc, base / "state", self.scope)
        self.specs: list[SandboxSpec] = []

    def spec(self, *arguments: str, over: SandboxSpec | None = None) -> SandboxSpec:
        """A sandbox to be, over the template or over what another one left."""
        number = len(self.specs)
        directory = self.base / f"b{number}"
        for part in ("upper", "work", "root", "control"):
            (directory / part).mkdir(parents=True)
        lowers = [self.template] if over is None else [over.directory / "upper", self.template]
        root = directory / "root"
        mounts.mount_overlay(lowers, directory / "upper", directory / "work", root)
        spec = SandboxSpec(
            sandbox=f"sbx_{number:024d}",
            directory=directory,
            root=root,
            control=directory / "control",
            supervisor=self.program,
            argv=list(arguments),
            env={"PATH": PATH, "LANG": "C.UTF-8", "GREETING": "good day"},
            hostname="probe",
            limits=Limits(memory_bytes=1 << 30, pids=128),
        )
        self.specs.append(spec)
        return spec

    async def start(self, *arguments: str) -> tuple[SandboxSpec, GuestLink]:
        """A sandbox and the link to it."""
        spec = self.spec(*arguments)
        link = GuestLink(spec.control)
        await asyncio.gather(asyncio.to_thread(self.driver.start, spec), link.attach(30))
        return spec, link

    def end(self, spec: SandboxSpec) -> None:
        """Destroy and unmount, so that its upper can be a lower."""
        self.driver.destroy(spec)
        mounts.unmount(spec.root)

    def close(self) -> None:
        """Leave nothing behind."""
        for spec in self.specs:
            self.driver.destroy(spec)
        self.driver.sweep(set())
        mounts.cleanup_mounts(self.base)
        self.driver.close()


Hosted = Callable[[GuestLink, HostedSupervisor, Path], Awaitable[None]]


@asynccontextmanager
async def hosted_guest(
    program: Path, directory: Path, *arguments: str
) -> AsyncIterator[tuple[GuestLink, HostedSupervisor]]:
    """A hosted supervisor and an attached link."""
    supervisor = HostedSupervisor(program, directory, *arguments)
    link = GuestLink(supervisor.control)
    try:
        await link.attach(30)
        yield link, supervisor
    finally:
        await link.close()
        supervisor.end()


def hosted(*arguments: str) -> Callable[[Hosted], Any]:
    """Run an async test with a guest on the host: test(guest, supervisor, directory)."""

    def wrap(test: Hosted) -> Any:
        async def whole(program: Path, directory: Path) -> None:
            # The alarm that bounds tests is not heard while the loop waits.
            async with asyncio.timeout(90):
                async with hosted_guest(program, directory, *arguments) as (link, supervisor):
                    await test(link, supervisor, directory)

        @pytest.mark.privileged
        def run(supervisor_program: Path, tmp_path: Path) -> None:
            uvloop.run(whole(supervisor_program, tmp_path))

        run.__name__ = run.__qualname__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return wrap


def sandboxed(test: Callable[[Sandboxes], Awaitable[None]]) -> Any:
    """Run an async test with real sandboxes: test(sandboxes)."""

    @pytest.mark.privileged
    def run(supervisor_program: Path, tmp_path: Path) -> None:
        sandboxes = Sandboxes(supervisor_program, tmp_path)
        try:
            uvloop.run(test(sandboxes))
        finally:
            sandboxes.close()

    run.__name__ = run.__qualname__ = test.__name__
    run.__doc__ = test.__doc__
    return run
