"""The LangGraph checkpointer: its published conformance tests, and sessions in step with graphs."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra `frameworks`")
pytest.importorskip("langgraph.checkpoint.conformance", reason="needs the extra `frameworks`")

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from sojourn.adapters import langgraph_threads
from sojourn.adapters.langgraph import SojournSaver
from sojourn.errors import InvalidRequest, SessionNotFound, Unsupported
from support.loopback import only_loopback  # noqa: F401 (used by all)
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged
LOG = "/srv/log"
POLICY = {"auto_snapshot": "off"}


class State(TypedDict):
    steps: Annotated[list[str], operator.add]


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("langgraph") / "data")
    server.start()
    yield server
    server.remove()


@pytest.fixture
def open_saver(own: ServerProcess) -> Iterator[Any]:
    made: list[SojournSaver] = []

    def make(inner: Any) -> SojournSaver:
        made.append(SojournSaver(inner, url=own.url, token=own.token, policy=POLICY))
        return made[-1]

    yield make
    for one in made:
        one.close()


def node(saver: SojournSaver, name: str) -> Any:
    """A node that leaves a line in the session and one in the state."""

    def work(state: State, config: RunnableConfig) -> State:
        saver.session(config).files.write(LOG, f"{name}\n", append=True)
        return {"steps": [name]}

    return work


def line(saver: SojournSaver, *names: str, nodes: dict[str, Any] | None = None) -> Any:
    graph = StateGraph(State)
    for name in names:
        graph.add_node(name, (nodes or {}).get(name) or node(saver, name))
    for before, after in zip((START, *names), (*names, END), strict=True):
        graph.add_edge(before, after)
    return graph.compile(checkpointer=saver)


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def log(own: ServerProcess, saver: SojournSaver, name: str) -> list[str]:
    with own.client() as client:
        return client.sessions.get(saver._threads.name(name)).files.read_text(LOG).split()


def test_conformance(own: ServerProcess) -> None:
    @checkpointer_test(name="SojournSaver", skip_capabilities={"delete_for_runs", "prune"})
    async def made() -> AsyncIterator[SojournSaver]:
        async with SojournSaver(InMemorySaver(), url=own.url, token=own.token) as saver:
            yield saver

    report = asyncio.run(validate(made))
    failures = [one for result in report.results.values() for one in result.failures or ()]
    assert not failures
    assert {name for name, result in report.results.items() if result.passed} == {
        "put",
        "put_writes",
        "get_tuple",
        "list",
        "delete_thread",
        "copy_thread",
    }


def test_going_back_takes_the_session_back(own: ServerProcess, open_saver: Any) -> None:
    inner = InMemorySaver()
    saver = open_saver(inner)
    graph = line(saver, "a", "b", "c")
    where = thread("back")
    graph.invoke({"steps": []}, where)
    assert log(own, saver, "back") == ["a", "b", "c"]
    graph.invoke({"steps": []}, where)  # goes on from the end
    assert log(own, saver, "back") == ["a", "b", "c", "a", "b", "c"]
    before_b = next(
        one for one in reversed(list(graph.get_state_history(where))) if one.next == ("b",)
    )

    another = open_saver(inner)  # a process that knows nothing of the one before
    again = line(another, "a", "b", "c")
    again.get_state(where)  # a look changes nothing
    assert len(log(own, saver, "back")) == 6
    assert again.invoke(None, before_b.config)["steps"] == ["a", "b", "c"]
    assert log(own, saver, "back") == ["a", "b", "c"]

    changed = again.update_state(before_b.config, {"steps": ["x"]})
    again.invoke(None, changed)
    assert log(own, saver, "back")[0] == "a"

    another.copy_thread("back", "copy")
    assert log(own, another, "copy") == log(own, another, "back")
    again.invoke(None, {"configurable": {**before_b.config["configurable"], "thread_id": "copy"}})
    again.invoke({"steps": []}, where)
    assert log(own, another, "copy") == ["a", "b", "c"]
    assert len(log(own, another, "back")) > 3
    for name in ("back", "copy"):
        another.delete_thread(name)
        with pytest.raises(SessionNotFound):
            log(own, another, name)
    with pytest.raises(InvalidRequest):
        saver.session(where)


class Dying(SojournSaver):
    """Loses what a process that dies at the end of `b` would not have recorded: the framework sends
    a task's result and the checkpoint after it at the same time, so that either may be missing."""

    lost: str = ""

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        if self.lost != "result" and "b" in checkpoint["channel_values"].get("steps", ()):
            with self._threads.putting(config, checkpoint["id"]):
                raise Killed
        return super().put(config, checkpoint, metadata, new_versions)

    def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
        mine = any(channel == "steps" and value == ["b"] for channel, value in writes)
        if mine and self.lost == "result":
            raise Killed  # before its snapshot
        if mine and self.lost == "both":
            with self._threads.ending(config, writes, task_id):
                raise Killed  # after its snapshot
        super().put_writes(config, writes, task_id, task_path)


@pytest.mark.parametrize("lost", ["result", "checkpoint", "both"])
def test_a_death_around_the_record_of_a_task_converges(
    own: ServerProcess, open_saver: Any, lost: str
) -> None:
    inner = InMemorySaver()
    saver = Dying(inner, url=own.url, token=own.token, policy=POLICY)
    saver.lost = lost

    def dying(state: State, config: RunnableConfig) -> State:
        raise Killed

    name = f"death-{lost}"
    where = thread(name)
    with pytest.raises(Killed), saver:
        graph = line(saver, "a", "b", "c", nodes={"c": dying})
        graph.invoke({"steps": []}, where, durability="sync")
    assert log(own, saver, name) == ["a", "b"]  # it was done, recorded or not
    with own.client() as client:
        session = client.sessions.get(saver._threads.name(name))
        assert any((one.label or "").startswith("langgraph ") for one in session.history()[-2:])
    another = open_saver(inner)
    graph = line(another, "a", "b", "c")
    known = graph.get_state(where)
    assert known.values["steps"] == (["a"] if lost == "both" else ["a", "b"])
    assert graph.invoke(None, where)["steps"] == ["a", "b", "c"]
    assert log(own, another, name) == ["a", "b", "c"]


def test_a_task_that_fails_or_waits_starts_anew_and_its_neighbours_do_not(
    own: ServerProcess, open_saver: Any
) -> None:
    saver = open_saver(InMemorySaver())
    failing = [True]
    asked = node(saver, "asked")

    def ask(state: State, config: RunnableConfig) -> State:
        asked(state, config)
        return {"steps": [interrupt("?")]}

    def fail(state: State, config: RunnableConfig) -> State:
        saver.session(config).files.write("/srv/half", "half")
        if failing.pop() if failing else False:
            raise ValueError("no")
        return {"steps": ["second"]}

    graph = line(saver, "a", "fail", "ask", nodes={"fail": fail, "ask": ask})
    where = thread("fails")
    with pytest.raises(ValueError, match="no"):
        graph.invoke({"steps": []}, where)
    found = graph.invoke(None, where)
    assert found["steps"] == ["a", "second"]
    assert log(own, saver, "fails") == ["a", "asked"]
    assert graph.invoke(Command(resume="yes"), where)["steps"] == ["a", "second", "yes"]
    assert log(own, saver, "fails") == ["a", "asked"]  # not twice

    wide = StateGraph(State)
    together = [True]

    def late(state: State, config: RunnableConfig) -> State:
        if together.pop() if together else False:
            while "one" not in (saver.session(config).exec(f"cat {LOG}").text):
                pass
            interrupt("later")
        saver.session(config).files.write(LOG, "two\n", append=True)
        return {"steps": ["two"]}

    wide.add_node("one", node(saver, "one"))
    wide.add_node("two", late)
    wide.add_edge(START, "one")
    wide.add_edge(START, "two")
    graph = wide.compile(checkpointer=saver)
    graph.invoke({"steps": []}, thread("wide"))
    assert graph.invoke(Command(resume=1), thread("wide"))["steps"] == ["one", "two"]
    assert log(own, saver, "wide") == ["one", "two"]  # what `one` did is still there


def test_graphs_within_graphs_and_asynchronous_nodes(own: ServerProcess, open_saver: Any) -> None:
    inner = InMemorySaver()
    saver = open_saver(inner)
    failing = [True]

    async def work(state: State, config: RunnableConfig, name: str) -> State:
        session = await saver.asession(config)
        await session.files.write(LOG, f"{name}\n", append=True)
        if name == "y" and failing.pop() if failing and name == "y" else False:
            raise ValueError("no")
        return {"steps": [name]}

    def made(name: str) -> Any:
        async def one(state: State, config: RunnableConfig) -> State:
            return await work(state, config, name)

        return one

    inside = StateGraph(State)
    inside.add_node("x", made("x"))
    inside.add_node("y", made("y"))
    inside.add_edge(START, "x")
    inside.add_edge("x", "y")
    nodes = {"a": made("a"), "b": inside.compile(), "c": made("c")}
    graph = line(saver, "a", "b", "c", nodes=nodes)

    async def run() -> None:
        where = thread("within")
        with pytest.raises(ValueError, match="no"):
            await graph.ainvoke({"steps": []}, where, durability="sync")
        await graph.ainvoke(None, where)
        assert await asyncio.to_thread(log, own, saver, "within") == ["a", "x", "y", "c"]
        await saver.aclose()

    asyncio.run(run())


def test_durability_at_the_exit_is_refused(
    own: ServerProcess, open_saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(langgraph_threads, "GATE_SECONDS", 0.3)
    saver = open_saver(InMemorySaver())
    with pytest.raises(Unsupported, match="not recorded"):
        line(saver, "a", "b").invoke({"steps": []}, thread("exit"), durability="exit")
