"""The host's view of a stored layer, kept to tell quickly whether anything was touched.

Guarantee: an entry whose inode, change time, mode, owner, size and modification time are the
recorded ones was not written since; anything else is read again. The index is a cache: a lost or
damaged one costs reading the layer, never a wrong answer.

Layers share unchanged files by hard links, and linking or unlinking moves the change time of the
one inode they share. `LinkLedger` keeps the newest change time that the store itself caused, so
that sharing is not taken for tampering.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
from array import array
from pathlib import Path

from sojourn.errors import IntegrityError
from sojourn.store.envelopes import HEADER_BYTES, read_checked, unwrap, wrap, write_checked
from sojourn.store.trees import CTIME, GID, INODE, MODE, MTIME, SIZE, UID, Facts

KIND = b"INDX"
_COLUMNS = 7
# inode, change time, mode, uid, gid, size, modification time
Row = tuple[int, ...]
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def row_of(facts: Facts) -> Row:
    """The recorded columns of an entry's facts."""
    return (
        facts[INODE],
        facts[CTIME],
        facts[MODE],
        facts[UID],
        facts[GID],
        facts[SIZE],
        facts[MTIME],
    )


def encode_index(rows: list[Row]) -> bytes:
    """Rows in the manifest's order, column by column, little-endian 64 bit."""
    parts = []
    for column in zip(*rows, strict=True):
        try:
            values = array("q", column)
        except OverflowError:
            # Times beyond 64 bits are clamped: they never match then, the entry is compared fully.
            values = array("q", (min(max(value, _LOWEST), _HIGHEST) for value in column))
        if sys.byteorder == "big":
            values.byteswap()
        parts.append(values.tobytes())
    return b"".join(parts)


def write_index(path: Path, rows: list[Row], *, sync: bool) -> None:
    """Write an index file in place of the old one."""
    partial = path.with_name(path.name + ".new")
    try:
        write_checked(KIND, partial, encode_index(rows), sync=sync)
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def read_index(path: Path, entries: int, name: str) -> list[Row] | None:
    """The rows, or None when the index is lost or damaged (the layer is then read in full)."""
    try:
        payload = read_checked(KIND, path, name)
    except (FileNotFoundError, IntegrityError):
        return None
    if len(payload) != entries * _COLUMNS * 8:
        return None
    columns = []
    for column in range(_COLUMNS):
        values = array("q")
        values.frombytes(payload[column * entries * 8 : (column + 1) * entries * 8])
        if sys.byteorder == "big":
            values.byteswap()
        columns.append(values)
    return list(zip(*columns, strict=True))


class LinkLedger:
    """Change times the store caused on shared inodes, appended to a file in batches.

    A batch that did not reach the disk, or a damaged tail, is forgotten: the files concerned are
    read again at the next check. So a full disk stops neither the store nor, above all, what frees
    space. The file is rewritten when most of it is outdated.
    """

    KIND = b"LINK"
    _ROW = struct.Struct("<Qq")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._times: dict[int, int] = {}
        self._written = 0
        self._load()

    def _load(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at + 16 : at + 24], "little")
            record = data[at : at + HEADER_BYTES + size]
            try:
                payload = unwrap(self.KIND, record, "the link ledger")
            except IntegrityError:
                break
            for inode, changed in self._ROW.iter_unpack(payload):
                self._times[inode] = changed
            self._written += len(payload) // self._ROW.size
            at += HEADER_BYTES + size
        if at < len(data):
            with contextlib.suppress(OSError):
                self._rewrite()

    def get(self, inode: int) -> int | None:
        """The change time the store last caused on this inode."""
        return self._times.get(inode)

    def record(self, changed: dict[int, int]) -> None:
        """Note new change times by inode."""
        if not changed:
            return
        with self._lock, contextlib.suppress(OSError):
            self._times.update(changed)
            self._written += len(changed)
            if self._written > 4 * len(self._times) + 10_000:
                self._rewrite()
            else:
                self._append(wrap(self.KIND, self._pack(changed)))

    def forget(self, inode: int) -> None:
        """Drop an inode that is gone; its number may be used again."""
        with self._lock:
            self._times.pop(inode, None)

    def _pack(self, times: dict[int, int]) -> bytes:
        return b"".join(self._ROW.pack(*pair) for pair in times.items())

    def _append(self, batch: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(batch) != len(batch):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)  # what is appended later would not be found behind a torn batch
                raise

    def _rewrite(self) -> None:
        partial = self._path.with_name(self._path.name + ".new")
        try:
            partial.write_bytes(wrap(self.KIND, self._pack(self._times)))
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._written = len(self._times)
