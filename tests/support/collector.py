"""An OpenTelemetry collector that keeps the spans it is sent."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """Answers OTLP over HTTP on the loopback; `spans` are protobuf messages, `raw` all it got."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.raw = b""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        assert path == "/v1/traces"
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for one in resource.resource.attributes:
                if one.key == "service.name":
                    self.services.add(one.value.string_value)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def below(self, span: Any) -> set[str]:
        """Names of all spans below one."""
        found, parents = set(), {span.span_id}
        while True:
            more = [s for s in self.spans if s.parent_span_id in parents and s.name not in found]
            if not more:
                return found
            found |= {s.name for s in more}
            parents |= {s.span_id for s in more}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
