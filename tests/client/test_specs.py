"""Spec files: what is read from them, and what is said when they are wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from dsec.client.check import check_curriculum, check_env, check_spec
from dsec.client.client import Client
from dsec.client.local_imports import local_imports
from dsec.client.reward_file import read_reward
from dsec.client.sealing import SealedSpec
from dsec.client.specs import read_session, read_spec
from dsec.client.yaml_file import SpecFileError
from dsec.session.documents import unseal

AGENT = "class A:\n    def __init__(self, c): ...\n    def step(self, o): return {'action': 0}\n"
REWARD = (
    "import dsec\n@dsec.reward(weights={'a': 0.5, 'b': 0.25})\n"
    "def score(t, services): return {'a': 1.0, 'b': 0.0}\n"
)
ENV = """
import itertools, gymnasium
class {name}(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(1 << 30)
    action_space = gymnasium.spaces.Discrete(2)
    {shared}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return 0, {{}}
    def step(self, action):
        self.n += 1
        return {result}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working set of files."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "agent_spec.yaml").write_text("entry: agent.py:A\nparams: {lr: 1e-3}\n")
    (tmp_path / "env_spec.yaml").write_text("entry: gymnasium:CartPole-v1\n")
    (tmp_path / "session.yaml").write_text(
        "agent: agent_spec.yaml\nenv: env_spec.yaml\nreward: reward.py:score\nmax_steps: 5\n"
    )
    return tmp_path


def refusal(folder: Path, name: str, text: str, kind: str = "agent") -> str:
    """What is said about a file with this text."""
    (folder / name).write_text(text)
    with pytest.raises(SpecFileError) as caught:
        read_session(folder / name) if kind == "session" else read_spec(kind, folder / name)
    return str(caught.value)


def test_a_session_reads_its_specs_relative_to_its_file(folder: Path) -> None:
    plan = read_session(folder / "session.yaml")
    assert isinstance(plan.agent, SealedSpec)
    assert isinstance(plan.reward, SealedSpec)
    document, files = unseal(plan.agent.content, "agent")
    assert document.params == {"lr": 0.001}  # plain YAML 1.1 would read a text
    assert sorted(files) == ["agent.py", "reward.py"]
    assert plan.reward.document.weights == {"a": 0.5, "b": 0.25}


def test_a_hash_pins_the_code(folder: Path) -> None:
    before = read_session(folder / "session.yaml").hashes()
    assert read_session(folder / "session.yaml").hashes() == before
    (folder / "agent.py").write_text(AGENT + "# another\n")
    after = read_session(folder / "session.yaml").hashes()
    assert after[0] != before[0]
    assert after[1] == before[1], "an environment without code of its own ships none"


def test_a_reward_ships_what_it_imports_and_nothing_else(folder: Path) -> None:
    for place, text in {
        "reward.py": "import dsec, math, shaping\nfrom parts import near\n"
        "@dsec.reward()\ndef score(t, services):\n    import late.inner as l\n    return 1.0\n",
        "shaping.py": "import scale\n",
        "scale.py": "import shaping\n",  # a circle
        "parts/__init__.py": "from .base import *\n",
        "parts/near.py": "from . import far\nfrom .. import agent\n",
        "parts/far.py": "",
        "parts/base/__init__.py": "__all__ = ['one']\n",
        "parts/base/one.py": "",
        "parts/unused.py": "",
        "late/inner.py": "",
        "math/readme.txt": "",  # a folder, and no package
        "unused.py": "import reward\n",
    }.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    assert local_imports(folder, "reward.py") == [
        "late/inner.py",
        "parts/__init__.py",
        "parts/base/__init__.py",
        "parts/base/one.py",
        "parts/far.py",
        "parts/near.py",
        "reward.py",
        "scale.py",
        "shaping.py",
    ]
    (folder / "parts/near.py").write_text("from . import far\n")
    before = read_reward("reward.py:score", folder)
    assert sorted(before.files) == local_imports(folder, "reward.py")
    for place, changes in (("agent.py", False), ("unused.py", False), ("scale.py", True)):
        (folder / place).write_text((folder / place).read_text() + "# edited\n")
        after = read_reward("reward.py:score", folder)
        assert (after.spec_hash != before.spec_hash) is changes, place
    assert after.document.entry == "reward.py:score"


def test_one_file_may_hold_all_documents(folder: Path) -> None:
    (folder / "all.yaml").write_text(
        "entry: agent.py:A\nparams: {lr: 1e-3}\n---\nentry: gymnasium:CartPole-v1\n---\n"
        "reward: reward.py:score\nmax_steps: 5\n"
    )
    assert read_session(folder / "all.yaml").hashes() == (
        read_session(folder / "session.yaml").hashes()
    )


def test_a_registered_spec_is_named_by_its_hash(folder: Path) -> None:
    (folder / "s.yaml").write_text(f"agent: {'a' * 64}\nenv: env_spec.yaml\nmax_steps: 5\n")
    assert read_session(folder / "s.yaml").hashes()[0] == "a" * 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("entry: agent.py:A\nparms: {}\n", "parms: is no known key; known keys are entry"),
        ("params: {}\n", "entry: is missing: add it"),
        ("entry: agent.py:A\nentry: agent.py:B\n", "line 2: the key entry is there twice"),
        ("entry: agent.py:A\ntools: [{ref: x}]\n", "x does not exist: name the tool's YAML file"),
        (
            "entry: agent.py:A\ndeterministic_mode: false\ntools: [{ref: x}]\n",
            "tools with deterministic_mode: false is reserved",
        ),
        ("entry: agent.py:A\nanchors: {every_steps: -3}\n", "anchors.every_steps"),
        ("entry: agent.py:A\nresource_profile: {cpu: .inf}\n", "resource_profile.cpu"),
        ("entry: agent.py:A\nresource_profile: {cpu: .nan}\n", "resource_profile.cpu"),
        ("entry: agent.py:A\nresource_profile: {cpu: -1}\n", "resource_profile.cpu"),
        ("entry: agent.py:A\nresource_profile: {cpu: 1.0e+300}\n", "resource_profile.cpu"),
        ("entry: other.py:A\n", "entry: other.py does not exist"),
        ("entry: agent.py\n", "must be FILE.py:NAME or MODULE:NAME"),
        ("entry: agent.py:A\ncode: ['../*.py']\n", "must be a relative pattern"),
        ("entry: agent.py:A\ncode: [other.py]\n", "agent.py is not among the files of code"),
        ("entry: [\n", "line 2"),
        ("- a\n", "a document must be a mapping"),
        ("", "is empty"),
    ],
)
def test_agent_files_that_are_wrong(folder: Path, text: str, said: str) -> None:
    message = refusal(folder, "a.yaml", text)
    assert said in message
    assert str(folder / "a.yaml") in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agent: no.yaml\nenv: env_spec.yaml\nmax_steps: 5\n", "no.yaml does not exist"),
        ("agent: agent_spec.yaml\nenv: env_spec.yaml\n", "max_steps: is missing"),
        ("agent: agent_spec.yaml\nenv: env_spec.yaml\nmax_steps: 0\n", "max_steps:"),
        (
            "agent: agent_spec.yaml\nenv: env_spec.yaml\nmax_steps: 5\ndeadline_s: .inf\n",
            "deadline_s:",
        ),
        (
            "agent: agent_spec.yaml\nenv: env_spec.yaml\nmax_steps: 5\nreward: reward.py\n",
            "must be `env`, FILE.py:FUNCTION",
        ),
        (
            "agent: agent_spec.yaml\nenv: env_spec.yaml\nmax_steps: 5\nreward: agent.py:A\n",
            "is no reward function: decorate it",
        ),
        (
            "agents: {p: a.yaml}\nagent: agent_spec.yaml\nenv: env_spec.yaml\nmax_steps: 5\n",
            "agents: is reserved",
        ),
    ],
)
def test_session_files_that_are_wrong(folder: Path, text: str, said: str) -> None:
    assert said in refusal(folder, "s.yaml", text, "session")


def test_a_spec_in_place_of_a_session_is_told_apart(folder: Path) -> None:
    for name, kind in (("agent_spec", "an agent"), ("env_spec", "an env")):
        with pytest.raises(SpecFileError) as caught:
            read_session(folder / f"{name}.yaml")
        assert f"this looks like {kind} spec; `dsec run` takes a session file" in str(caught.value)
    said = refusal(folder, "s.yaml", "entry: some.py:Thing\n", "session")
    assert "this looks like an agent or environment spec" in said


def test_a_link_out_of_the_directory_is_not_followed(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "agent.py").symlink_to(folder / "agent.py")
    said = refusal(inner, "a.yaml", "entry: agent.py:A\n")
    assert "agent.py is a link out of" in said


def test_leftovers_of_editors_are_not_shipped(folder: Path) -> None:
    before = read_spec("agent", folder / "agent_spec.yaml").spec_hash
    (folder / "agent copy.py").write_text("leftover")
    (folder / ".#agent.py").symlink_to("nowhere")
    assert read_spec("agent", folder / "agent_spec.yaml").spec_hash == before


def test_code_that_does_not_load_is_told_by_its_line(folder: Path) -> None:
    (folder / "reward.py").write_text("import dsec\n\nx = 1 / 0\n")
    with pytest.raises(SpecFileError, match=r"reward.py, line 3: ZeroDivisionError"):
        read_reward("reward.py:score", folder)
    (folder / "agent.py").write_text("class A: pass\n")
    with pytest.raises(SpecFileError, match="it has no step"):
        check_spec(read_spec("agent", folder / "agent_spec.yaml"))
    (folder / "agent.py").write_text("import nosuchmodule\n")
    with pytest.raises(SpecFileError, match="'nosuchmodule': install it here and where"):
        check_spec(read_spec("agent", folder / "agent_spec.yaml"))


@pytest.mark.parametrize("made", ["", "    def __init__(self): pass\n"])
def test_an_agent_that_does_not_take_its_configuration_is_told_so(folder: Path, made: str) -> None:
    step = "    def step(self, obs): return {'action': 0}\n"
    (folder / "agent.py").write_text(f"class A:\n{made}{step}")
    with pytest.raises(SpecFileError, match=r"add `def __init__\(self, session_config\)`"):
        check_spec(read_spec("agent", folder / "agent_spec.yaml"))
    (folder / "agent.py").write_text(f"class A:\n    def __init__(self, *a, **k): pass\n{step}")
    check_spec(read_spec("agent", folder / "agent_spec.yaml"))


def env_spec(folder: Path, name: str, shared: str, result: str) -> SealedSpec:
    """An environment whose step returns `result`."""
    (folder / "env.py").write_text(ENV.format(name=name, shared=shared, result=result))
    (folder / "e.yaml").write_text(f"entry: env.py:{name}\ncode: [env.py]\n")
    return read_spec("env", folder / "e.yaml")


@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1", "Blackjack-v1"])
def test_known_environments_pass_the_check(name: str) -> None:
    assert check_env(read_spec("env", {"entry": f"gymnasium:{name}"})) >= 32


def test_the_check_names_what_differs_after_many_steps(folder: Path) -> None:
    late = "next(self.count) if self.n > 20 else 0, 0.0, False, False, {}"
    spec = env_spec(folder, "Late", "count = itertools.count()", late)
    with pytest.raises(SpecFileError, match=r"at step 20 in state_hash, observation_hash|step 20"):
        check_env(spec)


def test_the_check_runs_what_says_that_it_differs(folder: Path) -> None:
    env_spec(folder, "Late", "count = itertools.count()", "next(self.count), 0.0, False, False, {}")
    said = {"entry": "env.py:Late", "deterministic_mode": False}
    (folder / "env_spec.yaml").write_text(yaml.safe_dump(said))
    assert check_env(read_spec("env", folder / "env_spec.yaml")) >= 32
    (folder / "env.py").write_text("class Late:\n    pass\n")
    with pytest.raises(SpecFileError, match="has no reset"):
        check_env(read_spec("env", folder / "env_spec.yaml"))


def test_the_check_lets_chance_of_ours_be(folder: Path) -> None:
    drawn = "__import__('random').randrange(1 << 30), 0.0, self.n == 3, False, {}"
    assert check_env(env_spec(folder, "Drawn", "", drawn)) >= 32


def test_the_check_tells_what_an_environment_raises(folder: Path) -> None:
    spec = env_spec(folder, "Raises", "", "1 / 0")
    with pytest.raises(SpecFileError, match="ZeroDivisionError"):
        check_env(spec)
    with pytest.raises(SpecFileError, match="NoSuch-v0"):
        check_env(read_spec("env", {"entry": "gymnasium:NoSuch-v0"}))


TOOL = """
name: search
description: Finds things.
entry: tool.py:search
code: [tool.py]
parameters: {type: object, properties: {q: {type: string}}, required: [q]}
deadline_s: 7
"""


def with_tool(folder: Path, text: str = TOOL) -> None:
    (folder / "tool.py").write_text("def search(q):\n    return q\n")
    (folder / "search.yaml").write_text(text)


@pytest.mark.parametrize("ref", ["search", "search.yaml"])
def test_an_agent_is_sealed_with_its_tools(folder: Path, ref: str) -> None:
    with_tool(folder)
    (folder / "a.yaml").write_text(f"entry: agent.py:A\ntools: [{{ref: {ref}}}]\n")
    agent = read_spec("agent", folder / "a.yaml")
    (tool,) = agent.tools
    (use,) = agent.document.tools
    assert (use.ref, use.name, use.deadline_s) == (tool.spec_hash, "search", 7)
    assert use.parameters == tool.document.parameters
    assert set(tool.files) == {"tool.py"}
    # The document of a registered spec can be used again.
    (folder / "b.yaml").write_text(yaml.safe_dump(agent.document.model_dump(mode="json")))
    again = read_spec("agent", folder / "b.yaml")
    assert (again.spec_hash, again.tools) == (agent.spec_hash, ())
    with_tool(folder, TOOL.replace("things", "other things"))
    assert read_spec("agent", folder / "a.yaml").spec_hash != agent.spec_hash


@pytest.mark.parametrize(
    ("body", "heard"),
    [
        ("def step(self, o): pass", False),
        ("def step(self, o): pass\n    def on_tool_result(self, i, r): pass", True),
        # It may come from elsewhere: the session's start finds it, if not.
        ("def step(self, o): self.on_tool_result = print", True),
        ("def step(self, o): setattr(self, o, print)", True),
        ("def step(self, o): pass\n    def __getattr__(self, name): return print", True),
    ],
)
def test_a_tool_that_does_not_block_wants_an_agent_that_hears(
    folder: Path, body: str, heard: bool
) -> None:
    with_tool(folder)
    (folder / "agent.py").write_text(f"class A:\n    def __init__(self, c): pass\n    {body}\n")
    text = "entry: agent.py:A\ncode: [agent.py]\ntools: [{ref: search, blocking: false}]\n"
    (folder / "agent_spec.yaml").write_text(text)
    spec = read_spec("agent", folder / "agent_spec.yaml")
    if heard:
        check_spec(spec)
        return
    with pytest.raises(
        SpecFileError, match=r"tools\.0\.blocking: search .* add `def on_tool_result"
    ):
        check_spec(spec)


def test_a_curriculum_wants_an_environment_that_takes_options(folder: Path) -> None:
    check_curriculum(read_spec("env", {"entry": "gymnasium:CartPole-v1"}), 1)
    check_curriculum(env_spec(folder, "Takes", "", "0, 0.0, False, False, {}"), 1)
    source = ENV.format(name="Bare", shared="", result="0, 0.0, False, False, {}")
    (folder / "env.py").write_text(source.replace(", options=None", ""))
    (folder / "e.yaml").write_text("entry: env.py:Bare\ncode: [env.py]\n")
    told = "curriculum_level: environment .* takes no options.*write reset"
    with pytest.raises(SpecFileError, match=told):
        check_curriculum(read_spec("env", folder / "e.yaml"), 1)
    session = {"agent": "a" * 64, "env": str(folder / "e.yaml"), "max_steps": 1}
    nowhere = Client(nats_url="nats://127.0.0.1:1", database_url="postgresql://127.0.0.1:1/x")
    with pytest.raises(SpecFileError, match=told):  # before anything is asked of a server
        asyncio.run(nowhere.request(session | {"curriculum_level": 1}))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("def search(q): pass", None),
        ("def search(q, k=1, *, idempotency_key): pass", None),
        ("def search(**given): pass", None),
        ("async def search(q): pass", None),
        ("def search(q, on_done): pass", "it needs on_done"),
        ("def search(): pass", "it does not take q"),
        ("def search(q, /): pass", "q by its place"),
    ],
)
def test_a_tool_takes_what_its_parameters_say(
    folder: Path, function: str, said: str | None
) -> None:
    with_tool(folder)
    (folder / "tool.py").write_text(function)
    spec = read_spec("tool", folder / "search.yaml")
    if said is None:
        check_spec(spec)
        return
    with pytest.raises(SpecFileError, match=f"tool search: parameters: .*{said}"):
        check_spec(spec)


def test_two_tools_of_one_name_are_refused(folder: Path) -> None:
    with_tool(folder)
    said = refusal(folder, "a.yaml", "entry: agent.py:A\ntools: [{ref: search}, {ref: search}]\n")
    assert "two of them are called search" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("kind: openai", "entry is for kind: python; leave it out"),
        ("kind: grpc", "must be `python`, `http`, `openapi`, `mcp` or `openai`"),
        ("kind: http", "entry is for kind: python"),
        ("url: http://x", "url is for kind: http or openapi or mcp or openai; leave it out"),
        ("model: m", "model is for kind: openai; leave it out"),
        ("attempts_max: 2", "only if the tool is `idempotent: true`"),
        ("quota: {calls: 3}", "is no known key"),
        ("output_bytes_max: 16777217", "output_bytes_max"),
        ("secrets: [lower]", "secrets"),
        ("parameters: {type: 7}", "parameters: no JSON Schema"),
        ("retries: 3", "is no known key"),
    ],
)
def test_tool_files_that_are_wrong(folder: Path, change: str, said: str) -> None:
    with_tool(folder)
    lines = [
        line for line in TOOL.splitlines() if line.partition(":")[0] != change.partition(":")[0]
    ]
    assert said in refusal(folder, "t.yaml", "\n".join([*lines, change]), "tool")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("url: ftp://x", "url must begin with http:// or https://"),
        ("url: http://x\nheaders: {A: 'Bearer ${KEY}'}", "headers use ${KEY}: add KEY to secrets"),
    ],
)
def test_http_tools_that_are_wrong(folder: Path, text: str, said: str) -> None:
    assert said in refusal(folder, "t.yaml", f"name: x\nkind: http\n{text}\n", "tool")


def test_an_http_tool_ships_no_code(folder: Path) -> None:
    (folder / "t.yaml").write_text("name: x\nkind: http\nurl: http://127.0.0.1:1/x\n")
    assert read_spec("tool", folder / "t.yaml").files == {}


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ('{team: "\\ud800"}', "labels.team: holds half of a character"),
        ('{"\\ud800": x}', ".[key]: holds half of a character"),
        ("{team: " + "x" * 257 + "}", "labels.team"),
    ],
)
def test_a_label_that_cannot_be_sent_names_file_and_field(
    folder: Path, labels: str, told: str
) -> None:
    path = folder / "session.yaml"
    path.write_text(
        f"agent: agent_spec.yaml\nenv: env_spec.yaml\nseed: 1\nmax_steps: 5\nlabels: {labels}\n"
    )
    with pytest.raises(SpecFileError) as caught:
        read_session(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)
    str(caught.value).encode()  # can be shown


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("entry: agent.py:A\nparams: {a: !!timestamp x}\n", "a tag (`!!…`) stands at a value"),
        ("entry: agent.py:A\nparams: {a: !!bool x}\n", "a tag (`!!…`) stands at a value"),
        ("entry: agent.py:A\nparams: {a: !!int ''}\n", "a tag (`!!…`) stands at a value"),
        ("entry: agent.py:A\nparams: &p {a: *p}\n", "an alias in it holds itself"),
        ("entry: agent.py:A\ncode: ['**.py']\n", "'**.py' is no pattern"),
        (f"entry: agent.py:A\ncode: ['{'z' * 5000}.py']\n", "is no pattern: File name too long"),
        (f"entry: {'q' * 5000}.py:A\n", "does not exist in"),
        (f"entry: agent.py:A\ntools: [{{ref: {'r' * 5000}}}]\n", "does not exist: name the tool"),
    ],
)
def test_what_libraries_and_file_systems_refuse_is_said(folder: Path, text: str, told: str) -> None:
    assert told in refusal(folder, "bad.yaml", text)


@pytest.mark.parametrize(
    "line", ["import {}", "from {} import x", "from numpy.{} import *", "import json.{}"]
)
def test_a_reward_that_imports_what_no_file_can_be_named(folder: Path, line: str) -> None:
    line = f"try: {line.format('i' * 300)}\nexcept ImportError: pass\n"
    (folder / "odd.py").write_text(f"{line}{(folder / 'reward.py').read_text()}")
    assert local_imports(folder, "odd.py") == ["odd.py"]


def test_session_files_with_names_that_no_file_system_takes(folder: Path) -> None:
    session = (folder / "session.yaml").read_text()
    for named in ("agent_spec.yaml", "reward.py"):
        told = refusal(folder, "bad.yaml", session.replace(named, "n" * 5000 + ".py"), "session")
        assert "does not exist" in told


def test_aliases_that_stand_for_more_than_memory_holds_are_refused_at_once(folder: Path) -> None:
    lines = ["  a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for name, before in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"  {name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    text = "entry: agent.py:A\nparams:\n" + "\n".join(lines) + "\n"
    assert "once its aliases (`*name`) are written out" in refusal(folder, "bomb.yaml", text)
