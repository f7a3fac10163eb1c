"""A gateway in this process, between a test's guest and a test's world."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from sojourn.errors import SojournError
from sojourn.gateway.gateway import Gateway
from sojourn.gateway.messages import Attach, Began, Detach, Ended, Granted, Start, Withheld
from sojourn.model.network import Denial, Effect, NetworkPolicy
from sojourn.wire.tunnels import Kind
from support.gateway_guests import GuestTls, GuestTunnel, TunnelRefused, TunnelReset
from support.gateway_world import NAMESERVER, World

T = TypeVar("T")
SECONDS = 30


class RecordingServer:
    """What the gateway tells; `failing` makes it answer with an error, `hanging` not at all, `gate`
    when that is set."""

    def __init__(self) -> None:
        self.bodies: list[Began | Ended | Withheld] = []
        self.failing = False
        self.hanging = False
        self.gate: asyncio.Event | None = None

    async def request(self, body: Began | Ended | Withheld) -> None:
        self.bodies.append(body)
        if self.hanging:
            await asyncio.sleep(3600)
        if self.gate is not None:
            await self.gate.wait()
        if self.failing:
            raise SojournError("the database is away")

    @property
    def began(self) -> list[Effect]:
        return [body.effect for body in self.bodies if isinstance(body, Began)]

    @property
    def ended(self) -> list[Effect]:
        return [body.effect for body in self.bodies if isinstance(body, Ended)]

    @property
    def denials(self) -> list[Denial]:
        return [body.denial for body in self.bodies if isinstance(body, Withheld)]


class Rig:
    """The gateway runs in a thread with a loop of its own, and so do guests."""

    def __init__(
        self,
        directory: Path,
        world: World,
        *,
        private: Sequence[str] = (),
        lease: Path | None = None,
    ) -> None:
        self.directory, self.world = directory, world
        self.server = RecordingServer()
        self.authority = directory / "authority" / "ca.pem"
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._start = Start(
            authority=str(directory / "authority"),
            namespace=world.namespace,
            nameservers=[NAMESERVER],
            private=list(private),
            roots=str(world.roots),
            lease=None if lease is None else str(lease),
        )
        self.gateway: Gateway = self.run(self._open())

    async def _open(self) -> Gateway:
        gateway = Gateway(self._start, self.server)
        await gateway.open()
        return gateway

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.gateway.close)
        self.run(asyncio.sleep(0.05))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, SECONDS), self.loop).result(
            SECONDS + 5
        )

    def socket(self, sandbox: str = "sbx") -> Path:
        return self.directory / f"{sandbox}.sock"

    def attach(
        self, policy: NetworkPolicy, *, sandbox: str = "sbx", secrets: Sequence[Granted] = ()
    ) -> None:
        attach = Attach(
            sandbox, "ses", "ten", 1, str(self.socket(sandbox)), policy, secrets=list(secrets)
        )
        self.run(self.gateway.handle(attach))

    def detach(self, sandbox: str = "sbx") -> None:
        self.run(self.gateway.handle(Detach(sandbox)))

    async def open(
        self, host: str | bytes, port: int, kind: Kind = Kind.CONNECT, *, sandbox: str = "sbx"
    ) -> GuestTunnel:
        return await GuestTunnel.open(self.socket(sandbox), host, port, kind)

    async def tls(self, host: str | bytes, port: int, sni: str | None) -> GuestTls:
        return await GuestTls(await self.open(host, port), self.authority, sni).greet()

    async def ended(self, count: int) -> list[Effect]:
        """What ended, once so many did."""
        while len(self.server.ended) < count:
            await asyncio.sleep(0.01)
        return self.server.ended


def request(host: str | bytes, path: str = "/", *more: str, method: str = "GET") -> bytes:
    """A request's head."""
    name = host.encode() if isinstance(host, str) else host
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: " + name, *(m.encode() for m in more)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def outcome(stream: GuestTunnel | GuestTls, sent: bytes) -> str:
    """Send, and say what came of it: a status, or how it ended."""
    try:
        if sent:
            await stream.write(sent)
        head = await asyncio.wait_for(stream.until(b"\r\n"), 20)
    except (TunnelReset, ConnectionError):
        return "reset"
    if head.startswith(b"HTTP/1.1 "):
        return head.split(b" ")[1].decode()
    return repr(head)


async def attempt(rig: Rig, host: str | bytes, port: int, sent: bytes) -> str:
    """What comes of sending on a connection to a host."""
    try:
        tunnel = await rig.open(host, port)
    except TunnelRefused as refused:
        return f"refused {refused}"
    try:
        return await outcome(tunnel, sent)
    finally:
        tunnel.close()
