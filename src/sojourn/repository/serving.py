"""What the processes share that work for a server: frames, answers, and how they begin and end.

Guarantee: such a process ends when its standard input does, and the kernel ends it with its server
when it cannot look, so none outlives the server that started it. Whatever goes wrong in it is
answered, and never ends it without a word.

A frame is four bytes of length (big-endian), then MessagePack. Answers are `[result, null]` or
`[null, error body]`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from sojourn.errors import SojournError, StorageFull, to_body
from sojourn.telemetry import logs

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
LARGEST = 64 << 20
_PR_SET_PDEATHSIG = 1


def encode_frame(value: Any) -> bytes:
    """A value as a frame."""
    payload = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(payload)) + payload


def answered(doing: str, call: Callable[[], Any]) -> bytes:
    """The answer to a request: what the call gives, or what went wrong while `doing` it."""
    try:
        return encode_frame((call(), None))
    except SojournError as error:
        return encode_frame((None, to_body(error)))
    except OSError as error:
        return encode_frame((None, to_body(_typed(error))))
    except Exception as error:
        # A fault here is told like any other failure; the next request may fare better.
        log.exception("a fault while %s", doing)
        return encode_frame((None, to_body(SojournError(f"a fault while {doing}: {error!r}"))))


def begin(nice: int, level: int) -> queue.SimpleQueue[bytes]:
    """Make this process a worker; answers where the frames of its standard input arrive."""
    # Ctrl-C in a terminal goes to the whole group; the server decides when its worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard input tells when the server has ended, but not to a worker that somebody stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    logs.set_up_helper(logging.getLevelName(level))
    with contextlib.suppress(OSError):
        os.nice(nice)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(
        target=_end_with_input, args=(sys.stdin.buffer, asked.put), daemon=True
    ).start()
    return asked


def reply(frame: bytes) -> None:
    """Send an answer."""
    sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()


def _typed(error: OSError) -> SojournError:
    """What a failure of this machine means to whoever asked."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room for what is being sent: {error}")
    return SojournError(f"sending failed: {error}")


def _end_with_input(source: BinaryIO, frames: Callable[[bytes], None]) -> None:
    """Pass frames on until the input ends; then end the process at once, whatever it does."""
    while (frame := _read_frame(source)) is not None:
        frames(frame)
    os._exit(0)


def _read_frame(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > LARGEST:
        return None
    payload = source.read(length)
    return payload if len(payload) == length else None
