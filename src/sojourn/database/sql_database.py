"""The database over an engine that speaks SQL.

Guarantee: what `sojourn.database.base` promises, whichever engine is below: this is the only
implementation, so that what is decided, remembered and woken is the same for all of them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

from sojourn.database import writes
from sojourn.database.accounts import Accounts
from sojourn.database.apply import apply
from sojourn.database.begin import Beginning, begin
from sojourn.database.deadlines import Deadlines
from sojourn.database.durability import DurabilityRows
from sojourn.database.effects import EffectRows
from sojourn.database.engine import Engine, Statements, touched
from sojourn.database.measured import MeasuredWriter
from sojourn.database.nodes import NodeRows
from sojourn.database.notices import Notices
from sojourn.database.records import (
    Event,
    Operation,
    Pruned,
    References,
    SessionPage,
    SnapshotRecord,
)
from sojourn.database.rows import (
    EVENTS,
    OPERATIONS,
    SESSIONS,
    SNAPSHOTS,
    decode_names,
    encode_json,
    parents_first,
)
from sojourn.database.secrets import SecretRows
from sojourn.errors import (
    ErrorBody,
    InvalidRequest,
    OperationNotFound,
    SessionNotFound,
    SnapshotNotFound,
    TemplateNotFound,
)
from sojourn.model.ids import new_id
from sojourn.model.nodes import Fence
from sojourn.model.sessions import Session, SessionKind, SessionState

_LIVE = tuple(state for state in SessionState if state is not SessionState.DELETED)
_POLL = 5.0  # seconds; only another process's events come without a notice
_PAGE = 1000
_MANY = 100_000  # sessions; so many are not counted anew for each question
_COUNT_SECONDS = 10.0
_PRUNED = 2000  # rows in one transaction
_MOVES = 32  # deadlines moved in one transaction


class SqlDatabase(Accounts, DurabilityRows, SecretRows, EffectRows, NodeRows):
    """See `sojourn.database.base.Database`."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writer = MeasuredWriter(engine.writer)
        self._reader = engine.reader
        self._engine = engine
        self._notices = Notices()
        self._deadlines = Deadlines(loop, self._write_deadlines)
        self._counts: dict[
            tuple[str | None, str | None], tuple[float, dict[SessionState, int]]
        ] = {}
        self._closed = False
        self._listening = False

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self._deadlines.close()
        finally:
            self._closed = True
            if self._engine.signals is not None:
                await self._engine.signals.close()
            # Whoever wakes by this finds the reader closed: it says so before it waits.
            self._notices.publish_all()
            await self._reader.close()
            await self._writer.close()

    def fence(self, fence: Fence) -> None:
        self._writer.fences.set(fence)

    async def own(self) -> None:
        if self._engine.signals is not None:
            await self._engine.signals.own()

    def tell_node(self, node: str, session: str) -> None:
        if self._engine.signals is not None and not self._closed:
            self._engine.signals.tell_node(node, session)

    def hear_node(self, node: str, heard: Callable[[str | None], None]) -> None:
        if self._engine.signals is not None and not self._closed:
            self._engine.signals.hear_node(node, heard)

    # -- changes ----------------------------------------------------------------------------
    async def commit(self, items: Sequence[writes.Write], *, durable: bool = True) -> list[Any]:
        items = tuple(items)
        grown = _sessions_with_events(items)
        taken = self._deadlines.take(_sessions_with_deadlines(items))
        try:
            result: list[Any] = await self._writer.submit(
                lambda statements: apply(statements, items),
                durable=durable,
                touches=touched(items),
                urgent=any(_is_urgent(item) for item in items),
                then=(lambda _: self._tell(grown)) if grown else None,
            )
        except BaseException:
            self._deadlines.restore(taken)
            raise
        return result

    async def _one(self, item: writes.Write, *, durable: bool = True) -> Any:
        return (await self.commit([item], durable=durable))[0]

    # -- sessions ---------------------------------------------------------------------------
    async def get_session(self, tenant: str | None, id_or_name: str) -> Session:
        parameters = {"tenant": tenant, "key": id_or_name}
        rows = await self._reader.lookup("find_session", parameters)
        if not rows and tenant is not None:
            rows = await self._reader.lookup("find_session_by_name", parameters)
        elif not rows:
            rows = await self._reader.lookup(
                "find_sessions_by_name_of_any_tenant", {"key": id_or_name}
            )
        if not rows:
            raise SessionNotFound(f"session {id_or_name!r} does not exist", session=id_or_name)
        if len(rows) > 1:
            raise SessionNotFound(
                f"several tenants have a session named {id_or_name!r}",
                next_step="Give the session's id.",
                session=id_or_name,
            )
        return self._deadlines.seen(SESSIONS.read(rows[0]))

    async def get_template(self, tenant: str, name: str) -> Session:
        rows = await self._reader.lookup("find_template", {"tenant": tenant, "key": name})
        if not rows:
            raise TemplateNotFound(f"there is no template {name!r}", template=name)
        return SESSIONS.read(rows[0])

    async def list_sessions(
        self,
        tenant: str | None,
        *,
        states: Collection[SessionState] | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 100,
        after: str | None = None,
        kind: SessionKind | None = SessionKind.SESSION,
        holder: str | None = None,
    ) -> SessionPage:
        if limit < 1:
            raise InvalidRequest("limit must be at least 1")
        after_time, after_id = (None, None) if after is None else _read_cursor(after)
        rows = await self._reader.select(
            "list_labelled_sessions" if labels else "list_sessions",
            {
                "tenant": tenant,
                "states": encode_json([str(state) for state in states or _LIVE]),
                "labels": encode_json(dict(labels or {})),
                "kind": None if kind is None else str(kind),
                "holder": holder,
                "after_time": after_time,
                "after_id": after_id,
                "limit": limit + 1,
            },
        )
        found = [self._deadlines.seen(SESSIONS.read(row)) for row in rows[:limit]]
        return SessionPage(found, cursor_of(found[-1]) if len(rows) > limit else None)

    async def count_sessions(
        self, tenant: str | None = None, *, holder: str | None = None
    ) -> dict[SessionState, int]:
        until, known = self._counts.get((tenant, holder), (0.0, {}))
        if self._loop.time() < until:
            return dict(known)
        rows = await self._reader.select("count_sessions", {"tenant": tenant, "holder": holder})
        found = dict.fromkeys(SessionState, 0) | {SessionState(state): n for state, n in rows}
        self._counts.pop((tenant, holder), None)
        if sum(found.values()) >= _MANY:
            self._counts[tenant, holder] = (self._loop.time() + _COUNT_SECONDS, found)
        return dict(found)

    # -- deadlines --------------------------------------------------------------------------
    def touch_idle(self, session: str, deadline: float) -> None:
        if self._closed:
            raise self._engine.closed()
        self._deadlines.touch(session, deadline)

    async def _write_deadlines(self, moves: Mapping[str, float]) -> None:
        # A deadline that is set on purpose comes before or after these, as it was asked for: all
        # are submitted at once, and name their sessions. In one order, so that two writers never
        # wait for each other, and a few at a time, since other changes of them wait meanwhile.
        ids = sorted(moves)
        parts = [ids[start : start + _MOVES] for start in range(0, len(ids), _MOVES)]
        await asyncio.gather(*[self._move({id: moves[id] for id in part}) for part in parts])

    def _move(self, moves: Mapping[str, float]) -> asyncio.Future[None]:
        parameters = [{"id": id, "deadline": deadline} for id, deadline in moves.items()]

        def work(statements: Statements) -> None:
            statements.many("touch_idle", parameters)

        return self._writer.submit(work, durable=False, touches=touched((), sessions=moves))

    async def due_sessions(
        self, now: float, *, limit: int = 100, holder: str | None = None
    ) -> list[Session]:
        await self._deadlines.flush()
        parameters = {"now": now, "limit": limit, "holder": holder}
        rows = await self._reader.select("due_sessions", parameters)
        found = [self._deadlines.seen(SESSIONS.read(row)) for row in rows]
        # A session touched while this was read is not idle any more.
        return [session for session in found if _is_due(session, now)]

    # -- snapshots --------------------------------------------------------------------------
    async def get_snapshot(
        self, tenant: str | None, id: str, *, hidden: bool = False
    ) -> SnapshotRecord:
        parameters = {"tenant": tenant, "id": id, "hidden": hidden}
        rows = await self._reader.lookup("find_snapshot", parameters)
        if not rows:
            raise SnapshotNotFound(f"snapshot {id} does not exist", snapshot=id)
        return SNAPSHOTS.read(rows[0])

    async def list_snapshots(self, session: str) -> list[SnapshotRecord]:
        rows = await self._reader.select("list_snapshots", {"session": session})
        return parents_first([SNAPSHOTS.read(row) for row in rows])

    async def update_snapshot(self, id: str, **changes: Any) -> SnapshotRecord:
        updated: SnapshotRecord = await self._one(writes.UpdateSnapshot(id, changes))
        return updated

    async def delete_snapshot(self, id: str) -> bool:
        return bool(await self._one(writes.DeleteSnapshot(id)))

    async def removable_snapshots(self, *, holder: str | None = None) -> list[SnapshotRecord]:
        rows = await self._reader.select("removable_snapshots", {"holder": holder})
        return [SNAPSHOTS.read(row) for row in rows]

    async def anchored_snapshots(self, session: str) -> set[str]:
        rows = await self._reader.select("anchored_snapshots", {"session": session})
        return {row[0] for row in rows}

    async def references(self, *, holder: str | None = None) -> References:
        query = "references" if holder is None else "references_held"
        parameters = None if holder is None else {"holder": holder}

        def work(statements: Statements) -> References:
            layers: set[str] = set()
            images: set[str] = set()
            # One statement, so that both are of one instant.
            for text, image in statements.stream(query, parameters):
                layers.update(decode_names(text))
                if image is not None:
                    images.add(image)
            return References(layers, images)

        return await self._reader.call(work)

    # -- operations -------------------------------------------------------------------------
    async def begin(
        self,
        *,
        tenant: str,
        session: str,
        verb: str,
        request: dict[str, Any],
        server: str,
        id: str | None = None,
        key: str | None = None,
        exclusive: bool = True,
        supersede: bool = False,
        creates: bool = False,
        also: Sequence[writes.Write] = (),
        holder: str | None = None,
    ) -> tuple[Operation, bool]:
        items = tuple(also)
        asked = Beginning(
            id=id or new_id("opr"),
            tenant=tenant,
            session=session,
            verb=verb,
            request=request,
            server=server,
            key=key,
            exclusive=exclusive,
            supersede=supersede,
            creates=creates,
            also=items,
            holder=holder,
        )
        grown = _sessions_with_events(items)

        def begun(result: tuple[Operation, bool]) -> None:
            if result[1]:
                self._tell(grown)

        taken = self._deadlines.take(_sessions_with_deadlines(items))
        new = False
        try:
            operation, new = await self._writer.submit(
                lambda statements: begin(statements, asked),
                durable=True,
                touches=touched(
                    items,
                    sessions=[session],
                    keys=[] if key is None else [f"{tenant} {key}"],
                ),
                urgent=supersede,
                then=begun,
            )
        finally:
            if not new:
                self._deadlines.restore(taken)
        return operation, new

    async def set_step(
        self, operation: str, step: str, data: dict[str, Any] | None = None
    ) -> Operation:
        stored: Operation = await self._one(writes.SetStep(operation, step, data or {}))
        return stored

    async def finish(
        self, operation: str, result: Any = None, *, error: ErrorBody | None = None
    ) -> Operation:
        stored: Operation = await self._one(writes.FinishOperation(operation, result, error))
        return stored

    async def get_operation(self, tenant: str | None, id: str) -> Operation:
        rows = await self._reader.lookup("find_operation", {"tenant": tenant, "id": id})
        if not rows:
            raise OperationNotFound(f"operation {id} does not exist", operation=id)
        return OPERATIONS.read(rows[0])

    async def keyed_operation(self, tenant: str, key: str) -> Operation | None:
        parameters = {"tenant": tenant, "key": key, "now": time.time()}
        rows = await self._reader.lookup("keyed_operation", parameters)
        return OPERATIONS.read(rows[0]) if rows else None

    async def claim(self, server: str, *, before: float, limit: int = 100) -> list[Operation]:
        parameters = {"server": server, "before": before, "now": time.time(), "limit": limit}

        def work(statements: Statements) -> list[Operation]:
            rows = statements.run("claim_operations", parameters)
            found = [OPERATIONS.read(row) for row in rows]
            return sorted(found, key=lambda one: (one.created_at, one.id))

        return await self._writer.submit(work, durable=True)

    async def unfinished_operations(self, *, server: str | None = None) -> list[Operation]:
        rows = await self._reader.select("unfinished_operations", {"server": server})
        return [OPERATIONS.read(row) for row in rows]

    # -- events -----------------------------------------------------------------------------
    def append_event(
        self, event: writes.AppendEvent, *, durable: bool = False
    ) -> asyncio.Future[int]:
        grown = (event.session,)
        return self._writer.submit(
            lambda statements: int(apply(statements, (event,))[0]),
            durable=durable,
            touches=touched((event,)),
            then=lambda _: self._tell(grown),
        )

    async def list_events(
        self, session: str, *, after: int = 0, limit: int = _PAGE, kinds: Collection[str] = ()
    ) -> list[Event]:
        parameters = {
            "session": session,
            "after": after,
            "kinds": encode_json(sorted(kinds)) if kinds else None,
            "limit": limit,
        }
        rows = await self._reader.select("list_events", parameters)
        return [EVENTS.read(row) for row in rows]

    def _tell(self, grown: Collection[str]) -> None:
        self._notices.publish(grown)
        if self._engine.signals is not None and not self._closed:
            self._engine.signals.announce(grown)

    def _hear(self, grown: Collection[str] | None) -> None:
        if grown is None:
            self._notices.publish_all()
        else:
            self._notices.publish(grown)

    async def follow_events(self, session: str, *, after: int = 0) -> AsyncIterator[Event]:
        if self._engine.signals is not None and not self._listening:
            self._listening = True
            self._engine.signals.listen(self._hear)
        with self._notices.subscribe(session) as grown:
            while True:
                grown.clear()
                events = await self.list_events(session, after=after)
                for event in events:
                    yield event
                    after = event.sequence
                if len(events) < _PAGE:
                    try:
                        async with asyncio.timeout(_POLL * random.uniform(0.8, 1.2)):
                            await grown.wait()
                    except TimeoutError:
                        continue

    # -- retention ------------------------------------------------------------------------------
    async def prune(
        self, now: float, *, operations_after: float = 7 * 86400.0, sessions_after: float = 86400.0
    ) -> Pruned:
        keys = await self._prune("prune_keys", {"now": now})
        operations = await self._prune("prune_operations", {"before": now - operations_after})
        ended = {"before": now - sessions_after, "now": now}
        sessions = await self._prune("prune_sessions", ended)
        return Pruned(operations, keys, sessions)

    async def _prune(self, query: str, parameters: Mapping[str, Any]) -> int:
        """So many at a time that nothing waits long for them, and no statement takes too long."""
        total = 0
        while True:
            pruned = await self._writer.submit(
                lambda statements: statements.count(query, {**parameters, "limit": _PRUNED}),
                durable=True,
            )
            total += pruned
            if pruned < _PRUNED:
                return total


def _sessions_with_events(items: Sequence[writes.Write]) -> set[str]:
    return {
        item.session for item in items if isinstance(item, writes.AppendEvent | writes.LinkEvent)
    }


def _sessions_with_deadlines(items: Sequence[writes.Write]) -> set[str]:
    return {
        item.id
        for item in items
        if isinstance(item, writes.UpdateSession) and "idle_deadline" in item.changes
    }


def _is_urgent(item: writes.Write) -> bool:
    """Whether it frees space or ends acknowledged work, and so may use a full disk's reserve."""
    if isinstance(item, writes.UpdateSession):
        return item.changes.get("state") in (SessionState.DELETED, SessionState.FAILED)
    if isinstance(item, writes.UpdateSnapshot):
        return bool(item.changes.get("hidden") or item.changes.get("thinned"))
    return isinstance(
        item,
        writes.SetStep | writes.FinishOperation | writes.DeleteSnapshot,
    )


def _is_due(session: Session, now: float) -> bool:
    lifetime = session.lifetime_deadline
    if lifetime is not None and lifetime <= now:
        return True
    idle = session.idle_deadline
    live = session.state in (SessionState.RUNNING, SessionState.PAUSED)
    return live and idle is not None and idle <= now


def cursor_of(session: Session) -> str:
    """Where in a list what comes after a session begins."""
    text = f"{session.created_at!r} {session.id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[float, str]:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, _, id = text.partition(" ")
        return float(created_at), id
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{cursor!r} is not a cursor of a list of sessions") from error
