"""The receiver of the tests, spoken to over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_messages
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_service
from tests.otlp import Receiver


class GrpcReceiver(Receiver):
    """Keeps what it is sent. A `status` other than 200 is answered with UNAVAILABLE."""

    def __init__(self) -> None:
        super().__init__()
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        self._serve("/v1/traces", trace_service, "Trace", trace_messages.ExportTraceServiceResponse)
        self._serve(
            "/v1/metrics", metrics_service, "Metrics", metrics_messages.ExportMetricsServiceResponse
        )
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self.url = f"http://127.0.0.1:{port}"

    def _serve(self, path: str, service: Any, name: str, answer: Any) -> None:
        receiver = self

        class Servicer(getattr(service, f"{name}ServiceServicer")):  # type: ignore[misc]
            def Export(self, request: Any, context: Any) -> Any:
                headers = {key: str(value) for key, value in context.invocation_metadata()}
                receiver.take(path, headers, request.SerializeToString())
                if receiver.status != 200:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "away")
                return answer()

        getattr(service, f"add_{name}ServiceServicer_to_server")(Servicer(), self._grpc)

    def close(self) -> None:
        """Listen no more."""
        self._grpc.stop(0).wait()
        super().close()
