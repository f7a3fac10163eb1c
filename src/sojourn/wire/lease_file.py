"""The file that says until when a node may act, read by each of its processes.

Guarantee: nobody takes half a deadline for one, nor one of an earlier boot of the machine, whose
clock began anew; a writer that is stopped or killed at any moment leaves the last whole deadline.
What cannot be read is past. A deadline is a time of CLOCK_BOOTTIME in nanoseconds: that clock goes
on while the machine sleeps, and nobody sets it.

64 bytes: magic (8), version (4), nothing (4), then two records of deadline, generation and checksum
(8 each). Each deadline is written over the older record; the newest one whose checksum is right
counts.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import time
from pathlib import Path

from sojourn.errors import HostUnfit, StorageFull

SIZE = 64
_MAGIC = b"SJLEASE\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIxxxx")
_RECORD = struct.Struct("<QQ8s")
_PLACES = (_HEAD.size, _HEAD.size + _RECORD.size)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def now() -> int:
    """The clock of deadlines."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class LeaseFile:
    """A reader of the file. Raises OSError when it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._boot = _BOOT_ID.read_bytes().strip()
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)

    def deadline(self) -> int:
        """Until when the node may act; 0 when nothing says so."""
        return self._newest()[0]

    def _newest(self) -> tuple[int, int]:
        """The deadline, and its generation."""
        content = self._bytes[:]
        if _HEAD.unpack_from(content) != (_MAGIC, _VERSION):
            return 0, 0
        found = (0, 0)
        for place in _PLACES:
            deadline, generation, checksum = _RECORD.unpack_from(content, place)
            if generation > found[1] and checksum == self._checksum(deadline, generation):
                found = (deadline, generation)
        return found

    def _checksum(self, deadline: int, generation: int) -> bytes:
        spoken = struct.pack("<QQ", deadline, generation)
        return hashlib.blake2b(spoken, digest_size=8, key=self._boot).digest()

    def close(self) -> None:
        """Let go. Idempotent."""
        self._bytes.close()


class LeaseWriter(LeaseFile):
    """The node's own end. Makes the file when it is new; a deadline that still holds is kept.

    `descriptor` is an open one of the file, for locks. Raises StorageFull, HostUnfit.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.fstat(self.descriptor).st_size != SIZE:
                # By writing, so that no reader's page is without room on the disk.
                empty = _HEAD.pack(_MAGIC, _VERSION).ljust(SIZE, b"\0")
                os.pwrite(self.descriptor, empty, 0)
                os.ftruncate(self.descriptor, SIZE)
            super().__init__(path)
        except OSError as error:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            raise _failed(path, error) from error

    def write(self, deadline: int) -> None:
        """Set the deadline. Raises StorageFull, HostUnfit; the one before counts then."""
        _, generation = self._newest()
        generation += 1
        record = _RECORD.pack(deadline, generation, self._checksum(deadline, generation))
        try:
            # Not through the map: where there is no room that would end the process.
            os.pwrite(self.descriptor, _HEAD.pack(_MAGIC, _VERSION), 0)
            os.pwrite(self.descriptor, record, _PLACES[generation % len(_PLACES)])
        except OSError as error:
            raise _failed(self.path, error) from error

    def close(self) -> None:
        """Let go, also of the locks on it. Idempotent."""
        super().close()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _failed(path: Path, error: OSError) -> StorageFull | HostUnfit:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room for the lease file {path}: {error.strerror}")
    return HostUnfit(
        f"the lease file {path} cannot be written: {error.strerror}",
        next_step="Make the data directory writable.",
    )
