"""A small OpenAI-compatible server: a stand-in for vLLM or llama.cpp that needs no weights.

Its "model" is a rule: asked for a stock it calls the tool `stock`; told the stock it answers with
the number. The same request always gives the same tokens and log-probabilities; ids and times
differ, as real ones do. It knows chat and completions, whole and streamed.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FINGERPRINT = "fp_rule_1"
_ITEM = re.compile(r"how many (.+?) are in stock", re.IGNORECASE)


def reply_to(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the rule gives."""
    last = messages[-1] if messages else {}
    if last.get("role") == "tool":
        found = json.loads(last.get("content") or "null")
        count = found.get("count") if isinstance(found, dict) else None
        return {"role": "assistant", "content": "unknown" if count is None else str(count)}
    item = _ITEM.search(str(last.get("content")))
    if item is None:
        return {"role": "assistant", "content": "I only know stocks."}
    function = {"name": "stock", "arguments": json.dumps({"item": item[1]})}
    call = {"id": f"call_{uuid.uuid4().hex[:8]}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tokens_of(text: str) -> list[dict[str, Any]]:
    """Words as tokens, each with an id and a log-probability that follow from it."""
    told = []
    for word in re.findall(r"\s*\S+", text):
        digest = hashlib.sha256(word.encode()).digest()
        told.append(
            {
                "token": word,
                "token_id": int.from_bytes(digest[:2], "big"),
                "logprob": -digest[2] / 64,
                "bytes": list(word.encode()),
                "top_logprobs": [],
            }
        )
    return told


class ModelHandler(BaseHTTPRequestHandler):
    """One request. `complete` is what another server of this shape overrides."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        """Answer a request."""
        answer = self.chat(body) if self.path.endswith("/chat/completions") else self.text(body)
        if body.get("stream"):
            self.send_pieces(pieces_of(answer, body))
        else:
            self.send_json(200, answer)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer of a chat."""
        message = reply_to(body["messages"])
        calls = message.get("tool_calls")
        tokens = tokens_of(calls[0]["function"]["arguments"] if calls else message["content"])
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
            "logprobs": None,
        }
        if body.get("logprobs"):
            shown = [{n: v for n, v in one.items() if n != "token_id"} for one in tokens]
            choice["logprobs"] = {"content": shown}
        if body.get("return_token_ids"):
            choice["token_ids"] = [one["token_id"] for one in tokens]
        return self.about(body, "chat.completion") | {
            "choices": [choice],
            "usage": usage(len(tokens_of(json.dumps(body["messages"]))), len(tokens)),
        }

    def text(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer of a completion: the prompt backwards."""
        text = str(body["prompt"])[::-1]
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        return self.about(body, "text_completion") | {
            "choices": [choice],
            "usage": usage(len(tokens_of(str(body["prompt"]))), len(tokens_of(text))),
        }

    def about(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        """What an answer says of itself."""
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": f"{body['model']}-2026-01",
            "system_fingerprint": FINGERPRINT,
        }

    def send_json(self, status: int, value: Any, **headers: str) -> None:
        """One JSON answer."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def send_pieces(self, pieces: Iterator[bytes]) -> None:
        """Server-sent events; the connection's end is theirs."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for data in pieces:
            self.wfile.write(b"data: " + data + b"\n\n")
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


def usage(prompt: int, completion: int) -> dict[str, int]:
    """What was used, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def pieces_of(answer: dict[str, Any], body: dict[str, Any]) -> Iterator[bytes]:
    """A whole answer as a stream has it: a character or two at a time."""
    about = {n: answer[n] for n in ("id", "created", "model", "system_fingerprint")}
    about["object"] = answer["object"].removesuffix(".chunk") + ".chunk"
    for choice in answer["choices"]:
        for one in _deltas(choice):
            piece = {"index": choice["index"], "finish_reason": None, "logprobs": None} | one
            yield json.dumps(about | {"choices": [piece]}).encode()
    if (body.get("stream_options") or {}).get("include_usage"):
        yield json.dumps(about | {"choices": [], "usage": answer["usage"]}).encode()
    yield b"[DONE]"


def _deltas(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "text" in choice:
        yield from ({"text": part} for part in _parts(choice["text"]))
        yield {"text": "", "finish_reason": choice["finish_reason"]}
        return
    message = choice["message"]
    yield {"delta": {"role": message["role"], "content": ""}}
    for part in _parts(message["content"] or ""):
        yield {"delta": {"content": part}}
    for n, call in enumerate(message.get("tool_calls") or []):
        function = {"name": call["function"]["name"], "arguments": ""}
        first = {"index": n, "id": call["id"], "type": "function", "function": function}
        yield {"delta": {"tool_calls": [first]}}
        for part in _parts(call["function"]["arguments"]):
            yield {"delta": {"tool_calls": [{"index": n, "function": {"arguments": part}}]}}
    for one in (choice["logprobs"] or {}).get("content", []):
        yield {"delta": {}, "logprobs": {"content": [one]}}
    for one in choice.get("token_ids", []):
        yield {"delta": {}, "token_ids": [one]}
    yield {"delta": {}, "finish_reason": choice["finish_reason"]}


def _parts(text: str) -> list[str]:
    return [text[at : at + 2] for at in range(0, len(text), 2)]


class ModelServer(ThreadingHTTPServer):
    """A server that takes it as it comes when a client goes away in the midst of an answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(port: int, handler: type[ModelHandler] = ModelHandler) -> ModelServer:
    """A server on the loopback address, which its caller has serve. Port 0: any free one."""
    return ModelServer(("127.0.0.1", port), handler)
