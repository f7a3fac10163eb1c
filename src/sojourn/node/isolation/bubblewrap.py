"""The bubblewrap driver: processes of the host's kernel in namespaces of their own; files only.

Guarantee: everything of a sandbox is in its pid namespace and its cgroup, so ending either ends
all of it. For hosts where gVisor cannot run. It is the weaker wall, and says so:

- every system call goes to the host's kernel, so a fault of that kernel is a way out;
- root inside is the host's uid 0, though in a user namespace of its own, where its capabilities
  reach only what the sandbox owns; what the kernel grants by that uid alone (writing below
  /proc/sys and the like) is mounted read-only or covered;
- memory cannot be put away; freezing needs a cgroup freezer;
- programs with the set-uid bit do not gain rights inside (bubblewrap forbids it): no sudo.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from sojourn.errors import HostUnfit, ResumeFailed, SandboxLost, Unsupported
from sojourn.model.sessions import Limits
from sojourn.node.isolation import bubblewrap_files, processes
from sojourn.node.isolation.base import Capability, SandboxSpec, SandboxStatus
from sojourn.node.isolation.bubblewrap_arguments import arguments
from sojourn.node.isolation.cgroups import CgroupTree, GroupLimits

_START_TIMEOUT = 20.0
_FREEZE_TIMEOUT = 10.0
_KILL_TIMEOUT = 10.0
# Uids and gids that exist inside, the same as outside: those of files in images.
_IDS = 65536
_OVERHEAD_BYTES = 16 * 1024**2


class BubblewrapDriver:
    """Implements `sojourn.node.isolation.base.Driver` with bwrap."""

    name = "bubblewrap"

    def __init__(self, bwrap: Path, state: Path, scope: str) -> None:
        self._bwrap = bwrap
        self._state = state
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._tree = CgroupTree(scope)
        reported = processes.reported_version(bwrap, "Install the package bubblewrap.")
        self.runtime = reported or "bubblewrap unknown"
        found: set[Capability] = set()
        if self._tree.can_freeze:
            found.add(Capability.FREEZE)
        if self._tree.hard_limits:
            found.add(Capability.HARD_LIMITS)
        self.capabilities = frozenset(found)
        self._guard = threading.Lock()
        self._locks: dict[str, threading.RLock] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    # -- starting -----------------------------------------------------------------------------

    def start(self, spec: SandboxSpec) -> None:
        """Boot a fresh sandbox."""
        with self._lock(spec.sandbox):
            if self._members(spec.sandbox):
                self.destroy(spec)
            try:
                self._launch(spec)
            except OSError as error:
                self.destroy(spec)
                raise ResumeFailed(f"cannot start {spec.sandbox}: {error}") from error
            except BaseException:
                self.destroy(spec)
                raise

    def _launch(self, spec: SandboxSpec) -> None:
        (spec.directory / "driver").mkdir(parents=True, exist_ok=True)
        group = self._tree.group(spec.sandbox)
        self._tree.prepare()
        group.create(_group_limits(spec.limits))
        info_read, info_write = os.pipe2(os.O_CLOEXEC)
        block_read, block_write = os.pipe2(os.O_CLOEXEC)
        words_read, words_write = os.pipe2(os.O_CLOEXEC)
        ours = [info_read, block_write, words_read]
        theirs = [info_write, block_read, words_write]
        try:
            # The options hold the session's environment: not for the host's process list.
            with tempfile.TemporaryFile() as packed:
                options = arguments(spec, info_write, block_read)
                packed.write(b"\0".join(map(os.fsencode, options)))
                packed.seek(0)
                command = [os.fspath(self._bwrap), "--args", str(packed.fileno())]
                child = processes.spawn(
                    [*command, "--", "/run/sojourn/supervisor", *spec.argv],
                    cgroups=group.directories,
                    errors=words_write,
                    pass_fds=[packed.fileno(), info_write, block_read],
                )
            self._children[spec.sandbox] = child
            while theirs:
                os.close(theirs.pop())
            deadline = time.monotonic() + _START_TIMEOUT
            first = _child_pid(info_read, deadline)
            if first is None:
                raise ResumeFailed(f"bwrap failed: {_said(words_read) or 'without a message'}")
            self._record(spec.sandbox, child.pid, first)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{first}/{name}").write_text(f"0 0 {_IDS}")
            os.write(block_write, b"1")
            while processes.command_line(first)[:1] != ["/run/sojourn/supervisor"]:
                if not processes.alive(first) or time.monotonic() > deadline:
                    words = _said(words_read)
                    raise ResumeFailed(f"bwrap failed: {words or 'the supervisor did not start'}")
                time.sleep(0.001)
        finally:
            for descriptor in (*ours, *theirs):
                os.close(descriptor)

    def restore(self, spec: SandboxSpec, image: Path) -> None:
        """Not possible."""
        raise Unsupported("the bubblewrap driver cannot restore memory")

    def checkpoint(self, spec: SandboxSpec, image: Path) -> None:
        """Not possible."""
        raise Unsupported("the bubblewrap driver cannot put memory away")

    # -- freezing -----------------------------------------------------------------------------

    def freeze(self, spec: SandboxSpec) -> None:
        """Stop every process at one instant."""
        self._switch(spec, True)

    def thaw(self, spec: SandboxSpec) -> None:
        """Let them go on."""
        self._switch(spec, False)

    def _switch(self, spec: SandboxSpec, on: bool) -> None:
        if Capability.FREEZE not in self.capabilities:
            raise Unsupported("this host has no cgroup freezer")
        with self._lock(spec.sandbox):
            self._require(spec)
            group = self._tree.group(spec.sandbox)
            deadline = time.monotonic() + _FREEZE_TIMEOUT
            done = group.freeze(deadline) if on else group.thaw(deadline)
            if not done:
                if on:
                    group.thaw(time.monotonic() + _FREEZE_TIMEOUT)
                word = "stop" if on else "go on"
                raise SandboxLost(f"sandbox {spec.sandbox} does not {word}")

    # -- looking ------------------------------------------------------------------------------

    def unlinked_files(self, spec: SandboxSpec) -> list[str]:
        """Paths on the root file system held open though their name is gone."""
        return bubblewrap_files.unlinked(self._members(spec.sandbox))

    def writable_files(self, spec: SandboxSpec) -> list[str]:
        """Root-relative paths of regular files open, or mapped, for writing."""
        return bubblewrap_files.writable(self._members(spec.sandbox))

    def status(self, spec: SandboxSpec) -> SandboxStatus:
        """Look at the host."""
        members = sorted(pid for pid in self._members(spec.sandbox) if processes.alive(pid))
        if not any(processes.is_first(pid) for pid in members):
            return SandboxStatus(False, False, members, self._cause(spec))
        return SandboxStatus(True, self._tree.group(spec.sandbox).frozen(), members)

    def _cause(self, spec: SandboxSpec) -> str | None:
        group = self._tree.group(spec.sandbox)
        child = self._children.get(spec.sandbox)
        status = child.poll() if child is not None else None
        if group.memory_kills() and status not in (0,):
            return "memory limit exceeded"
        if status is not None:
            # bwrap reports a death by signal as a shell does.
            if status > 128:
                return f"the first process was killed by signal {status - 128}"
            if status >= 0:
                return f"the first process ended with exit code {status}"
            return f"the sandbox was killed by signal {-status} from outside"
        if not (spec.directory / "driver").is_dir():
            return None
        return "the first process is gone: killed from outside, or ended"

    # -- ending -------------------------------------------------------------------------------

    def destroy(self, spec: SandboxSpec) -> None:
        """End everything of the sandbox."""
        with self._lock(spec.sandbox):
            self._end(spec.sandbox)
            shutil.rmtree(spec.directory / "driver", ignore_errors=True)
        with self._guard:
            self._locks.pop(spec.sandbox, None)

    def _end(self, sandbox: str) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT
        group = self._tree.group(sandbox)
        left = group.kill(deadline, lambda: self._members(sandbox))
        if left:
            raise HostUnfit(f"processes of {sandbox} do not die: {left}")
        child = self._children.pop(sandbox, None)
        if child is not None:
            child.poll()
        if not group.remove(deadline):
            raise HostUnfit(f"the cgroup of {sandbox} stays busy")
        self._record_file(sandbox).unlink(missing_ok=True)

    def sweep(self, keep: set[str]) -> list[str]:
        """End every sandbox of this driver instance not in `keep`."""
        recorded = {path.stem for path in self._state.glob("*.json")}
        ended = sorted((recorded | self._tree.sandboxes()) - keep)
        for name in ended:
            self._end(name)
        return ended

    def close(self) -> None:
        """Remove the empty groups."""
        self._tree.remove()

    def update_limits(self, spec: SandboxSpec, limits: Limits) -> None:
        """Apply other limits to a running sandbox."""
        with self._lock(spec.sandbox):
            self._require(spec)
            self._tree.group(spec.sandbox).change(_group_limits(limits))

    # -- parts --------------------------------------------------------------------------------

    def _lock(self, sandbox: str) -> threading.RLock:
        with self._guard:
            return self._locks.setdefault(sandbox, threading.RLock())

    def _require(self, spec: SandboxSpec) -> None:
        status = self.status(spec)
        if not status.alive:
            raise SandboxLost(f"sandbox {spec.sandbox}: {status.cause or 'it does not run'}")

    def _record_file(self, sandbox: str) -> Path:
        return self._state / f"{sandbox}.json"

    def _record(self, sandbox: str, *pids: int) -> None:
        began = {str(pid): processes.start_time(pid) for pid in pids}
        self._record_file(sandbox).write_text(json.dumps(began))

    def _members(self, sandbox: str) -> set[int]:
        """The group's processes, and those recorded at the start if they still are the same."""
        found = self._tree.group(sandbox).pids()
        with contextlib.suppress(FileNotFoundError, ValueError):
            for pid, began in json.loads(self._record_file(sandbox).read_text()).items():
                if began is not None and processes.start_time(int(pid)) == began:
                    found.add(int(pid))
        child = self._children.get(sandbox)
        if child is not None and child.poll() is None:
            # The monitor and the first process, which takes all others with it.
            found |= {child.pid, *processes.children(child.pid)}
        return found


def _group_limits(limits: Limits) -> GroupLimits:
    # Here the kernel's own choice of what to kill is right: the hog dies, the supervisor reports
    # it. The monitor process of bwrap counts too.
    return GroupLimits(
        cpus=limits.cpus,
        memory_bytes=limits.memory_bytes + _OVERHEAD_BYTES,
        pids=limits.pids + 16,
        whole=False,
    )


def _child_pid(info: int, deadline: float) -> int | None:
    """The first process's id, as bwrap reports it; None when bwrap ended before."""
    received = b""
    while b"}" not in received:
        ready, _, _ = select.select([info], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(info, 4096) if ready else b""
        if not piece:
            return None
        received += piece
    return int(json.loads(received[: received.index(b"}") + 1])["child-pid"])


def _said(words: int) -> str:
    """What bwrap wrote to its standard error so far."""
    fcntl.fcntl(words, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        lines = os.read(words, 65536).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""
