"""Nodes as processes of their own on one machine, without servers in front: for tests that ask a
node what a server would.

The client's token is taken for what a server says of the caller: `run` turns it into the header.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sojourn.client import Sojourn
from sojourn.database import Database, open_database
from sojourn.model.nodes import Node
from sojourn.node.isolation.cgroups import CgroupTree
from sojourn.server.base import Principal
from sojourn.server.cluster.callers import HEADER, encode_principal
from sojourn.server.cluster.identity import Identity
from sojourn.server.nodes import serving
from sojourn.server.service_factory import scope_of
from support import prefork, raw
from support.servers import host_processes

MIGRATION_POINTS = (
    (
        "migrate.target.before",
        "migrate.target",
        "migrate.copied.before",
        "migrate.copied",
        "migrate.seal",
        "suspend.take",
        "migrate.hand.before",
        "migrate.hand",
    ),
    ("migrate.start", "migrate.land"),
)
"""Where a node is killed that gives a session away, and one that takes it up."""
_SECONDS = 60.0
_parent = prefork.Parent("support.node_process")


def with_database(location: str, work: Any) -> Any:
    """What a coroutine function gives of a database that is opened for it."""

    async def whole() -> Any:
        database = await open_database(location)
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(whole())


class NodeProcess:
    """One node with a data directory of its own."""

    def __init__(
        self, data: Path, name: str, database: str, store: str, *, lease: float = 15.0
    ) -> None:
        self.data = data
        self.name = name
        self.id = f"nod_{name}"
        self.address = ""
        self._database = database
        self._settings = {
            "node": self.id,
            "name": name,
            "data": str(data),
            "database": database,
            "store": store,
            "lease": lease,
        }
        self._log = data.parent / f"{name}.log"
        self._process: prefork.Forked | None = None

    def join(self) -> None:
        """Be known to the cluster."""

        async def work(database: Database) -> None:
            await database.add_node(self.id, self.name)

        with_database(self._database, work)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, tenant: str) -> Sojourn:
        who = Principal(tenant=tenant, actor="test", role="tenant")
        return Sojourn(url=f"http://{self.address}", token=encode_principal(who).decode())

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """As a server does, below /node/."""
        content = None if body is None else msgspec.json.encode(body)
        return raw.request(f"http://{self.address}", method, path, content)

    def api(self, tenant: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """A request of a tenant's, as a server passes it on."""
        content = None if body is None else msgspec.json.encode(body)
        who = encode_principal(Principal(tenant=tenant, actor="test", role="tenant")).decode()
        return raw.request(f"http://{self.address}", method, path, content, who)

    def sandboxes(self) -> set[str]:
        """The sandboxes whose processes are on this machine for the node."""
        return CgroupTree(scope_of(self.data)).sandboxes()

    def row(self) -> Node:
        """What the database says of it."""

        async def work(database: Database) -> Node:
            return await database.get_node(self.id)

        return with_database(self._database, work)

    def start(self, **environment: str) -> None:
        """Start; raises with the log when it does not become ready."""
        with self._log.open("ab") as log:
            variables = os.environ | environment
            arguments = [json.dumps(self._settings)]
            self._process = _parent.start(arguments, variables, log.fileno())
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            self.kill()
            raise RuntimeError(f"node {self.name} is not ready: {self.log()}")
        self.address = line.split()[1]

    def log(self, length: int = 6000) -> str:
        return self._log.read_text(errors="replace")[-length:]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.wait()

    def stop(self) -> int:
        """SIGTERM, as an operator."""
        self.send(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        code = self._process.wait(timeout=_SECONDS)
        self._process.stdout.close()
        self._process = None
        return code

    def remove(self) -> None:
        """End all of it: processes, sandboxes, mounts."""
        self.kill()
        for _ in range(5):
            left = host_processes(self.data)
            if not left:
                break
            thaw(self.data)
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.2)
        below = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for point in sorted(below, reverse=True):
            if point.startswith(f"{self.data}/"):
                subprocess.run(["umount", "-l", point], check=False)
        groups = CgroupTree(scope_of(self.data))
        for name in groups.sandboxes():
            groups.group(name).remove(time.monotonic() + 5)
        groups.remove()


def thaw(data: Path) -> None:
    """Let frozen sandboxes of a data directory go on, so that they can end."""
    CgroupTree(scope_of(data)).kill_all(time.monotonic() + 5)


def run(arguments: list[str]) -> int:
    """Run a node as the settings in the first argument say."""
    asked = json.loads(arguments[0])
    logging.basicConfig(
        level="INFO",
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    real = serving.NodeApp

    class Believing(real):  # type: ignore[misc, valid-type]
        """Takes the bearer's token for a principal."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                headers = []
                for name, value in scope["headers"]:
                    if name == b"authorization":
                        name, value = HEADER, value.removeprefix(b"Bearer ")
                        base64.b64decode(value, validate=True)
                    headers.append((name, value))
                scope["headers"] = headers
            await super().__call__(scope, receive, send)

    serving.NodeApp = Believing  # type: ignore[misc]
    identity = Identity(
        node=asked["node"],
        name=asked["name"],
        key="",
        certificate="",
        authority="",
        server="",
        database=asked["database"],
        store=asked["store"],
        store_key=None,
    )
    serving.run_node(
        serving.RunSettings(
            identity=identity,
            data=Path(asked["data"]),
            listen="127.0.0.1:0",
            lease=asked["lease"],
            tls=False,
        )
    )
    return 0
