"""The ways out over gRPC: apart, since the library is an extra (`dsec[otlp-grpc]`) and large."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from dsec.platform.telemetry.own_metrics import OfThisProcess


class _OwnMetrics(OfThisProcess, OTLPMetricExporter):
    """See `OfThisProcess`."""


def span_exporter(endpoint: str | None) -> SpanExporter:
    """Of spans; None: to where the `OTEL_*` variables say."""
    return OTLPSpanExporter(endpoint)


def metric_exporter(endpoint: str | None) -> MetricExporter:
    """Of metrics, likewise."""
    return _OwnMetrics(endpoint)
