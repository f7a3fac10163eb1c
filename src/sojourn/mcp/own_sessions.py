"""Which session a call works on, and where the server is.

Guarantee: a call that names no session works on its connection's own one, and never on that of
another connection. It is made by the first call that changes something, found again by its name,
and suspended when the connection ends: never deleted. One that was deleted from elsewhere is an
error before another takes its place. The server is looked up for every call, so that one that was
started again is found, also at another address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from sojourn.client import core
from sojourn.client.async_client import AsyncSessions
from sojourn.client.async_session import AsyncSession
from sojourn.client.async_transport import AsyncTransport
from sojourn.errors import InvalidRequest, NameTaken, SessionNotFound, SojournError
from sojourn.model.network import NetworkPolicy

_log = logging.getLogger(__name__)

LABELS = {"made-by": "mcp"}
REMEMBERED = 2_000
"""Connections whose session is remembered."""

_SUSPEND_SECONDS = 30.0
_SETTLE_SECONDS = 15.0


class Server:
    """The Sojourn server, wherever it is just now."""

    def __init__(self) -> None:
        self._address = core.find_server(None, None, dict(os.environ))
        self._transport = AsyncTransport(self._address)
        self._former: list[AsyncTransport] = []

    def transport(self) -> AsyncTransport:
        """A transport to where it is now. Raises Unreachable when none is named or runs here."""
        address = core.find_server(None, None, dict(os.environ))
        if address != self._address:
            # Calls under way may still use the former one; it is closed at the end.
            self._former.append(self._transport)
            self._address, self._transport = address, AsyncTransport(address)
        return self._transport

    @property
    def token(self) -> str | None:
        """What the server is shown."""
        return self._address.token

    def sessions(self) -> AsyncSessions:
        """The sessions of the token's tenant."""
        return AsyncSessions(self.transport())

    async def check(self) -> None:
        """Raises Unreachable when it does not answer, Unauthenticated when it does not know the
        token."""
        await self.sessions().list(limit=1)

    async def close(self) -> None:
        """Close the connections."""
        for transport in (*self._former, self._transport):
            await transport.close()


class Settings(msgspec.Struct, frozen=True):
    """What the user chose: the session of all calls, the network of sessions that are made, and
    whether a model may set networks."""

    session: str | None = None
    network: NetworkPolicy | None = None
    allow_network: bool = False


class OwnSession:
    """The session of one connection, made when it is first needed."""

    def __init__(self, server: Server, name: str, network: NetworkPolicy | None) -> None:
        self._server = server
        self._network = network
        self._lock = asyncio.Lock()
        self.name = name
        self.id: str | None = None

    async def get(self, *, make: bool) -> AsyncSession:
        """The session. Raises SessionNotFound where there is none and none is to be made, or when
        it was deleted since the last call."""
        async with self._lock:
            sessions = self._server.sessions()
            try:
                found = await sessions.get(self.id or self.name)
            except SessionNotFound:
                if self.id is not None:
                    gone, self.id = self.id, None
                    raise SessionNotFound(
                        f"your own session {gone} was deleted, with all that was in it",
                        next_step="The next exec, run_code or file_write makes another, empty one.",
                    ) from None
                if not make:
                    raise SessionNotFound(
                        "you have no session of your own yet",
                        next_step="exec, run_code or file_write makes it; or name a session.",
                    ) from None
                found = await self._make(sessions)
            self.id = found.id
            return found

    async def _make(self, sessions: AsyncSessions) -> AsyncSession:
        try:
            return await sessions.create(name=self.name, labels=LABELS, network=self._network)
        except NameTaken:
            return await sessions.get(self.name)  # made by someone else at the same moment

    async def suspend(self) -> None:
        """Put it away, if it was used. What refuses is left to its idle timeout."""
        if self.id is None:
            return
        try:
            session = await self._server.sessions().get(self.id)
            if session.state in {"running", "paused"}:
                await asyncio.wait_for(session.suspend(), _SUSPEND_SECONDS)
        except SessionNotFound:
            return  # deleted: nothing is left to put away
        except (SojournError, TimeoutError) as error:
            _log.warning("the session %s was not suspended: %s", self.name, error)


class Sessions:
    """The own sessions of all connections of this process."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self.server = server
        self.settings = settings
        self._calls: dict[asyncio.Task[Any], OwnSession | None] = {}
        self._named: dict[str, OwnSession] = {}
        self._connected: dict[str, OwnSession] = {}

    def of_call(self, header: str | None, connection: str | None, client: str) -> OwnSession:
        """The own session of a call: the one its header names, else the one all calls are to use,
        else that of its connection. Raises InvalidRequest where there is nothing of these."""
        name = header or self.settings.session
        if name is not None:
            return self._named.setdefault(name, self._own(name))
        if connection is None:
            raise InvalidRequest(
                "this connection has no session of its own: its protocol keeps no state between"
                " calls",
                next_step="Call session_create and give its id as `session` in every call. The user"
                " can name one for all calls: by the header Sojourn-Session, or with"
                " `sojourn mcp --session`.",
                field="session",
            )
        if connection not in self._connected:
            while len(self._connected) >= REMEMBERED:
                # It is found again by its name should its connection still live.
                self._connected.pop(next(iter(self._connected)))
            # Not the connection's id itself: whoever knows that can speak for the connection.
            digest = hashlib.sha256(connection.encode()).hexdigest()[:12]
            self._connected[connection] = self._own(f"mcp-{plain_name(client)}-{digest}")
        return self._connected[connection]

    def _own(self, name: str) -> OwnSession:
        return OwnSession(self.server, name, self.settings.network)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way in this task."""
        task = _this_task()
        self._calls[task] = None
        try:
            yield
        finally:
            del self._calls[task]

    def uses(self, own: OwnSession) -> None:
        """The call under way in this task works on a connection's own session."""
        self._calls[_this_task()] = own

    async def ended(self, connection: str) -> None:
        """A connection has ended: its session is put away."""
        own = self._connected.pop(connection, None)
        if own is not None:
            await _settled([task for task, used in self._calls.items() if used is own])
            await own.suspend()

    async def close(self) -> None:
        """All connections have ended."""
        await _settled(list(self._calls))
        used = (*self._named.values(), *self._connected.values())
        await asyncio.gather(*(own.suspend() for own in used))
        await self.server.close()


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("calls are made in tasks")
    return task


async def _settled(calls: list[asyncio.Task[Any]]) -> None:
    """Wait for calls that end with their connection: a command that one of them still has to kill
    would wake the session again."""
    if calls:
        await asyncio.wait(calls, timeout=_SETTLE_SECONDS)


def plain_name(client: str) -> str:
    """A client's name as a part of a session's name."""
    return re.sub(r"[^a-z0-9]+", "-", client.lower()).strip("-")[:30].rstrip("-") or "client"


def new_connection() -> str:
    """An id for a connection that has none of its own."""
    return secrets.token_hex(16)
