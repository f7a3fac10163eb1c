"""How network policies are written down by callers."""

from __future__ import annotations

from typing import Any

import pytest

from sojourn import InvalidRequest, NetworkMode, NetworkPolicy, NetworkRule, OnEffects, allow
from sojourn.client.core_networks import network_of


def targets(policy: NetworkPolicy) -> list[tuple[list[str], list[str], list[int]]]:
    return [(rule.domains, rule.cidrs, rule.ports) for rule in policy.rules]


def test_allow_names_domains_networks_and_ports() -> None:
    policy = allow(
        "api.example.com",
        "*.pypi.example",
        "db.example.com:5432",
        "203.0.113.0/24:22",
        "93.184.216.34",
        "2606:2800::/32",
        "[2606:2800::1]:8080",
    )
    assert policy.mode is NetworkMode.ALLOWLIST
    assert targets(policy) == [
        (["api.example.com"], [], []),
        (["*.pypi.example"], [], []),
        (["db.example.com"], [], [5432]),
        ([], ["203.0.113.0/24"], [22]),
        ([], ["93.184.216.34"], []),
        ([], ["2606:2800::/32"], []),
        ([], ["2606:2800::1"], [8080]),
    ]
    names = [rule.name for rule in policy.rules]
    assert names[0] == "api-example-com" and len(set(names)) == len(names)


def test_allow_takes_the_other_fields_of_a_policy() -> None:
    policy = allow("a.example.com", on_effects="refuse", secrets=["KEY"], inspect=False)
    assert policy.on_effects is OnEffects.REFUSE
    assert policy.secrets == ["KEY"]
    assert not policy.rules[0].inspect


def test_rules_that_would_have_one_name_get_two() -> None:
    policy = allow("a.example.com", "*.a.example.com", "a-example.com")
    assert len({rule.name for rule in policy.rules}) == 3


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("none", NetworkPolicy()),
        ("open", NetworkPolicy(NetworkMode.OPEN)),
        ("allow=a.example.com, b.example.com:8443", allow("a.example.com", "b.example.com:8443")),
        ({"mode": "open"}, NetworkPolicy(NetworkMode.OPEN)),
        (
            {"mode": "allowlist", "rules": [{"name": "r", "domains": ["a.example.com"]}]},
            NetworkPolicy(
                NetworkMode.ALLOWLIST, [NetworkRule(name="r", domains=["a.example.com"])]
            ),
        ),
        (NetworkPolicy(NetworkMode.OPEN), NetworkPolicy(NetworkMode.OPEN)),
        (None, None),
    ],
)
def test_forms_of_a_policy(given: Any, meant: NetworkPolicy | None) -> None:
    assert network_of(given) == meant


@pytest.mark.parametrize(
    "given",
    ["", "all", "allow", "allow=", "allow= , ", "allow=a.example.com:http", {"mode": "wide"}, 3],
)
def test_what_is_no_policy_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        network_of(given)
