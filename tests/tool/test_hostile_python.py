"""Python tools that mean no good: a reason each, nothing left running, nothing told."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.tool.conftest import Rig, program_of, spec_of

from dsec.platform.said import LINE_BYTES_MAX, PERIOD_BYTES_MAX, PERIOD_S, Said
from dsec.platform.user_limits import UserLimits
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode

WAIT_S_MAX = 60.0
DAEMON = "import os, subprocess\nout = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(1 << 30, 64, 1 << 20, 16), 2)
    yield made
    await made.close()


async def outcome_of(processes: Processes, program: Program, deadline_s: float = 20.0) -> Outcome:
    process = await processes.take(program)
    return await processes.call(process, Order("{}", "key"), deadline_s)


def value(outcome: Outcome) -> Any:
    assert isinstance(outcome, bytes), outcome
    return decode(outcome)


def code(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure), decode(outcome)
    return outcome.code


def running(mark: str) -> list[int]:
    """The processes that have this text among their arguments."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                arguments = (path / "cmdline").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended
                continue
            if mark.encode() in arguments and state != "Z":
                found.append(int(path.name))
    return found


async def gone(mark: str) -> None:
    until_s = time.monotonic() + WAIT_S_MAX
    while running(mark):
        assert time.monotonic() < until_s, "it goes on"
        await asyncio.sleep(0.05)


# -- what is left running --------------------------------------------------------------------------

STARTS = {
    "in_its_group": "subprocess.Popen(['sleep', {mark!r}], **out)",
    "in_a_session_of_its_own": (
        "subprocess.Popen(['sleep', {mark!r}], start_new_session=True, **out)"
    ),
    "as_a_daemon": (
        "subprocess.run(['sh', '-c', 'setsid sleep {mark} > /dev/null 2>&1 &'], check=True)"
    ),
}
ENDS = {
    "return 1": ("value", 20.0),
    "os._exit(3)": ("tool_crashed", 20.0),
    "os.kill(os.getpid(), 9)": ("tool_crashed", 20.0),
    "while True: pass": ("deadline", 1.5),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start", STARTS)
async def test_whatever_a_tool_starts_ends_with_its_call(
    processes: Processes, start: str, end: str
) -> None:
    mark = f"{61 + list(STARTS).index(start)}.{100 + list(ENDS).index(end)}{os.getpid()}"
    started = STARTS[start].format(mark=mark)
    told = f"open({f'/tmp/dsec-started-{mark}'!r}, 'w').close()"
    program = program_of(f"{DAEMON}def tool():\n    {started}\n    {told}\n    {end}\n")
    expected, deadline_s = ENDS[end]
    outcome = await outcome_of(processes, program, deadline_s)
    try:
        assert Path(f"/tmp/dsec-started-{mark}").exists()
    finally:
        Path(f"/tmp/dsec-started-{mark}").unlink(missing_ok=True)
    assert (code(outcome) if isinstance(outcome, Failure) else "value") == expected
    await gone(mark)


@pytest.mark.nats
@pytest.mark.postgres
async def test_whatever_a_tool_starts_ends_with_a_replica_that_is_killed(rig: Rig) -> None:
    mark = f"71.{os.getpid()}"
    started = STARTS["as_a_daemon"].format(mark=mark)
    tool = spec_of(f"import time\n{DAEMON}def tool():\n    {started}\n    time.sleep(60)\n")
    await rig.know(tool)
    replica = rig.start()
    await rig.call(tool[0])
    await rig.until(lambda: running(mark))
    replica.kill()
    await gone(mark)


async def test_a_call_that_forks_and_returns_twice_has_one_result(processes: Processes) -> None:
    body = """
        import os, time
        def tool():
            if pid := os.fork():
                time.sleep(0.5)  # the copy comes back first
            return [pid > 0, os.getpid()]
    """
    program = program_of(body)
    first, second = [value(await outcome_of(processes, program)) for _ in range(2)]
    assert (first[0], second[0]) == (True, True)
    assert first[1] != second[1]  # what was left of the first may be anything


async def test_a_thread_that_lives_on_lives_no_longer_than_its_process(
    processes: Processes,
) -> None:
    body = """
        import os, threading, time
        def tool():
            threading.Thread(target=time.sleep, args=(60,)).start()
            return os.getpid()
    """
    program = program_of(body)
    first = value(await outcome_of(processes, program))
    assert not Path(f"/proc/{first}").exists()
    assert value(await outcome_of(processes, program)) != first
    quiet = program_of(
        "import os, threading\n"
        "def tool():\n"
        "    one = threading.Thread(target=int); one.start(); one.join()\n"
        "    os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)\n"
        "    return os.getpid()\n"
    )
    pids = [value(await outcome_of(processes, quiet)) for _ in range(2)]
    assert pids[0] == pids[1]  # it left nothing


async def test_a_tool_that_ends_its_keeper_is_one_that_crashed(processes: Processes) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        ends = f"import os; os.kill(os.getppid(), {int(number)})"
        body = f"def tool():\n    {ends}\n    while True: pass"
        assert code(await outcome_of(processes, program_of(body))) == "tool_crashed"


async def test_an_error_that_cannot_be_told_spoils_no_later_call(processes: Processes) -> None:
    body = """
        class Odd(Exception):
            __repr__ = __str__ = None
        async def tool(bad):
            if bad:
                raise Odd
            return 1
    """
    program = program_of(body)
    for bad, expected in (("true", "tool_raised"), ("false", 1)):
        process = await processes.take(program)
        outcome = await processes.call(process, Order(f'{{"bad": {bad}}}', "key"), 20.0)
        assert (code(outcome) if isinstance(outcome, Failure) else value(outcome)) == expected


# -- what is printed -------------------------------------------------------------------------------


async def test_a_tool_that_prints_without_end_fills_no_log(
    processes: Processes, capfd: pytest.CaptureFixture[str]
) -> None:
    program = program_of("def tool():\n    while True: print('x' * 100, flush=True)")
    assert code(await outcome_of(processes, program, 3.0)) == "deadline"
    told = capfd.readouterr().err
    assert 1000 < len(told) < 2 * PERIOD_BYTES_MAX
    assert "more was printed" in told


async def test_a_secret_that_a_tool_prints_is_in_no_log(
    processes: Processes, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        import os, sys
        def tool():
            print("key:", os.environ["KEY"], flush=True)
            sys.stderr.write("and " + os.environ["KEY"])
            sys.stderr.flush()
            os.write(1, os.environ["KEY"].encode())
            os._exit(1)
    """
    program = program_of(body, {"KEY": "hush-hush"}, secrets=["KEY"])
    assert code(await outcome_of(processes, program)) == "tool_crashed"
    told = capfd.readouterr().err
    assert "key: ***" in told  # also what it said last
    assert "and ******" in told
    assert "hush" not in told


def heard(secrets: dict[str, str], *parts: bytes) -> bytes:
    told: list[bytes] = []
    said = Said(secrets, told.append, lambda: 0.0)
    for part in (*parts, b""):
        said.hear(part)
    return b"".join(told)


def test_what_is_said_is_told_by_lines_and_no_secret_is_cut_in_two() -> None:
    assert heard({}, b"a\nb", b"c\n", b"d") == b"a\nbc\nd\n"
    secret = {"KEY": "hush-hush", "PEM": "-----BEGIN\nline-one-of-it\n"}
    assert heard(secret, b"hush-", b"hush\n") == b"***\n"
    assert heard(secret, b"line-one-of-it\nmore\n") == b"***\nmore\n"
    for place in range(LINE_BYTES_MAX - 20, LINE_BYTES_MAX + 3):
        told = heard(secret, b"x" * place + b"hush-hush" + b"y" * 50 + b"\n")
        assert b"hu" not in told
        assert told.endswith(b"...\n")
        assert len(told) < LINE_BYTES_MAX + 10


def test_after_a_while_what_is_said_is_told_again() -> None:
    told, now = list[bytes](), [0.0]
    said = Said({}, told.append, lambda: now[0])
    for _ in range(100):
        said.hear(b"x" * 1000 + b"\n")
    assert PERIOD_BYTES_MAX - 2000 < len(b"".join(told)) < PERIOD_BYTES_MAX + 100
    now[0] = PERIOD_S
    said.hear(b"again\n")
    assert told[-1] == b"again\n"
    said.hear(b"again\n" * PERIOD_BYTES_MAX)  # all in one piece
    assert len(b"".join(told)) < 2 * PERIOD_BYTES_MAX + 200


# -- what is raised and returned -------------------------------------------------------------------

RAISES = {
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise SystemExit": "SystemExit",
    "raise type('Odd', (BaseException,), {})('why')": "Odd",
    "import asyncio; raise asyncio.CancelledError": "CancelledError",
    "raise type('Odd', (Exception,), {'__repr__': None, '__str__': None})": "Odd",
    "raise type('Odd', (Exception,), {'__str__': lambda _: 1 / 0})": "Odd",
    "raise ExceptionGroup('many', [ValueError('one')])": "many",
    "raise RecursionError": "RecursionError",
    "raise ValueError('x' * 10_000_000)": "ValueError",
    "return tool()": "RecursionError",
    "raise StopIteration": "StopIteration",
    "import sys; sys.exit(object())": "SystemExit",
}


def called(body: str, arguments: str = "{}") -> Outcome:
    tool = load(*spec_of(body), {})
    assert isinstance(tool, Tool), tool
    return tool.call(Order(arguments, "key"))


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("body", RAISES)
def test_whatever_is_raised_is_a_reason(body: str, kind: str) -> None:
    if kind == "async def":
        body = body.replace("tool()", "await tool()")
    outcome = called(f"{kind} tool():\n    {body}\n")
    assert isinstance(outcome, Failure)
    assert outcome.code == "tool_raised"
    if (kind, body) != ("async def", "raise StopIteration"):  # which becomes a RuntimeError
        assert RAISES.get(body, "RecursionError") in outcome.message
    assert len(outcome.message) < 10_000
    outcome.message.encode()


RETURNS = {
    "made = []; made.append(made); return made": "result_invalid",
    "return (n for n in range(3))": "declaration_misfit",
    "yield 1": "declaration_misfit",
    "import concurrent.futures; return concurrent.futures.Future()": "declaration_misfit",
    "import asyncio; return asyncio.new_event_loop().create_future()": "declaration_misfit",
    "return {'x': object()}": "result_invalid",
    "made = []\n    for _ in range(100_000): made = [made]\n    return made": "result_invalid",
    "return type('Odd', (), {'__repr__': lambda _: 1 / 0})()": "result_invalid",
    "return {1j: 2}": "result_invalid",
    "return tool": "result_invalid",
    "return [tool.__code__]": "result_invalid",
    "return type('Odd', (dict,), {'items': lambda _: 1 / 0})(a=1)": None,
    "return type('Odd', (list,), {'__iter__': lambda _: exit(3)})([1])": None,
    "return type('Odd', (str,), {'encode': lambda *_: 1 / 0})('a')": None,
    "return type('Odd', (int,), {'__index__': lambda _: 'a'})(3)": None,
    "return type('Odd', (), {'__class__': property(lambda _: dict)})()": None,
    "import numpy; return numpy.array([object()])": None,
    "import numpy; return numpy.array(['a', 'b'])": None,
    "import datetime; return datetime.datetime.now()": None,
}


@pytest.mark.parametrize("body", RETURNS)
def test_whatever_is_returned_is_recorded_or_refused(body: str) -> None:
    """Where more than one answer is right, there is one."""
    outcome = called(f"def tool():\n    {body}\n")
    if isinstance(outcome, Failure):
        assert outcome.code in (RETURNS[body] or "result_invalid", "tool_raised")
        assert RETURNS[body] in (None, outcome.code)
    else:
        assert RETURNS[body] is None
        decode(outcome)


def test_a_function_that_wants_a_callback_is_a_declaration_that_does_not_fit() -> None:
    x = {"type": "object", "properties": {"x": {}}}
    tool = load(*spec_of("def tool(x, on_done): pass", parameters=x), {})
    assert isinstance(tool, Failure)
    assert tool.code == "declaration_misfit"
    assert "it needs on_done" in tool.message


async def test_what_a_tool_does_to_its_arguments_is_its_own(processes: Processes) -> None:
    program = program_of("def tool(x): x.append(1); return x")
    process = await processes.take(program)
    for _ in range(2):
        outcome = await processes.call(process, Order('{"x": []}', "key"), 20.0)
        assert value(outcome) == [1]
        process = await processes.take(program)
