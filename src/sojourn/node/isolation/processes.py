"""Host processes of a sandbox: starting commands for it, finding them, and ending them for good.

Guarantee: a command started here ends within its timeout, whatever it does, with its whole process
group; a process is only ever signalled through a descriptor of it, so that a recycled process id
never hits a stranger; a zombie counts as gone, because a host whose init does not reap would
otherwise keep a dead sandbox alive for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit

_VERSION_SECONDS = 20.0

# Joins the cgroups before anything else runs, so that nothing of the sandbox is ever outside.
# `$1` is the number of cgroup directories that follow; the command comes after them.
_ENTER = """n=$1; shift
while [ "$n" -gt 0 ]; do
    echo $$ > "$1/cgroup.procs" || exit 125
    shift; n=$((n - 1))
done
exec "$@"
"""

# All that a runtime command gets of the environment: nothing of the server's.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


class Finished(msgspec.Struct, frozen=True):
    """How a command ended. `status` is negative for a signal; `timed_out` when it was killed."""

    status: int
    timed_out: bool


def run(
    command: Sequence[str],
    *,
    cgroups: Sequence[Path] = (),
    output: Path | None = None,
    timeout: float,
) -> Finished:
    """Run a command in the cgroups, in a process group of its own, and wait for its end.

    Its output goes to a file, never to a pipe: what stays running afterwards would hold a pipe
    open, and the wait for its end would never return.
    """
    process = spawn(command, cgroups=cgroups, output=output)
    try:
        if await_end(process.pid, timeout):
            return Finished(process.wait(), False)
        return Finished(-signal.SIGKILL, True)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def await_end(pid: int, timeout: float) -> bool:
    """Wait for the end of a child; false when the time ran out.

    `Popen.wait` with a timeout looks every 50 ms, which would be a third of a sandbox's start.
    """
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(handle)


def spawn(
    command: Sequence[str],
    *,
    cgroups: Sequence[Path] = (),
    output: Path | None = None,
    errors: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command in the cgroups, apart from the caller's terminal and environment."""
    entered = ["/bin/sh", "-c", _ENTER, "sojourn", str(len(cgroups)), *map(str, cgroups), *command]
    sink = os.open(output or "/dev/null", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    try:
        return subprocess.Popen(
            entered,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink if errors is None else errors,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
            pass_fds=pass_fds,
        )
    finally:
        os.close(sink)


def reported_version(program: Path, next_step: str) -> str:
    """The first line a program prints for `--version`. Raises HostUnfit with the next step."""
    try:
        found = subprocess.run(
            [program, "--version"],
            capture_output=True,
            timeout=_VERSION_SECONDS,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HostUnfit(f"{program} cannot be run: {error}", next_step=next_step) from error
    return found.stdout.decode(errors="replace").partition("\n")[0].strip()


def state(pid: int) -> str | None:
    """The state letter of /proc/<pid>/stat; None when there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else None


def start_time(pid: int) -> int | None:
    """The start of a process in clock ticks since boot: with the id it names a process for good."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def parent(pid: int) -> int | None:
    """The parent's process id."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children(pid: int) -> list[int]:
    """The live children of a process."""
    return [other for other in all_pids() if parent(other) == pid and alive(other)]


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may itself hold blanks and parentheses.
    return text[text.rindex(")") + 2 :].split()


def is_first(pid: int) -> bool:
    """Whether the process is the first one of a pid namespace below this one."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                inner = line.split()[1:]
                return len(inner) > 1 and inner[-1] == "1"
    return False


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    return state(pid) not in (None, "Z", "X", "x")


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty for a kernel thread or one that is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [os.fsdecode(part) for part in raw.split(b"\0")[:-1]]


def all_pids() -> Iterator[int]:
    """Every process of this machine that can be seen."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def mentioning(words: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Live processes with one of the words as a whole argument (or after its `=`)."""
    wanted = set(words)
    for pid in all_pids():
        arguments = command_line(pid)
        for argument in arguments:
            if argument in wanted or argument.partition("=")[2] in wanted:
                if alive(pid):
                    yield pid, arguments
                break


def kill(find: Callable[[], Iterable[int]]) -> None:
    """Kill the processes that `find` names, once each.

    It is asked again once a descriptor of each is held: a number that was given to another process
    in between is not among its answers any more.
    """
    with contextlib.ExitStack() as stack:
        handles: dict[int, int] = {}
        for pid in find():
            with contextlib.suppress(OSError):  # it is gone
                handles[pid] = os.pidfd_open(pid)
                stack.callback(os.close, handles[pid])
        for pid in handles.keys() & set(find()):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handles[pid], signal.SIGKILL)


def reap(pid: int) -> None:
    """Take the exit status of a dead child of ours, so that it does not stay a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def end(find: Callable[[], Iterable[int]], deadline: float) -> list[int]:
    """Kill what `find` names until it names nothing alive; returns what would not die in time.

    `find` is asked again each time, because a process may have forked before it was hit.
    """
    pause = 0.0005
    while True:
        left = [pid for pid in find() if alive(pid)]
        if not left:
            return []
        kill(find)
        if time.monotonic() > deadline:
            return left
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
        for pid in left:
            if state(pid) == "Z" and parent(pid) == os.getpid():
                reap(pid)
