"""Exposed ports at a server: which it listens to, who gets in, and to which node it goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sojourn.database import open_database
from sojourn.database.writes import InsertSession
from sojourn.model import new_id
from sojourn.model.nodes import Resources
from sojourn.model.ports import ExposedPort, PortKind
from sojourn.server.cluster import pki
from sojourn.server.cluster.members import Members
from sojourn.server.cluster.pki import ClusterAuthority, Credentials
from sojourn.server.cluster.ports import ClusterPorts
from sojourn.server.cluster.queueing import Admissions
from sojourn.server.cluster.scheduler import Settings
from sojourn.server.cluster.targets import Targets
from sojourn.server.cluster.upstream import Upstream
from sojourn.server.port_settings import OUTSIDE, Outside, PortSettings, of_cluster
from support.databases import make_session


class Rig:
    """Servers' ports before one node, which echoes in capitals and notes what it was told."""

    def __init__(self, database: Any, authority: ClusterAuthority) -> None:
        self.database = database
        self.authority = authority
        self.node = new_id("nod")
        self.lines: list[str] = []
        self.members = Members(database)
        self.upstream = Upstream(pki.upstream_context(authority.server_credentials("srv")))
        self.tenant = ""

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lines.append((await reader.readline()).decode().strip())
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data.upper())
                await writer.drain()
        writer.close()

    def server(self, address: str = "127.0.0.1", domain: str = "localhost") -> ClusterPorts:
        async def nobody(nodes: list[str], need: object) -> None:
            return None

        admissions = Admissions(self.members, Settings(), nobody, patience=0.1)
        targets = Targets(self.database, self.members, admissions)
        context = pki.upstream_context(
            self.authority.server_credentials("srv"), pki.TUNNEL_PROTOCOL
        )
        settings = PortSettings(address=address, domain=domain)
        return ClusterPorts(self.database, self.members, targets, self.upstream, context, settings)

    async def expose(self, number: int, listens_at: int, sources: list[str]) -> ExposedPort:
        session = make_session(tenant=self.tenant, holder=self.node)
        await self.database.commit([InsertSession(session)])
        port = ExposedPort(
            session=session.id,
            port=number,
            tenant=self.tenant,
            kind=PortKind.TCP,
            public=True,
            token="",
            sources=sources,
            listens_at=listens_at,
            created_at=1.0,
        )
        await self.database.put_port(port)
        return port

    async def outside(self) -> Outside:
        return msgspec.json.decode(await self.database.cluster_value(OUTSIDE), type=Outside)


@contextlib.asynccontextmanager
async def rig(place: Path) -> AsyncIterator[Rig]:
    database = await open_database(place / "x.db")
    try:
        found = Rig(database, ClusterAuthority.make())
        found.tenant = (await database.create_tenant("one")).id
        key, request = pki.make_request()
        authority = found.authority
        credentials = Credentials(
            key, authority.sign_node(request, found.node), authority.certificate
        )
        context = pki.node_context(credentials)
        server = await asyncio.start_server(found.echo, "127.0.0.1", 0, ssl=context)
        await database.add_node(found.node, "n1")
        await database.start_node(
            found.node,
            address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
            capacity=Resources(),
            runtime=None,
            cpu=[],
            version="0",
            lease=60,
        )
        await found.members.refresh()
        yield found
        server.close()
        found.upstream.close()
    finally:
        await database.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Callable[[Rig], Awaitable[None]]], None]:
    def runs(work: Callable[[Rig], Awaitable[None]]) -> None:
        async def inner() -> None:
            async with asyncio.timeout(60), rig(tmp_path) as found:
                await work(found)

        asyncio.run(inner())

    return runs


async def free_number() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    number: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return number


async def says(number: int) -> bytes:
    """What a client gets that says hello there; nothing where it does not get in."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"hello")
        got = await reader.read(5)
        writer.close()
        return got
    except OSError:
        return b""


def test_the_address_is_kept_for_all(run: Callable[..., None]) -> None:
    async def work(found: Rig) -> None:
        first = found.server(domain="https://apps.example")
        await first.start()
        told = await found.outside()
        assert (told.domain, told.host) == ("https://apps.example", "127.0.0.1")
        settings = await of_cluster(found.database, PortSettings())
        assert (settings.outside, settings.domain) == (told, "https://apps.example")
        # Another one at the same address cannot listen, and serves all the same.
        second = found.server(f"127.0.0.1:{told.port}", domain="other.example")
        await second.start()
        await second.refresh()
        assert await found.outside() == told
        await first.stop()
        # It is found at the same number again.
        third = found.server(domain="https://apps.example")
        await third.start()
        assert await found.outside() == told
        for one in (second, third):
            await one.stop()

    run(work)


def test_tcp_ports_are_listened_to_as_they_are_exposed(run: Callable[..., None]) -> None:
    async def work(found: Rig) -> None:
        server = found.server()
        await server.start()
        open_to_all = await found.expose(5432, await free_number(), [])
        local = await found.expose(5433, await free_number(), ["127.0.0.0/8"])
        others = await found.expose(5434, await free_number(), ["192.0.2.0/24"])
        await server.refresh()
        for port in (open_to_all, local):
            assert await says(port.listens_at or 0) == b"HELLO"
            assert found.lines[-1] == f"tcp {port.id}"
        assert await says(others.listens_at or 0) == b""
        assert len(found.lines) == 2
        await found.database.delete_port(local.session, local.port)
        await server.refresh()
        assert await says(local.listens_at or 0) == b""
        assert await says(open_to_all.listens_at or 0) == b"HELLO"
        await server.stop()
        assert await says(open_to_all.listens_at or 0) == b""

    run(work)


def test_a_number_that_is_taken_keeps_no_other_from_being_served(run: Callable[..., None]) -> None:
    async def work(found: Rig) -> None:
        server = found.server()
        await server.start()
        taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        number = taken.sockets[0].getsockname()[1]
        await found.expose(1, number, [])
        fine = await found.expose(2, await free_number(), [])
        await server.refresh()
        assert await says(fine.listens_at or 0) == b"HELLO"
        taken.close()
        await taken.wait_closed()
        await server.refresh()
        assert await says(number) == b"HELLO"
        await server.stop()

    run(work)


def test_a_session_whose_node_is_gone_is_not_reached_but_for_a_while(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(found: Rig) -> None:
        monkeypatch.setattr("sojourn.server.cluster.ports.PATIENCE_SECONDS", 0.3)
        server = found.server()
        await server.start()
        port = await found.expose(1, await free_number(), [])
        await server.refresh()
        node = await found.database.get_node(found.node)
        await found.database.stop_node(node.fence)
        await found.members.refresh()
        assert await says(port.listens_at or 0) == b""
        assert found.lines == []
        await server.stop()

    run(work)
