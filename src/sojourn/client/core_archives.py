"""Requests about archives, and how one is received.

Guarantee: a received archive is whole (its size and the digest at its end are those the server
told) or an error is raised; a file at the target path is replaced whole or not at all, and nobody
but its owner can read it. What a symbolic link names is replaced, never the link. A pipe or device
is written to as it stands: no file takes its place.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import secrets
import stat
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from sojourn.client.core import Content, Plan, Request, decode, parse, query_text, session_path
from sojourn.client.targets import open_special, replaced
from sojourn.errors import ArchiveInvalid, FileConflict, Unreachable
from sojourn.wire.api import (
    ARCHIVE_HEADER,
    ARCHIVE_KEY_HEADER,
    ARCHIVE_TYPE,
    ArchiveInfo,
    SessionInfo,
)

DIGEST = 32
PIECE = 1 << 20

Secret = bytes | str
Progress = Callable[[int, int | None], object]
"""Called with the bytes so far, and all of them where that is known."""


def _key(key: Secret | None) -> tuple[tuple[bytes, bytes], ...]:
    if key is None:
        return ()
    secret = key.encode() if isinstance(key, str) else key
    encoded = binascii.b2a_base64(secret, newline=False)
    return ((ARCHIVE_KEY_HEADER.lower().encode(), encoded),)


def export_request(ref: str, snapshot: str | None, key: Secret | None) -> Request:
    """Ask for an archive."""
    target = f"{session_path(ref)}/export{query_text({'snapshot': snapshot})}"
    return Request(b"GET", target, _key(key), timeout=None)


def import_archive(
    content: Content, name: str | None, expect: str | None, key: Secret | None
) -> Plan[SessionInfo]:
    """Send an archive."""
    target = f"/v1/import{query_text({'name': name, 'expect': expect})}"
    headers = ((b"content-type", ARCHIVE_TYPE.encode()), *_key(key))
    response = yield Request(b"POST", target, headers, content, timeout=None)
    info: SessionInfo = decode(response, SessionInfo)
    return info


class Receiving:
    """Takes an archive in pieces. `target` is a path, or something with a `write` for bytes.
    `feed` the headers to `begin` first."""

    def __init__(self, target: str | Path | BinaryIO, progress: Progress | None) -> None:
        self._progress = progress
        self._hasher = blake3()
        self._tail = b""
        self._size = 0
        self._info: ArchiveInfo | None = None
        self._path = Path(target) if isinstance(target, str | os.PathLike) else None
        self._replaced: Path | None = None  # past every link
        self._fresh: Path | None = None
        if self._path is None:
            self._file: Any = target
            return
        with _writing(self._path):
            self._replaced = replaced(self._path)
            if self._replaced is None:
                self._file = open_special(self._path)
                return
            self._fresh = self._replaced.with_name(f".{secrets.token_hex(16)}.part")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self._fresh, flags, 0o600), "wb", buffering=0)

    def __enter__(self) -> Receiving:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._path is None:
            return
        try:
            self._file.close()
        finally:
            if self._fresh is not None:
                self._fresh.unlink(missing_ok=True)

    def begin(self, headers: Mapping[str, str]) -> None:
        """What the server says of the archive. Raises Unreachable where it says nothing."""
        text = headers.get(ARCHIVE_HEADER.lower())
        if text is None:
            raise Unreachable("the answer is no archive", next_step="Check SOJOURN_URL.")
        self._info = parse(text.encode(), ArchiveInfo)

    def feed(self, data: bytes) -> None:
        """Take a piece. Raises FileConflict where the path cannot be written."""
        with _writing(self._path):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or len(view) :]
        self._size += len(data)
        held = self._tail + data
        self._hasher.update(held[:-DIGEST])
        self._tail = held[-DIGEST:]
        if self._progress is not None and self._info is not None:
            self._progress(self._size, self._info.bytes)

    def finish(self) -> ArchiveInfo:
        """It is complete. Raises ArchiveInvalid where what came is not what was told."""
        info = self._info
        digest = self._hasher.hexdigest()
        if info is None or self._size != info.bytes or digest != info.digest:
            raise ArchiveInvalid("The archive was damaged on its way.", next_step="Export again.")
        if self._path is not None:
            with _writing(self._path):
                if self._fresh is not None or _is_disk(self._file.fileno()):
                    os.fsync(self._file.fileno())
                self._file.close()
                if self._fresh is not None and self._replaced is not None:
                    self._fresh.replace(self._replaced)
        return info


def _is_disk(descriptor: int) -> bool:
    return stat.S_ISBLK(os.fstat(descriptor).st_mode)


@contextlib.contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    """Say of what goes wrong with a local file which one it is."""
    try:
        yield
    except OSError as error:
        if path is None:
            raise
        raise FileConflict(
            f"{path} cannot be written: {error.strerror or error}",
            next_step="Choose another place, or make room there.",
            path=str(path),
        ) from error


class Sending:
    """An archive as the content of a request: from a path, an open file, bytes or an iterable.
    Close it."""

    def __init__(self, source: Any, progress: Progress | None) -> None:
        self._progress = progress
        self._total: int | None = None
        self._sent = 0
        self._own: BinaryIO | None = None
        self.source = source
        if isinstance(source, str | os.PathLike):
            try:
                self._own = Path(source).open("rb")  # noqa: SIM115 - closed with this
            except OSError as error:
                raise FileConflict(
                    f"{source} cannot be read: {error.strerror or error}",
                    next_step="Check the path of the archive.",
                    path=str(source),
                ) from error
            self._total = os.fstat(self._own.fileno()).st_size
            self.source = _pieces(self._own)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._own is not None:
            self._own.close()

    def told(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces, with progress told."""
        for piece in pieces:
            yield piece
            self._tell(piece)

    async def atold(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """The pieces, with progress told."""
        async for piece in pieces:
            yield piece
            self._tell(piece)

    def _tell(self, piece: bytes) -> None:
        self._sent += len(piece)
        if self._progress is not None:
            self._progress(self._sent, self._total)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece
