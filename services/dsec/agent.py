"""`dsec.Agent`: the optional base class of agents, where their hooks are written down.

Agents are duck-typed: a class with `__init__(session_config)` and `step(observation)` is one. The
hooks below are called only where a class defines them, so the base class defines none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsec.session.awaited import call
from dsec.session.state_anchor import WHOLE, StateAnchor


class Agent:
    """An agent of one session. Every hook is optional but `step`.

    * `step(observation) -> dict`: `action`, and optionally `action_params`, `provenance` and
      `extras` (recorded, not hashed: log-probabilities, values, token ids). May be `async def`.
      With `tool_calls` and no `action` the environment stands still: once the results are in,
      `step` is called again with the same observation, at most `tool_turns_max` times. With both,
      the environment steps, and the results come before the next decision.
    * In an `async def step`, `await self.call(name, arguments)` calls a tool that blocks and gives
      what `on_tool_result` would be told; each is a tool turn. Nothing else can be awaited.
    * `on_tool_result(tool_id: str, result)`: one call's result, in the order of the calls, after
      the reward where the calls came with an action. `tool_id` is `call_{step}_{turn}_{index}`,
      whatever id the agent gave. A failed call's result is `{"error": {"code", "message",
      "retryable"}}`.
    * `on_reward(reward: float, done: bool, info: dict)`: `info["dsec"]` has `step`, `episode`,
      `terminated`, `truncated`, `components` and `final_observation`; and, where the session has
      one, `curriculum_level`.
    * `on_reward_missing(step: int, code: str)`: in place of `on_reward`, where none will come.
    * `on_episode_start(episode: int)`
    * `on_policy(version: str, state)`: the weights the session was requested with.
    * `get_state()` and `set_state(state)` (or `load_state(state)`): all that `step` depends on, for
      anchors. An agent without them is captured whole, by pickle. What `get_state` returns is
      compared when the session is re-executed, if it is made of plain values and arrays.
    * With `state_anchor` in what `step` returns an anchor is taken behind that step: `True`, a
      state for `set_state`, or what `create_state_anchor` gives.
    """

    def __init__(self, session_config: dict[str, Any]) -> None:
        """Keep the configuration: `params`, `observation_space`, `action_space`, `tools`,
        `resource_profile`, `max_steps`, `seed` (derived), `anchor_id`; `curriculum_level` where the
        session has one."""
        self.session_config = session_config

    def step(self, observation: Any) -> dict[str, Any]:
        """Decide. Must be defined by the agent."""
        raise NotImplementedError(f"{type(self).__name__} must define step(observation)")

    call = staticmethod(call)

    def create_state_anchor(self, state: Any = WHOLE, tags: Iterable[str] = ()) -> StateAnchor:
        """What to return as `state_anchor`, so that the session's state is captured behind this
        step: environment, chance and position, and of the agent `state`.

        Args:
            state: what `set_state` takes back; by default what `get_state` gives behind the step,
                or, without these two, the agent as it is.
            tags: up to 13, each of 1 to 64 printable characters, for people: `dsec anchors list`
                shows them. Others end the session, `agent_invalid`, once they are returned.
        """
        return StateAnchor(state, tuple(tags))

    _create_state_anchor = create_state_anchor
