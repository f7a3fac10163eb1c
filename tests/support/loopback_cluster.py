"""A cluster on this machine's loopback, of the real commands: servers and nodes as processes.

Cheaper than `support.cluster`, whose machines have networks of their own: for what needs no
partitions. Each node has a data directory of its own, all one PostgreSQL and one object store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from sojourn.client import Sojourn
from support import prefork
from support.node_process import thaw
from support.postgres import PostgresServer
from support.servers import host_processes

_SECONDS = 60.0


class Program:
    """One `sojourn` command that serves."""

    def __init__(self, place: Path, arguments: list[str], variables: dict[str, str]) -> None:
        self.data = place
        self._log = place.parent / f"{place.name}.log"
        self._arguments = [*arguments, "--data", str(place)]
        self._variables = os.environ | variables
        self._process: prefork.Forked | None = None
        self.told = ""

    def start(self) -> str:
        """Start it; what it says when it is ready."""
        with self._log.open("ab") as log:
            self._process = prefork.parent.start(self._arguments, self._variables, log.fileno())
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"{self.data.name} is not ready: {self.log()}")
        self.told = line.split()[1]
        return self.told

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for its end; its exit code. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        with process.stdout:
            return process.wait(_SECONDS)

    def run(self, *arguments: str) -> str:
        """Another command with its environment; what it says."""
        done = prefork.run(*arguments, environment=self._variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


class LoopbackCluster:
    """PostgreSQL, servers `s1`, `s2`, ... and nodes `n1`, `n2`, ...; `lease` in seconds."""

    def __init__(self, place: Path, objects: Path, *, lease: float = 6.0) -> None:
        self.place = place
        self.token = secrets.token_urlsafe(32)
        self.servers: dict[str, Program] = {}
        self.nodes: dict[str, Program] = {}
        self.postgres = PostgresServer(place)
        self.postgres.start()
        key, token = place / "cluster.key", place / "token"
        key.write_bytes(os.urandom(32))
        token.write_text(self.token)
        self._variables = {
            "SOJOURN_DATABASE": self.postgres.url(self.postgres.create()),
            "SOJOURN_STORE": objects.as_uri(),
            "SOJOURN_NODE_LEASE": str(lease),
            "SOJOURN_CLUSTER_KEY_FILE": str(key),
            "SOJOURN_TOKEN_FILE": str(token),
        }

    def add_server(self, *options: str) -> Program:
        """Another server, started."""
        name = f"s{len(self.servers) + 1}"
        server = Program(self.place / name, ["server", *options], self._variables)
        self.servers[name] = server
        server.start()
        return server

    def add_node(self, *options: str) -> Program:
        """Another machine that joins and runs."""
        name = f"n{len(self.nodes) + 1}"
        node = Program(self.place / name, ["node", "run", *options], self._variables)
        with self.client() as client:
            made = client.nodes.token()
        told = ["--server", made.url, "--token", made.token]
        node.run("node", "join", *told, "--name", name, "--data", str(node.data))
        self.nodes[name] = node
        node.start()
        return node

    def client(self, server: str = "s1") -> Sojourn:
        """A client of a server."""
        return Sojourn(url=self.servers[server].told, token=self.token)

    def command(self, *arguments: str, server: str = "s1") -> Any:
        """A command that asks a server; its output."""
        variables = {"SOJOURN_URL": self.servers[server].told, "SOJOURN_TOKEN": self.token}
        done = prefork.run(*arguments, environment=os.environ | variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def crash(self, name: str) -> None:
        """The machine of a node is gone, with all that ran on it."""
        node = self.nodes[name]
        node.end()
        until = time.monotonic() + 30
        while left := host_processes(node.data):
            thaw(node.data)  # a frozen process does not end
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < until, f"processes of {name} do not end: {left}"

    def remove(self) -> None:
        """End all of it; nothing is left on this machine."""
        for server in self.servers.values():
            server.end()
        for name, node in self.nodes.items():
            self.crash(name)
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                point = line.split()[1]
                if point.startswith(f"{node.data}/"):
                    subprocess.run(["umount", "-l", point], check=False)
        self.postgres.remove()
