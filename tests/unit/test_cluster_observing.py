"""What a server in front of nodes counts and traces, and how the cluster stands at a scrape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sojourn.model.nodes import NodeState
from sojourn.server import observing as observing_module
from sojourn.server.answers import Shutdown
from sojourn.server.app import all_endpoints, serve_app
from sojourn.server.cluster.callers import Callers
from sojourn.server.cluster.failover import Failover, Guard
from sojourn.server.cluster.observing import observing
from sojourn.server.listening import listen
from sojourn.server.observed import Observed, by_token
from sojourn.server.route_patterns import RoutePatterns
from sojourn.telemetry import declared, scraping, tracing
from support.cluster_rig import Cluster, cluster, lease

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def run(place: Path, work: Callable[[Cluster], Awaitable[None]]) -> None:
    """With a cluster whose front is observed, as `sojourn server` has it."""

    async def main() -> None:
        async with cluster(place) as found, asyncio.timeout(60):
            callers = Callers(found.database)
            patterns = RoutePatterns(one.path for one in all_endpoints())
            observed = Observed(found.front, by_token(callers.authenticate), patterns.find)
            sock, found.url = listen("127.0.0.1:0")
            ready = asyncio.Event()
            server = serve_app(observed, Shutdown(), ready.set)
            server.config.timeout_graceful_shutdown = 1
            task = asyncio.create_task(server.serve(sockets=[sock]))
            await ready.wait()
            try:
                with observing(found.database, found.members, found.admissions):
                    await work(found)
            finally:
                server.should_exit = True
                await task

    asyncio.run(main())


def test_requests_are_counted_by_pattern_and_the_cluster_is_told(tmp_path: Path) -> None:
    async def work(found: Cluster) -> None:
        one = await found.session(found.nodes[0].id)
        await found.session(found.nodes[1].id)
        before = declared.HTTP_REQUESTS.values()
        await found.request("GET", f"/v1/sessions/{one.id}")
        await found.request("GET", f"/v1/sessions/{one.id}/nothing/such")
        await found.database.set_node_state(found.nodes[1].id, NodeState.CORDONED)
        await found.members.refresh()
        grown = {
            labels: count - before.get(labels, 0)
            for labels, count in declared.HTTP_REQUESTS.values().items()
            if count != before.get(labels, 0)
        }
        assert grown[("GET", "/v1/sessions/{ref}", "200")] == 1
        assert all(one.id not in part for labels in grown for part in labels)

        status, headers, body = await found.request("GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain")
        assert b'sojourn_sessions{state="suspended"} 2.0' in body
        assert b'sojourn_nodes{state="ready"} 1.0' in body
        assert b'sojourn_nodes{state="cordoned"} 1.0' in body
        assert b"sojourn_queue_length 0.0" in body
        assert (await found.request("GET", "/metrics", token=found.tenant_token))[0] == 403

    run(tmp_path, work)
    body, _ = asyncio.run(scraping.scrape(""))
    assert b"sojourn_queue_length 0" not in body  # nobody tells of it any more


def test_lost_nodes_and_their_sessions_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "holds", False)

    async def work(found: Cluster) -> None:
        await found.session(found.nodes[0].id)
        await lease(found.database, found.nodes[0], seconds=0.05)
        await asyncio.sleep(0.2)
        lost = declared.FAILOVERS.values().get((), 0)
        taken = declared.FAILED_OVER_SESSIONS.values()
        assert await Failover(found.database, lease=0.05, grace=0.0).once() == 1
        assert declared.FAILOVERS.values()[()] == lost + 1
        grown = sum(declared.FAILED_OVER_SESSIONS.values().values()) - sum(taken.values())
        assert grown == 1
        await found.members.refresh()
        _, _, body = await found.request("GET", "/metrics")
        assert b'sojourn_nodes{state="lost"} 1.0' in body

    run(tmp_path, work)


def test_a_trace_goes_on_at_the_node(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()

    async def work(found: Cluster) -> None:
        node = found.nodes[0]
        session = await found.session(node.id)
        path = f"/v1/sessions/{session.id}"
        await found.request("GET", path, traceparent=PARENT)
        assert node.got[-1].headers[b"traceparent"].decode() == PARENT  # nobody traces here
        tracing.use(SimpleSpanProcessor(exporter), "tests")
        try:
            await found.request("GET", path, traceparent=PARENT)
        finally:
            tracing.stop()
        spans = {span.name: span for span in exporter.get_finished_spans()}
        served, forward = spans["GET /v1/sessions/{ref}"], spans["forward"]
        assert served.parent.span_id == 0xB7AD6B7169203331
        assert forward.parent.span_id == served.context.span_id
        assert forward.attributes["sojourn.node"] == node.id
        got = node.got[-1].headers[b"traceparent"].decode().split("-")
        assert got[1] == "0af7651916cd43dd8448eb211c80319c"
        assert int(got[2], 16) == forward.context.span_id

    run(tmp_path, work)


def test_sessions_are_counted_the_less_often_the_longer_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Database:
        asked, took = 0, 0.0

        async def count_sessions(self, tenant: None, *, holder: str | None) -> dict[str, int]:
            self.asked += 1
            clock[0] += self.took
            return {"running": self.asked}

    clock = [1000.0]
    monkeypatch.setattr(observing_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    database: Any = Database()
    counts = observing_module.SessionCounts(database)

    def asked_after(seconds: float) -> int:
        clock[0] += seconds
        asyncio.run(counts.look())
        return int(database.asked)

    assert [asked_after(0), asked_after(59), asked_after(2)] == [1, 1, 2]
    database.took = 0.3
    assert [asked_after(61), asked_after(61), asked_after(200), asked_after(60)] == [3, 3, 3, 4]
    assert counts.values == {("running",): 4.0}
