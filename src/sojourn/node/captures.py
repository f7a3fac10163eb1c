"""Taking the state of a sandbox: live, while it goes on, or final, when it is put away.

Guarantee: a refused or failed capture leaves the sandbox running and nothing in the store; memory
and files are of one instant, because both are taken between freeze and thaw.

Order (live): look for obstacles, detach, freeze, look again, checkpoint, copy what changed, thaw,
attach; hashing, syncing and publishing come after the thaw. Order (final): the same up to the
checkpoint, then the upper is hashed in place and synced while still frozen; only when the caller
has recorded the result is the sandbox ended and the directory moved into the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from sojourn import faultpoints
from sojourn.errors import (
    CaptureFailed,
    CaptureRefused,
    InvalidRequest,
    NotFound,
    SandboxLost,
    SojournError,
    StorageFull,
    UnlinkedOpenFile,
    Unsupported,
)
from sojourn.model import LayerRef, MemoryRef
from sojourn.node import connections, host
from sojourn.node.isolation.base import Capability
from sojourn.node.records import stacked
from sojourn.node.sandboxes import Sandbox
from sojourn.store.base import PendingLayer
from sojourn.store.copying import written_early
from sojourn.telemetry import declared, tracing
from sojourn.wire.guest import GuestActivity, OpenUnlinked

_A = TypeVar("_A")
_B = TypeVar("_B")

# Room that must be left beside a memory image: a checkpoint that meets a full disk is lost work,
# and on some runtimes the sandbox with it.
_RESERVE_BYTES = 64 * 1024 * 1024
_CONNECTING_SECONDS = 2.0
_CONNECTING_PAUSE = 0.02
_LOOK_SECONDS = 5.0
_MOST_TABLE = 4 * 1024 * 1024
# The network stack of a frozen sandbox goes on: what it needs to finish handshakes under way.
_SETTLE_SECONDS = 0.005


class Captured(msgspec.Struct, frozen=True):
    """A published capture: what a snapshot's manifest needs of layers and memory."""

    layers: list[LayerRef]
    memory: MemoryRef | None


class Sealed(msgspec.Struct, frozen=True):
    """A final capture whose upper still lies in the sandbox's directory.

    `layer` is None when the session changed no file. `layers` includes it.
    """

    layers: list[LayerRef]
    layer: LayerRef | None
    memory: MemoryRef | None


def _refusal(found: list[OpenUnlinked]) -> UnlinkedOpenFile:
    first = found[0]
    path = os.fsdecode(first.path)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return UnlinkedOpenFile(
        f"process {first.pid} ({os.fsdecode(first.command)}) holds {path!r} open, whose name is"
        f" gone{more}",
        pid=first.pid,
        path=path,
        files=[
            {"pid": item.pid, "fd": item.fd, "path": os.fsdecode(item.path)} for item in found[:50]
        ],
    )


@contextlib.contextmanager
def _counted(kind: str, sandbox: Sandbox) -> Iterator[None]:
    with tracing.span(f"capture {kind}", sojourn__session=sandbox.record.session):
        try:
            yield
        except BaseException as error:
            code = error.code if isinstance(error, SojournError) else "interrupted"
            declared.CAPTURES.add(kind, code)
            raise
    declared.CAPTURES.add(kind, "ok")


def _count_bytes(layer: LayerRef | None, image: MemoryRef | None) -> None:
    if layer is not None:
        declared.CAPTURE_BYTES.add("files", amount=layer.bytes)
    if image is not None:
        declared.CAPTURE_BYTES.add("memory", amount=image.bytes)


async def _freeze(sandbox: Sandbox, memory: bool) -> float:
    """Freeze for a capture; with `memory`, refuse what a checkpoint would not survive. Answers
    since when it stands still (`time.perf_counter`)."""
    if memory and not sandbox.has(Capability.MEMORY):
        raise Unsupported(
            f"driver {sandbox.driver.name} keeps files only",
            next_step="Take a files-only snapshot (memory=false).",
        )
    was_frozen = sandbox.frozen
    settle = False
    if was_frozen and memory and not sandbox.at_rest:
        # Nothing can be seen in a frozen sandbox, and nothing in it comes to rest.
        await sandbox.thaw()
        try:
            settle = await _wait_for_connections(sandbox)
        except BaseException:
            await asyncio.shield(sandbox.freeze())
            raise
        await sandbox.freeze()
        sandbox.at_rest = True
    if not was_frozen:
        if memory:
            # Early, and from inside, where process ids can be told.
            found = await sandbox.guest.unlinked()
            if found:
                raise _refusal(found)
            settle = await _wait_for_connections(sandbox)
        else:
            await sandbox.guest.sync()
    still = time.perf_counter()
    if sandbox.has(Capability.FREEZE):
        await sandbox.freeze()
    if memory:
        # Whoever lost its name between the look from inside and the freeze is found from outside.
        try:
            if settle:
                await asyncio.sleep(_SETTLE_SECONDS)
            gone = await asyncio.to_thread(sandbox.driver.unlinked_files, sandbox.spec)
        except BaseException:
            with contextlib.suppress(SandboxLost):
                await _thaw_or_lost(sandbox, was_frozen)
            raise
        if gone:
            await _release(sandbox, was_frozen)
            found = [] if was_frozen else await sandbox.guest.unlinked(maps=True)
            found = [item for item in found if os.fsdecode(item.path) in gone] or found
            raise (
                _refusal(found)
                if found
                else UnlinkedOpenFile(
                    f"a process holds {gone[0]!r} open, whose name is gone", path=gone[0], pid=None
                )
            )
    return still


async def _look(sandbox: Sandbox) -> connections.Obstacles:
    """What of the network inside stands in the way of an image. Raises CaptureRefused where that
    cannot be seen: root inside may have put anything in the place of the tables."""
    sockets: list[connections.Socket] = []
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            for table in (b"/proc/net/tcp", b"/proc/net/tcp6"):
                text = b""
                async for piece in sandbox.guest.read(table):
                    text += piece
                    if len(text) > _MOST_TABLE:
                        raise CaptureRefused(f"{os.fsdecode(table)} inside has no end")
                sockets += connections.read_table(text)
    except TimeoutError:
        raise CaptureRefused("/proc/net/tcp inside cannot be read") from None
    except (NotFound, InvalidRequest) as error:
        raise CaptureRefused(f"/proc/net/tcp inside cannot be read: {error.message}") from error
    return connections.obstacles(sockets)


async def _wait_for_connections(sandbox: Sandbox) -> bool:
    """Wait until no connection inside is being made or waits to be taken: the runtime saves one
    that is half made, and never ends restoring it. Tells whether there are connections at all.

    Raises CaptureRefused when they do not come to rest and one may be half made.
    """
    deadline = asyncio.get_running_loop().time() + _CONNECTING_SECONDS
    while not (found := await _look(sandbox)).none:
        if asyncio.get_running_loop().time() > deadline:
            if found.connecting is not None:
                what = f"a program has been connecting from port {found.connecting} inside"
            elif found.full is not None:
                what = f"{found.waiting[found.full]} connections to port {found.full} inside"
                what += " have been waiting for its program to take them"
            else:
                break  # one in a queue is made: the smallest has room for it
            raise CaptureRefused(
                f"{what} for {_CONNECTING_SECONDS:g} s, and memory with a connection that is only"
                " half made cannot be restored",
                next_step="Try again once it is made or given up, or take a files-only snapshot"
                " (memory=false).",
            )
        await asyncio.sleep(_CONNECTING_PAUSE)
    return found.others


async def pause(sandbox: Sandbox) -> None:
    """Freeze until somebody thaws it. Notes whether its memory can be kept as it is then."""
    with sandbox.no_dials():
        at_rest = False
        if sandbox.has(Capability.MEMORY):
            with contextlib.suppress(CaptureRefused):
                at_rest = (await _look(sandbox)).none
        await sandbox.freeze()
        sandbox.at_rest = at_rest


async def _release(sandbox: Sandbox, stay_frozen: bool) -> None:
    """Bring a sandbox back to what it was before a capture. Raises SandboxLost."""
    if not stay_frozen:
        await sandbox.thaw()


async def _checkpoint(sandbox: Sandbox) -> Path:
    """The staged image of a frozen sandbox."""
    status = await asyncio.to_thread(sandbox.driver.status, sandbox.spec)
    needed = sum(_resident_bytes(pid) for pid in status.pids) + _RESERVE_BYTES
    staged = sandbox.store.stage_image()
    free = shutil.disk_usage(staged).free
    try:
        if free < needed:
            raise StorageFull(
                f"a memory image may need {needed} bytes, the data directory has {free}",
                needed=needed,
                free=free,
            )
        await asyncio.to_thread(_write_image, sandbox, staged)
    except BaseException:
        sandbox.store.discard_image(staged)
        raise
    return staged


def _write_image(sandbox: Sandbox, staged: Path) -> None:
    with written_early(staged):
        sandbox.driver.checkpoint(sandbox.spec, staged)


def _resident_bytes(pid: int) -> int:
    """Resident shared memory of a host process: the sandbox's memory is a memfd it maps."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssShmem:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended; the checkpoint itself will say so
    return 0


def _suspects(sandbox: Sandbox) -> set[bytes]:
    return {os.fsencode(path) for path in sandbox.driver.writable_files(sandbox.spec)}


class LiveCapture:
    """What was taken of a sandbox that went on since: copied and staged, not yet safe.

    Exactly one of `publish` and `discard` is called.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        pending: PendingLayer,
        staged: Path | None,
        activity: GuestActivity | None,
    ) -> None:
        self._sandbox = sandbox
        self._pending = pending
        self._staged = staged
        self._activity = activity

    async def publish(self) -> Captured:
        """Hash, sync and publish. Raises StorageFull, CaptureFailed; nothing is kept then, and the
        next look for changes finds some."""
        sandbox = self._sandbox
        try:
            layer, image = await _both(
                asyncio.to_thread(self._pending.publish), _publish_image(sandbox, self._staged)
            )
        except BaseException as error:
            sandbox.baseline = None
            self.discard()
            raise _as_capture_error(error) from error
        faultpoints.reach("capture.store")
        sandbox.since = (self._pending.scan, layer)
        _count_bytes(layer, image)
        return Captured(layers=_chain(sandbox, layer), memory=image)

    def note(self) -> None:
        """Take the captured state as the one that later changes are seen against."""
        self._sandbox.baseline_scan = self._pending.scan
        if self._activity is not None:
            self._sandbox.baseline = self._activity

    def discard(self) -> None:
        """Drop what was staged. Idempotent."""
        if self._staged is not None:
            self._sandbox.store.discard_image(self._staged)
        self._pending.discard()


async def begin_live(sandbox: Sandbox, *, memory: bool) -> LiveCapture:
    """Take the state of a sandbox at one instant; it goes on (or stays paused).

    Raises CaptureRefused, StorageFull, CaptureFailed; the sandbox runs on. Raises SandboxLost when
    it did not survive.
    """
    if memory and not sandbox.has(Capability.LIVE_CHECKPOINT):
        raise Unsupported(f"driver {sandbox.driver.name} cannot checkpoint a running sandbox")
    with sandbox.no_dials(), _counted("live", sandbox):
        return await _take_live(sandbox, memory)


async def _take_live(sandbox: Sandbox, memory: bool) -> LiveCapture:
    stay_frozen = sandbox.frozen
    # Measured before the freeze: what happens in between makes the next turn count as changed,
    # which costs a snapshot but loses nothing.
    activity = None if stay_frozen else await sandbox.guest.activity()
    still = await _freeze(sandbox, memory)
    faultpoints.reach("capture.freeze")
    staged: Path | None = None
    pending: PendingLayer | None = None
    try:
        try:
            if memory:
                staged = await _checkpoint(sandbox)
                faultpoints.reach("capture.checkpoint")
            pending = await asyncio.to_thread(
                lambda: sandbox.store.capture_layer(
                    sandbox.upper, since=sandbox.since, suspects=_suspects(sandbox)
                )
            )
            faultpoints.reach("capture.copy")
        finally:
            await _thaw_or_lost(sandbox, stay_frozen)
            if not stay_frozen:
                declared.CAPTURE_STALL_SECONDS.observe(time.perf_counter() - still, "live")
        faultpoints.reach("capture.thaw")
    except BaseException as error:
        if staged is not None:
            sandbox.store.discard_image(staged)
        if pending is not None:
            pending.discard()
        raise _as_capture_error(error) from error
    capture = LiveCapture(sandbox, pending, staged, activity)
    capture.note()
    return capture


async def capture_live(sandbox: Sandbox, *, memory: bool) -> Captured:
    """`begin_live` and publish at once."""
    return await (await begin_live(sandbox, memory=memory)).publish()


async def _thaw_or_lost(sandbox: Sandbox, stay_frozen: bool) -> None:
    # A cancelled request must not leave a frozen sandbox behind.
    await asyncio.shield(_release(sandbox, stay_frozen))


async def _both(first: Awaitable[_A], second: Awaitable[_B]) -> tuple[_A, _B]:
    """Both results; when one fails, only after the other ended too: nothing may still be written
    when the caller clears up."""
    one, two = await asyncio.gather(first, second, return_exceptions=True)
    if isinstance(one, BaseException):
        raise one
    if isinstance(two, BaseException):
        raise two
    return one, two


async def _publish_image(sandbox: Sandbox, staged: Path | None) -> MemoryRef | None:
    if staged is None:
        return None
    return await asyncio.to_thread(
        sandbox.store.publish_image,
        staged,
        sandbox.driver.name,
        sandbox.driver.runtime,
        host.cpu_features(),
    )


def _chain(sandbox: Sandbox, layer: LayerRef | None) -> list[LayerRef]:
    if layer is None or layer.entries == 0:
        return list(sandbox.record.layers)
    return stacked(sandbox.record.layers, layer)


async def capture_final(sandbox: Sandbox, *, memory: bool) -> Sealed:
    """Take everything of a sandbox that will be ended; it stays frozen and alive.

    Raises like `capture_live`, the sandbox runs on then.
    """
    with sandbox.no_dials(), _counted("final", sandbox):
        return await _take_final(sandbox, memory)


async def _take_final(sandbox: Sandbox, memory: bool) -> Sealed:
    stay_frozen = sandbox.frozen
    still = await _freeze(sandbox, memory)
    faultpoints.reach("seal.freeze")
    staged: Path | None = None
    try:
        if memory:
            staged = await _checkpoint(sandbox)
            faultpoints.reach("seal.checkpoint")
        sealed, image = await _both(
            asyncio.to_thread(
                lambda: sandbox.store.seal_layer(
                    sandbox.upper, since=sandbox.since, suspects=_suspects(sandbox)
                )
            ),
            _publish_image(sandbox, staged),
        )
    except BaseException as error:
        if staged is not None:
            sandbox.store.discard_image(staged)
        with contextlib.suppress(SandboxLost):
            await _thaw_or_lost(sandbox, stay_frozen)
        raise _as_capture_error(error) from error
    _count_bytes(sealed.ref, image)
    if not stay_frozen:
        declared.CAPTURE_STALL_SECONDS.observe(time.perf_counter() - still, "final")
    return Sealed(
        layers=_chain(sandbox, sealed.ref),
        layer=None if sealed.ref.entries == 0 else sealed.ref,
        memory=image,
    )


def _as_capture_error(error: BaseException) -> BaseException:
    if isinstance(error, (SojournError, asyncio.CancelledError)):
        return error
    if isinstance(error, Exception):
        return CaptureFailed(f"the capture failed: {error}; the session runs on")
    return error
