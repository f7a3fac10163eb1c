"""Tunnels of a node that lost its lease: cut at the deadline, refused after it, served again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.database import Database
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule
from sojourn.node.isolation import processes
from sojourn.wire.lease_file import LeaseWriter, now
from support.gateway_guests import TunnelReset
from support.gateway_rig import Rig
from support.gateway_world import ALLOWED, World
from support.node_process import NodeProcess, with_database

pytestmark = pytest.mark.privileged

SECOND = 1_000_000_000
POLICY = NetworkPolicy(
    NetworkMode.ALLOWLIST, [NetworkRule("raw", domains=["example.com"], ports=[7])]
)


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[LeaseWriter]:
    made = LeaseWriter(tmp_path / "lease")
    made.write(now() + 600 * SECOND)
    yield made
    made.close()


def test_tunnels_are_cut_at_the_deadline_and_none_is_opened_until_it_is_renewed(
    tmp_path: Path, lease: LeaseWriter
) -> None:
    arrived = bytearray()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            arrived.extend(data)
            writer.write(data)
            await writer.drain()

    with World(tmp_path) as world:
        world.zone["example.com"] = [ALLOWED]
        world.serve(ALLOWED, 7, echo)
        rig = Rig(tmp_path, world, lease=lease.path)
        try:
            rig.attach(POLICY)

            async def round_trip() -> None:
                tunnel = await rig.open("example.com", 7)
                await tunnel.write(b"x")
                assert await tunnel.read() == b"x"
                tunnel.close()

            async def cut() -> None:
                tunnel = await rig.open("example.com", 7)
                await tunnel.write(b"before")
                assert await tunnel.read() == b"before"
                lease.write(now() + SECOND // 2)
                # Nobody sends anything: it is the deadline itself that ends it.
                with pytest.raises(TunnelReset):
                    await tunnel.read()
                assert now() >= lease.deadline()
                with pytest.raises((TunnelReset, ConnectionError)):
                    await round_trip()

            rig.run(round_trip())
            rig.run(cut())
            assert bytes(arrived) == b"xbefore"
            lease.write(now() + 600 * SECOND)
            rig.run(round_trip())
        finally:
            rig.close()


def test_the_gateway_of_a_node_goes_by_the_nodes_lease(tmp_path: Path, place: Path) -> None:
    location = str(tmp_path / "nodes.db")

    async def tenant(database: Database) -> str:
        return (await database.create_tenant("one")).id

    tenant_id = with_database(location, tenant)
    node = NodeProcess(tmp_path / "node", "node", location, place.as_uri())
    node.join()
    try:
        node.start()
        session = node.client(tenant_id).sessions.create(network="open")
        assert session.exec("true").ok
        [gateway] = [
            pid
            for pid in processes.children(node.pid)
            if "sojourn.gateway.worker" in processes.command_line(pid)
        ]
        assert f"{node.data}/lease" in Path(f"/proc/{gateway}/maps").read_text()
        session.delete()
    finally:
        node.remove()
