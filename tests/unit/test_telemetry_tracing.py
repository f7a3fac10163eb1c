"""Traces: nothing of them where they are off, whole ones where they are on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sojourn.errors import HostUnfit, StorageFull
from sojourn.telemetry import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[Any]:
    """What was traced, once `stop` was called."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing.use(SimpleSpanProcessor(exporter), "tests")
    yield lambda: {span.name: span for span in exporter.get_finished_spans()}
    tracing.stop()


def test_nothing_is_loaded_that_nobody_asked_for() -> None:
    """Neither at the start of a server nor in a client."""
    program = """
import sys
import sojourn.cli.main, sojourn.cli.up, sojourn.server.app, sojourn.server.service_factory
from sojourn import Sojourn
from sojourn.telemetry import tracing
with tracing.span("x", a=1) as span, tracing.server_span("GET", []), tracing.client_span("y"):
    span.set(b=2)
    span.fail("code")
    tracing.past("z", 0)
assert tracing.carry() == [] and not tracing.start("s") and not tracing.active()
tracing.stop()
bad = [n for n in sys.modules if n.startswith(("opentelemetry", "prometheus", "google.protobuf"))]
assert not bad, bad
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": "/usr/bin"})


def test_off_is_one_object() -> None:
    assert tracing.span("a") is tracing.span("b", c=1) is tracing.server_span("GET", [])


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_it_is_on_where_a_collector_is_named(environment: dict[str, str], on: bool) -> None:
    assert tracing.wanted(environment) is on


def test_a_collector_without_the_packages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HostUnfit, match="not installed") as caught:
        tracing.start("sojourn")
    assert "sojourn[observability]" in caught.value.next_step


def test_a_request_goes_on_with_the_trace_it_came_with(spans: Any) -> None:
    with tracing.server_span("GET", [(b"traceparent", PARENT.encode())]) as span:
        span.rename("GET /v1/x")
        span.set(http__route="/v1/x")
        with tracing.span("operation create", sojourn__verb="create", left__out=None):
            tracing.past("create step", span.began)
        with tracing.client_span("forward"):
            [(name, value)] = tracing.carry()
    found = spans()
    assert name == b"traceparent"
    trace, parent = value.decode().split("-")[1:3]
    assert trace == "0af7651916cd43dd8448eb211c80319c"
    assert parent == f"{found['forward'].context.span_id:016x}"
    assert found["GET /v1/x"].parent.span_id == 0xB7AD6B7169203331
    assert found["GET /v1/x"].kind.name == "SERVER" and found["forward"].kind.name == "CLIENT"
    assert found["operation create"].parent.span_id == found["GET /v1/x"].context.span_id
    assert dict(found["operation create"].attributes) == {"sojourn.verb": "create"}
    assert found["create step"].parent.span_id == found["operation create"].context.span_id
    assert found["create step"].start_time == found["GET /v1/x"].start_time


def test_a_header_that_is_no_context_begins_a_trace(spans: Any) -> None:
    for value in (b"", b"garbage", b"00-0-0-00", b"\xff" * 300):
        with tracing.server_span("GET", [(b"traceparent", value)]):
            pass
    assert spans()["GET"].parent is None


def test_what_fails_is_told_by_its_code_and_never_its_text(spans: Any) -> None:
    for error in (StorageFull("no room for sk-secret"), ValueError("sk-secret")):
        with pytest.raises(type(error)), tracing.span(type(error).__name__):
            raise error
    found = spans()
    assert found["StorageFull"].attributes["error.type"] == "storage_full"
    assert found["ValueError"].attributes["error.type"] == "ValueError"
    assert all("sk-secret" not in span.to_json() for span in found.values())
