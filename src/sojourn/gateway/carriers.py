"""Connections from a sandbox that carry its tunnels, and the tunnels they carry.

Guarantee: what a sandbox sends is not trusted: garbage ends the tunnel it came on, and nothing
else. The number of connections and tunnels of a sandbox is bounded, and no tunnel stays that nobody
serves.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import cast

from sojourn.gateway.leases import UNBOUNDED, AnyLease
from sojourn.gateway.streams import PIECE, WRITE_AHEAD, Reset, Room
from sojourn.gateway.tunnels import Tunnel
from sojourn.wire.tunnels import (
    HEADER,
    MAX_BODY,
    OPEN,
    RESUME,
    Frame,
    Kind,
    Refusal,
    TunnelError,
    frame,
)

log = logging.getLogger(__name__)

_LONGEST_HOST = 1024
_FIRST_FRAME_SECONDS = 10
_PARKING_SECONDS = 5
# What a tunnel may hold while a freeze is prepared: its usual bound, and what was in its socket.
_PARKING_ROOM = 512 << 10


class Carriers:
    """What the connections of one sandbox share: its tunnels by number, and who serves them."""

    def __init__(
        self,
        opened: Callable[[Tunnel], Awaitable[None]],
        most: int,
        lease: AnyLease = UNBOUNDED,
    ) -> None:
        self.lease = lease
        self.tunnels: dict[int, Tunnel] = {}
        self.connections: set[Carrier] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.most = most
        self._opened = opened

    def protocol(self) -> Carrier:
        """For a new connection."""
        return Carrier(self)

    def open(self, tunnel: Tunnel) -> None:
        """A tunnel begins."""
        self.tunnels[tunnel.number] = tunnel
        tunnel.finished = self._finished
        task = asyncio.get_running_loop().create_task(self._serve(tunnel))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        # Who waits for something else meanwhile learns of its loss by this.
        tunnel.on_loss = task.cancel

    def about_to_freeze(self) -> None:
        """One tunnel is being parked, so all will be: read on until their last frames, also those
        that have enough, or their senders could not say that they are done."""
        for carrier in list(self.connections):
            carrier.prepare()

    def close(self) -> None:
        """The sandbox is gone, or nothing may be carried: what is open is reset."""
        for tunnel in list(self.tunnels.values()):
            tunnel.reset()
        for carrier in list(self.connections):
            carrier.close()
        for task in list(self.tasks):
            task.cancel()

    async def _serve(self, tunnel: Tunnel) -> None:
        try:
            await self._opened(tunnel)
        except ConnectionError:
            tunnel.on_loss = None
            tunnel.reset()
        except Exception as error:  # noqa: BLE001
            # A fault ends this tunnel alone. Its type is told and not its text, which may hold
            # what was under way, and with it a secret.
            log.error("a fault while serving a tunnel: %s%s", type(error).__name__, _where(error))
            tunnel.on_loss = None
            tunnel.reset()
        finally:
            # Whatever happened, no tunnel stays that nobody serves; when both ends have ended
            # nothing is lost by this.
            tunnel.on_loss = None
            if not tunnel.over:
                tunnel.close()
            self._finished(tunnel)

    def _finished(self, tunnel: Tunnel) -> None:
        if self.tunnels.get(tunnel.number) is tunnel:
            del self.tunnels[tunnel.number]


class Carrier(asyncio.BufferedProtocol):
    """One connection from inside."""

    _scratch = bytearray(PIECE + HEADER.size)

    def __init__(self, owner: Carriers) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()
        self._tunnel: Tunnel | None = None
        self._first: asyncio.TimerHandle | None = None
        self._parking = False
        self._detached_by_peer = False
        self.room = Room()
        self.gone = asyncio.Event()
        self.leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_AHEAD)
        full = len(self._owner.connections) >= self._owner.most + 16
        if full or not self._owner.lease.valid():
            transport.abort()
            return
        self._owner.connections.add(self)
        self._first = asyncio.get_running_loop().call_later(_FIRST_FRAME_SECONDS, self.close)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if not self._owner.lease.valid():
            self._abort("the node has no lease")
            return
        self._pending += memoryview(self._scratch)[:nbytes]
        try:
            self._take()
        except TunnelError as error:
            # Not louder: a sandbox may do this as often as it likes.
            log.debug("a sandbox broke the protocol of tunnels: %s", error)
            self._abort("the protocol was broken")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._first is not None:
            self._first.cancel()
        self._owner.connections.discard(self)
        tunnel, self._tunnel = self._tunnel, None
        self.gone.set()
        self.room.fail(Reset("the tunnel's connection is closed"))
        if tunnel is None:
            return
        if self.leaving and self._detached_by_peer:
            tunnel.parked()
        else:
            tunnel.broken()

    def pause_writing(self) -> None:
        self.room.full()

    def resume_writing(self) -> None:
        self.room.free()

    async def room_or_gone(self) -> None:
        """Until there is room, or the connection was let go in order (then what was sent is
        counted)."""
        try:
            await self.room.wait()
        except Reset:
            if not self.leaving:
                raise

    def send(self, kind: Frame, body: bytes = b"") -> None:
        """Queue a frame."""
        if not self._owner.lease.valid():
            self._abort("the node has no lease")
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(kind, body))

    def refuse(self, reason: Refusal) -> None:
        """The answer to the first frame; then the connection ends."""
        self.send(Frame.REFUSED, bytes((reason,)))
        self.close()

    def close(self) -> None:
        """Let go when what was queued is sent."""
        if self._transport is not None:
            self._transport.close()

    def hold(self) -> None:
        """Read no more for now."""
        if not self._parking and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def more(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def prepare(self) -> None:
        """A freeze is coming."""
        if self._parking or self._tunnel is None:
            return
        self._parking = True
        self.more()
        asyncio.get_running_loop().call_later(_PARKING_SECONDS, self._prepared_in_vain)

    def _prepared_in_vain(self) -> None:
        self._parking = False
        if self._tunnel is not None and self._tunnel.held:
            self.hold()

    def abandon(self) -> None:
        """Both ends have said their last on this connection: as if it were closed already."""
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel.parked()
        self.gone.set()
        self.close()

    def _abort(self, why: str) -> None:
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel.lost(why)
        if self._transport is not None:
            self._transport.abort()

    def _take(self) -> None:
        at = 0
        pending = self._pending
        while len(pending) - at >= HEADER.size:
            length, kind = HEADER.unpack_from(pending, at)
            if length > MAX_BODY:
                raise TunnelError(f"a frame of {length} bytes")
            if len(pending) - at - HEADER.size < length:
                break
            body = bytes(memoryview(pending)[at + HEADER.size : at + HEADER.size + length])
            at += HEADER.size + length
            self._frame(kind, body)
            if self._transport is None or self._transport.is_closing():
                return
        del pending[:at]

    def _frame(self, kind: int, body: bytes) -> None:
        if self._detached_by_peer:
            raise TunnelError("a frame after the last one")
        tunnel = self._tunnel
        if tunnel is None:
            self._begin(kind, body)
        elif kind == Frame.DATA:
            if self._parking and tunnel.unread_bytes > _PARKING_ROOM:
                raise TunnelError("more data than a socket holds before a freeze")
            tunnel.fed(body)
        elif kind == Frame.END:
            tunnel.fed_end()
        elif kind == Frame.RESET:
            self._abort("the program inside reset its connection")
        elif kind == Frame.DETACH:
            self._park()
        else:
            raise TunnelError(f"frame {kind} on an open tunnel")

    def _begin(self, kind: int, body: bytes) -> None:
        if self._first is not None:
            self._first.cancel()
            self._first = None
        if kind == Frame.OPEN:
            self._open(body)
        elif kind == Frame.RESUME:
            self._resume(body)
        elif kind == Frame.DETACH:
            self._owner.about_to_freeze()
            self.send(Frame.DETACH)
            self.close()
        else:
            raise TunnelError(f"frame {kind} comes first")

    def _open(self, body: bytes) -> None:
        if len(body) < OPEN.size:
            raise TunnelError("a frame ends within a field")
        number, kind, port, length = OPEN.unpack_from(body)
        host = body[OPEN.size :]
        if len(host) != length or length > _LONGEST_HOST or kind not in _KINDS:
            raise TunnelError("a frame's fields do not fit")
        if number in self._owner.tunnels:
            raise TunnelError(f"tunnel {number} is open already")
        if len(self._owner.tunnels) >= self._owner.most:
            self.refuse(Refusal.QUOTA)
            return
        self._tunnel = Tunnel(number, Kind(kind), host, port)
        self._tunnel.carried(self)
        self._owner.open(self._tunnel)

    def _resume(self, body: bytes) -> None:
        if len(body) != RESUME.size:
            raise TunnelError("a frame's fields do not fit")
        number, received, sent = RESUME.unpack(body)
        tunnel = self._owner.tunnels.get(number)
        if tunnel is not None:
            tunnel.let_go()
        if tunnel is None or tunnel.over or not tunnel.is_parked:
            self.refuse(Refusal.UNKNOWN)
            return
        if (received, sent) != (tunnel.sent, tunnel.received):
            log.debug("tunnel %d was parked with other counts than it came back with", number)
            tunnel.lost("bytes were lost in a freeze")
            self.refuse(Refusal.UNKNOWN)
            return
        self._tunnel = tunnel
        tunnel.resumed(self)

    def _park(self) -> None:
        """The last frame came: answer with the last one of this end, and wait for the close."""
        self._detached_by_peer = True
        self.leaving = True
        # What a program inside had ended to send before is known; the end of this side is sent
        # again only if it never was.
        self.send(Frame.DETACH)
        self._owner.about_to_freeze()
        self.more()


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" in {frames[-1].name}, line {frames[-1].lineno}" if frames else ""


_KINDS = frozenset(int(kind) for kind in Kind)
