"""No credential of a stack is seen by user code, or lies anywhere but where it is kept."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import psutil
import psycopg
import pytest
from tests.e2e.conftest import DSEC, RunningStack, running_stack
from tests.otlp import Receiver

from dsec.platform.stack import stack_status
from dsec_contracts import subjects

pytestmark = pytest.mark.stack

MARKERS = {
    "DSEC_SECRET_TOKEN": "marked-secret-of-a-tool",
    "AWS_SECRET_ACCESS_KEY": "marked-key-of-a-store",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=marked-header-of-a-receiver",
    "PGPASSWORD": "marked-password-of-a-database",
    "UPSTREAM_URL": "amqp://me:marked-password-in-a-url@host/",
}
TELLS_ALL = """
import os, sys

def all_there_is():
    seen = [dict(os.environ), sys.argv, open("/proc/self/cmdline").read()]
    print(seen, file=sys.stderr)
    return str(seen)
"""
AGENT = (
    TELLS_ALL
    + """
class Agent:
    def __init__(self, session_config):
        self.turn = 0

    def step(self, observation):
        self.turn += 1
        if self.turn == 1:
            return {"tool_calls": [{"name": name, "arguments": {}} for name in ("good", "bad")]}
        if self.turn == 4:
            raise ValueError(all_there_is())
        return {"action": 0, "extras": {"seen": all_there_is()}}
"""
)
REWARD = (
    "import dsec\n"
    + TELLS_ALL
    + """
@dsec.reward()
def score(t, services):
    all_there_is()
    if t.step == 1:
        raise ValueError(all_there_is())
    return 1.0
"""
)
TOOLS = """
import os

def good():
    return len(os.environ["TOKEN"])

def bad():
    raise ValueError("Authorization: Bearer " + os.environ["TOKEN"])
"""
TOOL = "name: {0}\nentry: tools.py:{0}\ncode: [tools.py]\nidempotent: true\nsecrets: [TOKEN]\n"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver of the stack's traces and metrics."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[RunningStack]:
    """A stack of its own: the markers are in the environment that it is started in."""
    state_dir = tmp_path_factory.mktemp("marked")
    telemetry = {"DSEC_OTLP_ENDPOINT": receiver.url, "OTEL_METRIC_EXPORT_INTERVAL": "500"}
    with running_stack(state_dir, "--json", **MARKERS, **telemetry) as running:
        assert not shown(running.printed, secrets_of(running))
        yield running


def secrets_of(stack: RunningStack) -> list[str]:
    """Everything that must not be seen."""
    marks = [value.partition("=")[2] or value for value in MARKERS.values()]
    marks.append("marked-password-in-a-url")
    passwords = [
        password
        for server in ("nats", "database")
        for password in json.loads(
            (stack.state_dir / f"{server}-passwords.json").read_text()
        ).values()
    ]
    return [*marks, *passwords, (stack.state_dir / "password").read_text().strip()]


def shown(data: Any, secrets: list[str]) -> list[str]:
    """The secrets that are in what was found somewhere."""
    raw = data if isinstance(data, bytes) else str(data).encode("utf-8", "surrogatepass")
    return [secret for secret in secrets if secret.encode() in raw]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent, a reward function and two tools that tell all that they can see."""
    folder = tmp_path_factory.mktemp("project")
    files = {
        "agent.py": AGENT,
        "reward.py": REWARD,
        "tools.py": TOOLS,
        "good.yaml": TOOL.format("good"),
        "bad.yaml": TOOL.format("bad"),
        "a.yaml": "entry: agent.py:Agent\ncode: [agent.py]\ntools: [{ref: good}, {ref: bad}]\n",
        "e.yaml": "entry: gymnasium:CartPole-v1\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    for name, reward in (("agent", "env"), ("reward", "reward.py:score")):
        (folder / f"{name}.session.yaml").write_text(
            f"agent: a.yaml\nenv: e.yaml\nreward: {reward}\nseed: 3\nmax_steps: 9\n"
        )
    return folder


@pytest.fixture(scope="module")
def _ran(marked: RunningStack, project: Path) -> None:
    async def run() -> None:
        async with marked.client() as client, asyncio.timeout(180):
            ends = {}
            for name in ("agent", "reward"):
                file = project / f"{name}.session.yaml"
                group = await client.request(file, labels={"dsec.trace": "steps"})
                [ends[name]] = await client.wait(group)
        codes = {name: row.code for name, row in ends.items()}
        assert codes == {"agent": "agent_raised", "reward": "reward_raised"}

    asyncio.run(run())


@pytest.mark.usefixtures("_ran")
def test_the_log_holds_no_secret(marked: RunningStack) -> None:
    secrets = secrets_of(marked)
    tables = marked.sql(
        "select table_name from information_schema.tables where table_schema = 'public' "
        "and table_type = 'BASE TABLE'"
    )
    rows = 0
    with psycopg.connect(marked.database_url) as connection:
        for table in tables:
            for row in connection.execute(f'select * from "{table["table_name"]}"').fetchall():
                rows += 1
                for value in row:
                    assert not shown(value, secrets), (table, row)
    assert rows > 10
    failed = marked.sql(
        "select concat(fact_json, circumstance) as told from event_log where kind = 'tool.failed'"
    )
    assert failed
    for row in failed:  # the rest of the message is kept
        assert "Authorization: Bearer ***" in row["told"]


@pytest.fixture
async def messages(marked: RunningStack) -> AsyncIterator[list[Any]]:
    connection = await nats.connect(marked.nats_url_of("dsec"))
    stream = connection.jetstream()
    found = []
    state = (await stream.stream_info(subjects.STREAM)).state
    for sequence in range(state.first_seq, state.last_seq + 1):
        try:
            found.append(await stream.get_msg(subjects.STREAM, sequence))
        except nats.js.errors.NotFoundError:
            continue
    yield found
    await connection.close()


@pytest.mark.usefixtures("_ran")
async def test_the_stream_holds_no_secret(marked: RunningStack, messages: list[Any]) -> None:
    secrets = secrets_of(marked)
    assert len(messages) > 10
    for message in messages:
        assert not shown(message.data, secrets), message.subject
        assert not shown(message.headers, secrets), message.subject


@pytest.mark.usefixtures("_ran")
def test_no_trace_and_no_metric_holds_a_secret(marked: RunningStack, receiver: Receiver) -> None:
    wanted = {"session", "placement", "start", "step", "tick", "reward", "commit"}
    tools = {"execute_tool good", "execute_tool bad"}

    def told() -> bool:
        return wanted | tools <= {span.name for span in receiver.spans} and bool(receiver.metrics)

    receiver.until(told)
    assert any(span.failed for span in receiver.spans)
    secrets = secrets_of(marked)
    for body in receiver.bodies:
        assert not shown(body, secrets)


@pytest.mark.usefixtures("_ran")
def test_no_log_file_and_no_command_shows_a_secret(marked: RunningStack) -> None:
    secrets = secrets_of(marked)
    logs = list((marked.state_dir / "logs").iterdir())
    assert len(logs) > 5
    for path in logs:
        assert not shown(path.read_bytes(), secrets), path
    for arguments in (["status"], ["status", "--json"], ["doctor", "--json"]):
        said = subprocess.run(
            [*DSEC, *arguments],
            env={**os.environ, "DSEC_STATE_DIR": str(marked.state_dir)},
            capture_output=True,
            timeout=180,
            check=False,
        )
        assert said.stdout
        assert not shown(said.stdout + said.stderr, secrets), arguments


@pytest.mark.usefixtures("_ran")
def test_no_command_line_shows_a_secret_and_no_user_code_has_one_in_its_environment(
    marked: RunningStack,
) -> None:
    secrets, seen = secrets_of(marked), 0
    supervisor = stack_status(marked.state_dir).supervisor
    assert supervisor is not None
    of_user_code = ("--worker", "dsec.reward.scoring_process", "dsec.tool.calling_process")
    for process in psutil.Process(supervisor.pid).children(recursive=True):
        try:
            line = process.cmdline()
            environment = process.environ() if any(word in line for word in of_user_code) else None
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
        assert not shown(line, secrets), line
        if environment is not None:
            seen += 1
            assert not shown(environment, secrets), line
    assert seen >= 3


def test_what_holds_a_secret_is_its_owners_alone(marked: RunningStack) -> None:
    secrets = secrets_of(marked)
    found = set()
    for folder, _, names in os.walk(marked.state_dir):  # passes over folders that are gone
        for path in (Path(folder, name) for name in names):
            if path.is_symlink() or not path.is_file():
                continue
            try:
                data, mode = path.read_bytes(), path.stat().st_mode
            except FileNotFoundError:  # a server's, which it needed no more
                continue
            if not shown(data, secrets):
                continue
            found.add(path.name)
            assert mode & 0o077 == 0, path
            assert path.name in (
                "nats-passwords.json",
                "database-passwords.json",
                "password",
                "stack.json",
                "nats-server.conf",
            )
    assert found, "it looked where they are"
