"""The directory of a local store: its lock, its temporaries, its syncing.

Guarantee: a temporary lives as long as its writer and no longer, however that ends; the lock is
held by one thread of one process, and given back by the kernel when that process dies. Neither
relies on clocks or process ids: a temporary is locked (flock) while it is written, and one that
nobody locks belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from sojourn.errors import StoreUnreachable

LOCK = "#lock"
STAGING = "#staging"
_LOCK_WAIT = 60.0
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_PIECE = 1 << 30  # bytes given to one system call


class Directory:
    """What a store has beside its objects."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make what is missing, durably, and remove what crashed writers left."""
        with contextlib.suppress(FileExistsError):
            (self.root / STAGING).mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        os.close(os.open(self.root / LOCK, flags, mode=0o600))
        sync_directory(self.root)
        self._sweep()

    def take_up(self) -> None:
        """Remove what crashed writers left, and make nothing. Raises StoreUnreachable, with
        `absent` among its details, where there is no store."""
        if not self.is_store():
            raise StoreUnreachable(
                f"There is no object store in {self.root}; its file system may not be mounted.",
                next_step="Check the place, and that its file system is mounted.",
                url=self.root.as_uri(),
                absent=True,
            )
        with contextlib.suppress(FileNotFoundError):
            self._sweep()

    def is_store(self) -> bool:
        """Whether the store is there: what stands at an unmounted file system's place is none."""
        return (self.root / LOCK).exists()

    def require(self) -> None:
        """An absent object is only believed where the store itself is present: a file system that
        is not mounted must not look like a store without objects."""
        if not self.is_store():
            raise StoreUnreachable(
                f"{self.root} is not the store it was: is its file system mounted?",
                url=self.root.as_uri(),
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, between threads and processes."""
        self.require()
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _LOCK_WAIT
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreUnreachable(
                            f"Another process holds the lock of {self.root}.",
                            url=self.root.as_uri(),
                        ) from None
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def staged(self, data: bytes) -> Iterator[tuple[Path, int]]:
        """A synced temporary file with this content, and its descriptor; gone afterwards, unless
        it was renamed."""
        temporary, descriptor = self._new_temporary()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view[:_PIECE]) :]
            os.fsync(descriptor)
            yield temporary, descriptor
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            os.close(descriptor)

    def _new_temporary(self) -> tuple[Path, int]:
        while True:
            temporary = self.root / STAGING / secrets.token_hex(16)
            try:
                descriptor = os.open(temporary, _NEW, mode=0o600)
            except FileNotFoundError:
                self.require()
                temporary.parent.mkdir(mode=0o700, exist_ok=True)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_nlink:
                    return temporary, descriptor
            except BaseException:
                os.close(descriptor)
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()
                raise
            os.close(descriptor)  # a sweep was faster than the lock: begin again

    def _sweep(self) -> None:
        with os.scandir(self.root / STAGING) as entries:
            names = [entry.path for entry in entries]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    with contextlib.suppress(BlockingIOError):  # its writer lives
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        Path(name).unlink()
                finally:
                    os.close(descriptor)


def make_root(root: Path) -> None:
    """Make a directory and those above it, durably. NotADirectoryError where that cannot be."""
    missing = []
    at = root
    while not at.exists():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        sync_directory(directory.parent)
    if not root.is_dir():
        raise NotADirectoryError(root)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
