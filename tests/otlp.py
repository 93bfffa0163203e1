"""An OTLP receiver in the test's process: HTTP and protobuf, as collectors speak it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from uuid import UUID

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S_MAX = 60.0


class Received(NamedTuple):
    """A span as it came over the wire."""

    service: str
    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[tuple[int, int]]
    failed: bool


class Receiver:
    """Keeps what it is sent. `status` is what it answers with."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.metrics: dict[tuple[str, str], list[float]] = {}
        """By service and name: the values of the last points, counts of histograms."""
        self.told: dict[tuple[str, str], list[float]] = {}
        """By service and name: all values that ever came."""
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.status = 200
        self.wait_s = 0.0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                time.sleep(receiver.wait_s)
                receiver.take(self.path, dict(self.headers), body)
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """One request."""
        self.headers.append(headers)
        self.bodies.append(body)
        if self.status != 200:
            return
        if path == "/v1/traces":
            self.spans += spans_of(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self._take_metrics(ExportMetricsServiceRequest.FromString(body))

    def _take_metrics(self, request: Any) -> None:
        for resource in request.resource_metrics:
            service = attributes_of(resource.resource)["service.name"]
            for metric in (m for scope in resource.scope_metrics for m in scope.metrics):
                data = getattr(metric, metric.WhichOneof("data"))
                values = [
                    p.count if hasattr(p, "bucket_counts") else p.as_int or p.as_double
                    for p in data.data_points
                ]
                self.metrics[service, metric.name] = values
                self.told.setdefault((service, metric.name), []).extend(values)

    def of(self, session_id: UUID) -> list[Received]:
        """The spans of a session's trace."""
        return [span for span in self.spans if span.trace_id == session_id.int]

    def named(self, name: str) -> list[Received]:
        """The spans of a name."""
        return [span for span in self.spans if span.name == name]

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until `holds()`; from a thread of its own where the test's loop has work to do."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        while not (found := holds()):
            assert time.monotonic() < deadline_s, sorted((s.service, s.name) for s in self.spans)
            time.sleep(0.02)
        return found


def attributes_of(holder: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in holder.attributes}


def spans_of(request: Any) -> Iterator[Received]:
    """The spans of a request."""
    for resource in request.resource_spans:
        service = attributes_of(resource.resource)["service.name"]
        for span in (s for scope in resource.scope_spans for s in scope.spans):
            yield Received(
                service,
                span.name,
                int.from_bytes(span.trace_id, "big"),
                int.from_bytes(span.span_id, "big"),
                int.from_bytes(span.parent_span_id, "big"),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                attributes_of(span),
                [
                    (int.from_bytes(n.trace_id, "big"), int.from_bytes(n.span_id, "big"))
                    for n in span.links
                ],
                span.status.code == 2,
            )
