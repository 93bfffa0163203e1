"""The span of a call: where it belongs, and what it says without saying what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.otlp import Receiver
from tests.tool.conftest import SESSION, Rig, spec_of

from dsec.platform.telemetry.ids import placement_span, session_span, tool_span
from dsec.session.tool_document import ToolDocument
from dsec.tool.asked import Asked
from dsec.tool.frames import Failure, Outcome
from dsec.tool.spans import call_span
from dsec_contracts import encode
from dsec_contracts.tool import ToolAnswerCircumstance

BEGAN = datetime(2026, 3, 2, 9, 30, tzinfo=UTC)
TOLD = ToolAnswerCircumstance(replica="r", attempts=2)


def asked(attempt: int = 3) -> Asked:
    told = {"lane": "lane", "sequence": 9, "delivery": "9.1", "maybe_made": False}
    counts = {"number": 0, "total": 0, "total_max": None}
    about = {"turn_hash": b"h" * 16, "name": "find", "arguments": "{}", "use": None}
    return Asked(SESSION, 4, 1, 0, **about, **told, traceparent=None, attempt=attempt, **counts)


def span_of(document: ToolDocument | None, outcome: Outcome, attempt: int = 3) -> Any:
    times = (BEGAN, BEGAN + timedelta(seconds=2))
    return call_span(asked(attempt), document, outcome, times, TOLD)


def test_it_is_in_the_sessions_trace_and_the_same_for_every_delivery() -> None:
    span = span_of(None, Failure("spec_not_found", "a secret"))
    assert span.ref == tool_span(SESSION, 4, 1, 0)
    assert span.ref.trace_id == SESSION.int
    assert span.parent == placement_span(SESSION, 3)
    assert span_of(None, b"", attempt=0).parent == session_span(SESSION)
    assert span.end_ns - span.start_ns == 2_000_000_000
    assert (span.name, span.error) == ("execute_tool find", "spec_not_found")
    assert span.attributes["error.type"] == "spec_not_found"
    assert span.attributes["dsec.tool.attempts"] == 2
    assert "a secret" not in str(span)


@pytest.mark.parametrize(
    ("kind", "keys", "type_"),
    [
        ("python", {"entry": "t.py:t"}, "function"),
        ("http", {"url": "https://api.example/x"}, "extension"),
        ("mcp", {"url": "http://127.0.0.1:9/mcp"}, "extension"),
    ],
)
def test_a_tool_is_told_by_the_conventions(kind: str, keys: Any, type_: str) -> None:
    span = span_of(ToolDocument(name="t", kind=kind, **keys), encode("what it said"))
    told = span.attributes
    assert told["gen_ai.operation.name"] == "execute_tool"
    assert (told["gen_ai.tool.name"], told["gen_ai.tool.call.id"]) == ("find", "call_4_1_0")
    assert told["gen_ai.tool.type"] == type_
    ports = {"python": None, "http": 443, "mcp": 9}
    assert told.get("server.port") == ports[kind]
    assert ("mcp.method.name" in told) == (kind == "mcp")
    assert "what it said" not in str(span)


def test_a_model_is_told_by_the_conventions() -> None:
    document = ToolDocument(name="m", kind="openai", url="http://127.0.0.1:8000/v1", model="qwen")
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    answer = {"model": "qwen-1", "usage": usage, "choices": [{"text": "what it said"}]}
    span = span_of(document, encode(answer))
    assert span.name == "chat qwen"
    told = span.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.request.model"], told["gen_ai.response.model"]) == ("qwen", "qwen-1")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (7, 3)
    assert (told["server.address"], told["server.port"]) == ("127.0.0.1", 8000)
    assert "what it said" not in str(span)
    odd = span_of(document, encode({"model": 1, "usage": [2], "choices": []})).attributes
    assert "gen_ai.response.model" not in odd


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that every replica which starts now sends to."""
    made = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    yield made
    made.close()


@pytest.mark.nats
@pytest.mark.postgres
async def test_the_service_sends_spans_and_counts(rig: Rig, receiver: Receiver) -> None:
    good, bad = spec_of("def tool(): return 1"), spec_of("def tool(): raise ValueError('why')")
    await rig.know(good, bad)
    rig.start()
    await rig.call(good[0], bad[0], step=4)
    await rig.answered(2)
    await asyncio.to_thread(receiver.until, lambda: len(receiver.of(SESSION)) == 2)
    ids = {span.span_id for span in receiver.of(SESSION)}
    assert ids == {tool_span(SESSION, 4, 0, n).span_id for n in (0, 1)}

    def counted() -> bool:
        told = {name: points for (_, name), points in receiver.metrics.items()}
        return (
            told.get("dsec.tool.calls") == [2]
            and told["dsec.tool.calls.failed"] == [1]
            and told["tool_failure_rate"] == [0.5]
        )

    await asyncio.to_thread(receiver.until, counted)
