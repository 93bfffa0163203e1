"""Late inputs: deferred rewards and tools that do not block, told at places that the log has, or,
with `lag_steps`, at places that nothing but the step decides."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.session.shuffled import run_shuffled

from dsec.replay.verify import verify
from dsec.reward.score import EnvScorer
from dsec.session.anchor_restore import restored
from dsec.session.documents import AgentDocument, EnvDocument, ToolUse
from dsec.session.io import (
    AWAITS_LATE,
    AWAITS_RESULTS,
    Called,
    SessionConfig,
    Stepped,
    deferred_input,
    missing_input,
    result_input,
    reward_input,
)
from dsec.session.late import TOOL_RESULTS_OUTSTANDING_MAX
from dsec.session.local import local_program, run_in_memory
from dsec.session.machine import SessionMachine
from dsec.session.memory_log import Failed, MemoryLog
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun, undelivered
from dsec_contracts import keys
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS

STEPS = 11
SEARCH = ToolUse(ref="a" * 64, name="search", deadline_s=30.0, blocking=False)
ADD = ToolUse(ref="b" * 64, name="add", deadline_s=30.0, blocking=False)
PRICE = ToolUse(ref="c" * 64, name="price", deadline_s=30.0, blocking=False)
ASK = ToolUse(ref="d" * 64, name="ask", deadline_s=30.0)
AGENT = """
class Agent:
    def __init__(self, config):
        self.space, self.heard, self.n = config["action_space"], [], 0
    def step(self, observation):
        self.n += 1
        step = {"action": self.space.sample() ^ (hash(tuple(self.heard)) & 1)}
        calls = [{"name": name, "arguments": {"x": self.n}} for name in CALLED]
        if calls and self.n % 3 == 1:
            return {"tool_calls": calls}
        if calls and self.n % 3 == 2:
            step["tool_calls"] = calls[::-1]
        return step
    def on_reward(self, reward, done, info):
        told = info["dsec"]
        final = None if told["final_observation"] is None else len(told["final_observation"])
        self.heard.append((told["step"], told["episode"], done, told["terminated"], final))
    def on_reward_missing(self, step, code):
        self.heard.append((step, sum(map(ord, code))))
    def on_tool_result(self, tool_id, result):
        self.heard.append(tuple(map(ord, tool_id + repr(result))))
    def get_state(self): return [list(map(list, self.heard)), self.n]
    def set_state(self, state):
        self.heard, self.n = [tuple(one) for one in state[0]], state[1]
"""
THREE = [SEARCH, ADD, PRICE]
MIXED = [SEARCH, ASK, PRICE]


def program_of(tools: list[ToolUse], agent: str = AGENT, **options: Any):
    agent = agent.replace("CALLED", repr([tool.name for tool in tools]))
    return local_program(
        AgentDocument(entry="agent.py:Agent", tools=tools, **options),
        {"agent.py": agent.encode()},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )


def config(lag: int | None = None, lag_max: int = 5, steps: int = STEPS) -> SessionConfig:
    return SessionConfig(11, steps, lag_steps=lag, reward_lag_steps_max=lag_max)


def call_tool(call) -> Any:
    """Depends on the call alone."""
    if call.name == "search":
        return Failed("tool_raised", f"nothing for {call.arguments}", retryable=True)
    return {"sum": len(call.arguments), "id": call.id}


class Scorer(EnvScorer):
    """Has no reward for some steps."""

    def score(self, step_fact: bytes, observation: bytes, next_observation: bytes):
        if decode(step_fact)[0] % 6 == 4:
            raise NoReward
        return super().score(step_fact, observation, next_observation)


class NoReward(Exception):
    code, fatal = "service_unavailable", False


PROGRAMS = {"rewards": program_of([]), "three": program_of(THREE), "mixed": program_of(MIXED)}


def shuffled(program, config_, session_id, seed, **options):
    chance = random.Random(seed)
    options.setdefault("deferred_share", chance.choice((0.0, 0.5, 1.0)))
    return run_shuffled(
        program, config_, session_id, Scorer(), chance, call_tool=call_tool, **options
    )


def ended(rows):
    return Recorded.from_rows(rows).ended


def told(rows) -> list[tuple[int, str, int]]:
    """What was told before which step: (the step, or that after the last one; kind, ordinal)."""
    found = []
    for row in rows:
        if row.kind == "session.stepped":
            named = decode(row.fact)[STEP_FIELDS.index("inputs")]
            found += [(row.step, kind, ordinal) for kind, ordinal, _ in named]
    recorded = Recorded.from_rows(rows)
    named = decode(recorded.ended.inputs)
    return found + [(len(recorded.steps), kind, ordinal) for kind, ordinal, _ in named]


# -- with lag_steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lag", "runs"),
    [("three", 3, 50), ("three", 40, 4), ("rewards", 2, 10), ("mixed", 1, 6), ("mixed", 3, 10)],
)
def test_with_lag_steps_all_runs_have_one_chain(name, lag, runs, session_id):
    program, asked = PROGRAMS[name], config(lag)
    whole = run_in_memory(program, asked, session_id, Scorer(), call_tool=call_tool)
    assert (ended(whole).status, ended(whole).code) == ("completed", "max_steps")
    chains = set()
    for seed in range(runs):
        rows = shuffled(program, asked, session_id, seed)
        chains.add(ended(rows).chain)
        if seed < 2:
            verdict = verify(rows, program, asked, EnvScorer())
            assert (verdict.ok, verdict.complete) == (True, True), verdict.first_divergence
    assert chains == {ended(whole).chain}


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_step_caused_is_told_exactly_lag_steps_later(name, lag, session_id):
    rows = shuffled(PROGRAMS[name], config(lag), session_id, 3)
    late = {tool.name for tool in (SEARCH, ADD, PRICE)}
    names = {
        keys.call_ordinal(turn.step, turn.turn, n): call.name
        for turn in Recorded.from_rows(rows).turns.values()
        for n, call in enumerate(turn.calls)
    }
    places = told(rows)
    seen = 0
    for before, kind, ordinal in places:
        if kind == "tool_result" and names[ordinal] not in late:
            continue
        step = ordinal >> 16 if kind == "tool_result" else ordinal
        assert before == min(step + lag, STEPS), (kind, ordinal)
        seen += 1
    assert not any(kind == "reward_deferred" for _, kind, _ in places)
    assert seen == STEPS + sum(name in late for name in names.values())
    for before in range(lag, STEPS):
        assert next(kind for at, kind, _ in places if at == before).startswith("reward")
    of_one = [place for place in places if place[0] == lag + 1 and place[1] != "reward"]
    assert [place[2] for place in of_one] == sorted(place[2] for place in of_one)


def test_one_step_of_lag_is_what_a_session_without_lag_does(session_id):
    program = PROGRAMS["rewards"]
    chains = [
        ended(run_in_memory(program, config(lag), session_id, Scorer())).chain for lag in (None, 1)
    ]
    assert chains[0] == chains[1]


# -- without ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "runs"), [("three", 50), ("rewards", 10), ("mixed", 10)])
def test_without_lag_steps_every_run_verifies(name, runs, session_id):
    program, chains = PROGRAMS[name], set()
    for seed in range(runs):
        rows = shuffled(program, config(), session_id, seed)
        verdict = verify(rows, program, config(), EnvScorer())
        assert (verdict.ok, verdict.complete) == (True, True), verdict.first_divergence
        chains.add(ended(rows).chain)
        rewards = [ordinal for _, kind, ordinal in told(rows) if kind.startswith("reward")]
        assert set(rewards) == set(range(STEPS))  # every one is accounted for
    assert len(chains) > 1


def test_what_is_late_is_told_in_the_order_of_positions_and_not_too_late(session_id):
    late = 0
    for seed in range(6):
        rows = shuffled(PROGRAMS["three"], config(lag_max=3), session_id, seed, deferred_share=0.7)
        at = {row.key: n for n, row in enumerate(rows)}
        places = []
        for before, kind, ordinal in told(rows):
            step, index = ordinal >> 16, ordinal & 255
            turn = ordinal >> 8 & 255
            key = keys.tool_result(step, turn, index)
            if kind != "tool_result":
                key = f"{kind}:{ordinal}" + (".1" if kind == "reward" else "")
                assert before <= ordinal + 3
                late += before > ordinal + 1
            places.append(at[key])
        assert places == sorted(places)
    assert late > 6


# -- a restart, anywhere ---------------------------------------------------------------------------


def go_live(machine: SessionMachine, recorded: Recorded, chance: random.Random):
    """Deliver what the log has left, and go on with a world that answers as it did before."""
    for one in undelivered(recorded, machine):
        machine.deliver(one)
    scorer = Scorer()

    def reward(stepped: Stepped):
        cause = stepped.chain[:16]
        try:
            score = scorer.score(stepped.fact, b"", b"")
        except NoReward as none:
            return missing_input(stepped.step, none.code, False, "", cause)
        parts = {name: list(pair) for name, pair in score.components.items()}
        fact = encode([stepped.step, 1, score.value, parts, cause])
        return reward_input(stepped.step, score.value, fact, cause)

    log = MemoryLog(None)
    while machine.ended is None:
        if machine.awaiting is None and chance.random() < 0.6:
            machine.step()
            continue
        late = machine.late
        steps = [] if late is None else late.unanswered_steps()
        turns = [] if late is None else late.unanswered_turns()
        if machine.awaiting is not None and machine.awaiting >= 0:
            steps.append(machine.last)
        if machine.called is not None:
            turns.append(machine.called)
        asked = [(reward, (stepped,)) for stepped in steps]
        asked += [(answer, (log, turn, n)) for turn in turns for n in range(len(turn.calls))]
        if asked:
            what, about = chance.choice(asked)
            machine.deliver(what(*about))
        elif machine.awaiting is None:
            machine.step()
        else:
            raise AssertionError(f"it waits for {machine.awaiting}, and asks for nothing")
    return machine.ended


def answer(log: MemoryLog, turn: Called, index: int):
    result = call_tool(turn.calls[index])
    ordinal = keys.call_ordinal(turn.step, turn.turn, index)
    if isinstance(result, Failed):
        content = encode([result.message, result.retryable])
        return result_input(ordinal, result.code, content, turn.turn_hash)
    return result_input(ordinal, "", encode(result), turn.turn_hash)


@pytest.mark.parametrize("lag", [None, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_restart_at_any_row_goes_on(name, lag, session_id):
    program, asked = PROGRAMS[name], config(lag, steps=7)
    rows = shuffled(program, asked, session_id, 5, deferred_share=0.6)
    for cut in range(len(rows) + 1):
        recorded = Recorded.from_rows(rows[:cut])
        machine = SessionMachine(program, asked)
        assert rerun(machine, recorded) is None, cut
        if recorded.reset is None:
            machine.start()
        assert machine.steps == len(recorded.steps)
        end = go_live(machine, recorded, random.Random(cut))
        assert (end.status, end.code) == ("completed", "max_steps")
        if lag is not None or cut == len(rows):
            assert end == ended(rows), cut


@pytest.mark.parametrize("lag", [None, 3])
def test_a_restart_from_any_anchor_has_what_is_outstanding(lag, session_id):
    program = program_of(MIXED, anchors={"every_steps": 1})
    asked, blobs = config(lag), {}
    rows = shuffled(program, asked, session_id, 8, deferred_share=0.8, blobs=blobs)
    whole, outstanding = Recorded.from_rows(rows), 0
    assert sorted(whole.anchors) == list(range(1, STEPS + 1))
    for position, anchor in whole.anchors.items():
        before = whole.steps[position - 1]
        pristine = SessionMachine(program, asked)
        blob = blobs[anchor.blob]
        for cut in (next(n for n, row in enumerate(rows) if row.key == f"anchor:{position}"), None):
            recorded = Recorded.from_rows(rows[:cut])
            machine = restored(pristine, blob, anchor.anchor_id, before.fact, before.chain)
            outstanding += machine.late is not None
            assert rerun(machine, recorded) is None
            end = go_live(machine, recorded, random.Random(position))
            assert end.status == "completed"
            if lag is not None or cut is None:
                assert end == whole.ended
    assert outstanding > STEPS


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_repetition_and_strangers_change_nothing(data, session_id):
    """With lag_steps: answers in any order, each as often as it likes, and foreign ones between."""
    program, asked = PROGRAMS["mixed"], config(2)
    whole = ended(run_in_memory(program, asked, session_id, Scorer(), call_tool=call_tool))
    rows = shuffled(program, asked, session_id, data.draw(st.integers(0, 99)))
    known = Recorded.from_rows(rows).inputs
    foreign = b"\0" * 16
    known += [
        result_input(one.ordinal, "", encode("other"), foreign)
        if one.kind == "tool_result"
        else reward_input(one.ordinal, 9.0, one.fact[:-16] + foreign, foreign)
        for one in known
    ]
    known.append(deferred_input(3, "slow", b"\0" * 16))
    machine = SessionMachine(program, asked)
    machine.start()
    while machine.ended is None:
        for one in data.draw(st.lists(st.sampled_from(known), max_size=12)):
            machine.deliver(one)
        if machine.ended is None and machine.awaiting is None:
            machine.step()
            continue
        for one in known:
            machine.deliver(one)
    assert machine.ended == whole


# -- details ---------------------------------------------------------------------------------------


def live(tools=(), agent: str = AGENT, **of_config: Any) -> SessionMachine:
    machine = SessionMachine(program_of(list(tools), agent), config(**of_config))
    machine.start()
    return machine


def deferred(stepped: Stepped):
    return deferred_input(stepped.step, "slow", stepped.chain[:16])


def rewarded(stepped: Stepped, value: float = 1.0):
    cause = stepped.chain[:16]
    fact = encode([stepped.step, 1, value, {"env": [value, 1.0]}, cause])
    return reward_input(stepped.step, value, fact, cause)


def test_a_session_waits_for_a_deferred_reward_that_would_be_too_old():
    machine, steps = live(lag_max=3), []
    for _ in range(3):
        assert machine.awaiting is None
        steps.append(machine.step())
        machine.deliver(deferred(steps[-1]))
    assert machine.awaiting == AWAITS_LATE
    machine.deliver(rewarded(steps[2]))
    assert machine.awaiting == AWAITS_LATE
    machine.deliver(rewarded(steps[0])._replace(cause=b"\0" * 16))
    assert machine.awaiting == AWAITS_LATE
    machine.deliver(rewarded(steps[0]))
    assert machine.awaiting is None
    assert [heard[0] for heard in machine._agent.heard] == [2, 0]
    machine.deliver(rewarded(steps[0], 9.0))
    assert len(machine._agent.heard) == 2
    assert machine.step().cause == b"reward:0.1"


def test_the_session_ends_when_everything_late_was_told():
    machine = live([SEARCH, ADD], steps=2)
    turns, steps = [], []
    while machine.awaiting != AWAITS_LATE:
        output = machine.step()
        if isinstance(output, Stepped):
            steps.append(output)
            machine.deliver(deferred(output))
            output = output.called
        if output is not None:
            turns.append(output)
    assert machine.ended is None
    for turn in turns:
        for index in range(len(turn.calls)):
            assert machine.deliver(answer(None, turn, index)) is None
    assert machine.deliver(rewarded(steps[1])) is None
    end = machine.deliver(rewarded(steps[0]))
    assert (end.status, end.code) == ("completed", "max_steps")
    named = [(kind, ordinal) for kind, ordinal, _ in decode(end.inputs)]
    assert named[-2:] == [("reward", 1), ("reward", 0)]


def test_a_late_reward_is_told_with_what_its_own_step_returned():
    env_agent = """
class Agent:
    def __init__(self, config): self.heard = []
    def step(self, observation): return {"action": 0}
    def on_reward(self, reward, done, info):
        self.heard.append((done, info["n"], info["dsec"]))
"""
    env = b"""
import gymnasium, numpy as np
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.int64)
    info, seen = {}, np.zeros(1, np.int64)
    def reset(self, *, seed=None, options=None):
        self.n = 0
        self.seen[0] = 0
        return self.seen, {}
    def step(self, action):
        self.n += 1
        self.info["n"], self.seen[0] = self.n, self.n
        return self.seen, 1.0, self.n == 2, False, self.info
"""
    program = local_program(
        AgentDocument(entry="agent.py:Agent"),
        {"agent.py": env_agent.encode()},
        EnvDocument(entry="env.py:Env"),
        {"env.py": env},
    )
    for lag in (None, 4):
        machine, steps = SessionMachine(program, config(lag, steps=4)), []
        machine.start()
        for _ in range(4):
            steps.append(machine.step())
            machine.deliver(deferred(steps[-1]))
        for stepped in steps:
            machine.deliver(rewarded(stepped))
        heard = machine._agent.heard
        assert [(done, n) for done, n, _ in heard] == [(False, 1), (True, 2)] * 2
        assert [about["step"] for _, _, about in heard] == [0, 1, 2, 3]
        assert [about["episode"] for _, _, about in heard] == [0, 0, 1, 1]
        finals = [about["final_observation"] for _, _, about in heard]
        assert [None if final is None else int(final[0]) for final in finals] == [None, 2, None, 2]


def test_a_turn_of_calls_that_do_not_block_waits_for_nothing():
    machine = live([SEARCH, ADD])
    turn = machine.step()
    assert isinstance(turn, Called)
    assert (machine.awaiting, machine.called) == (None, None)
    stepped = machine.step()
    assert isinstance(stepped, Stepped)
    assert stepped.cause == b"tool_call:0.0"
    assert machine.awaiting == 0
    late, early = answer(None, turn, 0), answer(None, turn, 1)
    machine.deliver(early)
    assert len(machine._agent.heard) == 1  # at once, as it came
    machine.deliver(rewarded(stepped))
    machine.deliver(late)
    assert machine.awaiting is None
    fact = dict(zip(STEP_FIELDS, decode(machine.step().fact), strict=True))
    assert [named[0] for named in fact["inputs"]] == ["tool_result", "reward", "tool_result"]


def test_of_a_mixed_turn_the_calls_that_block_are_waited_for():
    machine = live(MIXED)
    turn = machine.step()
    assert machine.awaiting == AWAITS_RESULTS
    machine.deliver(answer(None, turn, 0))
    assert machine.awaiting == AWAITS_RESULTS
    machine.deliver(answer(None, turn, 1))
    assert (machine.awaiting, machine.called) == (None, None)
    assert list(machine.late.results) == [2]


GREEDY = AGENT.replace("for name in CALLED]", "for name in CALLED * 32]")


@pytest.mark.parametrize("lag", [None, 30])
def test_at_the_bound_of_outstanding_results_the_session_waits(lag, session_id):
    machine, turns = live([SEARCH, ADD], GREEDY, lag=lag), []
    while machine.awaiting != AWAITS_LATE:
        output = machine.step()
        if isinstance(output, Stepped):
            machine.deliver(rewarded(output))
            output = output.called
        turns += [] if output is None else [output]
    assert TOOL_RESULTS_OUTSTANDING_MAX - 64 < len(turns) * 64 <= TOOL_RESULTS_OUTSTANDING_MAX
    for index in range(64):
        assert machine.awaiting == AWAITS_LATE
        machine.deliver(answer(None, turns[0], index))
    assert machine.awaiting is None
    program = program_of([SEARCH, ADD], GREEDY)
    chains = set()
    for seed in range(4):
        rows = shuffled(program, config(lag), session_id, seed)
        assert verify(rows, program, config(lag), EnvScorer()).ok
        chains.add(ended(rows).chain)
    assert len(chains) == (4 if lag is None else 1)


def test_an_agent_that_cannot_hear_results_is_told_so():
    program = program_of([ADD, ASK], AGENT.replace("on_tool_result", "on_results"))
    end = SessionMachine(program, config()).start()
    assert end.code == "agent_invalid"
    assert "no on_tool_result" in end.message
    assert "declares add with blocking: false" in end.message


@pytest.mark.parametrize("hook", ["on_reward(self", "on_tool_result(self"])
@pytest.mark.parametrize("lag", [None, 3])
def test_an_agent_that_raises_at_something_late_fails_its_session(hook, lag, session_id):
    broken = AGENT.replace(f"{hook}, ", f"{hook}, *_): assert 0, 'heard'\n    def n_{hook}, ")
    program = program_of(THREE, broken)
    for seed in range(8):
        rows = shuffled(program, config(lag), session_id, seed)
        assert ended(rows).code == "agent_raised"
        verdict = verify(rows, program, config(lag), EnvScorer())
        assert verdict.ok, verdict.first_divergence


def test_an_anchor_is_taken_when_rewards_begin_to_be_late(session_id):
    blobs = {}
    rows = shuffled(
        PROGRAMS["rewards"], config(lag_max=4), session_id, 2, deferred_share=1.0, blobs=blobs
    )
    anchors = Recorded.from_rows(rows).anchors
    assert sorted(anchors) == [2, 6, 10]
    assert {anchor.fact[4] for anchor in anchors.values()} == {("delayed_reward",)}
    assert verify(rows, PROGRAMS["rewards"], config(lag_max=4), EnvScorer()).ok
    stateless = program_of([], AGENT.replace("get_state", "gets_state"))
    rows = shuffled(stateless, config(), session_id, 2, deferred_share=1.0, blobs={})
    assert not Recorded.from_rows(rows).anchors


def test_a_log_that_tells_something_late_elsewhere_is_found(session_id):
    rows = shuffled(PROGRAMS["three"], config(2), session_id, 3)
    divergence = rerun(SessionMachine(PROGRAMS["three"], config(3)), Recorded.from_rows(rows))
    assert divergence is not None
    assert divergence.field == "inputs"
