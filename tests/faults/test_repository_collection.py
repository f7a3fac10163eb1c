"""Collections beside publishers and other collections, in every order of their requests.

The real code runs, each actor in a thread of its own on its own view of one store in memory. A
request to the store is a step: all actors stand still at their next one, and the test says whose
is done. So an order of steps is a plain list, and the same list gives the same run.

What must hold: a snapshot that was acknowledged and not deleted is whole, at the end and after one
more collection; whoever ended in the middle, and whatever the store's clock does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.errors import Conflict, IntegrityError, ObjectMissing
from sojourn.model.snapshots import Snapshot
from sojourn.repository import collection
from sojourn.repository.backends.base import Backend
from sojourn.repository.downloads import Reader
from sojourn.repository.needs import add_layer
from sojourn.repository.packs import CHUNK_DATA, DATA, PackBuilder, encode_block
from sojourn.repository.pushes import Push
from sojourn.repository.reliance import Exposed, Watch
from support.dictionaries import DictBackend
from support.repositories import DAY, TENANT, Node

SOAK = bool(os.environ.get("SOJOURN_SOAK"))
WAIT = 100.0  # seconds for an actor to come to its next step


class Ended(BaseException):
    """The actor's process was killed."""


class Actor:
    """Something that works on the store step by step."""

    def __init__(self, name: str, backend: DictBackend, work: Callable[[Backend], None]) -> None:
        self.name = name
        self.steps = 0
        self.done = False
        self.error: BaseException | None = None
        self._killed = False
        self._waiting: dict[int, tuple[str, threading.Event]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(work, backend), daemon=True)

    def _run(self, work: Callable[[Backend], None], backend: DictBackend) -> None:
        try:
            work(Stepping(self, backend))
        except Ended:
            pass  # as the test wanted
        except BaseException as error:  # noqa: BLE001 (judged by the test)
            self.error = error
        with self._changed:
            self.done = True
            self._changed.notify_all()

    def step(self, what: str) -> None:
        """Called by whatever thread of the actor is about to ask the store: wait for the turn."""
        turn = threading.Event()
        with self._changed:
            if self._killed:
                raise Ended
            self._waiting[next(self._numbers)] = what, turn
            self._changed.notify_all()
        assert turn.wait(WAIT), f"{self.name} was forgotten at {what}"
        if self._killed:
            raise Ended

    def settle(self) -> bool:
        """Until the actor stands at a step or is done; whether it can go on."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.done or self._waiting, WAIT), self.name
            return not self.done

    def go(self) -> None:
        """Let it do one step."""
        with self._changed:
            number = min(self._waiting, key=lambda number: (self._waiting[number][0], number))
            _, turn = self._waiting.pop(number)
        self.steps += 1
        turn.set()
        self.settle()

    def go_before(self, what: str) -> None:
        """Let it go on until its next step is this one."""
        while self.settle():
            with self._changed:
                if all(step.startswith(what) for step, _ in self._waiting.values()):
                    return
            self.go()
        raise AssertionError(f"{self.name} never came to {what}")

    def start(self) -> None:
        self._thread.start()
        self.settle()

    def kill(self) -> None:
        """End it where it stands; no request of it is done any more."""
        with self._changed:
            self._killed = True
            waiting = [turn for _, turn in self._waiting.values()]
            self._waiting.clear()
        for turn in waiting:
            turn.set()
        self._thread.join(WAIT)
        assert not self._thread.is_alive()

    def finish(self) -> None:
        while self.settle():
            self.go()
        self._thread.join(WAIT)


class Stepping:
    """The store as an actor sees it: each request waits for the actor's turn."""

    def __init__(self, actor: Actor, backend: DictBackend) -> None:
        self._actor = actor
        self._backend = backend

    def __getattr__(self, name: str):
        call = getattr(self._backend, name)
        if name in {"now", "url", "close"}:
            return call

        def stepping(*args, **more):
            self._actor.step(f"{name} {args[0]}")
            if name == "list":
                return iter(list(call(*args, **more)))
            return call(*args, **more)

        return stepping


SMALL = {"a": b"a" * 300, "b": b"b" * 300}
OTHER = {"a": b"a" * 300, "c": b"c" * 300}
LARGER = {**SMALL, "new": b"new"}


class Ground:
    """A store that holds a snapshot, and all of another one that was deleted."""

    def __init__(self, directory: Path) -> None:
        self.store = DictBackend()
        self.node = Node(self.store, directory)
        self.wanted = self.node.publish(SMALL)
        self.kept = self.node.publish(OTHER)
        self.node.delete(self.wanted)
        self.again = [self.node.snapshot(SMALL) for _ in range(3)]
        self.larger = [self.node.snapshot(LARGER) for _ in range(3)]


class Case:
    """A copy of the ground, and actors on it. Without `look` publishers do not ask whether what
    they rely on is being collected."""

    def __init__(self, ground: Ground, *, look: bool = True) -> None:
        self.store = ground.store.copy()
        self.first = ground.node
        self.kept = ground.kept
        self.look = look
        self.acknowledged: list[Snapshot] = []
        self._again = iter(ground.again)
        self._larger = iter(ground.larger)

    def node(self, backend: Backend) -> Node:
        return self.first.fresh(backend)

    def publisher(self, name: str = "publisher", *, larger: bool = False) -> Actor:
        """Makes the deleted snapshot durable again, under another id; or one of a layer that was
        never there and has its files and more."""
        snapshot = next(self._larger if larger else self._again)

        def work(backend: Backend) -> None:
            node = self.node(backend)
            watches = [Watch(node.domain()), Watch(node.domain("shared"))]
            push = Push(watches[0], watches[1], Copies(node), None)
            if not self.look:
                push._exposed = lambda snapshot: Exposed(frozenset(), frozenset())
            push.send(snapshot)
            self.acknowledged.append(snapshot)

        return Actor(name, self.store, work)

    def collector(self, name: str = "collector", grace: float = 0.0) -> Actor:
        def work(backend: Backend) -> None:
            self.node(backend).collect(grace=grace)

        return Actor(name, self.store, work)

    def flaws(self) -> list[str]:
        """What is wrong with the snapshots, as a process that starts now sees it."""
        found = []
        node = self.node(self.store)
        for snapshot in [self.kept, *self.acknowledged]:
            for number, layer in enumerate(snapshot.layers):
                domain = node.domain(TENANT if number else "shared")
                chunks: set[bytes] = set()
                try:
                    add_layer(domain, layer.id, chunks)
                    assert chunks
                    for _ in Reader(domain).chunks(chunks):
                        pass
                except (IntegrityError, ObjectMissing) as error:
                    found.append(error.message)
        return found


class Copies:
    def __init__(self, node: Node) -> None:
        self.node = node

    def manifest(self, layer: str):
        return self.node.trees[layer][0]

    def layer_path(self, layer: str):
        return self.node.trees[layer][1]


def play(actors: list[Actor], turns: Iterator[int], killed: dict[int, int] | None = None) -> None:
    """Let actors do their steps in the order of `turns` (numbers of actors; one that is done is
    passed over), and all that is left in their order. `killed` says which actor ends after how
    many of its steps."""
    for actor in actors:
        actor.start()
    try:
        for turn in turns:
            actor = actors[turn]
            if killed and killed.get(turn) == actor.steps:
                actor.kill()
            elif not actor.done:
                actor.go()
            if all(actor.done for actor in actors):
                break
        for number, actor in enumerate(actors):
            while not actor.done:
                if killed and killed.get(number) == actor.steps:
                    actor.kill()
                else:
                    actor.go()
    except BaseException:
        for actor in actors:
            actor.kill()
        raise


def judge(case: Case, actors: list[Actor]) -> None:
    for actor in actors:
        # A collector may meet a snapshot that is written and not acknowledged, and stop.
        if actor.error is not None and not isinstance(actor.error, (Conflict, IntegrityError)):
            raise actor.error
        if actor.name.startswith("publisher") and actor.error is not None:
            raise actor.error
    assert case.flaws() == []
    with contextlib.suppress(IntegrityError):  # for the same reason
        case.node(case.store).collect(grace=0)
    assert case.flaws() == []


@pytest.fixture
def make(tmp_path):
    ground = Ground(tmp_path)

    def made(
        *, look: bool = True, publishers: int = 1, collectors: int = 1
    ) -> tuple[Case, list[Actor]]:
        case = Case(ground, look=look)
        actors = [case.publisher(f"publisher {n}") for n in range(publishers)]
        actors += [case.collector(f"collector {n}") for n in range(collectors)]
        return case, actors

    return made


@pytest.fixture
def steps(make):
    """How many steps publisher and collector take, the longer of before and after the other."""
    most = [0, 0]
    for order in ((0, 1), (1, 0)):
        _, actors = make()
        for actor in actors:
            actor.start()
        for number in order:
            actors[number].finish()
            most[number] = max(most[number], actors[number].steps)
    return most[0], most[1]


def interrupted(steps: tuple[int, int]) -> Iterator[list[int]]:
    """All orders in which one of two actors does everything at some point of the other's way."""
    for inner, outer in ((0, 1), (1, 0)):
        for begun in range(steps[outer] + 1):
            yield [outer] * begun + [inner] * steps[inner]


def switched(steps: tuple[int, int]) -> Iterator[list[int]]:
    """A fifth of all orders with three changes from one actor to the other."""
    for first, second in ((0, 1), (1, 0)):
        for begun in range(1, steps[first] + 1):
            for between in range(1, steps[second] + 1):
                for more in range(1, steps[first] - begun + 1, 5):
                    yield [first] * begun + [second] * between + [first] * more


def test_a_snapshot_outlives_a_collection_that_comes_in_at_any_point(make, steps):
    assert min(steps) > 15, "they do what is meant"
    for turns in interrupted(steps):
        case, actors = make()
        play(actors, iter(turns))
        assert len(case.acknowledged) == 1
        judge(case, actors)


def test_without_the_look_after_the_snapshot_chunks_are_lost(make, steps):
    # Were this not found, the test above would prove nothing.
    lost = 0
    for turns in interrupted(steps):
        case, actors = make(look=False)
        play(actors, iter(turns))
        lost += bool(case.flaws())
    assert lost > 0


@pytest.mark.parametrize("trusting", [False, True])
def test_a_layer_whose_writer_has_not_looked_yet_is_not_taken_at_its_word(
    make, steps, monkeypatch, trusting
):
    # One publisher finds files in the dead pack; a collection names the pack; only then the layer
    # is written, by a publisher that ends there. Another one finds the layer. No tombstone has it.
    if trusting:
        monkeypatch.setattr(Watch, "_safe", lambda *_: True)
    lost = 0
    for begun in range(steps[1] + 1):
        case, _ = make()
        writer = case.publisher("writer", larger=True)
        collector = case.collector()
        finder = case.publisher("finder", larger=True)
        writer.start()
        writer.go_before(f"put {TENANT}/layers/")
        collector.start()
        for _ in range(begun):
            if not collector.done:
                collector.go()
        writer.go()
        writer.kill()
        finder.start()
        finder.finish()
        collector.finish()
        assert finder.error is None
        assert len(case.acknowledged) == 1
        lost += bool(case.flaws())
    assert (lost > 0) == trusting


@pytest.mark.parametrize("careless", [False, True])
def test_two_collections_do_not_each_take_the_others_copy(make, monkeypatch, careless):
    # A needed chunk lies in two packs. One collection has read the indexes before the larger pack
    # was in any, and names it; the other one, later, names the smaller.
    if careless:
        needed = collection._Collector._needed_packs

        def own_only(self, name, marks, own, named):
            return needed(self, name, marks, own, own)

        monkeypatch.setattr(collection._Collector, "_needed_packs", own_only)
    case, _ = make()
    content = OTHER["c"]
    late = case.node(case.store).domain()
    builder = PackBuilder(late.keys, DATA)
    more = os.urandom(200)  # makes it the larger one
    block = encode_block([content, more], late.keys, builder.salt, 0)
    names = [late.keys.chunk_name(CHUNK_DATA, blake3(each).digest()) for each in (content, more)]
    builder.add(block, [(names[0], len(content)), (names[1], len(more))])
    data, info = builder.finish()
    case.store.put(late.pack_key(info.id), data)

    numbers = itertools.count(1 << 30, -1)  # so that a collection comes to its own tombstone first
    monkeypatch.setattr(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
    early, later = case.collector("early"), case.collector("later")
    naming = f"put {TENANT}/tombstones/"
    early.start()
    early.go_before(naming)
    late.write_index([info])
    later.start()
    later.go_before(naming)
    for each in (early, later):
        each.go()
        each.go_before(naming)  # the verdict
    for each in (early, later):
        each.finish()
        assert each.error is None
    assert bool(case.flaws()) == careless


@pytest.mark.skipif(not SOAK, reason="some minutes")
@pytest.mark.timeout(3600)
def test_a_snapshot_outlives_a_collection_whatever_their_turns(make, steps):
    for turns in switched(steps):
        case, actors = make()
        play(actors, iter(turns))
        judge(case, actors)


@pytest.mark.timeout(3600 if SOAK else 120)
@settings(
    max_examples=2000 if SOAK else 60,
    deadline=None,
    derandomize=not SOAK,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_many_at_once_some_killed_under_a_clock_that_jumps(make, data):
    publishers = data.draw(st.integers(1, 3), "publishers")
    collectors = data.draw(st.integers(1, 3), "collectors")
    count = publishers + collectors
    case, actors = make(publishers=publishers, collectors=collectors)
    spans = st.tuples(st.integers(0, count - 1), st.integers(1, 40))
    turns = [
        number for number, span in data.draw(st.lists(spans, max_size=12)) for _ in range(span)
    ]
    killed = data.draw(
        st.dictionaries(st.integers(0, count - 1), st.integers(0, 50), max_size=count - 1)
    )
    jumps = data.draw(
        st.dictionaries(st.integers(0, 100), st.sampled_from([DAY, -DAY, 0.0]), max_size=3)
    )

    def with_jumps() -> Iterator[int]:
        for at, turn in enumerate(turns):
            case.store.ahead = jumps.get(at, case.store.ahead)
            yield turn

    play(actors, with_jumps(), killed)
    judge(case, actors)
