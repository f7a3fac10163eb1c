"""One connection for each thread that works.

Guarantee: a thread that asks gets a connection with the project's settings; one that was lost is
given up and made anew at the next call, without a pause, so that the first call after the server
came back finds it. A pool that mends itself in the background would wait as long as its pauses
have grown to.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.types.string import TextLoader

from sojourn.database.postgres.place import Place

STATEMENT_SECONDS = 30.0
LOCK_SECONDS = 10.0
WATCH_SECONDS = 2.0  # between two looks at what takes too long
IDLE_SECONDS = 20.0  # a transaction whose client does nothing holds its locks no longer

Connection = psycopg.Connection[tuple[Any, ...]]

_SETTINGS = """
SELECT set_config('statement_timeout', %s, FALSE), set_config('lock_timeout', %s, FALSE),
    set_config('idle_in_transaction_session_timeout', %s, FALSE),
    set_config('default_transaction_isolation', 'read committed', FALSE)
"""


def adapters() -> AdaptersMap:
    """Documents are read as the text they are; `rows` knows what becomes of it."""
    found = AdaptersMap(psycopg.adapters)
    for kind in ("json", "jsonb"):
        found.register_loader(kind, TextLoader)
    return found


class _Context:
    """What psycopg asks for its adapters."""

    def __init__(self) -> None:
        self.adapters = adapters()
        self.connection = None


CONTEXT = _Context()


def connect(place: Place) -> Connection:
    """A new connection, in autocommit mode."""
    connection: Connection = psycopg.connect(autocommit=True, context=CONTEXT, **place.settings)
    try:
        # What is known by name is used again and again, each thread for itself.
        connection.prepare_threshold = 0
        connection.prepared_max = 256
        seconds = (STATEMENT_SECONDS, LOCK_SECONDS, IDLE_SECONDS)
        connection.execute(_SETTINGS, [f"{int(value * 1000)}" for value in seconds])
    except BaseException:
        connection.close()
        raise
    return connection


def _cut(connection: Connection) -> None:
    """End a connection that another thread waits for; it sees that the server is gone."""
    with contextlib.suppress(OSError, psycopg.Error):
        copy = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            copy.shutdown(socket.SHUT_RDWR)
        finally:
            copy.close()


class Connections:
    """The connections of some threads."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._own = threading.local()
        self._all: set[Connection] = set()
        self._lock = threading.Lock()
        self._watched: dict[Connection, float] = {}
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()

    def get(self) -> Connection:
        """The calling thread's."""
        found: Connection | None = getattr(self._own, "connection", None)
        if found is None or found.closed:
            self.give_up()
            found = connect(self.place)
            with self._lock:
                self._all.add(found)
            self._own.connection = found
        return found

    def give_up(self) -> None:
        """Let go of the calling thread's, in whatever state it is."""
        found: Connection | None = getattr(self._own, "connection", None)
        self._own.connection = None
        if found is not None:
            with self._lock:
                self._all.discard(found)
            with contextlib.suppress(psycopg.Error):
                found.close()

    @contextlib.contextmanager
    def watched(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Cut the connection when what is done meanwhile takes longer: a server, or whatever stands
        before it, that takes a request and never answers holds up nobody for ever."""
        with self._lock:
            self._watched[connection] = time.monotonic() + seconds
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="sojourn-database-watch", daemon=True
                )
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                del self._watched[connection]

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                for connection, until in self._watched.items():
                    if until <= now:
                        _cut(connection)

    def close(self) -> None:
        """Let go of all, once their threads have ended."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            connections, self._all = list(self._all), set()
        for connection in connections:
            with contextlib.suppress(psycopg.Error):
                connection.close()
