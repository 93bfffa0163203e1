"""The `mcp` kind against real MCP servers, over their standard streams and over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.platform.user_limits import UserLimits
from dsec.session.documents import seal
from dsec.session.tool_document import ToolDocument
from dsec.tool.call import load
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.mcp_pipes import CLOSE_WAIT_S, pipes_of
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode

SERVER = '''
import sys
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("stock", log_level="ERROR")

@server.tool()
def add(x: int, y: int = 1) -> int:
    """Adds."""
    return x + y

@server.tool()
def refuses(x: int) -> int:
    raise ToolError("no such thing")

@server.tool()
def large(x: int) -> str:
    return "x" * x

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''
LIGHT = """
import json, os, sys
from pathlib import Path

def about():
    return {"pid": os.getpid(), "here": sorted(p.name for p in Path.cwd().iterdir()),
            "key": os.environ.get("MY_KEY"), "nats": os.environ.get("DSEC_NATS_URL")}

def stuck(x):
    Path("pid").write_text(str(os.getpid()))
    if x:
        os.read(os.pipe()[0], 1)

def gone():
    os._exit(1)

def result(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "light", "version": "1"}}
    if method == "tools/list":
        x = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
        return {"tools": [{"name": n, "inputSchema": x} for n in ("add", "about", "stuck", "gone")]}
    if method == "tools/call":
        given = params["arguments"] if params["name"] == "stuck" else {}
        return {"content": [], "structuredContent": globals()[params["name"]](**given) or {}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        told = result(asked["method"], asked.get("params"))
        answer = {"error": {"code": -32601, "message": "no"}} if told is None else {"result": told}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
"""A server by hand: one that is made with the library imports for as long as ten calls take."""
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LIMITS = UserLimits(2 << 30, 256, 1 << 20, 16)


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(LIMITS, 2)
    yield made
    await made.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(path), str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def over_pipes(name: str, source: str = LIGHT, **options: Any) -> Program:
    options.setdefault("parameters", X)
    values = dict.fromkeys(options.get("secrets", []), "s3cret")
    document = ToolDocument(
        name=name, kind="mcp", command=sys.executable, args=["server.py"], **options
    )
    return Program(*seal("tool", document, {"server.py": source.encode()}), values)


def over_http(name: str, url: str, **options: Any) -> Program:
    document = ToolDocument(name=name, kind="mcp", url=url, parameters=X, **options)
    return Program(*seal("tool", document, {}), {})


async def asked(
    processes: Processes, program: Program, x: int = 4, deadline_s: float = 60.0
) -> Outcome:
    process = await processes.take(program)
    return await processes.call(process, Order(json.dumps({"x": x}), "key"), deadline_s)


def value(outcome: Outcome) -> Any:
    assert isinstance(outcome, bytes), outcome
    return decode(outcome)


def failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure), decode(outcome)
    return outcome


async def test_a_server_over_pipes_is_started_once_and_used_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_NATS_URL", "nats://user:password@127.0.0.1")
    program = over_pipes("about", secrets=["KEY"], env={"MY_KEY": "Bearer ${KEY}"})
    told = [value(await asked(processes, program))["structured"] for _ in range(2)]
    assert told[0] == told[1]  # of one process id
    assert told[0]["here"] == ["server.py"]  # its code came with the spec
    assert told[0]["key"] == "Bearer ***"  # it was given it, and no result says it
    assert told[0]["nats"] is None


async def test_what_a_tool_returns(processes: Processes, url: str) -> None:
    content = [{"type": "text", "text": "5"}]
    for program in (over_pipes("add", SERVER), over_http("add", url)):
        told = value(await asked(processes, program))
        assert told == {"content": content, "structured": {"result": 5}}
    named = over_http("sum", url, tool="add")
    assert value(await asked(processes, named))["content"] == content


async def test_a_tool_that_says_that_it_failed(processes: Processes, url: str) -> None:
    told = failure(await asked(processes, over_http("refuses", url)))
    assert told.code == "tool_raised"
    assert "no such thing" in told.message


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("nothing", X, "has no tool nothing; it has add, about"),
        ("add", {"type": "object", "properties": {"z": {}}}, "it needs x"),
    ],
)
async def test_a_declaration_that_does_not_fit_is_reported(
    processes: Processes, name: str, parameters: Any, said: str
) -> None:
    told = failure(await asked(processes, over_pipes(name, parameters=parameters)))
    assert told.code == "declaration_misfit"
    assert said in told.message


async def test_a_deadline_ends_the_server_too(processes: Processes) -> None:
    """It reads nothing more, so that the end of its input would not end it."""
    program = over_pipes("stuck")
    value(await asked(processes, program, x=0, deadline_s=60.0))  # all is started now
    began = time.monotonic()
    assert failure(await asked(processes, program, deadline_s=2.0)).code == "deadline"
    assert time.monotonic() - began < 20
    folder = Path(f"/tmp/dsec-mcp-{os.getuid()}-{program.spec_hash[:32]}")
    pid = int((folder / "pid").read_text())
    deadline = time.monotonic() + 60
    while _lives(pid):
        assert time.monotonic() < deadline, "the server goes on"
        await asyncio.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_server_that_ends_in_the_midst_is_started_again(processes: Processes) -> None:
    program = over_pipes("gone", idempotent=True)
    for _ in range(2):
        told = failure(await asked(processes, program))
        assert (told.code, told.retryable) == ("mcp_broken", True)


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit(1)",
        "print('hello'); import sys; sys.stdin.read()",
        "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe{\\n'); sys.stdout.flush()",
        "while True: print('x' * 100_000, end='')",
    ],
)
async def test_a_server_that_is_none_is_no_hang(processes: Processes, source: str) -> None:
    """One that says nothing that can be read costs the deadline at most."""
    program = over_pipes("add", source, output_bytes_max=10_000)
    told = failure(await asked(processes, program, deadline_s=6.0))
    assert told.code in ("mcp_unreachable", "mcp_broken", "deadline", "output_too_large")


async def test_nobody_there(processes: Processes) -> None:
    told = failure(await asked(processes, over_http("add", "http://127.0.0.1:1/mcp")))
    assert (told.code, told.retryable) == ("mcp_unreachable", True)


async def test_a_program_that_is_not_there(processes: Processes) -> None:
    document = ToolDocument(name="x", kind="mcp", command="no-such-program", parameters=X)
    told = failure(await asked(processes, Program(*seal("tool", document, {}), {})))
    assert told.code == "mcp_unreachable"
    assert "no-such-program" in told.message


async def test_a_large_result_meets_the_bound(processes: Processes, url: str) -> None:
    program = over_http("large", url, output_bytes_max=50_000)
    assert failure(await asked(processes, program, x=100_000)).code == "output_too_large"


def test_without_the_client_the_failure_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    for name in ("mcp_server", "mcp_pipes"):
        monkeypatch.delitem(sys.modules, f"dsec.tool.{name}", raising=False)
    program = over_http("add", "http://127.0.0.1:1/mcp")
    told = load(program.spec_hash, program.content, {})
    assert isinstance(told, Failure)
    assert told.code == "tool_load_failed"
    assert "pip install 'dsec[mcp]'" in told.message


async def test_who_is_no_longer_heard_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import sys; sys.stdin.read()")
    run = sys.executable, ["server.py"], {}
    with anyio.CancelScope() as scope:
        async with pipes_of(*run, tmp_path, 1000, lambda: None, bytearray()):
            scope.cancel()
            began = time.monotonic()
            await anyio.sleep_forever()
    assert time.monotonic() - began < CLOSE_WAIT_S
