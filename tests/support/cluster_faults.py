"""A cluster under random faults, with a history that is checked all the time.

    python -m support.cluster_faults DIRECTORY SECONDS [SEED]

Sessions count on every node while nodes are killed, crash, are stopped for longer than their lease
and are cut off from database, store or servers; servers are killed; sessions are migrated, drained
away, suspended and resumed. After each fault everything must come to rest, and of each session must
hold: its line has neither gap nor repetition; it is never behind a snapshot that was acknowledged
as durable; it never runs twice at a time; and it can be used.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from sojourn.client import Session, Sojourn
from sojourn.errors import SojournError
from support.cluster import Cluster, Node
from support.cluster_history import LOG, Watch, read_count, start_counting, until

_PATIENT = 120.0


class Faults:
    """The cluster, its sessions, and what was acknowledged of them."""

    def __init__(self, cluster: Cluster, seed: int, sessions: int = 4) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.clients = [cluster.client(name) for name in cluster.servers]
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.acknowledged: dict[str, int] = {}
        self.back: dict[str, list[float]] = {}
        self.story: list[str] = []
        """What was done, with the time of day that the logs have, too."""
        self.sessions = [self._session() for _ in range(sessions)]

    @property
    def client(self) -> Sojourn:
        return self.random.choice(self.clients)

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _session(self) -> str:
        limits = {"cpus": 0.5, "memory_bytes": 256 << 20}
        policy = {"auto_snapshot": "off", "idle_timeout": None}
        session = self.client.sessions.create(policy=policy, limits=limits)
        start_counting(session)
        self.acknowledge(session)
        return session.id

    def get(self, id: str) -> Session:
        return self.client.sessions.get(id)

    def acknowledge(self, session: Session) -> None:
        """Take a snapshot that survives the loss of its node, and remember what it holds."""
        count = read_count(session)
        session.snapshot(wait="durable")
        self.acknowledged[session.id] = max(count, self.acknowledged.get(session.id, 0))

    # -- what happens -----------------------------------------------------------------------

    def step(self) -> None:
        """One fault or verb, and then rest."""
        actions: list[Callable[[], None]] = [
            self.kill_node,
            self.crash_node,
            self.pause_node,
            self.cut_database,
            self.cut_store,
            self.cut_servers,
            self.kill_server,
            self.stop_node,
            self.migrate,
            self.migrate,
            self.suspend,
            self.drain,
            self.snapshot,
            self.snapshot,
        ]
        action = self.random.choice(actions)
        began = time.monotonic()
        self.note(f"-- {action.__name__}")
        action()
        self.done[action.__name__] += 1
        self.rest()
        self.back.setdefault(action.__name__, []).append(time.monotonic() - began)

    def note(self, what: str) -> None:
        """Write down what is done."""
        now = time.time()
        stamp = time.strftime("%H:%M:%S", time.gmtime(now))
        self.story.append(f"{stamp},{int(now % 1 * 1000):03d} {what}")

    def tell(self) -> list[str]:
        """What was done last, and how everything stands: for whoever looks for the cause."""
        told = ["== the last steps", *self.story[-60:], "== nodes"]
        with contextlib.suppress(SojournError):
            told += [repr(one) for one in self.client.nodes.list()]
        for id in self.sessions:
            told.append(f"== {id}, acknowledged {self.acknowledged.get(id)}")
            try:
                session = self.get(id)
                told.append(repr(session.info))
                told += [repr(event) for event in session.events()[-15:]]
                told += [repr(one) for one in session.history()[-10:]]
                numbers = session.files.read(LOG).split()
                told.append(f"its line: {len(numbers)} numbers, at last {numbers[-5:]}")
            except SojournError as error:
                told.append(f"{error!r}")
        return told

    def node(self) -> Node:
        node = self.random.choice(list(self.cluster.nodes.values()))
        self.note(f"of node {node.name}")
        return node

    def _longer(self) -> None:
        """Longer than a lease and its grace, or shorter."""
        seconds = self.random.choice([0.5, 2.0, self.cluster.lease * 2.5])
        self.note(f"for {seconds:g} s")
        time.sleep(seconds)

    def _meanwhile(self) -> None:
        """Somebody uses a session while something is wrong; failing is no fault, lying is."""
        id = self.pick()
        try:
            if self.random.random() < 0.5:
                self.get(id).exec(["true"], timeout=20)
            else:
                self.acknowledge(self.get(id))
        except SojournError as error:
            self.note(f"{id} meanwhile: {error!r}")
            self.failed[error.code] += 1

    def pick(self) -> str:
        id = self.random.choice(self.sessions)
        self.note(f"of session {id}")
        return id

    def kill_node(self) -> None:
        node = self.node()
        node.kill()
        if self.random.random() < 0.5:
            self._longer()
        node.start()

    def stop_node(self) -> None:
        node = self.node()
        node.stop()
        node.start()

    def crash_node(self) -> None:
        node = self.node()
        node.crash()
        node.unmount()
        self._longer()
        self._meanwhile()
        node.start()

    def pause_node(self) -> None:
        node = self.node()
        node.pause()
        self._longer()
        self._meanwhile()
        node.go_on()

    def _cut(self, network: str) -> None:
        node = self.node()
        node.machine.cut(network)
        self._longer()
        self._meanwhile()
        node.machine.join(network)

    def cut_database(self) -> None:
        self._cut("db")

    def cut_store(self) -> None:
        self._cut("s3")

    def cut_servers(self) -> None:
        self._cut("net")

    def kill_server(self) -> None:
        server = self.random.choice(list(self.cluster.servers.values()))
        self.note(f"of server {server.name}")
        server.kill()
        self._longer()
        server.start()

    def migrate(self) -> None:
        id = self.pick()
        try:
            self.get(id).migrate()
        except SojournError as error:
            self.note(f"{error!r}")
            self.failed[f"migrate {error.code}"] += 1

    def suspend(self) -> None:
        session = self.get(self.pick())
        session.suspend()
        if self.random.random() < 0.5:
            session.resume()

    def snapshot(self) -> None:
        self.acknowledge(self.get(self.pick()))

    def drain(self) -> None:
        node = self.node()
        self.client.nodes.drain(node.name)
        until(lambda: not self.held(node.name), _PATIENT)
        self.client.nodes.uncordon(node.name)

    def held(self, name: str) -> int:
        """How many sandboxes a node says that it has."""
        return next(one.used.sessions for one in self.client.nodes.list() if one.name == name)

    # -- what must hold ---------------------------------------------------------------------

    def rest(self) -> None:
        """Wait until every session can be used, and check it."""
        for id in self.sessions:
            until(lambda id=id: self.get(id).exec(["true"]).exit_code == 0, _PATIENT)
            session = self.get(id)
            count = until(lambda session=session: read_count(session) + 1, _PATIENT) - 1
            least = self.acknowledged[id]
            assert count >= least, f"{id} is at {count}, {least} was acknowledged as durable"
            # It may have been resumed from a snapshot that is older than what it had counted.
            until(lambda s=session, c=count: read_count(s) > c, _PATIENT)
            self.note(f"{id} is at {count} or later, on {session.info.node}")


def run(directory: Path, seconds: float, seed: int, say: Callable[[str], None]) -> Faults:
    """Let faults happen for so long. Raises AssertionError with what does not hold."""
    with Cluster(directory, nodes=3, servers=2) as cluster, cluster.networks.entered():
        faults = Faults(cluster, seed)
        end = time.monotonic() + seconds
        try:
            with Watch(node.data for node in cluster.nodes.values()) as watch:
                steps = 0
                while time.monotonic() < end:
                    faults.step()
                    steps += 1
                    assert not watch.twice, watch.twice
                    if steps % 10 == 0:
                        say(f"{steps} steps, {dict(faults.done)}, failed {dict(faults.failed)}")
            assert watch.looks
        except BaseException:
            for process in (*cluster.servers.values(), *cluster.nodes.values()):
                say(f"== {process.name}\n{process.log(20000)}")
            for line in faults.tell():
                say(line)
            say(f"seed {seed}: {dict(faults.done)}, failed {dict(faults.failed)}")
            raise
        finally:
            faults.close()
        return faults


def main() -> None:
    """Run from the command line."""
    place, seconds, *rest = sys.argv[1:]
    seed = int(rest[0]) if rest else random.randrange(1 << 30)
    Path(place).mkdir(parents=True, exist_ok=True)
    faults = run(
        Path(tempfile.mkdtemp(dir=place)), float(seconds), seed, lambda t: print(t, flush=True)
    )
    back = {name: round(sorted(times)[len(times) // 2], 1) for name, times in faults.back.items()}
    print(json.dumps({"seed": seed, "done": faults.done, "failed": faults.failed, "median": back}))


if __name__ == "__main__":
    main()
