"""A whole cluster for tests: PostgreSQL, an S3 server, servers and nodes, each in its own network
namespace with its own addresses.

    with Cluster(directory, nodes=3, servers=2) as cluster:
        client = cluster.client()                 # through the first server
        session = client.sessions.create()
        cluster.nodes["n1"].kill()                # the node's process; its sandboxes go on
        cluster.nodes["n1"].crash()               # the whole machine
        cluster.nodes["n2"].stop()                # SIGSTOP
        cluster.nodes["n2"].machine.cut("db")     # a partition

Whatever it starts is gone with the `with`, sandboxes and mounts too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from sojourn.client import Sojourn
from support.networks import Machine, Networks
from support.object_stores import ACCESS_KEY, SECRET_KEY, S3Server
from support.postgres import PostgresServer
from support.servers import host_processes

T = TypeVar("T")

COMMAND = (sys.executable, "-m", "sojourn.cli.main")
PORTS = 8000
"""Where each server listens for exposed ports."""
PREFIXES = {"db": "10.81.1", "s3": "10.81.2", "net": "10.81.3"}
_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Before a command: it ends with the test's process, however that ends."""


class Process:
    """One of the cluster's own programs on its machine."""

    def __init__(self, name: str, machine: Machine, data: Path, variables: dict[str, str]) -> None:
        self.name = name
        self.machine = machine
        self.data = data
        self._variables = variables
        self._log = data.parent / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        """What runs."""
        raise NotImplementedError

    def start(self) -> str:
        """Start it and wait until it is ready; what it said."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_WITH_US, *self.machine.inside, *COMMAND, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self._variables,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready"):
            self.kill()
            raise RuntimeError(f"{self.name} is not ready: {self.log()}")
        return line.strip()

    def log(self, length: int = 6000) -> str:
        """The end of what it logged."""
        return self._log.read_text(errors="replace")[-length:]

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP: it does nothing any more and does not know."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL of this process alone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, as an operator; its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            code = process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
        return code


class Server(Process):
    """`sojourn server`."""

    url = ""
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        address = self.machine.addresses["net"]
        listen = ["--listen", f"{address}:8080", "--nodes-listen", f"{address}:8443"]
        return ["server", "--data", str(self.data), *listen, *self.options]

    def start(self) -> str:
        said = super().start()
        self.url = said.split()[1]
        return said


class Node(Process):
    """`sojourn node run`."""

    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        where = f"{self.machine.addresses['net']}:8444"
        return ["node", "run", "--data", str(self.data), "--listen", where, *self.options]

    def join(self, told: str) -> None:
        """Join with the words that `sojourn node token` shows."""
        command = [*told.split()[1:], "--name", self.name, "--data", str(self.data)]
        done = subprocess.run(
            [*self.machine.inside, *COMMAND, *command],
            env=os.environ | self._variables,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name} does not join: {done.stderr}")

    def crash(self) -> None:
        """The machine is gone: no process of it is left, not even those that survive the node."""
        self.kill()
        deadline = time.monotonic() + 30
        while left := host_processes(self.data):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of {self.name} do not end: {left}")
            time.sleep(0.05)

    def unmount(self) -> None:
        """Undo every mount below its directory."""
        points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for point in sorted(points, reverse=True):
            if point.startswith(f"{self.data}/"):
                subprocess.run(["umount", "-l", point], check=False)


class Cluster:
    """See the module."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 3,
        servers: int = 1,
        lease: float = 4.0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.servers: dict[str, Server] = {}
        self.nodes: dict[str, Node] = {}
        self.lease = lease
        self._counts = nodes, servers
        self._more = dict(variables or {})
        self._stack = contextlib.ExitStack()
        self._token = secrets.token_urlsafe(32)

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        self.networks = stack.enter_context(Networks(PREFIXES))
        middle = self.networks.middle
        self.postgres = PostgresServer(
            self.directory,
            durable=True,
            inside=middle.inside,
            address=f"{PREFIXES['db']}.1",
            trusted="10.81.0.0/16",
        )
        stack.callback(self.postgres.remove)
        self.postgres.start()
        self.database = self.postgres.create()
        self.s3 = stack.enter_context(
            S3Server.running(inside=middle.inside, address=f"{PREFIXES['s3']}.1")
        )
        with self.networks.entered():
            self.bucket = self.s3.make_bucket()
        key, token = self.directory / "cluster.key", self.directory / "token"
        key.write_bytes(os.urandom(32))
        token.write_text(self._token)
        shared = {
            "SOJOURN_NODE_LEASE": str(self.lease),
            "SOJOURN_DATABASE": self.postgres.address_url(self.database),
            "SOJOURN_STORE": f"s3://{self.bucket}/sojourn",
            "SOJOURN_STORE_KEY": "a secret of the object store",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.s3.url,
            **self._more,
        }
        of_servers = {
            "SOJOURN_CLUSTER_KEY_FILE": str(key),
            "SOJOURN_TOKEN_FILE": str(token),
            "SOJOURN_PORTS_ADDRESS": f"0.0.0.0:{PORTS}",
        }
        node_count, server_count = self._counts
        # Processes end with the thread that started them: it stays until they are gone.
        pool = stack.enter_context(ThreadPoolExecutor())
        # The first server makes the cluster; everything else starts at once.
        for number in range(1, server_count + 1):
            machine = self.networks.machine("db", "net")
            name = f"s{number}"
            server = Server(name, machine, self.directory / name, shared | of_servers)
            self.servers[name] = server
            stack.callback(server.kill)
        first, *others = self.servers.values()
        first.start()
        nodes = [self._node(f"n{number}", shared, stack) for number in range(1, node_count + 1)]
        starts = [*(other.start for other in others), *(partial(self._join, one) for one in nodes)]
        for start in [pool.submit(start) for start in starts]:
            start.result()

    def _node(self, name: str, variables: dict[str, str], stack: contextlib.ExitStack) -> Node:
        """A new machine."""
        machine = self.networks.machine("db", "s3", "net")
        node = Node(name, machine, self.directory / name, variables)
        self.nodes[name] = node
        stack.callback(node.unmount)
        stack.callback(node.crash)
        return node

    def _join(self, node: Node) -> None:
        """Have a machine join and run as a node."""
        with self.client() as client:
            made = self.inside(client.nodes.token)
        node.join(f"sojourn node join --server {made.url} --token {made.token}")
        node.start()

    def inside(self, work: Callable[[], T]) -> T:
        """Do something from an address of the cluster's network."""
        with self.networks.entered():
            return work()

    @property
    def token(self) -> str:
        """The operator's."""
        return self._token

    def client(self, server: str = "s1") -> Sojourn:
        """A client of one of the servers. Use it where `networks.entered` holds."""
        return Sojourn(url=self.servers[server].url, token=self._token)
