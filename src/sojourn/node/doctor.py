"""Whether this host can run Sojourn, found out by doing, not by guessing from versions.

Guarantee: every check that fails names its cure; a check that can be tried is tried for real (an
overlay is mounted, a sandbox is booted, put away and brought back), and leaves nothing behind. The
judging functions are pure over what a `Host` reports, so that each of their outcomes is tested.
"""

from __future__ import annotations

import enum
import fcntl
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import CDLL, create_string_buffer
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit, SojournError
from sojourn.node import mounts, smoke, tools
from sojourn.node.isolation import cgroups

MINIMUM_KERNEL = (5, 10)
MINIMUM_FREE_BYTES = 2 * 1024**3
COMFORTABLE_FREE_BYTES = 10 * 1024**3
MINIMUM_DESCRIPTORS = 4096
EARLIEST_TIME = 1704067200.0

_FICLONE = 0x40049409
_CLOCK_UNSYNCHRONISED = 5


class State(enum.StrEnum):
    """`note`: something optional is missing, and the detail says what that changes."""

    OK = "ok"
    FAILED = "failed"
    NOTE = "note"
    SKIPPED = "skipped"


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    name: str
    state: State
    detail: str
    cure: str = ""
    ms: float = 0.0


class Host:
    """What can be learned of this host; `data` is the directory sessions would be kept in."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def existing(self) -> Path:
        """The data directory, or the nearest directory above it that exists."""
        path = self.data.absolute()
        while not path.is_dir():
            path = path.parent
        return path

    def euid(self) -> int:
        return os.geteuid()

    def kernel(self) -> str:
        return os.uname().release

    def overlay(self) -> None:
        """Mount an overlay in the data directory and use it as layers are used."""
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=self.existing()) as name:
            directory = Path(name)
            for part in ("lower", "lower/tree", "upper", "work", "merged"):
                (directory / part).mkdir()
            (directory / "lower" / "file").touch()
            merged, upper = directory / "merged", directory / "upper"
            mounts.mount_overlay([directory / "lower"], upper, directory / "work", merged)
            try:
                (merged / "file").unlink()
                (merged / "tree").rmdir()
                (merged / "tree").mkdir()
            finally:
                mounts.unmount(merged)
            if (upper / "file").lstat().st_rdev != 0 or not (upper / "file").is_char_device():
                raise OSError("a removed file left no whiteout")
            if os.getxattr(upper / "tree", "trusted.overlay.opaque") != b"y":
                raise OSError("a replaced directory was not marked opaque")

    def runsc(self) -> str:
        path = tools.runsc_path()
        date, number = tools.runsc_version(path)
        return f"release {date}.{number} at {path}"

    def supervisor(self) -> str:
        return str(tools.supervisor_path())

    def templates(self) -> list[str]:
        return tools.template_names()

    def smoke(self) -> str:
        return smoke.run(self.existing())

    def limiting_controllers(self) -> frozenset[str]:
        found = cgroups.detect()
        return frozenset(found.v1) | found.v2_controllers

    def program(self, name: str) -> str | None:
        return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin")

    def reflink(self) -> bool:
        """Whether a file in the data directory can share its blocks with another."""
        with (
            tempfile.TemporaryFile(dir=self.existing()) as source,
            tempfile.TemporaryFile(dir=self.existing()) as target,
        ):
            source.write(bytes(65536))
            source.flush()
            try:
                fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
            except OSError:
                return False
            return True

    def file_system(self) -> tuple[str, str]:
        """Type and options of the data directory's file system."""
        path = self.existing().resolve()
        best = max(
            (m for m in mounts.read_mounts() if m.target == path or m.target in path.parents),
            key=lambda mount: (len(mount.target.parts), mount.id),
        )
        return best.type, best.super_options

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.existing()).free

    def unshare(self, *kinds: str) -> None:
        """Enter namespaces of the given kinds. Raises OSError with the kernel's words."""
        done = subprocess.run(
            ["unshare", "--fork", *(f"--{kind}" for kind in kinds), "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
        if done.returncode != 0:
            raise OSError(done.stderr.strip() or f"unshare ended with {done.returncode}")

    def now(self) -> float:
        return time.time()

    def clock_synchronised(self) -> bool:
        """The kernel's own word (adjtimex, asked without setting anything)."""
        state: int = CDLL(None).adjtimex(create_string_buffer(512))
        return state != _CLOCK_UNSYNCHRONISED

    def descriptors(self) -> int:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return 2**31 if hard == resource.RLIM_INFINITY else hard


Check = Callable[[Host], Finding]


def _ok(name: str, detail: str) -> Finding:
    return Finding(name, State.OK, detail)


def check_root(host: Host) -> Finding:
    if host.euid() == 0:
        return _ok("root", "running as root")
    return Finding(
        "root",
        State.FAILED,
        f"running as user {host.euid()}; mounts and namespaces need root",
        "Run the server, and this check, as root.",
    )


def check_kernel(host: Host) -> Finding:
    release = host.kernel()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and (int(numbers[1]), int(numbers[2])) >= MINIMUM_KERNEL:
        return _ok("kernel", f"Linux {release}")
    need = ".".join(map(str, MINIMUM_KERNEL))
    return Finding("kernel", State.FAILED, f"Linux {release}", f"Use Linux {need} or newer.")


def check_overlay(host: Host) -> Finding:
    kind, _ = host.file_system()
    try:
        host.overlay()
    except (OSError, SojournError) as error:
        return Finding(
            "overlay",
            State.FAILED,
            f"no overlay can be mounted on the {kind} of {host.data}: {_words(error)}",
            "Keep the data directory on ext4, xfs or btrfs (not on an overlay or a network "
            "file system), as root, with the kernel's overlay module.",
        )
    return _ok("overlay", f"works on the {kind} of {host.data}, with trusted attributes")


def check_runsc(host: Host) -> Finding:
    try:
        return _ok("runsc", host.runsc())
    except SojournError as error:
        return Finding("runsc", State.FAILED, error.message, error.next_step)


def check_supervisor(host: Host) -> Finding:
    try:
        return _ok("supervisor", host.supervisor())
    except SojournError as error:
        return Finding("supervisor", State.FAILED, error.message, error.next_step)


def check_template(host: Host) -> Finding:
    names = host.templates()
    if names:
        return _ok("template", ", ".join(names))
    return Finding("template", State.FAILED, "no template is built", tools.SETUP_CURE)


def check_cgroup(host: Host) -> Finding:
    missing = sorted({"cpu", "memory", "pids"} - host.limiting_controllers())
    if not missing:
        return _ok("cgroup", "cpu, memory and pids can be limited")
    return Finding(
        "cgroup",
        State.NOTE,
        f"no controller for {', '.join(missing)}: such limits of a session are not enforced",
        "Mount the control groups, or enable these controllers for the kernel.",
    )


def check_bubblewrap(host: Host) -> Finding:
    path = host.program("bwrap")
    if path:
        return _ok("bubblewrap", path)
    return Finding(
        "bubblewrap",
        State.NOTE,
        "not installed: the files-only driver cannot be used",
        "apt-get install bubblewrap",
    )


def check_reflink(host: Host) -> Finding:
    kind, _ = host.file_system()
    if host.reflink():
        return _ok("reflink", f"{kind}: copies of files share their blocks")
    return Finding(
        "reflink",
        State.NOTE,
        f"{kind} cannot share blocks: a live snapshot copies the files changed since the last",
        "For large files that change at every turn, keep the data directory on xfs or btrfs.",
    )


def check_quota(host: Host) -> Finding:
    kind, options = host.file_system()
    if {"prjquota", "pquota"} & set(options.split(",")):
        return _ok("project quota", f"{kind}: the kernel bounds a session's files")
    return Finding(
        "project quota",
        State.NOTE,
        f"{kind} is mounted without: a session's disk limit is checked from time to time",
        "Mount the data directory's file system with `prjquota` (xfs, ext4).",
    )


def check_space(host: Host) -> Finding:
    free = host.free_bytes()
    detail = f"{free / 1024**3:.1f} GiB free for {host.data}"
    if free >= COMFORTABLE_FREE_BYTES:
        return _ok("space", detail)
    state = State.NOTE if free >= MINIMUM_FREE_BYTES else State.FAILED
    return Finding(
        "space",
        state,
        f"{detail}; memory images and layers of sessions need room",
        f"Have {COMFORTABLE_FREE_BYTES // 1024**3} GiB free, or name another data directory.",
    )


def check_namespaces(host: Host) -> Finding:
    try:
        host.unshare("mount", "pid", "net", "ipc", "uts")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "namespaces",
            State.FAILED,
            f"namespaces cannot be made: {_words(error)}",
            "Run as root with CAP_SYS_ADMIN; inside a container, start it privileged.",
        )
    return _ok("namespaces", "mount, pid, net, ipc and uts can be made")


def check_user_namespaces(host: Host) -> Finding:
    try:
        host.unshare("user", "map-root-user")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "user namespaces",
            State.FAILED,
            f"not available, and sandboxes are confined by them: {_words(error)}",
            "Raise user.max_user_namespaces (sysctl); do not run inside a chroot.",
        )
    return _ok("user namespaces", "available")


def check_clock(host: Host) -> Finding:
    if host.now() < EARLIEST_TIME:
        return Finding(
            "clock",
            State.FAILED,
            f"the clock shows {time.strftime('%Y-%m-%d', time.gmtime(host.now()))}",
            "Set the clock: deadlines of sessions and leases of nodes depend on it.",
        )
    if not host.clock_synchronised():
        return Finding(
            "clock",
            State.NOTE,
            "not kept by a time service: with several nodes, leases need clocks that agree",
            "Run a time service (systemd-timesyncd, chrony) on every node.",
        )
    return _ok("clock", "set and kept by a time service")


def check_descriptors(host: Host) -> Finding:
    limit = host.descriptors()
    if limit >= MINIMUM_DESCRIPTORS:
        return _ok("descriptors", f"up to {limit} open files")
    return Finding(
        "descriptors",
        State.FAILED,
        f"at most {limit} open files",
        f"Raise the hard limit (ulimit -Hn, LimitNOFILE=) to {MINIMUM_DESCRIPTORS} or more.",
    )


def check_smoke(host: Host) -> Finding:
    try:
        return _ok("sandbox", host.smoke())
    except (OSError, SojournError) as error:
        # The next step of another error is meant for the user of a session.
        cure = error.next_step if isinstance(error, HostUnfit) else ""
        return Finding(
            "sandbox",
            State.FAILED,
            f"no sandbox could be booted, put away and brought back: {_words(error)}",
            cure or "Look at the kernel's log; try a newer runsc (SOJOURN_RUNSC).",
        )


CHECKS: tuple[Check, ...] = (
    check_root,
    check_kernel,
    check_namespaces,
    check_user_namespaces,
    check_overlay,
    check_runsc,
    check_supervisor,
    check_template,
    check_space,
    check_descriptors,
    check_clock,
    check_cgroup,
    check_bubblewrap,
    check_reflink,
    check_quota,
)


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, SojournError) else str(error)


def _timed(check: Check, host: Host) -> Finding:
    started = time.perf_counter()
    try:
        finding = check(host)
    except (OSError, SojournError, subprocess.SubprocessError) as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        finding = Finding(
            name,
            State.FAILED,
            f"the check itself could not be made: {_words(error)}",
            "Run it as root, with a data directory that can be written.",
        )
    return msgspec.structs.replace(finding, ms=round((time.perf_counter() - started) * 1000, 1))


def examine(host: Host, *, smoke: bool = True) -> list[Finding]:
    """Make every check. The sandbox is tried last, and only when what it needs is there."""
    findings = [_timed(check, host) for check in CHECKS]
    if not smoke:
        findings.append(Finding("sandbox", State.SKIPPED, "not tried"))
    elif not healthy(findings):
        findings.append(Finding("sandbox", State.SKIPPED, "not tried, since a check failed"))
    else:
        findings.append(_timed(check_smoke, host))
    return findings


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing that is required has failed."""
    return all(finding.state is not State.FAILED for finding in findings)
