"""E2B's client with one variable: a domain of one's own, TLS in front of the server, and a name
for each sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gateway_world import TestAuthority
from support.servers import ServerProcess

pytest.importorskip("e2b_code_interpreter", reason="E2B's SDK is not installed")
pytestmark = pytest.mark.privileged

DOMAIN = "box.test"

# The client reads the file of hosts once, so what needs the sandbox's names is a second process.
MAKE = """
import sys
from e2b_code_interpreter import Sandbox
made = Sandbox.create().sandbox_id
with open("/etc/hosts", "a") as file:
    for port in (49983, 49999, 8000):
        file.write(f"127.0.0.1 {port}-{made}.box.test\\n")
print(made)
"""
USE = """
import ssl, sys, time, urllib.request
from e2b_code_interpreter import Sandbox
sandbox = Sandbox.connect(sys.argv[1])
print(sandbox.commands.run("echo by a name").stdout.strip())
sandbox.files.write("/home/user/file", "kept")
print(sandbox.files.read("/home/user/file"), sandbox.run_code("20 + 22").text)
sandbox.commands.run("(python3 -m http.server 8000 >/dev/null 2>&1 &)")
url = "https://" + sandbox.get_host(8000) + "/"
context = ssl.create_default_context(cafile=sys.argv[2])
print(urllib.request.urlopen(url, context=context, timeout=30).status)
sandbox.kill()
"""


class Front:
    """What speaks TLS in front of a server: by the host of a connection's first request it goes to
    the API or to the exposed ports."""

    def __init__(self, authority: TestAuthority) -> None:
        self.api = self.ports = 0
        self.hosts: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        context = authority.context(f"*.{DOMAIN}")
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(30)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            (line,) = [one for one in head.split(b"\r\n") if one.lower().startswith(b"host:")]
            host = line.partition(b":")[2].strip().decode()
            self.hosts.add(host.partition("-")[0] if "-" in host else host.partition(".")[0])
            ours = host.startswith(("api.", "49983-", "49999-"))
            inner = await asyncio.open_connection("127.0.0.1", self.api if ours else self.ports)
            inner[1].write(head)
            await asyncio.gather(_pump(reader, inner[1]), _pump(inner[0], writer))
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
def front() -> Iterator[tuple[Front, TestAuthority]]:
    authority = TestAuthority()
    found = Front(authority)
    yield found, authority
    found.close()


def test_one_variable_is_enough(tmp_path: Path, front: tuple[Front, TestAuthority]) -> None:
    proxy, authority = front
    roots, hosts = tmp_path / "ca.pem", tmp_path / "hosts"
    roots.write_bytes(authority.pem)
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 api.{DOMAIN}\n")
    server = ServerProcess(tmp_path / "data")
    environment = os.environ | {
        "E2B_DOMAIN": f"{DOMAIN}:{proxy.port}",
        "SSL_CERT_FILE": str(roots),
    }
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DEBUG"):
        environment.pop(name, None)

    def client(program: str, *arguments: str) -> list[str]:
        """What a program prints whose machine knows the names in our file."""
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", inside, str(hosts), sys.executable, "-c"]
        done = subprocess.run(
            [*command, program, *arguments], env=environment, capture_output=True, timeout=90
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode().splitlines()

    try:
        server.start(SOJOURN_PORTS_DOMAIN=f"https://{DOMAIN}:{proxy.port}")
        proxy.api = int(server.url.rpartition(":")[2])
        environment["E2B_API_KEY"] = server.token
        (made,) = client(MAKE)
        proxy.ports = int((server.data / "ports.address").read_text())
        assert client(USE, made, str(roots)) == ["by a name", "kept 42", "200"]
        assert {"api", "49983", "49999", "8000"} <= proxy.hosts
    finally:
        server.remove()
