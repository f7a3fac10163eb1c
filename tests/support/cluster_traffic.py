"""Clients at work while something happens to a cluster, and what they saw.

    with Balancer(cluster) as front, Traffic(front.url, token, clients=4) as traffic:
        ...                       # nodes and servers come and go
        traffic.turn()            # every client has done some more since
    traffic.check()               # nothing failed, nothing that was acknowledged is gone

What fails in a client is told by `check`, or by `turn` as soon as it waits for that client.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Self
from urllib.parse import urlsplit

from sojourn.client import Session, Sojourn
from support.cluster import Cluster
from support.cluster_history import read_count, start_counting, until

LIMITS = {"cpus": 0.5, "memory_bytes": 256 << 20}
POLICY = {"auto_snapshot": "off", "idle_timeout": None}
_PIECE = 1 << 16
_PAUSE = 0.2  # between turns: work that leaves the machine some room


class Balancer:
    """One address in front of all servers, as a plain load balancer of TCP is: a connection goes to
    the next server that takes it. It knows nothing of requests."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._listener = socket.create_server((cluster.networks.middle_address("net"), 0))
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self._turns = itertools.count()
        self._thread = threading.Thread(target=self._accept, name="balancer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        server = self._connect()
        if server is None:
            client.close()
            return
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        _copy(client, server)
        back.join()
        client.close()
        server.close()

    def _connect(self) -> socket.socket | None:
        servers = list(self._cluster.servers.values())
        for _ in range(2 * len(servers)):
            server = urlsplit(servers[next(self._turns) % len(servers)].url)
            with contextlib.suppress(OSError):
                return socket.create_connection((server.hostname, server.port), timeout=5)
        return None


def _copy(source: socket.socket, target: socket.socket) -> None:
    source.settimeout(None)
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):  # one that leaves reads nothing more either
        source.shutdown(socket.SHUT_RD)


class Traffic:
    """Clients that each use a session of their own, and make and remove others."""

    def __init__(self, url: str, token: str, clients: int) -> None:
        self.url = url
        self.requests = 0
        self._token = token
        self._ended = threading.Event()
        self._turns = dict.fromkeys(range(clients), 0)
        self._failed: dict[int, str] = {}
        self._sessions: dict[int, str] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"client {number}", daemon=True)
            for number in self._turns
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.turn()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def turn(self) -> None:
        """Wait until every client has done a turn that began after this."""
        least = {number: turns + 2 for number, turns in self._turns.items()}
        until(lambda: self._failed or all(self._turns[one] >= least[one] for one in least), 180)
        assert not self._failed, self._failed

    def check(self) -> None:
        """Read everything that was acknowledged, and remove the sessions."""
        assert not self._failed, self._failed
        with Sojourn(url=self.url, token=self._token) as client:
            for number, id in self._sessions.items():
                session = client.sessions.get(id)
                _check(session, self._turns[number])
                read_count(session)
                assert not [one for one in session.events() if one.kind == "node.lost"]
                session.delete()

    def _run(self, number: int) -> None:
        doing = "create"

        def do(what: str, work: Callable[[], object]) -> None:
            nonlocal doing
            doing = what
            work()
            self.requests += 1

        try:
            with Sojourn(url=self.url, token=self._token) as client:
                session = client.sessions.create(policy=POLICY, limits=LIMITS)
                self._sessions[number] = session.id
                start_counting(session)
                count = 0
                while not self._ended.wait(_PAUSE):
                    turn = self._turns[number] + 1
                    append = ["sh", "-c", f"echo {turn} >> /root/journal"]
                    do("exec", lambda append=append: _succeed(session, append))  # type: ignore[misc]
                    do("write", lambda turn=turn: session.files.write("/root/last", str(turn)))  # type: ignore[misc]
                    self._turns[number] = turn
                    do("read", lambda turn=turn: _check(session, turn))  # type: ignore[misc]
                    doing = "count"
                    now = read_count(session)
                    assert now >= count, f"it was at {count} and is at {now}"
                    count = now
                    if turn % 4 == number % 4:
                        do("suspend", session.suspend)
                        if turn % 8 < 4:  # else the next command does
                            do("resume", session.resume)
                    if turn % 6 == number % 6:
                        do("create and delete", lambda: _come_and_go(client))
        except BaseException as error:  # noqa: BLE001 - told by whoever waits
            self._failed[number] = f"{doing}, turn {self._turns[number]}: {error!r}"


def _succeed(session: Session, command: list[str]) -> None:
    done = session.exec(command)
    assert done.exit_code == 0, done


def _check(session: Session, turn: int) -> None:
    journal = session.files.read("/root/journal")
    assert journal == b"".join(b"%d\n" % n for n in range(1, turn + 1)), (turn, journal[-100:])
    last = session.files.read("/root/last")
    assert last == b"%d" % turn, (turn, last)


def _come_and_go(client: Sojourn) -> None:
    session = client.sessions.create(policy=POLICY, limits=LIMITS)
    _succeed(session, ["true"])
    session.delete()


@dataclass(frozen=True)
class Answered:
    """One request to an exposed port; no status where there was no answer."""

    began: float
    ended: float
    status: int | None
    said: str


class Asker:
    """Asks a URL again and again, each time on a connection of its own."""

    def __init__(self, url: str, every: float = 0.05) -> None:
        self.answers: list[Answered] = []
        self._url = urlsplit(url)
        self._every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(120)

    def again(self, seconds: float = 90) -> None:
        """Wait for an answer of the program to a request that was sent after this."""
        now = time.monotonic()
        until(lambda: any(one.began > now and one.status == 200 for one in self.answers), seconds)

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            began = time.monotonic()
            status, said = self.ask()
            self.answers.append(Answered(began, time.monotonic(), status, said))

    def ask(self) -> tuple[int | None, str]:
        connection = HTTPConnection(str(self._url.hostname), self._url.port, timeout=120)
        try:
            connection.request("GET", self._url.path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, HTTPException) as error:
            return None, repr(error)
        finally:
            connection.close()
