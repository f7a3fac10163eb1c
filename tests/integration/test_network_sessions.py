"""The network of sessions end to end: a real server and its gateway, real sandboxes, and an outside
of real servers in a network namespace of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sojourn import (
    EffectsInTheWay,
    InvalidRequest,
    NetworkMode,
    NetworkPolicy,
    Process,
    Session,
    Sojourn,
    allow,
)
from sojourn.cli.main import cli
from support.gateway_world import ALLOWED, NAMESERVER, OTHER, World
from support.servers import ServerProcess, eventually

pytestmark = pytest.mark.privileged

_PORT = 7000


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


class Outside:
    """The world, a server that looks out on it, and its client."""

    def __init__(self, directory: Path, world: World) -> None:
        self.world = world
        self.server = ServerProcess(directory / "data")
        self.environment = {
            "SOJOURN_EGRESS_NAMESPACE": world.namespace,
            "SOJOURN_EGRESS_NAMESERVERS": NAMESERVER,
            "SOJOURN_EGRESS_ROOTS": str(world.roots),
            "SOJOURN_EGRESS_PRIVATE": "10.9.0.0/16",
        }
        self.client = self.server.start(**self.environment)

    def posts(self, path: str) -> int:
        """How often something was sent to a path."""
        line = f"POST {path} ".encode()
        return sum(request.startswith(line) for request in self.world.requests)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    directory = tmp_path_factory.mktemp("outside")
    with World(directory) as world:
        world.zone.update(
            {
                "api.example.com": [ALLOWED],
                "echo.example.com": [ALLOWED],
                "other.example.org": [OTHER],
            }
        )
        world.serve(ALLOWED, 80, world.http)
        world.serve(ALLOWED, 443, world.http, tls="api.example.com")
        world.serve(ALLOWED, _PORT, _echo)
        world.serve(OTHER, 80, world.http)
        found = Outside(directory, world)
        try:
            yield found
        finally:
            found.server.remove()


@pytest.fixture
def client(outside: Outside) -> Sojourn:
    return outside.client


@contextlib.contextmanager
def made(client: Sojourn, network: NetworkPolicy | None) -> Iterator[Session]:
    session = client.sessions.create(network=network)
    try:
        yield session
    finally:
        session.delete()


@pytest.fixture(scope="module")
def allowed(outside: Outside) -> Iterator[Session]:
    """A session that may reach the API, for tests that do not move it."""
    yield outside.client.sessions.create(network=allow("api.example.com"))


def said(process: Process) -> str:
    """What a process has written so far."""
    return b"".join(one.data for one in process.output(follow=False)).decode()


def fetch(session: Session, url: str, *more: str) -> str:
    """What curl makes of an address: its status, or how it failed."""
    result = session.exec(
        ["curl", "-sS", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", *more, url]
    )
    return result.text if result.ok else f"failed {result.exit_code}"


# What a program tries, each printing what came of it; 169.254.169.254 serves metadata in clouds.
_WAYS_OUT = f"""
import socket, json
tried = {{}}
def connect(name, family, kind, where):
    with socket.socket(family, kind) as one:
        one.settimeout(2)
        try:
            one.connect(where)
            if kind == socket.SOCK_DGRAM:
                one.send(b"x")
                one.recv(10)
            else:
                one.send(b"GET / HTTP/1.0\\r\\n\\r\\n")
                tried[name] = one.recv(200).decode() or "closed"
                return
            tried[name] = "answered"
        except OSError as error:
            tried[name] = type(error).__name__
connect("ipv4", socket.AF_INET, socket.SOCK_STREAM, ("{ALLOWED}", 80))
connect("ipv6", socket.AF_INET6, socket.SOCK_STREAM, ("2606:2800:220:1::34", 80))
connect("udp", socket.AF_INET, socket.SOCK_DGRAM, ("{ALLOWED}", 9))
connect("dns", socket.AF_INET, socket.SOCK_DGRAM, ("{NAMESERVER}", 53))
connect("dns tcp", socket.AF_INET, socket.SOCK_STREAM, ("{NAMESERVER}", 53))
connect("metadata", socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80))
connect("private", socket.AF_INET, socket.SOCK_STREAM, ("10.9.8.7", 80))
try:
    socket.create_connection(("api.example.com", 80), 5)
    tried["name"] = "connected"
except OSError as error:
    tried["name"] = type(error).__name__
print(json.dumps(tried))
"""


def test_nothing_is_reached_by_default(client: Sojourn, outside: Outside) -> None:
    outside.world.connections.clear()
    outside.world.queries.clear()
    with made(client, None) as session:
        assert session.network == NetworkPolicy()
        result = session.exec(["python3", "-c", _WAYS_OUT])
        tried = json.loads(result.text)
        assert len(tried) == 8
        for way, came in tried.items():
            assert came.endswith(("Error", "gaierror")), (way, came)
        assert "SSL_CERT_FILE" not in session.exec("env").text
    assert outside.world.connections == []
    assert outside.world.queries == []


def test_what_a_rule_names_is_reached_and_nothing_else(allowed: Session, outside: Outside) -> None:
    assert fetch(allowed, "http://api.example.com/plain") == "200"
    assert fetch(allowed, "https://api.example.com/sealed") == "200"
    python = (
        "import urllib.request as u;"
        "print(u.urlopen('https://api.example.com/by-python', timeout=20).read().decode())"
    )
    assert allowed.exec(["python3", "-c", python]).text.strip() == "hello"
    outside.world.connections.clear()
    assert fetch(allowed, "http://other.example.org/") == "403"
    tried = json.loads(allowed.exec(["python3", "-c", _WAYS_OUT]).text)
    for way, came in tried.items():
        # A connection may be made, to the gateway: what it says is who denied it.
        refused = came.endswith("Error") or "403" in came or came == "closed"
        assert refused or way == "name", (way, came)
    assert set(outside.world.connections) <= {(ALLOWED, 80)}
    assert ("169.254.169.254", 80) not in outside.world.connections


def test_a_session_own_variables_win(client: Sojourn) -> None:
    session = client.sessions.create(
        network=allow("api.example.com"), env={"CURL_CA_BUNDLE": "/mine"}
    )
    try:
        seen = dict(line.split("=", 1) for line in session.exec("env").text.splitlines())
        assert seen["CURL_CA_BUNDLE"] == "/mine"
        assert seen["SSL_CERT_FILE"] == "/run/sojourn/ca.pem"
        code = session.run_code("import os; print(os.environ['SSL_CERT_FILE'])")
        assert "/run/sojourn/ca.pem" in str(code)
    finally:
        session.delete()


def test_a_policy_is_changed_live_and_open_connections_end(
    client: Sojourn, outside: Outside
) -> None:
    with made(client, allow(f"echo.example.com:{_PORT}")) as session:
        held = session.spawn(
            [
                "python3",
                "-uc",
                f"""
import socket
one = socket.create_connection(("echo.example.com", {_PORT}), 20)
one.sendall(b"ping\\n"); print(one.recv(5).decode().strip(), flush=True)
try:
    print("more" if one.recv(5) else "closed", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
""",
            ]
        )
        eventually(lambda: said(held).startswith("ping"))
        assert session.set_network(NetworkPolicy()).network.mode is NetworkMode.NONE
        assert held.wait(timeout=10).exit_code == 0
        assert said(held).split() == ["ping", "ConnectionResetError"]
        assert fetch(session, "http://api.example.com/").startswith("failed")
        session.set_network(allow("api.example.com"))
        assert fetch(session, "https://api.example.com/again") == "200"
        told = [event for event in session.events() if event.kind == "update"]
        assert [event.details["network"]["mode"] for event in told] == ["none", "allowlist"]


@pytest.mark.parametrize(
    "network",
    [
        {"mode": "allowlist", "rules": [{"name": "all", "domains": ["*.com"]}]},
        {"mode": "allowlist", "rules": [{"name": "host", "cidrs": ["127.0.0.1"]}]},
        {"mode": "allowlist", "rules": [{"name": "lan", "cidrs": ["192.168.0.0/16"]}]},
        {"mode": "open", "secrets": ["NOT_THERE"]},
    ],
)
def test_what_no_policy_may_say_changes_nothing(
    allowed: Session, client: Sojourn, network: dict[str, object]
) -> None:
    before = allowed.refresh().network
    with pytest.raises(InvalidRequest) as refused:
        allowed.set_network(network)
    assert str(refused.value.details["field"]).startswith("network.")
    with pytest.raises(InvalidRequest):
        client.sessions.create(network=network)
    assert allowed.refresh().network == before


def test_it_survives_suspension_pause_and_fork(client: Sojourn, outside: Outside) -> None:
    with made(client, allow("api.example.com", f"echo.example.com:{_PORT}")) as session:
        program = f"""
import socket, sys
one = socket.create_connection(("echo.example.com", {_PORT}), 20)
while True:
    try:
        one.sendall(b"ping\\n")
        got = one.recv(5)
    except OSError as error:
        print(type(error).__name__, flush=True)
        break
    print(got.decode().strip(), flush=True)
    if not got or not sys.stdin.readline():
        break
"""
        talk = session.spawn(["python3", "-uc", program], stdin="pipe")
        eventually(lambda: said(talk).split() == ["ping"])
        # A snapshot and a pause keep what is open.
        session.snapshot("live")
        talk.write(b"\n")
        eventually(lambda: said(talk).split() == ["ping"] * 2)
        session.pause()
        session.resume()
        talk.write(b"\n")
        eventually(lambda: said(talk).split() == ["ping"] * 3)
        # A suspension ends it, at once for whoever waits for an answer.
        waiting = session.spawn(
            [
                "python3",
                "-uc",
                f"""
import socket, time
one = socket.create_connection(("echo.example.com", {_PORT}), 20)
print("waits", flush=True)
try:
    one.recv(5)
except OSError as error:
    print(type(error).__name__, flush=True)
""",
            ]
        )
        eventually(lambda: "waits" in said(waiting))
        session.suspend()
        session.resume()
        assert waiting.wait(timeout=5).exit_code == 0
        assert said(waiting).split() == ["waits", "ConnectionResetError"]
        assert fetch(session, "https://api.example.com/resumed") == "200"
        earliest = time.time()
        clock = float(session.exec(["python3", "-c", "import time; print(time.time())"]).text)
        assert earliest - 0.1 < clock < time.time() + 0.1  # the host's, not the one it slept by
        (child,) = session.fork()
        try:
            assert child.network == session.network
            assert fetch(child, "https://api.example.com/forked") == "200"
        finally:
            child.delete()


def test_what_left_is_on_record_and_told_at_a_rollback(client: Sojourn, outside: Outside) -> None:
    with made(client, allow("api.example.com")) as session:
        before = session.snapshot("before")
        assert fetch(session, "https://api.example.com/orders", "-d", "x=1") == "200"
        assert fetch(session, "https://api.example.com/read") == "200"
        (effect,) = session.effects()
        assert (effect.method, effect.host, effect.path) == ("POST", "api.example.com", "/orders")
        assert (effect.status, effect.outcome) == (200, "done")
        assert effect.snapshot == before.id
        assert [one.path for one in session.effects(all=True)] == ["/orders", "/read"]
        asked = [event for event in session.events() if event.kind == "network.request"]
        assert [event.details["path"] for event in asked] == ["/orders", "/read"]
        assert asked[0].snapshot_before == before.id
        after = session.snapshot("after")
        found = session.diff("before", "after").effects
        assert found is not None and [one.id for one in found.effects] == [effect.id]
        (child,) = session.fork(1, "before", start=False)
        child.delete()
        assert session.left_behind is not None and session.left_behind.count == 1
        assert session.rollback("before").left_behind is not None
        assert [one.id for one in session.left_behind.effects] == [effect.id]
        # Told once: what was left is on no line any more but that of its snapshot.
        assert session.rollback("before").left_behind is None
        assert fetch(session, "https://api.example.com/rolled-back") == "200"
        assert session.rollback(after).left_behind is None


_SMTP = """
import socket
with socket.create_connection(("other.example.org", 25), 10) as one:
    one.sendall(b"EHLO me\\r\\n")
    raise SystemExit(0 if one.recv(100) else "closed")
"""


def test_the_command_line_shows_and_sets_it(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOJOURN_URL", outside.server.url)
    monkeypatch.setenv("SOJOURN_TOKEN", outside.server.token)

    def sojourn(*words: str) -> tuple[str, str]:
        result = CliRunner().invoke(cli, words, standalone_mode=False)
        assert result.exception is None, result.output
        return result.stdout, result.stderr

    made, _ = sojourn("session", "create", "--network", "allow=api.example.com,echo.example.com:7")
    id = made.strip()
    shown, _ = sojourn("session", "network", id)
    assert "allowlist" in shown and "echo.example.com port 7" in shown
    outside.client.secrets.set("CLI_KEY", "a long enough value", ["api.example.com"])
    sojourn("secret", "grant", "CLI_KEY", id)
    session = outside.client.sessions.get(id)
    assert session.exec("printenv CLI_KEY").text.strip() == "sojourn-secret-CLI_KEY"
    assert fetch(session, "http://other.example.org/") == "403"
    assert not session.exec(["python3", "-c", _SMTP]).ok
    denied, _ = sojourn("session", "effects", id, "--denied")
    rows = denied.splitlines()[1:]
    assert [row.split("  ")[-2:] for row in rows] == [
        ["no-rule", "no rule allows other.example.org"]
    ] * 2, denied
    assert "other.example.org:80" in rows[0] and "other.example.org:25" in rows[1]
    sojourn("session", "network", id, "allow=other.example.org", "deny=echo.example.com")
    assert session.refresh().network.secrets == ["CLI_KEY"]
    assert fetch(session, "http://other.example.org/") == "200"
    sojourn("secret", "revoke", "CLI_KEY", id)
    assert not session.exec("printenv CLI_KEY").ok
    policy = tmp_path / "policy.json"
    policy.write_text(
        '{"mode": "allowlist", "on_effects": "refuse",'
        ' "rules": [{"name": "api", "domains": ["api.example.com"]}]}'
    )
    shown, _ = sojourn("session", "network", id, "--set", str(policy), "--json")
    assert json.loads(shown)["on_effects"] == "refuse"
    sojourn("session", "snapshot", id, "--label", "before")
    assert fetch(session, "https://api.example.com/orders", "-d", "x=1") == "200"
    listed, _ = sojourn("session", "effects", id)
    assert "POST" in listed and "api.example.com:443/orders" in listed
    with pytest.raises(EffectsInTheWay):
        session.rollback("before")
    _, told = sojourn("session", "rollback", id, "before", "--force")
    assert "1 request that cannot be taken back: POST api.example.com/orders 200" in told
    shown, _ = sojourn("session", "get", id)
    assert "api.example.com" in shown
    shown, _ = sojourn("status")
    assert "gateway" in shown and str(outside.server.data / "sojourn.db") in shown
    session.delete()


def test_a_policy_can_refuse_to_leave_them_behind(client: Sojourn, outside: Outside) -> None:
    with made(client, allow("api.example.com", on_effects="refuse")) as session:
        session.snapshot("before")
        assert fetch(session, "https://api.example.com/refused", "-X", "DELETE") == "200"
        for verb in (session.rollback, lambda name: session.fork(1, name)):
            with pytest.raises(EffectsInTheWay) as refused:
                verb("before")
            assert refused.value.details["count"] == 1
            assert refused.value.details["effects"][0]["path"] == "/refused"
        assert fetch(session, "https://api.example.com/goes-on") == "200"
        session.rollback("before", force=True)
        assert session.left_behind is not None and session.left_behind.count == 1
        assert session.exec("true").ok


def test_the_death_of_the_gateway_harms_no_session(allowed: Session, outside: Outside) -> None:
    client = outside.client
    hanging = allowed.spawn(["curl", "-sS", "-m", "60", "-d", "x", "http://api.example.com/hang"])
    eventually(lambda: any(one.path == "/hang" for one in allowed.effects()))
    gateway = client.status().gateway
    assert gateway is not None and gateway.pid is not None
    os.kill(gateway.pid, signal.SIGKILL)
    assert hanging.wait(timeout=20).exit_code not in (0, None)
    assert allowed.exec("echo alive").text == "alive\n"
    eventually(lambda: fetch(allowed, "https://api.example.com/next") == "200")
    eventually(
        lambda: [one.outcome for one in allowed.effects() if one.path == "/hang"] == ["interrupted"]
    )
    after = client.status().gateway
    assert after is not None and after.running
    assert after.pid != gateway.pid and after.restarts >= 1


def test_hooks_are_run_and_on_record(client: Sojourn) -> None:
    with made(client, allow("api.example.com")) as session:
        hook = (
            "#!/bin/sh\n"
            "curl -sS -m 10 -o /dev/null http://api.example.com/hook-$SOJOURN_REASON"
            " && echo $SOJOURN_HOOK $SOJOURN_REASON >> /root/hooks\n"
        )
        for name in ("pre-suspend", "post-resume"):
            session.files.write(f"/etc/sojourn/hooks/{name}", hook.encode(), mode=0o755)
        session.suspend()
        session.resume()
        assert session.exec("cat /root/hooks").text == "pre-suspend suspend\npost-resume resume\n"
        told = [(one.kind, one.result) for one in session.events() if "hook" in one.kind]
        assert told == [("hook.pre-suspend", "ok"), ("hook.post-resume", "ok")]
        (child,) = session.fork()
        assert child.exec("tail -1 /root/hooks").text == "post-resume fork\n"
        child.delete()


def test_a_restart_of_the_server_keeps_the_network(outside: Outside) -> None:
    session = outside.client.sessions.create(network=allow("api.example.com"))
    asleep = outside.client.sessions.create(network=allow("api.example.com"))
    asleep.suspend()
    outside.client = outside.server.restart(**outside.environment)
    for one in (session, asleep):
        again = outside.client.sessions.get(one.id)
        assert again.network.mode is NetworkMode.ALLOWLIST
        assert fetch(again, "https://api.example.com/restarted") == "200"
        again.delete()


_ORDERS = """
import http.client, sys, time
for number in range(1000000):
    try:
        connection = http.client.HTTPConnection("api.example.com", timeout=10)
        connection.request("POST", f"/kill/{number}", b"x")
        if connection.getresponse().status == 200:
            print(number, flush=True)
        connection.close()
    except (OSError, http.client.HTTPException):
        time.sleep(0.05)
    time.sleep(0.02)
"""


def test_what_left_around_kills_of_the_server_left_once_and_is_on_record_once(
    outside: Outside,
) -> None:
    session = outside.client.sessions.create(network=allow("api.example.com"))
    program = session.spawn(["python3", "-c", _ORDERS])

    def goes_on(program: Process) -> None:
        done = len(said(program).split())
        eventually(lambda: len(said(program).split()) > done + 5, 60)

    for _ in range(3):
        goes_on(program)
        outside.client = outside.server.restart(**outside.environment)  # by SIGKILL
        session = outside.client.sessions.get(session.id)
        program = session.process(program.id)
    goes_on(program)
    program.kill()
    program.wait()
    answered = {f"/kill/{number}" for number in said(program).split()}
    lines = [request.split(b" ")[:2] for request in list(outside.world.requests)]
    left = Counter(line[1].decode() for line in lines if line[1].startswith(b"/kill/"))
    recorded = Counter(effect.path for effect in session.effects())
    assert set(left.values()) == {1} and set(recorded.values()) == {1}
    assert answered <= left.keys() <= recorded.keys()
    session.delete()
