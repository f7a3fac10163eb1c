"""What servers of one database tell each other, and which of them it belongs to.

Guarantee: nothing depends on a notice arriving: it makes a follower in another process read at once
that would have read some seconds later. Notices are sent after their commit, many in one, since
PostgreSQL lets transactions that notify commit only one after the other. After a lost connection
every follower reads again, for what was told meanwhile was not heard.

The server that owns the database holds a lock that PostgreSQL lets go of with its connection, so
that a second one is refused, also from another machine. One that lost its connection takes the lock
again; where another server was first, it changes nothing any more.

A node hears what is told to it alone, on a channel of its own; of sessions' logs it hears only once
somebody follows one here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Any

import psycopg
from psycopg import sql

from sojourn.database.postgres.connections import CONTEXT, Connection
from sojourn.database.postgres.failures import away, is_lost, translate
from sojourn.database.postgres.place import Place
from sojourn.database.postgres.reader import PostgresReader
from sojourn.database.postgres.statements import PostgresStatements
from sojourn.errors import HostUnfit, SojournError

log = logging.getLogger(__name__)

_GATHER = 0.02  # seconds in which notices are put together
_PAYLOAD = 200  # sessions in one notice, which holds less than 8000 bytes
_OWNER = 0x736F6A6F75726E01
_OWN_SECONDS = 10.0  # for the connection of a server that just died to be noticed
_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)
_KEEPALIVES = """
SELECT set_config('tcp_keepalives_idle', '10', FALSE),
    set_config('tcp_keepalives_interval', '5', FALSE),
    set_config('tcp_keepalives_count', '3', FALSE)
"""
"""So that the lock of a machine that vanished is let go of."""

Heard = Callable[[Collection[str] | None], None]
_EVENTS = "sojourn_events"


def _channel(node: str) -> str:
    """Where a node is told something. Names of channels have at most 63 bytes."""
    return f"sojourn_node_{node}"[:63]


class PostgresSignals:
    """See `sojourn.database.engine.Signals`. `taken` is called when another server owns the
    database that this one owned."""

    def __init__(
        self,
        place: Place,
        loop: asyncio.AbstractEventLoop,
        reader: PostgresReader,
        taken: Callable[[SojournError], None],
    ) -> None:
        self._place = place
        self._loop = loop
        self._reader = reader
        self._taken = taken
        self._me = secrets.token_hex(6)
        self._grown: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Task[None] | None = None
        self._heard: Heard | None = None
        self._owned: asyncio.Future[None] | None = None
        self._node: tuple[str, Callable[[str | None], None]] | None = None

    # -- telling ----------------------------------------------------------------------------
    def announce(self, sessions: Collection[str]) -> None:
        self._grown.update(sessions)
        if self._timer is None and self._grown:
            self._timer = self._loop.call_later(_GATHER, self._tell)

    def _tell(self) -> None:
        self._timer = None
        grown = sorted(self._grown)
        self._grown.clear()
        texts = [
            " ".join([self._me, *grown[start : start + _PAYLOAD]])
            for start in range(0, len(grown), _PAYLOAD)
        ]
        self._soon(lambda statements: _announce(statements, texts))

    def tell_node(self, node: str, session: str) -> None:
        hint = {"channel": _channel(node), "payload": session}
        self._soon(lambda statements: statements.run("hint", hint))

    def _soon(self, work: Callable[[PostgresStatements], object]) -> None:
        task = self._loop.create_task(self._notify(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self, work: Callable[[PostgresStatements], object]) -> None:
        def run(connection: Connection) -> None:
            work(PostgresStatements(connection))

        try:
            await self._reader.run(run)
        except SojournError as error:
            log.debug("others look a little later: %s", error)

    # -- hearing ----------------------------------------------------------------------------
    def listen(self, heard: Heard) -> None:
        self._heard = heard
        self._begin_again()

    def hear_node(self, node: str, heard: Callable[[str | None], None]) -> None:
        self._node = (_channel(node), heard)
        self._begin_again()

    def _begin_again(self) -> None:
        """Listen to what is wanted by now. Who owns the database hears all there is already."""
        if self._listener is not None and self._node is not None and self._owned is None:
            self._listener.cancel()
            self._tasks.add(self._listener)
            self._listener.add_done_callback(self._tasks.discard)
            self._listener = None
        self._begin()

    def _channels(self) -> list[str]:
        found = [self._node[0]] if self._node is not None else []
        return [*found, *([_EVENTS] if self._node is None or self._heard is not None else [])]

    async def own(self) -> None:
        if self._owned is None:
            self._owned = self._loop.create_future()
            if self._listener is not None:
                # It is in the middle of waiting for notices; it begins again with the lock.
                self._listener.cancel()
                await asyncio.wait([self._listener])
                self._listener = None
            self._begin()
        await asyncio.shield(self._owned)

    def _begin(self) -> None:
        if self._listener is None:
            self._listener = self._loop.create_task(self._attend())

    async def _attend(self) -> None:
        losses = 0
        while True:
            connection: psycopg.AsyncConnection[Any] | None = None
            try:
                connection = await psycopg.AsyncConnection.connect(
                    autocommit=True, context=CONTEXT, **self._place.settings
                )
                async with connection:
                    for channel in self._channels():
                        await connection.execute(
                            sql.SQL("LISTEN {}").format(sql.Identifier(channel))
                        )
                    if self._owned is not None:
                        await self._take(connection)
                    losses = 0
                    self._tell_heard(None)
                    async for notice in connection.notifies():
                        if notice.channel != _EVENTS:
                            self._tell_node_heard(notice.payload)
                            continue
                        sender, *sessions = notice.payload.split()
                        if sender != self._me:
                            self._tell_heard(sessions)
            except HostUnfit as error:
                self._refused(error)
                return
            except psycopg.Error as error:
                if self._owned is not None and not self._owned.done():
                    lost = is_lost(error, None)
                    self._refused(
                        away(self._place.shown, error)
                        if lost
                        else translate(error, self._place.shown)
                    )
                    return
                log.info(
                    "notices of the database are not heard, trying again: %s",
                    translate(error, self._place.shown).message,
                )
            except Exception as error:
                # Ended for good, it would leave the lock to others without a word, and whoever
                # waits to own the database waiting.
                log.exception("a fault while notices were waited for, trying again")
                if self._owned is not None and not self._owned.done():
                    self._refused(SojournError(f"the database cannot be owned: {error!r}"))
                    return
            await asyncio.sleep(_PAUSES[min(losses, len(_PAUSES) - 1)])
            losses += 1

    def _tell_heard(self, sessions: Collection[str] | None) -> None:
        if self._heard is not None:
            self._heard(sessions)
        if sessions is None:
            self._tell_node_heard(None)

    def _tell_node_heard(self, session: str | None) -> None:
        if self._node is not None:
            self._node[1](session)

    async def _take(self, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(_KEEPALIVES)
        until = self._loop.time() + _OWN_SECONDS
        while True:
            cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (_OWNER,))
            row = await cursor.fetchone()
            if row is not None and row[0]:
                break
            if self._loop.time() >= until:
                raise HostUnfit(
                    f"another server uses the database {self._place.shown}",
                    next_step="Stop it, or give this one another database (--database).",
                )
            await asyncio.sleep(0.1)
        if self._owned is not None and not self._owned.done():
            self._owned.set_result(None)

    def _refused(self, error: SojournError) -> None:
        if self._owned is not None and not self._owned.done():
            self._owned.set_exception(error)
        else:
            log.critical("%s: nothing is changed any more", error.message)
            self._taken(error)

    async def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._tasks, *([self._listener] if self._listener is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._listener = None


def _announce(statements: PostgresStatements, texts: list[str]) -> None:
    for text in texts:
        statements.run("announce", {"payload": text})
