"""The gateway's exposed ports in this process, over programs that listen on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from sojourn.errors import SojournError, to_body
from sojourn.gateway import ports_channel as channel
from sojourn.gateway.inbound import Inbound
from sojourn.gateway.leases import UNBOUNDED, AnyLease
from sojourn.gateway.ports import Ports
from sojourn.gateway.streams import Connection
from sojourn.model.ports import PortKind
from sojourn.wire.tunnels import Refusal

SESSION = "ses_" + "0123456789abcdefghjkmnpq"
TOKEN = "token-of-the-port-in-tests"

Program = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Tunnel(Connection):
    """A connection to a program, as the supervisor would make it, offered as a tunnel."""

    async def accept(self) -> None:
        """It stands already."""

    def refuse(self, reason: Refusal) -> None:
        self.reset()


class PortRig:
    """Exposes programs; `dials` counts the ways inside that were asked for, `before` runs before
    each is answered, `moved` are the notices of what goes on."""

    def __init__(self, lease: AnyLease = UNBOUNDED) -> None:
        self.inbound = Inbound()
        ours, its = channel.channel_pair()
        self.ports = Ports(self.inbound, its.detach(), lease)
        self.channel = channel.Channel(ours, self._told, lambda: None)
        self.dials = 0
        self.moved: list[channel.Moved] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        self.address = ""
        self.port = 0
        self._programs: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.tunnels: list[_Tunnel] = []

    async def open(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.channel.send(channel.Serve("localhost"), listener.fileno())
        listener.close()
        await asyncio.sleep(0.02)

    async def expose(
        self,
        program: Program,
        port: int = 8000,
        *,
        public: bool = False,
        kind: PortKind = PortKind.HTTP,
        sources: list[str] | None = None,
    ) -> int:
        """Have a program behind an exposed port; where it is reached."""
        server = await asyncio.start_server(program, "127.0.0.1", 0, limit=1 << 20)
        self._servers.append(server)
        id = f"{SESSION}:{port}"
        self._programs[id] = server.sockets[0].getsockname()[1]
        told = channel.Expose(
            id=id,
            session=SESSION,
            port=port,
            kind=kind,
            digest=b"" if public else hashlib.sha256(TOKEN.encode()).digest(),
            sources=sources or [],
        )
        if kind is PortKind.HTTP:
            self.channel.send(told)
            await asyncio.sleep(0.01)
            return self.port
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.channel.send(told, listener.fileno())
            await asyncio.sleep(0.02)
            number: int = listener.getsockname()[1]
            return number

    def withdraw(self, port: int = 8000) -> None:
        self.channel.send(channel.Unexpose(f"{SESSION}:{port}"))

    def _told(self, message: channel.Message, descriptors: list[int]) -> None:
        if isinstance(message, channel.Dial):
            self.dials += 1
            task = asyncio.get_running_loop().create_task(self._dial(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, channel.Moved):
            self.moved.append(message)

    async def _dial(self, dial: channel.Dial) -> None:
        try:
            if self.before is not None:
                await self.before()
        except SojournError as error:
            self.channel.send(channel.Dialed(dial.token, to_body(error)))
            return
        _, tunnel = await asyncio.get_running_loop().create_connection(
            _Tunnel, "127.0.0.1", self._programs[dial.id]
        )
        self.tunnels.append(tunnel)
        self.channel.send(channel.Dialed(dial.token))
        await self.inbound.serve(dial.token, tunnel)
        tunnel.close()

    async def close(self) -> None:
        self.ports.close()
        self.channel.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            server.close()
        for tunnel in self.tunnels:
            tunnel.reset()
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def port_rig(lease: AnyLease = UNBOUNDED) -> AsyncIterator[PortRig]:
    rig = PortRig(lease)
    await rig.open()
    try:
        yield rig
    finally:
        await rig.close()


async def ask(port: int, request: bytes, *, until: bytes | None = None, end: bool = False) -> bytes:
    """Send bytes and read the answer, to its end or until some bytes have come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if end:
            writer.write_eof()
        async with asyncio.timeout(20):
            if until is not None:
                return await reader.readuntil(until)
            return await reader.read(-1)
    finally:
        writer.close()
