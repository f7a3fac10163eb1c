"""What every isolation driver promises.

Guarantee: a driver runs one supervisor as PID 1 over a given root directory, can freeze and end
it without leaving anything of it on the host, and says by its capabilities what else it can do.
Callers ask for capabilities; they never compare driver names.

The driver does not mount or seal file systems, does not speak to the supervisor and knows no
sessions: that is the node agent's work. All methods block; the agent calls them in threads.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Protocol

import msgspec

from sojourn.model.sessions import Limits


class Capability(enum.StrEnum):
    """What a driver may be able to do beyond running files."""

    MEMORY = "memory"  # checkpoint and restore processes
    FREEZE = "freeze"  # stop all processes at one instant and let them go on
    LIVE_CHECKPOINT = "live_checkpoint"  # checkpoint a frozen sandbox that then goes on
    HARD_LIMITS = "hard_limits"  # cpu, memory and pids limits enforced by the kernel
    NETWORK = "network"  # connections to any address can be taken inside, not only the proxy's


class SandboxSpec(msgspec.Struct, frozen=True):
    """One sandbox to be. All paths are absolute host paths.

    `directory` is private to the sandbox; the driver keeps its own files in `directory/driver`.
    `root` is the mounted root tree. `control` is a directory, bind-mounted read-only at
    /run/sojourn/node inside, where the node listens on `node.sock`; the supervisor connects out
    to it. `supervisor` is the static program, bind-mounted read-only at /run/sojourn/supervisor
    and run as PID 1 with `argv` after it.
    `tmpfs` are mount points inside that are memory file systems.
    """

    sandbox: str
    directory: Path
    root: Path
    control: Path
    supervisor: Path
    argv: list[str]
    env: dict[str, str]
    hostname: str
    limits: Limits
    tmpfs: tuple[str, ...] = ("/tmp", "/run", "/dev/shm")


class SandboxStatus(msgspec.Struct, frozen=True):
    """What the host shows of a sandbox. `pids` are host processes that belong to it. One that is
    `lost` never serves again, whatever of it still runs; one that is only not alive may be busy."""

    alive: bool
    frozen: bool
    pids: list[int]
    cause: str | None = None  # why it ended, when that can be told (e.g. "memory limit exceeded")
    lost: bool = False


class Driver(Protocol):
    """An isolation driver."""

    name: str
    runtime: str  # name and version of what runs the sandbox, recorded in memory images
    capabilities: frozenset[Capability]

    def start(self, spec: SandboxSpec) -> None:
        """Boot a fresh sandbox. Raises ResumeFailed with the runtime's own words."""

    def restore(self, spec: SandboxSpec, image: Path) -> None:
        """Start a sandbox whose processes go on from the memory image in directory `image`.

        Returns once the processes run. Raises ResumeFailed; leaves nothing running then.
        """

    def freeze(self, spec: SandboxSpec) -> None:
        """Stop every process of the sandbox at one instant. Idempotent. Raises SandboxLost."""

    def thaw(self, spec: SandboxSpec) -> None:
        """Let a frozen sandbox go on. Idempotent. Raises SandboxLost."""

    def checkpoint(self, spec: SandboxSpec, image: Path) -> None:
        """Write the memory image of a frozen sandbox into the empty directory `image`.

        The sandbox stays frozen and alive. Nothing is synced to disk here.
        Raises CaptureFailed (details.sandbox_alive tells whether it survived), StorageFull.
        """

    def unlinked_files(self, spec: SandboxSpec) -> list[str]:
        """Paths on the root that a frozen sandbox holds open though their name is gone."""

    def writable_files(self, spec: SandboxSpec) -> list[str]:
        """Root-relative paths of regular files the sandbox holds open for writing now."""

    def status(self, spec: SandboxSpec) -> SandboxStatus:
        """Look at the host; never raises for a sandbox that is gone."""

    def destroy(self, spec: SandboxSpec) -> None:
        """End every process and remove cgroups and runtime state. Idempotent, bounded in time."""

    def sweep(self, keep: set[str]) -> list[str]:
        """End and remove every sandbox of this driver instance not in `keep`; returns their ids."""

    def close(self) -> None:
        """Give up what the driver instance holds on the host beside its sandboxes, as far as no
        living sandbox needs it. Not to be used afterwards. Idempotent."""

    def update_limits(self, spec: SandboxSpec, limits: Limits) -> None:
        """Apply other cpu, memory and pids limits to a running sandbox."""
