"""Rewards of whole episodes: a session hears one at the end of each, and waits for no other."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.session.shuffled import run_shuffled

from dsec.replay.verify import verify
from dsec.reward.score import RewardError, Scorer, load_scorer, reward_fact
from dsec.session.anchor_restore import restored
from dsec.session.documents import AgentDocument, EnvDocument, RewardDocument, ToolUse, seal
from dsec.session.io import SessionConfig, Stepped, reward_input
from dsec.session.local import local_program, run_in_memory
from dsec.session.log_row import observation_behind
from dsec.session.machine import SessionMachine
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun
from dsec.session.whole_episode import EpisodeStep, pack_episode, unpack_episode
from dsec_contracts.canonical import CanonicalError, decode, encode
from dsec_contracts.reward import CAUSE_BYTES
from dsec_contracts.step import STEP_FIELDS

LENGTH, STEPS = 4, 11
"""Two whole episodes, and one that max_steps cuts after its third step."""
CLOSING = [3, 7, 10]
ENV = f"""
import gymnasium, numpy as np
class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self): self.buffer, self.resets = np.zeros(2), 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.buffer[:] = 0, self.resets
        return self.buffer, {{}}
    def step(self, action):
        self.buffer[0] += 1 + int(action)
        self.buffer[1] += 1
        return self.buffer, float(action), self.buffer[1] - self.resets >= {LENGTH}, False, {{}}
"""
AGENT = """
class Agent:
    def __init__(self, config):
        self.space, self.heard, self.n = config["action_space"], [], 0
    def step(self, observation):
        self.n += 1
        step = {"action": self.space.sample() ^ (len(self.heard) & 1)}
        if CALLED and self.n % 3 == 1:
            step["tool_calls"] = [{"name": name, "arguments": {"x": self.n}} for name in CALLED]
        return step
    def on_reward(self, reward, done, info):
        self.heard.append((info["dsec"]["step"], info["dsec"]["episode"], reward, done))
    def on_tool_result(self, tool_id, result): self.heard.append((tool_id, len(str(result))))
    def get_state(self): return [self.heard, self.n]
    def set_state(self, state): self.heard, self.n = [tuple(x) for x in state[0]], state[1]
"""
REWARD = b"""
import dsec

@dsec.reward(weights={"sum": 1.0, "steps": 100.0, "last": 0.5}, per="episode")
def whole(episode, services):
    assert all(one.next_observation[0] > one.observation[0] for one in episode)
    assert [one.step for one in episode] == list(range(episode[0].step, episode[-1].step + 1))
    assert len({one.episode for one in episode}) == 1
    return {
        "sum": sum(one.env_reward for one in episode),
        "steps": len(episode),
        "last": episode[-1].next_observation[1],
    }
"""
LATE = ToolUse(ref="a" * 64, name="late", deadline_s=30.0, blocking=False)
SOON = ToolUse(ref="b" * 64, name="soon", deadline_s=30.0)
TOOLS = {"none": [], "blocking": [SOON], "late": [LATE], "mixed": [LATE, SOON]}


def program_of(tools: list[ToolUse], **options: Any):
    agent = AGENT.replace("CALLED", repr([tool.name for tool in tools]))
    return local_program(
        AgentDocument(entry="agent.py:Agent", tools=tools, **options),
        {"agent.py": agent.encode()},
        EnvDocument(entry="env.py:Env"),
        {"env.py": ENV.encode()},
    )


def config(lag: int | None = None) -> SessionConfig:
    return SessionConfig(5, STEPS, lag_steps=lag, reward_lag_steps_max=6, reward_per_episode=True)


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    document = RewardDocument(entry="reward.py:whole", per="episode")
    return load_scorer(*seal("reward", document, {"reward.py": REWARD}))


def call_tool(call) -> Any:
    return {"of": call.arguments}


def rewarded(rows) -> dict[int, float]:
    return {row.step: row.value for row in rows if row.kind == "reward.scored"}


def test_only_the_last_step_of_an_episode_waits_for_a_reward(scorer):
    machine = SessionMachine(program_of([]), config())
    machine.start()
    told = machine._agent.heard
    for step in range(STEPS):
        taken = machine.step()
        assert isinstance(taken, Stepped)
        if step not in CLOSING:
            assert (machine.awaiting, taken.closes_from) == (None, None)
            continue
        assert (machine.awaiting, taken.closes_from) == (step, {3: 0, 7: 4, 10: 8}[step])
        cause = taken.chain[:16]
        fact = encode([step, 1, 2.5, {"sum": [2.5, 1.0]}, cause])
        machine.deliver(reward_input(step, 2.5, fact, cause))
    assert told == [(3, 0, 2.5, True), (7, 1, 2.5, True), (10, 2, 2.5, False)]
    assert (machine.ended.status, machine.ended.code) == ("completed", "max_steps")


@pytest.mark.parametrize("tools", TOOLS)
def test_an_episode_is_scored_from_all_its_steps_and_verifies(tools, scorer, session_id):
    program = program_of(TOOLS[tools])
    rows = run_in_memory(program, config(), session_id, scorer, call_tool=call_tool)
    env_rewards = [row.value for row in rows if row.kind == "session.stepped"]
    assert rewarded(rows) == {
        3: sum(env_rewards[:4]) + 400 + 0.5 * 5,
        7: sum(env_rewards[4:8]) + 400 + 0.5 * 6,
        10: sum(env_rewards[8:]) + 300 + 0.5 * 6,
    }
    verdict = verify(rows, program, config(), scorer)
    assert (verdict.ok, verdict.reward_ok, verdict.complete) == (True, True, True)
    assert verdict.rewards_compared == 3
    causes = [row.cause for row in rows if row.kind == "session.stepped"]
    if tools == "none":
        assert causes[1].endswith("step:0")


@pytest.mark.parametrize("lag", [None, 2])
@pytest.mark.parametrize("tools", TOOLS)
def test_however_late_the_world_is_it_verifies(tools, lag, scorer, session_id):
    program = program_of(TOOLS[tools])
    chains = set()
    for seed in range(12):
        rows = run_shuffled(
            program, config(lag), session_id, scorer, random.Random(seed), call_tool=call_tool
        )
        recorded = Recorded.from_rows(rows)
        assert (recorded.ended.status, sorted(rewarded(rows))) == ("completed", CLOSING)
        verdict = verify(rows, program, config(lag), scorer)
        assert (verdict.ok, verdict.complete) == (True, True), verdict.first_divergence
        chains.add(recorded.ended.chain)
    if lag is not None:
        assert len(chains) == 1


@pytest.mark.parametrize(("tools", "lag"), [("none", None), ("blocking", None), ("mixed", 2)])
def test_a_restart_at_any_row_or_anchor_comes_to_the_same_end(tools, lag, scorer, session_id):
    program, asked, blobs = program_of(TOOLS[tools], anchors={"every_steps": 1}), config(lag), {}
    rows = run_in_memory(program, asked, session_id, scorer, call_tool=call_tool, blobs=blobs)
    whole = Recorded.from_rows(rows)

    def go_on(machine: SessionMachine) -> None:
        while machine.ended is None:
            if machine.awaiting is None:
                machine.step()
            for one in whole.inputs:
                machine.deliver(one)
        assert machine.ended == whole.ended

    for cut in range(len(rows)):
        machine = SessionMachine(program, asked)
        recorded = Recorded.from_rows(rows[:cut])
        assert rerun(machine, recorded) is None, cut
        if recorded.reset is None:
            machine.start()
        go_on(machine)
    for position, anchor in whole.anchors.items():
        before = whole.steps[position - 1]
        blob = blobs[anchor.blob]
        pristine = SessionMachine(program, asked)
        go_on(restored(pristine, blob, anchor.anchor_id, before.fact, before.chain))
    assert len(whole.anchors) == STEPS


def test_a_changed_step_anywhere_in_the_episode_is_another_reward(scorer, session_id):
    program = program_of([])
    rows = run_in_memory(program, config(), session_id, scorer)
    n, row = next((n, row) for n, row in enumerate(rows) if row.key == "step:5")
    fact = decode(bytes(row.fact))
    fact[STEP_FIELDS.index("env_reward")] += 0.25
    changed = [*rows[:n], row._replace(fact=encode(fact)), *rows[n + 1 :]]
    verdict = verify(changed, program, config(), scorer)
    assert verdict.reward_ok is False


def test_a_reward_in_the_midst_of_an_episode_is_found(scorer, session_id):
    program = program_of([])
    rows = run_in_memory(program, config(), session_id, scorer)
    n, row = next((n, row) for n, row in enumerate(rows) if row.key == "reward:7.1")
    steps = {one.step: one for one in rows if one.kind == "session.stepped"}
    # As if the episode had been over after its third step: right, but for that it was not.
    short = pack_episode(
        EpisodeStep(steps[n].fact, observation_behind(steps[n - 1]), steps[n].observation)
        for n in (4, 5, 6)
    )
    score = scorer.score(short, b"", b"")
    fact = reward_fact(6, 1, score.value, score.components, steps[6].chain[:CAUSE_BYTES])
    moved = row._replace(step=6, key="reward:6.1", fact=fact, value=score.value)
    verdict = verify([*rows[: n + 1], moved, *rows[n + 1 :]], program, config(), scorer)
    assert (verdict.ok, verdict.first_divergence.step) == (False, 6)


def test_the_pack_of_an_episode(scorer):
    steps = [EpisodeStep(b"a", b"", b"x"), EpisodeStep(b"b", b"x", b"y")]
    assert unpack_episode(pack_episode(steps)) == steps
    for wrong in ([], [["a", b"", b""]], [[b"a", b""]], {"a": 1}, [3]):
        with pytest.raises(CanonicalError):
            unpack_episode(encode(wrong))
    with pytest.raises(RewardError) as refused:
        scorer.score(encode([]), b"", b"")
    assert refused.value.code == "step_malformed"
