"""What runsc leaves on the host: its state directory, its logs, its version.

Guarantee: the directory given to runsc is short enough for a unix socket below it, wherever the
data directory lies; state files are named exactly, never by prefix.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from sojourn.errors import HostUnfit
from sojourn.node.isolation import processes

# A unix socket's path has at most 107 bytes; `/runsc-<id>.sock` takes 40 of them.
_LONGEST = 64
_STATE_NAME = re.compile(r"(?P<id>.+?)_sandbox:(?P=id)\.(state|lock)\Z")


def open_state(state: Path) -> Path:
    """Make the state directory and return the path to give to runsc."""
    state.mkdir(parents=True, exist_ok=True, mode=0o711)
    path = state.resolve()
    if len(os.fsencode(path)) <= _LONGEST:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    parent = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    _forget_stale(parent)
    link = parent / f"sojourn-{digest}"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(path)
    if not link.is_symlink() or link.resolve() != path:
        raise HostUnfit(f"{link} stands in the way of a short name for {path}")
    return link


def _forget_stale(parent: Path) -> None:
    """Remove the short names of state directories that are gone: killed servers left them."""
    for link in parent.glob("sojourn-*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def close_state(path: Path) -> None:
    """Give up the short name, when no sandbox uses it any more."""
    if path.is_symlink() and not known_sandboxes(path):
        path.unlink(missing_ok=True)


def version(runsc: Path) -> str:
    """The version runsc reports."""
    first = processes.reported_version(runsc, "Run `sojourn setup`, or set SOJOURN_RUNSC.")
    return first.removeprefix("runsc version").strip() or "unknown"


def state_files(state: Path, sandbox: str) -> list[Path]:
    """The files of one sandbox that exist."""
    names = (
        f"{sandbox}_sandbox:{sandbox}.state",
        f"{sandbox}_sandbox:{sandbox}.lock",
        f"runsc-{sandbox}.sock",
    )
    return [path for path in (state / name for name in names) if os.path.lexists(path)]


def remove_state_files(state: Path, sandbox: str) -> None:
    """Remove them; the processes must be gone."""
    for path in state_files(state, sandbox):
        path.unlink(missing_ok=True)


def known_sandboxes(state: Path) -> set[str]:
    """The sandboxes the directory tells of."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        for entry in state.iterdir():
            if matched := _STATE_NAME.match(entry.name):
                found.add(matched["id"])
            elif entry.name.startswith("runsc-") and entry.name.endswith(".sock"):
                found.add(entry.name.removeprefix("runsc-").removesuffix(".sock"))
    return found


def recorded_pids(state: Path, sandbox: str) -> set[int]:
    """Process ids in the state file; they may be of the past."""
    try:
        record = json.loads((state / f"{sandbox}_sandbox:{sandbox}.state").read_bytes())
    except (OSError, ValueError):
        return set()
    if not isinstance(record, dict):
        return set()
    inner = record.get("sandbox")
    pids = (record.get("goferPid"), inner.get("pid") if isinstance(inner, dict) else None)
    return {pid for pid in pids if isinstance(pid, int) and pid > 1}


def bundle_of(arguments: list[str]) -> Path | None:
    """The bundle directory a runsc process was started with."""
    for index, argument in enumerate(arguments):
        if argument.startswith(("--bundle=", "-bundle=")):
            return Path(argument.partition("=")[2])
        if argument in ("--bundle", "-bundle") and index + 1 < len(arguments):
            return Path(arguments[index + 1])
    return None


def telling_line(log: str) -> str | None:
    """The line of a log that says why: a panic's first line, else the last error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("panic:", "fatal error:", "runtime:", "SIGSEGV", "unexpected fault")):
            return line
    for line in reversed(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                message = json.loads(line).get("msg")
                if isinstance(message, str) and message:
                    return message.strip().partition("\n")[0][:500]
        matched = re.search(r"(?:FATAL ERROR|error|ERROR)[:\s].*", line)
        if matched:
            return matched[0]
    return lines[-1] if lines else None


def all_tasks_stopped(stacks: str) -> bool:
    """Whether a dump of the kernel's goroutines shows every task of the guest at a stop."""
    tasks = [part for part in stacks.split("\n\n") if "kernel.(*Task).run(" in part]
    return bool(tasks) and all("kernel.(*Task).doStop(" in part for part in tasks)
