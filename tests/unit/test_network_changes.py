"""A change of a network policy changes what it names, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn import InvalidRequest, NetworkMode, NetworkPolicy, NetworkRule, OnEffects
from sojourn.client.core_networks import allow
from sojourn.server.network_changes import changed
from sojourn.server.network_checks import check_network
from sojourn.wire.networks import NetworkChange

_POLICY = check_network(
    NetworkPolicy(
        mode=NetworkMode.ALLOWLIST,
        rules=[
            NetworkRule("web", domains=["a.example.com", "b.example.com"]),
            NetworkRule("mail", domains=["mail.example.com"], ports=[25, 587]),
            NetworkRule("net", cidrs=["93.185.0.0/16", "93.184.216.34"]),
            NetworkRule("all-of-it", domains=["*.wide.example.org"], inspect=False),
        ],
        secrets=["API_KEY"],
        on_effects=OnEffects.REFUSE,
        connections=7,
        requests_per_minute=9,
    )
)


def change(**fields: Any) -> NetworkPolicy:
    policy = changed(_POLICY, NetworkChange(**fields))
    return check_network(policy)  # what comes out is a policy that can be kept


def targets(policy: NetworkPolicy) -> dict[str, tuple[list[str], list[int]]]:
    return {rule.name: ([*rule.domains, *rule.cidrs], rule.ports) for rule in policy.rules}


def test_what_is_allowed_is_added_and_the_rest_stays() -> None:
    policy = change(allow=allow("c.example.com:8443").rules)
    assert policy.rules[:-1] == _POLICY.rules
    assert (policy.rules[-1].domains, policy.rules[-1].ports) == (["c.example.com"], [8443])
    assert msgspec.structs.replace(policy, rules=_POLICY.rules) == _POLICY


def test_what_is_allowed_already_is_not_added_again() -> None:
    once = change(allow=allow("C.example.com").rules)
    again = changed(once, NetworkChange(allow=allow("c.example.com.").rules))
    assert again == once
    assert changed(once, NetworkChange(allow=allow("c.example.com:8080").rules)) != once


def test_a_name_that_is_taken_gets_a_number() -> None:
    policy = change(allow=[NetworkRule("web", domains=["other.example.com"])])
    assert targets(policy)["web-2"] == (["other.example.com"], [])


def test_the_first_that_is_allowed_makes_a_list() -> None:
    policy = changed(NetworkPolicy(), NetworkChange(allow=allow("a.example.com").rules))
    assert policy.mode is NetworkMode.ALLOWLIST
    opened = changed(NetworkPolicy(NetworkMode.OPEN), NetworkChange(allow=allow("a.b.c").rules))
    assert opened.mode is NetworkMode.OPEN


@pytest.mark.parametrize(
    ("target", "name", "left"),
    [
        ("a.example.com", "web", (["b.example.com"], [])),
        ("A.Example.com.", "web", (["b.example.com"], [])),
        ("93.185.0.0/16", "net", (["93.184.216.34/32"], [])),
        ("93.184.216.34", "net", (["93.185.0.0/16"], [])),
        ("mail.example.com:25", "mail", (["mail.example.com"], [587])),
        ("mail.example.com", "mail", None),
        ("mail", "mail", None),
        ("*.wide.example.org", "all-of-it", None),
    ],
)
def test_what_is_denied_is_taken_out(
    target: str, name: str, left: tuple[list[str], list[int]] | None
) -> None:
    policy = change(deny=[target])
    assert targets(policy).get(name) == left
    others = [rule for rule in _POLICY.rules if rule.name != name]
    assert [rule for rule in policy.rules if rule.name != name] == others
    assert policy.secrets == ["API_KEY"] and policy.connections == 7


def test_a_port_is_denied_of_one_name_alone() -> None:
    policy = change(deny=["a.example.com:80"])
    assert targets(policy)["web"] == (["b.example.com"], [])
    assert targets(policy)["web-2"] == (["a.example.com"], [443])


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("c.example.com", "no rule names"),
        ("x.wide.example.org", r"\*\.wide\.example\.org"),
        ("mail.example.com:465", "no rule names"),
        ("93.185.0.0/16:80", "every port"),
        ("93.185.1.7", "no rule names"),
        ("", "no rule names"),
        ("so me:thing", "no rule names"),
    ],
)
def test_what_is_not_there_cannot_be_denied(target: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        change(deny=[target])


@pytest.mark.parametrize(
    ("wide", "target", "told"),
    [
        ("*.example.com", "a.example.com", r"rule 'example-com' allows \*\.example\.com"),
        ("*.example.com:8443", "mail.example.com", "would still be reached"),
        ("*.example.org", "*.wide.example.org", "would still be reached"),
        ("93.184.216.0/24", "93.184.216.34", r"allows 93\.184\.216\.0/24"),
        ("93.0.0.0/8:443", "93.185.0.0/16", "would still be reached"),
    ],
)
def test_what_another_rule_allows_as_well_is_not_denied(wide: str, target: str, told: str) -> None:
    policy = change(allow=allow(wide).rules)
    with pytest.raises(InvalidRequest, match=told):
        changed(policy, NetworkChange(deny=[target]))
    # Both at once, in any order; the rule by its name; at a port that the other one does not have.
    host = wide.partition(":")[0]
    for both in ([target, host], [host, target]):
        assert len(targets(changed(policy, NetworkChange(deny=both)))) <= len(policy.rules) - 1
    assert changed(policy, NetworkChange(deny=[policy.rules[0].name])).rules == policy.rules[1:]
    assert changed(policy, NetworkChange(deny=[target], mode=NetworkMode.NONE)).rules == []


def test_a_port_that_a_wider_rule_does_not_allow_is_denied() -> None:
    policy = change(allow=allow("*.example.com").rules)
    left = changed(policy, NetworkChange(deny=["mail.example.com:25"]))
    assert targets(left)["mail"] == (["mail.example.com"], [587])
    with pytest.raises(InvalidRequest, match="would still be reached"):
        changed(policy, NetworkChange(deny=["a.example.com:443"]))


def test_a_rule_of_an_open_network_closes_what_is_private_alone() -> None:
    rules = [NetworkRule("own", cidrs=["10.9.0.0/16"]), *allow("a.example.com").rules]
    policy = NetworkPolicy(NetworkMode.OPEN, rules)
    assert changed(policy, NetworkChange(deny=["10.9.0.0/16"])).rules == rules[1:]
    with pytest.raises(InvalidRequest, match="would still be reached"):
        changed(policy, NetworkChange(deny=["a.example.com"]))
    assert changed(policy, NetworkChange(deny=["a-example-com"])).rules == rules[:1]
    closed = changed(policy, NetworkChange(deny=["a.example.com"], mode=NetworkMode.ALLOWLIST))
    assert closed.rules == rules[:1]


def test_nothing_single_is_denied_of_an_open_network() -> None:
    with pytest.raises(InvalidRequest, match="open to every public address"):
        changed(NetworkPolicy(NetworkMode.OPEN), NetworkChange(deny=["a.example.com"]))


def test_modes() -> None:
    assert change(mode=NetworkMode.OPEN).rules == _POLICY.rules
    closed = change(mode=NetworkMode.NONE)
    assert (closed.mode, closed.rules, closed.secrets) == (NetworkMode.NONE, [], ["API_KEY"])
    # What was allowed before it was closed does not come back with what is allowed now.
    assert len(changed(closed, NetworkChange(allow=allow("z.example.com").rules)).rules) == 1


def test_secrets_come_and_go_by_name() -> None:
    assert change(grant=["OTHER", "API_KEY"]).secrets == ["API_KEY", "OTHER"]
    assert change(revoke=["API_KEY"]).secrets == []
    assert change(revoke=["API_KEY"], grant=["API_KEY"]).secrets == ["API_KEY"]
    with pytest.raises(InvalidRequest, match="no secret 'OTHER'"):
        change(revoke=["OTHER"])


@given(st.text(max_size=40))
def test_any_text_is_taken_or_refused(target: str) -> None:
    try:
        policy = change(deny=[target])
    except InvalidRequest:
        return
    assert policy.rules != _POLICY.rules
