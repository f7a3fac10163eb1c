"""Overlay mounts of sandboxes, made and removed by system calls.

Guarantee: an overlay mounted here never leaves traces in its layers that tie them to this machine
or to one another (no redirects, no metadata-only copies, no index), so that an upper directory can
become a lower layer anywhere; a mount that was asked away is gone when the call returns.

The layers are given to the kernel one by one where it can take them so (fsconfig `lowerdir+`, from
Linux 6.8), else through short relative names, because the options of mount(2) must fit into one
page: that is 40 layers of ordinary path length, and a long session has more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit

_libc = ctypes.CDLL(None, use_errno=True)

_MS_NOSUID, _MS_NODEV = 2, 4
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_MOVE_MOUNT_F_EMPTY_PATH = 4
_PAGE = 4096
_AT_FDCWD = -100

# What keeps a layer self-contained. `xino=off`: inode numbers of layers come through as they are,
# as they did before the change of layers. A kernel that lacks one of them refuses the mount.
_OPTIONS = {"index": "off", "redirect_dir": "nofollow", "metacopy": "off", "xino": "off"}


class Mount(msgspec.Struct, frozen=True):
    """One line of mountinfo."""

    id: int
    target: Path
    type: str
    source: str
    super_options: str


_ESCAPE = re.compile(rb"\\([0-7]{3})")


def _decode(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field))


def read_mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """All mounts of this mount namespace, in the order they were made."""
    mounts = []
    for line in mountinfo.read_bytes().splitlines():
        fields = line.split(b" ")
        after = fields.index(b"-")
        mounts.append(
            Mount(
                id=int(fields[0]),
                target=Path(_decode(fields[4])),
                type=_decode(fields[after + 1]),
                source=_decode(fields[after + 2]),
                super_options=_decode(fields[after + 3]) if len(fields) > after + 3 else "",
            )
        )
    return mounts


def mounts_under(path: Path) -> list[Path]:
    """Mount points at or below `path`, the deepest and newest first, as they have to go."""
    top = path.resolve()
    found = [m for m in read_mounts() if m.target == top or top in m.target.parents]
    found.sort(key=lambda mount: (len(mount.target.parts), mount.id), reverse=True)
    return [mount.target for mount in found]


def is_mounted(target: Path) -> bool:
    """Whether something is mounted at `target` itself."""
    resolved = target.resolve()
    return any(mount.target == resolved for mount in read_mounts())


def mount_overlay(lowers: Sequence[Path], upper: Path, work: Path, target: Path) -> None:
    """Mount an overlay: `lowers` read-only, the highest first, `upper` on top, at `target`.

    Raises HostUnfit with the kernel's reason, OSError (ENOSPC, ENOENT) where that is the matter.
    """
    if not lowers:
        raise ValueError("an overlay needs a lower directory")
    for directory in (*lowers, upper, work, target):
        if not directory.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    if _layers_one_by_one():
        _mount_new(lowers, upper, work, target)
    else:
        _mount_classic(lowers, upper, work, target)


@functools.cache
def _layers_one_by_one() -> bool:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= (6, 8)


def _check(result: int, what: str, log: int | None = None) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    words = _kernel_words(log) if log is not None else ""
    message = f"{what}: {os.strerror(number)}{f' ({words})' if words else ''}"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EIO, errno.EBUSY):
        raise OSError(number, message)
    raise HostUnfit(message)


def _kernel_words(context: int) -> str:
    """What the kernel wrote about a failed configuration."""
    lines = []
    with contextlib.suppress(OSError):  # ENODATA ends the log
        while True:
            lines.append(os.read(context, 1024).decode(errors="replace").strip())
    return "; ".join(lines)


def _mount_new(lowers: Sequence[Path], upper: Path, work: Path, target: Path) -> None:
    context = _check(_libc.syscall(_SYS_FSOPEN, b"overlay", _FSOPEN_CLOEXEC), "open overlay")
    try:
        pairs = [("source", "overlay"), *_OPTIONS.items()]
        pairs += [("lowerdir+", os.fspath(lower)) for lower in lowers]
        pairs += [("upperdir", os.fspath(upper)), ("workdir", os.fspath(work))]
        for key, value in pairs:
            _check(
                _libc.syscall(
                    _SYS_FSCONFIG,
                    context,
                    _FSCONFIG_SET_STRING,
                    key.encode(),
                    os.fsencode(value),
                    0,
                ),
                f"overlay option {key}={value}",
                context,
            )
        _check(
            _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0),
            "make the overlay",
            context,
        )
        mount = _check(
            _libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0), "mount the overlay", context
        )
    finally:
        os.close(context)
    try:
        _check(
            _libc.syscall(
                _SYS_MOVE_MOUNT,
                mount,
                b"",
                _AT_FDCWD,
                os.fsencode(target),
                _MOVE_MOUNT_F_EMPTY_PATH,
            ),
            f"attach the overlay at {target}",
        )
    finally:
        os.close(mount)


def _escape(path: str) -> str:
    """A path as an overlay option: colons part layers, commas part options."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _mount_classic(lowers: Sequence[Path], upper: Path, work: Path, target: Path) -> None:
    # The kernel resolves the links at the mount, so they can go at once. Descriptors under
    # /proc/self/fd would be as short but fail with some kernels' overlay.
    with tempfile.TemporaryDirectory(prefix="o", dir="/run") as short:
        names = []
        for number, lower in enumerate(lowers):
            link = Path(short) / f"{number:x}"
            link.symlink_to(lower.resolve())
            names.append(os.fspath(link))
        options = ",".join(
            [
                "lowerdir=" + ":".join(names),
                "upperdir=" + _escape(os.fspath(upper)),
                "workdir=" + _escape(os.fspath(work)),
                *(f"{key}={value}" for key, value in _OPTIONS.items()),
            ]
        )
        if len(os.fsencode(options)) >= _PAGE:
            raise HostUnfit(
                f"{len(lowers)} layers do not fit into one mount call of this kernel",
                next_step="Squash the session's layers, or use Linux 6.8 or newer.",
            )
        _check(
            _libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, os.fsencode(options)),
            f"mount overlay at {target}",
        )


def unmount(target: Path, *, timeout: float = 2.0) -> None:
    """Remove every mount at `target`. Idempotent; waits, and detaches what stays busy.

    A detached mount is out of the way at once and goes for good with its last user.
    """
    deadline = time.monotonic() + timeout
    name = os.fsencode(target)
    pause = 0.001
    flags = _UMOUNT_NOFOLLOW
    while True:
        if _libc.umount2(name, flags) == 0:
            continue  # there may be another one underneath
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):  # nothing (more) mounted there
            return
        if number != errno.EBUSY:
            raise OSError(number, os.strerror(number), str(target))
        if time.monotonic() > deadline:
            flags |= _MNT_DETACH
            continue
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def cleanup_mounts(path: Path) -> list[Path]:
    """Remove every mount at or below `path`; returns those removed."""
    removed = []
    while found := mounts_under(path):
        before = len(found)
        for target in found:
            unmount(target, timeout=0.2)
            removed.append(target)
        if len(mounts_under(path)) >= before:
            raise HostUnfit(f"mounts under {path} cannot be removed: {found}")
    return removed
