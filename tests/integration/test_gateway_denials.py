"""Ways out of a session that must not be any: each is tried against real servers and denied."""

from __future__ import annotations

import asyncio
import re
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterator

import pytest

from sojourn.gateway.resolving import _own_addresses
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule
from sojourn.wire.tunnels import Kind, Refusal
from support.gateway_guests import GuestTls, TunnelRefused, TunnelReset
from support.gateway_rig import Rig, attempt, outcome, request
from support.gateway_world import (
    ALLOWED,
    ALLOWED_V6,
    METADATA,
    NAMESERVER,
    OTHER,
    PRIVATE,
    World,
)

pytestmark = pytest.mark.privileged

Attempt = Callable[[Rig], Awaitable[str]]

_POLICY = NetworkPolicy(
    mode=NetworkMode.ALLOWLIST,
    rules=[
        NetworkRule("web", domains=["example.com", "*.example.com", "пример.example.org"]),
        NetworkRule("raw", domains=["raw.example.com"], ports=[2222, 8080]),
        NetworkRule("pinned", domains=["pinned.example.org"], inspect=False),
        NetworkRule("below", domains=["*.wild.example.org"]),
        NetworkRule("office", cidrs=["10.0.0.0/8"], ports=[80]),
    ],
)
_FORBIDDEN = {
    (OTHER, 80),
    (OTHER, 443),
    (PRIVATE, 80),
    (METADATA, 80),
    ("127.0.0.1", 80),
    ("198.18.0.9", 80),
    ("100.64.3.4", 80),
    (ALLOWED_V6, 80),
    (NAMESERVER, 53),
    ("::1", 80),
}


def _own() -> str:
    """An address of this host, or one that is always its own."""
    for address in _own_addresses():
        if address.version == 4 and not address.is_loopback:
            return str(address)
    return "127.0.0.1"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("gateway")
    with World(directory) as world:
        world.zone.update(
            {
                "example.com": [ALLOWED],
                "raw.example.com": [ALLOWED],
                "pinned.example.org": [ALLOWED],
                "forbidden.com": [OTHER],
                "wild.example.org": [ALLOWED],
                "evilexample.com": [OTHER],
                "example.com.evil.com": [OTHER],
                "xn--xample-9uf.com": [OTHER],
                "metadata.example.com": [METADATA],
                "private.example.com": [PRIVATE],
                "loop.example.com": ["127.0.0.1"],
                "loop6.example.com": ["::1"],
                "shared.example.com": ["100.64.3.4"],
                "synthetic.example.com": ["198.18.0.9"],
                "mapped.example.com": [f"::ffff:{METADATA}"],
                "nat64.example.com": ["64:ff9b::a9fe:a9fe"],
                "sixtofour.example.com": ["2002:a9fe:a9fe::1"],
                "metadata6.example.com": ["fd00:ec2::254"],
                "zero.example.com": ["0.0.0.0"],
                "own.example.com": [_own()],
                "rebind.example.com": [],
            }
        )
        for address, port in sorted(_FORBIDDEN - {(OTHER, 443), (NAMESERVER, 53)}):
            world.serve(address, port, world.http)
        world.serve(ALLOWED, 80, world.http)
        world.serve(ALLOWED, 443, world.http, tls="example.com")
        world.serve(ALLOWED, 8080, world.http)
        world.serve(OTHER, 443, world.http, tls="forbidden.com")
        rig = Rig(directory, world)
        try:
            rig.attach(_POLICY)
            yield rig
        finally:
            rig.close()


def http(host: str | bytes, sent: bytes | None = None, port: int = 80) -> Attempt:
    """Plain HTTP on a connection to a host."""
    data = request(host) if sent is None else sent
    return lambda rig: attempt(rig, host, port, data)


def https(host: str, sni: str | None, sent: bytes | None = None, port: int = 443) -> Attempt:
    """HTTP over TLS, with a name in the greeting."""

    async def run(rig: Rig) -> str:
        try:
            tunnel = await rig.open(host, port)
        except TunnelRefused as refused:
            return f"refused {refused}"
        try:
            tls = await GuestTls(tunnel, rig.authority, sni).greet()
            return await outcome(tls, request(sni or host) if sent is None else sent)
        except (TunnelReset, ssl.SSLError):
            return "reset"
        finally:
            tunnel.close()

    return run


def proxied(*sent: bytes) -> Attempt:
    """Bytes to the proxy, the next after each answer; the last answer counts."""

    async def run(rig: Rig) -> str:
        tunnel = await rig.open(b"", 0, Kind.PROXY)
        try:
            found = ""
            for data in sent:
                found = await outcome(tunnel, data)
            return found
        finally:
            tunnel.close()

    return run


def socks(*sent: bytes) -> Attempt:
    """A SOCKS request; its refusal is the answer."""

    async def run(rig: Rig) -> str:
        tunnel = await rig.open(b"", 0, Kind.PROXY)
        try:
            answer = b""
            for data in sent:
                await tunnel.write(data)
                answer = await tunnel.read()
            code = answer[1] if answer else 0xFF
            return "granted" if code in (0, 0x5A) else f"refused {code}"
        except TunnelReset:
            return "reset"
        finally:
            tunnel.close()

    return run


def following(target: str) -> Attempt:
    """A redirect of an allowed server, followed as a program would."""

    async def run(rig: Rig) -> str:
        tunnel = await rig.open("example.com", 80)
        await tunnel.write(request("example.com", f"/redirect?{target}"))
        answer = await tunnel.until(b"\r\n\r\n")
        tunnel.close()
        location = re.search(rb"location: http://([^/\r]+)", answer)
        assert location is not None
        host = location[1].decode()
        return await attempt(rig, host, 80, request(host))

    return run


def rebinding() -> Attempt:
    """A name that is public when first asked for, and private the second time."""

    async def run(rig: Rig) -> str:
        rig.world.answers["rebind.example.com"] = [[ALLOWED], [METADATA]]
        first = await attempt(rig, "rebind.example.com", 80, request("rebind.example.com"))
        assert first == "200"
        return await attempt(rig, "rebind.example.com", 80, request("rebind.example.com"))

    return run


def slowly(data: bytes) -> Attempt:
    """A request for another host, a byte at a time, after a silence that is taken for raw bytes."""

    async def run(rig: Rig) -> str:
        tunnel = await rig.open("raw.example.com", 8080)
        await asyncio.sleep(0.5)
        for at in range(len(data) - 1):
            await tunnel.write(data[at : at + 1])
        found = await outcome(tunnel, data[-1:])
        tunnel.close()
        return found

    return run


_FRONTED = b"GET / HTTP/1.1\r\nHost: forbidden.com\r\n\r\n"
_SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: forbidden.com\r\n\r\n"

WAYS: dict[str, Attempt] = {
    # Names
    "a name no rule has": http("forbidden.com"),
    "a name that ends like an allowed one": http("evilexample.com"),
    "a name that begins like an allowed one": http("example.com.evil.com"),
    "the name below which a wildcard is": http("wild.example.org"),
    "a look-alike letter": http("еxample.com"),  # noqa: RUF001
    "a look-alike in its ASCII form": http("xn--xample-9uf.com"),
    "a name with a zero byte": http(b"example.com\0.forbidden.com"),
    "a name with a user": http("example.com@forbidden.com"),
    "a name with a port in it": http("example.com:80@forbidden.com"),
    "an empty name": http(""),
    "a name over the limit": http("a" * 250 + ".example.com"),
    "a name with a space": http("example.com forbidden.com"),
    "the host by name": http("localhost"),
    "a port no rule has": http("example.com", port=8080),
    # Addresses
    "an address": http(OTHER),
    "the address of an allowed name": https(ALLOWED, None),
    "an IPv6 address": http(f"[{ALLOWED_V6}]"),
    "an IPv6 address without brackets": http(ALLOWED_V6),
    "loopback": http("127.0.0.1"),
    "loopback in one number": http("2130706433"),
    "loopback in octal": http("0177.0.0.1"),
    "loopback in hexadecimal": http("0x7f.1"),
    "loopback, short": http("127.1"),
    "loopback in full-width digits": http("１２７.0.0.1"),  # noqa: RUF001
    "loopback with dots of another script": http("127。0。0。1"),
    "loopback with a dot at its end": http("127.0.0.1."),
    "loopback in IPv6": http("[::1]"),
    "loopback mapped into IPv6": http("[::ffff:127.0.0.1]"),
    "loopback compatible with IPv6": http("[::127.0.0.1]"),
    "an address with a zone": http("[fe80::1%25lo]"),
    "an unspecified address": http("0.0.0.0"),
    "the metadata service": http(METADATA),
    "the metadata service in one number": http("2852039166"),
    "the metadata service behind NAT64": http("[64:ff9b::a9fe:a9fe]"),
    "the metadata service in 6to4": http("[2002:a9fe:a9fe::1]"),
    "the metadata service in IPv6": http("[fd00:ec2::254]"),
    "a private address the operator does not allow": http(PRIVATE),
    "a shared address": http("100.64.3.4"),
    "a synthetic address": http("198.18.0.9"),
    "a number that is no address": http("1.2.3.4.5"),
    "broadcast": http("255.255.255.255"),
    # Names that lead where none may
    "a name of the metadata service": http("metadata.example.com"),
    "a name of the metadata service in IPv6": http("metadata6.example.com"),
    "a name of a mapped address": http("mapped.example.com"),
    "a name of an address behind NAT64": http("nat64.example.com"),
    "a name of an address in 6to4": http("sixtofour.example.com"),
    "a name of a private address": http("private.example.com"),
    "a name of loopback": http("loop.example.com"),
    "a name of loopback in IPv6": http("loop6.example.com"),
    "a name of no address": http("zero.example.com"),
    "a name of a shared address": http("shared.example.com"),
    "a name of a synthetic address": http("synthetic.example.com"),
    "a name of the host itself": http("own.example.com"),
    "rebinding": rebinding(),
    "a redirect to a name no rule has": following("http://forbidden.com/"),
    "a redirect to the metadata service": following(f"http://{METADATA}/"),
    # Other protocols
    "DNS over TCP": http(
        NAMESERVER, struct.pack(">H6H", 12, 1, 256, 0, 0, 0, 0) + b"\r\n", port=53
    ),
    "HTTP/2 without asking": http("example.com", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "what is neither HTTP nor TLS": http("example.com", b"\0\1\2\3\r\n\r\n"),
    "a request without a version": http("example.com", b"GET /\r\n\r\n"),
    # Requests that speak for another host
    "another host": http("example.com", _FRONTED),
    "another host's address": http("example.com", request(METADATA)),
    "a host and a user": http("example.com", request("example.com@forbidden.com")),
    "two hosts": http(
        "example.com", b"GET / HTTP/1.1\r\nHost: example.com\r\nHost: forbidden.com\r\n\r\n"
    ),
    "a folded host": http(
        "example.com", b"GET / HTTP/1.1\r\nHost: example.com\r\n forbidden.com\r\n\r\n"
    ),
    "a host with a space before its colon": http(
        "example.com", b"GET / HTTP/1.1\r\nHost : forbidden.com\r\n\r\n"
    ),
    "a host with a zero byte": http("example.com", request(b"example.com\0forbidden.com")),
    "a host with another port": http("example.com", request("example.com:8080")),
    "a host with a port that is none": http("example.com", request("example.com:80x")),
    "a whole address of another host": http(
        "example.com", b"GET http://forbidden.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n"
    ),
    "a whole address and another host": http(
        "example.com", b"GET http://example.com/ HTTP/1.1\r\nHost: forbidden.com\r\n\r\n"
    ),
    "a whole address with a user": http(
        "example.com",
        b"GET http://example.com@forbidden.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
    ),
    "a relay through an allowed server": http(
        "example.com", b"CONNECT forbidden.com:443 HTTP/1.1\r\nHost: forbidden.com:443\r\n\r\n"
    ),
    "a bare address with another host": http(OTHER, request("forbidden.com")),
    "another host after a silence": slowly(_FRONTED),
    "another host after an empty line": http("raw.example.com", b"\r\n" + _FRONTED, port=8080),
    "another host in small letters": http(
        "raw.example.com", b"get / http/1.1\r\nHost: forbidden.com\r\n\r\n", port=8080
    ),
    # Requests in requests
    "two lengths": http(
        "example.com",
        request(
            "example.com", "/", f"Content-Length: {len(_SMUGGLED)}", "Transfer-Encoding: chunked"
        )
        + b"0\r\n\r\n"
        + _SMUGGLED,
    ),
    "two different lengths": http(
        "example.com",
        request("example.com", "/", "Content-Length: 0", f"Content-Length: {len(_SMUGGLED)}")
        + _SMUGGLED,
    ),
    "an unknown encoding": http(
        "example.com",
        request("example.com", "/", "Transfer-Encoding: xchunked") + b"0\r\n\r\n" + _SMUGGLED,
    ),
    "a length with a sign": http(
        "example.com", request("example.com", "/", "Content-Length: +5") + _SMUGGLED
    ),
    "large headers": http("example.com", request("example.com", "/", "X: " + "a" * 70000)),
    # TLS
    "TLS for a name no rule has": https("forbidden.com", "forbidden.com"),
    "TLS for another name": https("example.com", "forbidden.com"),
    "TLS with another host inside": https("example.com", "example.com", _FRONTED),
    "TLS to a bare address for a name no rule has": https(OTHER, "forbidden.com"),
    "TLS for an address": https(OTHER, None),
    "passed through for another name": https("pinned.example.org", "forbidden.com"),
    "passed through for an allowed other name": https("pinned.example.org", "example.com"),
    "passed through without a name": https("pinned.example.org", None),
    "no TLS where it is passed through": http("pinned.example.org", b"\x16\x03\x01\0\5hello"),
    # The proxy
    "CONNECT to a name no rule has": proxied(
        b"CONNECT forbidden.com:443 HTTP/1.1\r\nHost: forbidden.com:443\r\n\r\n"
    ),
    "CONNECT to loopback": proxied(b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "CONNECT, then another host": proxied(
        b"CONNECT example.com:80 HTTP/1.1\r\nHost: example.com:80\r\n\r\n", _FRONTED
    ),
    "the proxy, for a name no rule has": proxied(
        b"GET http://forbidden.com/ HTTP/1.1\r\nHost: forbidden.com\r\n\r\n"
    ),
    "the proxy, with another host": proxied(
        b"GET http://example.com/ HTTP/1.1\r\nHost: forbidden.com\r\n\r\n"
    ),
    "the proxy, without a host": proxied(b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"),
    "the proxy, for a file": proxied(b"GET file:///etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n"),
    "SOCKS5 to a private address": socks(
        b"\5\1\0", b"\5\1\0\1" + bytes((192, 168, 0, 1)) + b"\0\x16"
    ),
    "SOCKS5 to a name no rule has": socks(b"\5\1\0", b"\5\1\0\3\x0dforbidden.com\x1f\x90"),
    "SOCKS5 to loopback in IPv6": socks(b"\5\1\0", b"\5\1\0\4" + bytes(15) + b"\1\0\x16"),
    "SOCKS5 to listen": socks(b"\5\1\0", b"\5\2\0\1\0\0\0\0\0\0"),
    "SOCKS5 for datagrams": socks(b"\5\1\0", b"\5\3\0\1\0\0\0\0\0\0"),
    "SOCKS4a to a name no rule has": socks(b"\4\1\x1f\x90\0\0\0\1u\0forbidden.com\0"),
    "SOCKS4 to the metadata service": socks(b"\4\1\x1f\x90" + bytes((169, 254, 169, 254)) + b"u\0"),
}


def test_there_are_many_ways() -> None:
    assert len(WAYS) >= 40


@pytest.mark.parametrize("way", WAYS)
def test_there_is_no_way_out(rig: Rig, way: str) -> None:
    world = rig.world
    before = len(world.connections), len(world.requests)
    asked = len(world.queries)
    found = rig.run(WAYS[way](rig))
    assert found == "reset" or found.startswith("refused") or found[:1] in "45", found
    reached = set(world.connections[before[0] :])
    assert not reached & _FORBIDDEN, reached
    # A query that goes out is a way out, too.
    for query in world.queries[asked:]:
        assert "forbidden" not in query
        assert query.endswith((".example.com", " example.com", ".example.org")), query
    for head in world.requests[before[1] :]:
        assert b"host: forbidden" not in head.lower()
        assert b"smuggled" not in head


def test_the_allowed_ones_work(rig: Rig) -> None:
    async def run() -> list[str]:
        return [
            await attempt(rig, "example.com", 80, request("example.com")),
            await attempt(rig, "EXAMPLE.com.", 80, request("Example.COM.:80")),
            await attempt(rig, "raw.example.com", 8080, request("raw.example.com:8080")),
            await attempt(rig, ALLOWED, 80, request("example.com")),
            await https("example.com", "example.com")(rig),
            await https(ALLOWED, "example.com")(rig),
            await proxied(b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n")(rig),
            await proxied(
                b"CONNECT example.com:80 HTTP/1.1\r\nHost: example.com:80\r\n\r\n",
                request("example.com"),
            )(rig),
            await socks(b"\5\1\0", b"\5\1\0\3\x0bexample.com\0\x50")(rig),
            await socks(b"\4\1\0\x50\0\0\0\1u\0example.com\0")(rig),
        ]

    assert rig.run(run()) == ["200"] * 8 + ["granted"] * 2


def test_a_refusal_names_what_decided(rig: Rig) -> None:
    async def run() -> bytes:
        tunnel = await rig.open("forbidden.com", 80)
        await tunnel.write(request("forbidden.com", "/", "Accept: application/json"))
        return await tunnel.until(b"}")

    answer = rig.run(run())
    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"x-sojourn-rule: no-rule" in answer
    assert b'"code":"network_denied"' in answer
    assert b"next_step" in answer


@pytest.mark.parametrize(
    "host", ["127.0.0.1", METADATA, PRIVATE, "100.64.3.4", "198.18.0.9", "[::1]", "own.example.com"]
)
def test_open_reaches_no_inside(rig: Rig, host: str) -> None:
    rig.attach(NetworkPolicy(mode=NetworkMode.OPEN), sandbox="open")

    async def run() -> str:
        try:
            tunnel = await rig.open(host, 80, sandbox="open")
        except TunnelRefused as refused:
            return f"refused {refused}"
        return await outcome(tunnel, request(host))

    before = len(rig.world.connections)
    try:
        assert rig.run(run()) in ("403", f"refused {Refusal.POLICY.name}")
        assert not set(rig.world.connections[before:]) & _FORBIDDEN
    finally:
        rig.detach("open")


def test_none_reaches_nothing(rig: Rig) -> None:
    rig.attach(NetworkPolicy(), sandbox="none")

    async def run(host: str, kind: Kind) -> None:
        await rig.open(host, 443, kind, sandbox="none")

    try:
        for host, kind in (
            ("example.com", Kind.CONNECT),
            (ALLOWED, Kind.CONNECT),
            ("", Kind.PROXY),
        ):
            with pytest.raises(TunnelRefused):
                rig.run(run(host, kind))
    finally:
        rig.detach("none")


def test_what_is_refused_is_on_record_with_the_rule(rig: Rig) -> None:
    rig.attach(_POLICY, sandbox="told")

    async def tried(host: str | bytes, port: int, sent: bytes) -> None:
        try:
            tunnel = await rig.open(host, port, sandbox="told")
        except TunnelRefused:
            return
        await outcome(tunnel, sent)
        tunnel.close()

    async def run() -> set[tuple[str, int, str]]:
        await tried("forbidden.com", 80, request("forbidden.com"))
        await tried(
            "forbidden.com", 25, b"EHLO me\r\n"
        )  # no HTTP: reset, so only the record says why
        await tried("example.com", 8080, b"")
        await tried("example.com", 80, request("forbidden.com"))
        await tried("metadata.example.com", 80, request("metadata.example.com"))
        await tried("private.example.com", 80, request("private.example.com"))
        await tried(METADATA, 80, request(METADATA))
        await tried(b"ex\xffample", 80, b"")
        server = rig.server
        while len(seen := [one for one in server.denials if one.sandbox == "told"]) < 8:
            await asyncio.sleep(0.01)
        assert all(one.count == 1 and one.reason for one in seen)
        return {(one.host, one.port, one.rule) for one in seen}

    try:
        assert rig.run(run()) == {
            ("forbidden.com", 80, "no-rule"),
            ("forbidden.com", 25, "no-rule"),
            ("example.com", 8080, "port"),
            ("forbidden.com", 80, "host-mismatch"),
            ("metadata.example.com", 80, "special-address"),
            ("private.example.com", 80, "private-address"),
            (METADATA, 80, "special-address"),
            ("ex\N{REPLACEMENT CHARACTER}ample", 80, "host-spelling"),
        }
    finally:
        rig.detach("told")
