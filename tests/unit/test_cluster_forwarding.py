"""Requests on their way through a server to a node and back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from sojourn.errors import (
    CapacityExhausted,
    ErrorBody,
    NodeUnavailable,
    SessionElsewhere,
    SojournError,
)
from sojourn.model.nodes import Resources
from support.cluster_rig import GIB, Asked, Cluster, cluster, lease, says_its_name

Works = Callable[[Cluster], Awaitable[None]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Cluster]]:
    """A cluster that the tests have in turn."""
    with asyncio.Runner() as runner:
        opened = cluster(tmp_path_factory.mktemp("cluster"))
        found = runner.run(opened.__aenter__())
        yield runner, found
        runner.run(opened.__aexit__(None, None, None))


@pytest.fixture
def run(shared: tuple[asyncio.Runner, Cluster]) -> Callable[..., None]:
    """Run a coroutine function with the cluster."""
    runner, found = shared

    def runs(work: Works, *, patience: float = 2.0) -> None:
        async def inner() -> None:
            async with asyncio.timeout(60):
                await found.reset(patience)
                await work(found)

        runner.run(inner())

    return runs


def error_of(body: bytes) -> ErrorBody:
    return msgspec.json.decode(body, type=ErrorBody)


def refuses(error: SojournError, then: Callable[[Asked], Awaitable[None]] = says_its_name):  # type: ignore[no-untyped-def]
    """Answers an error once."""
    told = False

    async def does(asked: Asked) -> None:
        nonlocal told
        if told:
            await then(asked)
            return
        told = True
        await asked.body()
        await asked.fail(error)

    return does


# -- who gets it --------------------------------------------------------------------------------


def test_a_session_is_asked_of_its_holder(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        for node in found.nodes:
            session = await found.session(node.id, name=f"of-{node.id[-3:]}")
            for ref in (session.id, session.name):
                status, _, body = await found.request("GET", f"/v1/sessions/{ref}")
                assert (status, body) == (200, node.id.encode())

    run(work)


def test_the_caller_is_named_by_the_server_alone(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        await found.request(
            "GET",
            "/v1/sessions",
            sojourn_principal="aGVsbG8=",
            x_api_key="other",
            connection="x-a",
            x_a="1",
        )
        asked = found.nodes[0].got[-1] if found.nodes[0].got else found.nodes[1].got[-1]
        assert (asked.who.tenant, asked.who.role) == (found.tenant, "operator")
        assert not {b"authorization", b"x-api-key", b"x-a"} & set(asked.headers)
        status, _, body = await found.request("GET", "/v1/sessions", token="wrong")
        assert (status, error_of(body).code) == (401, "unauthenticated")
        assert sum(len(node.got) for node in found.nodes) == 1
        # What the node checks itself bears nobody's name.
        await found.request("GET", "/files", e2b_sandbox_id="x", sojourn_principal="aGVsbG8=")
        got = [one for node in found.nodes for one in node.got if one.path == "/files"]
        assert got[0].who is None

    run(work)


def test_what_nodes_answer_to_servers_is_not_passed_on(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        session = await found.session(found.nodes[0].id)
        sandbox = session.id.replace("_", "-")
        for path in (
            "/node/evict",
            "/%6eode/evict",
            "//node/evict",
            f"/node/sessions/{session.id}/release",
            "/node/refresh?x",
        ):
            for headers in ({}, {"e2b_sandbox_id": sandbox}, {"host": f"1-{sandbox}.localhost"}):
                status, _, _ = await found.request("POST", path, b"{}", **headers)
                assert status in (404, 405), path
        assert not any(node.got for node in found.nodes)

    run(work)


def test_a_client_that_names_no_host_is_answered(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        asks = f"GET /v1/sessions HTTP/1.0\r\nauthorization: Bearer {found.token}\r\n\r\n"
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(asks.encode())
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()

    run(work)


def test_the_head_of_a_request_is_bounded(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        reader, writer = await asyncio.open_connection(*found.address)
        writer.write(b"GET /v1/sessions HTTP/1.1\r\nx: ")
        sent, answer = 0, b""
        with contextlib.suppress(ConnectionError):  # it is closed while more comes
            while sent < 64 << 20:
                writer.write(b"a" * 65536)
                sent += 65536
                await writer.drain()
                await asyncio.sleep(0)
            answer = await reader.read(4096)
        assert sent < 32 << 20
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        writer.close()

    run(work)


def test_another_tenants_session_is_looked_for_in_the_callers_name(
    run: Callable[..., None],
) -> None:
    async def work(found: Cluster) -> None:
        other = await found.database.create_tenant("other")
        mine = await found.session(found.nodes[0].id, name="web")
        await found.session(found.nodes[1].id, name="web", tenant=other.id)
        status, _, body = await found.request("GET", "/v1/sessions/web", token=found.tenant_token)
        assert (status, body) == (200, mine.holder.encode())  # type: ignore[union-attr]

    run(work)


def test_a_session_that_moved_is_found_again(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        one, other = found.nodes
        session = await found.session(one.id)
        await found.request("GET", f"/v1/sessions/{session.id}")  # remembered
        one.does = refuses(SessionElsewhere("elsewhere", holder=other.id))
        # The database says the same as before: the server must look anew, and does.
        status, _, body = await found.request(
            "POST", f"/v1/sessions/{session.id}/exec", b'{"a": 1}'
        )
        assert (status, body) == (200, one.id.encode())
        assert len(one.got) == 3

    run(work)


def test_a_body_is_sent_again_only_while_it_is_kept(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        sizes: list[int] = []

        async def counts(asked: Asked) -> None:
            sizes.append(len(await asked.body()))
            await asked.answer(b"done")

        path = f"/v1/sessions/{session.id}/files"
        for size, status in ((900_000, 200), (3_000_000, 503)):
            node.does = refuses(SessionElsewhere("not here", holder=None), counts)
            got, _, body = await found.request("PUT", path, b"x" * size)
            assert got == status, body
        assert sizes == [900_000]

    run(work)


def test_a_node_that_cannot_be_reached_is_waited_for(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        await node.stop()
        asking = asyncio.create_task(found.request("GET", f"/v1/sessions/{session.id}"))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await node.start()
        status, _, body = await asking
        assert (status, body) == (200, node.id.encode())

    run(work)


def test_what_any_node_can_answer_another_one_does(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        await found.nodes[0].stop()
        for _ in range(4):
            status, _, body = await found.request("GET", "/v1/templates")
            assert (status, body) == (200, found.nodes[1].id.encode())

    run(work)


def test_a_new_session_goes_where_there_is_room(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        small, large = found.nodes
        await lease(found.database, small, capacity=Resources(1, GIB, GIB, 0))
        await found.members.refresh()
        asked = {"limits": {"cpus": 2, "memory_bytes": GIB}}
        body = msgspec.json.encode(asked)
        for _ in range(3):
            status, _, answer = await found.request("POST", "/v1/sessions", body)
            assert (status, answer) == (200, large.id.encode())
        # What was placed counts, although the node has not told of it: the fifth has no room.
        status, _, answer = await found.request("POST", "/v1/sessions", body)
        assert status == 200
        status, headers, answer = await found.request("POST", "/v1/sessions", body)
        assert (status, error_of(answer).code) == (503, "capacity_exhausted")
        assert int(headers["retry-after"]) > 0

    run(work, patience=0.3)


def test_a_node_that_is_full_after_all_is_passed_over(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        full = CapacityExhausted("full")
        for node in found.nodes:
            node.does = refuses(full)
        status, _, _ = await found.request("POST", "/v1/sessions", b"{}")
        # Both were asked, and both refused: the queue is not entered for what nobody can take.
        assert status == 503
        assert {len(node.got) for node in found.nodes} == {1}

    run(work, patience=0.2)


def test_a_node_without_its_lease_is_waited_for(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node, other = found.nodes
        session = await found.session(node.id)
        away = NodeUnavailable("no lease", node=node.id)
        asked = 0

        async def does(one: Asked) -> None:
            nonlocal asked
            asked += 1
            await (one.fail(away) if asked <= 3 else one.answer(b"here"))

        node.does = does
        status, _, body = await found.request("POST", f"/v1/sessions/{session.id}/exec", b"{}")
        assert (status, body, asked) == (200, b"here", 4)
        # What another one can answer is not waited for.
        asked = 0
        for _ in range(3):
            status, _, body = await found.request("GET", "/v1/templates")
            assert (status, body) == (200, other.id.encode())

    run(work)


def test_what_a_verb_met_that_is_on_record_is_its_answer(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        node.does = refuses(CapacityExhausted("full", operation="opr_1"))
        status, _, body = await found.request("POST", f"/v1/sessions/{session.id}/resume", b"{}")
        assert (status, error_of(body).details["operation"]) == (503, "opr_1")
        assert len(node.got) == 1

    run(work)


def test_what_a_session_is_made_with_may_be_large(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        async def measures(asked: Asked) -> None:
            await asked.answer(str(len(await asked.body())).encode())

        for node in found.nodes:
            node.does = measures
        for size, status in ((4 << 20, 200), (9 << 20, 413)):
            body = msgspec.json.encode({"env": {"A": "x" * size}})
            got, _, answer = await found.request("POST", "/v1/sessions", body)
            assert got == status
            if status == 200:
                assert int(answer) == len(body)
            else:
                assert error_of(answer).code == "too_large"
        got, _, answer = await found.request("POST", "/v1/sessions", b'{"limits": "what"}')
        assert (got, answer) == (200, b"18")  # the node says what is wrong with it

    run(work)


def test_a_signed_address_is_asked_of_each_node_until_one_knows_it(
    run: Callable[..., None],
) -> None:
    async def work(found: Cluster) -> None:
        knows = found.nodes[1]

        async def does(asked: Asked) -> None:
            body = await asked.body()
            known = asked.node is knows and b"signature=good" in asked.query
            await asked.answer(body or b"here", 200 if known else 401)

        for node in found.nodes:
            node.does = does
        for _ in range(4):
            assert (await found.request("GET", "/files?signature=good"))[2] == b"here"
        for _ in range(2):
            sent = b"x" * 900_000
            assert (await found.request("POST", "/files?signature=good", sent))[2] == sent
        assert (await found.request("GET", "/files?signature=bad"))[0] == 401
        knows.got.clear()
        found.nodes[0].got.clear()
        assert (await found.request("GET", "/files"))[0] == 401
        assert sum(len(node.got) for node in found.nodes) == 1  # without one nobody knows more

    run(work)


# -- streams ------------------------------------------------------------------------------------


def test_bytes_pass_as_they_come(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        go_on = asyncio.Event()

        async def streams(asked: Asked) -> None:
            await asked.start(200, content_type="text/plain")
            await asked.write(b"first")
            await go_on.wait()
            await asked.write(b"second", more=False)

        node.does = streams
        reader, writer = await connect(found, "GET", f"/v1/sessions/{session.id}/output")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200" in head.splitlines()[0]
        assert b"first" in await reader.readuntil(b"first")
        go_on.set()
        assert b"second" in await reader.readuntil(b"second")
        writer.close()

    run(work)


async def connect(
    found: Cluster, method: str, path: str, *headers: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*found.address)
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {found.token}"]
    writer.write("\r\n".join([*lines, *headers, "", ""]).encode())
    return reader, writer


def test_when_the_client_leaves_the_node_learns_of_it(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        left = asyncio.Event()
        began = asyncio.Event()

        async def streams(asked: Asked) -> None:
            await asked.start(200)
            await asked.write(b"x")
            began.set()
            while (await asked.receive())["type"] != "http.disconnect":
                pass
            left.set()

        async def waits(asked: Asked) -> None:
            began.set()
            while (await asked.receive())["type"] != "http.disconnect":
                pass
            left.set()

        for does in (streams, waits):  # after the head, and before it
            node.does = does
            _, writer = await connect(found, "GET", f"/v1/sessions/{session.id}/output")
            await began.wait()
            writer.close()
            async with asyncio.timeout(10):
                await left.wait()
            left.clear()
            began.clear()
        async with asyncio.timeout(10):
            while found.front.under_way:
                await asyncio.sleep(0.01)

    run(work)


def test_half_a_body_never_passes_for_a_whole_one(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def reads(asked: Asked) -> None:
            try:
                await asked.body()
            except ConnectionError:
                ended.set_result("left")
            else:
                ended.set_result("whole")

        node.does = reads
        for header, part in (
            ("content-length: 10", b"half."),
            ("transfer-encoding: chunked", b"5\r\nhalf.\r\n"),
        ):
            ended = asyncio.get_running_loop().create_future()
            path = f"/v1/sessions/{session.id}/files"
            _, writer = await connect(found, "PUT", path, header)
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            async with asyncio.timeout(10):
                assert await ended == "left"

    run(work)


def test_connections_to_nodes_are_used_again(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        clients = set()

        async def answers(asked: Asked) -> None:
            clients.add(asked.client)
            body = await asked.body()
            await asyncio.sleep(len(body) / 1000)  # also longer than a client is not watched
            await asked.answer(b"done")

        node.does = answers
        for size in (1, 50, 100) * 3:
            path = f"/v1/sessions/{session.id}/exec"
            assert (await found.request("POST", path, b"x" * size))[0] == 200
        assert len(clients) == 1

    run(work)


def test_a_slow_reader_holds_up_the_node_and_fills_no_memory(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        sent = 0

        async def floods(asked: Asked) -> None:
            nonlocal sent
            await asked.start(200)
            with contextlib.suppress(Exception):
                for _ in range(1000):
                    await asked.write(b"x" * (1 << 20))
                    sent += 1

        node.does = floods
        reader, writer = await connect(found, "GET", f"/v1/sessions/{session.id}/output")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        before = sent
        await asyncio.sleep(0.5)
        assert sent == before < 100  # MiB: what the buffers of the kernel and both sides hold
        writer.close()

    run(work)


def test_a_large_body_is_passed_on_as_it_comes(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        arrived = asyncio.Event()

        async def counts(asked: Asked) -> None:
            size = 0
            async for piece in asked.pieces():
                size += len(piece)
                if size >= 2 << 20:
                    arrived.set()
            await asked.answer(str(size).encode())

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(2):
                yield b"x" * (1 << 20)
            await arrived.wait()  # the node has it before the body is at its end
            yield b"y"

        node.does = counts
        path = f"/v1/sessions/{session.id}/files"
        status, _, body = await found.request("PUT", path, pieces())
        assert (status, int(body)) == (200, (2 << 20) + 1)

    run(work)


def test_an_answer_that_breaks_off_is_cut_off(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)

        async def breaks(asked: Asked) -> None:
            await asked.start(200)
            await asked.write(b"part")
            await asyncio.sleep(0.05)
            node.abort()

        node.does = breaks
        reader, writer = await connect(found, "GET", f"/v1/sessions/{session.id}/output")
        got = await reader.read()
        assert b"part" in got and not got.endswith(b"0\r\n\r\n")
        writer.close()

    run(work)


def test_a_request_whose_node_dies_is_not_sent_again(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)

        async def dies(asked: Asked) -> None:
            await asked.body()
            node.abort()

        node.does = dies
        status, _, body = await found.request("POST", f"/v1/sessions/{session.id}/exec", b"{}")
        assert (status, error_of(body).code) == (503, "interrupted")
        assert len(node.got) == 1

    run(work)


def test_a_lost_node_is_not_waited_for(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id, state="running")
        asked = asyncio.Event()

        async def hangs(one: Asked) -> None:
            asked.set()
            await asyncio.sleep(60)

        node.does = hangs
        asking = asyncio.create_task(
            found.request("POST", f"/v1/sessions/{session.id}/exec", b"{}")
        )
        await asked.wait()
        known = await found.database.get_node(node.id)
        await found.database.stop_node(known.fence)
        lost = await found.database.lose_node(0.0)
        assert lost is not None and lost.id == node.id
        await found.members.refresh()
        status, _, body = await asking
        assert (status, error_of(body).code) == (503, "interrupted")

    run(work)


def test_what_a_node_that_started_anew_does_is_let_be(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def waits(one: Asked) -> None:
            asked.set()
            await go_on.wait()
            await one.answer(b"done")

        node.does = waits
        path = f"/v1/sessions/{session.id}/exec"
        await found.members.refresh()
        # It has started anew since it was read, and was asked before it is read again.
        await lease(found.database, node)
        asking = asyncio.create_task(found.request("POST", path, b"{}"))
        await asked.wait()
        await found.members.refresh()
        go_on.set()
        assert (await asking)[2] == b"done"
        # What was asked of the one before is not waited for.
        go_on.clear()
        asked.clear()
        asking = asyncio.create_task(found.request("POST", path, b"{}"))
        await asked.wait()
        for _ in range(2):  # the first may have begun before it was asked
            await found.members.refresh()
        await lease(found.database, node)
        for _ in range(2):
            await found.members.refresh()
        assert error_of((await asking)[2]).code == "interrupted"
        go_on.set()

    run(work)


def test_what_no_node_got_is_not_interrupted_by_its_loss(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node, other = found.nodes
        session = await found.session(node.id)
        await node.stop()
        asking = asyncio.create_task(found.request("POST", f"/v1/sessions/{session.id}/exec"))
        await asyncio.sleep(0.3)
        known = await found.database.get_node(node.id)
        await found.database.stop_node(known.fence)
        assert await found.database.lose_node(0.0) is not None
        await found.members.refresh()
        assert not asking.done()
        # Nothing of it is durable: it failed with its node, and goes on to whoever takes it.
        assert await found.database.fail_over(node.id)
        status, _, body = await asking
        assert body == other.id.encode(), body.decode()
        assert status == 200

    run(work)


def test_a_stop_cuts_off_streams_and_lets_the_rest_end(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        go_on = asyncio.Event()
        began = [asyncio.Event(), asyncio.Event()]

        async def does(asked: Asked) -> None:
            if asked.path.endswith("output"):
                await asked.start(200)
                await asked.write(b"x")
                began[0].set()
                await asyncio.sleep(60)
            else:
                began[1].set()
                await go_on.wait()
                await asked.answer(b"done")

        node.does = does
        reader, writer = await connect(found, "GET", f"/v1/sessions/{session.id}/output")
        asking = asyncio.create_task(found.request("POST", f"/v1/sessions/{session.id}/exec"))
        await asyncio.gather(*(one.wait() for one in began))
        found.front.begin_stop()
        assert not (await reader.read()).endswith(b"0\r\n\r\n")
        go_on.set()
        assert (await asking)[2] == b"done"
        writer.close()

    run(work)


def test_a_stop_lets_a_command_tell_that_it_was_begun(run: Callable[..., None]) -> None:
    """Cut off before, its client could not know; it would have to ask whoever asked for it."""

    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        began, go_on = asyncio.Event(), asyncio.Event()

        async def does(asked: Asked) -> None:
            await asked.start(200)
            began.set()
            await go_on.wait()
            await asked.write(b"begun and done", more=False)

        node.does = does
        asking = asyncio.create_task(found.request("POST", f"/v1/sessions/{session.id}/exec"))
        await began.wait()
        await asyncio.sleep(0.1)  # until the head has passed
        found.front.begin_stop()
        go_on.set()
        assert (await asking)[2] == b"begun and done"

    run(work)


def test_a_stop_cuts_off_in_the_end_what_goes_on_and_on(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sojourn.server.cluster.front._BEGIN_SECONDS", 0.1)

    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)

        async def does(asked: Asked) -> None:
            await asked.start(200)
            await asked.write(b"begun")
            await asyncio.sleep(60)

        node.does = does
        reader, writer = await connect(found, "POST", f"/v1/sessions/{session.id}/exec")
        read = b""
        while b"begun" not in read:
            read += await reader.read(100)
        found.front.begin_stop()
        assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()

    run(work)


# -- what is shared -----------------------------------------------------------------------------


def test_changed_secrets_are_in_force_everywhere_when_that_is_answered(
    run: Callable[..., None],
) -> None:
    async def work(found: Cluster) -> None:
        order: list[str] = []

        async def does(asked: Asked) -> None:
            body = await asked.body()
            if asked.path == "/node/refresh":
                await asyncio.sleep(0.2)
                order.append(f"refreshed {body.decode()}")
                await asked.answer(status=204)
            else:
                order.append("changed")
                await asked.answer(b"{}")

        for node in found.nodes:
            node.does = does
        status, _, _ = await found.request("PUT", "/v1/secrets/a", b"{}")
        order.append("answered")
        assert status == 200
        assert order == ["changed", 'refreshed {"what":"secrets"}', "answered"]

    run(work)


def test_changed_secrets_are_told_also_when_who_changed_them_leaves(
    run: Callable[..., None],
) -> None:
    async def work(found: Cluster) -> None:
        changing, refreshed = asyncio.Event(), set[str]()
        all_told = asyncio.Event()

        async def does(asked: Asked) -> None:
            await asked.body()
            if asked.path == "/node/refresh":
                refreshed.add(asked.node.id)
                await asked.answer(status=204)
                if refreshed == {node.id for node in found.nodes}:
                    all_told.set()
            else:
                changing.set()
                await asyncio.sleep(60)

        for node in found.nodes:
            node.does = does
        _, writer = await connect(found, "PUT", "/v1/secrets/a")
        await changing.wait()
        writer.close()
        async with asyncio.timeout(20):
            await all_told.wait()

    run(work)


def test_a_revoked_token_opens_nothing_once_that_is_answered(run: Callable[..., None]) -> None:
    async def work(found: Cluster) -> None:
        token, secret = await found.database.create_token(found.tenant, "tenant")  # type: ignore[arg-type]

        async def does(asked: Asked) -> None:
            await asked.body()
            if asked.method == "DELETE":
                await found.database.revoke_token(token.id)
            await asked.answer(b"{}")

        for node in found.nodes:
            node.does = does
        assert (await found.request("GET", "/v1/sessions", token=secret))[0] == 200
        assert (await found.request("DELETE", f"/v1/tokens/{token.id}"))[0] == 200
        assert (await found.request("GET", "/v1/sessions", token=secret))[0] == 401

    run(work)


# -- what a server answers itself ---------------------------------------------------------------


def test_nodes_are_the_operators(tmp_path: Path) -> None:
    async def work(found: Cluster) -> None:
        status, _, body = await found.request("GET", "/v1/nodes")
        assert status == 200
        assert {one["id"] for one in msgspec.json.decode(body)} == {one.id for one in found.nodes}
        node = found.nodes[0]
        for method, path in (
            ("GET", "/v1/nodes"),
            ("POST", f"/v1/nodes/{node.id}/cordon"),
            ("DELETE", f"/v1/nodes/{node.id}"),
            ("POST", "/v1/nodes/tokens"),
        ):
            status, _, body = await found.request(method, path, b"{}", token=found.tenant_token)
            assert (status, error_of(body).code) == (403, "forbidden"), path
        assert (await found.request("POST", f"/v1/nodes/{node.id}/cordon"))[0] == 200
        for _ in range(3):
            status, _, body = await found.request("POST", "/v1/sessions", b"{}")
            assert body == found.nodes[1].id.encode()
        session = await found.session(node.id)
        assert (await found.request("GET", f"/v1/sessions/{session.id}"))[2] == node.id.encode()
        status, _, body = await found.request("DELETE", f"/v1/nodes/{node.id}")
        assert (status, error_of(body).code) == (409, "conflict")
        assert (await found.request("DELETE", f"/v1/nodes/{node.id}?force=true"))[0] == 204
        assert len(msgspec.json.decode((await found.request("GET", "/v1/nodes"))[2])) == 1
        # Where nodes join is another address, over TLS.
        assert (await found.request("POST", "/v1/nodes/join", b"{}"))[0] in (404, 405)

    async def alone() -> None:
        async with asyncio.timeout(60), cluster(tmp_path) as found:
            await work(found)

    asyncio.run(alone())  # it removes a node
