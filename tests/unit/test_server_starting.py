"""Changes that come while a sandbox is only starting: it has them when it runs."""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.database import Database, open_database
from sojourn.errors import FileMissing, InvalidRequest, Unreachable
from sojourn.gateway.messages import Attach
from sojourn.model import Session, SessionState
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule, SecretUse
from sojourn.node import authorities
from sojourn.server.base import Principal
from sojourn.server.gateways import EgressSettings, Wanted
from sojourn.server.networks import Networks
from sojourn.server.port_settings import PortSettings
from sojourn.server.ports import Ports
from sojourn.server.registry import ActiveSession, Registry
from sojourn.server.secrets import Secrets
from sojourn.server.updates import Updates
from sojourn.wire.networks import ExposePort, NetworkChange, SetSecret
from support.databases import insert_session, make_session

RECORD: Any = types.SimpleNamespace(sandbox="sbx-1", driver="gvisor", epoch=2)
USES = [SecretUse(["api.example.com"])]
RULES = [NetworkRule("api", domains=["api.example.com"])]


class FakeGateway:
    """What it was told to serve."""

    def __init__(self) -> None:
        self.told: list[Attach | None] = []
        self._wanted: dict[str, Wanted] = {}

    async def need(self) -> None:
        """It runs."""

    async def attach(self, sandbox: str, wanted: Wanted) -> None:
        self._wanted[sandbox] = wanted
        self.told.append(await wanted())

    async def renew(self, sandbox: str) -> None:
        if sandbox in self._wanted:
            await self.attach(sandbox, self._wanted[sandbox])

    def forget(self, sandbox: str) -> None:
        self._wanted.pop(sandbox, None)


class BrokenGateway(FakeGateway):
    """One that cannot start."""

    def __init__(self, authority: Path) -> None:
        super().__init__()
        self.authority = authority

    async def need(self) -> None:
        raise Unreachable("the gateway process does not start: no such namespace")

    async def attach(self, sandbox: str, wanted: Wanted) -> None:
        await self.need()

    async def detach(self, sandbox: str) -> None:
        """It serves nobody."""


class FakeGuest:
    """A session without certificates of its own, and what is written into it."""

    def __init__(self) -> None:
        self.written: dict[bytes, bytes] = {}

    async def stat(self, path: bytes) -> None:
        raise FileMissing(os.fsdecode(path))

    async def write_file(self, path: bytes, data: bytes, **_: object) -> None:
        self.written[path] = data


def run(
    session: Session, tmp_path: Path, scenario: Callable[[Database, Registry], Awaitable[None]]
) -> None:
    async def whole() -> None:
        database = await open_database(tmp_path / "sojourn.db")
        try:
            registry = Registry(database, lambda _: None)
            registry.hold(await insert_session(database, session))
            async with asyncio.timeout(30):
                await scenario(database, registry)
        finally:
            await database.close()

    asyncio.run(whole())


def test_a_secret_that_changes_reaches_a_sandbox_that_is_starting(tmp_path: Path) -> None:
    session = make_session(
        state=SessionState.SUSPENDED,
        network=NetworkPolicy(mode=NetworkMode.OPEN, secrets=["KEY"]),
    )
    who = Principal(session.tenant, "someone", "tenant")

    async def scenario(database: Database, registry: Registry) -> None:
        secrets = Secrets(database, tmp_path)
        agent: Any = types.SimpleNamespace(directory=tmp_path)
        networks = Networks(
            agent=agent,
            registry=registry,
            database=database,
            secrets=secrets,
            settings=EgressSettings(),
            authority=tmp_path / "authority",
        )
        gateway: Any = FakeGateway()
        networks.gateway = gateway
        await secrets.set(who, "KEY", SetSecret(value="old value", uses=USES))
        assert gateway.told == []
        await networks._serve(session.id, RECORD)
        await secrets.set(who, "KEY", SetSecret(value="new value", uses=USES))
        await secrets.set(who, "OTHER", SetSecret(value="other value", uses=USES))
        assert [one.value for told in gateway.told for one in told.secrets] == [
            "old value",
            "new value",
        ]
        agent.ended("sbx-1")
        await secrets.delete(who, "KEY")
        assert len(gateway.told) == 2

    run(session, tmp_path, scenario)


@pytest.mark.parametrize("change", ["expose", "unexpose"])
def test_a_port_that_is_exposed_during_a_start_is_served(tmp_path: Path, change: str) -> None:
    session = make_session(state=SessionState.SUSPENDED)
    who = Principal(session.tenant, "someone", "tenant")

    async def scenario(database: Database, registry: Registry) -> None:
        applied: list[SessionState] = []

        async def apply(active: Any) -> None:
            applied.append(active.state)

        networks: Any = types.SimpleNamespace(gateway=FakeGateway(), apply=apply)
        ports = Ports(
            database, registry, Secrets(database, tmp_path), tmp_path, PortSettings(), networks
        )
        active = registry.hold(session)
        try:
            if change == "unexpose":
                await ports.expose(who, session.id, ExposePort(port=8000, public=True))
                applied.clear()
            async with active.gate.closed("resume"):
                if change == "expose":
                    work: Any = ports.expose(who, session.id, ExposePort(port=8000, public=True))
                else:
                    work = ports.unexpose(who, session.id, 8000)
                changing = asyncio.create_task(work)
                await asyncio.sleep(0.1)
                assert applied == []
                registry.update(msgspec.structs.replace(session, state=SessionState.RUNNING))
            await changing
            assert applied == [SessionState.RUNNING]
        finally:
            await ports.close()

    run(session, tmp_path, scenario)


def test_a_gateway_that_cannot_start_is_in_the_events_and_told_by_the_change(
    tmp_path: Path,
) -> None:
    session = make_session(
        state=SessionState.RUNNING,
        sandbox="sbx-1",
        network=NetworkPolicy(mode=NetworkMode.OPEN, secrets=["REMOVED_SINCE"]),
    )
    who = Principal(session.tenant, "someone", "tenant")
    switched: list[bool] = []
    guest = FakeGuest()

    async def set_network(on: bool) -> None:
        switched.append(on)

    async def scenario(database: Database, registry: Registry) -> None:
        sandbox = types.SimpleNamespace(
            record=RECORD,
            frozen=False,
            guest=guest,
            provide=lambda environment: None,
            set_network=set_network,
        )
        driver = types.SimpleNamespace(capabilities=frozenset())
        agent: Any = types.SimpleNamespace(
            directory=tmp_path, find=lambda *_: sandbox, driver=lambda _: driver
        )
        networks = Networks(
            agent=agent,
            registry=registry,
            database=database,
            secrets=Secrets(database, tmp_path),
            settings=EgressSettings(),
            authority=tmp_path / "authority",
        )
        gateway: Any = BrokenGateway(tmp_path / "authority")
        networks.gateway = gateway

        async def commit(active: ActiveSession, changes: dict[str, Any], event: Any) -> None:
            registry.update(msgspec.structs.replace(active.session, **changes))

        context: Any = types.SimpleNamespace(
            registry=registry, networks=networks, commit=commit, database=database
        )
        updates = Updates(context)
        with pytest.raises(Unreachable, match=r"the policy is kept.*no such namespace"):
            await updates.change_network(who, session.id, NetworkChange(allow=RULES))
        active = registry.hold(session)
        assert active.session.network.rules == RULES
        (event,) = await database.list_events(session.id, kinds=["network.unavailable"])
        assert event.result == "unreachable" and "no such namespace" in event.details["message"]
        # Nothing tells the session of the authority later, when there is a gateway.
        assert guest.written == {authorities.BUNDLE: (tmp_path / "authority/ca.pem").read_bytes()}
        assert active.session.network.secrets == ["REMOVED_SINCE"]  # that it is gone stops nothing
        with pytest.raises(InvalidRequest, match="no secret 'UNKNOWN'"):
            await updates.change_network(who, session.id, NetworkChange(grant=["UNKNOWN"]))
        # Nothing is what is wanted, and it is what is had.
        await updates.change_network(who, session.id, NetworkChange(mode=NetworkMode.NONE))
        assert active.session.network.mode is NetworkMode.NONE
        assert switched == [True, False]

    run(session, tmp_path, scenario)
