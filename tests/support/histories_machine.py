"""What a server has on the machine, looked at from outside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from support.servers import ServerProcess

CGROUPS = Path("/sys/fs/cgroup")


class Machine:
    """The host as the server of one data directory uses it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.data = server.data
        digest = hashlib.blake2b(os.fsencode(self.data.resolve()), digest_size=6).hexdigest()
        self._scope = f"sojourn-{digest}"

    def sandbox_of(self, session: str) -> str | None:
        """The newest sandbox of a session that lies on the disk."""
        found = []
        for record in (self.data / "sandboxes").glob("*/record.json"):
            with contextlib.suppress(FileNotFoundError):
                value = json.loads(record.read_bytes())
                if value["session"] == session:
                    found.append((value["epoch"], value["sandbox"]))
        return max(found)[1] if found else None

    def parts(self, sandbox: str, part: str) -> list[int]:
        """Host processes of a sandbox: its kernels (`boot`) or file servers (`gofer`)."""
        found = []
        for pid, words in self._processes():
            names = [os.fsdecode(word) for word in words]
            if part in names and any(sandbox in name for name in names):
                found.append(pid)
        return found

    def kill(self, sandbox: str, part: str = "boot") -> int:
        """Kill parts of a sandbox; how many there were."""
        pids = self.parts(sandbox, part)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def _processes(self) -> list[tuple[int, list[bytes]]]:
        needle = os.fsencode(str(self.data))
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                line = (entry / "cmdline").read_bytes()
                if needle in line:
                    found.append((int(entry.name), line.split(b"\0")))
        return found

    def left(self, but: Collection[str] | None = None) -> list[str]:
        """What is on the machine though no session is: nothing, when all is well. While there are
        sessions, whose sandboxes are `but`, the store is theirs and not looked at."""
        server = self.server.pid if self.server.running else None
        found = [
            f"process {pid}: {b' '.join(words)[:200]!r}"
            for pid, words in self._processes()
            if pid != server and not _named(but, os.fsdecode(b" ".join(words)))
        ]
        mounted = Path("/proc/self/mounts").read_text().splitlines()
        found += [f"mount {line}" for line in mounted if str(self.data) in line]
        for top in [CGROUPS, *CGROUPS.glob("*")]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for entry in (top / self._scope).iterdir():
                    if entry.is_dir():
                        found.append(f"cgroup {entry}")
        found += [str(path) for path in (self.data / "sandboxes").iterdir()]
        found += [
            str(path)
            for path in (self.data / "gvisor").iterdir()
            if "sbx-" in path.name  # state files and sockets
        ]
        found = [one for one in found if not _named(but, one)]
        if but is None:
            for directory in ("snapshots", "images", "sealed"):
                found += [str(path) for path in (self.data / "store" / directory).iterdir()]
            found += [
                str(path)
                for path in (self.data / "store/layers").iterdir()
                if not (path / "source").exists()  # a template's
            ]
        for owner in (self.data / "store/staging").iterdir():
            if server is None or f"-{server}-" not in owner.name:
                found.append(str(owner))
            # What is thrown away goes with the next collection, for which there may be no cause.
            found += [
                str(path)
                for path in owner.iterdir()
                if but is None or not path.name.startswith("trash-")
            ]
        return found

    def check_empty(self, seconds: float = 15.0, but: Collection[str] | None = None) -> None:
        """Wait until nothing is left (see `left`); fails with what is."""

        def check() -> None:
            left = self.left(but)
            assert not left, "\n".join(left)

        await_true(check, seconds)


def _named(sandboxes: Collection[str] | None, text: str) -> bool:
    return any(sandbox in text for sandbox in sandboxes or ())


def await_true(check: Callable[[], None], seconds: float) -> None:
    """Wait until `check` raises nothing; what it raised last is the failure."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
