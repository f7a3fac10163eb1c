"""Secrets of tenants in the server: in, to the gateway, and never out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from sojourn.database import Database, open_database
from sojourn.errors import InvalidRequest, SecretNotFound, SecretsKeyInvalid, TooLarge
from sojourn.gateway.messages import MAX_FRAME, Attach, Envelope, Granted
from sojourn.model.network import NetworkPolicy, NetworkRule, SecretPlace, SecretUse
from sojourn.server.base import Principal
from sojourn.server.network_checks import MAX_NAMES, MAX_PORTS, MAX_RULES, MAX_SECRETS
from sojourn.server.secrets import (
    MAX_DOMAINS,
    MAX_USES,
    MAX_VALUE,
    Secrets,
    secret_environment,
)
from sojourn.wire.networks import SetSecret

WHO = Principal("ten_a", "someone", "tenant")
OTHER = Principal("ten_b", "else", "tenant")
VALUE = "s3cr3t-value-that-is-nowhere"
USES = [SecretUse(["api.example.com"])]


def run(tmp_path: Path, work: Callable[[Secrets, Database], Awaitable[None]]) -> None:
    async def main() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        try:
            await work(Secrets(database, tmp_path), database)
        finally:
            await database.close()

    asyncio.run(main())


def test_a_value_goes_to_the_gateway_and_into_no_answer_or_file(tmp_path: Path) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        request = SetSecret(value=VALUE, uses=USES)
        answers = [await secrets.set(WHO, "TOKEN", request), await secrets.list(WHO)]
        assert VALUE.encode() not in msgspec.json.encode(answers)
        assert VALUE not in repr(request)
        policy = NetworkPolicy(secrets=["TOKEN", "GONE"])
        granted = await secrets.granted("ten_a", policy)
        assert [(one.name, one.uses, one.value) for one in granted] == [("TOKEN", USES, VALUE)]
        assert VALUE not in repr(granted)
        assert await secrets.granted("ten_b", policy) == []
        assert await secrets.granted("ten_a", NetworkPolicy()) == []
        for path in tmp_path.iterdir():
            assert VALUE.encode() not in path.read_bytes(), path

    run(tmp_path, work)


def test_tenants_have_their_own(tmp_path: Path) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        await secrets.set(WHO, "TOKEN", SetSecret(value=VALUE, uses=USES))
        assert await secrets.list(OTHER) == []
        assert await secrets.missing("ten_b", ["TOKEN"]) == ["TOKEN"]
        assert await secrets.missing("ten_a", ["TOKEN", "X"]) == ["X"]
        with pytest.raises(SecretNotFound):
            await secrets.delete(OTHER, "TOKEN")
        await secrets.delete(WHO, "TOKEN")
        with pytest.raises(SecretNotFound):
            await secrets.delete(WHO, "TOKEN")

    run(tmp_path, work)


def test_a_change_is_told_before_it_is_answered(tmp_path: Path) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        told: list[tuple[str, str, int]] = []

        async def changed(tenant: str, name: str) -> None:
            granted = await secrets.granted(tenant, NetworkPolicy(secrets=[name]))
            told.append((tenant, name, len(granted)))

        secrets.on_change(changed)
        await secrets.set(WHO, "TOKEN", SetSecret(value=VALUE, uses=USES))
        await secrets.delete(WHO, "TOKEN")
        assert told == [("ten_a", "TOKEN", 1), ("ten_a", "TOKEN", 0)]

    run(tmp_path, work)


def test_a_row_moved_to_another_tenant_opens_nothing(tmp_path: Path) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        await secrets.set(WHO, "TOKEN", SetSecret(value=VALUE, uses=USES))
        (row,) = await database.list_secrets("ten_a")
        await database.put_secret(msgspec.structs.replace(row, tenant="ten_b"))
        with pytest.raises(SecretsKeyInvalid):
            await secrets.granted("ten_b", NetworkPolicy(secrets=["TOKEN"]))

    run(tmp_path, work)


def test_a_lost_key_is_said_and_not_replaced(tmp_path: Path) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        await secrets.set(WHO, "TOKEN", SetSecret(value=VALUE, uses=USES))
        (tmp_path / "secrets.key").unlink()
        later = Secrets(database, tmp_path)
        with pytest.raises(SecretsKeyInvalid):
            await later.granted("ten_a", NetworkPolicy(secrets=["TOKEN"]))
        assert not (tmp_path / "secrets.key").exists()

    run(tmp_path, work)


@pytest.mark.parametrize(
    "name",
    ["", "1A", "A-B", "A B", "A\n", "É", "A" * 65, "PATH", "HOME", "LD_PRELOAD", "SOJOURN_X"],
)
def test_names_are_those_of_variables(tmp_path: Path, name: str) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        with pytest.raises(InvalidRequest):
            await secrets.set(WHO, name, SetSecret(value=VALUE, uses=USES))

    run(tmp_path, work)


@pytest.mark.parametrize(
    "value", ["", " ", "k7-", " " * 9, "a\nb", "a\rb", "a\0b", "a\x7fb", "x" * (MAX_VALUE + 1)]
)
def test_values_are_one_line(tmp_path: Path, value: str) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        with pytest.raises((InvalidRequest, TooLarge)) as refused:
            await secrets.set(WHO, "TOKEN", SetSecret(value=value, uses=USES))
        assert not value.strip() or value not in str(refused.value)

    run(tmp_path, work)


@pytest.mark.parametrize(
    "use",
    [
        SecretUse([]),
        SecretUse(["a.example.com"] * (MAX_DOMAINS + 1)),
        SecretUse(["*"]),
        SecretUse(["*.com"]),
        SecretUse(["*.co.uk"]),
        SecretUse(["com"]),
        SecretUse(["10.0.0.1"]),
        SecretUse(["2130706433"]),
        SecretUse(["a.example.com/path"]),
        SecretUse(["a.example.com:443"]),
        SecretUse(["a.*.example.com"]),
        SecretUse(["api.example.com"], name="Host"),
        SecretUse(["api.example.com"], name="content-length"),
        SecretUse(["api.example.com"], name="X:Y"),
        SecretUse(["api.example.com"], name=""),
        SecretUse(["api.example.com"], template="Bearer"),
        SecretUse(["api.example.com"], template="{secret}{secret}"),
        SecretUse(["api.example.com"], template="a\r\n{secret}"),
        SecretUse(["api.example.com"], SecretPlace.BASIC, "a:b"),
        SecretUse(["api.example.com"], SecretPlace.QUERY, ""),
        SecretUse(["api.example.com"], SecretPlace.QUERY, "a\nb"),
    ],
)
def test_uses_that_mean_nothing_are_refused(tmp_path: Path, use: SecretUse) -> None:
    async def work(secrets: Secrets, database: Database) -> None:
        with pytest.raises(InvalidRequest):
            await secrets.set(WHO, "TOKEN", SetSecret(value=VALUE, uses=[use]))
        with pytest.raises(InvalidRequest):
            await secrets.set(WHO, "TOKEN", SetSecret(value=VALUE, uses=[]))

    run(tmp_path, work)


def test_inside_stands_a_placeholder() -> None:
    assert secret_environment(NetworkPolicy(secrets=["TOKEN"])) == {"TOKEN": "sojourn-secret-TOKEN"}


def test_the_largest_policy_fits_into_one_message() -> None:
    name = ".".join(["a" * 62] * 4)
    rules = [
        NetworkRule(f"r{number}", [name] * (MAX_NAMES // MAX_RULES), [], [65535] * MAX_PORTS)
        for number in range(MAX_RULES)
    ]
    domains = [name] * (MAX_DOMAINS // MAX_USES)
    uses = [SecretUse(domains, SecretPlace.TEMPLATE, "n" * 100, "t" * 1000)] * MAX_USES
    names = [f"{'S' * 60}{number:04}" for number in range(MAX_SECRETS)]
    attach = Attach(
        sandbox="s" * 40,
        session="s" * 40,
        tenant="t" * 40,
        epoch=2**62,
        socket="/" * 4096,
        policy=NetworkPolicy(rules=rules, secrets=names),
        secrets=[Granted(one, uses, "v" * MAX_VALUE) for one in names],
    )
    assert len(msgspec.msgpack.encode(Envelope(2**62, attach))) < MAX_FRAME
