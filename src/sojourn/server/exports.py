"""Sessions that leave by a file.

Guarantee: what is exported is held while it is read, so that nothing of it is collected or given
up; the archive is whole or there is an error. The file has no name on the disk, so it ends with
whoever sends it. Hashing and compressing happen in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from typing import IO

import msgspec

from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import AppendEvent
from sojourn.errors import (
    Conflict,
    ErrorBody,
    Interrupted,
    QuotaExceeded,
    SojournError,
    StorageFull,
    from_body,
)
from sojourn.model import Session, Snapshot
from sojourn.repository.archive_checks import in_order
from sojourn.repository.archive_worker import Job
from sojourn.repository.archives import Written
from sojourn.repository.keys import clean_secret
from sojourn.repository.session_records import SessionRecord, SnapshotNote
from sojourn.server.base import Principal
from sojourn.server.context import Context
from sojourn.server.imports import spare_room
from sojourn.server.requests import Requests
from sojourn.server.sender import exchange
from sojourn.server.snapshots import Snapshots
from sojourn.server.turns import Turns
from sojourn.store.copying import disk_errors
from sojourn.wire.api import ArchiveInfo, SnapshotRequest

PIECE = 1 << 20
_WAIT_SECONDS = 60.0
_AT_ONCE = 2
_KEPT = 8
"""Archives that are being made or downloaded at a time: each takes room on the node's disk."""


class Export:
    """A finished archive. Implements `sojourn.server.base.ExportedArchive`."""

    def __init__(self, file: IO[bytes], info: ArchiveInfo, closed: Callable[[], None]) -> None:
        self.info = info
        self._file = file
        self._closed = closed

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Its bytes."""
        at = 0
        while at < self.info.bytes:
            piece = await asyncio.to_thread(os.pread, self._file.fileno(), PIECE, at)
            if not piece:
                raise SojournError("the archive ended before its end")
            at += len(piece)
            yield piece

    def close(self) -> None:
        """Give its room back. Idempotent."""
        if not self._file.closed:
            self._file.close()
            self._closed()


class Exports:
    """Makes archives of sessions."""

    def __init__(
        self, context: Context, snapshots: Snapshots, turns: Turns, requests: Requests
    ) -> None:
        self._context = context
        self._snapshots = snapshots
        self._turns = turns
        self._requests = requests
        # Each compresses a whole session in a process of its own.
        self._writing = asyncio.Semaphore(_AT_ONCE)
        self._kept = 0

    async def export(
        self, who: Principal, ref: str, snapshot: str | None, secret: bytes | None
    ) -> Export:
        """An archive of one snapshot, or of the session's whole tree; of a session that has a
        sandbox its present state is taken first.

        Raises SnapshotNotFound, Conflict (there is no snapshot yet), IntegrityError, StorageFull,
        InvalidRequest (the secret), QuotaExceeded (too many are being downloaded), and what taking
        a snapshot raises."""
        if secret is not None:
            clean_secret(secret)
        if self._kept >= _KEPT:
            raise QuotaExceeded(
                f"{_KEPT} archives are being made or downloaded now",
                next_step="Wait until one of them is finished.",
            )
        self._kept += 1
        try:
            return await self._export(who, ref, snapshot, secret)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._kept -= 1

    async def _export(
        self, who: Principal, ref: str, snapshot: str | None, secret: bytes | None
    ) -> Export:
        active = await self._context.registry.find(who.tenant, ref)
        if snapshot is None and active.session.live:
            await self._take_present(who, active.id)
        await self._turns.settle(active)
        with contextlib.ExitStack() as held:
            async with self._context.guard.publishing():  # until all of it is held
                record, snapshots = await self._choose(active.session, snapshot)
                layers = {layer.id for one in snapshots for layer in one.layers}
                images = {one.memory.id for one in snapshots if one.memory is not None}
                held.enter_context(self._context.store.held(layers | images))
            await asyncio.to_thread(self._bring, layers, images)
            root = self._context.store.root
            if spare_room(root) <= 0:
                raise StorageFull("the node's disk has no room for an archive")
            with disk_errors("making room for an archive"):
                file = tempfile.TemporaryFile(dir=root)  # noqa: SIM115
            try:
                async with self._writing:
                    job = Job(file.fileno(), str(root), record, snapshots, secret)
                    written = await _write(job)
            except BaseException:
                file.close()
                raise
        head = next(one for one in snapshots if one.id == record.session.head)
        info = ArchiveInfo(
            digest=written.digest,
            bytes=written.bytes,
            session=active.id,
            snapshot=head.id,
            fingerprint=head.fingerprint,
            snapshots=len(snapshots),
            encrypted=secret is not None,
        )
        await self._note(who, session=active.session, info=info)
        return Export(file, info, self._release)

    async def _note(self, who: Principal, session: Session, info: ArchiveInfo) -> None:
        """Who took it, in the event log. A full disk does not keep anyone from leaving it."""
        with contextlib.suppress(StorageFull):
            await self._context.database.append_event(
                AppendEvent(
                    session=session.id,
                    kind="export",
                    actor=who.actor,
                    result="ok",
                    details={"digest": info.digest, "snapshots": info.snapshots},
                    before=info.snapshot,
                    after=info.snapshot,
                )
            )

    async def _take_present(self, who: Principal, session: str) -> None:
        operation = await self._requests.snapshot(who, session, SnapshotRequest(), None)
        while operation.state in ("pending", "running"):
            operation = await self._requests.wait(who, operation.id, _WAIT_SECONDS)
        if operation.error is not None:
            raise from_body(msgspec.convert(operation.error, ErrorBody))

    def _bring(self, layers: set[str], images: set[str]) -> None:
        """Have all of it on this disk: something may be in the object store alone."""
        for layer in layers:
            self._context.store.layer_path(layer)
        for image in images:
            self._context.store.image_path(image)

    async def _choose(
        self, session: Session, snapshot: str | None
    ) -> tuple[SessionRecord, list[Snapshot]]:
        """The record to export, and its snapshots, parents before children."""
        if snapshot is not None:
            rows = [await self._snapshots.resolve(session, snapshot)]
        else:
            rows = await self._snapshots.tree(session)
        if not rows:
            raise Conflict(
                f"session {session.id} has no snapshot yet", next_step="Take one, then export."
            )
        chosen = {row.id for row in rows}
        found: dict[str, Snapshot] = {}
        for row in rows:
            manifest = await self._snapshots.read(row.id)
            parent = await self._parent(row, chosen)
            found[row.id] = msgspec.structs.replace(manifest, parent=parent)
        snapshots = in_order(found)
        head = session.head if session.head in chosen else snapshots[-1].id
        record = SessionRecord(
            session=msgspec.structs.replace(session, head=head),
            snapshots=[
                SnapshotNote(id=row.id, label=row.label, thinned=row.thinned) for row in rows
            ],
            written_at=session.updated_at,
            owner="",
        )
        return record, snapshots

    async def _parent(self, row: SnapshotRecord, chosen: set[str]) -> str | None:
        """The nearest snapshot it comes from that goes along."""
        parent = row.parent
        while parent is not None and parent not in chosen:
            before = await self._context.database.get_snapshot(None, parent, hidden=True)
            parent = before.parent
        return parent


async def _write(job: Job) -> Written:
    """Write the archive in a process of its own, which ends when this is given up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sojourn.repository.archive_worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=(job.descriptor,),
    )
    try:
        frame = await exchange(process, job)
    except (OSError, EOFError) as error:
        raise Interrupted(
            "the process that writes the archive ended early",
            next_step="Export again; the server's log may tell more.",
        ) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    written, failure = msgspec.msgpack.decode(frame, type=tuple[Written | None, ErrorBody | None])
    if failure is not None or written is None:
        raise from_body(failure or ErrorBody("internal", "no archive was written", ""))
    return written
