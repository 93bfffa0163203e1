"""An `async def step` under way: it has decided, or it awaits a call, which is a tool turn."""

from __future__ import annotations

from typing import Any

from dsec.session.awaited import Asked
from dsec.session.stops import Stop
from dsec.session.turns import Turns


class AsyncStep:
    """The decisions of one agent whose `step` is a coroutine function."""

    __slots__ = ("_returned", "coroutine")

    def __init__(self) -> None:
        self.coroutine: Any = None
        """What awaits a call; None: no decision is under way."""
        self._returned: Any = None

    def release(self) -> None:
        """Let go of the agent."""
        self.coroutine = self._returned = None

    def resume_with(self, result: Any) -> None:
        """What the call came to that is awaited."""
        self._returned = result

    def drive(self, agent: Any, observation: Any, turns: Turns | None) -> Any:
        """The decision, or the call that it needs first, as a decision. Runs user code.

        Raises:
            Stop: it awaits something else than a call that blocks.
        """
        coroutine, returned = self.coroutine, self._returned
        self.coroutine = self._returned = None
        if coroutine is None:
            coroutine = agent.step(observation)
        try:
            asked = coroutine.send(returned)
        except StopIteration as finished:
            return finished.value
        self.coroutine = coroutine
        if type(asked) is not Asked:
            told = "step() awaited something other than the session's own calls"
        elif turns is None:
            told = "step() awaited call(), and the agent spec declares no `tools`"
        elif asked.name in turns.late_names:
            told = f"step() awaited {asked.name}, which is declared with blocking: false"
        else:
            return {"tool_calls": [{"name": asked.name, "arguments": asked.arguments}]}
        raise Stop("agent_invalid", told)
