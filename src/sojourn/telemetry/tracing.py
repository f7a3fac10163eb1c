"""Traces by OpenTelemetry, where a collector is named; else nothing, at the cost of nothing.

Guarantee: without OTEL_EXPORTER_OTLP_ENDPOINT (or the one of traces) no package of OpenTelemetry is
loaded, and `span` gives one shared object that does nothing. A collector that does not answer loses
spans and holds up nobody.

Contexts travel as the W3C header `traceparent`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sojourn.errors import HostUnfit, SojournError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_END_SECONDS = 2.0
_HEADERS = (b"traceparent", b"tracestate")

_tracer: Tracer | None = None
_provider: Any = None

Attributes = Mapping[str, str | int | float | bool | None]


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a collector is named, and nobody said that it is off."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off = off or environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    return not off and any(environment.get(name) for name in _VARIABLES)


def start(service: str, **facts: str) -> bool:
    """Send traces of this process, as this service, where that is wanted; whether it is. Raises
    HostUnfit when the packages are not installed."""
    if not wanted():
        return False
    if importlib.util.find_spec("opentelemetry") is None:
        raise _missing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing() from error
    use(BatchSpanProcessor(OTLPSpanExporter()), service, **facts)
    return True


def _missing() -> HostUnfit:
    return HostUnfit(
        f"{_VARIABLES[0]} is set, and OpenTelemetry is not installed",
        next_step="Install `sojourn[observability]`, or unset the variable.",
    )


def use(processor: Any, service: str, **facts: str) -> None:
    """Give every span to a span processor of OpenTelemetry."""
    global _tracer, _provider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create({"service.name": service, **facts})
    if name := os.environ.get("OTEL_SERVICE_NAME"):
        resource = resource.merge(Resource({"service.name": name}))
    # Not as the process' own provider: what else uses OpenTelemetry here is not our business.
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("sojourn")


def stop() -> None:
    """Send what is left, for a moment, and no more from now on. Idempotent. Blocks."""
    global _tracer, _provider
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        provider.force_flush(int(_END_SECONDS * 1000))
        provider.shutdown()


def active() -> bool:
    """Whether spans go anywhere."""
    return _tracer is not None


class Span:
    """Around something that is done. What it raises is told by its type and code, never its
    text."""

    __slots__ = ("_attributes", "_kind", "_name", "_parent", "_span", "_token", "began")

    def __init__(
        self, name: str, attributes: Attributes, kind: str = "INTERNAL", parent: Any = None
    ) -> None:
        self._name, self._attributes, self._kind = name, attributes, kind
        self._parent = parent

    def __enter__(self) -> Span:
        from opentelemetry import context, trace

        assert _tracer is not None
        self.began = time.time_ns()
        self._span = _tracer.start_span(
            self._name,
            context=self._parent,
            kind=trace.SpanKind[self._kind],
            attributes={k: v for k, v in self._attributes.items() if v is not None},
            start_time=self.began,
        )
        self._token = context.attach(trace.set_span_in_context(self._span, self._parent))
        return self

    def set(self, **attributes: str | int | float | bool) -> None:
        """Say more about it. Dots in names are written as two underscores."""
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", "."), value)

    def fail(self, code: str) -> None:
        """It failed, by this code."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(StatusCode.ERROR, code)

    def rename(self, name: str) -> None:
        """Its name is known only now."""
        self._span.update_name(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from opentelemetry import context

        if error is not None:
            self.fail(error.code if isinstance(error, SojournError) else type(error).__name__)
        context.detach(self._token)
        self._span.end()


class _Off:
    """Of a process that sends no traces."""

    __slots__ = ()

    def __enter__(self) -> _Off:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing."""

    def set(self, **attributes: str | int | float | bool) -> None:
        """Nothing."""

    def fail(self, code: str) -> None:
        """Nothing."""

    def rename(self, name: str) -> None:
        """Nothing."""


_OFF = _Off()
AnySpan = Span | _Off


def span(name: str, **attributes: str | int | float | bool | None) -> AnySpan:
    """Around something that is done, inside whatever is under way. Dots in names of attributes are
    written as two underscores."""
    if _tracer is None:
        return _OFF
    return Span(name, {key.replace("__", "."): value for key, value in attributes.items()})


def server_span(name: str, headers: Iterable[tuple[bytes, bytes]]) -> AnySpan:
    """Around a request that came in with these headers."""
    if _tracer is None:
        return _OFF
    return Span(name, {}, "SERVER", _carried(headers))


def client_span(name: str, **attributes: str | int | float | bool | None) -> AnySpan:
    """Around a request that goes out; `carry` gives its headers within."""
    if _tracer is None:
        return _OFF
    return Span(name, {k.replace("__", "."): v for k, v in attributes.items()}, "CLIENT")


def past(name: str, began: int, **attributes: str | int | float | bool | None) -> None:
    """A span of something that ends now and began then (ns since 1970), inside what is under
    way."""
    if _tracer is not None:
        told = {k.replace("__", "."): v for k, v in attributes.items() if v is not None}
        _tracer.start_span(name, attributes=told, start_time=began).end()


def _carried(headers: Iterable[tuple[bytes, bytes]]) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in _HEADERS
    }
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def forwarded(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of a request that is passed on, with what is under way here in place of what it came
    with."""
    if _tracer is None:
        return headers
    return [*(one for one in headers if one[0] not in _HEADERS), *carry()]


def carry() -> list[tuple[bytes, bytes]]:
    """Headers that take what is under way along with a request: of this process' own spans, or of
    its user's where a program uses OpenTelemetry. Loads nothing that is not loaded."""
    if "opentelemetry.trace" not in sys.modules:
        return []
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return [(name.encode(), value.encode()) for name, value in carrier.items()]
