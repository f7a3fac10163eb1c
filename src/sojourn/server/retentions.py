"""Giving up automatic snapshots as each session's policy says.

Guarantee: only what `sojourn.retention` decides is given up, never what a live session has as its
head, was forked from, or an unfinished operation goes on from; the event log names each of them in
the commit that hides them. What they hold is freed by the ordinary collection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from sojourn.database.records import SnapshotRecord
from sojourn.database.writes import AppendEvent, UpdateSnapshot, Write
from sojourn.errors import SessionNotFound, SnapshotNotFound, SojournError
from sojourn.model import Retention, Session, SessionState
from sojourn.retention import Decision, decide
from sojourn.server.context import Context
from sojourn.server.registry import ActiveSession

log = logging.getLogger(__name__)

_AT_ONCE = 500  # snapshots given up in one commit, which one event names
_PAUSE_SECONDS = 60.0  # between two looks at a session that goes on taking snapshots


def recovery_point(records: Sequence[SnapshotRecord], head: str | None) -> str | None:
    """The snapshot that a loss of the node would take a session back to: the newest durable one on
    the head's line, as far as these records show it."""
    known = {record.id: record for record in records}
    at = known.get(head) if head is not None else None
    while at is not None and at.durable_at is None:
        at = known.get(at.parent) if at.parent is not None else None
    return at.id if at is not None else None


class _Look(msgspec.Struct, frozen=True):
    """What the last look at a session found, and when there may be more to find."""

    policy: Retention | None
    head: str | None
    at: float
    again_at: float | None


class Retentions:
    """Looks at histories; what nothing can have changed in is not looked at again."""

    def __init__(self, context: Context, collect_soon: Callable[[], None]) -> None:
        self._context = context
        self._collect_soon = collect_soon
        self._looks: dict[str, _Look] = {}

    async def round(self) -> None:
        """Look at every session whose history may have something to give up."""
        database = self._context.database
        seen: set[str] = set()
        cursor: str | None = None
        while True:
            page = await database.list_sessions(
                None, limit=500, after=cursor, holder=self._context.holder
            )
            for session in page.items:
                seen.add(session.id)
                if self._is_due(session, time.time()):
                    await self._retain_logged(session)
            cursor = page.next
            if cursor is None:
                break
        self._looks = {id: look for id, look in self._looks.items() if id in seen}

    async def after_snapshot(self, active: ActiveSession) -> None:
        """Look at a session that took an automatic snapshot, though not after each of many: all
        that is new is kept for a while anyway, so nothing is missed by waiting."""
        policy = active.session.policy.retention
        last = self._looks.get(active.id)
        if policy is None:
            return
        pause = min(_PAUSE_SECONDS, policy.keep_all_for)
        if last is None or last.policy != policy or not 0 <= time.time() - last.at < pause:
            await self._retain_logged(active.session)

    def _is_due(self, session: Session, now: float) -> bool:
        if session.head is None:
            return False
        last = self._looks.get(session.id)
        if last is None or (last.policy, last.head) != (session.policy.retention, session.head):
            return True
        return last.again_at is not None and last.again_at <= now

    async def _retain_logged(self, session: Session) -> None:
        try:
            await self.retain(session)
        except SojournError as error:
            # Nothing is lost by keeping too much; the next round tries again.
            log.warning("the history of session %s is not thinned: %s", session.id, error)

    async def retain(self, session: Session) -> list[str]:
        """Give up what the session's policy does not keep; the ids of what was given up."""
        removed: list[str] = []
        now = time.time()
        while (decision := await self._decide(session, now)).remove:
            active = await self._context.registry.still(session)
            if active is None:
                return removed
            async with active.gate.closed("retention"):
                session = active.session
                if session.state is SessionState.DELETED:
                    return removed
                # Decided again in here: the history may have changed while this waited.
                ids = (await self._decide(session, now)).remove[:_AT_ONCE]
                if not await self._hide(session, ids):
                    return removed
            removed += ids
            self._collect_soon()
        self._looks[session.id] = _Look(
            session.policy.retention, session.head, now, decision.again_at
        )
        return removed

    async def _decide(self, session: Session, now: float) -> Decision:
        database = self._context.database
        policy = session.policy.retention
        if policy is None:
            return Decision([], None)
        records = await database.list_snapshots(session.id)
        decision = decide(records, [], policy, now)
        if not decision.remove:
            return decision
        # Asked for only when it matters, which is seldom.
        needed = await database.anchored_snapshots(session.id)
        for operation in await database.unfinished_operations(server=self._context.holder):
            for place in (operation.data, operation.request):
                needed.update(str(place[key]) for key in ("point", "snapshot") if place.get(key))
        return decide(records, needed, policy, now)

    async def _hide(self, session: Session, ids: list[str]) -> bool:
        if not ids:
            return False
        writes: list[Write] = [UpdateSnapshot(id, {"hidden": True}) for id in ids]
        writes.append(
            AppendEvent(
                session=session.id,
                kind="retention",
                result="ok",
                details={"removed": ids},
                before=session.head,
                after=session.head,
            )
        )
        try:
            await self._context.database.commit(writes)
        except (SnapshotNotFound, SessionNotFound):
            return False  # removed meanwhile, with what it was part of
        return True
