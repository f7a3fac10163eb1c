"""Plans about files inside a session, and the streams of watches and events."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

from sojourn.client.core import (
    ANSWER_SECONDS,
    OCTETS_TYPE,
    Content,
    Plan,
    Request,
    act,
    decode,
    get,
    parse,
    query_text,
    raw_path,
    session_path,
)
from sojourn.client.core_commands import STREAM_SECONDS
from sojourn.errors import ErrorBody, InvalidRequest, from_body
from sojourn.wire.api import EventInfo, FileChange, FileInfo, TreeInfo

T = TypeVar("T")

PathLike = str | bytes | Path
"""A path inside a session: text, or bytes where it is not UTF-8."""

_SSE_ACCEPT = (b"accept", b"text/event-stream")
_TAR_TYPE = (b"content-type", b"application/x-tar")


def files_path(ref: str, what: str = "") -> str:
    """The path of a session's files."""
    return f"{session_path(ref)}/files{what}"


def read_request(ref: str, path: PathLike, offset: int, length: int | None) -> Request:
    """Read a file, or `length` bytes of it from `offset`. Raises InvalidRequest."""
    if offset < 0 or (length is not None and length < 0):
        raise InvalidRequest("offset and length of a read are not negative", field="offset")
    target = files_path(ref) + query_text({"path": raw_path(path)})
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if offset or length is not None:
        last = "" if length is None else str(offset + length - 1)
        headers = ((b"range", f"bytes={offset}-{last}".encode()),)
    return Request(b"GET", target, headers, repeatable=True)


def write(
    ref: str, path: PathLike, data: Content, *, mode: int | None, user: str | None, append: bool
) -> Plan[FileInfo]:
    """Write a file."""
    values = {
        "path": raw_path(path),
        "mode": None if mode is None else f"{mode:o}",
        "user": user,
        "append": append or None,
    }
    target = files_path(ref) + query_text(values)
    response = yield Request(
        b"PUT", target, (OCTETS_TYPE,), data, 5 * ANSWER_SECONDS, repeatable=not append
    )
    info: FileInfo = decode(response, FileInfo)
    return info


def list_files(ref: str, path: PathLike) -> Plan[list[FileInfo]]:
    """Entries of a directory."""
    found: list[FileInfo] = yield from get(
        files_path(ref, "/list"), list[FileInfo], path=raw_path(path)
    )
    return found


def stat(ref: str, path: PathLike, *, follow: bool) -> Plan[FileInfo]:
    """Facts of one file."""
    info: FileInfo = yield from get(
        files_path(ref, "/stat"), FileInfo, path=raw_path(path), follow=follow
    )
    return info


def remove(ref: str, path: PathLike, *, recursive: bool) -> Plan[None]:
    """Remove a file or directory."""
    yield from act(b"DELETE", files_path(ref), path=raw_path(path), recursive=recursive or None)


def move(ref: str, path: PathLike, to: PathLike) -> Plan[None]:
    """Move a file or directory."""
    yield from act(b"POST", files_path(ref, "/move"), path=raw_path(path), to=raw_path(to))


def mkdir(ref: str, path: PathLike, *, mode: int, parents: bool) -> Plan[None]:
    """Make a directory."""
    values: dict[str, Any] = {"path": raw_path(path), "mode": f"{mode:o}", "parents": parents}
    yield from act(b"POST", files_path(ref, "/mkdir"), repeatable=parents, **values)


def chmod(ref: str, path: PathLike, mode: int) -> Plan[None]:
    """Change a mode."""
    values: dict[str, Any] = {"path": raw_path(path), "mode": f"{mode:o}"}
    yield from act(b"POST", files_path(ref, "/chmod"), repeatable=True, **values)


def download_request(ref: str, path: PathLike) -> Request:
    """A tree as a tar stream."""
    target = f"{session_path(ref)}/tree" + query_text({"path": raw_path(path)})
    return Request(b"GET", target, timeout=5 * ANSWER_SECONDS)


def upload(ref: str, path: PathLike, data: Content, *, owner: str | None) -> Plan[TreeInfo]:
    """Unpack a tar stream into a directory."""
    target = f"{session_path(ref)}/tree" + query_text({"path": raw_path(path), "owner": owner})
    response = yield Request(b"PUT", target, (_TAR_TYPE,), data, timeout=None)
    info: TreeInfo = decode(response, TreeInfo)
    return info


class EventSource(Generic[T]):
    """A stream of server-sent events of one kind."""

    def __init__(self, target: str, kind: type[T], *, resumable: bool) -> None:
        self._target = target
        self._kind = kind
        self._resumable = resumable
        self._last: str | None = None
        self._buffer = b""
        self._done = False

    def request(self) -> Request:
        """The stream, from the last event on after a lost connection."""
        self._buffer = b""
        headers = (_SSE_ACCEPT,)
        if self._last is not None:
            return Request(
                b"GET",
                self._target,
                (*headers, (b"last-event-id", self._last.encode())),
                timeout=STREAM_SECONDS,
                repeatable=True,
            )
        return Request(b"GET", self._target, headers, timeout=STREAM_SECONDS, repeatable=True)

    def feed(self, data: bytes) -> list[T]:
        """The events that received bytes complete. Raises the error the server told."""
        found: list[T] = []
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        for event in events:
            kind, text = b"", b""
            for line in event.split(b"\n"):
                name, _, value = line.partition(b": ")
                if name == b"id":
                    self._last = value.decode()
                elif name == b"event":
                    kind = value
                elif name == b"data":
                    text = value
            if kind == b"error":
                raise from_body(parse(text, ErrorBody))
            if kind == b"end":
                self._done = True
            elif kind:
                found.append(parse(text, self._kind))
        return found

    def ended(self) -> bool:
        """A stream without an end event was cut off."""
        return self._done

    def take_up(self) -> bool:
        """Numbered events go on after the last one seen; changes of files would be missed."""
        return self._resumable


def watch_source(ref: str, path: PathLike, *, recursive: bool) -> EventSource[FileChange]:
    """Changes under a directory."""
    target = files_path(ref, "/watch")
    target += query_text({"path": raw_path(path), "recursive": recursive or None})
    return EventSource(target, FileChange, resumable=False)


def event_source(ref: str, after: int) -> EventSource[EventInfo]:
    """A session's events as they happen."""
    target = f"{session_path(ref)}/events" + query_text({"after": after or None})
    return EventSource(target, EventInfo, resumable=True)
