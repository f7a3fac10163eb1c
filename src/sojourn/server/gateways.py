"""The gateway process, seen from the server: started when it is needed, started again when it dies.

Guarantee: whatever the process does, no session waits for it longer than a few seconds and none
is harmed: a sandbox whose gateway is gone reaches nothing until the next one serves it, under the
policy of then. A process that does not answer is ended, so that no older policy stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from sojourn.errors import InvalidRequest, SojournError, Unreachable
from sojourn.gateway.control import Control, Request
from sojourn.gateway.messages import Attach, Began, Detach, Ended, Start, Withheld
from sojourn.server.sender import end_process
from sojourn.telemetry import declared
from sojourn.wire.api import GatewayInfo

log = logging.getLogger(__name__)

_START_SECONDS = 15.0
_AGAIN_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_LOAD_SECONDS = 30.0  # until a new process answers: on a busy machine its start alone takes seconds
_END_SECONDS = 5.0
_PAUSES = (0.0, 0.1, 0.5, 2.0, 5.0)  # before the next start, by how often it died early
_WELL_SECONDS = 30.0  # one that lived so long did not die early

Wanted = Callable[[], Awaitable[Attach | None]]
Handle = Callable[[Began | Ended | Withheld], Awaitable[None]]


class EgressSettings(msgspec.Struct, frozen=True):
    """How connections leave this server. `namespace` is the path of a network namespace they are
    made in (None: the host's); `nameservers` are asked instead of the host's own; `private` are
    networks that policies may name although they are private; `roots` is a file of certificates
    that are trusted beside the system's."""

    namespace: str | None = None
    nameservers: list[str] = []
    private: list[str] = []
    roots: str | None = None


def egress_settings(
    namespace: str | None, nameservers: str | None, private: str | None, roots: Path | None
) -> EgressSettings:
    """Settings from an operator's words, lists with commas. Raises InvalidRequest."""
    servers, networks = _words(nameservers), _words(private)
    for server in servers:
        try:
            ipaddress.ip_address(server)
        except ValueError as error:
            raise _unusable("nameservers", str(error)) from None
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise _unusable("private", str(error)) from None
    for field, path in (("namespace", namespace), ("roots", roots)):
        try:
            if path:
                Path(path).stat()
        except OSError as error:
            raise _unusable(field, f"{path}: {error.strerror}") from error
    return EgressSettings(
        namespace=namespace or None,
        nameservers=servers,
        private=networks,
        roots=str(roots) if roots else None,
    )


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").replace(",", " ").split() if word]


def _unusable(field: str, cause: str) -> InvalidRequest:
    return InvalidRequest(
        f"--egress-{field} (SOJOURN_EGRESS_{field.upper()}): {cause}", field=f"egress_{field}"
    )


class Gateway:
    """The one gateway process of a server.

    `handle` gets what it tells and answers when that is recorded; `lost` is awaited after a process
    ended, before the next one starts. `channel` gives, for each process, a socket it inherits (see
    `sojourn.gateway.ports_channel`).
    """

    def __init__(
        self,
        settings: EgressSettings,
        authority: Path,
        handle: Handle,
        lost: Callable[[], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.authority = authority
        self.channel: Callable[[], socket.socket] | None = None
        self.lease: Path | None = None
        """The node's lease file, for each process that starts from now on: past its deadline
        nothing is carried."""
        self._handle = handle
        self._lost = lost
        self._wanted: dict[str, Wanted] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: Control | None = None
        self._ready = asyncio.Event()
        self._failed = asyncio.Event()  # it ended, and none has served since
        self._in_order = asyncio.Lock()
        self._chores: set[asyncio.Task[None]] = set()
        self._starts = 0
        self._since: float | None = None
        self._error: str | None = None
        self._closed = False

    def info(self) -> GatewayInfo:
        """The process as the server's status shows it."""
        running = self._ready.is_set()
        return GatewayInfo(
            running=running,
            pid=self._process.pid if running and self._process is not None else None,
            since=self._since if running else None,
            restarts=max(0, self._starts - 1),
            sandboxes=len(self._wanted),
            error=self._error,
        )

    # -- requests ---------------------------------------------------------------------------

    async def need(self) -> None:
        """Start the process, if that was not done, and wait until it serves; not for long where it
        has just failed.

        Raises Unreachable when it does not in time; it is tried again by itself."""
        if self._closed:
            raise Unreachable("the server stops")
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="gateway")
        if self._error is None and not self._ready.is_set():
            await self._first_outcome()
        try:
            async with asyncio.timeout(_AGAIN_SECONDS):
                await self._ready.wait()
        except TimeoutError:
            raise Unreachable(
                f"the gateway process does not start: {self._error or 'no answer'}",
                next_step="The server's log tells more; it is tried again by itself.",
            ) from None

    async def _first_outcome(self) -> None:
        """Until the process serves, or failed to start, or took too long."""
        waiting = [asyncio.create_task(one.wait()) for one in (self._ready, self._failed)]
        try:
            await asyncio.wait(waiting, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def attach(self, sandbox: str, wanted: Wanted) -> None:
        """Have a sandbox served, now and by every later process, as `wanted` says at that time;
        again when that has changed. Raises Unreachable, and what the process refuses."""
        self._wanted[sandbox] = wanted
        await self.need()
        await self._attach(sandbox)

    async def renew(self, sandbox: str) -> None:
        """`attach` again as things are now, where the sandbox is served at all."""
        wanted = self._wanted.get(sandbox)
        if wanted is not None:
            await self.attach(sandbox, wanted)

    async def detach(self, sandbox: str) -> None:
        """Serve a sandbox no more; its connections are reset. Idempotent."""
        if self._wanted.pop(sandbox, None) is None or not self._ready.is_set():
            return
        with contextlib.suppress(SojournError):  # a process that is gone serves nobody
            await self._request(lambda: _given(Detach(sandbox)))

    def forget(self, sandbox: str) -> None:
        """`detach`, without waiting for it."""
        if sandbox in self._wanted:
            task = asyncio.create_task(self.detach(sandbox))
            self._chores.add(task)
            task.add_done_callback(self._chores.discard)

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await asyncio.gather(*self._chores, return_exceptions=True)

    async def _attach(self, sandbox: str) -> None:
        async def now() -> Attach | None:
            wanted = self._wanted.get(sandbox)
            return None if wanted is None else await wanted()

        await self._request(now)

    async def _request(
        self,
        make: Callable[[], Awaitable[Start | Attach | Detach | None]],
        seconds: float | None = None,
    ) -> None:
        """Ask and wait for the answer. What is asked is made in order with its sending, so that
        the last word about a sandbox is the newest. Raises Unreachable, and the answer's error."""
        control = self._control
        async with self._in_order:
            body = await make()
            if body is None:
                return
            if control is None or control is not self._control:
                raise Unreachable("the gateway process ended", next_step="It is started again.")
            asking = asyncio.create_task(control.request(body))
        seconds = _ANSWER_SECONDS if seconds is None else seconds
        done, _ = await asyncio.wait({asking}, timeout=seconds)
        if not done:
            # It may still act by an older policy: what comes after it does not.
            asking.cancel()
            self._error = f"no answer within {seconds:g} s"
            log.error("the gateway process does not answer and is ended")
            self._kill()
            raise Unreachable(
                "the gateway process does not answer",
                next_step="It is started again by itself: try again in a moment.",
            )
        asking.result()

    # -- the process ------------------------------------------------------------------------

    async def _keep(self) -> None:
        early = 0
        try:
            while True:
                await asyncio.sleep(_PAUSES[min(early, len(_PAUSES) - 1)])
                began = time.monotonic()
                try:
                    await self._live()
                    self._error = "it was ended"
                except (OSError, SojournError) as error:
                    self._error = getattr(error, "message", str(error))
                except Exception as error:
                    # A fault of this one must not be the end of every later one.
                    log.exception("a fault while the gateway process was kept")
                    self._error = f"a fault: {type(error).__name__}"
                self._failed.set()
                early = 0 if time.monotonic() - began > _WELL_SECONDS else early + 1
                log.warning("the gateway process ended (%s); it is started again", self._error)
                await self._told_lost()
        finally:
            await self._end()
            await self._told_lost()

    async def _told_lost(self) -> None:
        try:
            await self._lost()
        except SojournError as error:
            log.error("what left sessions cannot be marked as interrupted: %s", error)
        except Exception:
            log.exception("a fault while what left sessions was marked as interrupted")

    async def _live(self) -> None:
        """One process, from its start to its end. Raises what ended it."""
        ours, its = socket.socketpair()
        with contextlib.ExitStack() as passed:
            passed.enter_context(its)
            numbers = []
            if self.channel is not None:
                numbers.append(passed.enter_context(self.channel()).fileno())
            ours.setblocking(False)
            control = self._control = await Control.open(ours, self._asked)
            self._starts += 1
            declared.GATEWAY_STARTS.add()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sojourn.gateway.worker",
                stdin=its.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=numbers,
            )
        serving = asyncio.create_task(control.serve(), name="gateway messages")
        try:
            await self._greet(numbers)
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._end()

    async def _greet(self, numbers: list[int]) -> None:
        settings = self.settings
        start = Start(
            authority=str(self.authority),
            namespace=settings.namespace,
            nameservers=settings.nameservers,
            private=settings.private,
            roots=settings.roots,
            ports=numbers[0] if numbers else -1,
            lease=None if self.lease is None else str(self.lease),
        )
        await self._request(lambda: _given(start), _LOAD_SECONDS)
        for sandbox in list(self._wanted):
            try:
                await self._attach(sandbox)
            except SojournError as error:
                # One that cannot be served must not keep the others from it.
                log.error("sandbox %s is not served: %s", sandbox, error)
        self._since = time.time()
        self._error = None
        self._failed.clear()
        self._ready.set()

    async def _asked(self, body: Request) -> None:
        if not isinstance(body, Began | Ended | Withheld):
            raise SojournError(f"{type(body).__name__} is for the server to send")
        await self._handle(body)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _end(self) -> None:
        self._ready.clear()
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            await end_process(process, "the gateway", _END_SECONDS)


async def _given(body: Start | Detach) -> Start | Detach:
    return body
