"""Ports of real sessions, reached from outside: over everything that happens to a session."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import Conflict, InvalidRequest, PortNotFound, SessionNotFound
from sojourn.wire.networks import PortInfo
from support.port_programs import HTTP_PORT, PROGRAM, TCP_PORT
from support.servers import ServerProcess, eventually

pytestmark = pytest.mark.privileged

WAIT = 70.0  # longer than a request is held


@pytest.fixture(scope="module")
def ports_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("ports") / "data")
    server.start()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def web(ports_server: ServerProcess) -> Iterator[Session]:
    """A session with the programs running in it; tests leave it as they like, but there."""
    session = serving(ports_server.client(), "web")
    session.expose(HTTP_PORT)
    session.expose(TCP_PORT, kind="tcp", public=True)
    yield session


def serving(client: Sojourn, name: str | None = None, **facts: object) -> Session:
    session = client.sessions.create(name=name, **facts)  # type: ignore[arg-type]
    session.files.write("/srv/program.py", PROGRAM)
    session.spawn("exec python3 /srv/program.py")
    return session


def port_of(session: Session, number: int = HTTP_PORT) -> PortInfo:
    return next(one for one in session.ports() if one.port == number)


def ask(
    info: PortInfo,
    path: str = "",
    *,
    method: str = "GET",
    body: bytes | None = None,
    token: str | None = "",
) -> tuple[int, bytes]:
    """One request by path, with the port's token unless another or none (None) is given."""
    split = urlsplit(info.path_url)
    assert split.hostname is not None
    connection = http.client.HTTPConnection(split.hostname, split.port, timeout=WAIT)
    shown = info.token if token == "" else token
    headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
    with contextlib.closing(connection):
        connection.request(method, split.path + path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def verbs(session: Session, verb: str) -> int:
    return sum(event.kind == verb for event in session.events())


def test_a_program_is_reached_and_bodies_are_exact(web: Session) -> None:
    info = port_of(web)
    assert ask(info) == (200, b"hello")
    data = os.urandom(20 << 20)
    assert ask(info, method="POST", body=data) == (200, hashlib.sha256(data).hexdigest().encode())
    status, headers = ask(info, "headers")
    assert status == 200 and info.token is not None and info.token.encode() not in headers
    assert b"X-Forwarded-For: 127.0.0.1" in headers.replace(b"x-forwarded-for", b"X-Forwarded-For")


def test_by_its_host_name(web: Session) -> None:
    info = port_of(web)
    split = urlsplit(info.url or "")
    connection = http.client.HTTPConnection("127.0.0.1", split.port, timeout=WAIT)
    with contextlib.closing(connection):
        connection.request(
            "GET", f"/headers?sojourn_token={info.token}", None, {"Host": split.netloc}
        )
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status == 200 and split.netloc.encode() in body
    assert (answer.getheader("set-cookie") or "").startswith("sojourn_token=")


def test_nobody_learns_what_is_there(web: Session, ports_server: ServerProcess) -> None:
    info = port_of(web)
    assert ask(info, token=None)[0] == ask(info, token="wrong")[0] == 404
    elsewhere = PortInfo(
        **{name: getattr(info, name) for name in PortInfo.__struct_fields__}
        | {"path_url": (info.path_url or "").replace("/8000/", "/8001/")}
    )
    assert ask(elsewhere)[1] == ask(info, token=None)[1]
    other = ports_server.client().tokens.create("others")
    with ports_server.client(other.token) as stranger:
        with pytest.raises(SessionNotFound):
            stranger._transport.run(_ports_plan(web.id))


def _ports_plan(session: str):  # type: ignore[no-untyped-def]
    from sojourn.client import core_ports

    return core_ports.ports(session)


def upgraded(info: PortInfo) -> socket.socket:
    split = urlsplit(info.path_url)
    sock = socket.create_connection((split.hostname or "", split.port or 0), timeout=WAIT)
    sock.sendall(
        f"GET {split.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {info.token}\r\n"
        "Connection: Upgrade\r\nUpgrade: echo\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        piece = sock.recv(1)
        assert piece, head
        head += piece
    assert b" 101 " in head
    return sock


def exchanged(sock: socket.socket, data: bytes) -> bool:
    sock.sendall(data)
    back = b""
    while len(back) < len(data):
        piece = sock.recv(65536)
        if not piece:
            return False
        back += piece
    return back == data


def test_a_switched_connection_outlives_a_pause_and_ends_with_a_suspension(web: Session) -> None:
    web.resume()
    with upgraded(port_of(web)) as sock:
        assert exchanged(sock, b"before" * 1000)
        web.snapshot()
        assert exchanged(sock, b"after a snapshot")
        web.pause()
        web.resume()
        assert exchanged(sock, b"after a pause")
        web.suspend()
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    assert ask(port_of(web))[0] == 200


def test_a_request_wakes_a_suspended_session_with_its_memory(web: Session) -> None:
    info = port_of(web)
    count, pid = ask(info, "count")[1].split()
    web.suspend()
    assert web.refresh().state == "suspended"
    assert ask(info, "count") == (200, b"%d %s" % (int(count) + 1, pid))
    assert web.refresh().state == "running"
    web.pause()
    assert ask(info, "count") == (200, b"%d %s" % (int(count) + 2, pid))
    assert web.refresh().state == "running"


def test_many_requests_make_one_resume(web: Session) -> None:
    info = port_of(web)
    web.suspend()
    resumes = verbs(web, "resume")
    answers: list[tuple[int, bytes]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(info, "count"))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers] == [200] * 20
    assert len({body for _, body in answers}) == 20
    assert verbs(web, "resume") == resumes + 1


def test_no_request_wakes_what_may_not_wake(web: Session) -> None:
    info = port_of(web)
    web.update(policy={"auto_resume": False})
    try:
        web.suspend()
        status, body = ask(info)
        assert status == 503 and b"does not resume by itself" in body
        assert web.refresh().state == "suspended"
    finally:
        web.update(policy={})
    assert ask(info)[0] == 200


def test_what_is_not_exposed_any_more_is_not_there(web: Session) -> None:
    info = web.expose(9)
    web.unexpose(9)
    assert ask(info)[0] == 404
    with pytest.raises(PortNotFound):
        web.unexpose(9)


def test_exposing_again_changes_nothing_and_otherwise_is_refused(web: Session) -> None:
    info = port_of(web)
    assert web.expose(HTTP_PORT) == info
    with pytest.raises(Conflict):
        web.expose(HTTP_PORT, public=True)
    with pytest.raises(InvalidRequest):
        web.expose(22, kind="tcp")
    with pytest.raises(InvalidRequest):
        web.expose(0)


def tcp(info: PortInfo, data: bytes) -> bool:
    host, _, number = (info.address or "").rpartition(":")
    with socket.create_connection((host, int(number)), timeout=WAIT) as sock:
        try:
            return exchanged(sock, data)
        except ConnectionError:
            return False


def test_tcp_and_it_wakes_too(web: Session) -> None:
    info = port_of(web, TCP_PORT)
    assert tcp(info, os.urandom(300_000))
    web.suspend()
    assert tcp(info, b"wake")
    assert web.refresh().state == "running"


def test_a_rollback_keeps_addresses_and_a_fork_has_none(web: Session) -> None:
    info = port_of(web)
    web.resume()
    snapshot = web.snapshot()
    web.rollback(snapshot.id)
    assert port_of(web) == info and ask(info)[0] == 200
    (fork,) = web.fork()
    try:
        assert fork.ports() == []
        own = fork.expose(HTTP_PORT)
        assert own.token != info.token and own.url != info.url
        assert ask(own)[0] == ask(info)[0] == 200
        assert ask(info, token=own.token)[0] == 404
    finally:
        fork.delete()


def test_bytes_that_move_keep_a_session_awake_and_silence_does_not(
    ports_server: ServerProcess,
) -> None:
    session = serving(ports_server.client(), policy={"idle_timeout": 2})
    info = session.expose(HTTP_PORT)
    with upgraded(info) as sock:
        began = time.monotonic()
        while time.monotonic() - began < 4:
            assert exchanged(sock, b"ping")
            time.sleep(0.3)
        assert session.refresh().state == "running"
        eventually(lambda: session.refresh().state == "suspended", timeout=30)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
    session.delete()


def test_what_a_request_changed_is_in_a_snapshot_of_its_own(web: Session) -> None:
    before = {one.id for one in web.history()}
    assert ask(port_of(web), "write") == (200, b"written")
    (taken,) = eventually(lambda: [one for one in web.history() if one.id not in before])
    assert taken.kind == "auto"
    changed = {change.path for change in web.diff(a=taken.parent, b=taken.id).changes}
    assert "/srv/written" in changed


def test_the_address_of_a_deleted_session_is_nobodys(ports_server: ServerProcess) -> None:
    client = ports_server.client()
    first = serving(client, "again")
    old = first.expose(HTTP_PORT)
    raw = first.expose(TCP_PORT, kind="tcp", public=True)
    assert ask(old)[0] == 200 and tcp(raw, b"x")
    first.delete()
    assert ask(old)[0] == 404
    second = serving(client, "again")
    new = second.expose(HTTP_PORT)
    assert ask(new)[0] == 200 and ask(old)[0] == 404
    assert ask(old, token=new.token)[0] == 404
    with pytest.raises(OSError):
        tcp(raw, b"x")
    second.delete()


def test_the_same_address_after_the_gateway_was_killed(
    web: Session, ports_server: ServerProcess
) -> None:
    info = port_of(web)
    gateway = ports_server.client().status().gateway
    assert ask(info)[0] == 200 and gateway is not None and gateway.pid is not None
    os.kill(gateway.pid, signal.SIGKILL)
    # Asked at once: the request waits for the next process.
    assert ask(info)[0] == 200
    again = ports_server.client().status().gateway
    assert again is not None and again.pid != gateway.pid


def test_the_same_addresses_after_the_server_was_killed(
    web: Session, ports_server: ServerProcess
) -> None:
    before = web.ports()
    web.suspend()
    client = ports_server.restart()
    later = client.sessions.get(web.id)
    assert later.ports() == before
    assert ask(port_of(later))[0] == 200
    assert tcp(port_of(later, TCP_PORT), b"after a restart")
    assert later.refresh().state == "running"
    later = ports_server.restart().sessions.get(web.id)
    assert ask(port_of(later))[0] == 200  # of a session that was adopted running
