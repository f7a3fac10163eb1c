"""The gateway's end of tunnels: one stream each, taken up again after a freeze.

Guarantee: bytes of a parked tunnel are neither lost nor sent twice: both ends compare what they
counted, and a tunnel where that differs is reset. What carries tunnels is in
`sojourn.gateway.carriers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sojourn.gateway.streams import Incoming, Reset, Room
from sojourn.wire.tunnels import MAX_BODY, OPENED, Frame, Kind, Refusal, TunnelError

if TYPE_CHECKING:
    from sojourn.gateway.carriers import Carrier


class Tunnel:
    """One tunnel. It outlives the connections that carry it."""

    def __init__(self, number: int, kind: Kind, host: bytes, port: int) -> None:
        self.number, self.kind, self.host, self.port = number, kind, host, port
        self.received = self.sent = 0
        self._carrier: Carrier | None = None
        self._attached = Room()
        self._incoming = Incoming(self._hold, self._more)
        self._ended = self._over = False
        self._end_sent = self._accepted = False
        self.finished: Callable[[Tunnel], None] | None = None
        self.on_loss: Callable[[], object] | None = None

    @property
    def held(self) -> bool:
        """Whether it has as much as it may hold unread."""
        return self._incoming.held

    @property
    def unread_bytes(self) -> int:
        """What has arrived and was not read."""
        return self._incoming.size

    @property
    def is_parked(self) -> bool:
        """Whether no connection carries it."""
        return self._carrier is None

    @property
    def over(self) -> bool:
        """Whether it was reset, or closed in both directions."""
        return self._over

    def carried(self, carrier: Carrier) -> None:
        """A connection carries it from now on."""
        self._carrier = carrier
        self._attached.free()
        if self._ended and not self._end_sent:
            self._send_end()
        if not self._incoming.held:
            carrier.more()

    def parked(self) -> None:
        """No connection carries it for now."""
        self._carrier = None
        self._attached.full()

    def fed(self, data: bytes) -> None:
        """Data came from inside."""
        if self._incoming.over:
            raise TunnelError("data after the end")
        self.received += len(data)
        if data:
            self._incoming.feed(data)

    def fed_end(self) -> None:
        """The end came from inside."""
        self._incoming.end()

    def lost(self, why: str) -> None:
        """It is over, from inside or because its connection broke."""
        if not self._over:
            self._over = True
            error = Reset(why)
            if not self._incoming.over:
                # What arrived before its end is whole, and may still be read.
                self._incoming.fail(error)
            self._attached.fail(error)
            self._carrier = None
            if self.finished is not None:
                self.finished(self)
            if self.on_loss is not None:
                self.on_loss()

    def broken(self) -> None:
        """Its connection is closed without having been parked."""
        if self._incoming.over and self._end_sent:
            # All was said in both directions; what is unread stays.
            self._carrier = None
        else:
            self.lost("the tunnel's connection broke")

    def let_go(self) -> None:
        """It is about to be taken up on another connection; where both ends have said their last
        on this one, its close need not be waited for."""
        if self._carrier is not None and self._carrier.leaving:
            self._carrier.abandon()

    def resumed(self, carrier: Carrier) -> None:
        """It was taken up again."""
        self._accepted = True
        carrier.send(Frame.OPENED, OPENED.pack(self.received))
        self.carried(carrier)
        if self.held:
            carrier.hold()

    async def accept(self) -> None:
        """Say that the tunnel stands. Raises Reset when it does not any more."""
        while not self._accepted:
            await self._attached.wait()
            carrier = self._carrier
            if carrier is None:
                raise Reset("the tunnel is closed")
            if carrier.leaving:
                await carrier.gone.wait()
                continue
            self._accepted = True
            carrier.send(Frame.OPENED, OPENED.pack(0))

    def refuse(self, reason: Refusal) -> None:
        """Say why there is none."""
        carrier = self._carrier
        if carrier is not None:
            carrier.refuse(reason)
        self.lost("refused")

    async def read(self) -> bytes:
        return await self._incoming.read()

    def unread(self, data: bytes) -> None:
        self._incoming.unread(data)

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), MAX_BODY):
            piece = data[at : at + MAX_BODY]
            while True:
                await self._attached.wait()
                carrier = self._carrier
                if carrier is None:
                    raise Reset("the tunnel is closed")
                if not carrier.leaving:
                    break
                await carrier.gone.wait()
            if self._ended:
                raise Reset("the tunnel was ended")
            carrier.send(Frame.DATA, piece)
            self.sent += len(piece)
            await carrier.room_or_gone()

    async def end(self) -> None:
        if self._ended:
            return
        self._attached.check()
        self._ended = True
        if self._carrier is not None and not self._carrier.leaving:
            self._send_end()

    def reset(self) -> None:
        if self._over:
            return
        carrier = self._carrier
        if carrier is not None and not carrier.leaving:
            carrier.send(Frame.RESET)
            carrier.close()
        self.lost("the tunnel was reset")

    def _send_end(self) -> None:
        assert self._carrier is not None
        self._end_sent = True
        self._carrier.send(Frame.END)

    def close(self) -> None:
        """Nobody serves it any more. Where both directions have ended, its connection is let go;
        else it is reset."""
        if self._over:
            return
        carrier = self._carrier
        if not (self._end_sent and self._incoming.over):
            self.reset()
            return
        if carrier is not None:
            carrier.close()
        self.lost("the tunnel is closed")

    def _hold(self) -> None:
        if self._carrier is not None:
            self._carrier.hold()

    def _more(self) -> None:
        if self._carrier is not None:
            self._carrier.more()
