"""Anchors: what they say, when they are taken, and that a session which comes back from one ends as
if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from tests.session.conftest import reward_of

from dsec.platform import virtual
from dsec.platform.interposition import interposition_of
from dsec.reward.score import EnvScorer
from dsec.session.anchor_record import Compared, frozen
from dsec.session.anchor_restore import NotRestorable, restored
from dsec.session.anchors import NotCaptured, Taken, anchor_id
from dsec.session.documents import ToolUse
from dsec.session.io import SessionConfig
from dsec.session.local import run_in_memory
from dsec.session.log_row import ANCHOR_CAPTURED, LogRow
from dsec.session.machine import SessionMachine
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun, rerun_steps, undelivered
from dsec_contracts.canonical import decode, encode

CONFIG = SessionConfig(11, 60)
WHOLE = """
import random, time
import numpy as np
class Agent:
    def __init__(self, config):
        self.space, self.own, self.total = config["action_space"], random.Random(3), 0.0
    def step(self, observation):
        drawn = random.random() + np.random.random() + self.own.random() + time.time() % 1
        return {"action": (self.space.sample() + int(self.total + drawn)) % 2}
    def on_reward(self, reward, done, info):
        self.total += reward * random.random()
"""
STATED = """
import numpy as np
class Agent:
    def __init__(self, config):
        self.anchor_id = config["anchor_id"]
        self.space, self.weights = config["action_space"], np.zeros(4)
        self.space.sample()
    def step(self, observation):
        lean = int(observation @ self.weights > 0)
        return {"action": (self.space.sample() + lean) % 2}
    def on_reward(self, reward, done, info):
        self.weights[info["dsec"]["step"] % 4] += reward
    def get_state(self):
        return {"weights": self.weights.copy()}
    def set_state(self, state):
        self.weights = state["weights"]
"""
ASKING = STATED.replace(
    """        return {"action": (self.space.sample() + lean) % 2}""",
    """        self.n = getattr(self, "n", 0) + 1
        asked = {3: True, 5: {"weights": self.weights.copy()}, 7: False}.get(self.n)
        return {"action": (self.space.sample() + lean) % 2, "state_anchor": asked}""",
)
TABLE = """
import gymnasium, numpy as np
class Env:
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        self.table = {n: float(n) for n in range(400)}
        self.later, self.buffer, self.n = None, np.zeros(4), 0
    def reset(self, seed=None):
        self.rng = np.random.default_rng(seed)
        self.n = 0
        return self.buffer, {}
    def step(self, action):
        self.n += 1
        self.table[self.n] = self.rng.random()
        self.later = {"n": self.n}
        self.buffer[:] = (self.n, self.table[self.n], action, 0)
        return self.buffer, self.table[self.n], self.n == 150, False, {}
"""


@pytest.fixture(autouse=True)
def _virtual_chance() -> Iterator[None]:
    virtual.install()
    yield
    virtual.uninstall()


def run_with_blobs(
    program: Any, session_id: UUID, config: SessionConfig = CONFIG
) -> tuple[list[LogRow], dict[str, bytes]]:
    """The rows of a whole session, and the blobs of its anchors."""
    blobs: dict[str, bytes] = {}
    return run_in_memory(program, config, session_id, EnvScorer(), blobs=blobs), blobs


def come_back(
    program: Any, rows: list[LogRow], blobs: dict[str, bytes], at: int, config: SessionConfig
) -> tuple[Any, int, list[Taken]]:
    """The end of a session that is restored from the anchor at a position, driven through the
    record's tail and then on: with how many steps were executed, and the anchors it took."""
    recorded = Recorded.from_rows(rows)
    anchor, before = recorded.anchors[at], recorded.steps[at - 1]
    assert anchor.blob is not None
    pristine = SessionMachine(program, config)
    machine = restored(pristine, blobs[anchor.blob], anchor.anchor_id, before.fact, before.chain)
    assert machine.steps == at
    executed = list(drive(machine, recorded))
    taken: list[Taken] = []
    machine.on_anchor = taken.append
    for given in undelivered(recorded, machine):
        machine.deliver(given)
    while machine.ended is None:
        if machine.awaiting is None:
            machine.step()
        else:
            assert machine.last is not None
            machine.deliver(reward_of(machine.last))
    return machine.ended, len(executed), taken


def drive(machine: SessionMachine, recorded: Recorded) -> Any:
    divergence = yield from rerun_steps(machine, recorded)
    assert divergence is None, divergence


@pytest.mark.parametrize(
    "agent",
    [WHOLE, STATED, STATED.replace("set_state", "load_state")],
    ids=["whole", "with_its_own_state", "with_load_state"],
)
@pytest.mark.parametrize("env", ["gymnasium:CartPole-v1", TABLE], ids=["cartpole", "table"])
def test_a_session_comes_back_from_any_anchor(
    program: Any, session_id: UUID, agent: str, env: str
) -> None:
    config = SessionConfig(11, 170)
    made = program(agent, env, anchors={"every_steps": 13, "at_episode_start": True})
    rows, blobs = run_with_blobs(made, session_id, config)
    whole = Recorded.from_rows(rows)
    assert whole.ended is not None
    assert whole.ended.status == "completed"
    positions = sorted(whole.anchors)
    assert set(range(13, 171, 13)) <= set(positions)
    for at in positions[:: max(1, len(positions) // 6)]:
        # The worker dies some steps later: the log has these, and what follows is live.
        cut = [row for row in rows if row.step is None or row.step < at + 9]
        cut = [row for row in cut if row.kind != "session.ended"]
        ended, executed, _ = come_back(made, cut_anchors(cut, at), blobs, at, config)
        assert executed == min(9, 170 - at)
        assert ended.status == "completed", ended
        assert (ended.chain, ended.status) == (whole.ended.chain, "completed")


def cut_anchors(rows: list[LogRow], at: int) -> list[LogRow]:
    return [r for r in rows if not r.key.startswith("anchor") or int(r.key.split(":")[1]) <= at]


def test_anchors_change_no_chain(program: Any, session_id: UUID) -> None:
    def chain(**options: Any) -> bytes:
        rows, _ = run_with_blobs(program(STATED, **options), session_id)
        ended = Recorded.from_rows(rows).ended
        assert ended is not None
        return ended.chain

    assert chain() == chain(anchors={"every_steps": 1, "at_episode_start": True})


def test_a_reexecution_takes_the_same_anchors(program: Any, session_id: UUID) -> None:
    made = program(STATED, anchors={"every_steps": 7})
    rows, _ = run_with_blobs(made, session_id)
    assert rerun(SessionMachine(made, CONFIG), Recorded.from_rows(rows)) is None
    # One whose content differs is found, and one that does not come out at all.
    for change, message in (
        (lambda fact: fact | {"content": "AAAA"}, "anchor"),
        (lambda fact: fact | {"tags": ["agent"]}, "anchor"),
    ):
        false = [
            row._replace(fact=encode(change(decode(row.fact)))) if row.key == "anchor:14" else row
            for row in rows
        ]
        divergence = rerun(SessionMachine(made, CONFIG), Recorded.from_rows(false))
        assert divergence is not None
        assert (divergence.step, divergence.field) == (13, message)
    plain = program(STATED)
    divergence = rerun(SessionMachine(plain, CONFIG), Recorded.from_rows(rows))
    assert divergence is not None
    assert (divergence.step, divergence.field, divergence.actual) == (6, "anchor", None)


def test_a_session_that_came_back_takes_the_anchors_that_it_would_have(
    program: Any, session_id: UUID
) -> None:
    made = program(STATED, anchors={"every_steps": 10})
    rows, blobs = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(rows)
    known = {at: anchor.fact for at, anchor in recorded.anchors.items()}
    live = [r for r in cut_anchors(rows, 20) if r.step is None or r.step < 20]
    live = [r for r in live if r.kind != "session.ended"]
    whole = Recorded.from_rows(rows)
    anchor, before = whole.anchors[20], whole.steps[19]
    assert anchor.blob is not None
    pristine = SessionMachine(made, CONFIG)
    machine = restored(pristine, blobs[anchor.blob], anchor.anchor_id, before.fact, before.chain)
    taken: list[Taken] = []
    machine.on_anchor = taken.append
    while machine.ended is None:
        if machine.awaiting is None:
            machine.step()
        else:
            machine.deliver(whole.inputs[machine.awaiting])
    assert {one.position: one.fact for one in taken} == {n: known[n] for n in (30, 40, 50, 60)}
    assert pristine.chain is None


def test_an_agent_asks_for_an_anchor(program: Any, session_id: UUID) -> None:
    rows, _ = run_with_blobs(program(ASKING), session_id)
    anchors = Recorded.from_rows(rows).anchors
    assert {at: (one.fact[3], one.fact[4]) for at, one in anchors.items()} == {
        3: (True, ("agent",)),
        5: (True, ("agent",)),
    }
    first, second = anchors[3], anchors[5]
    assert second.fact[5] == (first.anchor_id,)
    assert first.anchor_id == anchor_id(11, 3, first.fact[2])


def test_tags_come_from_create_state_anchor(program: Any, session_id: UUID) -> None:
    agent = """
    import dsec
    class Agent(dsec.Agent):
        def step(self, observation):
            return {"action": 0, "state_anchor": self.create_state_anchor(tags=["best"])}
    """
    rows, _ = run_with_blobs(program(agent), session_id, SessionConfig(1, 2))
    assert Recorded.from_rows(rows).anchors[1].fact[4] == ("agent", "best")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{'a': 1}", "no set_state"),
        ("dsec.StateAnchor(tags=('',))", "1 to 64 characters"),
        ("dsec.StateAnchor(tags=('x',) * 14)", "14 tags; an anchor takes 13"),
    ],
)
def test_a_wrong_state_anchor_ends_the_session(
    program: Any, session_id: UUID, given: str, told: str
) -> None:
    agent = f"""
    import dsec
    class Agent:
        def __init__(self, config): pass
        def step(self, observation):
            return {{"action": 0, "state_anchor": {given}}}
    """
    rows, _ = run_with_blobs(program(agent), session_id)
    ended = Recorded.from_rows(rows).ended
    assert ended is not None
    assert (ended.code, ended.steps) == ("agent_invalid", 0)
    assert told in ended.message


def test_a_get_state_that_raises_ends_the_session_behind_its_step(
    program: Any, session_id: UUID
) -> None:
    agent = STATED.replace('return {"weights"', "raise OSError('no'); return {\"weights\"")
    made = program(agent, anchors={"every_steps": 4})
    rows, _ = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(rows)
    assert recorded.ended is not None
    assert (recorded.ended.code, recorded.ended.steps) == ("agent_raised", 4)
    assert len(recorded.inputs) == 4
    assert rerun(SessionMachine(made, CONFIG), recorded) is None


HOSTILE = STATED.replace(
    "import numpy as np\n",
    """
import numpy as np
class Nameless(Exception):
    def __str__(self): raise RuntimeError
    __repr__ = __str__
class Unreadable(dict):
    def items(self): raise ValueError
    keys = __iter__ = items
    def __reduce__(self): raise Nameless
""",
)


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        (HOSTILE.replace('{"weights": self.weights.copy()}', "Unreadable(a=1)"), "max_steps"),
        (HOSTILE.replace('return {"weights"', 'raise Nameless; return {"weights"'), "agent_raised"),
        (HOSTILE.replace("    def get_state", "    @property\n    def get_state"), "max_steps"),
        (
            HOSTILE.replace(
                "    def set_state(self", "    @property\n    def set_state(self"
            ).replace("set_state(self, state)", "set_state(self)"),
            "agent_raised",
        ),
    ],
    ids=["a_state_that_raises", "an_error_without_text", "no_method", "a_property_that_raises"],
)
def test_whatever_a_state_does_stays_in_its_session(
    program: Any, session_id: UUID, agent: str, code: str
) -> None:
    made = program(agent, anchors={"every_steps": 4})
    rows, _ = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(rows)
    assert recorded.ended is not None
    assert recorded.ended.code == code
    assert rerun(SessionMachine(made, CONFIG), recorded) is None


def test_an_error_without_text_makes_no_machine_and_no_noise(
    program: Any, session_id: UUID
) -> None:
    made = program(
        HOSTILE.replace('self.weights = state["weights"]', "raise Nameless"),
        anchors={"every_steps": 4},
    )
    rows, blobs = run_with_blobs(made, session_id)
    with pytest.raises(NotRestorable, match="Nameless"):
        come_back(made, rows, blobs, 8, CONFIG)


def test_tags_are_read_once(program: Any, session_id: UUID) -> None:
    agent = """
    import dsec
    class Tags(tuple):
        read = 0
        def __iter__(self):
            self.read += 1
            return iter(("mine",) if self.read == 1 else (7,))
    class Agent:
        def __init__(self, config): pass
        def step(self, observation):
            return {"action": 0, "state_anchor": dsec.StateAnchor(tags=Tags(("mine",)))}
    """
    rows, _ = run_with_blobs(program(agent), session_id)
    assert {one.fact[4] for one in Recorded.from_rows(rows).anchors.values()} == {("agent", "mine")}


@pytest.mark.parametrize(
    ("agent", "env", "told"),
    [
        (WHOLE, TABLE.replace("self.n = 0\n", "self.n = 0; self.f = lambda: 1\n"), "environment"),
        (WHOLE.replace("0.0\n", "0.0; self.f = lambda: 1\n", 1), TABLE, "agent's state"),
        (
            WHOLE,
            TABLE + "    def __reduce__(self): return (Env, ())\n",
            "does not come back whole",
        ),
    ],
    ids=["environment", "agent", "an_environment_that_forgets"],
)
def test_what_cannot_be_captured_is_said(
    program: Any, session_id: UUID, agent: str, env: str, told: str
) -> None:
    machine = SessionMachine(program(agent, env, anchors={"every_steps": 2}), CONFIG)
    errors = []

    def take(taken: Taken) -> None:
        with pytest.raises(NotCaptured, match=told) as error:
            taken.freeze()
        errors.append(error)
        assert frozen(taken).blob == b""

    machine.on_anchor = take
    machine.start()
    machine.step()
    machine.awaiting = None
    machine.step()
    assert errors
    assert machine.ended is None


def test_pickling_draws_nothing_from_the_session(program: Any, session_id: UUID) -> None:
    agent = WHOLE + (
        "    def __getstate__(self):\n        random.random(); time.time()\n"
        "        return self.__dict__\n"
    )
    made = program(agent, anchors={"every_steps": 3})
    rows, _ = run_with_blobs(made, session_id)
    assert rerun(SessionMachine(made, CONFIG), Recorded.from_rows(rows)) is None


def test_what_the_log_lacks_is_kept_for_publishing(program: Any, session_id: UUID) -> None:
    made = program(STATED, anchors={"every_steps": 20})
    rows, _ = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(cut_anchors(rows, 20))
    compared = Compared(recorded.anchors, keep=True)
    list(rerun_steps(SessionMachine(made, CONFIG), recorded, compared))
    assert [one.taken.position for one in compared.missing] == [40, 60]
    assert all(one.blob for one in compared.missing)


def test_a_blob_of_something_else_makes_no_machine(program: Any, session_id: UUID) -> None:
    made = program(STATED, anchors={"every_steps": 20})
    rows, blobs = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(rows)
    anchor, before = recorded.anchors[20], recorded.steps[19]
    assert anchor.blob is not None
    blob, pristine = blobs[anchor.blob], SessionMachine(made, CONFIG)
    for wrong, name, fact, told in (
        (blob, recorded.anchors[40].anchor_id, before.fact, "holds anchor"),
        (blob, anchor.anchor_id, recorded.steps[20].fact, "another step"),
        (blob[:-9], anchor.anchor_id, before.fact, "Error"),
        (b"no blob at all", anchor.anchor_id, before.fact, "Error"),
    ):
        with pytest.raises(NotRestorable, match=told):
            restored(pristine, wrong, name, fact, before.chain)
    forgetful = program(STATED.replace("set_state", "take"), anchors={"every_steps": 20})
    with pytest.raises(NotRestorable, match="no set_state"):
        restored(
            SessionMachine(forgetful, CONFIG), blob, anchor.anchor_id, before.fact, before.chain
        )


@pytest.mark.parametrize("method", ["set_state", "load_state"])
def test_the_agent_is_told_which_anchor_it_comes_from(
    program: Any, session_id: UUID, method: str
) -> None:
    made = program(STATED.replace("set_state", method), anchors={"every_steps": 20})
    rows, blobs = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(rows)
    anchor, before = recorded.anchors[40], recorded.steps[39]
    assert anchor.blob is not None
    machine = restored(
        SessionMachine(made, CONFIG),
        blobs[anchor.blob],
        anchor.anchor_id,
        before.fact,
        before.chain,
    )
    assert machine._agent.anchor_id == anchor.anchor_id
    assert any(row.kind == ANCHOR_CAPTURED for row in rows)


CALLING = """
class Agent:
    def __init__(self, config):
        self.heard, self.turn = [], 0
    def on_tool_result(self, tool_id, result):
        self.heard.append([tool_id, result])
    def step(self, observation):
        self.turn += 1
        call = {"name": "lookup", "arguments": {"n": len(self.heard)}}
        if self.turn % 3 == 1:
            return {"tool_calls": [call, call]}
        decision = {"action": len(str(self.heard)) % 2}
        return decision | {"tool_calls": [call]} if self.turn % 3 == 2 else decision
"""
TOOL = ToolUse(ref="0" * 64, name="lookup", deadline_s=30.0)


@pytest.mark.parametrize("every", [1, 5])
def test_a_session_that_waits_for_tools_comes_back(
    program: Any, session_id: UUID, every: int
) -> None:
    made = program(CALLING, anchors={"every_steps": every}, tools=[TOOL])
    blobs: dict[str, bytes] = {}
    config = SessionConfig(11, 20)
    rows = run_in_memory(
        made, config, session_id, EnvScorer(), blobs=blobs, call_tool=lambda call: call.arguments
    )
    recorded = Recorded.from_rows(rows)
    assert recorded.ended is not None
    assert recorded.ended.status == "completed", recorded.ended
    for at, anchor in recorded.anchors.items():
        before = recorded.steps[at - 1]
        assert anchor.blob is not None
        machine = restored(
            SessionMachine(made, config),
            blobs[anchor.blob],
            anchor.anchor_id,
            before.fact,
            before.chain,
        )
        assert rerun(machine, recorded) is None
        assert machine.ended is not None
        assert machine.ended.chain == recorded.ended.chain


def test_torch_goes_on_where_it_was(program: Any, session_id: UUID) -> None:
    agent = """
    import torch
    class Agent:
        def __init__(self, config):
            self.layer = torch.nn.Linear(4, 1)
        def step(self, observation):
            noise = float(torch.rand(1)) - 0.5
            return {"action": int(self.layer(torch.tensor(observation)).item() + noise > 0)}
    """
    made = program(agent, anchors={"every_steps": 6})
    interposition = interposition_of(*made.namespaces)
    blobs: dict[str, bytes] = {}
    rows = run_in_memory(
        made, CONFIG, session_id, EnvScorer(), interposition=interposition, blobs=blobs
    )
    recorded = Recorded.from_rows(rows)
    assert recorded.ended is not None
    assert recorded.ended.status == "completed", recorded.ended
    for at in (6, 30, 60):
        anchor, before = recorded.anchors[at], recorded.steps[at - 1]
        assert anchor.blob is not None
        machine = restored(
            SessionMachine(made, CONFIG, interposition),
            blobs[anchor.blob],
            anchor.anchor_id,
            before.fact,
            before.chain,
        )
        assert rerun(machine, recorded) is None


def test_bytes_that_were_not_captured_are_no_blob(program: Any, session_id: UUID) -> None:
    rows, _ = run_with_blobs(program(STATED, anchors={"every_steps": 20}), session_id)
    other = [
        row._replace(fact=encode(decode(row.fact) | {"blob": "0" * 64}))
        if row.key == "anchor_result:20"
        else row
        for row in rows
    ]
    anchors = Recorded.from_rows(other).anchors
    assert anchors[20].blob is None
    assert anchors[40].blob is not None


def test_where_the_next_episode_cannot_begin_no_anchor_is_taken(
    program: Any, session_id: UUID
) -> None:
    env = TABLE.replace("self.n == 150", "self.n == 9").replace(
        "        self.rng =", "        assert self.n == 0, 'once only'\n        self.rng ="
    )
    made = program(WHOLE, env, anchors={"every_steps": 3, "at_episode_start": True})
    rows, _ = run_with_blobs(made, session_id)
    recorded = Recorded.from_rows(rows)
    assert recorded.ended is not None
    assert (recorded.ended.code, recorded.ended.steps) == ("env_raised", 9)
    assert sorted(recorded.anchors) == [3, 6]
