"""The `openai` kind against a server on the loopback address: what is recorded, and what fails."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest

from dsec.examples.language.model_server import ModelHandler, pieces_of, serve
from dsec.platform.user_limits import UserLimits
from dsec.session.documents import seal
from dsec.session.tool_document import ToolDocument
from dsec.tool import model_request
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode

QUESTION = {"messages": [{"role": "user", "content": "How many red lamps are in stock?"}]}
TOLD = {
    "messages": [
        *QUESTION["messages"],
        {"role": "tool", "tool_call_id": "call_1", "content": '{"count": 12}'},
    ]
}


class Hostile(ModelHandler):
    """Does what the name of the model says."""

    seen: ClassVar[list[tuple[dict[str, str], dict[str, Any]]]] = []

    def complete(self, body: dict[str, Any]) -> None:
        self.seen.append((dict(self.headers), body))
        fault = body["model"]
        if fault.isdecimal():
            self.send_json(int(fault), {"error": {"message": "no"}}, Retry_After="7")
        elif fault == "silent":
            time.sleep(30)
        elif fault == "no_choices":
            self.send_json(200, {"choices": []})
        elif fault == "not_finite":
            answer = self.chat(body)
            answer["choices"][0]["logprobs"] = {"content": [{"logprob": float("-inf")}]}
            answer["usage"] = {"x": float("nan")}
            self.send_json(200, answer)
        elif fault == "cached":  # as llama.cpp and vLLM tell of themselves
            answer = self.chat(body)
            answer["timings"] = {"predicted_ms": time.monotonic()}
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": len(self.seen), "x": 1}
            self.send_json(200, answer)
        elif fault in FAULTY_STREAMS:
            self.send_pieces(FAULTY_STREAMS[fault](list(pieces_of(self.chat(body), body))))
        else:
            super().complete(body)


def _endless(pieces: list[bytes]) -> Iterator[bytes]:
    while True:
        yield b'{"choices":[{"index":0,"delta":{"content":"' + b"x" * 100_000 + b'"}}]}'


FAULTY_STREAMS: dict[str, Any] = {
    "breaks_off": lambda pieces: iter(pieces[:4]),
    "no_done": lambda pieces: iter(pieces[:-1]),
    "no_utf8": lambda pieces: iter([b'{"choices":[{"index":0,"delta":{"content":"\xff\xfe"}}]}']),
    "no_json": lambda pieces: iter([b"{"]),
    "no_object": lambda pieces: iter([b"[1]"]),
    "skips": lambda pieces: iter([b'{"choices":[{"index":99,"delta":{}}]}']),
    "error": lambda pieces: iter([pieces[0], b'{"error":{"message":"out of memory"}}']),
    "endless": _endless,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    made = serve(0, Hostile)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/v1"
    made.shutdown()


def spec(url: str, model: str = "m", **options: Any) -> tuple[str, bytes]:
    document = ToolDocument(name="model", kind="openai", url=url, model=model, **options)
    return seal("tool", document, {})


def asked(url: str, arguments: Any = QUESTION, model: str = "m", **options: Any) -> Outcome:
    tool = load(*spec(url, model, **options), {"KEY": "s3cret"})
    assert isinstance(tool, Tool), tool
    return tool.call(Order(json.dumps(arguments), "the-key"))


def value(outcome: Outcome) -> Any:
    assert isinstance(outcome, bytes), outcome
    return decode(outcome)


def code(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure), decode(outcome)
    return outcome.code


@pytest.mark.parametrize("arguments", [QUESTION, TOLD])
def test_a_stream_is_recorded_as_the_whole_answer_would_be(url: str, arguments: Any) -> None:
    """And twice the same, though ids and times differ: they would be in the chain."""
    wanted = {"logprobs": True, "return_token_ids": True}
    whole = asked(url, arguments, request=wanted)
    assert asked(url, arguments, request=wanted) == whole
    assert asked(url, arguments, request=wanted, stream=True) == whole
    told = value(whole)
    assert set(told) == {"model", "system_fingerprint", "choices", "usage"}
    assert (told["model"], told["system_fingerprint"]) == ("m-2026-01", "fp_rule_1")
    (choice,) = told["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
    assert told["usage"]["completion_tokens"] == len(choice["token_ids"])
    if arguments is TOLD:
        assert choice["message"] == {"role": "assistant", "content": "12"}
        return
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "stock", "arguments": '{"item": "red lamps"}'}
    assert call["id"].startswith("call_")


def test_what_a_server_says_of_its_speed_and_its_cache_is_no_part_of_the_answer(url: str) -> None:
    one, other = (asked(url, model="cached") for _ in range(2))
    assert one == other
    assert value(one)["usage"]["prompt_tokens_details"] == {"x": 1}


def test_ids_of_tool_calls_follow_from_what_was_asked(url: str) -> None:
    one, other = (
        value(asked(url, QUESTION | more))["choices"][0]["message"]["tool_calls"][0]["id"]
        for more in ({}, {"seed": 1})
    )
    assert one != other


@pytest.mark.parametrize("stream", [False, True])
def test_completions(url: str, stream: bool) -> None:
    told = value(asked(url, {"prompt": "abc def"}, api="completions", stream=stream))
    assert told["choices"] == [{"index": 0, "text": "fed cba", "finish_reason": "stop"}]
    assert told["usage"]["total_tokens"] == 4


def test_what_is_sent(url: str) -> None:
    asked(
        url,
        QUESTION | {"temperature": 1},
        request={"temperature": 0, "top_p": 0.5},
        api_key="KEY",
        stream=True,
    )
    headers, body = Hostile.seen[-1]
    assert headers["Authorization"] == "Bearer s3cret"
    assert headers["Idempotency-Key"] == "the-key"
    assert body == QUESTION | {
        "model": "m",
        "temperature": 1,
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    count = len(Hostile.seen)
    assert code(asked(url, QUESTION | {"model": "another"})) == "arguments_invalid"
    assert len(Hostile.seen) == count


def test_a_refusal_says_how_long_to_wait(url: str) -> None:
    for status, retryable in (("429", True), ("500", True), ("400", False)):
        outcome = asked(url, model=status)
        assert isinstance(outcome, Failure)
        assert (outcome.code, outcome.retryable) == ("http_status", retryable)
        assert outcome.retry_after_s == 7
        assert Hostile.seen[-1][1]["model"] == status  # asked once: nothing is sent again here
    assert len([1 for _, body in Hostile.seen if body["model"] == "429"]) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("breaks_off", "http_broken"),
        ("no_utf8", "result_invalid"),
        ("no_json", "result_invalid"),
        ("no_object", "result_invalid"),
        ("skips", "result_invalid"),
        ("error", "model_error"),
        ("endless", "output_too_large"),
    ],
)
def test_streams_that_are_no_answer(
    url: str, fault: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_request, "STREAM_BYTES_MAX", 1 << 20)
    assert code(asked(url, model=fault, stream=True)) == told


def test_a_stream_that_ends_without_a_word_is_whole_if_its_choices_are(url: str) -> None:
    told = asked(url, TOLD, model="no_done", stream=True)
    assert value(told)["choices"][0]["message"]["content"] == "12"


def test_answers_that_are_none(url: str) -> None:
    assert code(asked(url, model="no_choices")) == "result_invalid"
    assert code(asked(url, output_bytes_max=50)) == "output_too_large"
    assert code(asked("http://127.0.0.1:1/v1")) == "http_unreachable"


def test_numbers_that_are_not_finite_are_recorded_as_they_are(url: str) -> None:
    told = value(asked(url, model="not_finite"))
    assert told["choices"][0]["logprobs"]["content"][0]["logprob"] == float("-inf")
    assert told["usage"]["x"] != told["usage"]["x"]


def test_a_client_that_goes_away_in_the_midst_is_no_trouble_of_the_server(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(url.rpartition(":")[2].partition("/")[0])
    body = json.dumps(QUESTION | {"model": "endless", "stream": True}).encode()
    asking = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    count = len(Hostile.seen)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(asking % len(body) + body)
        assert client.recv(1000)
    assert len(Hostile.seen) == count + 1
    time.sleep(0.5)
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(1 << 30, 64, 1 << 20, 8), 2)
    yield made
    await made.close()


async def test_a_server_that_never_answers_costs_the_deadline(
    processes: Processes, url: str
) -> None:
    process = await processes.take(Program(*spec(url, "silent"), {}))
    began = time.monotonic()
    outcome = await processes.call(process, Order(json.dumps(QUESTION), "key"), 1.5)
    assert code(outcome) == "deadline"
    assert time.monotonic() - began < 10
