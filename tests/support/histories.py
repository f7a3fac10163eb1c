"""Random histories of sessions on a real server, each step compared with a model."""

from __future__ import annotations

import time

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sojourn.client import Session, Sojourn
from sojourn.errors import WrongState
from support.counting import counting
from support.histories_machine import Machine
from support.histories_model import Model, Point
from support.servers import ServerProcess, eventually

NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.integers(0, 99).map(str)
WHICH = st.integers(0, 1000)
MOST_SESSIONS = 4

COUNTER = counting(every=0.1)
# Everything the model knows, in one command: name, content and a separator for each file.
LOOK = r"""
for d in /root/w /tmp/w; do
  for f in "$d"/*; do [ -f "$f" ] && { echo "$f"; cat "$f"; printf '\0'; }; done
done
[ -f /root/count ] && { echo /root/count; cat /root/count; printf '\0'; }
exit 0
"""


class World:
    """The server all histories run against, and what was done to it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.machine = Machine(server)
        self.client: Sojourn = server.client()
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def restart(self, *, kill: bool) -> None:
        self.client.close()
        if kill:
            self.server.kill()
        else:
            assert self.server.stop() == 0
        self.client = self.server.start()


class Histories(RuleBasedStateMachine):
    """Sessions and their models, step by step."""

    world: World  # set by whoever runs it

    def __init__(self) -> None:
        super().__init__()
        self.pool: list[tuple[Session, Model]] = []
        self.labels = 0

    @initialize()
    def create(self) -> None:
        session = self.world.client.sessions.create()
        model = Model("s0")
        self.pool.append((session, model))
        self.world.count("histories")
        self._settle(session, model)

    # -- tools ------------------------------------------------------------------------------

    def _pick(self, which: int) -> tuple[Session, Model]:
        session, model = self.pool[which % len(self.pool)]
        self.world.count("steps")
        self._say(f"on {model.name} ({model.state})")
        return session, model

    def _point(self, model: Model, which: int) -> str:
        ids = sorted(model.points)
        return ids[which % len(ids)]

    def _say(self, text: str) -> None:
        note(f"    {text}")

    def _run(self, session: Session, command: str) -> None:
        result = session.exec(command)
        assert result.exit_code == 0, (command, result)

    def _changing(self, model: Model) -> None:
        model.wake()
        model.before = model.now.copy()

    def _settle(self, session: Session, model: Model) -> None:
        """Compare state and tree with the model, and learn the snapshots this step made."""
        history = session.history()
        session.refresh()
        assert session.info.operation is None
        assert session.state == model.state, (session.info, model)
        known = {item.id: item for item in history}
        missing = model.points.keys() - known.keys()
        assert not missing, f"{model.name} lost {missing} from its tree"
        assert session.head is not None
        current = [item.id for item in history if item.current]
        assert current == [session.head]
        for item in history:
            if item.id in model.points:
                continue
            content = model.now if item.id == session.head else model.before
            self._say(f"{model.name}: {item.id[-5:]} {item.kind} {item.label} mem={item.memory}")
            model.points[item.id] = Point(content.copy(), item.memory, item.parent, item.label)
        model.head = session.head
        for id, point in model.points.items():
            assert known[id].memory == point.memory
            assert known[id].label == point.label
        if model.live:
            head = model.points[model.head]
            present = model.now if head.memory else model.now.without_memory()
            assert present.same_as(head.restored()), (
                f"the head of {model.name} is not its present",
                model.now,
                head,
            )

    def _look(self, session: Session, model: Model) -> None:
        """Compare files, counter and variable of a running session with the model."""
        result = session.exec(LOOK)
        assert result.exit_code == 0, result
        found: dict[str, str] = {}
        for piece in result.stdout.decode().split("\0")[:-1]:
            name, _, content = piece.partition("\n")
            found[name] = content
        counted = found.pop("/root/count", "").split("\n")[:-1]
        wanted = {f"/root/w/{name}": text for name, text in model.now.files.items()}
        wanted |= {f"/tmp/w/{name}": text for name, text in model.now.memory_files.items()}
        assert found == wanted, f"files of {model.name}"
        assert counted == [str(n + 1) for n in range(len(counted))], "the counter's log has a gap"
        assert len(counted) >= model.now.counted, f"the counter of {model.name} went back"
        model.now.counted = len(counted)
        if model.now.counting:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                lines = session.files.read("/root/count").count(b"\n")
                if lines > len(counted):
                    break
                time.sleep(0.02)
            else:
                raise AssertionError(f"the counter of {model.name} stands still")

    def _done(self, session: Session, model: Model) -> None:
        self._settle(session, model)
        if model.state == "running":
            self._look(session, model)
            # Looking may be a turn with a snapshot (the counter went on), met at the next step.
            model.before = model.now.copy()

    # -- work -------------------------------------------------------------------------------

    @rule(which=WHICH, name=NAMES, text=TEXTS, memory=st.booleans())
    def append(self, which: int, name: str, text: str, memory: bool) -> None:
        session, model = self._pick(which)
        self._changing(model)
        files = model.now.memory_files if memory else model.now.files
        directory = "/tmp/w" if memory else "/root/w"
        self._run(session, f"mkdir -p {directory}; printf %s {text} >> {directory}/{name}")
        files[name] = files.get(name, "") + text
        self._done(session, model)

    @rule(which=WHICH, name=NAMES, text=TEXTS)
    def write(self, which: int, name: str, text: str) -> None:
        session, model = self._pick(which)
        self._changing(model)
        session.files.write(f"/root/w/{name}", text)
        model.now.files[name] = text
        self._done(session, model)

    @precondition(lambda self: any(model.now.files for _, model in self.pool))
    @rule(which=WHICH, name=NAMES, other=NAMES, move=st.booleans())
    def remove_or_move(self, which: int, name: str, other: str, move: bool) -> None:
        having = [pair for pair in self.pool if pair[1].now.files]
        session, model = having[which % len(having)]
        self._say(f"on {model.name} ({model.state})")
        self.world.count("steps")
        files = sorted(model.now.files)
        chosen = files[ord(name) % len(files)]
        self._changing(model)
        if chosen not in model.now.files:
            return  # it was gone with memory
        text = model.now.files.pop(chosen)
        if move and other != chosen:
            session.files.move(f"/root/w/{chosen}", f"/root/w/{other}")
            model.now.files[other] = text
        else:
            session.files.remove(f"/root/w/{chosen}")
        self._done(session, model)

    @rule(which=WHICH, n=st.integers(1, 9))
    def add_to_variable(self, which: int, n: int) -> None:
        session, model = self._pick(which)
        self._changing(model)
        result = session.run_code(f"v = globals().get('v', 0) + {n}\nv")
        model.now.variable = (model.now.variable or 0) + n
        assert result.error is None
        assert result.text == str(model.now.variable)
        self._done(session, model)

    @precondition(lambda self: any(not model.now.counting for _, model in self.pool))
    @rule(which=WHICH)
    def start_counter(self, which: int) -> None:
        idle = [pair for pair in self.pool if not pair[1].now.counting]
        session, model = idle[which % len(idle)]
        self._changing(model)
        if model.now.counting:
            return
        # The log of one before goes first, as a step of its own.
        self._run(session, "rm -f /root/count")
        model.now.counted = 0
        self._settle(session, model)
        session.spawn(COUNTER)
        model.now.counting = True
        eventually(lambda: session.files.exists("/root/count"))
        self._done(session, model)

    # -- lifecycle --------------------------------------------------------------------------

    @rule(which=WHICH)
    def pause(self, which: int) -> None:
        session, model = self._pick(which)
        if model.state == "suspended":
            try:
                session.pause()
            except WrongState:
                return
            raise AssertionError("a suspended session was paused")
        session.pause()
        model.state = "paused"
        self._done(session, model)

    @rule(which=WHICH, memory=st.sampled_from([True, True, True, False]))
    def suspend(self, which: int, memory: bool) -> None:
        session, model = self._pick(which)
        session.suspend(memory=memory)
        model.before = model.now.copy()
        model.state = "suspended"
        self._done(session, model)

    @rule(which=WHICH)
    def resume(self, which: int) -> None:
        session, model = self._pick(which)
        session.resume()
        model.wake()
        self._done(session, model)

    # -- the tree ---------------------------------------------------------------------------

    @rule(which=WHICH, memory=st.sampled_from([True, True, False]))
    def snapshot(self, which: int, memory: bool) -> None:
        session, model = self._pick(which)
        self.labels += 1
        label = f"label-{self.labels}"
        taken = session.snapshot(label, memory=memory)
        had = model.points[model.head].memory
        assert taken.memory == (memory and (model.live or had))
        self._done(session, model)
        assert model.head == taken.id or model.state == "running"
        assert model.points[taken.id].label == label

    @rule(which=WHICH, point=WHICH)
    def rollback(self, which: int, point: int) -> None:
        session, model = self._pick(which)
        target = self._point(model, point)
        self._say(f"to {target[-5:]}")
        session.rollback(target)
        model.before = model.now.copy()
        model.go_to(target)
        self._done(session, model)

    @precondition(lambda self: len(self.pool) < MOST_SESSIONS)
    @rule(which=WHICH, point=st.none() | WHICH, start=st.booleans(), two=st.booleans())
    def fork(self, which: int, point: int | None, start: bool, two: bool) -> None:
        session, model = self._pick(which)
        n = 2 if two and len(self.pool) + 2 <= MOST_SESSIONS else 1
        target = None if point is None else self._point(model, point)
        children = session.fork(n, target, start=start)
        assert len(children) == n
        self._settle(session, model)  # a fork from now may have left a snapshot
        state = "running" if start else "suspended"
        for child in children:
            origin = child.info.forked_from
            assert origin is not None
            assert origin == (target or model.head)
            made = model.child(f"{model.name}.{len(self.pool)}", origin, state)
            self.pool.append((child, made))
            self._done(child, made)
        self._done(session, model)

    @precondition(lambda self: any(self._parents()))
    @rule(which=WHICH)
    def promote(self, which: int) -> None:
        forks = self._parents()
        child, parent = forks[which % len(forks)]
        session = next(s for s, m in self.pool if m is parent[1])
        self._say(f"{child[1].name} into {parent[1].name}")
        self.world.count("steps")
        into = child[0].promote()
        assert into.id == session.id
        self._settle(child[0], child[1])
        model = parent[1]
        model.before = model.now.copy()
        model.points |= child[1].line(child[1].head)
        model.go_to(child[1].head)
        self._done(session, model)

    def _parents(self) -> list[tuple[tuple[Session, Model], tuple[Session, Model]]]:
        by_model = {id(model): (session, model) for session, model in self.pool}
        return [
            ((session, model), by_model[id(model.parent)])
            for session, model in self.pool
            if model.parent is not None and id(model.parent) in by_model
        ]

    @precondition(lambda self: len(self.pool) > 1)
    @rule(which=WHICH)
    def delete_fork(self, which: int) -> None:
        session, model = self.pool.pop(1 + which % (len(self.pool) - 1))
        self._say(f"{model.name}")
        session.delete()
        for other_session, other in self.pool:
            # What they descend from stays in their trees.
            self._settle(other_session, other)

    @rule(which=WHICH, a=WHICH, b=WHICH)
    def diff(self, which: int, a: int, b: int) -> None:
        session, model = self._pick(which)
        first, second = self._point(model, a), self._point(model, b)
        found = session.diff(first, second)
        assert not found.truncated
        changes = {
            item.path.removeprefix("/root/w/"): item.kind
            for item in found.changes
            if item.path.startswith("/root/w/")
            and (item.kind != "changed" or "content" in item.what)
        }
        assert changes == model.changes(first, second)

    # -- disasters --------------------------------------------------------------------------

    @rule(kill=st.booleans())
    def restart_server(self, kill: bool) -> None:
        self.world.restart(kill=kill)
        self.world.count("server kills" if kill else "server stops")
        self._reconnect()
        for session, model in self.pool:
            self._done(session, model)

    def _reconnect(self) -> None:
        client = self.world.client
        self.pool = [(client.sessions.get(session.id), model) for session, model in self.pool]

    @precondition(lambda self: any(model.live for _, model in self.pool))
    @rule(which=WHICH)
    def kill_sandbox(self, which: int) -> None:
        live = [pair for pair in self.pool if pair[1].live]
        session, model = live[which % len(live)]
        self._say(f"of {model.name} ({model.state})")
        self._settle(session, model)  # what is not in a snapshot yet would be lost
        sandbox = self.world.machine.sandbox_of(session.id)
        assert sandbox is not None
        assert self.world.machine.kill(sandbox) > 0
        self.world.count("sandbox kills")
        session.resume()
        model.before = model.now.without_memory()
        model.state = "suspended"
        model.wake()
        self._done(session, model)

    # -- at the end -------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            for session, model in self.pool:
                session.resume()
                model.wake()
                self._done(session, model)
                if model.now.variable is None and not model.now.counting:
                    continue  # most likely nothing runs: spare the start of an interpreter
                self._changing(model)
                text = session.run_code("globals().get('v')").text
                assert text == (None if model.now.variable is None else str(model.now.variable))
        finally:
            for session, _ in reversed(self.pool):
                session.delete()
