"""What a session is told: the inputs that the world gives it, each in its turn.

The third of the session machine's four layers (see `machine.py`). An input that is due is named for
the next output and told to the agent; what is not due, or was given before, changes nothing. What
comes late is looked after in `late.py`, what answers a tool call in `tools.py`.
"""

from __future__ import annotations

import copy
from typing import cast

from dsec.session.anchors import Anchoring
from dsec.session.course import Course
from dsec.session.io import (
    AWAITS_LATE,
    AWAITS_RESULTS,
    CANCEL,
    CURRICULUM,
    REWARD,
    REWARD_DEFERRED,
    REWARD_MISSING,
    TOOL_RESULT,
    Called,
    Ended,
    Input,
    Stepped,
)
from dsec.session.late import Late, LateResult, LateReward
from dsec.session.stops import Stop, run_user
from dsec.session.tools import Answers, result_of
from dsec.session.turns import Turns
from dsec_contracts import keys


class Telling(Course):
    """The inputs of one session."""

    __slots__ = ()

    def deliver(self, given: Input) -> Ended | None:
        """Give the session an input. What is not due, or was given before, changes nothing."""
        if self.ended is not None or self.chain is None:
            return None
        if given.kind == CANCEL:
            self._inputs.append(given.name())
            return self._end("cancelled", given.code, given.message)
        if given.kind == CURRICULUM:
            if self._curriculum is not None:
                self._curriculum.offer(given)
            return None
        if given.ordinal != self.awaiting or given.cause != self.chain[:16]:
            return self._hear(given)
        self.awaiting = None
        self._caused_by = given.kind
        self._inputs.append(given.name())
        self._interposition.enter(self._chance)
        try:
            if given.kind == REWARD:
                last = cast(Stepped, self.last)
                self._hooks.tell_reward(given, last, self._info, self._final, self._curriculum)
            elif given.kind == REWARD_MISSING:
                self._hooks.tell_missing(given)
            elif given.kind == REWARD_DEFERRED:
                self._defer()
        except Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)
        self._final = None
        if self._late is not None:
            return self._settle(self._late)
        if self._turns is not None and (answers := self._turns.answers) is not None:
            self.awaiting = AWAITS_RESULTS
            return self._hear_due(answers)
        return self._end_if_done()

    # -- inside --------------------------------------------------------------------------------

    def _hear(self, given: Input) -> Ended | None:
        """Take a late input, or the answer to a tool call. Answers to the calls of a step are heard
        after its reward, whichever came first."""
        late, answers = self._late, self._answers
        if late is not None and (owed := late.find(given)) is not None:
            owed.given = given
            if late.lag_steps is None and (ended := self._tell(late, owed, given)) is not None:
                return ended
            return self._settle(late) if self.awaiting == AWAITS_LATE else None
        if answers is None or given.kind != TOOL_RESULT:
            return None
        answers.offer(given)
        if self.awaiting != AWAITS_RESULTS:
            return None
        return self._hear_due(answers) if late is None else self._settle(late)

    def _hear_due(self, answers: Answers) -> Ended | None:
        """Tell the agent the answers whose turn it is."""
        self._interposition.enter(self._chance)
        try:
            while (due := answers.due()) is not None:
                call_id, given = due
                self._inputs.append(given.name())
                if self._async is not None and self._async.coroutine is not None:
                    self._async.resume_with(result_of(given))
                else:
                    self._hooks.tell_result(call_id, result_of(given))
        except Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)
        if not answers.complete:
            return None
        self.awaiting = None
        cast(Turns, self._turns).answers = None
        self._caused_by = answers.last_key
        return self._end_if_done()

    def _settle(self, late: Late) -> Ended | None:
        """Between two outputs: tell what is due, and find out what the session waits for next."""
        if (ended := self._tell_due(late)) is not None:
            return ended
        if late.lacks(self._step, ending=self._ending):
            self.awaiting = AWAITS_LATE
            return None
        if (answers := self._answers) is not None:
            self.awaiting = AWAITS_RESULTS
            return self._hear_due(answers)
        self.awaiting = None
        return self._end_if_done()

    def _tell_due(self, late: Late) -> Ended | None:
        """Tell the agent what is due and has come."""
        ending = self._ending
        while (owed := late.due(self._step, ending=ending)) is not None:
            ended = self._tell(late, owed, cast(Input, owed.given))
            if ended is not None:
                return ended
        return None

    def _tell(self, late: Late, owed: LateReward | LateResult, given: Input) -> Ended | None:
        """Tell the agent a late input."""
        late.settle(owed)
        self._inputs.append(given.name())
        self._interposition.enter(self._chance)
        try:
            if isinstance(owed, LateResult):
                turn = owed.turn
                self._caused_by = keys.tool_result(turn.step, turn.turn, owed.index)
                self._hooks.tell_result(turn.calls[owed.index].id, result_of(given))
            elif given.kind == REWARD:
                self._caused_by = keys.reward(owed.step)
                curriculum = self._curriculum
                self._hooks.tell_reward(given, owed.stepped, owed.info, owed.final, curriculum)
            else:
                self._caused_by = keys.reward_missing(owed.step)
                self._hooks.tell_missing(given)
        except Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)
        return None

    def _defer(self) -> None:
        """The reward of the last step comes later."""
        if self._late is None:
            self._late = Late(None, self.config.reward_lag_steps_max)
        self._owe_reward(self._late)
        if self._anchors is None:
            self._anchors = Anchoring(self._program.agent.anchors)
        self._anchors.delayed(self._step, self.config.reward_lag_steps_max)

    def _owe_reward(self, late: Late) -> None:
        """Keep what the agent will be told beside the reward of the last step."""
        # The environment may write over what it returned.
        told = run_user("env_raised", copy.deepcopy, (self._info, self._final))
        late.owe_reward(cast(Stepped, self.last), *told)

    def _rest(self, late: Late, taken: Stepped | Called) -> None:
        """After an output: what the session waits for, where not every reward is awaited at once.

        A failure here comes after the output, which happened.
        """
        if late.lag_steps is not None and type(taken) is Stepped:
            self._caused_by = keys.step(taken.step)
            if self._per_episode and taken.closes_from is None:
                self._await(late)
                return
            try:
                self._owe_reward(late)
            except Stop as stop:
                self._pending_stop = stop
                late.owe_reward(taken, {}, None)
            self._final = None
        self._await(late)

    def _await(self, late: Late) -> None:
        """Say what the session waits for, behind an output. Without `lag_steps` that is the reward
        of a step, and behind it what `_settle` finds."""
        if late.lag_steps is None and self.awaiting is not None and self.awaiting >= 0:
            return
        self.awaiting = None if self._answers is None else AWAITS_RESULTS
        if late.lacks(self._step, ending=self._ending):
            self.awaiting = AWAITS_LATE
