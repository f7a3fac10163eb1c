"""`python -m sojourn.repository.worker`: sends to the object store in a process of its own.

Guarantee: hashing, compressing and encrypting never hold up the process that serves sessions, and
take the processor only when nobody else wants it. The worker ends when its standard input does,
so none outlives the server that started it; what it was sending is taken up by the next one.

Frames both ways: four bytes of length (big-endian), then MessagePack. First comes `Start`, then
requests `[name, arguments]`, answered in order by `[result, null]` or `[null, error body]`.
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
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sojourn.errors import ObjectMissing, SojournError, StorageFull, StoreRefused, to_body
from sojourn.model.snapshots import Snapshot
from sojourn.repository import config
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.collection import collect
from sojourn.repository.copies import StoredCopies
from sojourn.repository.keys import Keyring
from sojourn.repository.repository import Repository
from sojourn.repository.session_records import SessionRecord, TenantRecord

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
LARGEST = 64 << 20
_NICE = 10
_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, frozen=True):
    """What a worker works on: a repository, and the node's store. It is given the root key that the
    server has, not the operator's secret, which may have been changed since."""

    url: str
    store: str
    repository: str
    root: bytes
    encrypted: bool

    def __repr__(self) -> str:
        return f"Start(url={self.url!r})"


class Push(msgspec.Struct, frozen=True):
    """The arguments of a push."""

    tenant: str
    snapshot: Snapshot
    parent: Snapshot | None


class Named(msgspec.Struct, frozen=True):
    """The arguments of a removal."""

    tenant: str
    id: str


def encode_frame(value: Any) -> bytes:
    """A value as a frame."""
    payload = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(payload)) + payload


def _read_frame(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > LARGEST:
        return None
    payload = source.read(length)
    return payload if len(payload) == length else None


class _Worker:
    def __init__(self, start: Start) -> None:
        self._start = start
        self._repository: Repository | None = None
        self._copies = StoredCopies(Path(start.store))
        self._calls: dict[str, tuple[type, Callable[[Any], Any]]] = {
            "push": (Push, self._push),
            "collect": (float, self._collect),
            "put_tenant": (TenantRecord, lambda record: self._opened().put_tenant(record)),
            "put_session": (SessionRecord, lambda record: self._opened().put_session(record)),
            "delete_session": (
                Named,
                lambda one: self._opened().delete_session(one.tenant, one.id),
            ),
            "delete_snapshot": (
                Named,
                lambda one: self._opened().delete_snapshot(one.tenant, one.id),
            ),
        }

    def _collect(self, grace: float) -> int:
        repository = self._opened()
        return collect(repository.backend, repository.domain, grace=grace).bytes

    def _opened(self) -> Repository:
        if self._repository is None:
            self._repository = self._open()
        return self._repository

    def _open(self) -> Repository:
        start = self._start
        backend = open_backend(start.url, create=False)
        try:
            found = config.read(backend)
            if (found.id, found.encrypted) != (start.repository, start.encrypted):
                raise StoreRefused(f"another repository stands at {start.url} now")
        except ObjectMissing as error:
            backend.close()
            raise StoreRefused(f"there is no repository at {start.url} any more") from error
        except BaseException:
            backend.close()
            raise
        return Repository(backend, found, Keyring(start.root, start.encrypted))

    def _push(self, asked: Push) -> int:
        return self._opened().push(asked.tenant, asked.snapshot, self._copies, asked.parent)

    def answer(self, frame: bytes) -> bytes:
        """Do what a frame asks for."""
        try:
            name, arguments = msgspec.msgpack.decode(frame, type=tuple[str, msgspec.Raw])
            kind, call = self._calls[name]
            return encode_frame((call(msgspec.msgpack.decode(arguments, type=kind)), None))
        except SojournError as error:
            return encode_frame((None, to_body(error)))
        except OSError as error:
            return encode_frame((None, to_body(typed(error))))
        except Exception as error:
            # A fault here is told like any other failure; the next snapshot may fare better.
            log.exception("a fault while sending")
            return encode_frame((None, to_body(SojournError(f"a fault while sending: {error!r}"))))


def typed(error: OSError) -> SojournError:
    """What a failure of this machine means to whoever asked."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no room for what is being sent: {error}")
    return SojournError(f"sending failed: {error}")


def end_with_input(source: BinaryIO, frames: Callable[[bytes], None]) -> None:
    """Pass frames on until the input ends; then end the process at once, whatever it does."""
    while (frame := _read_frame(source)) is not None:
        frames(frame)
    os._exit(0)


def main() -> None:
    """Serve until standard input ends."""
    # Ctrl-C in a terminal goes to the whole group; the server decides when its worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard input tells when the server has ended, but not to a worker that somebody stopped.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=end_with_input, args=(sys.stdin.buffer, asked.put), daemon=True).start()
    worker = _Worker(msgspec.msgpack.decode(asked.get(), type=Start))
    while True:
        sys.stdout.buffer.write(worker.answer(asked.get()))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
