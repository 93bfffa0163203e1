"""Tool turns: what an agent may ask for, what it hears and in which order, and that a restart
anywhere, or answers in any order, come to the same end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.replay.diff import RowsSource, diff
from dsec.replay.fold import fold
from dsec.replay.verify import verify
from dsec.reward.score import EnvScorer
from dsec.session.awaited import Asked
from dsec.session.documents import AgentDocument, EnvDocument, ToolUse
from dsec.session.io import (
    AWAITS_RESULTS,
    Called,
    SessionConfig,
    Stepped,
    cancel_input,
    failure_content,
    result_input,
)
from dsec.session.local import local_program, run_in_memory
from dsec.session.log_row import RecordedGap
from dsec.session.machine import SessionMachine
from dsec.session.memory_log import Failed
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun, rerun_steps, undelivered
from dsec_contracts import keys
from dsec_contracts.canonical import decode, encode
from dsec_contracts.keys import CALLS_PER_TURN_MAX
from dsec_contracts.step import STEP_FIELDS

CONFIG = SessionConfig(11, 12)
SEARCH = ToolUse(ref="a" * 64, name="search", deadline_s=30.0)
ADD = ToolUse(ref="b" * 64, name="add", deadline_s=30.0)
AGENT = """
class Agent:
    def __init__(self, config):
        self.space, self.heard, self.n = config["action_space"], [], 0
    def step(self, observation):
        self.n += 1
        step = {"action": self.space.sample() ^ (len(repr(self.heard)) & 1)}
        if self.n % 5 == 1:
            arguments = {"x": self.n, "y": len(self.heard)}
            return {"tool_calls": [{"name": "add", "arguments": arguments}, {"name": "search"}]}
        if self.n % 5 == 2:
            return {"tool_calls": [{"name": "search", "arguments": '{"q": %d}' % self.n}]}
        if self.n % 5 == 4:
            step["tool_calls"] = [{"id": "x", "type": "function", "function": {
                "name": "add", "arguments": '{"x": 1}'}}, {"name": "search"}]
        return step
    def on_reward(self, reward, done, info):
        self.heard.append(("reward", reward))
    def on_tool_result(self, tool_id, result):
        self.heard.append((tool_id, result))
"""


def program_of(agent: str = AGENT, **options: Any):
    return local_program(
        AgentDocument(entry="agent.py:Agent", tools=[SEARCH, ADD], **options),
        {"agent.py": agent.encode()},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )


def call_tool(call) -> Any:
    """Depends on the call alone."""
    if call.name == "search":
        return Failed("tool_raised", f"nothing for {call.arguments}", retryable=True)
    return {"sum": len(call.arguments), "id": call.id}


@pytest.fixture(scope="module")
def made():
    return program_of()


@pytest.fixture(scope="module")
def rows(made, session_id):
    return run_in_memory(made, CONFIG, session_id, EnvScorer(), call_tool=call_tool)


def run_turns(agent: str, **options: Any):
    """A machine whose agent is asked once."""
    machine = SessionMachine(program_of(agent, **options), CONFIG)
    machine.start()
    return machine, machine.step()


def returning(decision: str) -> str:
    return (
        "class Agent:\n    def __init__(self, config): pass\n"
        f"    def step(self, observation): return {decision}\n"
    )


# -- what is asked for -----------------------------------------------------------------------------


def test_a_tool_turn_leaves_the_environment_alone_and_the_observation_the_same(session_id):
    agent = returning("self.turn(observation)") + (
        "    def turn(self, o):\n"
        "        seen = getattr(self, 'seen', None)\n"
        "        assert seen is None or (o == seen).all()\n"
        "        self.seen, self.n = o.copy(), getattr(self, 'n', 0) + 1\n"
        "        if self.n < 4: return {'tool_calls': [{'name': 'add'}]}\n"
        "        self.seen, self.n = None, 0\n"
        "        return {'action': 0}\n"
    )
    rows = run_in_memory(
        program_of(agent), SessionConfig(1, 2), session_id, EnvScorer(), call_tool=call_tool
    )
    keys_ = [row.key for row in rows if row.kind in ("session.stepped", "tool.called")]
    turns = [[f"tool_call:{step}.{turn}" for turn in range(3)] for step in range(2)]
    assert keys_ == [*turns[0], "step:0", *turns[1], "step:1"]
    causes = {row.key: row.cause for row in rows if row.kind in ("session.stepped", "tool.called")}
    assert causes["tool_call:0.0"] == "started"
    assert causes["tool_call:0.1"] == "tool_result:0.0.0"
    assert causes["step:0"] == "tool_result:0.2.0"
    assert causes["tool_call:1.0"] == "reward:0.1"
    recorded = Recorded.from_rows(rows)
    named = [[name[:2] for name in decode(recorded.turns[1, n].inputs)] for n in range(3)]
    results = [["tool_result", keys.call_ordinal(1, turn, 0)] for turn in range(2)]
    assert named == [[["reward", 0]], [results[0]], [results[1]]]  # since the output before
    fact = dict(zip(STEP_FIELDS, decode(rows[-3].fact), strict=True))
    assert [id_ for id_, _ in fact["calls"]] == ["call_1_0_0", "call_1_1_0", "call_1_2_0"]
    named = [(kind, ordinal) for kind, ordinal, _ in fact["inputs"]]
    results = [("tool_result", keys.call_ordinal(1, turn, 0)) for turn in range(3)]
    assert named == [("reward", 0), *results]


def test_both_shapes_of_a_call_are_one():
    inner = "{'name': 'add', 'arguments': {'b': 1, 'a': 'ü'}}"
    outer = (
        "{'id': 'x9', 'type': 'function', 'function': "
        "{'name': 'add', 'arguments': '{\"a\": \"ü\", \"b\": 1}'}}"
    )
    turns = [run_turns(returning(f"{{'tool_calls': [{one}]}}"))[1] for one in (inner, outer)]
    assert isinstance(turns[0], Called)
    assert turns[0] == turns[1]
    assert turns[0].calls[0] == ("call_0_0_0", "add", '{"a": "ü", "b": 1}')


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ("'add'", "must be a list"),
        ("['add']", "call_0_0_0: a tool call must be a mapping"),
        ("[{'name': 'ad'}]", "no tool is called 'ad'; the agent declares search, add"),
        ("[{'name': ['add']}]", "no tool is called"),
        ("[{'name': 'add', 'args': {}}]", "'args' is no key"),
        ("[{'name': 'add', 'arguments': [1]}]", "must be a mapping or JSON text"),
        ("[{'name': 'add', 'arguments': {'x': float('nan')}}]", "are no JSON"),
        ("[{'name': 'add', 'arguments': {'x': object()}}]", "are no JSON"),
        ("[{'name': 'add', 'arguments': chr(0xd800)}]", "are no Unicode text"),
        ("[{'type': 'custom', 'function': {'name': 'add'}}]", "`type` must be `function`"),
        ("[{'function': 'add'}]", "`function` must be a mapping"),
        ("[{'name': 'add'}] * 65", "one decision may have 64"),
    ],
)
def test_what_cannot_be_called_ends_the_session(calls, told):
    for also in ("", ", 'action': 0"):
        _, ended = run_turns(returning(f"{{'tool_calls': {calls}{also}}}"))
        assert ended.code == "agent_invalid"
        assert told in ended.message


LYING = """
class Liar(str):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __hash__(self):
        return hash("add")
class Endless(list):
    def __iter__(self):
        while True:
            yield {"name": "add"}
"""


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ("[{'name': Liar('ad')}]", "no tool is called 'ad'"),
        ("[{'function': {'name': Liar('')}}]", "no tool is called ''"),
    ],
)
def test_a_name_that_claims_to_equal_a_tool_s_is_none(calls, told):
    _, ended = run_turns(LYING + returning(f"{{'tool_calls': {calls}}}"))
    assert ended.code == "agent_invalid"
    assert told in ended.message


def test_text_of_the_user_s_own_class_is_plain_in_what_is_called():
    turn = run_turns(LYING + returning("{'tool_calls': [{'name': Liar('add')}]}"))[1]
    assert isinstance(turn, Called)
    assert type(turn.calls[0].name) is str
    assert type(Asked(_Text("add"), None).name) is str


class _Text(str):
    __slots__ = ()


def test_calls_that_never_end_are_those_that_a_decision_may_have():
    turn = run_turns(LYING + returning("{'tool_calls': Endless([0])}"))[1]
    assert isinstance(turn, Called)
    assert len(turn.calls) == CALLS_PER_TURN_MAX


def test_what_a_tool_turn_would_lose_is_refused():
    _, ended = run_turns(returning("{'tool_calls': [{'name': 'add'}], 'extras': {'logprob': 1}}"))
    assert ended.code == "agent_invalid"
    assert "extras" in ended.message


def test_arguments_have_a_limit():
    calls = (
        "[{'name': 'add', 'arguments': 'x' * 200_001}, {'name': 'add', 'arguments': 'x' * 200_000}]"
    )
    assert run_turns(returning(f"{{'tool_calls': {calls}}}"))[1].code == "too_large"


def test_turns_have_a_limit(session_id):
    agent = returning("{'tool_calls': [{'name': 'add'}]}")
    made = program_of(agent, tool_turns_max=3)
    rows = run_in_memory(made, CONFIG, session_id, EnvScorer(), call_tool=call_tool)
    recorded = Recorded.from_rows(rows)
    assert (recorded.ended.status, recorded.ended.code) == ("failed", "tool_turns_max")
    assert len(recorded.turns) == 3
    assert verify(rows, made, CONFIG, EnvScorer()).ok


def test_an_agent_without_tools_cannot_call(program):
    machine = SessionMachine(program(returning("{'tool_calls': [1], 'action': 0}")), CONFIG)
    machine.start()
    assert "declares no `tools`" in machine.step().message


# -- what is heard ---------------------------------------------------------------------------------


def answers(turn, order):
    """The answers to a turn, in an order of one's own."""
    given = []
    for index in order:
        result = call_tool(turn.calls[index])
        ordinal = keys.call_ordinal(turn.step, turn.turn, index)
        if isinstance(result, Failed):
            content = failure_content(result.message, result.retryable)
            given.append(result_input(ordinal, result.code, content, turn.turn_hash))
        else:
            given.append(result_input(ordinal, "", encode(result), turn.turn_hash))
    return given


def test_the_agent_hears_results_in_the_order_of_the_calls():
    machine, turn = run_turns(AGENT)
    late, early = answers(turn, (1, 0))
    assert machine.deliver(late) is None
    assert machine._agent.heard == []
    machine.deliver(early)
    add, search = machine._agent.heard
    assert add == ("call_0_0_0", {"sum": len(turn.calls[0].arguments), "id": "call_0_0_0"})
    error = {"code": "tool_raised", "message": "nothing for {}", "retryable": True}
    assert search == ("call_0_0_1", {"error": error})
    assert machine.awaiting is None


def test_results_beside_an_action_are_heard_after_its_reward(rows, made):
    known = {(i.kind, i.ordinal): i for i in Recorded.from_rows(rows).inputs}
    machine = SessionMachine(made, CONFIG)
    machine.start()
    for _ in range(2):
        for one in answers(machine.step(), (0, 1)[: len(machine.called.calls)]):
            machine.deliver(one)
    machine.step()
    machine.deliver(known["reward", 0])
    stepped = machine.step()
    assert isinstance(stepped, Stepped)
    assert stepped.called is not None
    before = len(machine._agent.heard)
    for one in answers(stepped.called, (1, 0)):
        machine.deliver(one)
    assert (len(machine._agent.heard), machine.awaiting) == (before, 1)
    reward = known["reward", 1]
    machine.deliver(reward)
    told = [name for name, _ in machine._agent.heard[before:]]
    assert told == ["reward", "call_1_0_0", "call_1_0_1"]
    assert machine.awaiting is None
    machine.deliver(reward)
    assert len(machine._agent.heard) == before + 3


def test_foreign_and_stale_results_change_nothing():
    machine, turn = run_turns(AGENT)
    one, other = answers(turn, (0, 1))
    ordinal = keys.call_ordinal(0, 0, 2)
    for foreign in (
        one._replace(cause=b"\0" * 16),
        result_input(ordinal, "", encode(1), turn.turn_hash),
        result_input(one.ordinal + 256, "", encode(1), turn.turn_hash),
        result_input(one.ordinal - 1, "", encode(1), turn.turn_hash),
    ):
        machine.deliver(foreign)
    assert (machine._agent.heard, machine.awaiting) == ([], AWAITS_RESULTS)
    machine.deliver(one)
    machine.deliver(result_input(one.ordinal, "", encode("another"), turn.turn_hash))
    machine.deliver(other)
    assert [name for name, _ in machine._agent.heard] == ["call_0_0_0", "call_0_0_1"]


def test_content_that_cannot_be_read_ends_nothing():
    machine, turn = run_turns(AGENT)
    machine.deliver(result_input(keys.call_ordinal(0, 0, 0), "", b"\xff", turn.turn_hash))
    machine.deliver(result_input(keys.call_ordinal(0, 0, 1), "code", encode(1), turn.turn_hash))
    codes = [result["error"]["code"] for _, result in machine._agent.heard]
    assert codes == ["result_invalid"] * 2


def test_an_agent_that_raises_at_a_result_fails_its_session(session_id):
    made = program_of(AGENT.replace("self.heard.append((tool_id, result))", "assert 0, tool_id"))
    rows = run_in_memory(made, CONFIG, session_id, EnvScorer(), call_tool=call_tool)
    ended = Recorded.from_rows(rows).ended
    assert (ended.code, "call_0_0_0" in ended.message) == ("agent_raised", True)
    assert verify(rows, made, CONFIG, EnvScorer()).ok


def test_a_cancelled_session_waits_for_no_tool(made, session_id):
    machine, _ = run_turns(AGENT)
    machine.deliver(cancel_input("deadline"))
    assert (machine.ended.status, machine.called, machine.awaiting) == ("cancelled", None, None)


def test_the_last_step_waits_for_its_results(session_id):
    agent = returning("{'action': 0, 'tool_calls': [{'name': 'add'}]}")
    rows = run_in_memory(
        program_of(agent), SessionConfig(1, 2), session_id, EnvScorer(), call_tool=call_tool
    )
    assert [row.key for row in rows[-2:]] == ["tool_result:1.0.0", "ended"]
    assert decode(Recorded.from_rows(rows).ended.inputs)[1][:2] == ["tool_result", 65536]


# -- once more -------------------------------------------------------------------------------------


def go_live(machine, recorded, rows):
    """Deliver what the log has left, and go on with the answers of an undisturbed run."""
    for given_input in undelivered(recorded, machine):
        machine.deliver(given_input)
    known = {(i.kind, i.ordinal): i for i in Recorded.from_rows(rows).inputs}
    while machine.ended is None:
        if machine.awaiting is None:
            machine.step()
        elif machine.awaiting >= 0:
            machine.deliver(known["reward", machine.awaiting])
        else:
            for one in answers(machine.called, range(len(machine.called.calls))):
                machine.deliver(one)
    return machine.ended


def test_the_log_verifies_and_folds(made, rows):
    verdict = verify(rows, made, CONFIG, EnvScorer())
    assert (verdict.ok, verdict.complete, verdict.steps) == (True, True, 12)
    state = fold(rows)
    assert (state.status, state.intact, state.steps) == ("completed", True, 12)


def test_a_restart_at_any_row_comes_to_the_same_end(made, rows):
    whole = Recorded.from_rows(rows).ended
    assert sum(row.kind == "tool.called" for row in rows) > 8
    for cut in range(len(rows) + 1):
        recorded = Recorded.from_rows(rows[:cut])
        machine = SessionMachine(made, CONFIG)
        assert rerun(machine, recorded) is None, cut
        if recorded.reset is None:
            machine.start()
        assert go_live(machine, recorded, rows) == whole, cut


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_order_and_repetition_change_nothing(made, rows, data):
    repeated = data.draw(st.lists(st.sampled_from(rows), max_size=30))
    assert Recorded.from_rows(data.draw(st.permutations(rows + repeated))) == Recorded.from_rows(
        rows
    )
    machine, heard = SessionMachine(made, CONFIG), []
    machine.start()
    known = {(i.kind, i.ordinal): i for i in Recorded.from_rows(rows).inputs}
    while machine.ended is None:
        if machine.awaiting is None:
            machine.step()
            continue
        due = [] if machine.awaiting < 0 else [known["reward", machine.awaiting]]
        if machine.called is not None:
            due += answers(machine.called, range(len(machine.called.calls)))
        heard += due
        for one in data.draw(st.permutations(due + data.draw(st.lists(st.sampled_from(heard))))):
            machine.deliver(one)
    assert machine.ended == Recorded.from_rows(rows).ended


def changed(row):
    """The row with another result, call or input."""
    fact = decode(row.fact)
    for name, value in (("content", "oWFhAQ=="), ("message", "other")):
        if name in fact:
            fact[name] = value
    if "calls" in fact:
        fact["calls"][0]["function"]["arguments"] += " "
    return row._replace(fact=encode(fact))


@pytest.mark.parametrize(
    ("key", "step", "name"),
    [
        ("tool_result:0.0.0", 0, "inputs"),
        ("tool_result:0.0.1", 0, "inputs"),
        ("tool_result:1.0.0", 2, "inputs"),
        ("tool_call:0.1", 0, "calls"),
        ("tool_call:1.0", 1, "calls"),
    ],
)
def test_a_changed_result_or_call_is_named(made, rows, key, step, name):
    false = [changed(row) if row.key == key else row for row in rows]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
    assert (divergence.step, divergence.field) == (step, name)


def test_another_answer_gives_another_chain(made, rows, session_id):
    def other(call):
        return {"sum": -1} if call.id == "call_0_0_0" else call_tool(call)

    again = run_in_memory(made, CONFIG, session_id, EnvScorer(), call_tool=other)
    ends = [Recorded.from_rows(one).ended.chain for one in (rows, again)]
    assert ends[0] != ends[1]


async def test_two_sessions_part_where_a_tool_answered_otherwise(made, rows, session_id):
    def other(call):
        return {"sum": -1} if call.id == "call_1_0_0" else call_tool(call)

    again = run_in_memory(made, CONFIG, session_id, EnvScorer(), call_tool=other)
    found = (await diff(RowsSource(rows), RowsSource(again))).first_difference
    # Those beside the action of step 1 are heard after it.
    assert (found.step, found.field) == (2, "inputs")
    same = run_in_memory(made, CONFIG, session_id, EnvScorer(), call_tool=call_tool)
    assert (await diff(RowsSource(rows), RowsSource(same))).equal


def test_a_turn_that_the_log_lacks_or_has_too_many_of_is_found(made, rows):
    without = [row for row in rows if row.key != "tool_call:0.1"]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(without))
    assert (divergence.step, divergence.field, divergence.expected) == (0, "calls", None)
    turn = next(row for row in rows if row.key == "tool_call:0.1")
    fact = decode(turn.fact) | {"turn": 9}
    more = [*rows, turn._replace(key="tool_call:0.9", fact=encode(fact))]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(more))
    assert (divergence.step, divergence.field, divergence.actual) == (0, "calls", None)


def test_a_turn_at_the_tail_is_compared(made, rows):
    """The worker died while the tools were at work: the last output in the log is a turn."""
    for key, told in (("tool_call:0.0", 0), ("tool_call:0.1", 0), ("tool_call:1.0", 1)):
        cut = next(n for n, row in enumerate(rows) if row.key == key)
        false = [*rows[:cut], changed(rows[cut])]
        divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
        assert (divergence.step, divergence.field) == (told, "calls")
        recorded, machine = Recorded.from_rows(rows[: cut + 1]), SessionMachine(made, CONFIG)
        assert rerun(machine, recorded) is None
        # A turn names what came before it; one beside an action comes before its step's reward.
        left = [] if told == 0 else [("reward", 1)]
        assert [(one.kind, one.ordinal) for one in undelivered(recorded, machine)] == left


def test_code_that_asks_for_other_tools_is_found(rows):
    for change in (("% 5 == 2", "% 5 == 3"), ("% 5 == 1", "% 5 == 7"), ("'{\"x\": 1}'", "'{}'")):
        other = program_of(AGENT.replace(*change))
        divergence = rerun(SessionMachine(other, CONFIG), Recorded.from_rows(rows))
        assert divergence is not None, change


def test_every_turn_that_is_executed_again_has_a_deadline_of_its_own(made, rows):
    """Whoever drives a re-execution looks at the clock at each step that it yields."""
    steps = list(rerun_steps(SessionMachine(made, CONFIG), Recorded.from_rows(rows)))
    turns = Recorded.from_rows(rows).turns
    alone = [step for step, _ in turns if step == 0]
    assert steps.count(0) == 1 + len(alone)
    assert set(steps) == set(range(12))


def test_a_gap_in_steps_is_an_error_with_tools_too(rows):
    with pytest.raises(RecordedGap):
        Recorded.from_rows([row for row in rows if row.key != "step:3"])
