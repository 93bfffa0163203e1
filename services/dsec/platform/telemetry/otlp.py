"""Telemetry that is on: the OpenTelemetry SDK, sending OTLP over HTTP from threads of its own.

* Nothing is registered globally: user code in the same process may use OpenTelemetry for itself.
* The queue is bounded by us and not only by the SDK, whose bound throws the oldest away, uncounted,
  with a line in the log for each.
* A receiver that is away costs its own thread some waiting, and spans, which are counted. The log
  says so once a minute, not for every attempt as the SDK would.
* `close` is asked for where a process ends in good order. The SDK's own hook would run in forked
  children of user code too, and waits for half a minute if the receiver is away.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes

from dsec.platform.telemetry.delivery import Delivery
from dsec.platform.telemetry.ids import SpanRef
from dsec.platform.telemetry.metrics import SPANS_LOST, Metric
from dsec.platform.telemetry.sampler import Ratio
from dsec.platform.telemetry.telemetry import Span, Telemetry

log = logging.getLogger(__name__)

WAITING_SPANS_MAX = 8_192
"""Unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise. About a kilobyte each."""
SEND_PERIOD_MS = 1_000
"""Unless `OTEL_BSP_SCHEDULE_DELAY` says otherwise. What a killed process has not sent is lost."""
CLOSE_S_MAX = 1.0
"""A stop waits so long for the receiver."""
COMPLAINT_PERIOD_S = 60.0
ERROR_CHARS_MAX = 512
START_LATENCY_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip


class SessionSampler(Sampler):
    """`Ratio` as the SDK asks for it."""

    def __init__(self, ratio: Ratio) -> None:
        self._ratio = ratio

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        """Whether the span is kept: all spans of a trace, or none."""
        if self._ratio.keeps(trace_id):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        """For people."""
        return f"SessionSampler({self._ratio.ratio:g})"


class _Ids(IdGenerator):
    """Gives the span that is made next the name it was handed over with."""

    ref = SpanRef(1, 1)

    def generate_span_id(self) -> int:
        return self.ref.span_id

    def generate_trace_id(self) -> int:
        return self.ref.trace_id


class _Counting(SpanExporter):
    """Sends, and counts what became of it."""

    def __init__(self, exporter: OTLPSpanExporter, delivery: Delivery, endpoint: str) -> None:
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
                "listen there, for OTLP over HTTP?",
                self._delivery.lost,
                self._endpoint,
            )

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

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


class _OwnMetrics(OTLPMetricExporter):
    """Sends metrics of this process, and none of a child that user code forked: its copies of the
    numbers would come under this process's name."""

    def __init__(self, url: str | None) -> None:
        super().__init__(url)
        self._owner_pid = os.getpid()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = None, **kwargs: Any
    ) -> MetricExportResult:
        if os.getpid() != self._owner_pid:
            return MetricExportResult.SUCCESS
        return super().export(metrics_data, timeout_millis, **kwargs)


class Otlp(Telemetry):
    """Sends spans and metrics to a receiver. Made while the `OTEL_*` variables are readable."""

    enabled = True

    def __init__(self, endpoint: str, ratio: Ratio, service: str, instance: str) -> None:
        """Start the exporters' threads; nothing is connected yet.

        Args:
            endpoint: the receiver's base URL; empty: where the `OTEL_*` variables say.
        """
        if log.getEffectiveLevel() > logging.DEBUG:
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = _resource(service, instance)
        self._ids = _Ids()
        self._ratio = ratio if _wanted("TRACES") else Ratio(0.0)
        waiting_max = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or WAITING_SPANS_MAX)
        self.delivery: Final = Delivery(waiting_max)
        self._provider = TracerProvider(
            SessionSampler(self._ratio), resource, shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(_processor(endpoint, self.delivery))
        self._tracer = self._provider.get_tracer("dsec", version("dsec"))
        self._meters = MeterProvider(_readers(endpoint), resource, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("dsec", version("dsec"))
        self.counter(SPANS_LOST, lambda: self.delivery.lost)
        _register_at_fork(self.delivery)

    def keeps(self, trace_id: int) -> bool:
        return self._ratio.keeps(trace_id)

    def emit(self, span: Span) -> None:
        self._ids.ref = span.ref
        made = self._tracer.start_span(
            span.name,
            _context(span.parent),
            attributes=span.attributes,
            links=[Link(_remote(link)) for link in span.links],
            start_time=min(span.start_ns, span.end_ns),  # of two clocks, which may differ
        )
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.error[:ERROR_CHARS_MAX]))
        made.end(span.end_ns)

    def counter(self, metric: Metric, read: Callable[[], int]) -> None:
        def observe(_: CallbackOptions) -> list[Observation]:
            return [Observation(read())]

        self._meter.create_observable_counter(
            metric.name, [observe], metric.unit, metric.definition
        )

    def gauge(self, metric: Metric, read: Callable[[], float | None]) -> None:
        def observe(_: CallbackOptions) -> list[Observation]:
            value = read()
            return [] if value is None else [Observation(value)]

        self._meter.create_observable_gauge(metric.name, [observe], metric.unit, metric.definition)

    def histogram(self, metric: Metric) -> Callable[[float], None]:
        made = self._meter.create_histogram(
            metric.name,
            metric.unit,
            metric.definition,
            explicit_bucket_boundaries_advisory=START_LATENCY_BOUNDS_S,
        )
        return made.record

    def close(self) -> None:
        # In daemon threads, side by side: neither listens to a time limit, and a receiver that is
        # away must not keep the process from ending.
        closing = [
            threading.Thread(target=shut, daemon=True)
            for shut in (self._provider.shutdown, self._meters.shutdown)
        ]
        for thread in closing:
            thread.start()
        until_s = time.monotonic() + CLOSE_S_MAX
        for thread in closing:
            thread.join(max(0.0, until_s - time.monotonic()))
        self.delivery.closed = True
        if self.delivery.lost:
            log.warning("%d spans were not delivered", self.delivery.lost)


def _wanted(signal: str) -> bool:
    """Whether `OTEL_TRACES_EXPORTER` or `OTEL_METRICS_EXPORTER` turns a signal off."""
    return os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip().lower() != "none"


def _resource(service: str, instance: str) -> Resource:
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"dsec-{service}",
            "service.version": version("dsec"),
            "service.instance.id": instance,
        }
    )


def _processor(endpoint: str, delivery: Delivery) -> _Bounded:
    exporter = OTLPSpanExporter(_url(endpoint, "traces"))
    told = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    shown = told or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    # The SDK's queue holds one more than ours lets in: its own bound is never met.
    queue = BatchSpanProcessor(
        _Counting(exporter, delivery, shown.rpartition("@")[2]),
        max_queue_size=delivery.waiting_spans_max + 1,
        schedule_delay_millis=float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or SEND_PERIOD_MS),
        max_export_batch_size=min(512, delivery.waiting_spans_max),
    )
    return _Bounded(queue, delivery)


def _readers(endpoint: str) -> list[MetricReader]:
    if not _wanted("METRICS"):
        return []
    return [PeriodicExportingMetricReader(_OwnMetrics(_url(endpoint, "metrics")))]


def _url(endpoint: str, signal: str) -> str | None:
    return f"{endpoint.rstrip('/')}/v1/{signal}" if endpoint else None


def _context(parent: SpanRef | None) -> Context:
    # Never the current context: it is user code's.
    if parent is None:
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(_remote(parent)), Context())


def _remote(ref: SpanRef) -> SpanContext:
    return SpanContext(ref.trace_id, ref.span_id, True, TraceFlags(TraceFlags.SAMPLED))


def _register_at_fork(delivery: Delivery) -> None:
    weak = weakref.WeakMethod(delivery.after_fork)

    def after_fork() -> None:
        if forget := weak():
            forget()

    os.register_at_fork(after_in_child=after_fork)
