"""A gateway and its node's lease: what is carried until when, at sockets of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.gateway.leases import UNBOUNDED, Lease, lease_of
from sojourn.gateway.resolving import NoName, Outside
from sojourn.gateway.streams import Connection, Reset
from sojourn.model.ports import PortKind
from sojourn.wire.lease_file import LeaseWriter, now
from support.port_rig import PortRig, port_rig

SECOND = 1_000_000_000


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LeaseWriter]:
    made = LeaseWriter(tmp_path / "lease")
    made.write(now() + 60 * SECOND)
    yield made
    made.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()
    except ConnectionError:
        writer.close()


async def _until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_it_holds_until_its_deadline_and_again_when_it_is_renewed(writer: LeaseWriter) -> None:
    lease = Lease(writer.path)
    assert lease.valid()
    writer.write(now() + SECOND // 10)
    lease = Lease(writer.path)
    deadline = lease._deadline
    while lease.valid():
        pass
    assert now() >= deadline
    writer.write(now() + 60 * SECOND)
    assert lease.valid()
    assert lease_of(None) is UNBOUNDED and UNBOUNDED.valid()


def test_each_end_is_told_once_also_one_before_its_time(writer: LeaseWriter) -> None:
    async def main() -> None:
        cuts: list[int] = []
        lease = Lease(writer.path)
        watching = asyncio.create_task(lease.watch(lambda: cuts.append(now())))
        await asyncio.sleep(0.05)
        assert not cuts
        writer.write(0)
        await _until(lambda: len(cuts) == 1)
        assert not lease.valid()
        deadline = now() + SECOND
        writer.write(deadline)
        await _until(lambda: len(cuts) == 2)
        assert cuts[1] >= deadline
        await asyncio.sleep(0.6)
        assert len(cuts) == 2
        watching.cancel()

    asyncio.run(main())


def test_nothing_is_written_looked_up_or_connected_past_it(writer: LeaseWriter) -> None:
    async def main() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        lease = Lease(writer.path)
        outside = Outside(lease=lease)
        try:
            [address] = await outside.resolve("127.0.0.1", asyncio.Semaphore(1))
            connection = await outside.connect([address], port)
            assert isinstance(connection, Connection)
            await connection.write(b"before")
            assert await connection.read() == b"before"
            writer.write(0)
            lease._deadline = 0  # as the watch would see it
            with pytest.raises(Reset, match="lease"):
                await connection.write(b"after")
            with pytest.raises(ConnectionError):
                await connection.read()
            with pytest.raises(OSError, match="lease"):
                await outside.connect([address], port)
            slots = asyncio.Semaphore(1)
            with pytest.raises(NoName, match="lease"):
                await outside.resolve("127.0.0.1", slots)
            assert not slots.locked()
        finally:
            outside.close()
            server.close()

    asyncio.run(main())


def test_exposed_ports_take_nobody_past_it_and_everybody_again_after(writer: LeaseWriter) -> None:
    async def main() -> None:
        lease = Lease(writer.path)
        async with port_rig(lease) as rig:
            port = await rig.expose(_echo, kind=PortKind.TCP)
            await _use(rig, port)
            reader, out = await asyncio.open_connection("127.0.0.1", port)
            out.write(b"held")
            assert await reader.readexactly(4) == b"held"
            writer.write(0)
            lease._deadline = 0
            rig.ports.cut()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            out.close()
            dials = rig.dials
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await _use(rig, port)
            assert rig.dials == dials
            writer.write(now() + 60 * SECOND)
            await _use(rig, port)

    asyncio.run(main())


async def _use(rig: PortRig, port: int) -> None:
    async with asyncio.timeout(20):
        reader, out = await asyncio.open_connection("127.0.0.1", port)
        try:
            out.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        finally:
            out.close()
