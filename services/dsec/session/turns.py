"""The tool turns of one session: the calls that its agent makes, and the answers it waits for.

A turn is all the calls of one decision. Without an action the environment stands still; the step
that comes at last names all calls that were made for it.
"""

from __future__ import annotations

from typing import Any

from dsec.session.documents import AgentDocument
from dsec.session.facts import EMPTY_LIST, listed
from dsec.session.io import Call, Called, called, step_cause
from dsec.session.stops import Stop, short, stop_of
from dsec.session.tools import Answers, calls_of
from dsec_contracts import keys


class Turns:
    """Of a session whose agent may call tools. What of it an anchor needs is in the last step."""

    __slots__ = ("_calls", "_named", "_names", "_turns_max", "answers", "late_names", "turn")

    def __init__(self, names: tuple[str, ...], late_names: frozenset[str], turns_max: int) -> None:
        self._names = names
        self.late_names = late_names
        """Of tools whose calls do not block."""
        self._turns_max = turns_max
        self.turn = 0
        """The number of the next turn within the step."""
        self._calls: list[bytes] = []
        """The calls since the last step, as the next one names them."""
        self._named = 0
        """How many of the inputs since the last step a turn has named already."""
        self.answers: Answers | None = None
        """Those that the session waits for."""

    @classmethod
    def of(cls, agent: AgentDocument) -> Turns | None:
        """None where the agent declares no tools."""
        names = agent.tool_names()
        return cls(names, agent.late_tool_names(), agent.tool_turns_max) if names else None

    @property
    def under_way(self) -> bool:
        """Whether there are calls that no step has named yet."""
        return bool(self._calls)

    def asked(self, decision: Any, step: int) -> tuple[dict[str, Any], tuple[Call, ...]]:
        """The rest of a decision and its calls, for the step that comes next.

        Raises:
            Stop: they cannot be called.
        """
        try:
            rest = dict(decision)
            calls = calls_of(rest, step, self.turn, self._names)
        except MemoryError:
            raise
        except BaseException as error:  # no mapping, or one of the user's own class
            raise stop_of("agent_invalid", error) from error
        rest.pop("tool_calls", None)
        self._calls.extend([call.named() for call in calls])
        return rest, calls

    def alone(
        self,
        step: int,
        calls: tuple[Call, ...],
        rest: dict[str, Any],
        inputs: list[bytes],
        chain: bytes,
        caused_by: str,
    ) -> Called:
        """A turn in which the environment stands still.

        Args:
            rest: of the decision; it must be empty.
            inputs: the names of those delivered since the last step.

        Raises:
            Stop: there is something beside the calls, or there were too many turns.
        """
        if rest:
            raise Stop(
                "agent_invalid",
                f"step() returned {short(next(iter(rest)))} beside tool_calls and without an "
                "action; of a tool turn nothing else is recorded yet",
            )
        if self.turn >= self._turns_max:
            raise Stop(
                "tool_turns_max",
                f"step {step}: {self._turns_max} tool turns without an action, which is "
                "tool_turns_max",
            )
        fresh = inputs[self._named :]
        self._named = len(inputs)
        made = called(step, self.turn, listed(fresh), calls, chain, step_cause(step, caused_by))
        self.turn += 1
        self.expect(made)
        return made

    def beside(self, step: int, turn: int, calls: tuple[Call, ...], chain: bytes) -> Called:
        """The turn `turn` of a step that was taken with an action: it has named the inputs."""
        made = called(step, turn, EMPTY_LIST, calls, chain, keys.step(step).encode())
        self.expect(made)
        return made

    def expect(self, turn: Called) -> None:
        """Wait for the answers to those calls of a turn that block, if any does."""
        self.answers = Answers.of(turn, self.late_names)

    def take_calls(self) -> bytes:
        """The calls since the last step, as the one that is taken names them."""
        if not self._calls:
            return EMPTY_LIST
        calls, self._calls = self._calls, []
        self.turn = self._named = 0
        return listed(calls)
