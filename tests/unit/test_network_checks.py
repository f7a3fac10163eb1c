"""What a network policy may say."""

from __future__ import annotations

from typing import Any

import pytest

from sojourn.errors import InvalidRequest
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule
from sojourn.server.network_checks import check_network


def policy_of(**rule: Any) -> NetworkPolicy:
    return NetworkPolicy(NetworkMode.ALLOWLIST, [NetworkRule(**({"name": "r"} | rule))])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("API.Example.COM.", "api.example.com"),
        ("*.Example.com", "*.example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("*.team.github.io", "*.team.github.io"),
        ("example.co.uk", "example.co.uk"),
        ("*.example.co.uk", "*.example.co.uk"),
        ("a_b.example.com", "a_b.example.com"),
        ("github.io", "github.io"),
    ],
)
def test_domains_are_kept_in_one_form(given: str, kept: str) -> None:
    assert check_network(policy_of(domains=[given])).rules[0].domains == [kept]


@pytest.mark.parametrize(
    "domain",
    [
        "", "*", "*.", "*.com", "*.co.uk", "*.com.au", "*.github.io", "*.s3.amazonaws.com",
        "com", "localhost", "*.*.example.com", "a.*.example.com", "*example.com", "exa mple.com",
        "https://example.com", "example.com/path", "example.com:443", "user@example.com",
        "10.0.0.1", "2130706433", "0x7f.1", "::1", "[::1]", "-a.example.com", "a..example.com",
        "x" * 64 + ".example.com", ".example.com", "example.com\0", "a\n.example.com", "xn--.com",
    ],
)  # fmt: skip
def test_what_is_no_domain_of_somebody_is_refused(domain: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_network(policy_of(domains=[domain]))
    assert refused.value.details["field"] == "network.rules[0].domains"


@pytest.mark.parametrize(
    "cidr", ["93.184.216.0/24", "93.184.216.34", "0.0.0.0/0", "::/0", "2606:2800::/32"]
)
def test_outside_networks_are_taken(cidr: str) -> None:
    check_network(policy_of(cidrs=[cidr]))


@pytest.mark.parametrize(
    "cidr",
    [
        "93.184.216.34/24", "10.0.0.0/8", "192.168.1.1", "127.0.0.1", "127.0.0.0/8",
        "169.254.169.254", "169.254.0.0/16", "224.0.0.0/4", "::1", "fe80::/10", "fc00::/7",
        "100.64.0.0/10", "example.com", "1.2.3", "1.2.3.4/33", "", "100.100.100.200",
        "::ffff:10.0.0.1", "64:ff9b::a00:1",
    ],
)  # fmt: skip
def test_networks_that_are_not_outside_are_refused(cidr: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_network(policy_of(cidrs=[cidr]))
    assert refused.value.details["field"] == "network.rules[0].cidrs"


def test_private_networks_are_taken_where_the_operator_allows_them() -> None:
    allowed = ["10.1.0.0/16", "fd12::/16"]
    check_network(policy_of(cidrs=["10.1.2.0/24"]), private=allowed)
    check_network(policy_of(cidrs=["fd12:3::/32"]), private=allowed)
    for beyond in ("10.2.0.0/16", "10.0.0.0/8", "127.0.0.1"):
        with pytest.raises(InvalidRequest):
            check_network(policy_of(cidrs=[beyond]), private=[*allowed, "127.0.0.0/8"])


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (policy_of(), "rules[0]"),
        (policy_of(name="", domains=["example.com"]), "rules[0].name"),
        (policy_of(name="a b", domains=["example.com"]), "rules[0].name"),
        (policy_of(domains=["example.com"], ports=[0]), "rules[0].ports"),
        (policy_of(domains=["example.com"], ports=[65536]), "rules[0].ports"),
        (policy_of(domains=["example.com"], ports=[*range(1, 100)]), "rules[0].ports"),
        (policy_of(domains=[f"n{n}.example.com" for n in range(2001)]), "rules"),
        (
            NetworkPolicy(
                rules=[NetworkRule(f"r{n}", domains=["example.com"]) for n in range(201)]
            ),
            "rules",
        ),
        (NetworkPolicy(rules=[NetworkRule("a", domains=["example.com"])] * 2), "rules"),
        (NetworkPolicy(connections=0), "connections"),
        (NetworkPolicy(connections=10_000), "connections"),
        (NetworkPolicy(requests_per_minute=-1), "requests_per_minute"),
        (NetworkPolicy(bytes_per_second=-1), "bytes_per_second"),
        (NetworkPolicy(secrets=[f"S{n}" for n in range(65)]), "secrets"),
    ],
)
def test_bounds(policy: NetworkPolicy, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_network(policy)
    assert refused.value.details["field"] == f"network.{field}"
    assert refused.value.next_step


def test_two_hundred_rules_are_taken() -> None:
    rules = [NetworkRule(f"r{n}", domains=[f"n{n}.example.com"]) for n in range(200)]
    assert len(check_network(NetworkPolicy(NetworkMode.ALLOWLIST, rules)).rules) == 200
