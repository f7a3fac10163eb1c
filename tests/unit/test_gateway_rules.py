"""What a policy lets through, decided without any network."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.gateway.addresses import AddressRefused, Class, classify, meant, parse
from sojourn.gateway.names import Host, HostRefused, covers, read_authority, read_host
from sojourn.gateway.rules import judge_addresses, judge_host
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule

_LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f000001",
        "0X7F.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.1",
        "127.0.0.1.",
        "0x7f.1",
    ],
)
def test_every_spelling_of_an_address_is_that_address(text: str) -> None:
    assert parse(text) == _LOOPBACK


@pytest.mark.parametrize(
    "text",
    [
        "1.2.3.4.5",
        "256.1.1.1",
        "1..2",
        "08.1.1.1",
        "4294967296",
        "fe80::1%eth0",
        "1.2.3.256",
        "[::1",
        "::g",
        "999999999999999999999999",
    ],
)
def test_what_is_no_address_and_no_name_is_refused(text: str) -> None:
    with pytest.raises((AddressRefused, HostRefused)):
        read_host(text)


@pytest.mark.parametrize("text", ["a.b.c", "1.example.com", "0xg.com", "x1", "1a"])
def test_a_name_is_no_address(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("8.8.8.8", Class.PUBLIC),
        ("2606:2800:220:1::34", Class.PUBLIC),
        ("10.0.0.1", Class.PRIVATE),
        ("172.31.255.255", Class.PRIVATE),
        ("172.32.0.1", Class.PUBLIC),
        ("192.168.1.1", Class.PRIVATE),
        ("100.127.255.255", Class.PRIVATE),
        ("100.128.0.1", Class.PUBLIC),
        ("100.100.100.200", Class.NEVER),
        ("168.63.129.16", Class.NEVER),
        ("fd12::1", Class.PRIVATE),
        ("fd00:ec2::254", Class.NEVER),
        ("127.255.255.255", Class.NEVER),
        ("0.1.2.3", Class.NEVER),
        ("169.254.169.254", Class.NEVER),
        ("198.19.255.254", Class.NEVER),
        ("224.0.0.1", Class.NEVER),
        ("255.255.255.255", Class.NEVER),
        ("240.0.0.1", Class.NEVER),
        ("::", Class.NEVER),
        ("::1", Class.NEVER),
        ("::10.0.0.1", Class.NEVER),
        ("fe80::1", Class.NEVER),
        ("fec0::1", Class.NEVER),
        ("ff02::1", Class.NEVER),
        ("2001::1", Class.NEVER),
        ("2001:db8::1", Class.NEVER),
        ("2002:808:808::1", Class.NEVER),
        ("64:ff9b:1::1", Class.NEVER),
        ("::ffff:8.8.8.8", Class.PUBLIC),
        ("::ffff:10.0.0.1", Class.PRIVATE),
        ("::ffff:127.0.0.1", Class.NEVER),
        ("64:ff9b::7f00:1", Class.NEVER),
        ("64:ff9b::808:808", Class.PUBLIC),
    ],
)
def test_what_an_address_is(text: str, kind: Class) -> None:
    assert classify(ipaddress.ip_address(text)) is kind


@given(st.integers(0, 2**32 - 1))
def test_no_embedding_changes_what_an_address_is(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    for outer in (f"::ffff:{address}", f"64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}"):
        assert meant(ipaddress.IPv6Address(outer)) == address
        assert classify(ipaddress.IPv6Address(outer)) is classify(address)
    if not address.is_global:
        assert classify(address) is not Class.PUBLIC or str(address).startswith("192.0.0.")


@given(st.text(max_size=40))
def test_any_text_is_a_host_of_one_form_or_refused(text: str) -> None:
    try:
        host = read_host(text)
    except HostRefused:
        return
    assert read_host(str(host)) == host


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("EXAMPLE.com", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("example。com", "example.com"),
        ("_dmarc.example.com", "_dmarc.example.com"),
    ],
)
def test_spellings_of_a_name_become_one(said: str, name: str) -> None:
    assert read_host(said) == Host(name=name)


@pytest.mark.parametrize(
    "said",
    [
        *("", ".", "a..b", "-a.com", "a-.com", "a b", "a\0b", "a/b", "a@b", "a\r\nb", "a#b"),
        *("*.a.com", "a" * 64 + ".com", ("a" * 60 + ".") * 5, "a%2eb", "a\\b", "\ud800.com"),
    ],
)
def test_what_is_no_name_is_refused(said: str) -> None:
    with pytest.raises(HostRefused):
        read_host(said)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("a.com", ("a.com", 80)),
        ("a.com:81", ("a.com", 81)),
        ("[2606:2800::1]:8080", ("2606:2800::1", 8080)),
        ("2606:2800::1", None),
        ("a.com:", None),
        ("a.com:0", None),
        ("a.com:65536", None),
        ("a.com:８０", None),  # noqa: RUF001
        ("a.com:80:81", None),
        ("u@a.com", None),
        ("[::1", None),
        ("[::1]x", None),
    ],
)
def test_an_authority(said: str, expected: tuple[str, int] | None) -> None:
    if expected is None:
        with pytest.raises(HostRefused):
            read_authority(said, 80)
        return
    host, port = read_authority(said, 80)
    assert (str(host), port) == expected


def test_a_wildcard_covers_what_is_below_it_alone() -> None:
    assert covers("*.example.com", "a.example.com")
    assert covers("*.example.com", "a.b.example.com")
    assert not covers("*.example.com", "example.com")
    assert not covers("*.example.com", "badexample.com")
    assert not covers("example.com", "a.example.com")
    assert covers("*.BÜCHER.example", "a.xn--bcher-kva.example")
    assert not covers("*", "a.com")
    assert not covers("*.1.2.3.4", "a.1.2.3.4")


_POLICY = NetworkPolicy(
    mode=NetworkMode.ALLOWLIST,
    rules=[
        NetworkRule("web", domains=["a.com"]),
        NetworkRule("mail", domains=["a.com"], ports=[25, 443], inspect=False),
        NetworkRule("office", cidrs=["10.0.0.0/8", "8.8.8.0/24"]),
        NetworkRule("broken", cidrs=["10.0.0.0/99"], domains=["..", "*"]),
    ],
)


def test_the_first_rule_that_fits_decides_and_is_named() -> None:
    web = judge_host(_POLICY, Host(name="a.com"), 443)
    assert (web.allowed, web.rule, web.inspect, web.raw) == (True, "web", True, False)
    mail = judge_host(_POLICY, Host(name="a.com"), 25)
    assert (mail.allowed, mail.rule, mail.raw) == (True, "mail", True)
    port = judge_host(_POLICY, Host(name="a.com"), 22)
    assert (port.allowed, port.rule) == (False, "port")
    other = judge_host(_POLICY, Host(name="b.com"), 443)
    assert (other.allowed, other.rule) == (False, "no-rule")


@pytest.mark.parametrize(
    ("address", "private", "own", "rule"),
    [
        ("8.8.8.8", [], [], None),
        ("10.1.1.1", [], [], "private-address"),
        ("10.1.1.1", ["10.1.0.0/16"], [], None),
        ("10.2.1.1", ["10.1.0.0/16"], [], "private-address"),
        ("192.168.1.1", ["192.168.0.0/16"], [], "private-address"),
        ("127.0.0.1", ["127.0.0.0/8"], [], "special-address"),
        ("8.8.8.8", [], ["8.8.8.8"], "host-address"),
        ("::ffff:8.8.8.8", [], ["8.8.8.8"], "host-address"),
        ("10.1.1.1", ["10.0.0.0/8"], ["10.1.1.1"], "host-address"),
    ],
)
def test_what_a_name_may_lead_to(
    address: str, private: list[str], own: list[str], rule: str | None
) -> None:
    taken, refused = judge_addresses(
        _POLICY,
        443,
        [ipaddress.ip_address(address)],
        own=[ipaddress.ip_address(text) for text in own],
        private=[ipaddress.ip_network(text) for text in private],
    )
    assert (refused.rule if refused else None) == rule
    assert bool(taken) == (rule is None)


def test_of_several_addresses_the_allowed_ones_are_taken() -> None:
    addresses = [ipaddress.ip_address(text) for text in ("127.0.0.1", "8.8.8.8", "10.0.0.1")]
    taken, refused = judge_addresses(_POLICY, 80, addresses, own=[], private=[])
    assert [str(address) for address in taken] == ["8.8.8.8"]
    assert refused is None


def test_open_is_every_public_address_and_no_local_name() -> None:
    policy = NetworkPolicy(mode=NetworkMode.OPEN)
    assert judge_host(policy, Host(name="b.com"), 4711).raw
    assert judge_host(policy, Host(name="b.com"), 443).inspect
    for name in ("localhost", "router", "a.localhost", "printer.local"):
        assert judge_host(policy, Host(name=name), 80).rule == "local-name"
    for text in ("10.0.0.1", "169.254.169.254", "::1"):
        assert not judge_host(policy, Host(address=ipaddress.ip_address(text)), 80).allowed


def test_none_is_nothing() -> None:
    assert judge_host(NetworkPolicy(), Host(name="a.com"), 443).rule == "network-none"
