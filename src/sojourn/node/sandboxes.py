"""One sandbox on this node: its mounts, its driver, its link to the supervisor.

Guarantee: `start` either ends with a sandbox that answers and whose every used byte was checked,
or raises; `destroy` removes everything, whatever was left half-done.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from sojourn import faultpoints
from sojourn.errors import Interrupted, ResumeFailed, SandboxLost, SojournError, StorageFull
from sojourn.model import LayerRef, SessionState
from sojourn.node import authorities, host, mounts
from sojourn.node.guest import Guest
from sojourn.node.interpreter import Interpreter
from sojourn.node.isolation.base import Capability, Driver, SandboxSpec, SandboxStatus
from sojourn.node.link import GuestLink
from sojourn.node.records import SandboxRecord, write_record
from sojourn.store.base import Scan, Store
from sojourn.store.trees import remove_tree
from sojourn.wire import tunnels
from sojourn.wire.frames import Feature
from sojourn.wire.guest import GuestActivity, Reach

log = logging.getLogger(__name__)

ATTACH_SECONDS = 30.0
DETACH_SECONDS = 10.0
_LOOK_SECONDS = 0.25

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "xterm",
}


class Sandbox:
    """A sandbox this node runs.

    `since` is the last capture of the upper directory: the next one copies only what changed
    after it. `baseline` and `baseline_scan` are what `changed` compares with. `at_rest` says of a
    frozen one that no connection was being made inside. `excused` tells whether it stands still
    with all others, so that its silence is no sign of a loss.
    """

    def __init__(
        self,
        record: SandboxRecord,
        directory: Path,
        driver: Driver,
        store: Store,
        supervisor: Path,
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.record = record
        self.directory = directory
        self.driver = driver
        self.store = store
        self.spec = SandboxSpec(
            sandbox=record.sandbox,
            directory=directory,
            root=directory / "root",
            control=directory / "control",
            supervisor=supervisor,
            argv=[
                *("--max-processes", str(record.limits.pids)),
                *("--user", record.config.user, "--cwd", record.config.cwd),
                *("--max-file", str(record.limits.disk_bytes)),
                *(() if "HOME" in record.config.env else ("--derive-home",)),
            ],
            env=BASE_ENV | record.config.env,
            hostname=record.config.hostname,
            limits=record.limits,
        )
        self.guest: Guest = GuestLink(directory / "control", excused=excused)
        self.interpreter = Interpreter(self.guest)
        self.since: tuple[Scan, LayerRef] | None = None
        self.baseline: GuestActivity | None = None
        self.baseline_scan: Scan | None = None
        self.frozen = False
        self.at_rest = False
        self._quiet = 0
        self.ended: str | None = None  # why, once it was seen while its supervisor was waited for
        self.reach = Reach.OFF
        self.environment: dict[str, str] = {}

    def provide(self, environment: Mapping[str, str]) -> None:
        """Variables that commands started from now on get; those of the session win."""
        own = self.record.config.env
        self.environment = {name: text for name, text in environment.items() if name not in own}
        self.interpreter.environment = self.environment

    @property
    def network_socket(self) -> Path:
        """Where the gateway listens for the tunnels of this sandbox."""
        return self.spec.control / tunnels.SOCKET

    @property
    def upper(self) -> Path:
        """The overlay's upper directory: what changed since the layers below."""
        return self.directory / "upper"

    def has(self, capability: Capability) -> bool:
        """Whether the driver can do this."""
        return capability in self.driver.capabilities

    # -- start ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Write the record and mount the root. Blocks."""
        self.directory.mkdir(parents=True, mode=0o700)
        write_record(self.directory, self.record)
        faultpoints.reach("start.record")
        for name in ("work", "root", "control", "driver"):
            (self.directory / name).mkdir(mode=0o755)
        self.store.prepare_upper(self.upper, self.record.layers)
        self.mount()
        faultpoints.reach("start.mount")

    def mount(self) -> None:
        """Mount the layers with the upper over them. Blocks."""
        lowers = [self.store.layer_path(layer.id) for layer in reversed(self.record.layers)]
        # What is synced inside is synced with the next snapshot: until then a power cut takes the
        # session back to the one before anyway. Without `volatile` each unmount would wait for
        # the whole host file system to be written.
        mounts.mount_overlay(
            lowers, self.upper, self.directory / "work", self.spec.root, volatile=True
        )

    async def _attach(self) -> None:
        """Wait for the supervisor, but not for that of a sandbox that has ended meanwhile."""
        with self._noticing_its_end():
            await self.guest.attach(ATTACH_SECONDS)

    @contextlib.contextmanager
    def _noticing_its_end(self) -> Iterator[None]:
        """End what waits for the supervisor once nothing of the sandbox is left, or what is left
        cannot serve any more."""
        looking = asyncio.create_task(self._look_for_its_end())
        try:
            yield
        finally:
            looking.cancel()

    async def _look_for_its_end(self) -> None:
        # One that lives and does not answer may be frozen, or the machine busy.
        status = SandboxStatus(True, False, [])
        while status.alive or (status.pids and not status.lost):
            await asyncio.sleep(_LOOK_SECONDS)
            status = await asyncio.to_thread(self.driver.status, self.spec)
        self.ended = status.cause or "nothing of it is left"
        self.guest.give_up(f"the sandbox has ended: {self.ended}")

    def _launch(self) -> None:
        if self.record.memory is not None:
            self.driver.restore(self.spec, self.store.image_path(self.record.memory.id))
        else:
            self.driver.start(self.spec)
        faultpoints.reach("start.launch")

    async def start(
        self,
        trusted: Callable[[LayerRef], bool],
        generation: str,
        *,
        authority: bytes | None = None,
        gateway: Callable[[Path], Awaitable[None]] | None = None,
    ) -> None:
        """Boot or restore, verify what is used meanwhile, and wait until the supervisor answers.

        `trusted` says which layers were checked so recently that it is not done again.
        `authority` are certificates (PEM) that programs inside are to trust besides those of the
        template. `gateway` is called with the path of `net.sock` once its directory is there, and
        has somebody listen there before any connection leaves.
        Raises ResumeFailed, IntegrityError, StorageFull; what was begun is the caller's to destroy.
        """
        try:
            if self.record.memory is not None:
                host.check_image_fits(self.record.memory, self.driver.runtime, host.cpu_features())
            await asyncio.to_thread(self.prepare)
            # Reading back what is used costs as much as starting; both go on at once, and the
            # sandbox is handed out only when both are well.
            with contextlib.ExitStack() as stack:

                async def launch() -> None:
                    await asyncio.to_thread(self._launch)
                    stack.enter_context(self._noticing_its_end())

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(launch())
                    tasks.create_task(self.guest.attach(ATTACH_SECONDS))
                    tasks.create_task(asyncio.to_thread(self._verify, trusted))
                if gateway is not None:
                    await gateway(self.network_socket)
                await self._furnish(generation, authority)
        except Exception as error:
            first = _first(error)
            if isinstance(first, SandboxLost):
                if self.ended is None:
                    words = f"started but its supervisor does not answer: {first.message}"
                else:
                    words = f"ended as soon as it had started: {self.ended}"
                raise ResumeFailed(f"the sandbox {words}", **first.details) from error
            if isinstance(first, OSError) and first.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room to start a sandbox: {first}") from error
            if isinstance(first, OSError):
                raise ResumeFailed(f"the sandbox cannot be started: {first}") from error
            if first is error:
                raise
            raise first from error

    async def _furnish(self, generation: str, authority: bytes | None) -> None:
        """What a sandbox gets once its supervisor answers."""
        await self.guest.refresh(generation=generation, hostname=self.record.config.hostname)
        if authority is not None:
            await authorities.write(self.guest, authority)
        await self.set_network(self.record.network)
        await self.mark()

    def _verify(self, trusted: Callable[[LayerRef], bool]) -> None:
        for layer in self.record.layers:
            if not trusted(layer):
                self.store.check_layer(layer)
        if self.record.memory is not None:
            self.store.verify_image(self.record.memory)

    async def adopt(self, state: SessionState) -> None:
        """Take over a living sandbox after a restart of the server. Raises SandboxLost."""
        status = await asyncio.to_thread(self.driver.status, self.spec)
        if not status.alive:
            raise SandboxLost(f"sandbox {self.record.sandbox} is gone: {status.cause or 'ended'}")
        self.frozen = status.frozen
        if state is SessionState.PAUSED and status.frozen:
            return
        if status.frozen:
            await asyncio.to_thread(self.driver.thaw, self.spec)
            self.frozen = False
        await self._attach()
        # What changed before the restart is unknown: no baseline means the next turn counts as
        # a change.

    async def set_network(self, on: bool) -> Reach:
        """Let connections out, or no longer. Idempotent; to be said again after `adopt`.

        Memory of before there was a network goes on without one: `reach` is OFF then, and no
        connection leaves, as whatever the policy is may never reach further than it says.
        """
        self.reach = Reach.OFF
        if Feature.TUNNELS in self.guest.features:
            self.reach = await self.guest.network(on)
        elif on:
            log.warning("sandbox %s: its memory is older than the network", self.record.sandbox)
        return self.reach

    # -- freeze and thaw --------------------------------------------------------------------

    async def freeze(self) -> None:
        """Detach from the supervisor and stop every process at one instant."""
        if self.frozen:
            return
        if self.guest.attached:
            await self.guest.detach(DETACH_SECONDS)
        try:
            await asyncio.to_thread(self.driver.freeze, self.spec)
        except SojournError:
            with contextlib.suppress(SandboxLost):
                await self._attach()
            raise
        self.frozen = True

    async def thaw(self) -> None:
        """Let every process go on and link to the supervisor again. Raises SandboxLost."""
        if self.frozen:
            self.at_rest = False
            await asyncio.to_thread(self.driver.thaw, self.spec)
            self.frozen = False
        if not self.guest.attached:
            await self._attach()

    @contextlib.contextmanager
    def no_dials(self) -> Iterator[None]:
        """Let no connection of the outside begin, so that the programs inside get done with those
        that wait for them, and no image holds one that is half made."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    async def dial(self, token: bytes, port: int) -> None:
        """`Guest.dial`, but not while the sandbox is captured or paused. Raises Interrupted then:
        it is to be asked again."""
        if self._quiet or self.frozen:
            raise Interrupted("the session is being put away, paused or captured")
        await self.guest.dial(token, port)

    # -- changes ----------------------------------------------------------------------------

    async def mark(self) -> None:
        """Take the present state as the one `changed` compares with."""
        self.baseline = await self.guest.activity()
        self.baseline_scan = await asyncio.to_thread(self.store.scan, self.upper)

    async def changed(self) -> bool:
        """Whether files, memory file systems or the set of processes differ from the baseline."""
        if self.baseline is None or self.baseline_scan is None:
            return True
        now = await self.guest.activity()
        if now.tmpfs is None or now.tmpfs != self.baseline.tmpfs:
            return True
        if now.alive != self.baseline.alive:
            return True
        if self.baseline_scan.quick:
            return not self.store.unchanged(self.upper, self.baseline_scan)
        return not await asyncio.to_thread(self.store.unchanged, self.upper, self.baseline_scan)

    def status(self) -> SandboxStatus:
        """What the host shows of it. Blocks."""
        return self.driver.status(self.spec)

    # -- end --------------------------------------------------------------------------------

    async def kill(self) -> None:
        """End every process; the upper directory and the mounts stay."""
        await self.guest.close()
        await asyncio.to_thread(self.driver.destroy, self.spec)
        faultpoints.reach("end.kill")

    def unmount(self) -> None:
        """Unmount the root. Blocks. Idempotent."""
        mounts.cleanup_mounts(self.directory)

    def purge(self) -> None:
        """Unmount and remove the directory. Blocks. Idempotent."""
        self.unmount()
        faultpoints.reach("end.unmount")
        if self.directory.exists():
            # The rename makes the removal one step for whoever looks after a crash in between.
            trash = self.directory.with_name(self.directory.name + ".gone")
            self.directory.rename(trash)
            faultpoints.reach("end.rename")
            remove_tree(trash)

    async def destroy(self) -> None:
        """End everything and remove everything. Idempotent."""
        await self.kill()
        await asyncio.to_thread(self.purge)


def _first(error: BaseException) -> BaseException:
    """The error that explains a group: an integrity fault first, for it may cause the others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    flat = [_first(inner) for inner in error.exceptions]
    for inner in flat:
        if isinstance(inner, SojournError) and inner.code == "integrity_error":
            return inner
    for inner in flat:
        if isinstance(inner, ResumeFailed):
            return inner
    return flat[0]
