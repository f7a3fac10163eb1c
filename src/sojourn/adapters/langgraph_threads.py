"""The sessions of LangGraph's threads: which snapshot belongs to which checkpoint.

Guarantee: a snapshot's label names the checkpoint its task ran on, and the task (or the checkpoint
that followed, where that was recorded first); it counts only where the checkpoints hold that. What
a checkpoint saw is thus found from what is recorded alone, also by a process that knows nothing of
the one before; a snapshot of what was never recorded is passed over.

The world at a checkpoint is the newest snapshot of a task that led to it: of the checkpoint itself
when its tasks are under way again, else of its parents in turn; a checkpoint that did not come of
its parent's tasks (`input`, `update`, `fork`) has the world that its parent began with.

Checkpoints from the first use of a session on say so in their metadata: a thread whose session was
deleted, or is another tenant's, is refused instead of going on in an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointMetadata, CheckpointTuple

from sojourn.adapters import commands
from sojourn.client import Session, Sojourn
from sojourn.errors import (
    InvalidRequest,
    NameTaken,
    SessionNotFound,
    SnapshotNotFound,
    Unsupported,
)
from sojourn.wire.api import SnapshotInfo

GATE_SECONDS = 60.0
"""How long a task waits for the results of the tasks before it to be recorded."""

_RUNTIME = "__pregel_runtime"  # is in the configuration of a run, not of a look at its state
_TASK = "__pregel_task_id"
_MAP = "checkpoint_map"
_START = "langgraph-start"
_USED = "sojourn"  # in the metadata of checkpoints: the thread has a session by now

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True):
    """Where a node is: its thread, the checkpoint of the whole graph it runs on, its task, and the
    namespace of the graph it is a node of."""

    thread: str
    root: str
    task: str
    graph: str


class Wanted(msgspec.Struct, frozen=True):
    """What is asked of the checkpoints: one of them, or all of a thread."""

    config: RunnableConfig
    all: bool = False


Asking = Generator[Wanted, list[CheckpointTuple], T]


def thread_of(config: RunnableConfig) -> str:
    """The thread of a configuration."""
    return str(config["configurable"]["thread_id"])


def begins_run(config: RunnableConfig) -> bool:
    """Whether this is how the run of a whole graph asks for its checkpoint."""
    configurable = config["configurable"]
    return _RUNTIME in configurable and not configurable.get(_MAP)


def place_of(config: RunnableConfig) -> Place:
    """Where the node of a configuration is. Raises InvalidRequest when it is not one of a node."""
    configurable = config.get("configurable", {})
    try:
        root = configurable[_MAP][""]
        graph = str(configurable["checkpoint_ns"]).rpartition("|")[0]
        return Place(thread_of(config), root, configurable[_TASK], graph)
    except KeyError as error:
        raise InvalidRequest(
            "this is not the configuration of a node in a graph with a checkpointer",
            next_step="Take `config: RunnableConfig` as the node's second argument and pass it on.",
        ) from error


def root_of(config: RunnableConfig) -> str:
    """The checkpoint of the whole graph under which writes are recorded."""
    configurable = config["configurable"]
    found: Mapping[str, str] = configurable.get(_MAP) or {}
    return str(found.get("") or configurable["checkpoint_id"])


def label_of(root: str, task: str) -> str:
    """How the snapshot of a task is found."""
    return f"langgraph {root} {hashlib.sha256(task.encode()).hexdigest()[:24]}"


def _put_of(namespace: str, checkpoint: str) -> str:
    """What stands for the tasks that led to a checkpoint, where it came before their results."""
    return f"put {namespace} {checkpoint}"


class _Thread:
    """What this process knows of a thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # one task at a time finds its place
        self.change = threading.Condition()
        self.recording = threading.Lock()  # one snapshot and its record at a time
        self.users: dict[str, Place] = {}  # tasks that have the session and are not recorded
        self.positioned = False  # this run has found its place
        self.used = False  # a task of this process had the session
        self.clean: str | None = None  # the snapshot that the session is at, untouched
        self.session: Session | None = None


class Threads:
    """The sessions of all threads."""

    def __init__(self, client: Sojourn, prefix: str, create: Mapping[str, Any]) -> None:
        self._client = client
        self._prefix = prefix
        self._create = dict(create)
        self._known: dict[str, _Thread] = {}
        self._lock = threading.Lock()

    def _thread(self, thread: str) -> _Thread:
        with self._lock:
            return self._known.setdefault(thread, _Thread())

    def name(self, thread: str) -> str:
        """The name of a thread's session: threads are named by anything, sessions are not."""
        return self._prefix + hashlib.sha256(thread.encode()).hexdigest()[:24]

    def begin(self, thread: str) -> None:
        """A run begins: tasks of another are over, whatever they left."""
        known = self._thread(thread)
        with known.change:
            if known.users:
                known.clean = None
            known.users.clear()
            known.positioned = False
            known.change.notify_all()

    # -- a task comes to its session

    @contextlib.contextmanager
    def entering(self, place: Place) -> Iterator[None]:
        """Wait until the tasks of checkpoints before this one are recorded, and hold off others.
        Raises Unsupported when they never are."""
        known = self._thread(place.thread)
        deadline = time.monotonic() + GATE_SECONDS
        with known.change:
            while any(one.root != place.root for one in known.users.values()):
                if not known.change.wait(deadline - time.monotonic()):
                    raise Unsupported(
                        "the tasks before this one are not recorded, so there is no going back",
                        next_step='Run the graph with durability="sync" or "async".',
                    )
        known.lock.acquire()
        try:
            yield
        finally:
            known.lock.release()

    def positioned(self, place: Place) -> bool:
        """Whether this run has brought the session to its place already."""
        return self._thread(place.thread).positioned

    def search(self, place: Place) -> Asking[str]:
        """The snapshot that the node's checkpoint saw. Raises SessionNotFound when the thread had
        a session that is not there any more, SnapshotNotFound when it has none of this graph."""
        session = self._thread(place.thread).session or self._find(place.thread)
        shots = _newest_first(session)
        root, with_tasks, under_way, used = place.root, True, True, False
        while True:
            config: RunnableConfig = {
                "configurable": {"thread_id": place.thread, "checkpoint_id": root}
            }
            config["configurable"]["checkpoint_ns"] = ""
            here = yield Wanted(config)
            if with_tasks:
                found = [one for one in shots if (one.label or "").startswith(f"langgraph {root} ")]
                if found and not under_way:
                    return found[0].id  # all its tasks are done, as another came of them
                if found:
                    recorded = yield from _recorded(place.thread, root, here)
                    for one in found:
                        if one.label in recorded:
                            return one.id
            used = used or bool(here and here[0].metadata.get(_USED))
            if not here or here[0].parent_config is None:
                break
            with_tasks, under_way = here[0].metadata.get("source") == "loop", False
            root = here[0].parent_config["configurable"]["checkpoint_id"]
        if session is None and used:
            raise SessionNotFound(
                f"the session of thread {place.thread!r} is gone, and its graph has worked in one",
                next_step="Delete the thread with `delete_thread`, or begin another one.",
            )
        for one in shots or _newest_first(self._session(place.thread)):
            if one.label == _START:
                return one.id
        raise SnapshotNotFound(
            f"session {self.name(place.thread)} has no snapshot of its beginning"
        )

    def position(self, place: Place, snapshot: str) -> None:
        """Bring the session to a snapshot, unless it is known to be at it."""
        known = self._thread(place.thread)
        if known.clean != snapshot:
            self._session(place.thread).rollback(snapshot)
        known.positioned = True

    def hand_out(self, place: Place) -> Session:
        """Give the session to a task."""
        known = self._thread(place.thread)
        with known.change:
            known.users[place.task] = place
            known.clean = None
            known.used = True
        return self._session(place.thread)

    def _session(self, thread: str) -> Session:
        known = self._thread(thread)
        if known.session is None:
            known.session = self._find(thread) or self._make(thread)
        return known.session

    def _find(self, thread: str) -> Session | None:
        try:
            return self._client.sessions.get(self.name(thread))
        except SessionNotFound:
            return None

    def _make(self, thread: str) -> Session:
        given = dict(self._create)
        marks = commands.labels("langgraph", given.pop("labels", None))
        try:
            session = self._client.sessions.create(name=self.name(thread), labels=marks, **given)
        except NameTaken:
            session = self._client.sessions.get(self.name(thread))  # by another at the same moment
        if not any(one.label == _START for one in session.history()):
            session.snapshot(_START)
        return session

    # -- a task ends

    def marked(self, config: RunnableConfig, metadata: CheckpointMetadata) -> CheckpointMetadata:
        """The metadata of a checkpoint, which says that the thread has a session where it has."""
        if not self._thread(thread_of(config)).used:
            return metadata
        return cast(CheckpointMetadata, {**metadata, _USED: True})

    @contextlib.contextmanager
    def ending(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task: str
    ) -> Iterator[None]:
        """Take the snapshot of a task that used the session, if these are its results; those after
        it wait until they are recorded."""
        known = self._thread(thread_of(config))
        with known.recording:
            shot: SnapshotInfo | None = None
            done = all(channel not in WRITES_IDX_MAP for channel, _ in writes)
            if done and task in known.users and known.session is not None:
                shot = known.session.snapshot(label_of(root_of(config), task))
            try:
                yield
            finally:
                self._settled(known, [task], shot)

    @contextlib.contextmanager
    def putting(self, config: RunnableConfig, checkpoint: str) -> Iterator[None]:
        """Take the snapshot that belongs to a checkpoint whose tasks are not recorded yet: the
        framework records both at the same time, in any order."""
        known = self._thread(thread_of(config))
        namespace = config["configurable"].get("checkpoint_ns", "")
        with known.recording:
            done = [
                one
                for one in known.users.values()
                if one.graph == namespace and one.root != checkpoint
            ]
            shot: SnapshotInfo | None = None
            if done and known.session is not None:
                label = label_of(done[0].root, _put_of(namespace, checkpoint))
                shot = known.session.snapshot(label)
            yield
            self._settled(known, [one.task for one in done], shot)

    def _settled(self, known: _Thread, tasks: list[str], shot: SnapshotInfo | None) -> None:
        """Tasks are over; where nobody else has the session in hand, it stays at the snapshot."""
        with known.change:
            here = [task for task in tasks if known.users.pop(task, None) is not None]
            if here:
                known.clean = shot.id if shot is not None and not known.users else None
                known.change.notify_all()

    # -- threads as a whole

    def delete(self, thread: str) -> None:
        """Delete the session of a thread, if it has one."""
        with self._lock:
            self._known.pop(thread, None)
        session = self._find(thread)
        if session is not None:
            session.delete()

    def fork(self, source: str, target: str) -> None:
        """Fork the session of one thread for another, if it has one and the other has none."""
        session = self._find(source)
        if session is None or self._find(target) is not None:
            return
        with contextlib.suppress(NameTaken):  # by another at the same moment
            session.fork(names=[self.name(target)], labels=dict(session.labels))


def _newest_first(session: Session | None) -> list[SnapshotInfo]:
    return [] if session is None else sorted(session.history(), key=_age, reverse=True)


def _age(one: SnapshotInfo) -> tuple[float, str]:
    return one.created_at, one.id


def _recorded(
    thread: str, root: str, here: list[CheckpointTuple]
) -> Generator[Wanted, list[CheckpointTuple], set[str]]:
    """The labels of the tasks whose results are recorded under a checkpoint, in the graph itself
    and in graphs within it."""
    whole: RunnableConfig = {"configurable": {"thread_id": thread}}
    inside = [one for one in (yield Wanted(whole, all=True)) if _under(one, root)]
    tasks = {
        task
        for one in (*here, *inside)
        for task, channel, _ in one.pending_writes or ()
        if channel not in WRITES_IDX_MAP
    }
    for one in inside:
        configurable = one.config["configurable"]
        tasks.add(_put_of(configurable.get("checkpoint_ns", ""), configurable["checkpoint_id"]))
    return {label_of(root, task) for task in tasks}


def _under(one: CheckpointTuple, root: str) -> bool:
    """Whether a checkpoint is one of a graph within a task of `root`."""
    return bool((one.metadata.get("parents") or {}).get("") == root)
