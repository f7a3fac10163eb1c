"""The byte frames between node and supervisor; docs/formats/wire.md is their specification.

Guarantee: decoding never reads past a frame, never allocates more than the frame holds, and turns
whatever else it meets into FrameError. The supervisor is inside the sandbox, so nothing it sends
is trusted.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable

from sojourn.wire.guest import (
    GuestActivity,
    OpenUnlinked,
    ProcessSpec,
    ProcessState,
    Stat,
    WatchEvent,
)

MAGIC = 0x4E524A53
VERSION = 1
MAX_BODY = 1 << 20
PIECE = 256 << 10
MORE = 0x8000
HEADER = struct.Struct("<IHHQQ")

_U32 = struct.Struct("<I")
_START = struct.Struct("<IBQQHH")
_STATE = struct.Struct("<QIBIQQQQQQ")
_STAT = struct.Struct("<BHIIQqQIQ")


class FrameError(ValueError):
    """The bytes are not a frame of this protocol."""


class Op(enum.IntEnum):
    """What a frame asks for or answers."""

    HELLO = 1
    ATTACH = 2
    DETACH = 3
    ACK = 4
    CANCEL = 5
    INFO = 6
    START = 16
    RUN = 17
    WAIT = 18
    OUTPUT = 19
    WRITE = 20
    CLOSE_STDIN = 21
    SIGNAL = 22
    RESIZE = 23
    PROCESSES = 24
    FORGET = 25
    PROCESS = 26
    STAT = 32
    LIST = 33
    READ = 34
    WRITE_FILE = 35
    WRITE_BEGIN = 36
    WRITE_DATA = 37
    WRITE_END = 38
    WRITE_ABORT = 39
    MKDIR = 40
    REMOVE = 41
    MOVE = 42
    CHMOD = 43
    CHOWN = 44
    UTIME = 45
    SYMLINK = 46
    LINK = 47
    MKNOD = 48
    WATCH = 49
    WATCH_READ = 50
    WATCH_END = 51
    ACTIVITY = 64
    UNLINKED = 65
    SYNC = 66
    REFRESH = 67
    NETWORK = 68
    DIAL = 69


class Feature(enum.IntFlag):
    """What a supervisor can do beyond what all can; one in an older memory image has none."""

    TUNNELS = 1  # NETWORK and DIAL, and tunnels that are parked around a freeze
    TRANSPARENT = 2  # connections to any address are taken, not only those to the proxy


class Stage(enum.IntEnum):
    """Where a request failed."""

    NONE = 0
    USER = 1
    CWD = 2
    EXEC = 3
    SPAWN = 4
    PTY = 5


_STDIN = {"null": 0, "pipe": 1, "inline": 2}
_TYPES = {
    ord("f"): "file",
    ord("d"): "dir",
    ord("l"): "symlink",
    ord("p"): "fifo",
    ord("s"): "socket",
    ord("c"): "char",
    ord("b"): "block",
}
TYPE_LETTERS = {name: letter for letter, name in _TYPES.items()}
_EVENTS = {
    ord("c"): "created",
    ord("m"): "modified",
    ord("d"): "removed",
    ord("f"): "renamed_from",
    ord("t"): "renamed_to",
    ord("a"): "attributes",
    ord("o"): "overflow",
}


def blob(data: bytes) -> bytes:
    """Raw bytes as a field."""
    return _U32.pack(len(data)) + data


def text(data: bytes) -> bytes:
    """A string without zero bytes as a field. Raises FrameError."""
    if b"\0" in data:
        raise FrameError("a path, an argument or a name holds a zero byte")
    return _U32.pack(len(data)) + data + b"\0"


def texts(items: Iterable[bytes]) -> bytes:
    """A list of strings as a field."""
    fields = [text(item) for item in items]
    return _U32.pack(len(fields)) + b"".join(fields)


def frame(op: int, identifier: int, body: bytes, *, status: int = 0, ack: int = 0) -> bytes:
    """A whole frame. Raises FrameError when the body is over the limit."""
    if len(body) > MAX_BODY:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}")
    return HEADER.pack(len(body), op, status, identifier, ack) + body


class Reader:
    """Takes fields off a frame's body, in order, within its bounds."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, shape: struct.Struct) -> tuple[int, ...]:
        """Fixed numbers."""
        at = self._at
        if at + shape.size > len(self._data):
            raise FrameError("a frame ends within a field")
        self._at = at + shape.size
        return shape.unpack_from(self._data, at)

    def u8(self) -> int:
        """One byte."""
        if self._at >= len(self._data):
            raise FrameError("a frame ends within a field")
        self._at += 1
        return self._data[self._at - 1]

    def u32(self) -> int:
        """A 32-bit number."""
        return self.take(_U32)[0]

    def u64(self) -> int:
        """A 64-bit number."""
        return self.take(_U64)[0]

    def blob(self) -> bytes:
        """Raw bytes."""
        length = self.u32()
        at = self._at
        if at + length > len(self._data):
            raise FrameError("a frame ends within a field")
        self._at = at + length
        return self._data[at : at + length]

    def text(self) -> bytes:
        """A string without zero bytes."""
        found = self.blob()
        if self.u8() != 0 or b"\0" in found:
            raise FrameError("a string is not ended by its zero byte")
        return found

    def texts(self) -> list[bytes]:
        """A list of strings."""
        count = self.u32()
        if count > (len(self._data) - self._at) // 5:
            raise FrameError("a list is longer than its frame")
        return [self.text() for _ in range(count)]

    @property
    def ended(self) -> bool:
        """Whether all fields are taken."""
        return self._at == len(self._data)

    def end(self) -> None:
        """Nothing may follow."""
        if self._at != len(self._data):
            raise FrameError("a frame holds more than its fields")


_U64 = struct.Struct("<Q")
_PAIR = struct.Struct("<QQ")


class Hello:
    """What the supervisor says of itself when it connects."""

    __slots__ = ("boot", "features", "max_body", "shell", "version")

    def __init__(self, reader: Reader) -> None:
        magic, self.version, self.max_body = reader.take(_HELLO)
        if magic != MAGIC:
            raise FrameError("the peer is no supervisor")
        self.boot = reader.blob()
        self.shell = reader.text()
        # Supervisors of before this field live on in memory images.
        self.features = Feature(0 if reader.ended else reader.u32())
        reader.end()


_HELLO = struct.Struct("<IHI")


def start_body(spec: ProcessSpec, *, lossless: bool | None = None) -> bytes:
    """The body of START and RUN."""
    for name in spec.env:
        if not name or b"=" in name:
            raise FrameError(f"{name!r} is no name for an environment variable")
    rows, columns = spec.pty if spec.pty is not None else (0, 0)
    flags = (
        (1 if (spec.lossless if lossless is None else lossless) else 0)
        | (2 if spec.pty is not None else 0)
        | (4 if spec.cwd is not None else 0)
        | (8 if spec.user is not None else 0)
    )
    timeout = 0 if spec.timeout is None else max(1, min(int(spec.timeout * 1e9), 1 << 62))
    try:
        fixed = _START.pack(flags, _STDIN[spec.stdin], timeout, spec.keep, rows, columns)
    except (KeyError, struct.error) as error:
        raise FrameError(f"a field of the command is out of range: {error}") from error
    return b"".join(
        (
            fixed,
            text(spec.tag.encode()),
            text((spec.user or "").encode()),
            text(spec.cwd or b""),
            texts(spec.argv),
            texts([name + b"=" + value for name, value in spec.env.items()]),
            blob(spec.input if spec.stdin == "inline" else b""),
        )
    )


def read_process(reader: Reader) -> ProcessState:
    """The state of a process."""
    (
        identifier,
        pid,
        flags,
        code,
        started,
        ended,
        out_first,
        out_next,
        err_first,
        err_next,
    ) = reader.take(_STATE)
    reason = reader.text()
    tag = reader.text()
    argv = reader.texts()
    return ProcessState(
        id=identifier,
        pid=pid,
        argv=argv,
        tag=tag.decode(errors="replace"),
        pty=bool(flags & 2),
        started_ns=started,
        ended_ns=None if flags & 1 else ended,
        exit_code=code if flags & 8 else None,
        signal=code if flags & 16 else None,
        timed_out=bool(flags & 4),
        reason=reason.decode(errors="replace") if flags & 32 else None,
        out=(out_first, out_next),
        err=(err_first, err_next),
    )


def read_piece(reader: Reader) -> tuple[int, bytes]:
    """An offset and the bytes there."""
    return reader.u64(), reader.blob()


def read_stat(reader: Reader, path: bytes) -> Stat:
    """The status of the file at `path`."""
    kind, mode, uid, gid, size, mtime, inode, nlink, rdev = reader.take(_STAT)
    target = reader.text()
    name = _TYPES.get(kind)
    if name is None:
        raise FrameError("an unknown type of file")
    return Stat(
        path=path,
        type=name,
        mode=mode,
        uid=uid,
        gid=gid,
        size=size,
        mtime_ns=mtime,
        inode=inode,
        nlink=nlink,
        rdev=rdev,
        target=target if name == "symlink" else None,
    )


def read_activity(reader: Reader) -> GuestActivity:
    """What happened inside."""
    started, ended, alive, known, total = reader.take(_ACTIVITY)
    return GuestActivity(started, ended, alive, total if known else None)


_ACTIVITY = struct.Struct("<QQIBQ")


def read_unlinked(reader: Reader) -> list[OpenUnlinked]:
    """Open files without a name."""
    found = []
    for _ in range(reader.u32()):
        pid, fd = reader.take(_TWO)
        path = reader.text()
        descriptor = None if fd == _NO_DESCRIPTOR else fd
        found.append(OpenUnlinked(pid, descriptor, path, reader.text()))
    return found


_TWO = struct.Struct("<II")
_NO_DESCRIPTOR = 2**32 - 1


def read_events(reader: Reader) -> tuple[int, list[WatchEvent]]:
    """The number of the first event, and the events."""
    first = reader.u64()
    events = []
    for _ in range(reader.u32()):
        kind = _EVENTS.get(reader.u8())
        is_dir = bool(reader.u8())
        path = reader.text()
        if kind is None:
            raise FrameError("an unknown kind of event")
        events.append(WatchEvent(kind, path, is_dir))
    return first, events


def pair(first: int, second: int) -> bytes:
    """Two 64-bit numbers."""
    return _PAIR.pack(first, second)


def number(value: int) -> bytes:
    """One 64-bit number."""
    return _U64.pack(value)
