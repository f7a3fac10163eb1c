"""`python -m sojourn.repository.worker`: sends to the object store in a process of its own.

Guarantee: hashing, compressing and encrypting never hold up the process that serves sessions, and
take the processor only when nobody else wants it. The worker ends when its standard input does,
so none outlives the server that started it; what it was sending is taken up by the next one.

Frames are those of `serving`: first comes `Start`, then requests `[name, arguments]`, answered in
order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sojourn.errors import ObjectMissing, StoreRefused
from sojourn.model.snapshots import Snapshot
from sojourn.repository import config
from sojourn.repository.backends.opening import open_backend
from sojourn.repository.collection import collect
from sojourn.repository.copies import StoredCopies
from sojourn.repository.keys import Keyring
from sojourn.repository.repository import Repository
from sojourn.repository.serving import answered, begin, reply
from sojourn.repository.session_records import SessionRecord, TenantRecord

_NICE = 10


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


class Replace(msgspec.Struct, frozen=True):
    """The arguments of a replacement."""

    record: SessionRecord
    version: str | None


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
            "replace_session": (
                Replace,
                lambda one: self._opened().replace_session(one.record, one.version),
            ),
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

        def call() -> Any:
            name, arguments = msgspec.msgpack.decode(frame, type=tuple[str, msgspec.Raw])
            kind, work = self._calls[name]
            return work(msgspec.msgpack.decode(arguments, type=kind))

        return answered("sending", call)


def main() -> None:
    """Serve until standard input ends."""
    asked = begin(_NICE, logging.INFO)
    worker = _Worker(msgspec.msgpack.decode(asked.get(), type=Start))
    while True:
        reply(worker.answer(asked.get()))


if __name__ == "__main__":
    main()
