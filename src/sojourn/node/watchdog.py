"""`python -m sojourn.node.watchdog FILE GROUP...`: freezes sandboxes when the lease is over.

Guarantee: past the deadline in the lease file no sandbox of the node runs on, whatever the node's
own process does: it may be stopped, hung, killed or the whole machine asleep. Renewed, they go on;
what was frozen by itself stays so. That is why this is a process of its own, apart from the node's
signals and before everything else on the processor: it starts with the node, and ends when no node
is there and no sandbox is left.

Two locks tell who is there: the node holds the lease file, the watchdog the file beside it
(`.watchdog`, with its process id). It takes the node's lock for its last look, so a node that
starts meanwhile waits for its end and never relies on one that is just leaving. What it does
stands in `.log` beside the file, a JSON object a line.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from sojourn.errors import HostUnfit
from sojourn.node.isolation.cgroups import asked_to_freeze, is_frozen, members, set_frozen
from sojourn.node.isolation.processes import ENVIRONMENT, start_time
from sojourn.wire.lease_file import LeaseFile, LeaseWriter, now

_MODULE = "sojourn.node.watchdog"
# A deadline that moved nearer, and the end of the node, are seen this late; deadlines are not.
_LOOK_SECONDS = 0.5
_FREEZE_SECONDS = 0.25
_START_SECONDS = 20.0
_MOST_LOG = 1 << 20
_TFD_TIMER_ABSTIME = 1
_MCL_CURRENT_AND_FUTURE = 3


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(f"{file.name}.{suffix}")


# -- the node's side ----------------------------------------------------------------------------


class Watchdog:
    """A node's own watchdog. `groups` are `CgroupTree.freezers`, which need not exist yet.

    Used by one thread at a time. Blocks for milliseconds, `start` for as long as a process needs
    to come up.
    """

    def __init__(self, path: Path, groups: Sequence[Path]) -> None:
        self.path = path
        self.groups = list(groups)
        self._file: LeaseWriter | None = None
        self._pid: int | None = None
        self._handle = -1

    def start(self) -> None:
        """Take over the watchdog that an earlier node left, or start one. What holds already stays.

        Raises HostUnfit when another node has the file or this host can freeze nothing, and
        StorageFull.
        """
        if self._file is not None:
            return
        if not self.groups:
            raise HostUnfit(
                "this host has no cgroup freezer, so a node here could not be kept from acting"
                " without its lease",
                next_step="Mount the freezer hierarchy, or cgroup v2.",
            )
        file = LeaseWriter(self.path)
        try:
            _await_lock(file.descriptor, self.path)
            if not self._adopt():
                self._spawn()
            self._file = file
        except BaseException:
            file.close()
            raise

    @property
    def pid(self) -> int | None:
        """The watchdog's process, while it lives."""
        return self._pid if self._alive() else None

    @property
    def deadline(self) -> int:
        """Until when the node may act, as it was last held."""
        return self._opened().deadline()

    def hold(self, deadline: int) -> None:
        """The node may act until then (CLOCK_BOOTTIME, nanoseconds). Sandboxes that were frozen go
        on within half a second, or with `thaw`. Raises StorageFull, HostUnfit: then the deadline
        before counts."""
        file = self._opened()
        if not self._alive() and not self._adopt():
            self._spawn()  # nothing is held without one
        file.write(deadline)

    def expire(self) -> None:
        """The node may not act any more: everything is frozen at once."""
        self._opened().write(0)
        for group in self.groups:
            with contextlib.suppress(FileNotFoundError):
                set_frozen(group, True)
        self._wake()

    def thaw(self) -> None:
        """Let sandboxes go on now, where the deadline allows it."""
        file = self._opened()
        if now() < file.deadline():
            for group in self.groups:
                with contextlib.suppress(FileNotFoundError):
                    set_frozen(group, False)
        # It may be about to freeze by what it read before; it looks again after that.
        self._wake()

    def close(self) -> None:
        """The node is done. The watchdog stays for as long as sandboxes do. Idempotent."""
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        self._wake()
        self._forget()

    def _opened(self) -> LeaseWriter:
        if self._file is None:
            raise RuntimeError("the watchdog was not started")
        return self._file

    def _alive(self) -> bool:
        return self._handle >= 0 and not _readable(self._handle, 0)

    def _wake(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGUSR1)

    def _adopt(self) -> bool:
        """Whether a watchdog is there that an earlier node started."""
        place = _beside(self.path, "watchdog")
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            with place.open("rb") as file:
                if _try_lock(file.fileno(), fcntl.LOCK_SH):
                    return False  # nobody holds it
                pid, began, *groups = file.read().decode().split("\n")
            handle = os.pidfd_open(int(pid))
            if str(start_time(int(pid))) == began:
                self._keep(int(pid), handle)
                if groups == [str(group) for group in self.groups]:
                    return True
                # The host's hierarchies are others now.
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _readable(handle, _START_SECONDS)
            else:
                os.close(handle)
        return False

    def _spawn(self) -> None:
        with _log_file(self.path) as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self.path), *map(str, self.groups)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=ENVIRONMENT | _python_environment(),
                cwd="/",
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as said:
            ready = _readable(said.fileno(), _START_SECONDS) and said.read(1)
        if not ready:
            process.kill()
            process.wait()
            raise HostUnfit(
                "the watchdog of the node's lease does not start",
                next_step=f"{_beside(self.path, 'log')} tells more.",
            )
        self._keep(process.pid, os.pidfd_open(process.pid))
        # It leaves no zombie should it end before the node.
        threading.Thread(target=process.wait, name="watchdog", daemon=True).start()

    def _keep(self, pid: int, handle: int) -> None:
        self._forget()
        self._pid, self._handle = pid, handle

    def _forget(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._pid = -1, None


def _python_environment() -> dict[str, str]:
    """What the interpreter needs to find this package where it was found."""
    return {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONHOME") if name in os.environ}


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _log_file(file: Path) -> BinaryIO:
    place = _beside(file, "log")
    with contextlib.suppress(FileNotFoundError):
        if place.stat().st_size > _MOST_LOG:
            place.replace(_beside(file, "log.old"))
    return place.open("ab")


def _await_lock(descriptor: int, path: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while not _try_lock(descriptor, fcntl.LOCK_EX):
        # A watchdog that looks around for the last time lets go in a moment.
        if time.monotonic() > end:
            raise HostUnfit(
                f"another node holds the lease file {path}",
                next_step="Stop it, or give this one another data directory.",
            )
        time.sleep(0.01)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- the process --------------------------------------------------------------------------------


class _Guard:
    """What the process does, again and again."""

    def __init__(self, file: Path, groups: Sequence[Path]) -> None:
        self._path = file
        self._file = LeaseFile(file)
        self._groups = groups
        self._frozen = any(asked_to_freeze(group) for group in groups)

    def look(self) -> int:
        """Do what the deadline says; answers when to look again at the latest."""
        deadline = self._file.deadline()
        if now() < deadline:
            if self._frozen:
                self._set(False)
                self._say("thawed", deadline)
        else:
            fresh, self._frozen = not self._frozen, True
            done = self._freeze()
            if fresh:
                self._say("frozen" if done else "freezing", deadline)
            deadline = self._file.deadline()
            if now() < deadline:
                return 0  # it was renewed meanwhile
        later = now() + int(_LOOK_SECONDS * 1e9)
        return min(later, deadline) if now() < deadline else later

    def _set(self, on: bool) -> None:
        for group in self._groups:
            with contextlib.suppress(FileNotFoundError):
                set_frozen(group, on)
        self._frozen = on

    def _freeze(self) -> bool:
        """Freeze, until it is so, or it is renewed, or it takes too long and is tried later."""
        end = time.monotonic() + _FREEZE_SECONDS
        while True:
            self._set(True)
            if all(is_frozen(group) or not group.exists() for group in self._groups):
                return True
            if time.monotonic() > end or now() < self._file.deadline():
                return False
            time.sleep(0.001)

    def done(self) -> bool:
        """Whether there is no node and no sandbox. The node's lock is held then, until the end of
        this process."""
        self._lock = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        if _try_lock(self._lock, fcntl.LOCK_EX) and not any(map(members, self._groups)):
            # A later node finds its groups as it would have made them.
            self._set(False)
            self._say("ended", self._file.deadline())
            return True
        os.close(self._lock)
        return False

    def _say(self, event: str, deadline: int) -> None:
        late = (now() - deadline) / 1e9 if deadline else None
        _say(event, late_seconds=late if event.startswith("f") else None)


def _say(event: str, **facts: object) -> None:
    with contextlib.suppress(OSError):  # a full disk keeps nobody from freezing
        line = json.dumps({"time": time.time(), "event": event, "pid": os.getpid(), **facts})
        os.write(sys.stderr.fileno(), line.encode() + b"\n")


def _stand_apart() -> None:
    """Be neither ended with the node, nor killed for memory, nor kept from the processor."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # without real-time share in its control group
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
    # What it needs is not to be read from a disk that does not answer.
    ctypes.CDLL(None).mlockall(_MCL_CURRENT_AND_FUTURE)


def _sleeper() -> Callable[[int], None]:
    """Sleeps until a time of CLOCK_BOOTTIME, which also the sleep of the machine ends, or until
    SIGUSR1."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer = libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
    if timer < 0:
        raise OSError(ctypes.get_errno(), "there is no timer")
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def sleep(until: int) -> None:
        # One that is past fires at once; zero would disarm it.
        seconds, rest = divmod(max(until, 1), 1_000_000_000)
        libc.timerfd_settime(timer, _TFD_TIMER_ABSTIME, struct.pack("@4l", 0, 0, seconds, rest), 0)
        select.select([timer, woken], [], [])
        for descriptor in (timer, woken):
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 4096)

    return sleep


def main(arguments: Sequence[str]) -> None:
    """Guard until there is nothing to guard any more."""
    file, groups = Path(arguments[0]), [Path(group) for group in arguments[1:]]
    _stand_apart()
    place = os.open(_beside(file, "watchdog"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _try_lock(place, fcntl.LOCK_EX):
        _say("refused", cause="there is another one")
        return
    facts = "\n".join([str(os.getpid()), str(start_time(os.getpid())), *map(str, groups)])
    os.ftruncate(place, 0)
    os.pwrite(place, facts.encode(), 0)
    guard, sleep = _Guard(file, groups), _sleeper()
    _say("watching")
    os.write(sys.stdout.fileno(), b"r")
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    while True:
        again = guard.look()
        if guard.done():
            return
        sleep(again)


if __name__ == "__main__":
    main(sys.argv[1:])
