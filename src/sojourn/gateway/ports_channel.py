"""What the server and the gateway process tell each other about exposed ports.

Guarantee: messages keep their order and borders, each is bounded, and the end of one side is told
to the other. The server opens all listening sockets and hands them over: a request that comes
while no gateway process lives waits in the socket's queue for the next one, and no port is free
for others in between. That is why this is a channel of its own, which can carry descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from sojourn.errors import ErrorBody
from sojourn.model.ports import PortKind

_LARGEST = 64 << 10
_MOST_DESCRIPTORS = 1


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To the gateway, with a descriptor: answer HTTP on this listening socket. Hosts below
    `domain` name a port and a session; `scheme` is what is spoken with whoever asks, where
    something in front of the server speaks TLS. `relayed`: whoever connects is a server that
    carries requests here, and says of each in the header `sojourn-client` from where it came."""

    domain: str
    scheme: str = "http"
    relayed: bool = False


class Expose(msgspec.Struct, frozen=True, tag=True):
    """To the gateway: a port of a session can be reached. `digest` is the SHA-256 of its access
    token; empty: it is public. With a descriptor for a TCP port: its listening socket. `sources`
    are the networks a TCP port answers to; empty: all."""

    id: str
    session: str
    port: int
    kind: PortKind
    digest: bytes = b""
    sources: list[str] = []


class Unexpose(msgspec.Struct, frozen=True, tag=True):
    """To the gateway: it can no longer be reached; open connections end."""

    id: str


class Dial(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: have the session of an exposed port run, and its supervisor open a tunnel
    that bears `token`. Answered by `Dialed` with the same token, which no other dial ever has, also
    of another gateway process."""

    id: str
    token: bytes


class Dialed(msgspec.Struct, frozen=True, tag=True):
    """To the gateway: the tunnel is there, or why there is none."""

    token: bytes
    error: ErrorBody | None = None


class Ask(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: a request names a port that is not exposed. Answered by `Asked` with the
    same number, after an `Expose` where it is exposed for that."""

    number: int
    session: str
    port: int


class Asked(msgspec.Struct, frozen=True, tag=True):
    """To the gateway: it was looked at."""

    number: int


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: nobody waits for this dial any more."""

    token: bytes


class Moved(msgspec.Struct, frozen=True, tag=True):
    """From the gateway: through these exposed ports bytes moved since it last said so, or a
    request waits for its answer. `quiet` are those where that has just ended."""

    ids: list[str]
    quiet: list[str]


Message = Serve | Expose | Unexpose | Dial | Dialed | Ask | Asked | GiveUp | Moved

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new channel; neither is inherited by itself."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Channel:
    """One end. `received` gets each message with the descriptors that came with it, which are its
    own from then on; `ended` is called once, when the other side is gone."""

    def __init__(
        self,
        end: socket.socket,
        received: Callable[[Message, list[int]], None],
        ended: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = received
        self._ended = ended
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(end, self._readable)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send, or queue where the other side is behind. A descriptor is copied: the caller keeps
        its own. To a side that is gone nothing is sent."""
        if self._closed:
            return
        held = [] if descriptor is None else [os.dup(descriptor)]
        self._waiting.append((_encode(message), held))
        if len(self._waiting) == 1:
            self._writable()

    def close(self) -> None:
        """Let go; `ended` is not called. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        for _, held in self._waiting:
            for descriptor in held:
                os.close(descriptor)
        self._waiting.clear()
        self._socket.close()

    def _lost(self) -> None:
        if not self._closed:
            self.close()
            self._ended()

    def _writable(self) -> None:
        while self._waiting:
            data, held = self._waiting[0]
            try:
                socket.send_fds(self._socket, [data], held)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._writable)
                return
            except OSError:
                self._lost()
                return
            self._waiting.popleft()
            for descriptor in held:
                os.close(descriptor)
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        while not self._closed:
            try:
                data, held, flags, _ = socket.recv_fds(
                    self._socket, _LARGEST, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                self._lost()
                return
            if not data:
                self._lost()
                return
            try:
                if flags & socket.MSG_TRUNC:
                    raise msgspec.DecodeError("a message over the limit")
                message = _decode(data)
            except msgspec.DecodeError:
                # The two sides are one program: whoever sends this is not the other side.
                for descriptor in held:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                self._lost()
                return
            self._received(message, held)
