"""Publishing a directory as a whole.

Guarantee: a published directory is complete and on disk before its name exists; two publishers of
one name never meet (the second waits and then finds it done); what an interrupted one left behind
is removed by the next. The lock is an advisory lock on a file that stays, so a killed process
frees it and no stale lock can block a set-up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sojourn.errors import HostUnfit, StorageFull
from sojourn.store.copying import sync_filesystem, sync_path

Progress = Callable[[str], None]
"""Takes one line about what happens now, for a person to read."""

_STAGING = ".staging-"


@contextlib.contextmanager
def exclusive(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file, waiting for whoever holds it now."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostUnfit(
            f"cannot write to {lock.parent}: {error.strerror}",
            next_step="Run as root, or point SOJOURN_HOME to a directory of your own.",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another set-up of {lock.stem.lstrip('.')}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def publish(target: Path, build: Callable[[Path], None], progress: Progress) -> bool:
    """Have `build` fill a fresh directory and give it the name `target`.

    Returns False when the target is there already; `build` is not called then. Whatever `build`
    raises leaves nothing behind.
    """
    if target.is_dir():
        return False
    with exclusive(target.parent / f".{target.name}.lock", progress):
        if target.is_dir():
            return False
        prefix = f"{_STAGING}{target.name}-"
        for leftover in target.parent.glob(f"{prefix}*"):
            remove_tree(leftover)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            staging.chmod(0o755)
            build(staging)
            sync_filesystem(staging)
            staging.rename(target)
            sync_path(target.parent)
        except BaseException as error:
            remove_tree(staging)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room in {target.parent} for {target.name}") from error
            raise
    return True


def point(link: Path, name: str) -> None:
    """Make the symbolic link `link` name a sibling, switching over at one instant."""
    with contextlib.suppress(FileNotFoundError):
        if str(link.readlink()) == name:
            return
    fresh = Path(tempfile.mkdtemp(prefix=_STAGING, dir=link.parent))
    try:
        (fresh / "link").symlink_to(name)
        (fresh / "link").rename(link)
        sync_path(link.parent)
    finally:
        remove_tree(fresh)


def remove_tree(tree: Path) -> None:
    """Remove a directory tree; a tree that is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tree)
