"""MCP servers that mean no good: a reason each, within the deadline, and nothing left running."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tool.raw_server import RawServer, head, raw_server, saying
from tests.tool.test_hostile_python import gone

from dsec.client.described_tools import described
from dsec.client.yaml_file import SpecFileError
from dsec.platform.user_limits import UserLimits
from dsec.session.documents import seal
from dsec.session.tool_document import ToolDocument
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode

pytestmark = pytest.mark.long

MARK = f"81.{os.getpid()}"
X = {"type": "object", "properties": {"x": {"type": "integer"}}}
BIG = 100_000_000

TALKS = '''
import json, os, subprocess, sys, time

def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()

def answer(id, result):
    say({"jsonrpc": "2.0", "id": id, "result": result})

def ask(method, params):
    """What the client answers to a question of the server's."""
    say({"jsonrpc": "2.0", "id": "mine", "method": method, "params": params})
    for line in sys.stdin:
        told = json.loads(line)
        if told.get("id") == "mine":
            return told

def serve(call, schema={"type": "object"}):
    for line in sys.stdin:
        asked = json.loads(line)
        id, method = asked.get("id"), asked.get("method")
        if method == "initialize":
            answer(id, {"protocolVersion": asked["params"]["protocolVersion"],
                        "capabilities": {"tools": {}},
                        "serverInfo": {"name": "hostile", "version": "1"}})
        elif method == "tools/list":
            answer(id, {"tools": [{"name": "t", "inputSchema": schema}]})
        elif method == "tools/call":
            call(id)
        elif id is not None:
            say({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no"}})

def text(words):
    return {"content": [{"type": "text", "text": words}]}

QUIET = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
'''


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(1 << 30, 256, 1 << 20, 16), 2)
    yield made
    await made.close()


def over_pipes(source: str, **options: Any) -> Program:
    document = ToolDocument(
        name="t", kind="mcp", command=sys.executable, args=["server.py"], parameters=X, **options
    )
    values = dict.fromkeys(document.secret_names, "hush-hush")
    return Program(*seal("tool", document, {"server.py": (TALKS + source).encode()}), values)


async def asked(processes: Processes, program: Program, deadline_s: float = 20.0) -> Outcome:
    process = await processes.take(program)
    return await processes.call(process, Order("{}", "key"), deadline_s)


async def asked_here(program: Program) -> Outcome:
    """The outcome in this process, for what ends by itself."""
    tool = load(program.spec_hash, program.content, program.secrets)
    assert isinstance(tool, Tool)
    return await asyncio.to_thread(tool.call, Order("{}", "key"))


def failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure), decode(outcome)
    assert len(outcome.message) < 5_000
    return outcome


CALLS = {
    # name: what a call does, the code, a part of the message
    "answers with 100 MB": (f"answer(id, text('x' * {BIG}))", "output_too_large", "bytes"),
    "answers with 100 MB and no end": (
        f"sys.stdout.write('x' * {BIG}); sys.stdout.flush(); time.sleep(60)",
        "output_too_large",
        "bytes",
    ),
    "ends": ("os._exit(0)", "mcp_broken", "ended the connection"),
    "ends in the midst of a line": (
        "sys.stdout.write('{\"jsonrpc\":'); sys.stdout.flush(); os._exit(1)",
        "mcp_broken",
        "ended the connection",
    ),
    "answers with something else": ("answer(id, {'content': 7})", "mcp_broken", "content"),
    "answers with an error": (
        "say({'jsonrpc': '2.0', 'id': id, 'error': {'code': 7, 'message': 'y' * 500_000}})",
        "tool_raised",
        "yyy",
    ),
    "fails with many words": (
        "answer(id, text('z' * 500_000) | {'isError': True})",
        "tool_raised",
        "zzz",
    ),
    "closes its output and goes on": (
        "os.close(1); time.sleep(60)",
        "mcp_broken",
        "ended the connection",
    ),
}


async def test_a_call_that_goes_wrong_has_a_reason_and_leaves_nothing(
    processes: Processes,
) -> None:
    async def call(n: int, does: str) -> Failure:
        starts = f"subprocess.Popen(['sleep', {MARK + str(n)!r}], start_new_session=True, **QUIET)"
        program = over_pipes(f"{starts}\ndef call(id):\n    {does}\nserve(call)\n")
        return failure(await asked(processes, program, 60.0))

    found = await asyncio.gather(*(call(n, does) for n, (does, *_) in enumerate(CALLS.values())))
    for n, ((_, code, told), outcome) in enumerate(zip(CALLS.values(), found, strict=True)):
        assert (outcome.code, told in outcome.message) == (code, True), outcome
        if code != "tool_raised":  # after which the server may be used again
            await gone(f"{MARK}{n}")
    await processes.close()
    for n in range(len(CALLS)):
        await gone(f"{MARK}{n}")


SILENT = {
    "never answers": "pass",
    "answers after the deadline": "time.sleep(12); answer(id, text('late'))",
    "answers another question": "answer('another', text('one'))",
    "writes garbage without end": "while True: sys.stdout.write('garbage\\n' * 1000)",
    "writes no newline": "sys.stdout.write('{}'); sys.stdout.flush()",
    "notifies without end": (
        "while True: say({'jsonrpc': '2.0', 'method': 'notifications/tools/list_changed'})"
    ),
}


async def test_calls_that_come_to_no_end_cost_their_deadlines_and_no_neighbour(
    processes: Processes,
) -> None:
    async def call(does: str) -> float:
        process = await processes.take(over_pipes(f"def call(id):\n    {does}\nserve(call)\n"))
        began = time.monotonic()
        outcome = await processes.call(process, Order("{}", "key"), 10.0)
        assert failure(outcome).code == "deadline", outcome
        return time.monotonic() - began

    fine = over_pipes("serve(lambda id: answer(id, text('fine')))\n")
    beside, *took_s = await asyncio.gather(
        asked(processes, fine, 60.0), *(call(does) for does in SILENT.values())
    )
    assert isinstance(beside, bytes), beside
    assert max(took_s) < 20


ASKS: dict[str, dict[str, Any]] = {
    "sampling/createMessage": {"messages": [], "maxTokens": 5},
    "roots/list": {},
    "elicitation/create": {"message": "?", "requestedSchema": {"type": "object"}},
}


@pytest.mark.parametrize("method", ASKS)
async def test_what_a_server_asks_for_is_refused_and_the_call_goes_on(method: str) -> None:
    source = f"serve(lambda id: answer(id, text(json.dumps(ask({method!r}, {ASKS[method]!r})))))\n"
    outcome = await asked_here(over_pipes(source))
    assert isinstance(outcome, bytes), outcome
    told = json.loads(decode(outcome)["content"][0]["text"])
    assert "error" in told
    assert "result" not in told


@pytest.mark.parametrize("schema", ["{'type': 'object', 'properties': 5}", "{'required': [1]}"])
async def test_a_schema_that_is_none_is_told(schema: str) -> None:
    source = f"serve(lambda id: answer(id, text('1')), {schema})\n"
    outcome = failure(await asked_here(over_pipes(source)))
    assert outcome.code == "mcp_broken"
    assert "inputSchema" in outcome.message


async def test_a_secret_that_a_server_tells_is_hidden(processes: Processes) -> None:
    env, secrets = {"K": "${KEY}"}, ["KEY"]
    tells = "serve(lambda id: answer(id, text('key ' + os.environ['K']) | {'isError': True}))\n"
    outcome = failure(await asked(processes, over_pipes(tells, env=env, secrets=secrets)))
    assert outcome.message == "key ***"


# -- over HTTP -------------------------------------------------------------------------------------


def over_http(url: str, **options: Any) -> Program:
    document = ToolDocument(name="t", kind="mcp", url=url, parameters=X, **options)
    return Program(*seal("tool", document, {}), dict.fromkeys(document.secret_names, "hush-hush"))


def _drips(connection: Any, _: bytes) -> None:
    connection.sendall(head())
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def _floods(kind: str, start: bytes) -> Callable[[Any, bytes], None]:
    def flood(connection: Any, _: bytes) -> None:
        connection.sendall(head(kind=kind) + start)
        while True:
            connection.sendall(b"x" * 100_000)

    return flood


SAYINGS = {
    "drips": _drips,
    "silent": lambda *_: time.sleep(30),
    "floods": _floods("application/json", b'"'),
    "floods-events": _floods("text/event-stream", b"data: "),
    "busy": saying(head("429 Slow down", "text/plain", "Retry-After: 7")),
    "broken": saying(head("503 Away", "text/plain")),
    "forbidden": saying(head("403 No", "text/plain")),
    "packed": saying(head("200 OK", "application/json", "Content-Encoding: gzip") + b"\x1f\x8b"),
    "html": saying(head(kind="text/html") + b"<html>"),
    "no-json": saying(head() + b"{"),
    "nothing": saying(b""),
    "events-end": saying(head(kind="text/event-stream") + b": nothing\n\n"),
}


@pytest.mark.parametrize(
    ("path", "code", "retryable"),
    [
        ("floods", "output_too_large", False),
        ("floods-events", "output_too_large", False),
        ("busy", "http_status", True),
        ("broken", "http_status", True),
        ("forbidden", "mcp_unreachable", True),
        ("packed", "mcp_broken", False),
        ("html", "mcp_unreachable", True),
        ("no-json", "mcp_unreachable", True),
        ("nothing", "mcp_unreachable", True),
        ("events-end", "mcp_unreachable", True),
    ],
)
async def test_what_a_server_over_http_may_say(path: str, code: str, retryable: bool) -> None:
    with raw_server(SAYINGS) as server:
        outcome = failure(await asked_here(over_http(f"{server.url}/{path}")))
    assert (outcome.code, outcome.retryable) == (code, retryable), outcome
    if path == "busy":
        assert outcome.retry_after_s == 7.0


@pytest.mark.parametrize("path", ["drips", "silent"])
async def test_a_server_over_http_that_never_comes_to_the_point_costs_the_deadline(
    processes: Processes, path: str
) -> None:
    with raw_server(SAYINGS) as server:
        process = await processes.take(over_http(f"{server.url}/{path}"))
        began = time.monotonic()
        outcome = await processes.call(process, Order("{}", "key"), 5.0)
    assert failure(outcome).code == "deadline"
    assert time.monotonic() - began < 10


async def test_a_redirect_takes_no_secret_to_another_host() -> None:
    with raw_server({"x": saying(head())}) as other:
        to = f"Location: {other.url}/x"
        with raw_server({"mcp": saying(head("307 There", "text/plain", to))}) as server:
            program = over_http(f"{server.url}/mcp", headers={"X-Key": "${KEY}"}, secrets=["KEY"])
            outcome = failure(await asked_here(program))
        assert outcome.code == "mcp_unreachable"
        assert b"hush-hush" in server.heads[0]
        assert other.heads == []


def test_a_server_that_never_answers_does_not_hang_a_registration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dsec.tool.mcp_server.LIST_WAIT_S_MAX", 1.0)
    silent: RawServer
    with raw_server(SAYINGS) as silent:
        for given in (
            {"url": f"{silent.url}/silent"},
            {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"]},
        ):
            document = ToolDocument.model_validate({"name": "t", "kind": "mcp"} | given)
            began = time.monotonic()
            with pytest.raises(SpecFileError, match="cannot be asked"):
                described(document, tmp_path, "tool.yaml")
            assert time.monotonic() - began < 15
