"""Telemetry that is on: the OpenTelemetry SDK, sending OTLP over HTTP from threads of its own.

* Nothing is registered globally: user code in the same process may use OpenTelemetry for itself.
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
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes

from dsec.platform.telemetry.delivery import Delivery
from dsec.platform.telemetry.exporters import WAITING_SPANS_MAX, processor, readers, wanted
from dsec.platform.telemetry.ids import SpanRef
from dsec.platform.telemetry.metrics import SPANS_LOST, Metric
from dsec.platform.telemetry.sampler import Ratio
from dsec.platform.telemetry.telemetry import Span, Telemetry

log = logging.getLogger(__name__)

CLOSE_S_MAX = 1.0
"""A stop waits so long for the receiver."""
ERROR_CHARS_MAX = 512
TIME_NS_MAX = (1 << 63) - 1
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
        self._ratio = ratio if wanted("TRACES", endpoint) else Ratio(0.0)
        waiting_max = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or WAITING_SPANS_MAX)
        self.delivery: Final = Delivery(waiting_max)
        self._provider = TracerProvider(
            SessionSampler(self._ratio), resource, shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(processor(endpoint, self.delivery))
        self._tracer = self._provider.get_tracer("dsec", version("dsec"))
        self._meters = MeterProvider(readers(endpoint), resource, shutdown_on_exit=False)
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
            start_time=_sendable(min(span.start_ns, span.end_ns)),  # of two clocks: they may differ
        )
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, _text(span.error)))
        made.end(_sendable(span.end_ns))

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


def _resource(service: str, instance: str) -> Resource:
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"dsec-{service}",
            "service.version": version("dsec"),
            "service.instance.id": instance,
        }
    )


def _sendable(at_ns: int) -> int:
    """A time as the protocol can carry it: what cannot be encoded would cost its whole batch."""
    return min(max(at_ns, 0), TIME_NS_MAX)


def _text(error: str) -> str:
    """The text of somebody's exception likewise: it may hold what UTF-8 lacks."""
    return error[:ERROR_CHARS_MAX].encode("utf-8", "backslashreplace").decode()


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
