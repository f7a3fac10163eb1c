"""Sessions that enter by a file.

Guarantee: all of an archive is looked at first. Then its layers and images are taken into the store
as any others, proven by their ids, and one commit makes the session and its tree. Before that
commit there is no session, and nothing refers to what was taken in: a crash or a refusal leaves
nothing. The file has no name on the disk, so it ends with this process.

What an archive says of a session (names, labels, environment, limits, policy) obeys the bounds of
requests, because anyone may have written it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

import msgspec

from sojourn import faultpoints
from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import AppendEvent, InsertSession, InsertSnapshot
from sojourn.errors import (
    ArchiveInvalid,
    InvalidRequest,
    NameTaken,
    SessionNotFound,
    StorageFull,
    TooLarge,
)
from sojourn.lifecycle import first_deadlines
from sojourn.model import Session, SessionState, Snapshot, new_id
from sojourn.repository.archives import Archive, open_archive, refusing
from sojourn.repository.backends.archive_file import ArchiveReader
from sojourn.server.base import Principal
from sojourn.server.catalog import split_reference
from sojourn.server.checks import (
    check_label,
    check_limits,
    check_map,
    check_name,
    check_place,
    check_policy,
)
from sojourn.server.context import Context
from sojourn.server.snapshots import Snapshots
from sojourn.server.threads import in_thread
from sojourn.server.views import session_info
from sojourn.store.copying import disk_errors
from sojourn.wire.api import SessionInfo

PIECE = 1 << 20
_LEFT, _LEFT_PART = 256 << 20, 50  # bytes of the disk that stay free, or this part of a small one
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Imports:
    """Makes sessions of archives."""

    def __init__(self, context: Context, snapshots: Snapshots) -> None:
        self._context = context
        self._snapshots = snapshots

    async def import_(
        self,
        who: Principal,
        chunks: AsyncIterator[bytes],
        *,
        name: str | None,
        expect: str | None,
        secret: bytes | None,
    ) -> SessionInfo:
        """Make a session of an archive that comes in pieces; it is suspended at the archive's head.
        Its name is that of the archive unless another is given.

        Raises ArchiveInvalid, NameTaken, StoreKeyInvalid, StorageFull, InvalidRequest."""
        if name is not None:
            await self._require_free(who, check_name(name))
        if expect is not None and not _DIGEST.fullmatch(expect):
            raise InvalidRequest("a digest has 64 hexadecimal digits", field="expect")
        with disk_errors("receiving an archive"):
            file = tempfile.TemporaryFile(dir=self._context.store.root, buffering=0)  # noqa: SIM115
        try:
            await receive(file, chunks, self._context.store.root)
            faultpoints.reach("import.received")
            stop = threading.Event()
            archive = await in_thread(lambda: self._open(file, expect, secret, stop), stop)
            with _forged():
                session = _session(who, archive, name)
            session = msgspec.structs.replace(session, holder=self._context.holder)
            if session.name is not None:
                await self._require_free(who, session.name)
            return await self._take(who, archive, session, stop)
        finally:
            file.close()

    async def _require_free(self, who: Principal, name: str) -> None:
        """Refuse a name that is taken before anything is done; the commit decides."""
        with contextlib.suppress(SessionNotFound):
            found = await self._context.registry.look(who.tenant, name)
            raise NameTaken(
                f"session {found.id} has the name {name!r}",
                next_step="Give another name (--name), or delete that session.",
                session=found.id,
            )

    def _open(
        self, file: IO[bytes], expect: str | None, secret: bytes | None, stop: threading.Event
    ) -> Archive:
        store = self._context.store
        with refusing():
            reader = ArchiveReader(file.fileno(), expect=expect, stop=stop)
        archive = open_archive(reader, secret, present=store.present)
        free = spare_room(store.root)
        if archive.needed > free:
            raise StorageFull(
                f"The archive needs {archive.needed} bytes on the node's disk; {free} are there"
                " for it.",
                needed=archive.needed,
                free=free,
            )
        return archive

    async def _take(
        self, who: Principal, archive: Archive, session: Session, stop: threading.Event
    ) -> SessionInfo:
        context = self._context
        ids = {one.id: new_id("snp") for one in archive.snapshots}
        notes = {note.id: note for note in archive.record.snapshots}
        session = msgspec.structs.replace(session, head=ids[session.head or ""])
        with context.store.held(archive.objects):
            await in_thread(
                lambda: context.store.take_in(archive, archive.layers, archive.images), stop
            )
            faultpoints.reach("import.take")
            rows: list[SnapshotRecord] = []
            async with context.guard.publishing():
                try:
                    for old in archive.snapshots:
                        row = await self._publish(who, session, old, ids)
                        note = notes[old.id]
                        rows.append(
                            msgspec.structs.replace(row, label=note.label, thinned=note.thinned)
                        )
                except BaseException:
                    await asyncio.shield(self._snapshots.withdraw(list(ids.values())))
                    raise
                faultpoints.reach("import.publish")
                results = await self._snapshots.refer(
                    [
                        InsertSession(session),
                        *(InsertSnapshot(row) for row in rows),
                        _event(who, archive, session),
                    ],
                    list(ids.values()),
                )
        faultpoints.reach("import.commit")
        made = results[0]
        assert isinstance(made, Session)
        context.registry.update(made)
        return session_info(made)

    async def _publish(
        self, who: Principal, session: Session, old: Snapshot, ids: dict[str, str]
    ) -> SnapshotRecord:
        new = msgspec.structs.replace(
            old,
            id=ids[old.id],
            session=session.id,
            parent=ids[old.parent] if old.parent is not None else None,
        )
        return await self._snapshots.publish(new, who.tenant)


def _event(who: Principal, archive: Archive, session: Session) -> AppendEvent:
    return AppendEvent(
        session=session.id,
        kind="imported",
        actor=who.actor,
        result="ok",
        details={
            "session": archive.record.session.id,
            "digest": archive.digest,
            "snapshots": len(archive.snapshots),
            # Who made the archive decides nothing here: what it may reach is for its new owner.
            "network": "none",
            "network_before": str(archive.record.session.network.mode),
        },
        after=session.head,
    )


def spare_room(place: Path) -> int:
    """Bytes an import may take of a disk: whoever sends without end must leave room for the
    snapshots of others."""
    usage = shutil.disk_usage(place)
    return usage.free - min(_LEFT, usage.total // _LEFT_PART)


async def receive(file: IO[bytes], chunks: AsyncIterator[bytes], place: Path) -> None:
    """Write what comes to a file on the disk of `place`, a piece at a time. Raises StorageFull."""
    held = bytearray()

    def write() -> None:
        if len(held) > spare_room(place):
            raise StorageFull("The node's disk has no room for the archive.")
        with disk_errors("receiving an archive"):
            view = memoryview(bytes(held))
            while view:
                view = view[os.write(file.fileno(), view) :]
        held.clear()

    async for chunk in chunks:
        held += chunk
        if len(held) >= PIECE:
            await in_thread(write)
    await in_thread(write)


@contextlib.contextmanager
def _forged() -> Iterator[None]:
    """Say of what no request may say that the archive is not to be taken."""
    try:
        yield
    except (InvalidRequest, TooLarge) as error:
        raise ArchiveInvalid(
            f"The archive's session cannot be one: {error.message}", **error.details
        ) from error


def _session(who: Principal, archive: Archive, name: str | None) -> Session:
    """The session to make, at the archive's own head. Raises InvalidRequest, TooLarge."""
    old = archive.record.session
    now = time.time()
    kept = name if name is not None else old.name
    if kept is not None:
        check_name(kept)
    for word in (split_reference(old.template)[0], old.driver):
        if not _WORD.fullmatch(word):
            raise InvalidRequest(f"{word!r} is no template or driver", field="template")
    for note in archive.record.snapshots:
        check_label(note.label)
    for one in archive.snapshots:
        _check_snapshot(one)
    policy = check_policy(old.policy)
    return Session(
        id=new_id("ses"),
        tenant=who.tenant,
        name=kept,
        labels=check_map("labels", old.labels, env=False),
        template=old.template,
        env=check_map("env", old.env, env=True),
        limits=check_limits(old.limits),
        policy=policy,
        driver=old.driver,
        state=SessionState.SUSPENDED,
        epoch=0,
        head=old.head,
        parent_session=None,
        forked_from=None,
        sandbox=None,
        node=None,
        idle_deadline=None,
        lifetime_deadline=first_deadlines(policy, now)[1],
        cause=None,
        created_at=now,
        updated_at=now,
    )


def _check_snapshot(one: Snapshot) -> None:
    config = one.config
    check_label(one.label)
    check_map("env", config.env, env=True)
    check_place(config.cwd or None, config.user)
    if not _WORD.fullmatch(split_reference(config.template)[0]) or not _WORD.fullmatch(
        config.hostname
    ):
        raise InvalidRequest("the template or host name cannot be one", field="config")
    if not (math.isfinite(one.created_at) and 0 <= one.created_at < 2**40):
        raise InvalidRequest("the time of a snapshot is none", field="created_at")
