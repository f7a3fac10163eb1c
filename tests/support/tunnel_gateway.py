"""A gateway for tests of the sandbox's end of tunnels: it serves by the name that is asked for.

`echo` gives back what it gets, `sink` says how much it got and its digest at the end, `source-N`
sends N bytes, `mirror-N` does both at once, `hold` says nothing, `reset` resets after the first
data, `refuse` refuses, `late` says its last, and goes, just when it is to be parked, `name` tells
who was asked for. Every other name is `name`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

from sojourn.wire.tunnels import HEADER, OPEN, OPENED, RESUME, Frame, Kind, Refusal, frame

PIECE = 16 << 10
LATE = 128 * PIECE


def pattern(offset: int, size: int) -> bytes:
    """Bytes of an endless stream in which no two places look alike."""
    first = offset // 8
    words = b"".join(n.to_bytes(8, "big") for n in range(first, (offset + size) // 8 + 1))
    return words[offset - first * 8 :][:size]


class Tunnel:
    """One tunnel; it outlives its connection."""

    def __init__(self, number: int, kind: Kind, port: int, host: bytes) -> None:
        self.number, self.kind, self.port, self.host = number, kind, port, host
        self.received = self.sent = 0
        self.to_send = bytearray()
        self.got = hashlib.sha256()
        self.ended = self.end_sent = self.end_due = False
        self.resumed = 0

    @property
    def name(self) -> str:
        return self.host.decode(errors="replace").partition(".")[0]


class TunnelGateway:
    """Listens at a sandbox's `net.sock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tunnels: dict[int, Tunnel] = {}
        self.opened: list[Tunnel] = []
        self.announced = 0
        self.connections = 0
        self.errors: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> TunnelGateway:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.path.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other end is gone, as resets end
        except asyncio.CancelledError:
            pass  # the test is over; streams would report a cancelled task as a failure
        except Exception as error:  # noqa: BLE001 - the test looks at what went wrong here
            self.errors.append(repr(error))
        finally:
            self.connections -= 1
            self._tasks.discard(task)
            writer.close()

    @staticmethod
    async def _frame(reader: asyncio.StreamReader) -> tuple[Frame, bytes]:
        length, kind = HEADER.unpack(await reader.readexactly(HEADER.size))
        return Frame(kind), await reader.readexactly(length)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, body = await self._frame(reader)
        if kind is Frame.DETACH:
            self.announced += 1
            writer.write(frame(Frame.DETACH))
            await writer.drain()
            return
        if kind is Frame.RESUME:
            number, received, sent = RESUME.unpack(body)
            tunnel = self.tunnels.get(number)
            if tunnel is None:
                writer.write(frame(Frame.REFUSED, bytes([Refusal.UNKNOWN])))
                await writer.drain()
                return
            assert (received, sent) == (tunnel.sent, tunnel.received), "the counts differ"
            tunnel.resumed += 1
        else:
            assert kind is Frame.OPEN
            number, what, port, length = OPEN.unpack_from(body)
            assert len(body) == OPEN.size + length
            tunnel = Tunnel(number, Kind(what), port, body[OPEN.size :])
            self.opened.append(tunnel)
            if tunnel.name == "refuse":
                writer.write(frame(Frame.REFUSED, bytes([Refusal.POLICY])))
                await writer.drain()
                return
            self.tunnels[number] = tunnel
            self._begin(tunnel)
        writer.write(frame(Frame.OPENED, OPENED.pack(tunnel.received)))
        sending = asyncio.ensure_future(self._send(tunnel, writer))
        try:
            await self._receive(tunnel, reader, writer, sending)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    @staticmethod
    def _begin(tunnel: Tunnel) -> None:
        if tunnel.kind is Kind.INBOUND:
            return
        word, _, size = tunnel.name.partition("-")
        if word in ("source", "mirror"):
            tunnel.to_send += pattern(0, int(size))
            tunnel.end_due = True
        elif word not in ("echo", "sink", "hold", "reset", "late"):
            tunnel.to_send += b"%d %s %d\n" % (tunnel.kind, tunnel.host, tunnel.port)
            tunnel.end_due = True

    async def _send(self, tunnel: Tunnel, writer: asyncio.StreamWriter) -> None:
        while True:
            if tunnel.to_send:
                piece = bytes(tunnel.to_send[:PIECE])
                del tunnel.to_send[:PIECE]
                tunnel.sent += len(piece)
                writer.write(frame(Frame.DATA, piece))
                await writer.drain()
            elif tunnel.end_due and not tunnel.end_sent:
                tunnel.end_sent = True
                writer.write(frame(Frame.END))
            else:
                await asyncio.sleep(0.002)

    async def _receive(
        self,
        tunnel: Tunnel,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sending: asyncio.Future[None],
    ) -> None:
        while True:
            kind, body = await self._frame(reader)
            if kind is Frame.DATA:
                assert not tunnel.ended
                tunnel.received += len(body)
                tunnel.got.update(body)
                if tunnel.name == "echo":
                    tunnel.to_send += body
                elif tunnel.name == "reset":
                    writer.write(frame(Frame.RESET))
            elif kind is Frame.END:
                tunnel.ended = True
                if tunnel.name == "sink":
                    tunnel.to_send += b"%d %s" % (tunnel.received, tunnel.got.hexdigest().encode())
                if tunnel.name in ("echo", "sink"):
                    tunnel.end_due = True
            elif kind is Frame.RESET:
                del self.tunnels[tunnel.number]
                return
            else:
                assert kind is Frame.DETACH
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sending
                if tunnel.name.startswith("late"):
                    del self.tunnels[tunnel.number]
                    for at in range(0, LATE, PIECE):
                        writer.write(frame(Frame.DATA, pattern(at, PIECE)))
                    writer.write(frame(Frame.END))
                    await writer.drain()
                    if tunnel.name == "late-gone":
                        return
                writer.write(frame(Frame.DETACH))
                await writer.drain()
                assert await reader.read() == b""
                return
