"""How records are shown through the API; pure conversions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sojourn.database.records import Durability, Event, Operation, SnapshotRecord
from sojourn.errors import ErrorBody
from sojourn.model import Session
from sojourn.store.base import Change
from sojourn.wire.api import (
    ChangeInfo,
    DurabilityInfo,
    EventInfo,
    OperationInfo,
    SessionInfo,
    SnapshotInfo,
)


def show(path: bytes) -> tuple[str, bytes | None]:
    """A path for people, and its exact bytes when it is not UTF-8."""
    try:
        return path.decode(), None
    except UnicodeDecodeError:
        return path.decode(errors="replace"), path


def session_info(session: Session, operation: str | None = None) -> SessionInfo:
    """A session as the API shows it."""
    return SessionInfo(
        id=session.id,
        name=session.name,
        labels=session.labels,
        template=session.template,
        env=session.env,
        limits=session.limits,
        policy=session.policy,
        driver=session.driver,
        state=str(session.state),
        epoch=session.epoch,
        head=session.head,
        parent_session=session.parent_session,
        forked_from=session.forked_from,
        idle_deadline=session.idle_deadline,
        lifetime_deadline=session.lifetime_deadline,
        cause=session.cause,
        operation=operation,
        created_at=session.created_at,
        updated_at=session.updated_at,
        network=session.network,
        node=session.holder,
    )


def snapshot_info(record: SnapshotRecord, head: str | None) -> SnapshotInfo:
    """A snapshot as the API shows it."""
    return SnapshotInfo(
        id=record.id,
        session=record.session,
        parent=record.parent,
        kind=str(record.kind),
        label=record.label,
        created_at=record.created_at,
        fingerprint=record.fingerprint,
        memory=record.has_memory,
        thinned=record.thinned,
        memory_bytes=record.memory_bytes,
        layer_bytes=record.layer_bytes,
        current=record.id == head,
        durable_at=record.durable_at,
    )


def lies_in(url: str | None, directory: Path) -> bool:
    """Whether an object store's URL, or path, means a place in a directory."""
    if url is None:
        return False
    if url.startswith("file:"):
        place = Path(unquote(urlsplit(url).path))
    elif re.match(r"(memory|s3):", url):
        return False
    else:
        place = Path(url).expanduser()
    return place.resolve().is_relative_to(directory.resolve())


def durability_info(found: Durability, now: float) -> DurabilityInfo:
    """How far a session is in the object store, as the API shows it."""
    return DurabilityInfo(
        session=found.session,
        head=found.head,
        head_durable=found.head_durable,
        waiting=found.waiting,
        lag=0.0 if found.oldest_waiting is None else max(0.0, now - found.oldest_waiting),
        durable_head_at=found.durable_head_at,
    )


def operation_info(operation: Operation, result: Any = None) -> OperationInfo:
    """An operation as the API shows it; `result` replaces a stored one that is None."""
    return OperationInfo(
        id=operation.id,
        session=operation.session,
        verb=operation.verb,
        state=str(operation.state),
        step=operation.step,
        created_at=operation.created_at,
        finished_at=operation.finished_at,
        result=operation.result if operation.result is not None else result,
        error=error_dict(operation.error) if operation.error is not None else None,
    )


def error_dict(error: ErrorBody) -> dict[str, Any]:
    """An error body as plain values."""
    return {
        "code": error.code,
        "message": error.message,
        "next_step": error.next_step,
        "details": error.details,
    }


def event_info(event: Event) -> EventInfo:
    """An event as the API shows it."""
    return EventInfo(
        seq=event.sequence,
        session=event.session,
        at=event.at,
        actor=event.actor,
        kind=event.kind,
        result=event.result or "ok",
        details=event.details,
        snapshot_before=event.before,
        snapshot_after=event.after,
        operation=event.operation,
    )


def change_info(change: Change) -> ChangeInfo:
    """A difference as the API shows it."""
    path, exact = show(change.path)
    entry = change.after or change.before
    return ChangeInfo(
        path=path,
        kind=change.kind,
        what=change.what,
        type=entry.type if entry else "file",
        size_before=change.before.size if change.before else None,
        size_after=change.after.size if change.after else None,
        path_bytes=exact,
    )
