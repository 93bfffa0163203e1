"""Re-execution: from any output on, under any order of the log, and what it says of a false log."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.reward.score import EnvScorer
from dsec.session.io import SessionConfig, cancel_input
from dsec.session.local import run_in_memory
from dsec.session.log_row import RecordedGap
from dsec.session.machine import SessionMachine
from dsec.session.memory_log import MemoryLog
from dsec.session.recorded import Recorded, RecordedInvalid
from dsec.session.rerun import rerun, undelivered
from dsec_contracts import SessionCancelRequested
from dsec_contracts.canonical import decode, encode
from dsec_contracts.session import CancelCircumstance, CancelFact
from dsec_contracts.step import STEP_FIELDS

CONFIG = SessionConfig(11, 25)
AGENT = """
import random
class Agent:
    def __init__(self, config):
        self.space, self.random, self.total = config["action_space"], random.Random(3), 0.0
    def step(self, observation):
        return {"action": (self.space.sample() + int(self.total)) % 2}
    def on_reward(self, reward, done, info):
        self.total += reward * self.random.random()
"""


@pytest.fixture(scope="module")
def made():
    from dsec.session.documents import AgentDocument, EnvDocument
    from dsec.session.local import local_program

    return local_program(
        AgentDocument(entry="agent.py:Agent"),
        {"agent.py": AGENT.encode()},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )


@pytest.fixture(scope="module")
def rows(made, session_id):
    return run_in_memory(made, CONFIG, session_id, EnvScorer())


def go_live(machine, recorded, rows):
    """Deliver what the log has left, and go on with the rewards of an undisturbed run."""
    for given_input in undelivered(recorded, machine):
        machine.deliver(given_input)
    known = Recorded.from_rows(rows).inputs
    while machine.ended is None:
        if machine.awaiting is None:
            machine.step()
        else:
            machine.deliver(known[machine.awaiting])
    return machine.ended


def test_a_restart_at_any_row_comes_to_the_same_end(made, rows):
    """Whatever of the log was written when the worker died: steps, rewards, the end."""
    whole = Recorded.from_rows(rows).ended
    for cut in range(len(rows) + 1):
        recorded = Recorded.from_rows(rows[:cut])
        machine = SessionMachine(made, CONFIG)
        assert rerun(machine, recorded) is None
        if recorded.reset is None:
            machine.start()
        assert machine.steps == len(recorded.steps)
        assert go_live(machine, recorded, rows) == whole


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_order_and_repetition_of_rows_change_nothing(made, rows, data):
    repeated = data.draw(st.lists(st.sampled_from(rows), max_size=30))
    shuffled = data.draw(st.permutations(rows + repeated))
    assert Recorded.from_rows(shuffled) == Recorded.from_rows(rows)


def test_rewards_without_their_steps_are_stale_or_early_and_change_nothing(made, rows):
    """A log whose rewards run ahead of its steps, as after a trimmed stream."""
    some = [r for r in rows if r.kind != "session.stepped" or r.step < 4]
    some = [r for r in some if r.kind != "session.ended"]
    recorded = Recorded.from_rows(some)
    machine = SessionMachine(made, CONFIG)
    assert rerun(machine, recorded) is None
    assert len(undelivered(recorded, machine)) == CONFIG.max_steps - 3
    assert go_live(machine, recorded, rows) == Recorded.from_rows(rows).ended


def test_a_gap_is_an_error(rows):
    with pytest.raises(RecordedGap) as caught:
        Recorded.from_rows([r for r in rows if r.key != "step:7"])
    assert caught.value.step == 7


def test_an_end_after_lost_steps_is_an_error(made, rows):
    recorded = Recorded.from_rows([r for r in rows if r.key not in ("step:23", "step:24")])
    with pytest.raises(RecordedGap):
        rerun(SessionMachine(made, CONFIG), recorded)


def test_a_fact_that_cannot_be_read_is_named(rows):
    false = [r._replace(fact=b"\xff") if r.key == "started" else r for r in rows]
    with pytest.raises(RecordedInvalid, match="started"):
        Recorded.from_rows(false)


def test_later_revisions_are_no_inputs(made, rows):
    for sequence in (0, 99):
        again = rows[2]._replace(key="reward:0.2", value=9.0, sequence=sequence)
        assert Recorded.from_rows([*rows, again]) == Recorded.from_rows(rows)


def other(value):
    """Another value of about the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, dict):
        return {**value, "added": 1}
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [[kind, ordinal, other(digest)] for kind, ordinal, digest in value]
    return ["added"]


@pytest.mark.parametrize("step", [0, 9, 24])
@pytest.mark.parametrize("name", STEP_FIELDS)
def test_a_changed_field_of_a_step_is_named(made, rows, name, step):
    def changed(row):
        fact = decode(row.fact)
        n = STEP_FIELDS.index(name)
        fact[n] = other(fact[n])
        return row._replace(fact=encode(fact))

    false = [changed(r) if r.key == f"step:{step}" else r for r in rows]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
    assert (divergence.step, divergence.field) == (step, name)
    assert encode(divergence.expected) != encode(divergence.actual)


def test_a_step_that_names_no_reward_is_found(made, rows):
    fact = decode(next(r for r in rows if r.key == "step:9").fact)
    fact[STEP_FIELDS.index("inputs")] = []
    false = [r._replace(fact=encode(fact)) if r.key == "step:9" else r for r in rows]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
    assert (divergence.step, divergence.field) == (9, "inputs")
    assert divergence.actual == [["reward", 8]]


def test_bytes_that_are_no_step_are_found(made, rows):
    for fact in (b"", b"\x80", b"\x8d\x01", b"junk" * 9, encode([1, 2, [[1]]])):
        false = [r._replace(fact=fact) if r.key == "step:9" else r for r in rows]
        divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
        assert divergence.step == 9, fact


def test_a_changed_chain_hash_is_named(made, rows):
    false = [r._replace(chain=b"\0" * 32) if r.key == "step:9" else r for r in rows]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
    assert (divergence.step, divergence.field) == (9, "chain")


@pytest.mark.parametrize(
    ("key", "name", "change", "field"),
    [
        ("started", "reset", "oMDA", "reset"),
        ("started", "chain", "AAAA", "chain_0"),
        ("ended", "status", "failed", "status"),
        ("ended", "code", "episodes_max", "code"),
        ("ended", "steps", 24, "steps"),
        ("ended", "episodes", 77, "episodes"),
        ("ended", "inputs", "gA==", "status"),
        ("ended", "chain", "AAAA", "chain"),
    ],
)
def test_a_changed_start_or_end_is_named(made, rows, key, name, change, field):
    false = [
        r._replace(fact=encode({**decode(r.fact), name: change})) if r.key == key else r
        for r in rows
    ]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
    assert (divergence.step, divergence.field) == (None, field)


def test_a_changed_reward_is_found_where_it_was_delivered(made, rows):
    def changed(row):
        fact = decode(row.fact)
        fact[2] += 1
        return row._replace(fact=encode(fact), value=fact[2])

    false = [changed(r) if r.key == "reward:9.1" else r for r in rows]
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
    assert (divergence.step, divergence.field) == (10, "inputs")
    assert divergence.expected[:2] == divergence.actual[:2] == ["reward", 9]
    assert divergence.expected[2] != divergence.actual[2]  # no wrong reward was handed out
    divergence = rerun(
        SessionMachine(made, CONFIG),
        Recorded.from_rows([changed(r) if r.key == "reward:24.1" else r for r in rows]),
    )
    assert (divergence.step, divergence.field) == (None, "inputs")


def test_other_code_and_another_seed_are_found(program, made, rows):
    recorded = Recorded.from_rows(rows)
    assert rerun(SessionMachine(made, SessionConfig(12, 25)), recorded).field == "reset"
    changed = program(AGENT.replace("int(self.total)", "int(self.total > 5)"))
    divergence = rerun(SessionMachine(changed, CONFIG), recorded)
    assert divergence.field == "action"
    raising = program(
        AGENT.replace("self.total +=", "assert info['dsec']['step'] != 4; self.total +=")
    )
    divergence = rerun(SessionMachine(raising, CONFIG), recorded)
    assert (divergence.step, divergence.field) == (5, "status")
    assert "assert info" in divergence.actual


def test_a_cancelled_session_comes_again(made, session_id, rows):
    machine, log = SessionMachine(made, CONFIG), MemoryLog(session_id)
    log.rows = [r for r in rows if (r.step is None or r.step < 6) and r.key != "ended"]
    assert rerun(machine, Recorded.from_rows(log.rows)) is None
    asked = SessionCancelRequested(
        fact=CancelFact(session_id=session_id), circumstance=CancelCircumstance(code="deadline")
    )
    log.event("cancel_requested", asked)
    recorded = Recorded.from_rows(log.rows)
    assert [g.kind for g in undelivered(recorded, machine)] == ["reward", "cancel"]
    for given_input in undelivered(recorded, machine):
        machine.deliver(given_input)
    assert (machine.ended.status, machine.ended.code) == ("cancelled", "deadline")
    log.ended(machine.ended)
    again = SessionMachine(made, CONFIG)
    assert rerun(again, Recorded.from_rows(log.rows)) is None
    assert again.ended == machine.ended
    assert cancel_input("deadline").name() in machine.ended.inputs


def test_an_end_from_outside_runs_no_more_code(program, made, session_id, rows):
    """The step that killed two workers must not kill the verifier."""
    from dsec.session.chain import chain_end
    from dsec.session.io import Ended

    log = MemoryLog(session_id)
    log.rows = [r for r in rows if (r.step is None or r.step < 6) and r.key != "ended"]
    last, episodes = log.rows[-2], sum(bool(r.terminated) for r in log.rows)
    chain = chain_end(last.chain, "failed", "agent_crashed", 6, episodes, encode([]))
    log.ended(Ended("failed", "agent_crashed", 6, episodes, encode([]), chain))
    made = program(
        AGENT.replace(
            "return {", "self.n = getattr(self, 'n', -1) + 1; assert self.n < 6; return {"
        )
    )
    machine = SessionMachine(made, CONFIG)
    assert rerun(machine, Recorded.from_rows(log.rows)) is None
    assert machine.steps == 6
    false = log.rows[-1]._replace(fact=encode({**decode(log.rows[-1].fact), "code": "oom"}))
    divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows([*log.rows[:-1], false]))
    assert (divergence.step, divergence.field) == (None, "chain")


def test_a_session_that_never_started_has_only_an_end(made, session_id):
    from dsec.session.chain import chain_end
    from dsec.session.io import Ended

    log = MemoryLog(session_id)
    chain = chain_end(None, "failed", "spec_not_found", 0, 0, encode([]))
    log.ended(Ended("failed", "spec_not_found", 0, 0, encode([]), chain))
    machine = SessionMachine(made, CONFIG)
    assert rerun(machine, Recorded.from_rows(log.rows)) is None
    assert machine.chain is None


def test_a_d1_session_is_driven_by_its_recorded_actions(program, session_id):
    agent = AGENT.replace("random.Random(3)", "random.SystemRandom()")
    agent += "        self.heard = getattr(self, 'heard', 0) + 1\n"
    entropy = agent.replace("self.space.sample()", "self.random.randrange(2)")
    made = program(entropy, deterministic_mode=False)
    rows = run_in_memory(made, CONFIG, session_id, EnvScorer())
    for cut in (len(rows), 20):
        recorded = Recorded.from_rows(rows[:cut])
        machine = SessionMachine(made, CONFIG)
        assert rerun(machine, recorded) is None
        assert machine.recorded_actions is None
        assert machine._agent.heard >= len(recorded.steps) - 1
    strict = program(entropy)
    assert rerun(SessionMachine(strict, CONFIG), Recorded.from_rows(rows)).field == "action"


def test_a_d1_agent_that_raised_is_not_asked_again(program, session_id):
    agent = AGENT.replace("return {", "assert self.total < 3; return {")
    made = program(agent, deterministic_mode=False)
    rows = run_in_memory(made, CONFIG, session_id, EnvScorer())
    recorded = Recorded.from_rows(rows)
    assert recorded.ended.code == "agent_raised"
    assert rerun(SessionMachine(made, CONFIG), recorded) is None
