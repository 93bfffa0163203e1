"""A session that does something else when it is executed again than its log says, after its worker
died: it ends with that as its reason, and nothing that was published is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.env_runtime.conftest import World, code_of

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

STEPS, KILLED_AT, PARTS_AT = 60, 12, 5
AGENT = f"""
import pathlib
class Agent:
    def __init__(self, config):
        births = pathlib.Path(config["params"]["births"])
        self.born, self.n = len(births.read_text()), -1
        births.write_text("x" * (self.born + 1))
    def step(self, observation):
        self.n += 1
        return {{"action": int(self.n == {PARTS_AT} and self.born > 0)}}
"""
ENV = """
import time
from gymnasium.envs.classic_control import CartPoleEnv
class Env(CartPoleEnv):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)
"""


@pytest.mark.parametrize("deterministic", [True, False])
async def test_what_does_not_do_again_what_the_log_says_ends_with_that_reason(
    world: World, tmp_path: Path, deterministic: bool
) -> None:
    births = tmp_path / "births"
    births.write_text("")
    world.record()
    world.answering = True
    first = await world.worker("w1")
    code = code_of(AGENT, ENV, params={"births": str(births)}, deterministic_mode=deterministic)
    request = await world.run_session(code, max_steps=STEPS)
    await world.stepped(request.session_id, KILLED_AT)
    await first.close()
    del world.runs["w1"]
    before = {row.step: row.fact for row in world.steps(request.session_id)}

    await world.worker("w2")
    await world.place(request, "w2", 2, previous_lane="w1-0")
    ended = await world.ended(request.session_id)
    after = {row.step: row.fact for row in world.steps(request.session_id)}
    assert {step: after[step] for step in before} == before, "what is published counts"
    if not deterministic:  # its spec allows a lower level: the recorded actions drive it
        assert (ended.fact.status, ended.fact.steps) == ("completed", STEPS)
        return
    assert (ended.fact.status, ended.fact.code) == ("failed", "diverged_on_restart")
    assert ended.fact.steps == len(after) == len(before) >= KILLED_AT
    assert f"at step {PARTS_AT}, field action: expected 0, got 1" in ended.circumstance.message
    verdict = await world.verdict(request)
    assert verdict.first_divergence is not None
    found = verdict.first_divergence.step, verdict.first_divergence.field
    assert (verdict.ok, found) == (False, (PARTS_AT, "action")), "it says the same to whoever asks"
