"""What an agent is told beside what its `step` is asked: its methods for that, looked up once when
it is made, and what each of them is given.

All of it is user code, the looking up included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsec.session.awaited import offer_call
from dsec.session.curriculum import OPTION, Curriculum
from dsec.session.io import Input, Stepped, reward_components
from dsec.session.stops import Stop, run_user, stop_of

Hook = Callable[..., Any]


class Hooks:
    """The hooks of one agent. Without an agent there are none, and nobody is told anything."""

    __slots__ = ("_episode_start", "_missing", "_reward", "_tool_result")

    def __init__(self) -> None:
        self._episode_start: Hook | None = None
        self._reward: Hook | None = None
        self._missing: Hook | None = None
        self._tool_result: Hook | None = None

    def bind(self, agent: Any, *, may_call: bool, may_await: bool) -> None:
        """Look up the hooks of an agent.

        Args:
            may_call: it has tools, and hears of their results.
            may_await: its `step` may await them, with `self.call`.
        """
        self._episode_start = getattr(agent, "on_episode_start", None)
        self._reward = getattr(agent, "on_reward", None)
        self._missing = getattr(agent, "on_reward_missing", None)
        if may_call:
            if may_await:
                offer_call(agent)
            self._tool_result = getattr(agent, "on_tool_result", None)

    def release(self) -> None:
        """Let go of the agent."""
        self._episode_start = self._reward = self._missing = self._tool_result = None

    @property
    def hears_results(self) -> bool:
        """Whether anybody is told of the results of tools."""
        return self._tool_result is not None

    def begin_episode(self, episode: int) -> None:
        """An episode begins.

        Raises:
            Stop: what the agent raised.
        """
        if self._episode_start is not None:
            run_user("agent_raised", self._episode_start, episode)

    def tell_reward(
        self,
        given: Input,
        last: Stepped,
        env_info: Any,
        final: Any,
        curriculum: Curriculum | None,
    ) -> None:
        """A reward came.

        Args:
            last: its step.
            env_info, final: what the environment said with that step, and the last observation of
                an episode that it ended.

        Raises:
            Stop: what the agent raised.
        """
        if self._reward is None:
            return
        told: dict[str, Any] = {
            "step": given.ordinal,
            "episode": last.episode,
            "terminated": last.terminated,
            "truncated": last.truncated,
            "components": reward_components(given.ordinal, given.fact),
            "final_observation": final,
        }
        if curriculum is not None:
            told[OPTION] = curriculum.of(last.episode)
        info = {**env_info, "dsec": told} if env_info else {"dsec": told}
        try:
            self._reward(given.value, last.terminated or last.truncated, info)
        except MemoryError:
            raise
        except BaseException as error:
            raise stop_of("agent_raised", error) from error

    def tell_missing(self, given: Input) -> None:
        """A reward will not come.

        Raises:
            Stop: the notice says that the session cannot go on; or what the agent raised.
        """
        if given.fatal:
            raise Stop(given.code, given.message)
        if self._missing is not None:
            run_user("agent_raised", self._missing, given.ordinal, given.code)

    def tell_result(self, call_id: str, result: Any) -> None:
        """A tool answered.

        Raises:
            Stop: what the agent raised.
        """
        if self._tool_result is not None:
            run_user("agent_raised", self._tool_result, call_id, result)
