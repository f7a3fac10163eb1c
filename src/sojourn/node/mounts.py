"""Overlay mounts of sandboxes, made and removed by system calls.

Guarantee: an overlay mounted here never leaves traces in its layers that tie them to this machine
or to one another (no redirects, no metadata-only copies, no index), so that an upper directory can
become a lower layer anywhere; a mount that was asked away is gone when the call returns.

The layers are given to the kernel one by one where it takes them so (fsconfig `lowerdir+`, newer
than Linux 6.6), else all in one call of mount(2), whose options must fit into one page. That is 40
layers of ordinary path length, and a long session has more, so they are named by descriptors then.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sojourn.errors import HostUnfit

_libc = ctypes.CDLL(None, use_errno=True)

_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH = 4
_CLONE_FS = 0x200
_PAGE = 4096
_LONGEST_VALUE = 255  # of one fsconfig string
_AT_FDCWD = -100

# What keeps a layer self-contained. `xino=off`: inode numbers of layers come through as they are,
# as they did before the change of layers. `uuid=off`: no random name is written on the upper.
# A kernel that lacks one of them refuses the mount.
_OPTIONS = {
    "index": "off",
    "redirect_dir": "nofollow",
    "metacopy": "off",
    "xino": "off",
    "uuid": "off",
}


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


def mount_overlay(
    lowers: Sequence[Path], upper: Path, work: Path, target: Path, *, volatile: bool = False
) -> None:
    """Mount an overlay: `lowers` read-only, the highest first, `upper` on top, at `target`.

    An unmount, and each fsync inside, writes out all that the file system of `upper` holds. With
    `volatile` neither does: for uppers that whoever keeps them syncs, and whose `work` directory
    is never mounted again.
    Raises HostUnfit with the kernel's reason, OSError (ENOSPC, ENOENT) where that is the matter.
    """
    if not lowers:
        raise ValueError("an overlay needs a lower directory")
    for directory in (*lowers, upper, work, target):
        if not directory.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    if _layers_one_by_one():
        _mount_new(lowers, upper, work, target, volatile)
    else:
        _mount_classic(lowers, upper, work, target, volatile)


@functools.cache
def _layers_one_by_one() -> bool:
    context = _libc.syscall(_SYS_FSOPEN, b"overlay", _FSOPEN_CLOEXEC)
    if context < 0:  # an old kernel, or a filter of system calls around us
        return False
    try:
        return _set(context, "lowerdir+", "/") == 0
    finally:
        os.close(context)


def _set(context: int, key: str, value: str) -> int:
    name, text = key.encode(), os.fsencode(value)
    return int(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, name, text, 0))


@contextlib.contextmanager
def _opened(directories: Sequence[Path]) -> Iterator[list[int]]:
    """Descriptors that lead to directories."""
    with contextlib.ExitStack() as stack:
        found = []
        for directory in directories:
            found.append(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            stack.callback(os.close, found[-1])
        yield found


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


def _mount_new(
    lowers: Sequence[Path], upper: Path, work: Path, target: Path, volatile: bool
) -> None:
    context = _check(_libc.syscall(_SYS_FSOPEN, b"overlay", _FSOPEN_CLOEXEC), "open overlay")
    try:
        paths = [("lowerdir+", lower) for lower in lowers]
        paths += [("upperdir", upper), ("workdir", work)]
        with _opened([path for _, path in paths]) as descriptors:
            pairs = [("source", "overlay"), *_OPTIONS.items()]
            for (key, path), descriptor in zip(paths, descriptors, strict=True):
                name = os.fspath(path)
                if len(os.fsencode(name)) > _LONGEST_VALUE:
                    name = f"/proc/self/fd/{descriptor}"
                pairs.append((key, name))
            for key, value in pairs:
                _check(_set(context, key, value), f"overlay option {key}={value}", context)
            if volatile:
                flag = _libc.syscall(
                    _SYS_FSCONFIG, context, _FSCONFIG_SET_FLAG, b"volatile", None, 0
                )
                _check(flag, "overlay option volatile", context)
        create = _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        _check(create, "make the overlay", context)
        made = _libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)
        mount = _check(made, "mount the overlay", context)
    finally:
        os.close(context)
    try:
        name_of_target = os.fsencode(target)
        moved = _libc.syscall(
            _SYS_MOVE_MOUNT, mount, b"", _AT_FDCWD, name_of_target, _MOVE_MOUNT_F_EMPTY_PATH
        )
        _check(moved, f"attach the overlay at {target}")
    finally:
        os.close(mount)


def _escape(path: str) -> str:
    """A path as an overlay option: colons part layers, commas part options."""
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _classic_options(lowers: Sequence[str], upper: str, work: str, volatile: bool) -> bytes:
    words = [
        "lowerdir=" + ":".join(map(_escape, lowers)),
        "upperdir=" + _escape(upper),
        "workdir=" + _escape(work),
        *(f"{key}={value}" for key, value in _OPTIONS.items()),
        *(["volatile"] if volatile else []),
    ]
    return os.fsencode(",".join(words))


def _mount_classic(
    lowers: Sequence[Path], upper: Path, work: Path, target: Path, volatile: bool
) -> None:
    what = f"mount an overlay at {target}"
    names = [os.fspath(path) for path in (*lowers, upper, work)]
    options = _classic_options(names[:-2], names[-2], names[-1], volatile)
    if len(options) < _PAGE:
        _check(_libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, options), what)
        return
    with _opened([*lowers, upper, work]) as descriptors:
        names = [str(descriptor) for descriptor in descriptors]
        options = _classic_options(names[:-2], names[-2], names[-1], volatile)
        if len(options) >= _PAGE:
            raise HostUnfit(
                f"{len(lowers)} layers do not fit into one mount call of this kernel",
                next_step="Squash the session's layers, or use a newer Linux.",
            )
        failed: list[OSError | HostUnfit] = []

        def mount() -> None:
            # A working directory of this thread alone, in which descriptors are file names.
            try:
                _check(_libc.unshare(_CLONE_FS), "part the working directory")
                os.chdir("/proc/self/fd")
                _check(_libc.mount(b"overlay", os.fsencode(target), b"overlay", 0, options), what)
            except (OSError, HostUnfit) as error:  # for the caller's thread
                failed.append(error)

        thread = threading.Thread(target=mount)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]


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
