"""The connection to one supervisor: requests, answers, leaving and coming back.

Guarantee: a request is answered once or raises. Each keeps its number and its frame until the
answer is here; after a reconnect all of them are sent again under the same numbers, and the
supervisor answers what it has already done from its record. While detached, no descriptor of this
process is known to the sandbox and nothing listens in the control directory.

No request waits for a supervisor that is stopped (by a debugger of root inside, say): while any is
owed an answer and nothing arrives, the supervisor is asked something it answers at once, however
long the commands take that others wait for. Silence for SILENT_SECONDS after that is a loss.

The supervisor connects to us, because a socket that the sandbox serves could not be reached
without attaching something of the host to it. The listener goes as soon as one has connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sojourn.errors import Interrupted, InvalidRequest, SandboxLost, SojournError, TooLarge
from sojourn.node.link_errors import error_of
from sojourn.wire import frames
from sojourn.wire.frames import FrameError, Op, Reader

log = logging.getLogger(__name__)

SOCKET = "node.sock"
MOST_OF_AN_ANSWER = 64 << 20  # all pieces of one answer together; the supervisor is not trusted
PROBE_SECONDS = 5.0  # of silence, with answers owed, before a probe
SILENT_SECONDS = 60.0  # of silence, with a probe owed, before the supervisor counts as lost
_SOCKET_MODE = 0o600  # root inside alone may pose as the supervisor
_ACKS_AT_ONCE = 64
_WAITING = frozenset({Op.RUN, Op.WAIT, Op.OUTPUT, Op.WATCH_READ})
_EMPTY = frames.HEADER.size


class _State(enum.Enum):
    DETACHED = "detached"  # nothing listens
    LISTENING = "listening"  # waiting for the supervisor, at attach or after a loss
    ATTACHED = "attached"
    LEAVING = "leaving"
    LOST = "lost"  # it did not come back in time
    CLOSED = "closed"


class _Pending:
    """A request without its answer."""

    __slots__ = ("frame", "future", "hold", "op", "pieces", "size")

    def __init__(
        self, op: int, frame: bytes, future: asyncio.Future[list[bytes]] | None, hold: bool
    ) -> None:
        self.op = op
        self.frame = frame
        self.future = future
        self.hold = hold
        self.pieces: list[bytes] = []
        self.size = 0


class _Stream(asyncio.Protocol):
    """Cuts what arrives into frames."""

    def __init__(self, owner: Connection) -> None:
        self.owner = owner
        self.transport: asyncio.Transport | None = None
        self.buffer = bytearray()
        self.greeted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        self.owner._connected(self)

    def data_received(self, data: bytes) -> None:
        self.owner._heard = True
        if self.buffer:
            self.buffer += data
            # Waiting for the rest of a long frame must not cost a copy for each part of it.
            if len(self.buffer) < _EMPTY + int.from_bytes(self.buffer[:4], "little"):
                return
            data = bytes(self.buffer)
            self.buffer.clear()
        at, size = 0, len(data)
        unpack = frames.HEADER.unpack_from
        while size - at >= _EMPTY:
            length, op, status, identifier, _ = unpack(data, at)
            if length > frames.MAX_BODY:
                self.owner._broken(self, "a frame over the limit")
                return
            end = at + _EMPTY + length
            if end > size:
                break
            self.owner._frame(self, op, status, identifier, data[at + _EMPTY : end])
            at = end
        if at < size:
            self.buffer += data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        self.owner._gone(self)


class Connection:
    """One supervisor's connection, and the requests on it."""

    def __init__(
        self,
        control: Path,
        *,
        reconnect_within: float = 10.0,
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._excused = excused  # whether a supervisor that is silent cannot help it
        self._control = control
        self._within = reconnect_within
        self._client = secrets.token_bytes(16)
        self._state = _State.DETACHED
        self._stream: _Stream | None = None
        self._server: asyncio.Server | None = None
        self._pending: dict[int, _Pending] = {}
        self._next = 1
        self._acks: deque[int] = deque()
        self._cancelled: list[int] = []  # to be told at the next attach
        self._abandoned: set[int] = set()  # whose answers may still come
        self._opening = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._arrived: asyncio.Future[None] | None = None
        self._left: asyncio.Future[None] | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._listening: asyncio.Task[None] | None = None
        self._attach_id = 0
        self._looking: asyncio.TimerHandle | None = None
        self._heard = False  # whether anything arrived since the last look
        self._probe = 0
        self._silences = 0  # looks in a row that found nothing but an owed probe
        self._cause = ""  # of the loss
        self._lost_for_good = False
        self.hello: frames.Hello | None = None
        self.generation = 0  # grows with each interrupt: streams of before must not go on

    # -- requests ---------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the supervisor is connected now."""
        return self._state is _State.ATTACHED

    @property
    def lost(self) -> str | None:
        """Why the supervisor counts as lost, where it does."""
        return self._cause if self._state is _State.LOST else None

    def submit(
        self, op: int, body: bytes = b"", *, hold: bool = False
    ) -> tuple[int, asyncio.Future[list[bytes]]]:
        """Send a request, now or once attached; the future gets the bodies of its answer.

        With `hold` the answer is not acknowledged by itself; see `acknowledge`.
        """
        if self._state in (_State.CLOSED, _State.LOST):
            raise SandboxLost(self.lost or f"the supervisor is not connected ({self._state.value})")
        identifier = self._next
        self._next = identifier + 1
        acks = self._acks
        try:
            frame = frames.frame(op, identifier, body, ack=acks.popleft() if acks else 0)
        except FrameError as error:
            raise TooLarge(str(error)) from error
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._pending[identifier] = _Pending(op, frame, future, hold)
        if self._state is _State.ATTACHED:
            self._write(frame)
            if self._looking is None:
                self._look_later()
        return identifier, future

    async def call(self, op: int, body: bytes = b"") -> Reader:
        """Send a request and wait for an answer of one frame."""
        identifier, future = self.submit(op, body)
        try:
            return Reader((await future)[0])
        except asyncio.CancelledError:
            self.abandon(identifier)
            raise

    def post(self, op: int, body: bytes) -> None:
        """Send a request whose answer interests nobody."""
        if self._state in (_State.CLOSED, _State.LOST):
            return
        identifier, future = self.submit(op, body)
        future.cancel()
        self._pending[identifier].future = None

    def abandon(self, identifier: int) -> None:
        """The caller of a request is gone: what waits for it inside may stop."""
        pending = self._pending.pop(identifier, None)
        if pending is None:
            return
        self._disown(identifier, pending.op)
        self._acks.append(identifier)
        if self._state is _State.ATTACHED:
            self._write(frames.frame(Op.CANCEL, 0, frames.number(identifier)))
        else:
            self._cancelled.append(identifier)

    def _disown(self, identifier: int, op: int) -> None:
        if op not in _WAITING:  # those are not answered once they are cancelled
            self._abandoned.add(identifier)

    def acknowledge(self, identifier: int) -> None:
        """A held answer has served its purpose."""
        self._acks.append(identifier)
        if len(self._acks) >= _ACKS_AT_ONCE and self._state is _State.ATTACHED:
            self._write(self._all_acks())

    def _all_acks(self) -> bytes:
        body = b"".join(frames.number(one) for one in self._acks)
        self._acks.clear()
        return frames.frame(Op.ACK, 0, body[: frames.MAX_BODY & ~7])

    def _write(self, data: bytes) -> None:
        assert self._stream is not None and self._stream.transport is not None
        self._stream.transport.write(data)

    def _frame(self, stream: _Stream, op: int, status: int, identifier: int, body: bytes) -> None:
        if stream is not self._stream:
            return
        if not stream.greeted:
            self._greet(stream, op, body)
            return
        pending = self._pending.get(identifier)
        if pending is None:
            # Its caller is gone; it still may be forgotten. Only what was asked is acknowledged:
            # a peer that makes up numbers must not make this side write.
            if identifier in self._abandoned and not status & frames.MORE:
                self._abandoned.discard(identifier)
                self.acknowledge(identifier)
            return
        number = status & ~frames.MORE
        if status & frames.MORE:
            pending.pieces.append(body)
            pending.size += len(body)
            if pending.size > MOST_OF_AN_ANSWER:
                self.abandon(identifier)
                self._fail(pending, TooLarge("the answer of the supervisor is too long"))
            return
        del self._pending[identifier]
        if not pending.hold or number:
            self.acknowledge(identifier)
        if identifier == self._attach_id:
            self._attached_now()
            return
        future = pending.future
        if future is None or future.done():
            return
        if number:
            future.set_exception(error_of(pending.op, number, body))
        elif pending.pieces:
            pending.pieces.append(body)
            future.set_result(pending.pieces)
        else:
            future.set_result([body])

    @staticmethod
    def _fail(pending: _Pending, error: SojournError) -> None:
        if pending.future is not None and not pending.future.done():
            pending.future.set_exception(error)

    def _fail_all(self, error: SojournError) -> None:
        waiting, self._pending = self._pending, {}
        for pending in waiting.values():
            self._fail(pending, error)

    # -- silence ----------------------------------------------------------------------------

    def _look_later(self) -> None:
        """Begin to look whether answers come."""
        self._heard = True
        self._looking = asyncio.get_running_loop().call_later(PROBE_SECONDS, self._look)

    def _look(self) -> None:
        """Probe a supervisor that owes answers and is silent; give it up in the end.

        Looks are counted instead of seconds: where this process was stopped or starved itself, the
        time that went by says nothing of the supervisor.
        """
        self._looking = None
        if self._state is not _State.ATTACHED or not self._pending:
            return  # the next request or attach begins anew
        self._looking = asyncio.get_running_loop().call_later(PROBE_SECONDS, self._look)
        if self._heard or self._excused():
            self._heard = False
            self._silences = 0
        elif self._probe not in self._pending:
            self._silences = 0
            self._probe = self._next
            self.post(Op.INFO, b"")
        else:
            self._silences += 1
            if self._silences * PROBE_SECONDS >= SILENT_SECONDS:
                self._lost_for_good = True
                cause = "the supervisor does not answer"
                self._lose(cause, cause=cause)

    def _lose(self, cause: str, /, **details: str) -> None:
        """Nobody waits for this supervisor any more."""
        log.info("%s: %s", self._control, cause)
        self._state = _State.LOST
        self._cause = cause
        if self._server is not None:
            server, self._server = self._server, None
            (self._control / SOCKET).unlink(missing_ok=True)
            server.close()
        self._drop_stream()
        self._stream = None
        self._fail_all(SandboxLost(cause, **details))
        for change in (self._arrived, self._left):
            if change is not None and not change.done():
                change.set_exception(SandboxLost(cause, **details))

    def give_up(self, cause: str) -> None:
        """The sandbox is known to be gone: nobody waits for its supervisor any more."""
        if self._state not in (_State.CLOSED, _State.LOST):
            self._lost_for_good = True
            self._lose(cause)

    # -- coming and going -------------------------------------------------------------------

    async def attach(self, deadline: float) -> None:
        """Accept the supervisor's connection; parked calls go on. Raises SandboxLost."""
        async with self._changing:
            if self._state is _State.ATTACHED:
                return
            if self._state is _State.CLOSED:
                raise SandboxLost("the link is closed")
            if self._lost_for_good:
                raise SandboxLost(self._cause)
            if not await self._arrival(deadline):
                # Not only this caller may not wait: requests would else be kept for an attach that
                # nobody tries again.
                self._lose(f"the supervisor did not connect within {deadline:g} s")
                raise SandboxLost(self._cause)

    async def _arrival(self, deadline: float) -> bool:
        """Wait for the supervisor to be attached."""
        self._arrived = asyncio.get_running_loop().create_future()
        try:
            await self._listen()
            if self._state is not _State.ATTACHED or self._attach_id in self._pending:
                await self._await(self._arrived, deadline)
        except TimeoutError:
            return False
        finally:
            self._arrived = None
        return True

    async def _await(self, answer: asyncio.Future[None], deadline: float) -> None:
        """Wait so long for the supervisor; longer where it is kept from answering. Raises
        TimeoutError."""
        while not (await asyncio.wait({answer}, timeout=deadline))[0]:
            if not self._excused():
                raise TimeoutError
        answer.result()

    async def detach(self, deadline: float) -> None:
        """Have the supervisor drop its connection; calls are parked. Raises SandboxLost."""
        async with self._changing:
            if self._state is _State.DETACHED:
                return
            if self._state is _State.LISTENING:
                await self._arrival(deadline)  # the connection broke a moment ago
            if self._state is not _State.ATTACHED or self._stream is None:
                raise SandboxLost(f"the supervisor is not connected ({self._state.value})")
            self._left = asyncio.get_running_loop().create_future()
            self._state = _State.LEAVING
            identifier = self._next
            self._next = identifier + 1
            acks = b"".join(frames.number(one) for one in self._acks)
            self._acks.clear()
            self._write(frames.frame(Op.DETACH, identifier, acks[: frames.MAX_BODY & ~7]))
            try:
                await self._await(self._left, deadline)
            except TimeoutError:
                self._state = _State.LISTENING
                self._drop_stream()
                raise SandboxLost(f"the supervisor did not let go within {deadline:g} s") from None
            finally:
                self._left = None

    async def interrupt(self, reason: str, *, moved: bool = False) -> None:
        """End all parked and running calls with Interrupted; `moved` is among its details."""
        self.generation += 1
        for identifier, pending in list(self._pending.items()):
            if pending.future is None or identifier == self._attach_id:
                continue
            del self._pending[identifier]
            error = Interrupted(reason)
            if moved:
                error.details["moved"] = True
            self._fail(pending, error)
            self._disown(identifier, pending.op)
            self._acks.append(identifier)
            # Cancelling a run would end its command, which is to live on in the snapshot.
            if pending.op != Op.RUN and self._state is _State.ATTACHED:
                self._write(frames.frame(Op.CANCEL, 0, frames.number(identifier)))

    @property
    def interrupts(self) -> int:
        """How often `interrupt` was called."""
        return self.generation

    def check(self, generation: int) -> None:
        """Raise Interrupted when an interrupt came since `generation`."""
        if generation != self.generation:
            raise Interrupted("the stream belongs to a state the session has left")

    async def close(self) -> None:
        """Drop the link for good."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._stop_waiting()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._drop_stream()
        self._fail_all(SandboxLost("the link is closed"))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(SandboxLost("the link is closed"))
        await self._stop_listening()

    async def _listen(self) -> None:
        async with self._opening:
            if self._server is None and self._stream is None and self._state is not _State.CLOSED:
                await self._open_listener()

    async def _open_listener(self) -> None:
        self._state = _State.LISTENING
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        directory = -1
        try:
            # Socket addresses are limited to 108 bytes, data directories are not.
            directory = os.open(self._control, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SOCKET, dir_fd=directory)
            address = f"/proc/self/fd/{directory}/{SOCKET}"
            listener.bind(address)
            os.chmod(address, _SOCKET_MODE)  # noqa: PTH101
            listener.listen(4)
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Stream(self), sock=listener
            )
        except BaseException:
            listener.close()
            raise
        finally:
            if directory >= 0:
                os.close(directory)

    async def _stop_listening(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            (self._control / SOCKET).unlink(missing_ok=True)
            server.close()

    def _connected(self, stream: _Stream) -> None:
        if self._stream is not None or self._state is not _State.LISTENING:
            assert stream.transport is not None
            stream.transport.abort()
            return
        self._stream = stream

    def _greet(self, stream: _Stream, op: int, body: bytes) -> None:
        try:
            if op != Op.HELLO:
                raise FrameError("the peer did not greet")
            hello = frames.Hello(Reader(body))
            if hello.version != frames.VERSION:
                raise FrameError(f"the supervisor speaks version {hello.version}")
        except FrameError as error:
            self._broken(stream, str(error))
            return
        stream.greeted = True
        self.hello = hello
        if self._server is not None:
            server, self._server = self._server, None
            (self._control / SOCKET).unlink(missing_ok=True)
            server.close()
        self._attach_id = self._next
        self._next += 1
        greeting = frames.VERSION.to_bytes(2, "little") + frames.blob(self._client)
        attach = frames.frame(Op.ATTACH, self._attach_id, greeting)
        again = [one.frame for one in self._pending.values()]
        gone = [frames.frame(Op.CANCEL, 0, frames.number(one)) for one in self._cancelled]
        self._cancelled.clear()
        self._abandoned.clear()
        self._pending[self._attach_id] = _Pending(Op.ATTACH, attach, None, False)
        self._state = _State.ATTACHED
        self._write(b"".join([attach, *again, *gone]))
        if self._looking is None:
            self._look_later()

    def _attached_now(self) -> None:
        self._stop_waiting()
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _broken(self, stream: _Stream, why: str) -> None:
        """What came was no frame of a supervisor: have nothing more to do with this connection."""
        log.debug("%s: connection dropped: %s", self._control, why)
        if stream.transport is not None:
            stream.transport.abort()

    def _drop_stream(self) -> None:
        if self._stream is not None and self._stream.transport is not None:
            self._stream.transport.abort()

    def _gone(self, stream: _Stream) -> None:
        if stream is not self._stream:
            return
        self._stream = None
        self._pending.pop(self._attach_id, None)
        for pending in self._pending.values():
            pending.pieces.clear()  # a long answer begins anew
            pending.size = 0
        if self._state is _State.LEAVING:
            self._state = _State.DETACHED
            if self._left is not None and not self._left.done():
                self._left.set_result(None)
        elif self._state in (_State.ATTACHED, _State.LISTENING):
            self._lost()

    def _lost(self) -> None:
        """The connection broke by itself: listen again, but not for ever."""
        loop = asyncio.get_running_loop()
        self._state = _State.LISTENING
        if self._server is None:
            self._listening = loop.create_task(self._listen_again())
        if self._arrived is None and self._give_up is None:
            self._give_up = loop.call_later(self._within, self._not_back)

    async def _listen_again(self) -> None:
        try:
            await self._listen()
        except OSError:
            self._not_back()  # the control directory is gone: nobody can come back

    def _not_back(self) -> None:
        self._stop_waiting()
        if self._state is not _State.LISTENING or self._arrived is not None:
            return
        self._lose("the supervisor's connection broke and did not come back")

    def _stop_waiting(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None


def encode(make: Callable[[], bytes]) -> bytes:
    """A request's body; what cannot be put into a frame is the caller's mistake."""
    try:
        return make()
    except FrameError as error:
        raise InvalidRequest(str(error)) from error
