"""Secrets and exposed ports over the API: clients, command line, and what is never told."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sojourn import (
    AsyncSojourn,
    Conflict,
    InvalidRequest,
    PortNotFound,
    SecretNotFound,
    SecretPlace,
    SecretUse,
    Sojourn,
)
from sojourn.cli.main import run
from support.http_rig import HttpRig

pytest_plugins = ["support.http_fixtures"]

VALUE = "a-value-that-nobody-is-told"


@pytest.fixture
def client(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sojourn]:
    monkeypatch.setenv("SOJOURN_URL", rig.url)
    monkeypatch.setenv("SOJOURN_TOKEN", "token-a")
    with Sojourn(rig.url, "token-a") as found:
        yield found


def said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    stdin: bytes = b"",
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    code = run(words)
    out, err = capsys.readouterr()
    return code, out + err


def test_secrets_by_the_client(client: Sojourn, rig: HttpRig) -> None:
    made = client.secrets.set("TOKEN", VALUE, ["api.example.com"])
    assert made.uses == [SecretUse(["api.example.com"])]
    ways: list[tuple[dict[str, Any], SecretUse]] = [
        ({"header": "X-Key"}, SecretUse(["a.example.com"], SecretPlace.HEADER, "X-Key")),
        ({"query": "key"}, SecretUse(["a.example.com"], SecretPlace.QUERY, "key")),
        ({"basic": "me"}, SecretUse(["a.example.com"], SecretPlace.BASIC, "me")),
        (
            {"template": "token {secret}"},
            SecretUse(["a.example.com"], SecretPlace.TEMPLATE, template="token {secret}"),
        ),
    ]
    for options, use in ways:
        assert client.secrets.set("TOKEN", VALUE, "a.example.com", **options).uses == [use]
    with pytest.raises(InvalidRequest):
        client.secrets.set("TOKEN", VALUE, "a.example.com", header="X", query="y")
    several = [{"domains": ["a.example.com"]}, use]
    assert len(client.secrets.set("TOKEN", VALUE, uses=several).uses) == 2
    assert [one.name for one in client.secrets.list()] == ["TOKEN"]
    with Sojourn(rig.url, "token-b") as other:
        assert other.secrets.list() == []
        with pytest.raises(SecretNotFound):
            other.secrets.delete("TOKEN")
    client.secrets.delete("TOKEN")
    assert client.secrets.list() == []


@pytest.mark.parametrize(
    "body",
    [
        {"value": VALUE},
        {"value": VALUE, "uses": VALUE},
        {"value": [VALUE], "uses": []},
        {"value": VALUE, "uses": [], "extra": VALUE},
        {"value": VALUE + "\n", "uses": [{"domains": ["a.example.com"]}]},
        {"value": VALUE, "uses": [{"domains": ["com"]}]},
    ],
)
def test_no_refusal_tells_the_value(rig: HttpRig, body: dict[str, Any]) -> None:
    sent = json.dumps(body).encode()
    for raw in (sent, sent[:-1], sent + b"}"):
        status, _, answer = rig.raw("PUT", "/v1/secrets/TOKEN", raw)
        assert status == 400 and VALUE.encode() not in answer


def test_secrets_by_the_command_line(
    client: Sojourn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out = said(
        capsys,
        monkeypatch,
        *("secret", "set", "TOKEN", "--domain", "a.example.com", "--domain", "*.example.org"),
        *("--header", "X-Key"),
        stdin=VALUE.encode() + b"\n",
    )
    assert code == 0 and VALUE not in out
    (made,) = client.secrets.list()
    assert made.uses[0].domains == ["a.example.com", "*.example.org"]
    code, out = said(capsys, monkeypatch, "secret", "ls")
    assert code == 0 and "TOKEN" in out and "header X-Key" in out and VALUE not in out
    code, out = said(capsys, monkeypatch, "secret", "ls", "--json")
    assert code == 0 and json.loads(out)[0]["name"] == "TOKEN"
    assert said(capsys, monkeypatch, "secret", "rm", "TOKEN")[0] == 0
    assert said(capsys, monkeypatch, "secret", "rm", "TOKEN")[0] == 103
    more = ("--domain", "a.example.com")
    for stdin in (b"", b"\n", b"two\nlines", b"\xff"):
        code, out = said(capsys, monkeypatch, "secret", "set", "TOKEN", *more, stdin=stdin)
        assert code == 101, stdin


def test_ports_by_the_client(client: Sojourn) -> None:
    session = client.sessions.create()
    info = session.expose(8000)
    assert info.token and info.url and info.path_url and not info.public
    assert session.expose(8000) == info and session.ports() == [info]
    assert session.expose(8001, public=True).token is None
    with pytest.raises(Conflict):
        session.expose(8000, public=True)
    for wrong in (
        {"port": 0},
        {"port": 65536},
        {"port": 1, "kind": "udp"},
        {"port": 1, "kind": "tcp"},
        {"port": 1, "kind": "tcp", "public": True, "sources": ["10.0.0.1/8"]},
        {"port": 1, "sources": ["10.0.0.0/8"]},
    ):
        with pytest.raises(InvalidRequest):
            session.expose(**wrong)  # type: ignore[arg-type]
    session.unexpose(8000)
    with pytest.raises(PortNotFound):
        session.unexpose(8000)


def test_ports_by_the_asynchronous_client(rig: HttpRig) -> None:
    async def work() -> None:
        async with AsyncSojourn(rig.url, "token-a") as client:
            session = await client.sessions.create()
            info = await session.expose(8000, public=True)
            assert await session.ports() == [info]
            await session.unexpose(8000)
            await client.secrets.set("OTHER", VALUE, "a.example.com")
            assert [one.name for one in await client.secrets.list()] == ["OTHER"]
            await client.secrets.delete("OTHER")

    asyncio.run(work())


def test_ports_by_the_command_line(
    client: Sojourn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.sessions.create()
    code, out = said(capsys, monkeypatch, "port", "expose", session.id, "8000")
    (info,) = session.ports()
    assert code == 0 and out.strip() == f"{info.url}?sojourn_token={info.token}"
    code, out = said(capsys, monkeypatch, "port", "expose", session.id, "8001", "--public")
    assert code == 0 and "sojourn_token" not in out
    code, out = said(capsys, monkeypatch, "port", "ls", session.id)
    assert code == 0 and "8000" in out and "public" in out
    assert said(capsys, monkeypatch, "port", "rm", session.id, "8000")[0] == 0
    assert said(capsys, monkeypatch, "port", "rm", session.id, "8000")[0] == 103
    assert said(capsys, monkeypatch, "port", "expose", session.id, "1", "--tcp")[0] == 101
