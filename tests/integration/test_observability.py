"""What a real server tells of itself: metrics, traces over a whole call, logs; and no secret."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sojourn.client import Sojourn
from sojourn.errors import SojournError
from sojourn.node.isolation import processes
from support.servers import ServerProcess, eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from support.collector import Collector

pytestmark = pytest.mark.privileged

SECRET = "sk-never-to-be-told-5f1c"


class World:
    """A server that tells everything, and who hears it."""

    def __init__(self, server: ServerProcess, collector: Collector, health: str) -> None:
        self.server, self.collector, self.health = server, collector, health
        self.client: Sojourn

    def get(self, url: str, token: str | None = None) -> tuple[int, bytes]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        status, body = self.get(f"{self.server.url}/metrics", self.server.token)
        assert status == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, stocked: Path) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("observed")
    shutil.copytree(stocked, directory / "objects")
    collector = Collector()
    with socket.create_server(("127.0.0.1", 0)) as free:
        health = f"127.0.0.1:{free.getsockname()[1]}"
    server = ServerProcess(directory / "data", store=str(directory / "objects"))
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "SOJOURN_LOG_FORMAT": "json",
        "SOJOURN_HEALTH_LISTEN": health,
    }
    world = World(server, collector, f"http://{health}")
    try:
        world.client = server.start(**variables)
        yield world
    finally:
        server.remove()
        collector.close()


def test_a_whole_life_is_counted_and_traced(world: World) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    user = TracerProvider().get_tracer("a user's program")
    client = world.client
    before = world.metrics()
    with user.start_as_current_span("task") as task, trace.use_span(task):
        session = client.sessions.create(name="told", env={"KEY": SECRET})
        assert session.exec(["sh", "-c", f": {SECRET}; echo hello > /root/{SECRET}"]).ok
        session.snapshot(label="here", wait="durable")
        session.suspend()
        assert session.exec(["true"]).ok
        with pytest.raises(SojournError):
            session.rollback("absent")
    trace_id = task.get_span_context().trace_id.to_bytes(16)

    after = world.metrics()

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after.get(key, 0) - before.get(key, 0)

    for verb in ("create", "snapshot", "suspend", "resume"):
        assert grown("sojourn_operations_total", verb=verb, result="ok") == 1
        assert grown("sojourn_operation_seconds_count", verb=verb) == 1
    assert grown("sojourn_turns_total", kind="exec", result="ok") == 2
    assert grown("sojourn_capture_stall_seconds_count", kind="live") >= 1
    assert grown("sojourn_capture_stall_seconds_count", kind="final") == 1
    assert grown("sojourn_capture_bytes_total", part="memory") > 0
    assert grown("sojourn_place_seconds_count", source="memory") == 1
    assert grown("sojourn_first_command_seconds_count") == 1
    assert grown("sojourn_store_sent_bytes_total") > 0
    assert grown("sojourn_database_transactions_total", result="ok") > 5
    route = "/v1/sessions/{ref}/exec"
    assert grown("sojourn_http_requests_total", method="POST", route=route, status="200") == 2
    assert after["sojourn_sandboxes", ()] == 1

    eventually(lambda: len(world.collector.named("POST /v1/sessions/{ref}/exec")) == 2)
    eventually(lambda: world.collector.named("store push"))
    assert world.collector.services == {"sojourn"}
    [create] = world.collector.named("POST /v1/sessions")
    assert create.trace_id == trace_id
    assert create.parent_span_id == task.get_span_context().span_id.to_bytes(8)
    assert {"operation create", "place"} <= world.collector.below(create)
    execs = world.collector.named("POST /v1/sessions/{ref}/exec")
    assert all(one.trace_id == trace_id for one in execs)
    assert any("operation resume" in world.collector.below(one) for one in execs)
    [suspend] = world.collector.named("operation suspend")
    assert {"capture final", "suspend seal"} <= world.collector.below(suspend)


def test_metrics_are_the_operators_alone(world: World) -> None:
    token = world.client.tokens.create("acme").token
    assert world.get(f"{world.server.url}/metrics")[0] == 401
    assert world.get(f"{world.server.url}/metrics", token)[0] == 403
    assert world.get(f"{world.server.url}/metrics", world.server.token)[0] == 200


def test_probes_and_scrapes_need_no_token_at_their_own_address(world: World) -> None:
    assert world.get(f"{world.health}/health") == (200, b"ok")
    assert world.get(f"{world.health}/ready") == (200, b"ready")
    status, body = world.get(f"{world.health}/metrics")
    assert status == 200 and b"sojourn_operations_total" in body
    assert world.get(f"{world.health}/v1/sessions")[0] == 404
    host, port = world.health.removeprefix("http://").split(":")
    for sent in (b"POST /metrics HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"x" * 40000, b"GET / H\r\n"):
        with socket.create_connection((host, int(port)), timeout=20) as line:
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
            assert b" 40" in line.recv(100)


def test_no_secret_is_told_anywhere(world: World) -> None:
    world.client.secrets.set("key", SECRET, domains=["example.com"])
    session = world.client.sessions.create(env={"KEY": SECRET}, name="quiet")
    with pytest.raises(SojournError):
        session.exec(["sh", "-c", "true"], cwd=f"/{SECRET}")
    session.delete()
    _, metrics = world.get(f"{world.health}/metrics")
    eventually(lambda: world.collector.named("operation delete"))
    world.client.close()
    for what in (metrics, world.collector.raw, world.server.log(10_000_000).encode()):
        assert SECRET.encode() not in what
        assert world.server.token.encode() not in what


def test_every_line_of_the_log_is_an_object(world: World) -> None:
    """Those of its helpers are in the same form, as they are told."""
    session = world.client.sessions.create(network="open")
    assert session.exec("true").ok
    [gateway] = [
        pid
        for pid in processes.children(world.server.pid)
        if "sojourn.gateway.worker" in processes.command_line(pid)
    ]
    assert b"SOJOURN_LOG_FORMAT=json" in Path(f"/proc/{gateway}/environ").read_bytes()
    session.delete()
    lines = [json.loads(line) for line in world.server.log(10_000_000).splitlines()]
    assert lines
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
