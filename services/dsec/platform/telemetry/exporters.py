"""The ways out of the process: what counts, bounds and sends.

* The queue is bounded by us and not only by the SDK, whose bound throws the oldest away, uncounted,
  with a line in the log for each.
* A receiver that is away costs its own thread some waiting, and spans, which are counted. The log
  says so once a minute, not for every attempt as the SDK would.
* A child that user code forks sends nothing: what waited is its parent's to send.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from dsec.platform.telemetry.delivery import Delivery
from dsec.platform.telemetry.own_metrics import OfThisProcess

log = logging.getLogger(__name__)

WAITING_SPANS_MAX = 8_192
"""Unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise. About a kilobyte each."""
SEND_PERIOD_MS = 1_000
"""Unless `OTEL_BSP_SCHEDULE_DELAY` says otherwise. What a killed process has not sent is lost."""
BATCH_SPANS_MAX = 512
"""Unless `OTEL_BSP_MAX_EXPORT_BATCH_SIZE` says otherwise."""
COMPLAINT_PERIOD_S = 60.0


class _Counting(SpanExporter):
    """Sends, and counts what became of it."""

    def __init__(self, exporter: SpanExporter, delivery: Delivery, endpoint: str) -> None:
        self._exporter = exporter
        self._delivery = delivery
        self._endpoint = endpoint
        self._complained_s = -COMPLAINT_PERIOD_S

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._delivery.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._delivery.sent += len(spans)
            else:
                self._delivery.failed += len(spans)
                self._complain()
        return result

    def _complain(self) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAINT_PERIOD_S:
            self._complained_s = now_s
            log.warning(
                "%d spans are lost so far: the OTLP receiver at %s does not take them. Does it "
                "listen there, for OTLP over %s?",
                self._delivery.lost,
                self._endpoint,
                "gRPC" if speaks_grpc("TRACES", os.environ) else "HTTP",
            )

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Bounded(SpanProcessor):
    """Lets spans into the SDK's queue as long as there is room."""

    def __init__(self, queue: BatchSpanProcessor, delivery: Delivery) -> None:
        self._queue = queue
        self._delivery = delivery

    def on_end(self, span: ReadableSpan) -> None:
        if self._delivery.accept():
            self._queue.on_end(span)

    def shutdown(self) -> None:
        self._queue.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._queue.force_flush(timeout_millis)


class _OwnMetrics(OfThisProcess, OTLPMetricExporter):
    """See `OfThisProcess`."""


def speaks_grpc(signal: str, variables: Mapping[str, str]) -> bool:
    """Whether a signal (`TRACES`, `METRICS`) goes over gRPC, by OpenTelemetry's own variables."""
    names = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    return next((variables[name] for name in names if variables.get(name)), "") == "grpc"


def wanted(signal: str, endpoint: str) -> bool:
    """Whether a signal (`TRACES`, `METRICS`) has a receiver and is not turned off.

    Without one the SDK would send to this machine, where nobody said that one listens.
    """
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip().lower() == "none":
        return False
    names = f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    return bool(endpoint or any(os.environ.get(name) for name in names))


def processor(endpoint: str, delivery: Delivery) -> SpanProcessor:
    """The way of spans to a receiver; an empty endpoint: to where the `OTEL_*` variables say."""
    exporter: SpanExporter
    if speaks_grpc("TRACES", os.environ):
        from dsec.platform.telemetry.exporters_grpc import span_exporter

        exporter = span_exporter(endpoint or None)
    else:
        exporter = OTLPSpanExporter(_url(endpoint, "traces"))
    told = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    shown = told or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    batch_max = int(os.environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE") or BATCH_SPANS_MAX)
    # The SDK's queue holds one more than ours lets in: its own bound is never met.
    queue = BatchSpanProcessor(
        _Counting(exporter, delivery, shown.rpartition("@")[2]),
        max_queue_size=delivery.waiting_spans_max + 1,
        schedule_delay_millis=float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or SEND_PERIOD_MS),
        max_export_batch_size=min(batch_max, delivery.waiting_spans_max),
    )
    return _Bounded(queue, delivery)


def readers(endpoint: str) -> list[MetricReader]:
    """The way of metrics, likewise; none where they are turned off."""
    if not wanted("METRICS", endpoint):
        return []
    if speaks_grpc("METRICS", os.environ):
        from dsec.platform.telemetry.exporters_grpc import metric_exporter

        return [PeriodicExportingMetricReader(metric_exporter(endpoint or None))]
    return [PeriodicExportingMetricReader(_OwnMetrics(_url(endpoint, "metrics")))]


def _url(endpoint: str, signal: str) -> str | None:
    return f"{endpoint.rstrip('/')}/v1/{signal}" if endpoint else None
