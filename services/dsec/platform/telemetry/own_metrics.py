"""Metrics of this process, and none of a child that user code forked: its copies of the numbers
would come under this process's name."""

from __future__ import annotations

import os
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

SEND_MS_MAX = 10_000


class OfThisProcess(MetricExporter):
    """Stands before an exporter among its bases: sends nothing in a forked child."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._owner_pid = os.getpid()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = None, **kwargs: Any
    ) -> MetricExportResult:
        if os.getpid() != self._owner_pid:
            return MetricExportResult.SUCCESS
        return super().export(metrics_data, timeout_millis or SEND_MS_MAX, **kwargs)  # type: ignore[safe-super]
