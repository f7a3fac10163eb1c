"""The server's end of the process that sends to the object store.

Guarantee: a call is answered, or raises what went wrong there, or Interrupted when the process
ended; it may then be made again, because every call can be repeated. The process is started when
it is needed and ended when it was idle for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sojourn.errors import ErrorBody, Interrupted, from_body
from sojourn.model import Snapshot
from sojourn.repository.repository import Repository
from sojourn.repository.serving import LENGTH, encode_frame
from sojourn.repository.session_records import SessionRecord, TenantRecord
from sojourn.repository.worker import Named, Push, Replace, Start

log = logging.getLogger(__name__)

_IDLE_SECONDS = 20.0
_END_SECONDS = 10.0
_LOOK_SECONDS = 30.0
_STOPS = "Ask again when it runs again."
_HUNG_SECONDS = 600.0
"""A process that has not read, written or computed anything for so long is ended."""


async def exchange(process: asyncio.subprocess.Process, request: Any) -> bytes:
    """Send a worker a request and read its answer. Raises OSError, EOFError when it ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(encode_frame(request))
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(length)


async def end_process(process: asyncio.subprocess.Process, what: str, seconds: float) -> None:
    """Kill a worker and wait for its end for at most so many seconds."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        # It waits in the kernel for a file system that does not answer; no stop waits for that.
        log.error("process %d, %s, does not end", process.pid, what)


class Sender:
    """One worker process at a time, one call at a time."""

    def __init__(self, url: str, store: Path) -> None:
        self._url = url
        self._store = str(store)
        self._start: Start | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self._begun: float | None = None

    def expect(self, repository: Repository) -> None:
        """Where to send: nothing goes to another repository at the same place."""
        keyring = repository.keyring
        self._start = Start(
            self._url, self._store, repository.config.id, keyring.root_key, keyring.encrypted
        )

    async def push(self, tenant: str, snapshot: Snapshot, parent: Snapshot | None) -> int:
        """As `Repository.push`, from the node's store."""
        return int(await self._call("push", Push(tenant, snapshot, parent)))

    async def put_tenant(self, record: TenantRecord) -> None:
        """As `Repository.put_tenant`."""
        await self._call("put_tenant", record)

    async def put_session(self, record: SessionRecord) -> None:
        """As `Repository.put_session`."""
        await self._call("put_session", record)

    async def replace_session(self, record: SessionRecord, version: str | None) -> None:
        """As `Repository.replace_session`."""
        await self._call("replace_session", Replace(record, version))

    async def remove(self, kind: str, tenant: str, id: str) -> None:
        """As `Repository.delete_session` or `Repository.delete_snapshot`."""
        await self._call(f"delete_{kind}", Named(tenant, id))

    async def collect(self, grace: float) -> int:
        """As `collection.collect`, in all domains; the bytes freed."""
        return int(await self._call("collect", grace))

    @property
    def busy(self) -> float:
        """Seconds the present call has taken so far; 0 without one."""
        return 0.0 if self._begun is None else time.monotonic() - self._begun

    async def close(self) -> None:
        """End the process, whatever it is doing. Idempotent."""
        self._closed = True
        self._stay()
        await self._end()

    # -- the process ------------------------------------------------------------------------

    async def _call(self, name: str, arguments: Any) -> Any:
        async with self._turn:
            if self._closed:
                raise Interrupted("the server stops", next_step=_STOPS)
            self._stay()
            self._begun = time.monotonic()
            try:
                process = await self._running()
                answer = await self._ask(process, (name, arguments))
            except (OSError, EOFError, ConnectionError) as error:
                await self._end()
                raise Interrupted(
                    f"the process that sends to the object store ended: {error}"
                ) from error
            except asyncio.CancelledError:
                await self._end()  # its answer would be taken for that of the next call
                raise
            finally:
                self._begun = None
            self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._rest)
        result, failure = answer
        if failure is not None:
            raise from_body(failure)
        return result

    async def _ask(
        self, process: asyncio.subprocess.Process, request: Any
    ) -> tuple[Any, ErrorBody | None]:
        exchanged = asyncio.ensure_future(exchange(process, request))
        try:
            await _while_it_works(process.pid, exchanged)
            frame = await exchanged
        finally:
            exchanged.cancel()
        return msgspec.msgpack.decode(frame, type=tuple[Any, ErrorBody | None])

    async def _running(self) -> asyncio.subprocess.Process:
        process = self._process
        if process is None or process.returncode is not None:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sojourn.repository.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._process = process
            if self._closed:  # while it was started
                await self._end()
                raise Interrupted("the server stops", next_step=_STOPS)
            assert process.stdin is not None and self._start is not None
            process.stdin.write(encode_frame(self._start))
        return process

    def _stay(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _rest(self) -> None:
        """End an idle process, which takes memory for nothing."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await end_process(process, "which sends to the object store", _END_SECONDS)


async def _while_it_works(pid: int, exchanged: asyncio.Future[bytes]) -> None:
    """Wait for an answer. Raises TimeoutError, an OSError, when the process does nothing at all
    any more: it waits for a file system or a store that will never answer, and whoever waits for it
    would do so for ever."""
    last, since = None, time.monotonic()
    while not (await asyncio.wait([exchanged], timeout=_LOOK_SECONDS))[0]:
        effort = await asyncio.to_thread(_effort, pid)
        if effort != last:
            last, since = effort, time.monotonic()
        elif time.monotonic() - since > _HUNG_SECONDS:
            raise TimeoutError(f"it has done nothing for {_HUNG_SECONDS:.0f} s")


def _effort(pid: int) -> str:
    """What a process and those it waited for have read, written and computed so far."""
    try:
        counters = Path(f"/proc/{pid}/io").read_text()
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return ""  # it has ended, and the exchange tells so
    return f"{counters} {times}"
