"""The node agent: everything that happens on one machine, behind one interface.

Guarantee: a call for an older epoch than the sandbox's own is refused, so a late caller cannot
touch a newer placement; whatever a crash left on the machine is either adopted or removed.
The server calls the agent in its own process today; a remote node offers the same methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from sojourn import faultpoints
from sojourn.errors import IntegrityError, SandboxLost, SojournError, StaleEpoch, Unsupported
from sojourn.model import LayerRef, Limits, SessionState
from sojourn.model.nodes import Resources, summed
from sojourn.node import mounts
from sojourn.node.isolation.base import Driver, SandboxStatus
from sojourn.node.records import (
    SandboxRecord,
    read_record,
    read_salvaged,
    write_salvaged,
)
from sojourn.node.sandboxes import Sandbox
from sojourn.store.base import Store
from sojourn.store.trees import remove_tree

log = logging.getLogger(__name__)

# A template's thousands of files are not read again at each start; a session's own layers are.
_TRUST_SECONDS = 600.0
_TRASH = ".gone"


class NodeAgent:
    """The sandboxes of one machine. `ended` is called with the id of each that is ended."""

    def __init__(
        self,
        directory: Path,
        store: Store,
        drivers: Mapping[str, Driver],
        supervisor: Path,
        *,
        default_driver: str,
    ) -> None:
        self.directory = directory
        self.store = store
        self.drivers = drivers
        self.default_driver = default_driver
        self._supervisor = supervisor
        self._sandboxes: dict[str, Sandbox] = {}
        self._checked: dict[str, float] = {}
        self._templates: set[str] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._unremoved: set[str] = set()
        self.ended: Callable[[str], None] = lambda sandbox: None
        self.standing: Callable[[], bool] = lambda: False
        """Whether all sandboxes are frozen at once, so that none can answer."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def trust_template(self, layer: LayerRef) -> None:
        """Spare a template's layer, which was checked just now, in later starts for a while."""
        self._templates.add(layer.id)
        self._checked[layer.id] = time.monotonic()

    def know_template(self, layer: LayerRef) -> None:
        """Spare a template's layer in later starts for a while, once one has checked it."""
        self._templates.add(layer.id)
        self._checked.setdefault(layer.id, -math.inf)

    def _trusted(self, layer: LayerRef) -> bool:
        if layer.id not in self._templates:
            return False
        fresh = time.monotonic() - self._checked[layer.id] < _TRUST_SECONDS
        if not fresh:
            # The caller checks it now, which is as good as having checked it here.
            self._checked[layer.id] = time.monotonic()
        return fresh

    def driver(self, name: str) -> Driver:
        """A driver by name. Raises Unsupported."""
        try:
            return self.drivers[name]
        except KeyError:
            raise Unsupported(
                f"this node has no driver {name!r} (it has {', '.join(sorted(self.drivers))})"
            ) from None

    def _make(self, record: SandboxRecord) -> Sandbox:
        return Sandbox(
            record,
            self.directory / record.sandbox,
            self.driver(record.driver),
            self.store,
            self._supervisor,
            lambda: self.standing(),
        )

    # -- placements -------------------------------------------------------------------------

    async def start(
        self,
        record: SandboxRecord,
        *,
        authority: bytes | None = None,
        gateway: Callable[[Path], Awaitable[None]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a sandbox for a placement; `authority` and `gateway` as `Sandbox.start` has them,
        `environment` is what its commands get besides the session's own.
        Raises ResumeFailed, IntegrityError, StorageFull; nothing is left behind then."""
        sandbox = self._make(record)
        sandbox.provide(environment or {})
        self._sandboxes[record.sandbox] = sandbox
        try:
            await sandbox.start(
                self._trusted, secrets.token_hex(16), authority=authority, gateway=gateway
            )
        except BaseException:
            # Where clearing up fails too it is tried again; what to tell is why the start failed.
            await asyncio.shield(self.remove(record.sandbox))
            raise

    def find(self, sandbox: str, epoch: int) -> Sandbox:
        """The sandbox of a placement. Raises SandboxLost when the node does not have it,
        StaleEpoch when the caller's placement is older."""
        found = self._sandboxes.get(sandbox)
        if found is None:
            raise SandboxLost(f"sandbox {sandbox} is not on this node")
        if found.record.epoch > epoch:
            raise StaleEpoch(
                f"epoch {epoch} is over; sandbox {sandbox} belongs to {found.record.epoch}"
            )
        return found

    def has(self, sandbox: str) -> bool:
        """Whether the node runs it."""
        return sandbox in self._sandboxes

    def in_use(self) -> set[str]:
        """Layers and images that sandboxes on this node are built on."""
        used: set[str] = set()
        for sandbox in self._sandboxes.values():
            used.update(layer.id for layer in sandbox.record.layers)
            if sandbox.record.memory is not None:
                used.add(sandbox.record.memory.id)
            if sandbox.since is not None:
                used.add(sandbox.since[1].id)
        return used

    def committed(self) -> Resources:
        """What the limits of all sandboxes here add up to."""
        return summed(sandbox.record.limits for sandbox in self._sandboxes.values())

    @property
    def count(self) -> int:
        """How many sandboxes the node runs."""
        return len(self._sandboxes)

    async def stop(self, sandbox: str) -> None:
        """End a sandbox's processes and unmount it, keeping its upper directory. Idempotent.

        Also one that this server process never took over: a sealed sandbox that an earlier one
        left is frozen, not gone, and its upper must not move while it is mounted.
        """
        found = self._sandboxes.get(sandbox)
        if found is None:
            record = await asyncio.to_thread(_record_or_none, self.directory / sandbox)
            if record is None or record.driver not in self.drivers:
                await asyncio.to_thread(mounts.cleanup_mounts, self.directory / sandbox)
                return
            found = self._make(record)
        await found.kill()
        self.ended(sandbox)
        faultpoints.reach("stop.kill")
        await asyncio.to_thread(found.unmount)

    async def take(self, sandbox: str, layer: LayerRef | None) -> None:
        """Move the upper of a stopped sandbox into the store as the layer it was hashed to.

        May be repeated after a crash. Raises IntegrityError when it is no longer what was hashed.
        """
        if layer is not None:
            upper = self.directory / sandbox / "upper"
            await asyncio.to_thread(self.store.take_layer, layer, upper)

    async def salvage(self, sandbox: str) -> LayerRef | None:
        """Seal what a sandbox that died had written. None when it had changed no file.

        May be repeated after a crash: what the upper was hashed to is noted before it moves.
        """
        directory = self.directory / sandbox
        upper = directory / "upper"
        ref = await asyncio.to_thread(read_salvaged, directory)
        if ref is None:
            if not upper.is_dir():
                return None
            await asyncio.to_thread(mounts.cleanup_mounts, directory)
            sealed = await asyncio.to_thread(
                lambda: self.store.seal_layer(upper, since=None, suspects=set())
            )
            ref = sealed.ref
            if ref.entries == 0:
                return None
            await asyncio.to_thread(write_salvaged, directory, ref)
        layer = await asyncio.to_thread(self.store.take_layer, ref, upper)
        faultpoints.reach("salvage.take")
        return layer

    async def destroy(self, sandbox: str) -> None:
        """End and remove a sandbox, whatever is left of it. Idempotent."""
        found = self._sandboxes.pop(sandbox, None)
        self.ended(sandbox)
        if found is None:
            directory = self.directory / sandbox
            await asyncio.to_thread(_remove, directory.with_name(sandbox + _TRASH))
            record = await asyncio.to_thread(_record_or_none, directory)
            if record is None or record.driver not in self.drivers:
                await asyncio.to_thread(_remove, directory)
                return
            found = self._make(record)
        await found.destroy()

    async def abort(self, session: str) -> None:
        """End the processes of every sandbox of a session, also of one that is just being started:
        whoever waits for it is told at once instead of after a timeout."""
        for sandbox in [s for s in self._sandboxes.values() if s.record.session == session]:
            try:
                await sandbox.kill()
            except (SojournError, OSError) as error:
                # Whoever owns it removes it, and that is tried again until it works.
                log.warning("sandbox %s does not end yet: %s", sandbox.record.sandbox, error)

    def destroy_soon(self, sandbox: str) -> None:
        """Destroy in the background: off the path of whoever waits for the session."""
        task = asyncio.create_task(self.remove(sandbox))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def remove(self, sandbox: str) -> None:
        """Destroy, or note that it has to be tried again: what cannot be cleared up must not fail
        the verb that is done with it."""
        try:
            await self.destroy(sandbox)
        except (SojournError, OSError) as error:
            log.warning("sandbox %s is not removed yet: %s", sandbox, error)
            self._unremoved.add(sandbox)
        else:
            self._unremoved.discard(sandbox)

    async def retry_removals(self) -> None:
        """Try again what `remove` or `reap` could not do."""
        for sandbox in sorted(self._unremoved):
            await self.remove(sandbox)

    async def reap(self, keep: set[str]) -> list[str]:
        """Remove everything on the machine that belongs to this node and to no sandbox in `keep`:
        processes, mounts, cgroups, directories. Returns the ids."""
        reaped = []
        for driver in self.drivers.values():
            try:
                reaped += await asyncio.to_thread(driver.sweep, keep)
            except (SojournError, OSError) as error:
                # Leftovers that resist must not keep the sessions from their server.
                log.error("driver %s could not be swept: %s", driver.name, error)
        for directory in sorted(self.directory.iterdir()):
            if directory.name not in keep and directory.name not in self._sandboxes:
                await self.remove(directory.name.removesuffix(_TRASH))
                reaped.append(directory.name)
        return sorted(set(reaped))

    def record(self, sandbox: str) -> SandboxRecord | None:
        """The record of a sandbox, running or only on disk."""
        found = self._sandboxes.get(sandbox)
        return found.record if found else _record_or_none(self.directory / sandbox)

    def look(self, record: SandboxRecord) -> SandboxStatus:
        """What the host shows of a sandbox, also of one not adopted yet. Blocks."""
        found = self._sandboxes.get(record.sandbox) or self._make(record)
        return found.status()

    async def adopt(self, record: SandboxRecord, state: SessionState) -> Sandbox:
        """Take over a living sandbox that an earlier server process left. Raises SandboxLost."""
        sandbox = self._make(record)
        await sandbox.adopt(state)
        self._sandboxes[record.sandbox] = sandbox
        return sandbox

    def update_limits(self, sandbox: Sandbox, limits: Limits) -> None:
        """Apply other limits to a running sandbox. Blocks."""
        sandbox.driver.update_limits(sandbox.spec, limits)

    async def close(self) -> None:
        """Let go of every sandbox without ending it; finish what runs in the background."""
        if self._chores:
            await asyncio.gather(*self._chores)
        await self.retry_removals()
        for sandbox in list(self._sandboxes.values()):
            with contextlib.suppress(SandboxLost):
                await sandbox.guest.close()
        self._sandboxes.clear()
        for driver in self.drivers.values():
            await asyncio.to_thread(driver.close)


def _record_or_none(directory: Path) -> SandboxRecord | None:
    try:
        return read_record(directory)
    except IntegrityError as error:
        log.error("%s", error)
        return None


def _remove(directory: Path) -> None:
    mounts.cleanup_mounts(directory)
    if directory.is_dir() and not directory.is_symlink():
        remove_tree(directory)
    else:
        directory.unlink(missing_ok=True)
