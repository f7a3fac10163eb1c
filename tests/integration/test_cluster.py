"""Servers and nodes as they are run: joining, asking through any server, and what operators do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from sojourn.client import Sojourn
from sojourn.errors import CapacityExhausted, Conflict, Forbidden, SessionNotFound, Unauthenticated
from sojourn.wire.networks import PortInfo
from support.loopback_cluster import LoopbackCluster
from support.servers import eventually

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[LoopbackCluster]:
    place = tmp_path_factory.mktemp("cluster")
    made = LoopbackCluster(place, Path(shutil.copytree(stocked, place / "objects")))
    try:
        made.add_server()
        made.add_server()
        # Two sessions of 2 cores fit on each, so that a test can fill them.
        for _ in range(2):
            made.add_node("--capacity", "sessions=3")
        yield made
    finally:
        made.remove()


@pytest.fixture
def client(cluster: LoopbackCluster) -> Iterator[Sojourn]:
    with cluster.client() as one:
        yield one
        for session in one.sessions.list():
            session.delete()


@pytest.fixture
def other(cluster: LoopbackCluster) -> Iterator[Sojourn]:
    """The other server's client."""
    with cluster.client("s2") as two:
        yield two


def holder(client: Sojourn, ref: str) -> str:
    """The name of the node that has a session."""
    id = client.sessions.get(ref).info.node
    return next((one.name for one in client.nodes.list() if one.id == id), "")


def wait_until_empty(client: Sojourn) -> None:
    """Nodes tell at their renewals what is on them."""
    eventually(lambda: all(one.used.sessions == 0 for one in client.nodes.list()))


def test_a_session_is_used_through_any_server(client: Sojourn, other: Sojourn) -> None:
    session = client.sessions.create(name="web")
    session.exec("echo one > /root/file; echo here > /dev/shm/memory")
    there = other.sessions.get("web")
    assert there.id == session.id
    assert there.exec("cat /root/file").text == "one\n"
    there.suspend()
    assert client.sessions.get("web").info.state == "suspended"
    assert session.exec("cat /dev/shm/memory").text == "here\n"  # woken, with its memory
    assert [one.kind for one in other.sessions.get("web").events()][:2] == ["create", "exec"]
    session.delete()
    with pytest.raises(SessionNotFound):
        other.sessions.get("web")


def test_sessions_are_spread_and_follow_what_operators_say(
    cluster: LoopbackCluster, client: Sojourn, other: Sojourn
) -> None:
    wait_until_empty(client)
    first, second = client.sessions.create(), client.sessions.create()
    assert {holder(client, one.id) for one in (first, second)} == {"n1", "n2"}
    told = json.loads(cluster.command("node", "ls", "--json"))
    assert [(one["name"], one["state"], one["ready"]) for one in told] == [
        ("n1", "ready", True),
        ("n2", "ready", True),
    ]
    cluster.command("node", "cordon", "n1", server="s2")
    third = client.sessions.create()
    assert holder(client, third.id) == "n2"
    with pytest.raises(Conflict):
        client.nodes.remove("n2")
    counted = first if holder(client, first.id) == "n1" else second
    counted.exec("echo kept > /dev/shm/memory")
    cluster.command("node", "drain", "n1")
    eventually(lambda: holder(client, counted.id) == "n2", timeout=60)
    assert counted.exec("cat /dev/shm/memory").text == "kept\n"
    eventually(lambda: {one.name: one.state for one in client.nodes.list()}["n1"] == "drained")
    assert "drained" in cluster.command("node", "ls")
    cluster.command("node", "uncordon", "n1")
    moved = other.sessions.get(counted.id).migrate("n1")
    assert moved.info.state == "running"
    assert holder(client, counted.id) == "n1"
    assert counted.exec("cat /dev/shm/memory").text == "kept\n"


def test_e2bs_clients_use_any_server(cluster: LoopbackCluster, client: Sojourn) -> None:
    from e2b_code_interpreter import Sandbox

    def point(name: str) -> dict[str, Any]:
        url = cluster.servers[name].told
        return {"api_url": url, "sandbox_url": url, "api_key": cluster.token}

    boxes = [Sandbox.create(timeout=300, **point("s1")) for _ in range(2)]
    for number, box in enumerate(boxes):
        box.files.write("/tmp/kept", f"box {number}")
        box.run_code(f"n = {number}")
    for number, box in enumerate(boxes):
        other = Sandbox.connect(box.sandbox_id, **point("s2"))
        assert other.commands.run("cat /tmp/kept").stdout == f"box {number}"
        assert other.run_code("n").text == str(number)
    assert {one.sandbox_id for one in Sandbox.list(**point("s2")).next_items()} == {
        box.sandbox_id for box in boxes
    }
    boxes[0].pause()
    again = Sandbox.connect(boxes[0].sandbox_id, **point("s2"))
    assert again.run_code("n").text == "0"
    client.sessions.get("ses_" + again.sandbox_id.removeprefix("ses-")).migrate()
    assert again.run_code("n").text == "0"
    # A signed address names no sandbox: whichever node gets it finds out.
    for number, box in enumerate(boxes):
        with urlopen(box.download_url("/tmp/kept"), timeout=60) as answer:
            assert answer.read() == f"box {number}".encode()
    for box in boxes:
        assert box.kill()


def test_nodes_are_the_operators_and_tokens_work_once(
    cluster: LoopbackCluster, client: Sojourn
) -> None:
    tenant = client.tokens.create("acme")
    with Sojourn(url=client.url, token=tenant.token) as acme:
        with pytest.raises(Forbidden):
            acme.nodes.list()
        session = acme.sessions.create()
        assert acme.sessions.get(session.id).exec("echo x").text == "x\n"
        with pytest.raises(SessionNotFound):
            cluster.client("s2").sessions.get(session.id)
        session.delete()
        cluster.client("s2").tokens.revoke(tenant.id)
        with pytest.raises(Unauthenticated):
            acme.sessions.list()


SERVER = (
    "import http.server, sys\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    protocol_version = 'HTTP/1.1'\n"
    "    def do_POST(self):\n"
    "        body = self.rfile.read(int(self.headers['content-length']))\n"
    "        told = f\"{sys.argv[1]} {self.headers.get('x-forwarded-for')} \".encode() + body\n"
    "        self.send_response(200)\n"
    "        self.send_header('content-length', str(len(told)))\n"
    "        self.end_headers()\n"
    "        self.wfile.write(told)\n"
    "    def log_message(self, *args): pass\n"
    "http.server.ThreadingHTTPServer(('0.0.0.0', 8000), Handler).serve_forever()\n"
)


def test_ports_are_reached_at_the_servers_wherever_their_sessions_are(
    cluster: LoopbackCluster, client: Sojourn
) -> None:
    wait_until_empty(client)
    sessions = [client.sessions.create() for _ in range(2)]
    if len({holder(client, one.id) for one in sessions}) == 1:
        # A node that was emptied a moment ago may still tell of what it had.
        sessions[1].migrate()
    assert {holder(client, one.id) for one in sessions} == {"n1", "n2"}
    ports = []
    for name, session in zip(("one", "two"), sessions, strict=True):
        session.files.write("/root/server.py", SERVER)
        session.spawn(f"exec python3 /root/server.py {name}")
        ports.append(session.expose(8000, public=True))
    secret = sessions[0].expose(8000 + 1)
    address = urlsplit(str(ports[0].path_url))
    assert address.netloc == urlsplit(str(ports[1].path_url)).netloc
    connection = HTTPConnection(str(address.hostname), address.port, timeout=60)

    def ask(port: PortInfo, body: bytes) -> bytes:
        connection.request("POST", urlsplit(str(port.path_url)).path, body)
        return connection.getresponse().read()

    def answers(port: PortInfo, name: str) -> None:
        said = f"{name} 127.0.0.1 ".encode()
        eventually(lambda: ask(port, b"hello").startswith(said))
        large = os.urandom(3 << 20)
        assert ask(port, large) == said + large

    # One connection, two sessions on two nodes.
    for name, port in (("one", ports[0]), ("two", ports[1]), ("one", ports[0])):
        answers(port, name)
    connection.request("GET", urlsplit(str(secret.path_url)).path)
    refused = connection.getresponse()
    assert (refused.status, b"port_not_found" in refused.read()) == (404, True)
    other = "n2" if holder(client, sessions[0].id) == "n1" else "n1"
    sessions[0].migrate(other)
    answers(ports[0], "one")
    sessions[1].suspend()
    answers(ports[1], "two")
    tcp = sessions[0].expose(8000 + 2, public=True, kind="tcp")
    host, _, number = str(tcp.address).rpartition(":")
    sessions[0].spawn(
        "exec python3 -c \"import socket; s = socket.create_server(('', 8002));"
        ' c, _ = s.accept(); c.sendall(c.recv(10).upper()); c.close()"'
    )

    def shouts() -> bytes:
        with contextlib.suppress(OSError):
            with socket.create_connection((host, int(number)), timeout=30) as plain:
                plain.sendall(b"hello")
                return plain.recv(10)
        return b""

    assert eventually(shouts) == b"HELLO"
    connection.close()


def test_a_full_cluster_puts_away_what_is_idle_or_refuses(client: Sojourn) -> None:
    kept = {"auto_resume": False, "idle_timeout": None}
    sessions = [client.sessions.create(policy=kept) for _ in range(5)]
    idle = client.sessions.create()
    idle.exec("echo here > /dev/shm/memory")
    refused: list[Exception] = []

    def ask() -> None:
        try:
            sessions.append(client.sessions.create(policy=kept))
        except CapacityExhausted as error:
            refused.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(60)
    assert not refused  # what may be woken again was put away for it
    assert client.sessions.get(idle.id).info.state == "suspended"
    sessions.pop().delete()
    # There is room again, wherever that is.
    assert idle.exec("cat /dev/shm/memory").text == "here\n"


def test_sessions_go_on_when_a_node_or_a_server_is_gone(
    cluster: LoopbackCluster, client: Sojourn
) -> None:
    session = client.sessions.create()
    session.exec("echo kept > /root/file")
    session.snapshot(wait="durable")
    session.exec("echo lost > /root/file; sleep 0")
    name = holder(client, session.id)
    cluster.crash(name)
    # The request waits until its node is known to be gone and another one has the session.
    assert session.exec("cat /root/file").text in ("kept\n", "lost\n")
    assert holder(client, session.id) != name
    lost = [one for one in session.events() if one.kind == "node.lost"]
    assert len(lost) == 1 and lost[0].details["lost_seconds"] >= 0
    cluster.nodes[name].start()
    eventually(
        lambda: {one.name: one.ready for one in client.nodes.list()} == {"n1": True, "n2": True}
    )
    assert cluster.servers["s2"].end(signal.SIGTERM) == 0
    assert session.exec("echo on").text == "on\n"
    cluster.servers["s2"].start()
    assert cluster.client("s2").sessions.get(session.id).exec("echo on").text == "on\n"


class Balancer:
    """One address before several servers, as a load balancer is: a connection goes to the first
    that takes it."""

    def __init__(self, urls: list[str]) -> None:
        self._backends = [urlsplit(url) for url in urls]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            for backend in self._backends:
                try:
                    server = socket.create_connection((backend.hostname, backend.port))
                except OSError:
                    continue
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=(one, other), daemon=True).start()
                break
            else:
                client.close()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_stream_goes_on_when_its_server_stops_and_its_session_moves(
    cluster: LoopbackCluster, client: Sojourn
) -> None:
    balancer = Balancer([cluster.servers[name].told for name in ("s2", "s1")])
    session = client.sessions.create()
    count = 160
    script = f"i=0; while [ $i -lt {count} ]; do i=$((i+1)); echo $i; sleep 0.05; done"
    seen: list[bytes] = []
    results = []

    def follow() -> None:
        with Sojourn(url=balancer.url, token=cluster.token) as behind:
            results.append(
                behind.sessions.get(session.id).exec(
                    ["sh", "-c", script], on_stdout=seen.append, timeout=120
                )
            )

    following = threading.Thread(target=follow)
    following.start()
    try:
        eventually(lambda: len(seen) > 5)
        assert cluster.servers["s2"].end(signal.SIGTERM) == 0
        before = len(seen)
        eventually(lambda: len(seen) > before + 5)
        session.migrate()
        following.join(90)
        assert b"".join(seen) == b"".join(b"%d\n" % n for n in range(1, count + 1))
        assert results[0].exit_code == 0
    finally:
        following.join(90)
        balancer.close()
        cluster.servers["s2"].start()
