"""Telemetry that is on, against a receiver; and when it is not on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import Any
from uuid import UUID

import pytest
import uuid_utils
from opentelemetry import metrics as otel_metrics
from opentelemetry import trace
from tests.otlp import Receiver

from dsec.platform.settings import Settings
from dsec.platform.stack.ports import free_port
from dsec.platform.telemetry import OFF, Span, Telemetry, connect, metrics
from dsec.platform.telemetry.exporters import readers
from dsec.platform.telemetry.ids import SpanRef, placement_span, session_span
from dsec.platform.telemetry.otlp import CLOSE_S_MAX, Otlp
from dsec.platform.user_environment import without_secrets

SPANS = 3_000


def uuid7() -> UUID:
    return UUID(str(uuid_utils.uuid7()))


def connected(url: str, **variables: str) -> Otlp:
    made = connect(Settings(otlp_endpoint=url, otel=variables), "test", "one")
    assert isinstance(made, Otlp)
    return made


def span_of(session: UUID, **changes: Any) -> Span:
    return Span(session_span(session), "session", 1_000, 2_000)._replace(**changes)


# -- on or off ---------------------------------------------------------------------------------


def test_without_a_receiver_it_is_off_and_the_sdk_is_not_even_imported() -> None:
    told = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    code = """
import sys
from dsec.platform.settings import Settings
from dsec.platform.telemetry import OFF, connect
import dsec.scheduler.__main__, dsec.env_runtime.__main__, dsec.reward.__main__
import dsec.recorder.__main__, dsec.env_runtime.supervisor, dsec.env_runtime.worker
assert connect(Settings(), "test", "one") is OFF
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")], "imported"
"""
    subprocess.run([sys.executable, "-c", code], env=told, check=True, timeout=60)


@pytest.mark.parametrize("signal", ["", "_TRACES", "_METRICS"])
def test_the_standard_variables_turn_it_on(receiver: Receiver, signal: str) -> None:
    variables = {f"OTEL_EXPORTER_OTLP{signal}_ENDPOINT": receiver.url}
    telemetry = connect(Settings(otel=variables), "test", "one")
    assert telemetry.enabled
    telemetry.close()


@pytest.mark.parametrize("signal", ["TRACES", "METRICS"])
def test_a_receiver_of_one_signal_gets_that_one_and_the_other_goes_nowhere(
    receiver: Receiver, signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"
    telemetry = connect(Settings(otel={name: f"{receiver.url}/v1/{signal.lower()}"}), "test", "one")
    telemetry.counter(metrics.STEPS, lambda: 1)
    assert telemetry.keeps(1) == (signal == "TRACES")
    telemetry.emit(span_of(uuid7()))
    telemetry.close()
    assert (bool(receiver.spans), bool(receiver.metrics)) == (
        (True, False) if signal == "TRACES" else (False, True)
    )
    monkeypatch.setenv(name, receiver.url)
    assert bool(readers("")) == (signal == "METRICS")


def test_settings_take_the_standard_variables_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=one")
    settings = Settings()
    assert settings.otel["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=one"
    assert "authorization" not in repr(settings)
    # And a worker gets them, by the line that its settings come in, beside what user code sees.
    assert Settings.model_validate_json(settings.model_dump_json()).otel == settings.otel
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in without_secrets(os.environ)


@pytest.mark.parametrize(
    ("endpoint", "variables", "told"),
    [
        ("127.0.0.1:4318", {}, "http://HOST:4318"),
        ("http://h", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ("http://h", {"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "always_on"),
        (
            "http://h",
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "much"},
            "OTEL_TRACES_SAMPLER_ARG",
        ),
        ("http://h", {"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "many"),
    ],
)
def test_what_cannot_be_used_is_named_and_the_service_goes_on(
    endpoint: str, variables: dict[str, str], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert connect(Settings(otlp_endpoint=endpoint, otel=variables), "test", "one") is OFF
    assert told in caplog.text


def test_disabled_is_off(receiver: Receiver) -> None:
    settings = Settings(otlp_endpoint=receiver.url, otel={"OTEL_SDK_DISABLED": "true"})
    assert connect(settings, "test", "one") is OFF


def test_nothing_is_registered_globally_or_left_in_the_environment(receiver: Receiver) -> None:
    before = trace.get_tracer_provider(), otel_metrics.get_meter_provider()
    telemetry = connected(receiver.url, OTEL_EXPORTER_OTLP_HEADERS="authorization=secret")
    assert (trace.get_tracer_provider(), otel_metrics.get_meter_provider()) == before
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in os.environ
    telemetry.emit(span_of(uuid7()))
    telemetry.close()
    # It was read all the same.
    assert receiver.headers[0]["authorization"] == "secret"


# -- spans -------------------------------------------------------------------------------------


def test_a_span_arrives_as_it_was_handed_over(receiver: Receiver) -> None:
    session, upstream = uuid7(), SpanRef(5, 6)
    parent = session_span(session)
    telemetry = connected(receiver.url)
    telemetry.emit(
        Span(
            placement_span(session, 2),
            "placement",
            1_000,
            2_500,
            parent,
            {"dsec.attempt": 2, "dsec.worker": "w"},
            (upstream,),
            "it broke",
        )
    )
    telemetry.close()
    (span,) = receiver.spans
    assert (span.service, span.name, span.failed) == ("dsec-test", "placement", True)
    assert (span.trace_id, span.parent_id) == (session.int, parent.span_id)
    assert span.span_id == placement_span(session, 2).span_id
    assert (span.start_ns, span.end_ns) == (1_000, 2_500)
    assert span.attributes == {"dsec.attempt": 2, "dsec.worker": "w"}
    assert span.links == [tuple(upstream)]


def test_a_root_has_no_parent_whatever_user_code_has_open(receiver: Receiver) -> None:
    telemetry = connected(receiver.url)
    theirs = trace.NonRecordingSpan(trace.SpanContext(7, 8, False))
    session = uuid7()
    with trace.use_span(theirs):
        telemetry.emit(span_of(session))
    telemetry.close()
    assert [(span.trace_id, span.parent_id) for span in receiver.spans] == [(session.int, 0)]


def test_two_clocks_that_differ_make_no_span_that_ends_before_it_starts(
    receiver: Receiver,
) -> None:
    telemetry = connected(receiver.url)
    telemetry.emit(span_of(uuid7(), start_ns=3_000, end_ns=2_000))
    telemetry.close()
    assert [(span.start_ns, span.end_ns) for span in receiver.spans] == [(2_000, 2_000)]


def test_what_the_protocol_cannot_carry_costs_no_other_span(receiver: Receiver) -> None:
    telemetry = connected(receiver.url)
    telemetry.emit(span_of(uuid7(), start_ns=-5, end_ns=1 << 70))
    telemetry.emit(span_of(uuid7(), error="a lone surrogate: \ud800"))
    telemetry.close()
    assert len(receiver.spans) == 2


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.4"},
            0.4,
        ),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0.0),
        ({"OTEL_TRACES_EXPORTER": "none"}, 0.0),
        ({}, 1.0),
    ],
)
def test_what_is_kept_is_what_is_sent(
    receiver: Receiver, variables: dict[str, str], share: float
) -> None:
    telemetry = connected(receiver.url, **variables)
    sessions = [uuid7() for _ in range(500)]
    for session in sessions:
        telemetry.emit(span_of(session))
    telemetry.close()
    kept = [session.int for session in sessions if telemetry.keeps(session.int)]
    assert [span.trace_id for span in receiver.spans] == kept
    assert abs(len(kept) / len(sessions) - share) <= 0.12 * (0 < share < 1)


# -- a receiver that is away -------------------------------------------------------------------


def test_a_receiver_that_is_away_costs_spans_which_are_counted_and_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry = connected(f"http://127.0.0.1:{free_port()}", OTEL_BSP_SCHEDULE_DELAY="20")
    began_s = time.monotonic()
    for _ in range(SPANS):
        telemetry.emit(span_of(uuid7()))
    # One attempt at sending waits longer than this in all.
    assert time.monotonic() - began_s < 5
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        telemetry.close()
    assert time.monotonic() - began_s < CLOSE_S_MAX + 4
    assert telemetry.delivery.lost == SPANS
    assert f"{SPANS} spans were not delivered" in caplog.text


def test_what_waits_is_bounded(receiver: Receiver) -> None:
    receiver.wait_s = 30.0
    telemetry = connected(receiver.url, OTEL_BSP_MAX_QUEUE_SIZE="100", OTEL_BSP_SCHEDULE_DELAY="20")
    for _ in range(SPANS):
        telemetry.emit(span_of(uuid7()))
    delivery = telemetry.delivery
    assert delivery.accepted - delivery.taken <= 100
    assert delivery.refused >= SPANS - 2 * 100 - 100
    assert delivery.refused + delivery.accepted == SPANS
    telemetry.close()
    assert delivery.lost == SPANS


def test_what_was_let_in_is_delivered_and_what_was_not_is_counted(receiver: Receiver) -> None:
    receiver.wait_s = 0.2
    telemetry = connected(receiver.url, OTEL_BSP_MAX_QUEUE_SIZE="100", OTEL_BSP_SCHEDULE_DELAY="20")
    sessions = [uuid7() for _ in range(SPANS)]
    for session in sessions:
        telemetry.emit(span_of(session))
    telemetry.close()
    delivery = telemetry.delivery
    assert len(receiver.spans) == delivery.sent == delivery.accepted
    assert delivery.sent + delivery.lost == SPANS
    # The first stay: those that come while there is no room are lost.
    assert [span.trace_id for span in receiver.spans[:100]] == [one.int for one in sessions[:100]]


def test_a_receiver_that_refuses_and_comes_back_gets_what_follows(receiver: Receiver) -> None:
    receiver.status = 400
    telemetry = connected(receiver.url, OTEL_BSP_SCHEDULE_DELAY="20")
    telemetry.emit(span_of(uuid7()))
    receiver.until(lambda: telemetry.delivery.lost == 1)
    receiver.status = 200
    telemetry.emit(span_of(uuid7()))
    telemetry.close()
    assert (len(receiver.spans), telemetry.delivery.lost) == (1, 1)


def test_the_log_is_not_filled(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.status = 400
    telemetry = connected(receiver.url, OTEL_BSP_SCHEDULE_DELAY="10")
    for n in range(1, 6):
        telemetry.emit(span_of(uuid7()))
        receiver.until(lambda wanted=n: telemetry.delivery.lost == wanted)  # type: ignore[misc]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert receiver.url in caplog.text
    telemetry.close()


# -- processes ---------------------------------------------------------------------------------

FORKING = """
import os, sys
from dsec.platform.settings import Settings
from dsec.platform.telemetry import Span, connect, metrics
from dsec.platform.telemetry.ids import session_span
from uuid import UUID
told = {"OTEL_BSP_SCHEDULE_DELAY": "3600000", "OTEL_METRIC_EXPORT_INTERVAL": "100"}
telemetry = connect(Settings(otlp_endpoint=sys.argv[1], otel=told), "test", "one")
telemetry.counter(metrics.STEPS, lambda: 1 if os.getpid() == parent else 1_000)
parent = os.getpid()
for n in range(10):
    telemetry.emit(Span(session_span(UUID(int=n + 1)), "session", 1, 2))
child = os.fork()
if not child:
    import time
    time.sleep(1)  # some metric periods
    sys.exit(0)
os.waitpid(child, 0)
telemetry.emit(Span(session_span(UUID(int=11)), "session", 1, 2))
telemetry.close()
assert telemetry.delivery.lost == 0
"""


def test_a_fork_by_user_code_loses_and_doubles_nothing(receiver: Receiver) -> None:
    subprocess.run([sys.executable, "-c", FORKING, receiver.url], check=True, timeout=60)
    assert sorted(span.trace_id for span in receiver.spans) == list(range(1, 12))
    assert set(receiver.told["dsec-test", metrics.STEPS.name]) == {1}


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_arrive_with_what_is_read_when_they_are_sent(receiver: Receiver) -> None:
    telemetry = connected(receiver.url)
    steps = 0
    telemetry.counter(metrics.STEPS, lambda: steps)
    telemetry.gauge(metrics.RUS, lambda: 0.25)
    telemetry.gauge(metrics.SESSION_HEARTBEAT_P95, lambda: None)
    record = telemetry.histogram(metrics.SSAL)
    steps = 12
    record(0.3)
    record(7.0)
    telemetry.close()
    values = {name: points for (_, name), points in receiver.metrics.items()}
    assert values["dsec.steps"] == [12]
    assert values["rus"] == [0.25]
    assert "session_heartbeat_p95" not in values
    assert values["ssal"] == [2]


def test_metrics_can_be_turned_off(receiver: Receiver) -> None:
    telemetry = connected(receiver.url, OTEL_METRICS_EXPORTER="none")
    telemetry.counter(metrics.STEPS, lambda: 1)
    telemetry.close()
    assert not receiver.metrics


def test_every_metric_is_listed_once_with_a_unit_and_a_definition() -> None:
    listed = [*metrics.NAMED.values(), *metrics.OPERATIONAL]
    defined = [one for one in vars(metrics).values() if isinstance(one, metrics.Metric)]
    assert sorted(one.name for one in listed) == sorted(one.name for one in defined)
    assert len({one.name for one in listed}) == len(listed)
    assert all(one.unit and one.definition for one in listed)


def test_off_takes_everything_and_does_nothing() -> None:
    off: Telemetry = OFF
    off.emit(span_of(uuid7()))
    off.counter(metrics.STEPS, lambda: 1)
    off.gauge(metrics.RUS, lambda: 1)
    off.histogram(metrics.SSAL)(1.0)
    off.close()
    assert not off.keeps(uuid7().int)
