"""Tunnels at the gateway: parked and taken up again, broken, too many; and their process."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sojourn.errors import InvalidRequest, SandboxLost, Unreachable
from sojourn.gateway import gateway as gateway_module
from sojourn.gateway.control import Control
from sojourn.gateway.messages import Attach, Began, Detach, Ended, Start
from sojourn.model.network import NetworkMode, NetworkPolicy, NetworkRule
from sojourn.wire.tunnels import HEADER, OPEN, RESUME, Frame, Kind, Refusal
from support.gateway_guests import GuestTunnel, TunnelRefused, TunnelReset
from support.gateway_rig import Rig, attempt, request
from support.gateway_world import ALLOWED, NAMESERVER, World

pytestmark = pytest.mark.privileged

POLICY = NetworkPolicy(
    NetworkMode.ALLOWLIST,
    [
        NetworkRule("raw", domains=["example.com"], ports=[7, 9, 19]),
        NetworkRule("w", ["example.com"]),
    ],
)
FLOOD = 4_000_000


def _pattern(size: int) -> bytes:
    return random.Random(7).randbytes(size)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("gateway")
    with World(directory) as world:
        world.zone["example.com"] = [ALLOWED]
        swallowed = bytearray()
        world.swallowed = swallowed  # type: ignore[attr-defined]
        world.gate = asyncio.Event()  # type: ignore[attr-defined]

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

        async def slow_sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await world.gate.wait()  # type: ignore[attr-defined]
            while data := await reader.read(65536):
                swallowed.extend(data)
            writer.write(b"all")

        async def source(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(_pattern(FLOOD))
            await writer.drain()

        world.serve(ALLOWED, 7, echo)
        world.serve(ALLOWED, 9, slow_sink)
        world.serve(ALLOWED, 19, source)
        world.serve(ALLOWED, 80, world.http)
        rig = Rig(directory, world)
        try:
            rig.attach(POLICY)
            yield rig
        finally:
            rig.close()


async def _announce(path: Path) -> None:
    """What a supervisor does first when a freeze comes."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(HEADER.pack(0, Frame.DETACH))
    assert await reader.readexactly(HEADER.size) == HEADER.pack(0, Frame.DETACH)
    assert await reader.read() == b""
    writer.close()


def test_a_parked_tunnel_goes_on_where_it_was(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 7)
        data = _pattern(300_000)
        found = b""
        for at in range(0, len(data), 30_000):
            await tunnel.write(data[at : at + 30_000])
            await tunnel.park()
            await tunnel.resume()
        while len(found) < len(data):
            found += await tunnel.read()
        assert found == data
        await tunnel.park()
        await tunnel.resume()
        await tunnel.end()
        assert await tunnel.all() == b""

    rig.run(run())


def test_a_download_is_parked_with_bytes_under_way(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 19)
        found = b""
        while len(found) < FLOOD:
            found += await tunnel.read()
            if len(found) % 7 == 0 and not tunnel.ended:
                await tunnel.park()
                await asyncio.sleep(0.01)
                await tunnel.resume()
        assert found == _pattern(FLOOD)

    rig.run(run())


def test_an_upload_to_a_slow_server_is_parked_when_it_was_announced(rig: Rig) -> None:
    data = _pattern(40_000_000)

    async def run() -> None:
        tunnel = await rig.open("example.com", 9)
        sent = 0
        # Until nothing moves any more: the server does not read.
        while sent < len(data):
            try:
                await asyncio.wait_for(tunnel.write(data[sent : sent + 50_000]), 1)
            except TimeoutError:
                break
            sent += 50_000
        sent = tunnel.sent
        await _announce(tunnel.path)
        await asyncio.wait_for(tunnel.park(), 5)
        await tunnel.resume()
        rig.world._loop.call_soon_threadsafe(rig.world.gate.set)  # type: ignore[attr-defined]
        await tunnel.end()
        assert await tunnel.until(b"all") == b"all"
        assert bytes(rig.world.swallowed) == data[:sent]  # type: ignore[attr-defined]

    rig.run(run())


def test_what_was_not_parked_cannot_be_resumed(rig: Rig) -> None:
    async def resume(tunnel: GuestTunnel, received: int, sent: int) -> Refusal:
        again = GuestTunnel(tunnel.path)
        await again.connect()
        again.send(Frame.RESUME, RESUME.pack(tunnel.number, received, sent))
        with pytest.raises(TunnelRefused) as refused:
            await again._answered()
        return refused.value.reason

    async def run() -> None:
        unknown = GuestTunnel(rig.socket())
        assert await resume(unknown, 0, 0) is Refusal.UNKNOWN
        living = await rig.open("example.com", 7)
        assert await resume(living, 0, 0) is Refusal.UNKNOWN
        await living.write(b"ab\n")
        await living.until(b"ab\n")
        await living.park()
        assert await resume(living, 2, 3) is Refusal.UNKNOWN  # a byte was lost
        assert await resume(living, 3, 3) is Refusal.UNKNOWN  # so it was reset
        broken = await rig.open("example.com", 7)
        broken.close()
        await asyncio.sleep(0.1)
        assert await resume(broken, 0, 0) is Refusal.UNKNOWN

    rig.run(run())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        HEADER.pack(70_000, Frame.DATA),
        HEADER.pack(0, 99),
        HEADER.pack(0, Frame.OPENED),
        HEADER.pack(4, Frame.OPEN) + b"abcd",
        HEADER.pack(OPEN.size, Frame.OPEN) + OPEN.pack(1, Kind.CONNECT, 80, 500),
        HEADER.pack(OPEN.size, Frame.OPEN) + OPEN.pack(1, 77, 80, 0),
        HEADER.pack(0, Frame.DETACH) + HEADER.pack(0, Frame.DATA),
        HEADER.pack(0, Frame.END) * 2 + HEADER.pack(1, Frame.DATA) + b"x",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_garbage_ends_its_tunnel_and_no_other(rig: Rig, garbage: bytes, first: bool) -> None:
    async def run() -> None:
        other = await rig.open("example.com", 7)
        if first:
            reader, writer = await asyncio.open_unix_connection(str(rig.socket()))
        else:
            tunnel = await rig.open("example.com", 7)
            reader, writer = tunnel.reader, tunnel.writer
        writer.write(garbage)
        try:
            await asyncio.wait_for(reader.read(), 5)
        except ConnectionError:
            assert reader.at_eof() or reader.exception() is not None
        writer.close()
        await other.write(b"still here\n")
        await other.until(b"still here\n")
        other.close()

    rig.run(run())


def test_a_tunnel_opened_twice_is_one(rig: Rig) -> None:
    async def run() -> None:
        tunnel = await rig.open("example.com", 7)
        again = GuestTunnel(tunnel.path)
        await again.connect()
        name = b"example.com"
        again.send(Frame.OPEN, OPEN.pack(tunnel.number, Kind.CONNECT, 7, len(name)) + name)
        with pytest.raises(TunnelReset):
            await again.frame()
        await tunnel.write(b"a\n")
        assert await tunnel.read() == b"a\n"
        tunnel.close()

    rig.run(run())


def test_more_tunnels_than_a_sandbox_may_have_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "MOST_TUNNELS", 4)
    rig.attach(POLICY, sandbox="few")

    async def run() -> None:
        held = [await rig.open("example.com", 80, sandbox="few") for _ in range(4)]
        with pytest.raises(TunnelRefused) as refused:
            await rig.open("example.com", 80, sandbox="few")
        assert refused.value.reason is Refusal.QUOTA
        for tunnel in held:
            tunnel.close()

    rig.run(run())
    rig.detach("few")
    assert not rig.socket("few").exists()


def test_an_unread_download_is_held_up_outside(rig: Rig) -> None:
    async def run() -> tuple[int, int]:
        tunnel = await rig.open("example.com", 19)
        await asyncio.sleep(0.3)
        attached = rig.gateway._attached["sbx"]
        carrier = attached._carriers.tunnels[tunnel.number]._carrier
        assert carrier is not None
        assert carrier._transport is not None
        queued = carrier._transport.get_write_buffer_size()
        sent = attached._carriers.tunnels[tunnel.number].sent
        tunnel.close()
        return queued, sent

    queued, sent = rig.run(run())
    assert queued <= 256 << 10
    assert sent < FLOOD


def test_a_detached_sandbox_is_cut_off(rig: Rig) -> None:
    rig.attach(POLICY, sandbox="gone")

    async def opened() -> GuestTunnel:
        tunnel = await rig.open("example.com", 7, sandbox="gone")
        await tunnel.write(b"a\n")
        await tunnel.read()
        return tunnel

    tunnel = rig.run(opened())
    rig.detach("gone")

    async def check() -> None:
        with pytest.raises(TunnelReset):
            await asyncio.wait_for(tunnel.read(), 5)

    rig.run(check())


def test_a_sandbox_without_its_directory_is_told(rig: Rig) -> None:
    with pytest.raises(SandboxLost):
        rig.attach(POLICY, sandbox="absent/x")


class _Server:
    """The server's end of the channel to a process of its own."""

    def __init__(self) -> None:
        self.bodies: list[object] = []

    async def asked(self, body: object) -> None:
        self.bodies.append(body)


def test_the_process_serves_and_ends_with_its_server(rig: Rig, tmp_path: Path) -> None:
    start = Start(
        authority=str(tmp_path / "authority"),
        namespace=rig.world.namespace,
        nameservers=[NAMESERVER],
        roots=str(rig.world.roots),
    )

    async def run() -> None:
        ours, its = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-m", "sojourn.gateway.worker"], stdin=its, stdout=subprocess.DEVNULL
        )
        its.close()
        try:
            server = _Server()
            control = await Control.open(ours, server.asked)
            serving = asyncio.ensure_future(control.serve())
            path = tmp_path / "net.sock"
            attach = Attach("w", "ses", "ten", 3, str(path), POLICY)
            with pytest.raises(InvalidRequest):
                await control.request(attach)
            await control.request(start)
            await control.request(attach)
            assert path.stat().st_mode & 0o777 == 0o600
            key = tmp_path / "authority" / "ca.key"
            assert key.stat().st_mode & 0o777 == 0o600
            tunnel = await GuestTunnel.open(path, "example.com", 80)
            await tunnel.write(request("example.com", "/b", "Content-Length: 0", method="POST"))
            await tunnel.until(b"hello")
            while len(server.bodies) < 2:
                await asyncio.sleep(0.01)
            assert [type(body) for body in server.bodies] == [Began, Ended]
            await control.request(Detach("w"))
            assert not path.exists()
            await control.request(attach)
            process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGCONT)
            control.close()
            assert await asyncio.to_thread(process.wait, 10) == 0
            with pytest.raises(Unreachable):
                await control.request(attach)
            await serving
        finally:
            process.kill()
            process.wait()

    rig.run(run())


def test_requests_go_on_after_all_this(rig: Rig) -> None:
    assert rig.run(attempt(rig, "example.com", 80, request("example.com"))) == "200"
    assert len(rig.gateway._attached["sbx"]._carriers.tunnels) <= 2
