"""Networks, secrets and ports on the command line: what is named changes, the rest stays."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sojourn import NetworkMode, NetworkPolicy, NetworkRule, Session, Sojourn, allow
from sojourn.cli.main import run
from sojourn.model.network import Denial
from sojourn.wire.api import EventInfo
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]


@pytest.fixture
def client(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sojourn]:
    monkeypatch.setenv("SOJOURN_URL", rig.url)
    monkeypatch.setenv("SOJOURN_TOKEN", "token-a")
    with Sojourn(rig.url, "token-a") as found:
        yield found


@pytest.fixture
def box(client: Sojourn) -> Iterator[Session]:
    session = client.sessions.create(
        name="box",
        network=allow("a.example.com", secrets=["API_KEY"], connections=7, on_effects="refuse"),
        labels={"team": "a", "task": "1"},
    )
    yield session
    session.delete()


class Cli:
    """Commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.error = ""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        self._capsys.readouterr()
        found = run(arguments)
        told = self._capsys.readouterr()
        self.error = told.err
        assert found == code, told
        return told.out


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def policy_of(session: Session) -> NetworkPolicy:
    return session.refresh().network


def test_a_change_of_the_network_changes_what_it_names(box: Session, cli: Cli) -> None:
    before = policy_of(box)
    shown = cli("session", "network", "box", "allow=b.example.com:8443,203.0.113.0/24")
    assert "b.example.com port 8443" in shown and "API_KEY" in shown
    after = policy_of(box)
    assert [rule.domains or rule.cidrs for rule in after.rules] == [
        ["a.example.com"],
        ["b.example.com"],
        ["203.0.113.0/24"],
    ]
    assert msgspec.structs.replace(after, rules=before.rules) == before
    cli("session", "network", "box", "deny=a.example.com", "deny=203.0.113.0/24")
    assert [rule.domains for rule in policy_of(box).rules] == [["b.example.com"]]
    assert policy_of(box).secrets == ["API_KEY"]
    cli("session", "network", "box", "open")
    opened = policy_of(box)
    assert (opened.mode, opened.secrets, opened.connections) == ("open", ["API_KEY"], 7)
    cli("session", "network", "box", "allowlist")
    assert [rule.domains for rule in policy_of(box).rules] == [["b.example.com"]]
    cli("session", "network", "box", "none")
    assert policy_of(box) == msgspec.structs.replace(before, mode=NetworkMode.NONE, rules=[])


def test_the_whole_policy_is_replaced_where_that_is_said(
    box: Session, cli: Cli, tmp_path: Path
) -> None:
    cli("session", "network", "box", "--replace", "allow=c.example.com")
    assert policy_of(box) == allow("c.example.com")
    file = tmp_path / "policy.json"
    policy = NetworkPolicy(
        NetworkMode.ALLOWLIST, [NetworkRule("r", domains=["d.example.com"])], connections=3
    )
    file.write_bytes(msgspec.json.encode(policy))
    cli("session", "network", "box", "--set", str(file))
    assert policy_of(box) == policy


@pytest.mark.parametrize(
    "words",
    [
        ["allow"],
        ["allow="],
        ["allow=,"],
        ["grant=X"],
        ["shut"],
        ["open", "none"],
        ["--replace"],
        ["--replace", "open", "none"],
        ["--set", "-", "open"],
    ],
)
def test_what_is_no_change_is_refused(box: Session, cli: Cli, words: list[str]) -> None:
    before = policy_of(box)
    cli("session", "network", "box", *words, code=101)
    assert policy_of(box) == before


def test_what_is_not_there_cannot_be_denied(box: Session, cli: Cli) -> None:
    cli("session", "network", "box", "deny=z.example.com", code=101)
    assert "allowed: a.example.com" in cli.error


def test_secrets_are_granted_and_revoked_by_name(client: Sojourn, box: Session, cli: Cli) -> None:
    client.secrets.set("TOKEN", "a long enough value", ["hooks.example.com"])
    assert cli("secret", "grant", "TOKEN", "box").strip() == box.id
    assert "reaches none of the secret's domains" in cli.error
    assert "allow=hooks.example.com" in cli.error
    assert policy_of(box).secrets == ["API_KEY", "TOKEN"]
    cli("session", "network", "box", "allow=*.example.com")
    cli("secret", "grant", "TOKEN", "box")
    assert cli.error == "" and policy_of(box).secrets == ["API_KEY", "TOKEN"]
    listed = cli("secret", "ls")
    (row,) = [line for line in listed.splitlines() if line.startswith("TOKEN")]
    assert row.endswith("box")
    cli("secret", "revoke", "TOKEN", "box")
    assert policy_of(box).secrets == ["API_KEY"]
    (row,) = [line for line in cli("secret", "ls").splitlines() if line.startswith("TOKEN")]
    assert row.endswith("none")
    cli("secret", "revoke", "TOKEN", "box", code=101)
    client.secrets.delete("TOKEN")


def test_a_session_is_made_with_secrets(client: Sojourn, cli: Cli) -> None:
    made = cli("session", "create", "--network", "allow=a.example.com", "--secret", "K").strip()
    session = client.sessions.get(made)
    assert session.network == allow("a.example.com", secrets=["K"])
    assert re.search(r"^secrets +K$", cli("session", "get", made), re.M)
    session.delete()
    cli("session", "create", "--secret", "K", code=101)
    assert "--network allow=DOMAIN" in cli.error


def test_what_was_refused_is_shown(rig: HttpRig, box: Session, cli: Cli) -> None:
    kept = next(kept for kept in rig.service._sessions.values() if kept.info.id == box.id)
    denials = [
        Denial(box.id, "sbx", 1, "no.example", 25, "no-rule", "no rule allows it", 40, 1.0, 2.0),
        Denial(box.id, "sbx", 1, "", 0, "", "more different ones", 7, 1.0, 3.0),
    ]
    for denial in denials:
        details = msgspec.to_builtins(denial) | {"during": [["curl", "no.example"]]}
        kept.events.append(
            EventInfo(
                len(kept.events) + 1, box.id, time.time(), "session", "network.denied",
                denial.rule, details, None, None, None,
            )
        )  # fmt: skip
    assert box.denials() == denials
    shown = cli("session", "effects", "box", "--denied").splitlines()
    assert len(shown) == 3
    assert "no.example:25" in shown[1] and "no-rule" in shown[1] and " 40 " in shown[1]
    assert "others" in shown[2]
    assert json.loads(cli("session", "effects", "box", "--denied", "--json")) == [
        msgspec.to_builtins(denial) for denial in denials
    ]
    cli("session", "effects", "box", "--denied", "--all", code=101)
    assert cli("session", "effects", "box").splitlines()[1:] == []


def test_both_addresses_of_a_port_are_shown(box: Session, cli: Cli) -> None:
    url = cli("port", "expose", "box", "8000").strip()
    row = cli("port", "ls", "box").splitlines()[1]
    (port,) = box.ports()
    assert url in row and port.path_url is not None and row.endswith(port.path_url)


def test_an_update_changes_what_it_names(box: Session, cli: Cli) -> None:
    before = box.refresh().info
    cli(
        *("session", "update", "box", "--label", "task=2", "--unlabel", "team"),
        *("--cpus", "0.5", "--idle-timeout", "60", "--on-idle", "delete", "--no-auto-resume"),
        *("--keep", "last=3"),
    )
    after = box.refresh().info
    assert after.labels == {"task": "2"} and after.name == "box"
    assert after.limits == msgspec.structs.replace(before.limits, cpus=0.5)
    policy = after.policy
    assert (policy.idle_timeout, policy.on_idle, policy.auto_resume) == (60, "delete", False)
    assert policy.retention is not None and policy.retention.keep_last == 3
    assert policy.auto_memory_bytes == before.policy.auto_memory_bytes
    cli("session", "update", "box", "--idle-timeout", "0", "--auto-snapshot", "off")
    policy = box.refresh().info.policy
    assert (policy.idle_timeout, policy.auto_snapshot, policy.on_idle) == (None, "off", "delete")
    assert policy.retention is not None and policy.retention.keep_last == 3
    cli("session", "update", "box", code=101)
