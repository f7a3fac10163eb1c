"""What the measures share: a server of their own, a bare sandbox beside it, and statistics.

Everything is timed by the caller's clock to the first useful command after the operation, and the
product and the bare runtime take turns in one process, so that both see the same machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sojourn.client import Session, Sojourn
from sojourn.node import tools
from sojourn.node.isolation import processes

UP = (sys.executable, "-m", "sojourn.cli.main", "up")


@dataclass
class Row:
    """One line of the table. Times in milliseconds unless `unit` says otherwise."""

    measure: str
    ours: float
    bare: float | None
    target: str
    unit: str = "ms"
    reached: bool | None = None
    note: str = ""
    samples: list[float] = field(default_factory=list)
    others: dict[str, float] = field(default_factory=dict)  # further columns: rivals, variants

    @property
    def ratio(self) -> float | None:
        """Ours by bare, or by the best of the rivals where `bare` names that."""
        return None if not self.bare else self.ours / self.bare


def timed(work: Callable[[], object]) -> float:
    """Milliseconds it takes."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def median(samples: list[float]) -> float:
    """The median."""
    return statistics.median(samples)


@contextlib.contextmanager
def server(settings: dict[str, str] | None = None) -> Iterator[tuple[Sojourn, Path]]:
    """A server on a directory of its own, with further environment variables; all sessions are
    deleted at the end."""
    directory = Path(tempfile.mkdtemp(prefix="sojourn-bench-"))
    data = directory / "data"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*UP, "--data", str(data), "--listen", "127.0.0.1:0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | (settings or {}),
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit(f"the server did not start: {(directory / 'log').read_text()[-2000:]}")
        token = (data / "token").read_text().strip()
        with Sojourn(url=line.split()[1], token=token) as client:
            try:
                yield client, data
            finally:
                for session in client.sessions.list():
                    session.delete()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        process.stdout.close()
        shutil.rmtree(directory)


@contextlib.contextmanager
def session(client: Sojourn, **options: object) -> Iterator[Session]:
    """A session without automatic snapshots unless asked, deleted at the end."""
    options.setdefault("policy", {"auto_snapshot": "off"})
    made = client.sessions.create(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.delete()


class Bare:
    """The runtime by hand: overlay mount, runsc command line, nothing else."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="sojourn-bare-"))
        self._runsc = [
            str(tools.runsc_path()),
            "--root",
            str(self.directory / "run"),
            "--ignore-cgroups",
            "--platform=systrap",
            "--network=none",
            "--net-disconnect-ok",
            "--overlay2=none",
        ]
        self._count = 0
        self._live: set[str] = set()
        self._mounts: list[Path] = []

    def runsc(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """One command, with files for its output as detached sandboxes need."""
        with (self.directory / "out").open("wb") as out:
            return subprocess.run(
                [*self._runsc, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=check,
                timeout=120,
            )

    def bundle(self, argv: list[str], lower: str) -> tuple[str, Path, Path]:
        """A new sandbox's name, bundle and upper over the given lower directories."""
        self._count += 1
        name = f"bare{self._count:06d}"
        place = self.directory / name
        for part in ("upper", "work", "root", "bundle"):
            (place / part).mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, f"{place}/root"], check=True
        )
        self._mounts.append(place / "root")
        (place / "bundle" / "config.json").write_text(
            json.dumps(
                {
                    "ociVersion": "1.0.2",
                    "process": {
                        "user": {"uid": 0, "gid": 0},
                        "args": argv,
                        "env": ["PATH=/usr/bin:/bin"],
                        "cwd": "/",
                    },
                    "root": {"path": str(place / "root")},
                    "hostname": "bare",
                    "mounts": [
                        {"destination": "/proc", "type": "proc", "source": "proc"},
                        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
                    ],
                    "linux": {
                        "namespaces": [
                            {"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")
                        ]
                    },
                }
            )
        )
        return name, place / "bundle", place / "upper"

    def start(self, argv: list[str] | None = None) -> tuple[str, Path]:
        """`runsc run`; the name and the upper."""
        lower = str(tools.template_root("debian"))
        name, bundle, upper = self.bundle(argv or ["/bin/sleep", "infinity"], lower)
        self._live.add(name)
        self.runsc("run", "-detach", "-bundle", str(bundle), name)
        return name, upper

    def restore(self, image: Path, upper: Path, argv: list[str]) -> str:
        """`runsc restore` over a sealed upper."""
        lower = f"{upper}:{tools.template_root('debian')}"
        name, bundle, _ = self.bundle(argv, lower)
        self._live.add(name)
        self.runsc("restore", "-detach", "-bundle", str(bundle), "-image-path", str(image), name)
        return name

    def checkpoint(self, name: str, *, leave: bool = False) -> Path:
        """`runsc checkpoint` without compression."""
        image = Path(tempfile.mkdtemp(dir=self.directory))
        more = ["-leave-running"] if leave else []
        self.runsc("checkpoint", *more, "-compression=none", "-image-path", str(image), name)
        return image

    def exec(self, name: str, *argv: str) -> None:
        """`runsc exec`."""
        self.runsc("exec", name, *argv)

    def end(self, name: str) -> None:
        """Remove one sandbox."""
        self.runsc("delete", "-force", name, check=False)
        self._live.discard(name)

    def close(self) -> None:
        """Remove everything."""
        for name in sorted(self._live):
            self.end(name)
        for mount in self._mounts:
            subprocess.run(["umount", "-l", str(mount)], check=False)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    """A bare runtime, removed at the end."""
    runtime = Bare()
    try:
        yield runtime
    finally:
        runtime.close()


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process: shared pages are counted by share."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0


def processes_naming(path: Path) -> list[int]:
    """Host processes whose command line names a path."""
    return [
        pid
        for pid in processes.all_pids()
        if pid != os.getpid() and any(str(path) in word for word in processes.command_line(pid))
    ]
