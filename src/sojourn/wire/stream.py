"""Frames of a command's output on the way from the server to a client.

Guarantee: what was written arrives byte for byte, each piece with its stream and its offset, and
a stream that ended well ends with an `end` or an `error` frame; anything else was cut off. That is
how a client tells a finished command from a lost connection, and where to attach again.

    frame   = type u8 | length u32 big-endian | payload
    started = JSON Started           stdout, stderr = offset u64 big-endian | bytes
    end     = JSON Ended             heartbeat      = empty
    error   = JSON ErrorBody

docs/formats/stream.md describes the format for other languages.
"""

from __future__ import annotations

import enum
import struct

import msgspec

from sojourn.errors import ErrorBody, SojournError, from_body, to_body
from sojourn.wire.guest import Output

MEDIA_TYPE = "application/vnd.sojourn.stream"

MAX_PAYLOAD = 16 * 1024 * 1024
"""A longer frame is refused by readers, so that a broken peer cannot make them hold gigabytes."""

_HEADER = struct.Struct(">BI")
_OUTPUT_HEADER = struct.Struct(">BIQ")
_OFFSET = struct.Struct(">Q")


class FrameType(enum.IntEnum):
    """What a frame holds. Readers skip types they do not know."""

    STARTED = 1
    STDOUT = 2
    STDERR = 3
    HEARTBEAT = 4
    END = 5
    ERROR = 6


class Started(msgspec.Struct, frozen=True):
    """The command runs: `process` is its id in the API, `pid` its number inside."""

    process: int
    pid: int


class Ended(msgspec.Struct, frozen=True):
    """How the command ended: `exit_code`, or 128 + `signal`. `running` is True, and `exit_code`
    None, when a stream that does not follow came to its end before the command did."""

    process: int
    exit_code: int | None
    signal: int | None
    timed_out: bool
    reason: str | None
    duration: float
    running: bool = False


Frame = Started | Output | Ended | SojournError
"""What a decoded frame stands for (heartbeats stand for nothing)."""

_json = msgspec.json.Encoder()
_started = msgspec.json.Decoder(Started)
_ended = msgspec.json.Decoder(Ended)
_error = msgspec.json.Decoder(ErrorBody)

HEARTBEAT = _HEADER.pack(FrameType.HEARTBEAT, 0)


def encode_started(value: Started) -> bytes:
    """A `started` frame."""
    return _json_frame(FrameType.STARTED, value)


def encode_output(piece: Output) -> bytes:
    """A `stdout` or `stderr` frame; the piece is at most MAX_PAYLOAD - 8 bytes long."""
    return _OUTPUT_HEADER.pack(piece.stream + 1, len(piece.data) + 8, piece.offset) + piece.data


def encode_ended(value: Ended) -> bytes:
    """An `end` frame."""
    return _json_frame(FrameType.END, value)


def encode_error(error: SojournError) -> bytes:
    """An `error` frame."""
    return _json_frame(FrameType.ERROR, to_body(error))


def _json_frame(kind: FrameType, value: msgspec.Struct) -> bytes:
    payload = _json.encode(value)
    return _HEADER.pack(kind, len(payload)) + payload


class FrameDecoder:
    """Turns received bytes, cut anywhere, into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames completed by `data`. Raises SojournError for a malformed stream."""
        buffer = self._rest + data if self._rest else data
        frames: list[Frame] = []
        at, size = 0, len(buffer)
        while size - at >= 5:
            kind, length = _HEADER.unpack_from(buffer, at)
            if length > MAX_PAYLOAD:
                raise SojournError(f"the server sent a frame of {length} bytes")
            end = at + 5 + length
            if end > size:
                break
            if kind == FrameType.STDOUT or kind == FrameType.STDERR:
                if length < 8:
                    raise SojournError("the server sent an output frame without an offset")
                (offset,) = _OFFSET.unpack_from(buffer, at + 5)
                frames.append(Output(kind - 1, offset, buffer[at + 13 : end]))
            elif kind != FrameType.HEARTBEAT:
                frame = _decode_json(kind, buffer[at + 5 : end])
                if frame is not None:
                    frames.append(frame)
            at = end
        self._rest = buffer[at:]
        return frames


def _decode_json(kind: int, payload: bytes) -> Started | Ended | SojournError | None:
    try:
        if kind == FrameType.STARTED:
            return _started.decode(payload)
        if kind == FrameType.END:
            return _ended.decode(payload)
        if kind == FrameType.ERROR:
            return from_body(_error.decode(payload))
    except msgspec.MsgspecError as error:
        raise SojournError(f"the server sent a malformed frame of type {kind}: {error}") from error
    return None
