"""C54, C60, C76 and C83 through every client, on one session that all of them work in.

| client | C54 output | C60 at once | C76 huge file | C83 other token |
|---|---|---|---|---|
| own SDK, blocking and asynchronous | exact bytes | yes | a range of it | 404 |
| E2B, Python (both) and JavaScript | text, exact | yes | as a stream | the SDK's not found |
| MCP | exact bytes, bounded and told | yes | parts | tool error |
| OpenAI Agents SDK | exact bytes, bounded and told | yes | a part; whole is refused | no `resume` |
| deepagents | text, bounded and told | yes, streams merged | refused | not found |
| SWE-ReX | text, bounded and told | yes | refused | does not start |
| LangGraph | n/a | n/a | n/a | not found |

LangGraph's checkpointer has no commands and files of its own: nodes are handed the session of our
own SDK, so the first three are those of the first row. What it adds is which session that is, so
the last one applies: a saver with another token finds no session of a thread that is not its own.
E2B's SDKs, deepagents and SWE-ReX give output as text: bytes that are no UTF-8 are replaced by
their own definition, so noise is checked in base64 there, and that noise does no harm.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import pytest

from sojourn.client import Session, Sojourn
from sojourn.errors import SessionNotFound
from support import javascript, mcp_rig
from support.client_cases import CLIENTS, PART, Client, Point, javascript_case, sha256
from support.servers import ServerProcess

pytestmark = pytest.mark.privileged

NOISE = 5 * 1024 * 1024
LONG = 17_600_000  # more than any client keeps that does not give all of it
SPARSE = "/workspace/sparse"
in_javascript = pytest.mark.skipif(
    bool(javascript.missing()), reason=javascript.missing() or "is there"
)


@pytest.fixture(scope="module")
def box(shared_server: ServerProcess) -> Iterator[Session]:
    with shared_server.client() as client:
        session = client.sessions.create(policy={"auto_snapshot": "off"})
        session.files.mkdir("/workspace")
        done = session.exec(
            f"head -c {NOISE} /dev/urandom > /tmp/noise; truncate -s 2G {SPARSE};"
            f" printf x >> {SPARSE}; ln {SPARSE} /workspace/other; ln -s {SPARSE} /tmp/sparse"
        )
        assert done.ok
        yield session
        session.delete()


@pytest.fixture(scope="module")
def point(shared_server: ServerProcess, box: Session) -> Point:
    return Point(shared_server.url, shared_server.token, box.id, shared_server.data)


@pytest.fixture(scope="module")
def stranger(shared_server: ServerProcess) -> str:
    with shared_server.client() as client:
        return str(client.tokens.create("stranger-of-the-cases").token)


def available(name: str) -> None:
    needed = CLIENTS[name][2]
    if needed and importlib.util.find_spec(needed.partition(".")[0]) is None:
        pytest.skip("needs the extra `frameworks`")


def drive(name: str, point: Point, work: Any) -> None:
    available(name)

    async def whole() -> None:
        async with CLIENTS[name][0](point) as client:
            await work(client)

    mcp_rig.drive(whole, 100)


each = pytest.mark.parametrize("name", CLIENTS)


@each
def test_c54_output_is_exact_or_said_not_to_be(name: str, point: Point, box: Session) -> None:
    noise = box.files.read("/tmp/noise")

    async def work(client: Client) -> None:
        done = await client.run("cat /tmp/noise; exit 3")
        assert done.code == 3 and done.stdout
        if client.exact:
            assert done.told or done.stdout == noise
        else:
            done = await client.run("base64 -w0 /tmp/noise")
            assert done.told or base64.b64decode(done.stdout) == noise
        done = await client.run(f"yes 0123456789abcde | head -c {LONG}")
        assert done.told or done.stdout == b"0123456789abcde\n" * (LONG // 16)

    drive(name, point, work)


@each
def test_c60_twenty_at_once_are_isolated(name: str, point: Point) -> None:
    async def work(client: Client) -> None:
        async def one(n: int) -> None:
            done = await client.run(
                f"echo w{n} 1; sleep 0.{n % 7}; echo w{n} 2; echo e{n} >&2; exit {n + 1}"
            )
            out, err = f"w{n} 1\nw{n} 2\n", f"e{n}\n"
            if client.merged:
                out, err = out + err, ""
            assert (done.stdout.decode(), done.stderr.decode(), done.code) == (out, err, n + 1)

        await asyncio.gather(*(one(n) for n in range(20)))

    drive(name, point, work)


def standing(box: Session) -> tuple[object, ...]:
    """What a stranger could have changed; its deadlines move by themselves."""
    info = box.refresh().info
    return info.state, info.epoch, info.head, info.labels, info.policy


def resident_peak(pid: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


@each
def test_c76_a_file_of_two_gigabytes_is_bounded(
    name: str, point: Point, shared_server: ServerProcess
) -> None:
    before = [resident_peak(pid) for pid in ("self", str(shared_server.pid))]

    async def work(client: Client) -> None:
        found = await client.head(SPARSE)
        if isinstance(found, bytes):
            assert found == bytes(PART)
        assert (await client.run("echo alive")).stdout == b"alive\n"

    drive(name, point, work)
    after = [resident_peak(pid) for pid in ("self", str(shared_server.pid))]
    assert after[0] - before[0] < 256 << 20 and after[1] - before[1] < 128 << 20


@each
def test_c83_with_another_token_there_is_no_such_session(
    name: str, point: Point, stranger: str, box: Session
) -> None:
    before = standing(box)

    async def work(client: Client) -> None:
        raise AssertionError("opened")

    with pytest.raises(CLIENTS[name][1]) as raised:
        drive(name, replace(point, token=stranger), work)
    assert stranger not in str(raised.value)
    assert standing(box) == before


# -- in JavaScript ------------------------------------------------------------------------------


@in_javascript
def test_c54_in_javascript(point: Point, box: Session) -> None:
    told = javascript_case(point, "output")
    assert told["noise"] == sha256(box.files.read("/tmp/noise"))
    assert told["long"] == [LONG, sha256(b"0123456789abcde\n" * (LONG // 16))]


@in_javascript
def test_c60_in_javascript(point: Point) -> None:
    for n, found in enumerate(javascript_case(point, "parallel")):
        assert found == [f"w{n} 1\nw{n} 2\n", f"e{n}\n", n + 1]


@in_javascript
def test_c76_in_javascript(point: Point) -> None:
    told = javascript_case(point, "huge")
    assert 3_000_000 < told["size"] < 100_000_000 and told["peak"] < 400 << 20


@in_javascript
def test_c83_in_javascript(point: Point, stranger: str, box: Session) -> None:
    before = standing(box)
    told = javascript_case(replace(point, token=stranger), "strange")
    assert stranger not in told["message"] and standing(box) == before


# -- LangGraph ----------------------------------------------------------------------------------


class State(TypedDict):
    n: int


def test_langgraph_hands_out_our_own_session_and_only_its_tenants(
    point: Point, stranger: str
) -> None:
    pytest.importorskip("langgraph.graph", reason="needs the extra `frameworks`")
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import END, START, StateGraph

    from sojourn.adapters.langgraph import SojournSaver

    inner, seen = InMemorySaver(), []

    def graph(saver: SojournSaver) -> Any:
        def node(state: State, config: RunnableConfig) -> State:
            seen.append(saver.session(config))
            return state

        built = StateGraph(State)
        built.add_node("node", node)
        built.add_edge(START, "node")
        built.add_edge("node", END)
        return built.compile(checkpointer=saver)

    # The annotations of nodes are looked up among the names of this module.
    globals()["RunnableConfig"] = RunnableConfig
    where: Any = {"configurable": {"thread_id": "of-the-cases"}}
    with SojournSaver(inner, url=point.url, token=point.token) as mine:
        graph(mine).invoke({"n": 1}, where)
        assert [type(one) for one in seen] == [Session]
        with SojournSaver(inner, url=point.url, token=stranger) as theirs:
            # The checkpoints are the same, and say where to go on; the session is not theirs.
            with pytest.raises(SessionNotFound, match="is gone"):
                graph(theirs).invoke({"n": 2}, where)
        with Sojourn(point.url, stranger) as client:
            assert client.sessions.list() == []  # nor was an empty one made in its place
        graph(mine).invoke({"n": 3}, where)
        mine.delete_thread("of-the-cases")
    assert len({one.id for one in seen}) == 1
