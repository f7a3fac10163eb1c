"""Control groups of sandboxes: tracking, limits, freezing and killing, on cgroup v1, v2 and both.

Guarantee: every process of a sandbox is in the sandbox's own group from its first instruction, so
that ending the group ends all of it, and its limits are the kernel's, not a promise. Where a
controller is missing the rest still works and `CgroupTree` says which limits are hard.

Groups are named `sojourn-<scope>/<sandbox>` at the top of each hierarchy, not below the server's
own group: a service manager that ends the server's group must not end the sandboxes with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit, QuotaExceeded
from sojourn.node.isolation import processes
from sojourn.node.mounts import read_mounts

_LIMITING = ("cpu", "memory", "pids")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_PERIOD_US = 100_000


class GroupLimits(msgspec.Struct, frozen=True):
    """What is written to the controllers: cores, bytes, processes and threads of the host.

    `whole` ends all of the group when the kernel kills one process of it for its memory, where
    the kernel can do that (v2).
    """

    cpus: float
    memory_bytes: int
    pids: int
    whole: bool


class Hierarchies(msgspec.Struct, frozen=True):
    """Where the hierarchies are mounted. `v2_controllers` are those v2 has (not taken by v1)."""

    v1: dict[str, Path]
    v2: Path | None
    v2_controllers: frozenset[str]


def detect(mountinfo: Path = Path("/proc/self/mountinfo")) -> Hierarchies:
    """Find the mounted hierarchies."""
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for mount in read_mounts(mountinfo):
        if mount.type == "cgroup":
            for option in mount.super_options.split(","):
                if option in (*_LIMITING, "freezer"):
                    v1.setdefault(option, mount.target)
        elif mount.type == "cgroup2" and v2 is None:
            v2 = mount.target
    controllers: frozenset[str] = frozenset()
    if v2 is not None:
        with contextlib.suppress(FileNotFoundError):
            controllers = frozenset((v2 / "cgroup.controllers").read_text().split())
    return Hierarchies(v1, v2, controllers)


class CgroupTree:
    """All groups of one driver instance."""

    def __init__(self, scope: str, hierarchies: Hierarchies | None = None) -> None:
        if not _NAME.match(scope):
            raise ValueError(f"not a cgroup name: {scope!r}")
        self._scope = f"sojourn-{scope}"
        found = detect() if hierarchies is None else hierarchies
        self._v1 = {name: top / self._scope for name, top in found.v1.items()}
        self._v2 = found.v2 / self._scope if found.v2 is not None else None
        self.hard_limits = all(
            name in found.v1 or name in found.v2_controllers for name in _LIMITING
        )
        self._v2_limits = [name for name in _LIMITING if name in found.v2_controllers]
        self.can_freeze = "freezer" in found.v1 or found.v2 is not None
        self.exists = bool(found.v1) or found.v2 is not None
        freezer = self._v2 if self._v2 is not None else self._v1.get("freezer")
        self.freezers = [] if freezer is None else [freezer]
        """The parent groups by which all sandboxes are frozen at once."""

    def group(self, sandbox: str) -> Cgroup:
        """The group of a sandbox, whether it exists or not."""
        if not _NAME.match(sandbox):
            raise ValueError(f"not a cgroup name: {sandbox!r}")
        v2 = self._v2 / sandbox if self._v2 is not None else None
        return Cgroup({name: top / sandbox for name, top in self._v1.items()}, v2)

    def prepare(self) -> None:
        """Make the parent groups and hand their controllers down. Idempotent."""
        for top in dict.fromkeys(self._v1.values()):
            _make(top)
        if self._v2 is not None:
            for level in (self._v2.parent, self._v2):
                _make(level)
                if self._v2_limits:
                    _delegate(level, self._v2_limits)

    def sandboxes(self) -> set[str]:
        """Names of all groups below the parents."""
        names: set[str] = set()
        for top in (*self._v1.values(), *([self._v2] if self._v2 is not None else [])):
            with contextlib.suppress(FileNotFoundError):
                names.update(entry.name for entry in top.iterdir() if entry.is_dir())
        return names

    def freeze_all(self, deadline: float) -> bool:
        """Stop every sandbox, also those that are frozen already and those to come; False when
        that did not come about in time."""
        return _all(self.freezers, True, deadline)

    def thaw_all(self, deadline: float) -> bool:
        """Let them go on, but for those that are frozen by themselves."""
        return _all(self.freezers, False, deadline)

    def kill_all(self, deadline: float) -> list[int]:
        """End every process of every sandbox, frozen or not, before it does anything more;
        returns what would not die in time. The parents are thawed then."""

        def find() -> set[int]:
            return {pid for top in self.freezers for pid in members(top)}

        for top in self.freezers:
            with contextlib.suppress(FileNotFoundError):
                if (top / "cgroup.freeze").exists():
                    _write(top / "cgroup.kill", "1", optional=True)
                set_frozen(top, True)
        # While frozen nothing can fork away. On v1 the signals take effect at the thaw.
        _all(self.freezers, True, min(deadline, time.monotonic() + 0.05))
        processes.kill(find)
        for top in self.freezers:
            for level in (*_below(top), top):
                with contextlib.suppress(FileNotFoundError):
                    set_frozen(level, False)
        return processes.end(find, deadline)

    def remove(self) -> None:
        """Remove the parents if they are empty."""
        for top in (*self._v1.values(), *([self._v2] if self._v2 is not None else [])):
            with contextlib.suppress(OSError):
                top.rmdir()


class Cgroup:
    """The group of one sandbox."""

    def __init__(self, v1: dict[str, Path], v2: Path | None) -> None:
        self._v1 = v1
        self._v2 = v2

    @property
    def directories(self) -> list[Path]:
        """The directories a process has to join, one per hierarchy."""
        found = list(dict.fromkeys(self._v1.values()))
        return [*found, self._v2] if self._v2 is not None else found

    def exists(self) -> bool:
        """Whether any part of the group is there."""
        return any(directory.is_dir() for directory in self.directories)

    def create(self, limits: GroupLimits) -> None:
        """Make the group and set its limits."""
        for directory in self.directories:
            _make(directory)
        self.limit(limits)

    def limit(self, limits: GroupLimits) -> None:
        """Set limits. Raises HostUnfit when the kernel refuses them."""
        quota = max(1000, round(limits.cpus * _PERIOD_US))
        if (cpu := self._v1.get("cpu")) is not None:
            _write(cpu / "cpu.cfs_period_us", str(_PERIOD_US), optional=True)
            _write(cpu / "cpu.cfs_quota_us", str(quota), optional=True)
        if (pids := self._v1.get("pids")) is not None:
            _write(pids / "pids.max", str(limits.pids))
        if (memory := self._v1.get("memory")) is not None:
            self._limit_memory_v1(memory, limits.memory_bytes)
        if self._v2 is not None:
            _write(self._v2 / "cpu.max", f"{quota} {_PERIOD_US}", optional=True)
            _write(self._v2 / "pids.max", str(limits.pids), optional=True)
            _write(self._v2 / "memory.max", str(limits.memory_bytes), optional=True)
            # Without this a sandbox could double its limit by being swapped out.
            _write(self._v2 / "memory.swap.max", "0", optional=True)
            whole = "1" if limits.whole else "0"
            _write(self._v2 / "memory.oom.group", whole, optional=True)

    def change(self, limits: GroupLimits) -> None:
        """Set other limits of a running sandbox. Raises QuotaExceeded, changing nothing, when it
        holds more memory than that: the kernel would kill it."""
        used = self.memory_used()
        if used > limits.memory_bytes:
            raise QuotaExceeded(
                f"the sandbox holds {used} bytes of memory, more than the {limits.memory_bytes} "
                "it would be left"
            )
        self.limit(limits)

    def memory_used(self) -> int:
        """Bytes charged to the group; 0 where nobody counts them."""
        if (memory := self._v1.get("memory")) is not None:
            return int(_read(memory / "memory.usage_in_bytes").strip() or 0)
        if self._v2 is not None:
            return int(_read(self._v2 / "memory.current").strip() or 0)
        return 0

    def _limit_memory_v1(self, memory: Path, amount: int) -> None:
        both = memory / "memory.memsw.limit_in_bytes"
        single = memory / "memory.limit_in_bytes"
        # The kernel keeps single <= both at every moment, so the order depends on the direction.
        try:
            single.write_text(str(amount))
        except OSError:
            _write(both, str(amount), optional=True)
            _write(single, str(amount))
        _write(both, str(amount), optional=True)

    def pids(self) -> set[int]:
        """Processes in the group now."""
        found: set[int] = set()
        for directory in self.directories:
            with contextlib.suppress(FileNotFoundError):
                # ENODEV: the group was removed between opening and reading.
                try:
                    text = (directory / "cgroup.procs").read_text()
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise
                    continue
                found.update(int(line) for line in text.split())
        found.discard(0)  # a process of another pid namespace
        return found

    def memory_kills(self) -> int:
        """How many processes of the group the kernel killed for the memory limit."""
        files = []
        if (memory := self._v1.get("memory")) is not None:
            files.append(memory / "memory.oom_control")
        if self._v2 is not None:
            files.append(self._v2 / "memory.events")
        return sum(_counter(file, "oom_kill") for file in files)

    def freeze(self, deadline: float) -> bool:
        """Stop every process of the group; False when that did not come about in time."""
        self._set_frozen(True)
        return self._await_frozen(True, deadline)

    def thaw(self, deadline: float) -> bool:
        """Let them go on."""
        self._set_frozen(False)
        return self._await_frozen(False, deadline)

    def frozen(self) -> bool:
        """Whether all processes of the group are stopped."""
        if self._v2 is not None:
            return _counter(self._v2 / "cgroup.events", "frozen") == 1
        if (freezer := self._v1.get("freezer")) is not None:
            return _read(freezer / "freezer.state").strip() == "FROZEN"
        return False

    def _set_frozen(self, on: bool) -> None:
        if self._v2 is not None:
            _write(self._v2 / "cgroup.freeze", "1" if on else "0")
        elif (freezer := self._v1.get("freezer")) is not None:
            _write(freezer / "freezer.state", "FROZEN" if on else "THAWED")

    def _await_frozen(self, on: bool, deadline: float) -> bool:
        pause = 0.0002
        while self.frozen() != on:
            if time.monotonic() > deadline:
                return False
            if on and self._v2 is None:
                # The v1 freezer can stick half way; writing again makes it try again.
                self._set_frozen(True)
            time.sleep(pause)
            pause = min(pause * 2, 0.01)
        return True

    def kill(self, deadline: float, others: Callable[[], set[int]] = set) -> list[int]:
        """End every process of the group, and whatever `others` names each time it is asked;
        returns what would not die in time."""

        def find() -> set[int]:
            return self.pids() | others()

        if self._v2 is not None:
            with contextlib.suppress(FileNotFoundError):
                # One write kills all, forks in flight included, frozen or not (kernel 5.14).
                _write(self._v2 / "cgroup.kill", "1", optional=True)
        elif "freezer" in self._v1 and self.exists():
            self._kill_frozen()
        with contextlib.suppress(FileNotFoundError):
            self._thaw_leftover()
        return processes.end(find, deadline)

    def _kill_frozen(self) -> None:
        # While frozen nothing can fork, so no process escapes between listing and killing. The
        # signals take effect at the thaw.
        with contextlib.suppress(FileNotFoundError):
            self._set_frozen(True)
            self._await_frozen(True, time.monotonic() + 0.05)
        processes.kill(self.pids)

    def _thaw_leftover(self) -> None:
        tracked = self._v2 if self._v2 is not None else self._v1.get("freezer")
        if tracked is not None and tracked.is_dir():
            self._set_frozen(False)

    def remove(self, deadline: float) -> bool:
        """Remove the directories of an empty group; False when the kernel would not yet."""
        left = [directory for directory in self.directories if directory.is_dir()]
        pause = 0.0005
        while left:
            for directory in list(left):
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    left.remove(directory)
                except OSError as error:
                    if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                        raise
                    _remove_children(directory)
                else:
                    left.remove(directory)
            if left:
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        return True


def set_frozen(group: Path, on: bool) -> None:
    """Ask the kernel to stop everything in a group and below, or to let it go on, of whichever
    version it is. Raises FileNotFoundError when there is no such group."""
    unified = group / "cgroup.freeze"
    if unified.exists():
        _write(unified, "1" if on else "0")
    else:
        _write(group / "freezer.state", "FROZEN" if on else "THAWED")


def asked_to_freeze(group: Path) -> bool:
    """Whether `set_frozen` is in force for this very group."""
    return "1" in (
        _read(group / "cgroup.freeze").strip(),
        _read(group / "freezer.self_freezing").strip(),
    )


def is_frozen(group: Path) -> bool:
    """Whether everything in a group and below has stopped."""
    if (group / "cgroup.freeze").exists():
        return _counter(group / "cgroup.events", "frozen") == 1
    return _read(group / "freezer.state").strip() == "FROZEN"


def members(group: Path) -> set[int]:
    """Processes in a group and below."""
    found: set[int] = set()
    for level in (group, *_below(group)):
        found.update(int(line) for line in _read(level / "cgroup.procs").split())
    found.discard(0)  # a process of another pid namespace
    return found


def _below(group: Path) -> list[Path]:
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(os.scandir(group)):
            if entry.is_dir(follow_symlinks=False):
                found += [*_below(Path(entry.path)), Path(entry.path)]
    return found


def _all(groups: list[Path], on: bool, deadline: float) -> bool:
    pause = 0.0002
    left = list(groups)
    while left:
        for group in list(left):
            try:
                # Again each time: the v1 freezer can stick half way.
                set_frozen(group, on)
            except FileNotFoundError:
                left.remove(group)  # no sandbox was ever started, or none is left
            else:
                if is_frozen(group) == on:
                    left.remove(group)
        if left:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.01)
    return True


def _remove_children(directory: Path) -> None:
    # A sandbox's own processes may have made groups below theirs.
    with contextlib.suppress(OSError):
        for child in directory.iterdir():
            if child.is_dir():
                _remove_children(child)
                child.rmdir()


def _make(directory: Path) -> None:
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise HostUnfit(f"cannot make the cgroup {directory}: {error.strerror}") from error


def _delegate(level: Path, controllers: list[str]) -> None:
    """Hand controllers to the children of a v2 group."""
    wanted = [f"+{name}" for name in controllers]
    control = level / "cgroup.subtree_control"
    for attempt in range(3):
        try:
            # One by one: a refused one must not take the others with it.
            for word in wanted:
                control.write_text(word)
        except OSError as error:
            # A group other than the top one may not hold processes and hand down controllers.
            # It does where the server runs in a container: its processes move one level down.
            if error.errno != errno.EBUSY or attempt == 2:
                raise HostUnfit(
                    f"cannot enable cgroup controllers in {level}: {error.strerror}"
                ) from error
            _move_down(level)
        else:
            return


def _move_down(level: Path) -> None:
    child = level / "sojourn-host"
    _make(child)
    for line in (level / "cgroup.procs").read_text().split():
        # A process may have ended, and kernel threads cannot move; the next attempt tells.
        with contextlib.suppress(OSError):
            (child / "cgroup.procs").write_text(line)


def _write(file: Path, value: str, *, optional: bool = False) -> None:
    """Write a control file; an optional one may be missing (its controller is)."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(descriptor, value.encode())
    except OSError as error:
        if error.errno == errno.ENODEV:
            # The group was removed between opening and writing: as if it had not been there.
            if optional:
                return
            raise FileNotFoundError(errno.ENOENT, "the group is gone", str(file)) from error
        raise HostUnfit(f"the kernel refused {value!r} for {file}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the controller is missing, or the group is gone
        return ""


def _counter(file: Path, key: str) -> int:
    for line in _read(file).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
