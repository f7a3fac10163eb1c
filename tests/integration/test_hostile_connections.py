"""Connections made to do harm: from inside to the node's own sockets, and slow ones to ports."""

from __future__ import annotations

import contextlib
import http.client
import socket
from urllib.parse import urlsplit

import pytest

from sojourn.client import Session
from sojourn.errors import CaptureFailed
from sojourn.wire.networks import PortInfo
from support.servers import eventually

pytestmark = pytest.mark.privileged

PORT = 8200
SLOW_CLIENTS = 60

# Says on each connection to the gateway's socket what no supervisor says, whole and cut short.
ABUSE = """
import os, random, socket, struct, sys
frame = lambda kind, body=b"": struct.pack("<IB3x", len(body), kind) + body
opened = lambda kind, host: struct.pack("<QBHH", random.getrandbits(64), kind, 80, len(host)) + host
said = [
    os.urandom(5000), b"", b"\\0", b"GET / HTTP/1.1\\r\\n\\r\\n",
    struct.pack("<IB3x", 0xFFFFFFFF, 1), struct.pack("<IB3x", 65536, 5) + b"x" * 1000,
    frame(1, b"x"), frame(1, opened(2, os.urandom(16))), frame(1, opened(9, b"")),
    frame(1, opened(1, b"\\xff" * 1024)), frame(2, os.urandom(24)), frame(2, b""),
    frame(8), frame(8) + frame(8), frame(5, b"data"), frame(1, opened(3, b"")) + os.urandom(100),
]
for round in range(4):
    for one in said:
        link = socket.socket(socket.AF_UNIX)
        link.connect("/run/sojourn/node/net.sock")
        link.settimeout(5)
        try:
            link.sendall(one)
            if round % 2:
                link.shutdown(socket.SHUT_WR)
                while link.recv(65536):
                    pass
        except OSError:
            pass
        link.close()
print("said all", flush=True)
held = socket.socket(socket.AF_UNIX)
held.connect("/run/sojourn/node/net.sock")
print("holds", flush=True)
input()
"""


def ask(info: PortInfo) -> int:
    split = urlsplit(info.path_url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=240)
    with contextlib.closing(connection):
        connection.request("GET", split.path, headers={"Authorization": f"Bearer {info.token}"})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def serving(session: Session) -> PortInfo:
    session.spawn(["python3", "-m", "http.server", str(PORT), "--directory", "/srv"])
    info = session.expose(PORT)
    eventually(lambda: ask(info) == 200, 240)
    return info


def test_root_inside_that_abuses_the_gateways_socket_gains_and_stops_nothing(
    session: Session,
) -> None:
    info = serving(session)
    program = session.spawn(["python3", "-c", ABUSE], stdin="pipe")

    def said() -> bytes:
        return b"".join(one.data for one in program.output(follow=False))

    eventually(lambda: b"holds" in said() or not program.refresh().running, 240)
    assert b"holds" in said(), said()
    assert ask(info) == 200
    with pytest.raises(CaptureFailed) as failed:
        session.snapshot()
    assert "/run/sojourn/node" in failed.value.next_step
    assert ask(info) == 200  # it runs on
    session.snapshot(memory=False)
    program.kill()
    program.wait()
    session.suspend()
    session.resume()
    assert ask(info) == 200


def test_slow_heads_keep_nobody_else_from_a_port(session: Session) -> None:
    info = serving(session)
    split = urlsplit(info.path_url)
    with contextlib.ExitStack() as stack:
        for _ in range(SLOW_CLIENTS):
            slow = stack.enter_context(
                socket.create_connection((split.hostname or "", split.port or 0), timeout=30)
            )
            slow.sendall(f"GET {split.path} HTTP/1.1\r\nHost: x\r\nX-Slow: ".encode())
        assert ask(info) == 200
        session.suspend()
        assert ask(info) == 200  # wakes it
