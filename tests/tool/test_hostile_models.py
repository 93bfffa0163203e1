"""Models whose servers say what no model's server should: an answer, or a reason, in time."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.tool.raw_server import RawServer, head, raw_server, saying

from dsec.examples.language.model_server import ModelHandler, pieces_of
from dsec.platform.user_limits import UserLimits
from dsec.session.documents import seal
from dsec.session.tool_document import ToolDocument
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome, Refused
from dsec.tool.model_answer import folded, recorded
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode, encode

pytestmark = pytest.mark.long

QUESTION = {"messages": [{"role": "user", "content": "?"}]}
STREAM = head(kind="text/event-stream")


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def piece(text: Any, reason: str | None = None, **more: Any) -> bytes:
    delta = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
    return event({"model": "m", "choices": [delta]} | more)


def calling(call_id: str | None, name: str | None, arguments: str, index: int | None = 0) -> bytes:
    """A piece of a tool call; without an index where that is None."""
    call: dict[str, Any] = {"id": call_id, "function": {"name": name, "arguments": arguments}}
    call |= {} if index is None else {"index": index}
    return event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


DONE = b"data: [DONE]\n\n"


def deep(levels: int) -> dict[str, Any]:
    """A choice that holds so many lists, one in the other."""
    value: dict[str, Any] = {"index": 0}
    for _ in range(levels):
        value = {"index": 0, "a": [value]}
    return value


def _open_after(data: bytes) -> Callable[[socket.socket, bytes], None]:
    """Says it, and nothing more, and does not go away."""

    def say(connection: socket.socket, _: bytes) -> None:
        connection.sendall(STREAM + data)
        time.sleep(30)

    return say


def _drips(connection: socket.socket, _: bytes) -> None:
    connection.sendall(STREAM)
    while True:
        connection.sendall(piece("a"))
        time.sleep(0.05)


def _one_endless_piece(connection: socket.socket, _: bytes) -> None:
    connection.sendall(STREAM + b'data: {"choices": "')
    while True:
        connection.sendall(b"x" * 100_000)


MODELS = {
    "drips": _drips,
    "half": _open_after(piece("a")),
    "never-done": _open_after(piece("a", "stop")),
    "endless-piece": _one_endless_piece,
    "refused-in-a-stream": saying(STREAM + event({"error": {"message": "out of memory"}})),
    "text": saying(STREAM + b"data: hello\n\n"),
    "number": saying(STREAM + b"data: 7\n\n"),
    "choices-map": saying(STREAM + event({"choices": {"a": 1}}) + DONE),
    "choices-null": saying(STREAM + event({"choices": None}) + DONE),
    "delta-text": saying(STREAM + event({"choices": [{"index": 0, "delta": "a"}]}) + DONE),
    "index-text": saying(STREAM + event({"choices": [{"index": "0", "delta": {}}]}) + DONE),
    "grows-strange": saying(
        STREAM
        + event({"choices": [{"index": 0, "delta": {"tool_calls": ["a"]}}]})
        + event({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]})
        + DONE
    ),
    "two-calls-of-one-index": saying(
        STREAM + calling("a", "look", '{"a": 1}') + calling("b", "buy", '{"b": 1}') + DONE
    ),
    "a-call-of-no-index": saying(
        STREAM + calling("a", "look", '{"a"', index=None) + calling(None, None, ": 1}", None) + DONE
    ),
    "text-then-list": saying(STREAM + piece("a") + piece(["b"]) + DONE),
    "deep": saying(STREAM + event({"choices": [deep(450)]}) + DONE),
    "only-usage": saying(STREAM + event({"usage": {"total_tokens": 1}}) + DONE),
    "empty": saying(STREAM),
    "whole-in-a-stream": saying(STREAM + b'{"choices": []}'),
    "fine": saying(
        STREAM
        + b": a comment, as servers send to keep connections\n\nevent: message\nid: 7\n"
        + piece("a")
        + event({"choices": []})
        + event({})
        + piece("b", "stop", model="another", system_fingerprint="fp")
        + event({"choices": [], "usage": {"total_tokens": 3}})
        + DONE
        + b"data: what comes behind it is not read"
    ),
    "crlf": saying(STREAM + (piece("ab", "stop") + DONE).replace(b"\n", b"\r\n")),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    def answer(connection: socket.socket, asked: bytes) -> None:
        body = asked.partition(b"\r\n\r\n")[2] or connection.recv(1 << 16)
        MODELS[json.loads(body)["model"]](connection, asked)

    with raw_server({"completions": answer}) as made:
        yield made


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(1 << 30, 64, 1 << 20, 8), 2)
    yield made
    await made.close()


def spec(url: str, model: str) -> tuple[str, bytes]:
    document = ToolDocument(name="model", kind="openai", url=url, model=model, stream=True)
    return seal("tool", document, {})


def asked(url: str, model: str) -> Outcome:
    tool = load(*spec(url, model), {})
    assert isinstance(tool, Tool)
    return tool.call(Order(json.dumps(QUESTION), "key"))


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("endless-piece", "output_too_large"),
        ("refused-in-a-stream", "model_error"),
        ("text", "result_invalid"),
        ("number", "result_invalid"),
        ("choices-map", "result_invalid"),
        ("choices-null", "result_invalid"),
        ("delta-text", "result_invalid"),
        ("index-text", "result_invalid"),
        ("grows-strange", "result_invalid"),
        ("two-calls-of-one-index", "result_invalid"),
        ("a-call-of-no-index", "result_invalid"),
        ("text-then-list", "result_invalid"),
        ("deep", "result_invalid"),
        ("only-usage", "result_invalid"),
        ("empty", "http_broken"),
        ("whole-in-a-stream", "http_broken"),
    ],
)
def test_what_is_no_stream_of_an_answer(server: RawServer, model: str, code: str) -> None:
    outcome = asked(server.url, model)
    assert isinstance(outcome, Failure), decode(outcome)
    assert outcome.code == code, outcome


@pytest.mark.parametrize("model", ["drips", "half", "never-done"])
async def test_a_stream_that_does_not_end_costs_the_deadline(
    processes: Processes, server: RawServer, model: str
) -> None:
    process = await processes.take(Program(*spec(server.url, model), {}))
    began = time.monotonic()
    outcome = await processes.call(process, Order(json.dumps(QUESTION), "key"), 2.0)
    assert isinstance(outcome, Failure)
    assert outcome.code == "deadline"
    assert time.monotonic() - began < 6


def test_the_model_that_answered_is_recorded_and_not_the_one_that_was_asked(
    server: RawServer,
) -> None:
    outcome = asked(server.url, "fine")
    assert isinstance(outcome, bytes), outcome
    assert decode(outcome) == {
        "model": "another",
        "system_fingerprint": "fp",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"total_tokens": 3},
    }
    lines = asked(server.url, "crlf")
    assert isinstance(lines, bytes), lines
    assert decode(lines)["choices"][0]["message"]["content"] == "ab"


# -- any mixture of types --------------------------------------------------------------------------

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1.5, math.nan, "", "x", [], [1], [None], [[]], {}),
    *([{"index": 0}], [{"index": "0"}], [{"index": True}], {"index": 0}, {"a": {"b": 1}}),
    [{"index": 0, "delta": {"content": [1]}}],
)


class _Answers(ModelHandler):
    """The answers of the local server without the server."""

    def __init__(self) -> None:
        self.path = "/v1/chat/completions"


def _spoiled(value: Any, chance: random.Random, share: float) -> Any:
    if chance.random() < share:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        kept = {n: _spoiled(v, chance, share) for n, v in value.items() if chance.random() > share}
        return kept | ({"index": chance.choice(JUNK)} if chance.random() < share else {})
    if isinstance(value, list):
        return [_spoiled(one, chance, share) for one in value]
    return value


async def _each(pieces: list[Any]) -> AsyncIterator[Any]:
    for one in pieces:
        yield one


@pytest.mark.parametrize("seed", range(4))
def test_whatever_types_a_server_mixes_there_is_an_answer_or_a_reason(seed: int) -> None:
    question = QUESTION["messages"][0] | {"content": "How many red lamps are in stock?"}
    body = {"model": "m", "messages": [question], "logprobs": True, "return_token_ids": True}
    answer, chance = _Answers().chat(body), random.Random(seed)
    pieces = [json.loads(data) for data in list(pieces_of(answer, body))[:-1]]
    answers, codes = 0, set[str]()
    for _ in range(250):
        spoiled = [_spoiled(one, chance, 0.01) for one in pieces]
        try:
            encode(recorded(asyncio.run(folded(_each(spoiled))), body, "chat"))
            encode(recorded(_spoiled(answer, chance, 0.03), body, "chat"))
            answers += 1
        except Refused as refused:
            codes.add(refused.failure.code)
    assert answers > 0
    assert codes == {"result_invalid", "model_error"} or codes == {"result_invalid"}
