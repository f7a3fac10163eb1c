"""The packages of the host that set-up and sandboxes need.

Guarantee: only what is missing is installed, by the host's own apt; a host that has everything is
not touched, nor asked to read an index. Waits for another apt run instead of failing beside it.
"""

from __future__ import annotations

import os
import shutil

import msgspec

from sojourn.errors import HostUnfit
from sojourn.node.setup.commands import run_command
from sojourn.node.setup.publish import Progress

_LOCK_WAIT = "DPkg::Lock::Timeout=600"


class Need(msgspec.Struct, frozen=True):
    """A package, and what shows that it is there: a program, else the package's own record."""

    package: str
    program: str | None
    purpose: str


NEEDS = (
    Need("gcc", "gcc", "builds the supervisor"),
    Need("libc6-dev", None, "builds the supervisor"),
    Need("make", "make", "builds the supervisor"),
    Need("mmdebstrap", "mmdebstrap", "builds the template"),
    Need("debian-archive-keyring", None, "checks what is fetched"),
    Need("ca-certificates", None, "reaches mirrors over TLS"),
    Need("bubblewrap", "bwrap", "runs sandboxes without gVisor"),
    Need("iproute2", "ip", "sets up networks of sandboxes"),
    Need("xz-utils", "xz", "unpacks packages"),
)


def is_installed(package: str) -> bool:
    """Whether dpkg has the package installed."""
    try:
        state = run_command(
            ["dpkg-query", "--show", "--showformat=${db:Status-Status}\n", package],
            what=f"asking for the package {package}",
        )
    except HostUnfit:
        return False
    return "installed" in state.split()


def missing_packages() -> list[Need]:
    """What this host lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"
    return [
        need
        for need in NEEDS
        if not (
            shutil.which(need.program, path=path) if need.program else is_installed(need.package)
        )
    ]


def ensure_host_packages(progress: Progress) -> list[str]:
    """Install what is missing; gives back the names of what was installed."""
    missing = [need.package for need in missing_packages()]
    if not missing:
        return []
    names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise HostUnfit(
            f"missing on this host: {names}",
            next_step=f"As root: apt-get install {names}",
            packages=missing,
        )
    install = ["apt-get", "-q", "-y", "--no-install-recommends", "-o", _LOCK_WAIT, "install"]
    progress(f"host: installing {names}")
    try:
        run_command([*install, *missing], what="installing packages")
    except HostUnfit:
        # No index yet, or one so old that its files are gone from the mirror.
        progress("host: reading the package index")
        run_command(["apt-get", "-q", "-o", _LOCK_WAIT, "update"], what="apt-get update")
        run_command(
            [*install, *missing],
            what="installing packages",
            next_step=f"Find out why `apt-get install {names}` fails on this host.",
        )
    return missing
