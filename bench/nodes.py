"""Sessions between the nodes of a cluster: three nodes and a server in network namespaces of this
machine, a real PostgreSQL, a real S3 server.

Every time is taken by the client, to the first useful command afterwards. A node is cold that has
nothing of the session (the template it has), warm one that had the session before. The stop of a
migration is seen from inside: the longest pause of a program that writes down the time again and
again. The bare column is the same session suspended and resumed where it is.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.harness import Row, median, timed
from sojourn.client import Session, Sojourn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


from support.cluster import Cluster
from support.cluster_history import until

_LIMITS = {"cpus": 0.5, "memory_bytes": 512 << 20}
_POLICY = {"auto_snapshot": "off", "idle_timeout": None}
_ROUNDS = 30
_FAILOVERS = 5
_TICKS = "/srv/ticks"
_PROGRAM = f"""
import os, time
held = os.urandom(10 << 20)
with open("{_TICKS}", "a", buffering=1) as log:
    while True:
        log.write("%.4f\\n" % time.time())
        time.sleep(0.005)
"""


def _p99(samples: list[float]) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * 0.99))]


class _Nodes:
    """The cluster's nodes by name."""

    def __init__(self, client: Sojourn) -> None:
        self._client = client
        self.names = {one.id: one.name for one in client.nodes.list()}

    def of(self, session: Session) -> str:
        return self.names[str(self._client.sessions.get(session.id).info.node)]

    def other(self, session: Session) -> str:
        here = self.of(session)
        return next(name for name in self.names.values() if name != here)


def _new(client: Sojourn) -> Session:
    session = client.sessions.create(policy=_POLICY, limits=_LIMITS)
    session.spawn(["python3", "-c", _PROGRAM])
    until(lambda: session.files.read(_TICKS))
    return session


def _to_first_command(session: Session) -> float:
    def work() -> None:
        session.resume()
        session.exec(["true"])

    return timed(work)


def _resumes(client: Sojourn, nodes: _Nodes) -> list[Row]:
    """A suspended session goes on elsewhere: from the request to move it, to the first command."""
    cold: list[float] = []
    warm: list[float] = []
    here: list[float] = []
    for _ in range(_ROUNDS):
        session = _new(client)
        first = nodes.of(session)
        session.suspend(wait="durable")
        here.append(_to_first_command(session))
        for target, samples in ((nodes.other(session), cold), (first, warm)):
            session.suspend(wait="durable")
            began = time.perf_counter()
            session.migrate(target)
            session.resume()
            session.exec(["true"])
            samples.append((time.perf_counter() - began) * 1000)
        session.delete()
    rows = []
    for name, samples in (("cold", cold), ("warm", warm)):
        note = f"p99 {_p99(samples):.0f} ms; {_ROUNDS} sessions of 10 MB"
        rows.append(
            Row(
                f"resume on another node, {name} cache",
                median(samples),
                median(here),
                "",
                note=note,
                samples=samples,
            )
        )
    return rows


def _stops(client: Sojourn, nodes: _Nodes) -> list[Row]:
    """A running session moves: how long it stands still, and how long the move takes in all."""
    stops: list[float] = []
    moves: list[float] = []
    session = _new(client)
    for _ in range(_ROUNDS // 2):
        target = nodes.other(session)
        began = time.time()
        moves.append(timed(lambda target=target: session.migrate(target)))
        session.exec(["true"])
        time.sleep(0.2)
        ticks = [float(line) for line in session.files.read(_TICKS).split()[:-1]]
        late = [time_ for time_ in ticks if time_ > began - 0.1]
        stops.append(max(b - a for a, b in itertools.pairwise(late)) * 1000)
    session.delete()
    return [
        Row(
            "migration, the session stands still",
            median(stops),
            None,
            "",
            note=f"p99 {_p99(stops):.0f} ms",
            samples=stops,
        ),
        Row("migration, in all", median(moves), None, "", samples=moves),
    ]


def _failovers(cluster: Cluster, client: Sojourn, nodes: _Nodes) -> list[Row]:
    """A machine is gone: until the session's first command elsewhere."""
    samples: list[float] = []
    for _ in range(_FAILOVERS):
        session = _new(client)
        session.snapshot(wait="durable")
        node = cluster.nodes[nodes.of(session)]
        node.crash()

        def used(session: Session = session) -> bool:
            return client.sessions.get(session.id).exec(["true"], timeout=60).exit_code == 0

        samples.append(timed(lambda used=used: until(used, 120, every=0.05)))
        node.unmount()
        node.start()
        until(lambda: all(one.lease_left > 0 for one in client.nodes.list()))
        session.delete()
    note = f"lease {cluster.lease:g} s, grace 3 s; most {max(samples):.0f} ms"
    return [Row("failover", median(samples), None, "", note=note, samples=samples)]


def measure() -> list[Row]:
    """The rows."""
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-") as directory:
        with Cluster(Path(directory), nodes=3, servers=1, lease=5.0) as cluster:
            with cluster.networks.entered(), cluster.client() as client:
                nodes = _Nodes(client)
                # Every node has the template, and the object store too, before anything is timed.
                settled = _new(client)
                for name in (*nodes.names.values(), *nodes.names.values()):
                    if nodes.of(settled) != name:
                        settled.migrate(name)
                settled.delete()
                commands = _new(client)
                through = [timed(lambda: commands.exec(["true"])) for _ in range(50)]
                commands.delete()
                return [
                    Row(
                        "exec through a server",
                        statistics.median(through),
                        None,
                        "",
                        note=f"p99 {_p99(through):.1f} ms",
                        samples=through,
                    ),
                    *_resumes(client, nodes),
                    *_stops(client, nodes),
                    *_failovers(cluster, client, nodes),
                ]
