"""Calls in processes of their own: whatever a tool does, its call has an outcome in time."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.tool.conftest import program_of, spec_of

from dsec.platform.clock import utc_now
from dsec.platform.http_client import retry_after_s
from dsec.platform.user_limits import UserLimits
from dsec.session.documents import ToolDocument, seal
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome, read_reply, reply
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode, encode

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(1 << 30, 64, 1 << 20, 8), 2)
    yield made
    await made.close()


async def outcome_of(
    processes: Processes, program: Program, arguments: str = "{}", deadline_s: float = 20.0
) -> Outcome:
    process = await processes.take(program)
    return await processes.call(process, Order(arguments, "key"), deadline_s)


def called(body: str, arguments: Any = None, **options: Any) -> Outcome:
    """The outcome in this process: for what needs no other."""
    tool = load(*spec_of(body, **options), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return tool.call(Order(text, "the-key")) if isinstance(tool, Tool) else tool


def value(outcome: Outcome) -> Any:
    assert isinstance(outcome, bytes), outcome
    return decode(outcome)


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        # Blocks in C with the lock of the interpreter held.
        "import ctypes; ctypes.PyDLL(None).sleep(60)",
        "import signal, time\n    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n"
        "    time.sleep(60)",
        "import os\n    if os.fork() == 0:\n        import time; time.sleep(60)\n    os.wait()",
    ],
)
async def test_a_deadline_holds_whatever_the_tool_does(processes: Processes, body: str) -> None:
    program = program_of(f"def tool():\n    {body}\n")
    process = await processes.take(program)
    began = time.monotonic()
    outcome = await processes.call(process, Order("{}", "key"), 0.5)
    assert isinstance(outcome, Failure)
    assert outcome.code == "deadline"
    assert time.monotonic() - began < 10
    assert not process.alive


async def test_a_deadline_holds_against_a_coroutine_that_swallows_its_cancellation(
    processes: Processes,
) -> None:
    body = """
    import asyncio
    async def tool():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    """
    outcome = await outcome_of(processes, program_of(body), deadline_s=0.5)
    assert isinstance(outcome, Failure)
    assert outcome.code == "deadline"


async def test_a_deadline_covers_the_import_and_the_schema(processes: Processes) -> None:
    slow = program_of("import time; time.sleep(60)\ndef tool(): pass")
    pattern = {"type": "object", "properties": {"s": {"pattern": "^(a|a)*$"}}}
    stuck = program_of("def tool(s): pass", parameters=pattern)
    argument = json.dumps({"s": "a" * 60 + "b"})
    for program, arguments in ((slow, "{}"), (stuck, argument)):
        outcome = await outcome_of(processes, program, arguments, 1.0)
        assert isinstance(outcome, Failure)
        assert outcome.code == "deadline"


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("kept = []\n    while True: kept.append(open('/dev/null'))", "tool_raised", "open files"),
        (
            "import tempfile\n    with tempfile.TemporaryFile() as f:\n"
            "        while True: f.write(bytes(65536))",
            "tool_raised",
            "too large",
        ),
        (
            "kept = []\n    while True: kept.append(bytearray(1 << 22))",
            "tool_raised",
            "MemoryError",
        ),
        ("import os\n    while True: os.fork()", "tool_crashed", "ended the process"),
        (
            "import subprocess\n    while True: subprocess.Popen(['sleep', '61.5'])",
            "tool_crashed",
            "ended the process",
        ),
    ],
)
async def test_a_tool_that_goes_beyond_a_bound_fails_alone(
    processes: Processes, body: str, code: str, told: str
) -> None:
    neighbour = program_of("def tool():\n    return 1\n")
    greedy = program_of(f"def tool():\n    {body}\n")
    outcome, beside = await asyncio.gather(
        outcome_of(processes, greedy), outcome_of(processes, neighbour)
    )
    assert isinstance(outcome, Failure)
    assert outcome.code == code
    assert told in outcome.message
    assert value(beside) == 1
    assert value(await outcome_of(processes, neighbour)) == 1


@pytest.mark.parametrize("body", ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 11)"])
async def test_a_tool_that_ends_its_process(processes: Processes, body: str) -> None:
    outcome = await outcome_of(processes, program_of(f"def tool():\n    {body}\n"))
    assert isinstance(outcome, Failure)
    assert outcome.code == "tool_crashed"


async def test_a_tool_that_takes_all_memory(processes: Processes) -> None:
    outcome = await outcome_of(processes, program_of("def tool(): return bytes(2 << 30)"))
    assert isinstance(outcome, Failure)
    assert "MemoryError" in outcome.message


async def test_a_process_is_used_again_for_its_own_tool_alone(processes: Processes) -> None:
    pid = program_of("import os\ndef tool(): print('noise'); input_ = 1; return os.getpid()")
    other = program_of("import os\ndef tool(): return os.getpid() + 0")
    first = value(await outcome_of(processes, pid))
    assert value(await outcome_of(processes, pid)) == first
    assert value(await outcome_of(processes, other)) != first
    third = program_of("def tool(): return 3")
    assert value(await outcome_of(processes, third)) == 3  # the bound on idle ones is 2
    assert value(await outcome_of(processes, pid)) != first


async def test_two_calls_of_one_tool_run_side_by_side(processes: Processes, tmp_path: Path) -> None:
    body = f"""
        import os, time
        def tool(me, other):
            open({str(tmp_path)!r} + me, "w").close()
            while not os.path.exists({str(tmp_path)!r} + other):
                time.sleep(0.01)
            return "met"
    """
    program = program_of(body)
    places = (("/a", "/b"), ("/b", "/a"))
    calls = (json.dumps({"me": me, "other": other}) for me, other in places)
    met = await asyncio.gather(*(outcome_of(processes, program, call, 60.0) for call in calls))
    assert [value(outcome) for outcome in met] == ["met", "met"]


async def test_a_cancelled_call_ends_its_process(processes: Processes) -> None:
    process = await processes.take(program_of("import time\ndef tool(): time.sleep(60)"))
    task = asyncio.create_task(processes.call(process, Order("{}", "key"), 60))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not process.alive


async def test_secrets_are_the_tools_own_and_nothing_else_is_seen(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_SECRET_OTHER", "hidden")
    monkeypatch.setenv("DSEC_DATABASE_URL", "hidden")
    body = "import os\ndef tool(): return {**os.environ, 'KEY': os.environ['KEY'][::-1]}"
    seen = value(await outcome_of(processes, program_of(body, {"KEY": "abc"}, secrets=["KEY"])))
    assert seen["KEY"] == "cba"  # what it says as it is would be hidden
    assert "hidden" not in seen.values()
    assert not [name for name in seen if name.startswith("DSEC_")]
    assert os.environ["DSEC_SECRET_OTHER"] == "hidden"


# -- one call --------------------------------------------------------------------------------------


def test_arguments_come_by_name_and_the_key_where_it_is_wanted() -> None:
    assert value(called("def tool(x, y=2): return [x, y]", {"x": 1})) == [1, 2]
    assert value(called("async def tool(*, idempotency_key): return idempotency_key")) == "the-key"
    assert value(called("def tool(**given): return given", {"x": "ü"})) == {"x": "ü"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"x": 1', "no JSON"),
        ("[1]", "no JSON object"),
        ("{}", "'x' is a required property"),
        ('{"x": "1"}', "arguments.x: '1' is not of type 'integer'"),
        ('{"x": 10}', "greater than the maximum"),
        ('{"x": 1, "y": 2}', "Additional properties"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_agent(arguments: str, told: str) -> None:
    outcome = called("def tool(x): return x", arguments, parameters=SCHEMA)
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("arguments_invalid", False)
    assert told in outcome.message
    assert value(called("def tool(x): return x", '{"x": 9}', parameters=SCHEMA)) == 9


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("def tool(): raise ValueError('why', chr(0xd800))", "tool_raised", "ValueError"),
        ("def tool(): raise SystemExit(3)", "tool_raised", "SystemExit"),
        ("def tool(a): return 1", "tool_raised", "missing 1 required"),
        # What is ours, raised by the tool: its class says nothing.
        (
            "from dsec.tool.frames import Failure, Refused\n"
            "def tool(): raise Refused(Failure('outcome_unknown', 'mine'))",
            "tool_raised",
            "mine",
        ),
        (
            "class Odd(Exception):\n    @property\n    def retryable(self): exit(3)\n"
            "    __notes__ = retryable\ndef tool(): raise Odd",
            "tool_raised",
            "Odd, which raises when it is told",
        ),
        ("def tool(): return object()", "result_invalid", "cannot be recorded"),
        ("def tool(): return 'x' * (1 << 20)", "output_too_large", "output_bytes_max is 1048576"),
        ("import nothing_here\ndef tool(): pass", "tool_load_failed", "nothing_here"),
        ("def other(): pass", "tool_load_failed", "has no 'tool'"),
        ("tool = 3", "tool_raised", "not callable"),
    ],
)
def test_tools_that_have_no_result(body: str, code: str, told: str) -> None:
    outcome = called(body)
    assert isinstance(outcome, Failure)
    assert outcome.code == code
    assert told in outcome.message
    assert read_reply(reply(outcome)) == (outcome, False)


def test_an_error_may_say_that_it_passes() -> None:
    outcome = called("class E(Exception): retryable = True\ndef tool(): raise E")
    assert isinstance(outcome, Failure)
    assert outcome.retryable


def test_what_is_no_reply_is_refused() -> None:
    for body in (b"", b"\xff", encode(7), encode([]), encode([True, "a", "b"])):
        with pytest.raises(ValueError):  # noqa: PT011 - whichever it is
            read_reply(body)


# -- HTTP ------------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """Answers with what it was asked, or as the path says."""

    seen: ClassVar[list[dict[str, str]]] = []

    def _do(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size).decode()
        self.seen.append(dict(self.headers))
        kind, status, answer = "application/json", 200, json.dumps([self.command, self.path, body])
        if self.path.startswith("/text"):
            kind, answer = "text/plain; charset=latin-1", "größe"
        elif self.path.startswith("/status"):
            status = int(self.path[8:11])
        elif self.path.startswith("/slow"):
            time.sleep(20)
        elif self.path.startswith("/broken"):
            self.connection.close()
            return
        elif self.path.startswith("/no-json"):
            answer = "{"
        elif self.path.startswith("/no-utf8"):
            answer = '"\xff"'
        elif self.path.startswith("/not-finite"):
            answer = "[NaN, -Infinity, -0.0, 1e16]"
        elif self.path.startswith("/half"):
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
            return
        elif self.path.startswith("/large"):
            answer = "x" * 2_000_000
        data = answer.encode("latin-1")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status == 302:
            self.send_header("Location", "/text")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _do

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()


def asked(url: str, arguments: Any = None, values: Any = None, **options: Any) -> Outcome:
    """The outcome of an HTTP tool."""
    document = ToolDocument(name="tool", kind="http", url=url, **options)
    tool = load(*seal("tool", document, {}), values or {})
    assert isinstance(tool, Tool)
    return tool.call(Order(json.dumps(arguments or {}), "the-key"))


def test_arguments_are_a_body_or_a_query(server: str) -> None:
    given = {"q": "a b&c", "n": 3}
    method, path, body = value(asked(f"{server}/x", given))
    assert (method, path, json.loads(body)) == ("POST", "/x", given)
    method, path, body = value(asked(f"{server}/x?fixed=1", given, method="GET"))
    assert (method, path, body) == ("GET", "/x?fixed=1&q=a+b%26c&n=3", "")


def test_a_request_carries_its_key_and_its_secrets(server: str) -> None:
    headers = {"Authorization": "Bearer ${TOKEN}"}
    asked(f"{server}/x", values={"TOKEN": "s3"}, headers=headers, secrets=["TOKEN"])
    assert Server.seen[-1]["Idempotency-Key"] == "the-key"
    assert Server.seen[-1]["Authorization"] == "Bearer s3"


@pytest.mark.parametrize("secret", ["s3cr3t\n", "s3cr3t\u20ac", "s3cr3t\r\nX-More: 1"])
def test_a_secret_that_no_header_can_hold_is_told_of_and_not_told(server: str, secret: str) -> None:
    headers, before = {"Authorization": "Bearer ${TOKEN}"}, len(Server.seen)
    outcome = asked(f"{server}/x", values={"TOKEN": secret}, headers=headers, secrets=["TOKEN"])
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("secret_unfit", False)
    assert "s3cr3t" not in outcome.message
    assert len(Server.seen) == before


def test_a_retry_after_that_is_no_date_is_none() -> None:
    assert retry_after_s("Mon, 99999999999 Nov 99999999999999 00:00:00 GMT", utc_now()) is None


async def test_no_secret_comes_back_in_what_a_tool_returns(processes: Processes) -> None:
    body = """
        import os
        def tool():
            key = os.environ["KEY"]
            return {"headers": {"X-Key": key, key: [f"Bearer {key}!", key.encode(), 1.5]}}
    """
    program = program_of(body, {"KEY": "hush-hush"}, secrets=["KEY"])
    found = value(await outcome_of(processes, program))
    assert found == {"headers": {"X-Key": "***", "***": ["Bearer ***!", b"***", 1.5]}}


def test_a_schema_is_never_fetched_from_elsewhere(server: str) -> None:
    schema = {"type": "object", "$ref": f"{server}/schema.json"}
    asked_before = len(Server.seen)
    outcome = called("def tool(): return 1", parameters=schema)
    assert isinstance(outcome, Failure)
    assert "Unresolvable" in outcome.message
    assert len(Server.seen) == asked_before


def test_text_is_text(server: str) -> None:
    assert value(asked(f"{server}/text")) == "größe"


@pytest.mark.parametrize(
    ("path", "code", "retryable"),
    [
        ("/status/503", "http_status", True),
        ("/status/404", "http_status", False),
        ("/status/302", "http_status", False),
        ("/broken", "http_broken", False),
        ("/half", "http_broken", False),
        ("/no-json", "result_invalid", False),
        ("/no-utf8", "result_invalid", False),
        ("/large", "output_too_large", False),
    ],
)
def test_answers_that_are_no_result(server: str, path: str, code: str, retryable: bool) -> None:
    outcome = asked(f"{server}{path}")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == (code, retryable)
    if path == "/broken":
        again = asked(f"{server}{path}", idempotent=True)
        assert isinstance(again, Failure)
        assert again.retryable


def test_numbers_are_recorded_as_they_came(server: str) -> None:
    told = asked(f"{server}/not-finite")
    assert told == encode([float("nan"), float("-inf"), -0.0, 1e16])


def test_a_tool_that_uses_no_later_key_keeps_its_name() -> None:
    """Specs are named by their bytes: a new key at its default is not among them."""
    told = ToolDocument(name="tool", entry="tool.py:tool").model_dump()
    assert set(told) == {
        *("kind", "name", "description", "entry", "code", "url", "method", "headers"),
        *("parameters", "idempotent", "deadline_s", "output_bytes_max", "secrets"),
    }
    assert "model" in ToolDocument(name="t", kind="openai", url="http://x", model="m").model_dump()


def test_nobody_there() -> None:
    outcome = asked("http://127.0.0.1:9/")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("http_unreachable", True)


async def test_a_slow_server_meets_the_deadline(processes: Processes, server: str) -> None:
    document = ToolDocument(name="tool", kind="http", url=f"{server}/slow")
    program = Program(*seal("tool", document, {}), {})
    outcome = await outcome_of(processes, program, deadline_s=1.0)
    assert isinstance(outcome, Failure)
    assert outcome.code == "deadline"
