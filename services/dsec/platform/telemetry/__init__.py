"""OpenTelemetry, outside everything that is hashed: traces of sessions and metrics, OTLP out.

Services use what is named here. Only `otlp.py` and `exporters.py` know the SDK, and they are
imported only where a receiver is configured.
"""

from dsec.platform.telemetry.connect import connect
from dsec.platform.telemetry.ids import SpanRef, parse_traceparent
from dsec.platform.telemetry.telemetry import LINKS_MAX, OFF, Attributes, Span, Telemetry

__all__ = [
    "LINKS_MAX",
    "OFF",
    "Attributes",
    "Span",
    "SpanRef",
    "Telemetry",
    "connect",
    "parse_traceparent",
]
