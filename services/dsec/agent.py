"""`dsec.Agent`: the optional base class of agents, where their hooks are written down.

Agents are duck-typed: a class with `__init__(session_config)` and `step(observation)` is one. The
hooks below are called only where a class defines them, so the base class defines none of them.
"""

from __future__ import annotations

from typing import Any


class Agent:
    """An agent of one session. Every hook is optional but `step`.

    * `step(observation) -> dict`: `action`, and optionally `action_params`, `provenance` and
      `extras` (recorded, not hashed: log-probabilities, values, token ids). May be `async def`.
      With `tool_calls` and no `action` the environment stands still: once the results are in,
      `step` is called again with the same observation, at most `tool_turns_max` times. With both,
      the environment steps, and the results come before the next decision.
    * `on_tool_result(tool_id: str, result)`: one call's result, in the order of the calls, after
      the reward where the calls came with an action. `tool_id` is `call_{step}_{turn}_{index}`,
      whatever id the agent gave. A failed call's result is `{"error": {"code", "message",
      "retryable"}}`.
    * `on_reward(reward: float, done: bool, info: dict)`: `info["dsec"]` has `step`, `episode`,
      `terminated`, `truncated`, `components` and `final_observation`.
    * `on_reward_missing(step: int, code: str)`: in place of `on_reward`, where none will come.
    * `on_episode_start(episode: int)`
    * `on_policy(version: str, state)`: the weights the session was requested with.
    """

    def __init__(self, session_config: dict[str, Any]) -> None:
        """Keep the configuration: `params`, `observation_space`, `action_space`, `tools`,
        `resource_profile`, `max_steps`, `seed` (derived), `anchor_id`."""
        self.session_config = session_config

    def step(self, observation: Any) -> dict[str, Any]:
        """Decide. Must be defined by the agent."""
        raise NotImplementedError(f"{type(self).__name__} must define step(observation)")

    def create_state_anchor(self, *arguments: Any, **keywords: Any) -> Any:
        """Capture the session's state. Not implemented yet: sessions restart from step 0."""
        raise NotImplementedError(
            "create_state_anchor is not implemented yet: leave it out; a session that loses its "
            "worker is re-executed from step 0"
        )

    _create_state_anchor = create_state_anchor
