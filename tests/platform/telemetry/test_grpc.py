"""OTLP over gRPC: what is sent is what goes over HTTP, and a process ends as it does there."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
import uuid_utils
from tests.platform.telemetry.grpc_receiver import GrpcReceiver

from dsec.platform.settings import Settings
from dsec.platform.stack.ports import free_port
from dsec.platform.telemetry import OFF, Span, connect, metrics
from dsec.platform.telemetry.ids import session_span
from dsec.platform.telemetry.otlp import Otlp

GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
ATTEMPTS_S = 30
"""A receiver that is away is asked again for as long, if nobody stops it."""


@pytest.fixture
def receiver() -> Iterator[GrpcReceiver]:
    """One that speaks gRPC."""
    made = GrpcReceiver()
    yield made
    made.close()


def connected(url: str, **variables: str) -> Otlp:
    made = connect(Settings(otlp_endpoint=url, otel={**GRPC, **variables}), "test", "one")
    assert isinstance(made, Otlp)
    return made


def span_of(session: UUID) -> Span:
    return Span(session_span(session), "session", 1_000, 2_000)


def test_spans_and_metrics_arrive_with_the_headers(receiver: GrpcReceiver) -> None:
    telemetry = connected(receiver.url, OTEL_EXPORTER_OTLP_HEADERS="authorization=one")
    session = UUID(str(uuid_utils.uuid7()))
    telemetry.counter(metrics.STEPS, lambda: 7)
    telemetry.emit(span_of(session))
    telemetry.close()
    (span,) = receiver.of(session)
    assert (span.service, span.name) == ("dsec-test", "session")
    assert receiver.metrics["dsec-test", metrics.STEPS.name] == [7.0]
    assert {told["authorization"] for told in receiver.headers} == {"one"}
    assert telemetry.delivery.lost == 0


def test_each_signal_may_go_its_own_way(receiver: GrpcReceiver) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.url,
        "OTEL_METRICS_EXPORTER": "none",
    }
    telemetry = connect(Settings(otel=variables), "test", "one")
    session = UUID(str(uuid_utils.uuid7()))
    telemetry.emit(span_of(session))
    telemetry.close()
    assert len(receiver.of(session)) == 1


def test_a_receiver_that_is_away_costs_spans_and_no_time(caplog: Any) -> None:
    telemetry = connected(
        f"http://127.0.0.1:{free_port()}", OTEL_EXPORTER_OTLP_TIMEOUT=f"{ATTEMPTS_S}"
    )
    telemetry.emit(span_of(UUID(str(uuid_utils.uuid7()))))
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        telemetry.close()
    assert time.monotonic() - began_s < ATTEMPTS_S / 2
    assert telemetry.delivery.lost == 1


FORKS = """
import os, sys
from dsec.platform.settings import Settings
from dsec.platform.telemetry import Span, connect, metrics
from dsec.platform.telemetry.ids import session_span
from uuid import UUID
telemetry = connect(Settings(otlp_endpoint=sys.argv[1],
                             otel={"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}), "test", "one")
telemetry.counter(metrics.STEPS, lambda: 7)
telemetry.emit(Span(session_span(UUID(int=1)), "session", 1, 2))
telemetry._provider.force_flush()
child = os.fork()
if child == 0:
    sys.exit(3)  # with all that Python does at an end
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
telemetry.emit(Span(session_span(UUID(int=2)), "session", 1, 2))
telemetry.close()
"""


def test_a_child_that_user_code_forks_ends_and_sends_nothing(receiver: GrpcReceiver) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, receiver.url],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(span.trace_id for span in receiver.spans) == [1, 2]
    assert done.stderr == ""


def test_without_the_extra_it_is_off_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    found = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name.endswith(".grpc") else found(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert connect(Settings(otlp_endpoint="http://h:4317", otel=GRPC), "test", "one") is OFF
    assert "pip install 'dsec[otlp-grpc]'" in caplog.text
