"""Late inputs: rewards that were deferred, and results of tool calls that do not block.

A session goes on without them, and hears them between two of its outputs:

- Without `lag_steps` each is told as it comes, in the order of positions; the next output names it,
  so a re-execution tells it at the same place. A deferred reward is waited for once it would be
  older than `reward_lag_steps_max` steps.
- With `lag_steps` N all that step t caused is told right before step t + N is decided, and nothing
  before: its reward first, then its results in the order of the calls; after that come the answers
  to calls beside the last action that do block. That holds for every reward, deferred or not, so
  which of them the reward service deferred changes nothing: the notice that one is deferred is
  ignored, and enters no chain.

At the session's end all of them are waited for and told, in the same order. At most
`TOOL_RESULTS_OUTSTANDING_MAX` results are outstanding: before a decision that could lead to more,
the session waits, with `lag_steps` for the oldest, which are then told before their time.

What is here is bookkeeping and pure; `SessionMachine` runs the user code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsec.session.io import REWARD, REWARD_MISSING, TOOL_RESULT, Call, Called, Input, Stepped
from dsec_contracts import keys
from dsec_contracts.keys import CALLS_PER_TURN_MAX
from dsec_contracts.reward import CAUSE_BYTES

TOOL_RESULTS_OUTSTANDING_MAX = 256
"""Results that a session has not been told yet, of calls that do not block."""
_ROOM = TOOL_RESULTS_OUTSTANDING_MAX - CALLS_PER_TURN_MAX
"""With so many outstanding one more decision is within the bound, whatever it calls."""


@dataclass(slots=True)
class LateReward:
    """A reward that the agent was not told yet, with what it is told beside it."""

    stepped: Stepped
    """Its step: published again if nobody answers it."""
    info: Any
    """The environment's, a copy."""
    final: Any
    """The final observation, where the step ended an episode."""
    given: Input | None = None
    """The reward, or that there is none, if it came before its time."""

    @property
    def step(self) -> int:
        """The step that caused it."""
        return self.stepped.step


@dataclass(slots=True)
class LateResult:
    """A result that the agent was not told yet."""

    turn: Called
    """Published again if nobody answers."""
    index: int
    given: Input | None = None
    """It, if it came before its time."""

    @property
    def step(self) -> int:
        """The step that caused it."""
        return self.turn.step

    @property
    def ordinal(self) -> int:
        """Results of a session are in the order of these."""
        return keys.call_ordinal(self.turn.step, self.turn.turn, self.index)


class Late:
    """The late inputs of one session that are outstanding."""

    __slots__ = ("lag_steps", "results", "reward_lag_steps_max", "rewards")

    def __init__(self, lag_steps: int | None, reward_lag_steps_max: int) -> None:
        self.lag_steps = lag_steps
        self.reward_lag_steps_max = reward_lag_steps_max
        self.rewards: dict[int, LateReward] = {}
        """By step, in their order."""
        self.results: dict[int, LateResult] = {}
        """By ordinal, in their order."""

    def owe_reward(self, stepped: Stepped, info: Any, final: Any) -> None:
        """The reward of a step comes later."""
        self.rewards[stepped.step] = LateReward(stepped, info, final)

    def owe_results(self, turn: Called, names: frozenset[str]) -> None:
        """The results of those calls of a turn come later whose tools have these names."""
        for index, call in enumerate(turn.calls):
            if call.name in names:
                result = LateResult(turn, index)
                self.results[result.ordinal] = result

    def find(self, given: Input) -> LateReward | LateResult | None:
        """What an input is the answer to. None: it is foreign, stale, or came before."""
        if given.kind == TOOL_RESULT:
            result = self.results.get(given.ordinal)
            if result is None or result.given is not None or result.turn.turn_hash != given.cause:
                return None
            return result
        if given.kind not in (REWARD, REWARD_MISSING):
            return None
        reward = self.rewards.get(given.ordinal)
        if reward is None or reward.given is not None:
            return None
        return reward if reward.stepped.chain[:CAUSE_BYTES] == given.cause else None

    def settle(self, owed: LateReward | LateResult) -> None:
        """The agent is being told."""
        if isinstance(owed, LateReward):
            del self.rewards[owed.step]
        else:
            del self.results[owed.ordinal]

    def due(self, step: int, *, ending: bool) -> LateReward | LateResult | None:
        """What the agent has to be told first before `step` is decided, or, at the session's end,
        at all. Only with `lag_steps`; None also while that has not come."""
        if self.lag_steps is None:
            return None
        limit = step - self.lag_steps
        reward = next(iter(self.rewards.values()), None)
        if reward is not None and not ending and reward.step > limit:
            reward = None
        result = next(iter(self.results.values()), None)
        if result is not None and not ending and result.step > limit and not self._full:
            result = None
        owed: LateReward | LateResult | None = result
        if reward is not None and (result is None or reward.step <= result.step):
            owed = reward
        return owed if owed is not None and owed.given is not None else None

    def lacks(self, step: int, *, ending: bool) -> bool:
        """Whether something has to come before `step` may be decided, or before the end."""
        limit = step - (self.lag_steps or self.reward_lag_steps_max)
        for reward in self.rewards.values():
            if not ending and reward.step > limit:
                break
            if reward.given is None:
                return True
        over = len(self.results) - _ROOM
        limit = limit if self.lag_steps is not None else -1
        for n, result in enumerate(self.results.values()):
            if not ending and result.step > limit and n >= over:
                break
            if result.given is None:
                return True
        return False

    @property
    def _full(self) -> bool:
        return len(self.results) > _ROOM

    # -- in an anchor --------------------------------------------------------------------------

    def outstanding(self) -> dict[str, Any]:
        """What is outstanding, as plain values. What came and was not told is left out: no output
        names it, so a restart gives it again from the log."""
        turns: dict[tuple[int, int], list[Any]] = {}
        for owed in self.results.values():
            turn = owed.turn
            place = turn.step, turn.turn
            turns.setdefault(place, [plain_turn(turn), []])[1].append(owed.index)
        return {
            "rewards": [list(r.stepped._replace(called=None)) for r in self.rewards.values()],
            "turns": list(turns.values()),
        }

    def told(self) -> list[Any]:
        """What the agent is told beside each reward: objects of the environment's."""
        return [(owed.info, owed.final) for owed in self.rewards.values()]

    def restore(self, outstanding: dict[str, Any], told: list[Any]) -> None:
        """Take back what `outstanding` and `told` gave."""
        for fields, (info, final) in zip(outstanding["rewards"], told, strict=True):
            self.owe_reward(Stepped(*fields), info, final)
        for fields, indexes in outstanding["turns"]:
            turn = turn_of_plain(fields)
            for index in indexes:
                result = LateResult(turn, index)
                self.results[result.ordinal] = result

    # -- what nobody answers -------------------------------------------------------------------

    def unanswered_steps(self) -> list[Stepped]:
        """The steps whose rewards did not come yet."""
        return [owed.stepped for owed in self.rewards.values() if owed.given is None]

    def unanswered_turns(self) -> list[Called]:
        """The turns of which results did not come yet."""
        turns = {
            (owed.turn.step, owed.turn.turn): owed.turn
            for owed in self.results.values()
            if owed.given is None
        }
        return list(turns.values())


def plain_turn(turn: Called) -> list[Any]:
    """A turn as plain values."""
    return [*turn._replace(calls=()), [list(call) for call in turn.calls]]


def turn_of_plain(fields: list[Any]) -> Called:
    """The turn that `plain_turn` told."""
    step, turn, inputs, _, turn_hash, cause, calls = fields
    return Called(step, turn, inputs, tuple(Call(*call) for call in calls), turn_hash, cause)
