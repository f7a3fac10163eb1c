"""The gVisor driver: processes run on a kernel of their own in user space, and can be put away.

Guarantee: a sandbox lives and dies as a whole. Whatever part of it is killed, whichever command
about it is interrupted, `destroy` leaves no process, no group and no state file of it, and
`status` never calls it alive unless its kernel (the sentry) answers. A failed checkpoint is
reported with whether the sandbox outlived it.

Freezing and checkpointing go over the sandbox's control socket (see `urpc`); the runsc commands
that do the same are the fallback for a version whose socket speaks otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    HostUnfit,
    ResumeFailed,
    SandboxLost,
    StorageFull,
)
from sojourn.model.sessions import Limits
from sojourn.node.isolation import (
    gvisor_descriptors,
    gvisor_host,
    gvisor_images,
    gvisor_state,
    processes,
    urpc,
)
from sojourn.node.isolation.base import Capability, SandboxSpec, SandboxStatus
from sojourn.node.isolation.cgroups import CgroupTree, GroupLimits
from sojourn.node.isolation.gvisor_config import oci_config
from sojourn.node.isolation.gvisor_host import write_private

_START_TIMEOUT = 60.0
_RESTORE_TIMEOUT = 300.0
_CHECKPOINT_TIMEOUT = 600.0
_CALL_TIMEOUT = 20.0
_PROBE_TIMEOUT = 5.0
_KILL_TIMEOUT = 10.0

_UNSAVABLE = (
    "The session is usable. Where a program of root is connected to a socket in /run/sojourn/node,"
    " even one that is closed at the other end, end it; or take a files-only snapshot"
    " (memory=false)."
)
_IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")

# The sentry, the gofer and the page tables of the guest are charged to the sandbox's group too;
# this is what they get on top of what the session was promised.
_OVERHEAD_BYTES = 96 * 1024**2
_OVERHEAD_SHARE = 16
# Each guest process costs a host process with several threads. The guest's own limit is kept by
# the supervisor; this bound is for a guest that got around it, and protects the host.
_HOST_TASKS = 256
_HOST_TASKS_PER_PID = 6


class _Parts(NamedTuple):
    """Host processes of one sandbox: the kernel, the file server, and all of them."""

    sentries: list[int]
    gofers: list[int]
    all: list[int]


class GVisorDriver:
    """Implements `sojourn.node.isolation.base.Driver` with runsc."""

    name = "gvisor"

    def __init__(self, runsc: Path, state: Path, scope: str) -> None:
        self._runsc = runsc
        self._state = gvisor_state.open_state(state)
        self._tree = CgroupTree(scope)
        self.runtime = f"runsc {self._version()}"
        found = {
            Capability.MEMORY,
            Capability.FREEZE,
            Capability.LIVE_CHECKPOINT,
            Capability.NETWORK,
        }
        if self._tree.hard_limits:
            found.add(Capability.HARD_LIMITS)
        self.capabilities = frozenset(found)
        self._supervisors = gvisor_host.Supervisors(self._state / "supervisors")
        self._findings = gvisor_images.Findings()
        self._guard = threading.Lock()
        self._locks: dict[str, threading.RLock] = {}

    # -- starting -----------------------------------------------------------------------------

    def start(self, spec: SandboxSpec) -> None:
        """Boot a fresh sandbox."""
        with self._lock(spec):
            supervisor = self._supervisors.keep(spec.supervisor)
            self._launch(spec, supervisor, ["run", "-detach"], _START_TIMEOUT)

    def restore(self, spec: SandboxSpec, image: Path) -> None:
        """Start a sandbox from a memory image."""
        missing = [name for name in _IMAGE_FILES if not (image / name).is_file()]
        if missing:
            raise ResumeFailed(f"the memory image lacks {', '.join(missing)}", image=str(image))
        with self._lock(spec):
            supervisor = self._supervisors.of_image(image, spec.supervisor)
            source = self._mended(spec, image)
            command = ["restore", "-detach", "-image-path", os.fspath(source)]
            self._launch(spec, supervisor, command, _RESTORE_TIMEOUT)

    def _mended(self, spec: SandboxSpec, image: Path) -> Path:
        """What to restore of an image: itself, or what differs from it where it has to."""
        room = spec.directory / "driver" / "image"
        shutil.rmtree(room, ignore_errors=True)
        try:
            return gvisor_images.image_to_restore(image, room, self._findings)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room to restore {spec.sandbox}: {error}") from error
            raise ResumeFailed(f"{image} cannot be read: {error}", image=str(image)) from error

    def _launch(
        self, spec: SandboxSpec, supervisor: Path, command: list[str], timeout: float
    ) -> None:
        files = self._files(spec)
        if self._members(spec) or gvisor_state.state_files(self._state, spec.sandbox):
            # Left by a start that was interrupted; runsc refuses an id it knows.
            self.destroy(spec)
        try:
            shutil.rmtree(files, ignore_errors=True)
            files.mkdir(parents=True, mode=0o700)
            # The configuration holds the session's environment.
            write_private(files / "config.json", json.dumps(oci_config(spec, supervisor)))
            write_private(files / "supervisor", supervisor.name)
            helper = self._supervisors.keep(spec.supervisor)
            group = self._tree.group(spec.sandbox)
            self._tree.prepare()
            group.create(_group_limits(spec.limits))
            finished = processes.run(
                [
                    *gvisor_host.surroundings(
                        helper, supervisor, spec.control, spec.limits.memory_bytes, files
                    ),
                    *self._command(files),
                    *command,
                    "-bundle",
                    os.fspath(files),
                    spec.sandbox,
                ],
                cgroups=group.directories,
                timeout=timeout,
            )
            if finished.timed_out:
                raise ResumeFailed(f"runsc {command[0]} did not end within {timeout:g} s")
            if finished.status != 0:
                raise ResumeFailed(
                    f"runsc {command[0]} failed: {self._words(spec, finished.status)}"
                )
        except OSError as error:
            self.destroy(spec)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room to start {spec.sandbox}: {error}") from error
            raise ResumeFailed(f"cannot start {spec.sandbox}: {error}") from error
        except BaseException:
            self.destroy(spec)
            raise

    # -- freezing -----------------------------------------------------------------------------

    def freeze(self, spec: SandboxSpec) -> None:
        """Stop every process at one instant."""
        with self._lock(spec):
            mark = self._files(spec) / "frozen"
            known = self._settle(spec)
            if known:
                return
            # The kernel counts stops, and ends with a panic when one too many is taken back; so
            # what was asked for is noted before it is asked, and settled after a crash between.
            self._mark(mark, "freezing")
            self._call(spec, "containerManager.Pause", fallback="pause")
            self._mark(mark, "frozen")

    def thaw(self, spec: SandboxSpec) -> None:
        """Let a frozen sandbox go on."""
        with self._lock(spec):
            if not self._settle(spec):
                self._require(spec)
                return
            mark = self._files(spec) / "frozen"
            self._mark(mark, "thawing")
            self._call(spec, "containerManager.Resume", fallback="resume")
            mark.unlink(missing_ok=True)

    def _settle(self, spec: SandboxSpec) -> bool:
        """Whether the sandbox is frozen; asks it when an interrupted call left that open."""
        mark = self._files(spec) / "frozen"
        try:
            noted = mark.read_text()
        except FileNotFoundError:
            return False
        if noted == "frozen":
            return True
        frozen = self._observe_frozen(spec)
        if frozen:
            self._mark(mark, "frozen")
        else:
            mark.unlink(missing_ok=True)
        return frozen

    def _observe_frozen(self, spec: SandboxSpec) -> bool:
        """Look whether every task of the guest stands at a stop."""
        # A task on its way into or out of a stop is seen wrongly, so two looks have to agree.
        seen: list[bool] = []
        for _ in range(50):
            stacks = self._call(spec, "debug.Stacks")
            seen.append(gvisor_state.all_tasks_stopped(str(stacks)))
            if len(seen) >= 3 and seen[-1] == seen[-2] == seen[-3]:
                return seen[-1]
            time.sleep(0.01)
        return seen[-1]

    @staticmethod
    def _mark(mark: Path, word: str) -> None:
        try:
            mark.write_text(word)
        except FileNotFoundError as error:
            raise SandboxLost(f"sandbox {mark.parent.name}: it does not run") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"cannot note the state of the sandbox: {error}") from error
            raise

    # -- capture ------------------------------------------------------------------------------

    def checkpoint(self, spec: SandboxSpec, image: Path) -> None:
        """Write the memory image of a frozen sandbox."""
        with self._lock(spec):
            if not self._settle(spec):
                self._require(spec)
                raise CaptureRefused(
                    f"sandbox {spec.sandbox} is not frozen", next_step="Freeze it first."
                )
            try:
                self._checkpoint_by_socket(spec, image)
            except urpc.UnknownMethod:
                self._checkpoint_by_command(spec, image)
            self._supervisors.attach(image, (self._files(spec) / "supervisor").read_text())

    def _checkpoint_by_socket(self, spec: SandboxSpec, image: Path) -> None:
        arg = {
            "Key": None,
            "Metadata": {"compression": "none"},
            "have_pages_file": True,
            "Resume": True,
        }
        with _created(image) as files:
            try:
                urpc.call(
                    self._socket(spec),
                    "containerManager.Checkpoint",
                    arg,
                    files=files,
                    timeout=_CHECKPOINT_TIMEOUT,
                )
            except urpc.UnknownMethod:
                raise
            except (urpc.UrpcError, urpc.UrpcUnreachable) as error:
                raise self._capture_error(spec, image, str(error)) from error

    def _checkpoint_by_command(self, spec: SandboxSpec, image: Path) -> None:
        for name in _IMAGE_FILES:
            (image / name).unlink(missing_ok=True)
        status = self._run(
            spec,
            ["checkpoint", "-leave-running", "-compression=none", "-image-path", os.fspath(image)],
            _CHECKPOINT_TIMEOUT,
        )
        if status != 0:
            raise self._capture_error(spec, image, self._words(spec, status))

    def _capture_error(
        self, spec: SandboxSpec, image: Path, words: str
    ) -> CaptureFailed | StorageFull:
        alive = self.status(spec).alive
        room = os.statvfs(image)
        if "no space" in words or "quota exceeded" in words or room.f_bavail == 0:
            return StorageFull(
                f"no room for the memory image of {spec.sandbox}: {words}", sandbox_alive=alive
            )
        failed = CaptureFailed(
            f"the checkpoint of {spec.sandbox} failed: {words}", sandbox_alive=alive
        )
        if "encoding error" in words:  # something inside that no image can hold
            failed.next_step = _UNSAVABLE
        return failed

    def unlinked_files(self, spec: SandboxSpec) -> list[str]:
        """Paths on the root file system held open though their name is gone."""
        return gvisor_descriptors.unlinked(self._kernels(spec), spec.root)

    def writable_files(self, spec: SandboxSpec) -> list[str]:
        """Root-relative paths of regular files held open for writing."""
        return gvisor_descriptors.writable(self._kernels(spec), spec.root)

    # -- looking ------------------------------------------------------------------------------

    def status(self, spec: SandboxSpec) -> SandboxStatus:
        """Look at the host."""
        parts = self._look(spec)
        cause, lost = None, True
        if not parts.sentries:
            cause = self._cause(spec)
        elif not self._answers(spec):
            parts = self._look(spec)  # it may have ended meanwhile
            answerless = "the sandbox kernel does not answer"
            cause = answerless if parts.sentries else self._cause(spec)
            lost = not parts.sentries
        elif not parts.gofers:
            cause = "the file server of the sandbox is gone"
        elif self._tree.group(spec.sandbox).memory_kills():
            # Without a kernel that ends the whole group, parts may linger; none can be relied on.
            cause = "memory limit exceeded"
        else:
            frozen = (self._files(spec) / "frozen").exists()
            return SandboxStatus(True, frozen, parts.all)
        return SandboxStatus(False, False, parts.all, cause, lost)

    def _answers(self, spec: SandboxSpec) -> bool:
        try:
            # Any answer will do, also a refusal; an unknown name takes no lock in the kernel, so
            # that a long checkpoint under way does not look like a hang.
            urpc.call(self._socket(spec), "sojourn.Probe", timeout=_PROBE_TIMEOUT)
        except urpc.UrpcError:
            return True
        except urpc.UrpcUnreachable:
            return False
        return True

    def _cause(self, spec: SandboxSpec) -> str | None:
        if self._tree.group(spec.sandbox).memory_kills():
            return "memory limit exceeded"
        files = self._files(spec)
        for name in ("panic.log", "runsc.log"):
            with contextlib.suppress(OSError):
                line = gvisor_state.telling_line((files / name).read_text(errors="replace"))
                if line:
                    return line
        if not files.is_dir():
            return None
        return "the sandbox kernel is gone: killed from outside, or the first process ended"

    # -- ending -------------------------------------------------------------------------------

    def destroy(self, spec: SandboxSpec) -> None:
        """End everything of the sandbox."""

        def find() -> set[int]:
            # Only without cgroups a half-started sandbox has to be looked for everywhere.
            return self._members(spec) if self._tree.exists else self._searched(spec.sandbox)

        # Killed before the lock is taken: a start or checkpoint that holds it and hangs ends then.
        self._end(spec.sandbox, find, remove=False)
        with self._lock(spec):
            self._end(spec.sandbox, find, remove=True)
            shutil.rmtree(spec.directory / "driver", ignore_errors=True)
        with self._guard:
            self._locks.pop(spec.sandbox, None)

    def _end(self, sandbox: str, find: Callable[[], set[int]], *, remove: bool) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT
        group = self._tree.group(sandbox)
        left = group.kill(deadline, find)
        if left:
            raise HostUnfit(f"processes of {sandbox} do not die: {left}")
        if remove:
            gvisor_state.remove_state_files(self._state, sandbox)
            if not group.remove(deadline):
                raise HostUnfit(f"the cgroup of {sandbox} stays busy")

    def _searched(self, sandbox: str) -> set[int]:
        """Processes of a sandbox of this instance, by their arguments."""
        return self._search().get(sandbox, set())

    def _search(self) -> dict[str, set[int]]:
        """All processes of this instance by sandbox."""
        found: dict[str, set[int]] = {}
        for pid, arguments in processes.mentioning([os.fspath(self._state)]):
            if (bundle := gvisor_state.bundle_of(arguments)) is not None:
                found.setdefault(bundle.name, set()).add(pid)
        return found

    def sweep(self, keep: set[str]) -> list[str]:
        """End every sandbox of this driver instance not in `keep`."""
        known = gvisor_state.known_sandboxes(self._state) | self._tree.sandboxes()
        ended = sorted((known | set(self._search())) - keep)
        for name in ended:
            self._end(name, functools.partial(self._searched, name), remove=True)
        return ended

    def close(self) -> None:
        """Remove the empty groups and the short name of the state directory."""
        self._tree.remove()
        gvisor_state.close_state(self._state)

    def update_limits(self, spec: SandboxSpec, limits: Limits) -> None:
        """Apply other limits to a running sandbox."""
        with self._lock(spec):
            self._require(spec)
            self._tree.group(spec.sandbox).change(_group_limits(limits))

    # -- parts --------------------------------------------------------------------------------

    def _lock(self, spec: SandboxSpec) -> threading.RLock:
        with self._guard:
            return self._locks.setdefault(spec.sandbox, threading.RLock())

    @staticmethod
    def _files(spec: SandboxSpec) -> Path:
        # Named for the sandbox, because the gofer's arguments tell of it by this path alone.
        return spec.directory / "driver" / spec.sandbox

    def _socket(self, spec: SandboxSpec) -> Path:
        return self._state / f"runsc-{spec.sandbox}.sock"

    def _command(self, files: Path) -> list[str]:
        return [
            os.fspath(self._runsc),
            "--root",
            os.fspath(self._state),
            "--platform=systrap",
            *_network_flags(),
            "--overlay2=none",
            "--host-uds=open",
            "--ignore-cgroups",
            "--log",
            os.fspath(files / "runsc.log"),
            "--panic-log",
            os.fspath(files / "panic.log"),
        ]

    def _run(self, spec: SandboxSpec, command: list[str], timeout: float) -> int:
        finished = processes.run(
            [*self._command(self._files(spec)), *command, spec.sandbox], timeout=timeout
        )
        return finished.status

    def _call(self, spec: SandboxSpec, method: str, *, fallback: str | None = None) -> Any:
        try:
            return urpc.call(self._socket(spec), method, timeout=_CALL_TIMEOUT)
        except urpc.UnknownMethod as error:
            if fallback is None:
                raise SandboxLost(f"this runsc does not answer {method}: {error}") from error
            status = self._run(spec, [fallback], _CALL_TIMEOUT)
            if status != 0:
                words = self._words(spec, status)
                raise SandboxLost(f"runsc {fallback} failed: {words}") from error
            return None
        except (urpc.UrpcError, urpc.UrpcUnreachable) as error:
            cause = self.status(spec).cause
            raise SandboxLost(f"sandbox {spec.sandbox}: {cause or error}") from error

    def _require(self, spec: SandboxSpec) -> None:
        status = self.status(spec)
        if not status.alive:
            raise SandboxLost(f"sandbox {spec.sandbox}: {status.cause or 'it does not run'}")

    def _members(self, spec: SandboxSpec) -> set[int]:
        """Host processes of a sandbox: its group's, and what its state file names."""
        named = gvisor_state.recorded_pids(self._state, spec.sandbox)
        return self._tree.group(spec.sandbox).pids() | {
            pid for pid in named if self._belongs(pid, spec)
        }

    def _belongs(self, pid: int, spec: SandboxSpec) -> bool:
        return gvisor_state.bundle_of(processes.command_line(pid)) == self._files(spec)

    def _look(self, spec: SandboxSpec) -> _Parts:
        """The live processes of a sandbox by what they are."""
        found = _Parts([], [], [])
        for pid in sorted(self._members(spec)):
            if not processes.alive(pid):
                continue
            found.all.append(pid)
            arguments = processes.command_line(pid)
            if gvisor_state.bundle_of(arguments) == self._files(spec):
                if "boot" in arguments:
                    found.sentries.append(pid)
                elif "gofer" in arguments:
                    found.gofers.append(pid)
        return found

    def _kernels(self, spec: SandboxSpec) -> list[int]:
        parts = self._look(spec)
        if not parts.sentries:
            raise SandboxLost(f"sandbox {spec.sandbox}: {self._cause(spec) or 'it does not run'}")
        return parts.sentries + parts.gofers

    def _words(self, spec: SandboxSpec, status: int) -> str:
        with contextlib.suppress(OSError):
            text = (self._files(spec) / "runsc.log").read_text(errors="replace")
            if line := gvisor_state.telling_line(text):
                return line
        if self._tree.group(spec.sandbox).memory_kills():
            return "memory limit exceeded"
        if status in (126, 127):  # as a shell says it
            return "the supervisor, which starts the runtime, cannot be executed"
        return f"exit status {status} without a message"

    def _version(self) -> str:
        return gvisor_state.version(self._runsc)


def _network_flags() -> list[str]:
    """No interface but the loopback, as the namespace has it; connections through it outlive a
    checkpoint. Raw sockets are for the supervisor, which sets the packet tables with them."""
    return ["--network=sandbox", "--net-disconnect-ok", "--net-raw"]


def _group_limits(limits: Limits) -> GroupLimits:
    return GroupLimits(
        cpus=limits.cpus,
        memory_bytes=limits.memory_bytes + _OVERHEAD_BYTES + limits.memory_bytes // _OVERHEAD_SHARE,
        pids=_HOST_TASKS + _HOST_TASKS_PER_PID * limits.pids,
        # A sandbox that lost a part is broken: it ends whole, with its cause.
        whole=True,
    )


@contextlib.contextmanager
def _created(image: Path) -> Iterator[list[int]]:
    """The files of an image, new and open for writing."""
    files: list[int] = []
    try:
        for name in _IMAGE_FILES:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            try:
                files.append(os.open(image / name, flags, 0o600))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StorageFull(f"no room for a memory image: {error}") from error
                raise CaptureFailed(
                    f"cannot write the memory image: {error}", sandbox_alive=True
                ) from error
        yield files
    finally:
        for descriptor in files:
            os.close(descriptor)
