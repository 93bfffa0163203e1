"""Tools of MCP servers that answer with a task: what it ends with is the result, or the reason."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dsec.platform.user_limits import UserLimits
from dsec.session.documents import seal
from dsec.session.tool_document import ToolDocument
from dsec.tool import mcp_tasks
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.making import STOP_S_MAX
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode

SERVER = '''
"""A server that answers with tasks, as its extension says, and notes what it is asked."""
import asyncio, itertools, sys, time
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp.types import CLIENT_CAPABILITIES_META_KEY, RequestParams

NOTES = sys.argv[1]
NAME = "io.modelcontextprotocol/tasks"
SAID = {"createdAt": "2026-03-02T00:00:00Z", "lastUpdatedAt": "2026-03-02T00:00:00Z", "ttlMs": None}

def note(what):
    with open(NOTES, "a") as file:
        file.write(what + "\\n")

class Which(RequestParams):
    task_id: str

class Tasks(Extension):
    identifier = NAME

    def __init__(self):
        self.numbers, self.tasks, self.polls = itertools.count(), {}, {}

    async def intercept_tool_call(self, params, ctx, call_next):
        told = (ctx.meta or {}).get(CLIENT_CAPABILITIES_META_KEY) or {}
        if params.name == "plain" or NAME not in (told.get("extensions") or {}):
            return await call_next(ctx)
        task = f"{params.name}-{next(self.numbers)}"
        if params.name != "lost":
            self.tasks[task] = asyncio.create_task(call_next(ctx))
        note(f"made {params.name} {(ctx.meta or {}).get('dsec/idempotencyKey')}")
        return SAID | {"resultType": "task", "taskId": task, "status": "working",
                       "pollIntervalMs": 100}

    def methods(self):
        versions = frozenset({"2026-07-28"})
        return [MethodBinding("tasks/get", Which, self.get, versions),
                MethodBinding("tasks/cancel", Which, self.cancel, versions)]

    async def get(self, ctx, params):
        name, _, _ = params.task_id.partition("-")
        self.polls[params.task_id] = self.polls.get(params.task_id, 0) + 1
        note(f"get {name}")
        note(f"at {time.monotonic()}")
        if params.task_id not in self.tasks:
            raise MCPError(-32602, "Failed to retrieve task: Task not found")
        told = SAID | {"resultType": "complete", "taskId": params.task_id, "pollIntervalMs": 100}
        if name in ("asks", "odd", "cancelled"):
            status = {"asks": "input_required", "odd": "asleep"}.get(name, name)
            return told | {"status": status, "statusMessage": "as it is"}
        if name == "failed":
            return told | {"status": name, "error": {"code": -32603, "message": "rate limit"}}
        if name == "empty":
            return told | {"status": "completed", "result": {"content": 7}}
        if name == "moody" and self.polls[params.task_id] in (1, 3):
            raise MCPError(-32603, "not now")
        task = self.tasks[params.task_id]
        if not task.done() or self.polls[params.task_id] < 3:  # on a busy machine, too
            return told | {"status": "working"}
        result = task.result().model_dump(mode="json", by_alias=True, exclude_none=True)
        return told | {"status": "completed", "result": result}

    async def cancel(self, ctx, params):
        note(f"cancel {params.task_id.partition('-')[0]}")
        self.tasks.pop(params.task_id).cancel()
        return {"resultType": "complete"}

server = MCPServer("tasks", log_level="ERROR", extensions=[Tasks()])

def plain(x: int) -> int:
    """Adds."""
    return x + 1

async def later(x: int) -> int:
    await asyncio.sleep(0.4)
    return x + 1

async def stuck(x: int) -> int:
    if x == 0:
        return 0
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        note("stopped")
        raise

async def raises(x: int) -> int:
    raise ToolError("no such thing")

for name in ("later", "moody"):
    server.add_tool(later, name=name)
for name in ("stuck", "lost", "asks", "odd", "cancelled", "failed", "empty"):
    server.add_tool(stuck, name=name)
server.add_tool(plain)
server.add_tool(raises)

if len(sys.argv) > 2:
    server.run("streamable-http", port=int(sys.argv[2]))
else:
    server.run()
'''
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@dataclass
class Server:
    """One that runs (`url`), or one that each process starts."""

    notes: Path
    url: str = ""

    def program(self, name: str, **options: Any) -> Program:
        where: dict[str, Any] = {"url": self.url}
        files = {}
        if not self.url:
            where = {"command": sys.executable, "args": ["server.py", str(self.notes)]}
            files = {"server.py": SERVER.encode()}
        document = ToolDocument(name=name, kind="mcp", parameters=X, **where, **options)
        return Program(*seal("tool", document, files), {})

    def told(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mcp")
    path, notes = folder / "server.py", folder / "notes"
    path.write_text(SERVER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, path, notes, str(port)], stderr=log)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield Server(notes, f"http://127.0.0.1:{port}/mcp")
    process.kill()
    process.wait()


@pytest.fixture(params=["pipes", "http"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    if request.param == "pipes":
        return Server(tmp_path / "notes")
    found: Server = request.getfixturevalue("running")
    found.notes.unlink(missing_ok=True)
    return found


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(2 << 30, 256, 1 << 20, 16), 2)
    yield made
    await made.close()


async def asked(
    processes: Processes, program: Program, x: int = 4, deadline_s: float = 60.0
) -> Outcome:
    process = await processes.take(program)
    order = Order(json.dumps({"x": x}), "the-key")
    return await processes.call(process, order, deadline_s, STOP_S_MAX)


async def asked_here(program: Program) -> Outcome:
    """The outcome in this process, for what ends by itself."""
    tool = load(program.spec_hash, program.content, {})
    assert isinstance(tool, Tool)
    return await asyncio.to_thread(tool.call, Order('{"x": 4}', "key"))


def failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure), decode(outcome)
    return outcome


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - another process writes, nothing notifies
            await asyncio.sleep(0.02)


async def test_what_a_task_ends_with_is_the_result(processes: Processes, server: Server) -> None:
    """The same as if it had been answered at once, with nothing of the task in it."""
    results = [await asked(processes, server.program(name)) for name in ("plain", "later")]
    assert results[0] == results[1]
    assert isinstance(results[0], bytes)
    assert decode(results[0])["structured"] == {"result": 5}
    told = server.told()
    assert told[0] == "made later the-key"
    times = [float(line.partition(" ")[2]) for line in told if line.startswith("at ")]
    assert len(times) == told.count("get later") >= 3
    # No more often than the server wants to be asked, every 0.1 s: so are those on the way.
    assert all(later - earlier > 0.05 for earlier, later in pairwise(times))
    assert "cancel later" not in told


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("raises", "tool_raised", "no such thing"),
        ("failed", "tool_raised", "the task failed: rate limit"),
        ("cancelled", "task_cancelled", "the server cancelled the task: as it is"),
        ("asks", "tool_raised", "the task asks for input"),
        ("lost", "tool_raised", "Task not found"),
        ("odd", "mcp_broken", "'asleep'"),
        ("empty", "mcp_broken", "content"),
    ],
)
async def test_a_task_without_a_result_says_why(
    running: Server, name: str, code: str, said: str
) -> None:
    running.notes.unlink(missing_ok=True)
    told = failure(await asked_here(running.program(name)))
    assert (told.code, told.retryable) == (code, False), told
    assert said in told.message
    # What waits for nobody is not left waiting.
    assert ("cancel asks" in running.told()) == (name == "asks")


async def test_a_question_about_a_task_may_fail_and_is_asked_again(
    running: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task goes on at the server; only so many in a row are too many."""
    outcome = await asked_here(running.program("moody"))
    assert isinstance(outcome, bytes), outcome
    monkeypatch.setattr(mcp_tasks, "POLL_FAILURES_MAX", 0)
    assert "not now" in failure(await asked_here(running.program("moody"))).message


async def test_a_deadline_ends_the_task_too(processes: Processes, server: Server) -> None:
    program = server.program("stuck")
    assert isinstance(await asked(processes, program, x=0), bytes)  # all is started now
    server.notes.unlink()
    began = time.monotonic()
    outcome = failure(await asked(processes, program, deadline_s=2.0))
    assert outcome.code == "deadline"
    assert time.monotonic() - began < 30
    assert "get stuck" in server.told()
    await until(lambda: "cancel stuck" in server.told())


async def test_a_call_that_is_given_up_ends_its_task_too(
    processes: Processes, server: Server
) -> None:
    """As it is when its session ends."""
    call = asyncio.create_task(asked(processes, server.program("stuck")))
    await until(lambda: "get stuck" in server.told())
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: "cancel stuck" in server.told())


# -- servers of the protocol before ---------------------------------------------------------------

OLD = """
import json, sys
EXECUTION = {execution}
for line in sys.stdin:
    asked = json.loads(line)
    id, method = asked.get("id"), asked.get("method")
    result = None
    if method == "initialize":
        result = {{"protocolVersion": "2025-11-25", "capabilities": {{"tools": {{}}}},
                   "serverInfo": {{"name": "old", "version": "1"}}}}
    elif method == "tools/list":
        result = {{"tools": [{{"name": "t", "inputSchema": {{"type": "object"}},
                              "execution": EXECUTION}}]}}
    elif method == "tools/call":
        result = {{"task": {{"taskId": "1", "status": "working", "createdAt": "now",
                            "lastUpdatedAt": "now", "ttl": None}}}}
    if result is not None:
        told = {{"jsonrpc": "2.0", "id": id, "result": result}}
    elif id is not None:
        told = {{"jsonrpc": "2.0", "id": id, "error": {{"code": -32601, "message": "no"}}}}
    else:
        continue
    print(json.dumps(told), flush=True)
"""


@pytest.mark.parametrize(
    ("support", "code", "said"),
    [
        ("required", "declaration_misfit", "only through the tasks of MCP 2025-11-25"),
        ("optional", "mcp_broken", "content"),  # and answers with a task that nobody asked for
    ],
)
async def test_tasks_of_the_protocol_before_are_a_reason(
    processes: Processes, support: str, code: str, said: str
) -> None:
    source = OLD.format(execution={"taskSupport": support})
    document = ToolDocument(
        name="t", kind="mcp", command=sys.executable, args=["server.py"], parameters=X
    )
    program = Program(*seal("tool", document, {"server.py": source.encode()}), {})
    told = failure(await asked(processes, program))
    assert told.code == code, told
    assert said in told.message
