"""The sessions this server is working with: their newest record, and who may touch them when.

Guarantee: lifecycle work on a session is exclusive, commands are not held up by each other, and
no command enters between the moment a lifecycle operation takes hold and the moment it lets go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from sojourn.database.base import Database
from sojourn.errors import SessionBusy, SessionNotFound
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

    @property
    def is_open(self) -> bool:
        """Whether a command may pass now."""
        return self._open.is_set()

    async def passed(self) -> None:
        """Wait until it is open. Raises SessionBusy after a minute."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(GATE_SECONDS):
                while not self._open.is_set():  # it may be closed again before this one wakes up
                    await self._open.wait()
        except TimeoutError:
            raise SessionBusy(f"the session is held by {self.reason}", verb=self.reason) from None

    async def settled(self) -> None:
        """Wait until the last snapshot that was taken is committed (or failed), and until it is
        known what became of a commit."""
        while self.settling is not None and not self.settling.done():
            await asyncio.wait({self.settling})

    @contextlib.asynccontextmanager
    async def closed(self, reason: str) -> AsyncIterator[None]:
        """Hold it closed. Waits for the operation before, and for a snapshot that was taken but
        is not committed yet: that may take long, so commands still enter meanwhile; those under
        way go on."""
        async with self._holder:
            await self.settled()
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


class Registry:
    """Sessions by id and by name, read through to the database.

    This server is the database's only writer of sessions (it holds the data directory's lock), so
    a record it holds is the newest one. `changed` is told of every one committed.
    """

    def __init__(self, database: Database, changed: Callable[[Session], None]) -> None:
        self._database = database
        self._watching = [changed]
        self._by_id: dict[str, ActiveSession] = {}
        self._by_name: dict[tuple[str, str], str] = {}

    async def find(self, tenant: str | None, ref: str) -> ActiveSession:
        """A live session by id or name. Raises SessionNotFound."""
        known = self._by_id.get(ref)
        if known is None and tenant is not None:
            known = self._by_id.get(self._by_name.get((tenant, ref), ""))
        if (
            known is not None
            and known.state is not SessionState.DELETED
            and (tenant is None or known.session.tenant == tenant)
            and ref in (known.id, known.session.name)
        ):
            return _session(known)
        return _session(self.hold(await self._database.get_session(tenant, ref)))

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
        """Forget a deleted session."""
        self._by_id.pop(active.id, None)
        name = active.session.name
        if name is not None and self._by_name.get((active.session.tenant, name)) == active.id:
            del self._by_name[(active.session.tenant, name)]

    def all(self) -> list[ActiveSession]:
        """Every session held."""
        return list(self._by_id.values())


def _session(active: ActiveSession) -> ActiveSession:
    """One that can be asked for: what holds a template's versions is no session to its users."""
    if active.session.kind is not SessionKind.SESSION:
        raise SessionNotFound(f"session {active.id!r} does not exist", session=active.id)
    return active
