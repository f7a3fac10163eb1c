"""A real server in a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sojourn.client import Sojourn
from sojourn.node.isolation import processes
from sojourn.store.layers import SHORT
from support import prefork

UP = (sys.executable, "-m", "sojourn.cli.main", "up")


class ServerProcess:
    """Starts, kills and stops `sojourn up` on one data directory. Without `store` there is no
    object store, which most tests have no use for and every fresh one would get the template.
    It is forked from a process that has loaded it (see `prefork`) unless `whole`: the command."""

    def __init__(self, data: Path, store: str = "none", *, whole: bool = False) -> None:
        self.data = data
        self.store = store
        self.url = ""
        self._whole = whole
        self._log = data.parent / f"{data.name}.log"
        self._process: subprocess.Popen[str] | prefork.Forked | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def token(self) -> str:
        return (self.data / "token").read_text().strip()

    def client(self, token: str | None = None) -> Sojourn:
        return Sojourn(url=self.url, token=token or self.token)

    def start(self, **environment: str) -> Sojourn:
        """Start; raises with the log when it does not become ready."""
        place = ["--data", str(self.data), "--listen", "127.0.0.1:0"]
        variables = os.environ | {"SOJOURN_STORE": self.store} | environment
        if not self._whole:
            templates.lay(self.data, variables)
        with self._log.open("ab") as log:
            if self._whole:
                self._process = subprocess.Popen(
                    [*UP, *place],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=variables,
                )
            else:
                self._process = prefork.parent.start(["up", *place], variables, log.fileno())
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
            raise RuntimeError(f"no ready line, exit {self.wait()}: {self.log()}")
        self.url = line.split()[1]
        if not self._whole:
            templates.keep(self.data, variables)
        return self.client()

    def log(self, length: int = 4000) -> str:
        return self._log.read_text(errors="replace")[-length:]

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self._process is not None:
            self._process.kill()
            self.wait()

    def wait(self, timeout: float = 60) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        code = self._process.wait(timeout=timeout)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None
        return code

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """SIGTERM, as an operator."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def restart(self, **environment: str) -> Sojourn:
        """Kill and start again."""
        self.kill()
        return self.start(**environment)

    def left(self) -> list[int]:
        """Host processes that belong to the data directory, the server itself aside."""
        return host_processes(self.data)

    def unmount(self) -> None:
        """Unmount everything below the data directory, as the end of a machine would."""
        below = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for point in sorted(below, reverse=True):
            if point.startswith(f"{self.data}/"):
                subprocess.run(["umount", "-l", point], check=False)

    def remove(self, **environment: str) -> None:
        """Delete every session, stop, and check that nothing is left on the machine."""
        if not self.running:
            self.start(**environment)
        client = self.client()
        for session in client.sessions.list():
            session.delete()
        self.stop()
        left = host_processes(self.data)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left: {left}"
        assert str(self.data) not in Path("/proc/self/mounts").read_text()


class Templates:
    """What a server wrote down of the host's templates, given to the next new data directory.

    Reading a template's thousands of files is half of the first start on a directory; with this
    it is a look at each, as in any later start. Tests of the first start itself run it `whole`.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[Path, bytes]] = {}

    def lay(self, data: Path, environment: dict[str, str]) -> None:
        """Put it into a directory that no server has used."""
        kept = self._kept.get(self._host(environment))
        if kept is not None and not data.exists():
            data.mkdir(mode=0o700)
            for name, content in kept.items():
                place = data / "store" / name
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                place.write_bytes(content)

    def keep(self, data: Path, environment: dict[str, str]) -> None:
        """Keep that of the first server that is ready."""
        host, store = self._host(environment), data / "store"
        if host in self._kept:
            return
        notes = list((store / "templates").iterdir())
        layers = [store / "layers" / note.read_text()[:SHORT] for note in notes]
        files = [*notes, *(file for layer in layers for file in layer.iterdir())]
        kept = {file.relative_to(store): file.read_bytes() for file in files}
        self._kept[host] = kept

    @staticmethod
    def _host(environment: dict[str, str]) -> str:
        return "\n".join(
            environment.get(name, "") for name in ("SOJOURN_HOME", "SOJOURN_TEMPLATE_DIR")
        )


templates = Templates()


def host_processes(data: Path) -> list[int]:
    """Host processes whose command line names the data directory."""
    return [
        pid
        for pid in processes.all_pids()
        if pid != os.getpid() and any(str(data) in word for word in processes.command_line(pid))
    ]


def eventually(condition, timeout: float = 20.0, every: float = 0.05):  # type: ignore[no-untyped-def]
    """The condition's first true value; fails when it does not come."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} did not come true in {timeout} s, last {value!r}")
        time.sleep(every)
