"""The sessions this server is working with: their newest record, and who may touch them when.

Guarantee: lifecycle work on a session is exclusive, commands are not held up by each other, and
no command enters between the moment a lifecycle operation takes hold and the moment it lets go.
Where there are several nodes, nobody gets a session here that this node does not hold, and whoever
waits for one that leaves is told that it is elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from sojourn.database.base import Database
from sojourn.errors import SessionBusy, SessionElsewhere, SessionNotFound
from sojourn.model import Session, SessionKind, SessionState

GATE_SECONDS = 60.0


class Gate:
    """Commands pass while it is open; one lifecycle operation at a time closes it."""

    def __init__(self) -> None:
        self._holder = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self.reason: str | None = None
        self.settling: asyncio.Task[Any] | None = None
        self._left: Session | None = None

    @property
    def is_open(self) -> bool:
        """Whether a command may pass now."""
        return self._open.is_set()

    def leave(self, session: Session) -> None:
        """Let nobody pass any more: this is the record of a session that is not this node's."""
        self._left = session
        self._open.set()

    def require_here(self) -> None:
        """Raise SessionElsewhere where the session has left."""
        if self._left is not None:
            raise elsewhere(self._left)

    async def passed(self) -> None:
        """Wait until it is open. Raises SessionBusy after a minute, SessionElsewhere."""
        self.require_here()
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(GATE_SECONDS):
                while not self._open.is_set():  # it may be closed again before this one wakes up
                    await self._open.wait()
        except TimeoutError:
            raise SessionBusy(f"the session is held by {self.reason}", verb=self.reason) from None
        self.require_here()

    async def settled(self) -> None:
        """Wait until the last snapshot that was taken is committed (or failed), and until it is
        known what became of a commit."""
        while self.settling is not None and not self.settling.done():
            await asyncio.wait({self.settling})

    @contextlib.asynccontextmanager
    async def closed(self, reason: str) -> AsyncIterator[None]:
        """Hold it closed. Waits for the operation before, and for a snapshot that was taken but
        is not committed yet: that may take long, so commands still enter meanwhile; those under
        way go on. Raises SessionElsewhere."""
        async with self._holder:
            await self.settled()
            self.require_here()
            self._open.clear()
            self.reason = reason
            try:
                yield
            finally:
                self.reason = None
                self._open.set()


class ActiveSession:
    """A session with its newest record and its gate.

    `turns` counts commands under way, `entered` all there were; `pending` is the automatic
    snapshot being taken, `hurry` is set by whoever waits for it; `ended` counts what ended and may
    have changed something, `looked` is how much of that the last look at the sandbox covered;
    `dirty` says that something changed which no look at files shows (interpreter memory);
    `followed` are the processes whose end is waited for; `commands` are those of turns under way.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gate = Gate()
        self.turns = 0
        self.calls = 0
        self.entered = 0
        self.ended = 0
        self.looked = 0
        self.followed: set[tuple[str, int]] = set()
        self.commands: list[Any] = []
        self.hurry = asyncio.Event()
        self.dirty = False
        self.bracket: str | None = None
        self.pending: asyncio.Task[None] | None = None
        self.doomed = False
        self.over_quota: int | None = None

    @property
    def busy(self) -> bool:
        """Whether anything of a caller is under way: it is not idle then."""
        return self.turns > 0 or self.calls > 0

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    @property
    def state(self) -> SessionState:
        """The session's state as last committed."""
        return self.session.state


def elsewhere(session: Session) -> SessionElsewhere:
    """What is told of a session that another node has, or none."""
    where = f"node {session.holder} holds" if session.holder else "no node holds"
    return SessionElsewhere(
        f"{where} session {session.id}", session=session.id, holder=session.holder
    )


class Taker(Protocol):
    """This node, where there are several."""

    @property
    def id(self) -> str:
        """The holder of its sessions."""

    async def take(self, session: Session) -> Session:
        """Hold a session that nobody holds. Raises SessionElsewhere, WrongState."""

    async def arrived(self, session: Session) -> None:
        """What goes with a session that is held and was not known here."""

    def left(self, session: Session) -> None:
        """It is no longer this node's."""


class Registry:
    """Sessions by id and by name, read through to the database.

    This server is the only writer of these sessions (it holds the data directory's lock, and where
    there is a `taker` the sessions), so a record it holds is the newest one. `changed` is told of
    every one committed.
    """

    def __init__(self, database: Database, changed: Callable[[Session], None]) -> None:
        self._database = database
        self._watching = [changed]
        self.taker: Taker | None = None
        self._by_id: dict[str, ActiveSession] = {}
        self._by_name: dict[tuple[str, str], str] = {}

    async def find(self, tenant: str | None, ref: str) -> ActiveSession:
        """A live session by id or name, to do something with; one that no node holds is this node's
        from then on. Raises SessionNotFound, SessionElsewhere."""
        known = self._known(tenant, ref)
        if known is not None:
            return _session(known)
        session = await self._database.get_session(tenant, ref)
        _require_session(session)
        return await self.here(session)

    async def look(self, tenant: str | None, ref: str) -> Session:
        """The record of a live session, whoever holds it, only to be looked at. Raises
        SessionNotFound."""
        known = self._known(tenant, ref)
        found = known.session if known else await self._database.get_session(tenant, ref)
        return _require_session(found)

    def _known(self, tenant: str | None, ref: str) -> ActiveSession | None:
        known = self._by_id.get(ref)
        if known is None and tenant is not None:
            known = self._by_id.get(self._by_name.get((tenant, ref), ""))
        if (
            known is not None
            and known.state is not SessionState.DELETED
            and (tenant is None or known.session.tenant == tenant)
            and ref in (known.id, known.session.name)
        ):
            return known
        return None

    async def here(self, session: Session) -> ActiveSession:
        """The active object of a session whose record was just read, taken where nobody holds it.
        Raises SessionElsewhere."""
        if self.taker is None:
            return self.hold(session)
        if session.holder is None:
            session = await self.taker.take(session)
        if session.holder != self.taker.id:
            raise elsewhere(session)
        if session.id not in self._by_id:
            await self.taker.arrived(session)
        return self.hold(session)

    async def still(self, session: Session) -> ActiveSession | None:
        """The active object of a session that a list showed as this server's; None where it is not
        any more."""
        known = self._by_id.get(session.id)
        if known is not None or self.taker is None:
            return known or self.hold(session)
        try:
            session = await self._database.get_session(None, session.id)
        except SessionNotFound:
            return None
        return self.hold(session) if session.holder == self.taker.id else None

    def leave(self, active: ActiveSession, session: Session) -> None:
        """Forget a session that this record says is not this node's any more; whoever waits for it
        is told."""
        active.gate.leave(session)
        self.drop(active)
        if self.taker is not None:
            self.taker.left(session)

    def watch(self, told: Callable[[Session], None]) -> None:
        """Have another one told of every record that is committed."""
        self._watching.append(told)

    def held(self, id: str) -> ActiveSession | None:
        """A session by id, if this server has worked with it."""
        return self._by_id.get(id)

    def hold(self, session: Session) -> ActiveSession:
        """The one active object of a session; `session` becomes its record when it is new."""
        active = self._by_id.get(session.id)
        if active is None:
            active = self._by_id[session.id] = ActiveSession(session)
        self._name(active)
        return active

    def update(self, session: Session) -> None:
        """Note a newly committed record."""
        active = self.hold(session)
        old = active.session.name
        active.session = session
        for told in self._watching:
            told(session)
        if old is not None and old != session.name:
            self._by_name.pop((session.tenant, old), None)
        self._name(active)
        if session.state is SessionState.DELETED:
            self.drop(active)

    def _name(self, active: ActiveSession) -> None:
        session = active.session
        named = session.name is not None and session.kind is SessionKind.SESSION
        if named and session.state is not SessionState.DELETED:
            assert session.name is not None
            self._by_name[(session.tenant, session.name)] = session.id

    def drop(self, active: ActiveSession) -> None:
        """Forget a session."""
        if self._by_id.get(active.id) is active:
            del self._by_id[active.id]
        name = active.session.name
        if name is not None and self._by_name.get((active.session.tenant, name)) == active.id:
            del self._by_name[(active.session.tenant, name)]

    def all(self) -> list[ActiveSession]:
        """Every session held."""
        return list(self._by_id.values())


def _session(active: ActiveSession) -> ActiveSession:
    _require_session(active.session)
    return active


def _require_session(session: Session) -> Session:
    """One that can be asked for: what holds a template's versions is no session to its users."""
    if session.kind is not SessionKind.SESSION:
        raise SessionNotFound(f"session {session.id!r} does not exist", session=session.id)
    return session
