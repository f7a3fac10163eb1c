"""Memory is put away and comes back amid connections that begin; without it files come back."""

from __future__ import annotations

import contextlib
import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from sojourn.client import Process, Session
from sojourn.errors import CaptureRefused
from sojourn.wire.networks import PortInfo
from support.servers import eventually

pytestmark = pytest.mark.privileged

PORT = 8100
ROUNDS = 3
AT_ONCE = 8
PATIENCE = 120.0  # for what has to happen inside, however busy the machine

# Listens with the smallest queue, takes nothing, and closes when told to.
SLOW = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 9001), backlog=0)
clients = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in clients:
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", 9001))
print("connected", flush=True)
while not os.path.exists("/tmp/close"):
    time.sleep(0.02)
for one in [*clients, server]:
    one.close()
print("closed", flush=True)
time.sleep(1000)
"""


def said(program: Process) -> bytes:
    return b"".join(one.data for one in program.output(follow=False))


def ask(info: PortInfo) -> int:
    split = urlsplit(info.path_url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("GET", split.path, headers={"Authorization": f"Bearer {info.token}"})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_a_storm_of_requests_keeps_no_session_from_its_memory(session: Session) -> None:
    program = session.spawn(["python3", "-m", "http.server", str(PORT), "--directory", "/srv"])
    info = session.expose(PORT)
    assert ask(info) == 200
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(info)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        asking = [pool.submit(keep_asking) for _ in range(AT_ONCE)]
        try:
            for _ in range(ROUNDS):
                with contextlib.suppress(CaptureRefused):
                    session.suspend()
                session.resume()
                assert session.process(program.id).info.running
        finally:
            over.set()
        for one in asking:
            one.result()
    assert ask(info) == 200
    assert not [event for event in session.events() if event.result == "resume_failed"]


def test_connections_that_nobody_takes_are_refused_until_they_are_over(session: Session) -> None:
    program = session.spawn(["python3", "-c", SLOW, "2"])
    eventually(lambda: b"connected" in said(program), PATIENCE)
    for _ in range(2):
        with pytest.raises(CaptureRefused):
            session.suspend()
        session.pause()  # what was paused is looked at as well, and stays paused
    assert session.refresh().state == "paused"
    session.resume()
    session.files.write("/tmp/close", b"")
    eventually(lambda: b"closed" in said(program), PATIENCE)
    session.pause()
    session.suspend()
    session.resume()
    assert session.process(program.id).info.running


def test_files_alone_are_resumed_and_the_snapshot_keeps_its_memory(session: Session) -> None:
    session.files.write("/root/kept", b"kept")
    program = session.spawn("sleep 1000")
    session.suspend()
    head = session.refresh().info.head
    session.resume(memory=False)
    assert session.files.read("/root/kept") == b"kept"
    assert session.exec("pgrep -x sleep").exit_code == 1
    told = [event for event in session.events() if event.kind == "resume"]
    assert told[-1].details["memory"] is False
    session.rollback(head)
    assert session.process(program.id).info.running
