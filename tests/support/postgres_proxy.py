"""A unix socket before PostgreSQL's that cuts a connection in the moment of its commit."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from support.postgres import PostgresServer

Moment = Literal["unsent", "unanswered", "late", "silent"]
"""When the next commit is cut: before the server gets it; when it was done, before the answer; it
gets there only at `deliver`, long after the client was cut off; or nobody is cut off, and no answer
comes."""

_NAME = ".s.PGSQL.5432"


class Proxy:
    """Passes everything on, but for what `cut` was set to, once."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.directory = Path(tempfile.mkdtemp(prefix="sojourn-proxy-"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / _NAME))
        self._listener.listen(64)
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._late = threading.Event()
        self._lock = threading.Lock()
        self.cut: Moment | None = None
        self.cuts = 0
        self.closed = False
        self._run(self._accept)

    def url(self, database: str) -> str:
        """The URL of a database behind it."""
        return f"postgresql://sojourn@/{database}?host={self.directory}"

    def deliver(self) -> None:
        """Let what is late go on to the server."""
        self._late.set()

    def _run(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.socket(socket.AF_UNIX)
            try:
                upstream.connect(str(self._server.sockets / _NAME))
            except OSError:
                client.close()
                upstream.close()
                continue
            with self._lock:
                self._sockets |= {client, upstream}
            self._run(self._requests, client, upstream)
            self._run(self._answers, client, upstream)

    def _moment(self, data: bytes) -> Moment | None:
        """What is to happen to these bytes of a client; each moment happens once."""
        if b"COMMIT\0" not in data:
            return None
        with self._lock:
            moment, self.cut = self.cut, None
            self.cuts += moment is not None
            return moment

    def _requests(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                moment = self._moment(data)
                if moment == "silent":
                    client.recv(65536)  # until it gives up
                if moment in ("unsent", "silent"):
                    break
                if moment is not None:
                    # Nothing of the answer gets through from here on.
                    client.shutdown(socket.SHUT_RDWR)
                if moment == "late":
                    self._late.wait(30)
                upstream.sendall(data)
                if moment is not None:
                    # As long as the server is at it, its side stays open.
                    upstream.settimeout(30)
                    upstream.recv(65536)
        self._close(client, upstream)

    def _answers(self, client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := upstream.recv(65536):
                client.sendall(data)
        # So that the client sees the end; what is still to be said to the server may be said.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            with self._lock:
                self._sockets.discard(end)

    def close(self) -> None:
        """End it with all connections."""
        self._late.set()
        self._close(self._listener, *list(self._sockets))
        for thread in self._threads:
            thread.join(30)
        shutil.rmtree(self.directory)


@contextlib.contextmanager
def cutting(server: PostgresServer) -> Iterator[Proxy]:
    """A proxy before a server, gone afterwards."""
    proxy = Proxy(server)
    try:
        yield proxy
    finally:
        proxy.close()
