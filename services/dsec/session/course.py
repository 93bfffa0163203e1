"""The course of a session: how far it is, what it was given since its last output, what it waits
for, when an episode is over and when all of it is.

The second of the session machine's four layers (see `machine.py`). It begins episodes and ends the
session; what leads there, a step or an input, the layers above know.
"""

from __future__ import annotations

import copy
from typing import Literal

from dsec.session.anchors import Anchoring
from dsec.session.chain import chain_end
from dsec.session.curriculum import Curriculum
from dsec.session.facts import NULL, listed
from dsec.session.hosting import Hosting
from dsec.session.interposition import Interposition
from dsec.session.io import Called, Ended, SessionConfig, Stepped
from dsec.session.late import Late
from dsec.session.program import Program
from dsec.session.raised import MESSAGE_CHARS_MAX
from dsec.session.stops import Stop, run_user
from dsec.session.tools import Answers
from dsec_contracts import keys


class Course(Hosting):
    """Where one session stands, and its end."""

    __slots__ = (
        "_anchors",
        "_caused_by",
        "_done_episodes",
        "_episode",
        "_episode_begun",
        "_episode_first",
        "_inputs",
        "_late",
        "_pending_stop",
        "_per_episode",
        "_step",
        "awaiting",
        "chain",
        "ended",
        "last",
    )

    def __init__(
        self, program: Program, config: SessionConfig, interposition: Interposition | None
    ) -> None:
        super().__init__(program, config, interposition)
        self._anchors = Anchoring.of(program.agent.anchors)
        self._late: Late | None = None
        """Late inputs; None while there can be none."""
        turns = self._turns
        if (turns is not None and turns.late_names) or config.lag_steps is not None:
            self._late = Late(config.lag_steps, config.reward_lag_steps_max)
        self._step = 0
        self._episode = 0
        self._done_episodes = 0
        self._episode_begun = False
        self._per_episode = config.reward_per_episode
        self._episode_first = 0
        """The first step of the episode at hand; kept where that is rewarded as a whole."""
        self._inputs: list[bytes] = []
        """The names of those delivered since the last step."""
        self._caused_by = ""
        self._pending_stop: Stop | None = None
        """Of a step that happened: the session ends behind its reward."""
        self.chain: bytes | None = None
        self.awaiting: int | None = None
        """The step whose reward the session waits for; `AWAITS_RESULTS` while it waits for tools
        alone, `AWAITS_LATE` for late inputs."""
        self.ended: Ended | None = None
        self.last: Stepped | None = None
        """The step taken last: published again if nobody answers it."""

    @property
    def steps(self) -> int:
        """Environment steps taken."""
        return self._step

    @property
    def episodes(self) -> int:
        """Episodes that are over."""
        return self._done_episodes

    @property
    def called(self) -> Called | None:
        """The tool calls that the session waits for: made again if nobody answers them."""
        answers = self._answers
        return None if answers is None else answers.called

    @property
    def _answers(self) -> Answers | None:
        return None if self._turns is None else self._turns.answers

    @property
    def late(self) -> Late | None:
        """The late inputs that are outstanding; None where there are none."""
        late = self._late
        return late if late is not None and (late.rewards or late.results) else None

    def asks(self, turn: Called) -> bool:
        """Whether an answer to a turn of tool calls is outstanding."""
        return self.called is turn or (
            self._late is not None and any(turn is one for one in self._late.unanswered_turns())
        )

    # -- inside --------------------------------------------------------------------------------

    def _take_inputs(self) -> bytes:
        inputs, self._inputs = self._inputs, []
        return listed(inputs)

    def _next_episode(self, room_bytes: int) -> tuple[bytes, bytes]:
        """Begin the next episode: the fact of its reset and the observation.

        A reset that fails ends the session, but the step before it happened: it is recorded, gets
        its reward, and the end comes after that.
        """
        try:
            # The reset may overwrite what the environment returned with the last step.
            self._final, self._info = run_user(
                "env_raised", copy.deepcopy, (self._observation, self._info)
            )
            self._episode += 1
            self._episode_begun = False
            if self._curriculum is not None:
                self._take_level(self._curriculum)
            observation, info = self._reset(self._episode)
            encoded = self._encode_observation(observation)
            fact = self._reset_fact(encoded, info, room_bytes)
        except Stop as stop:
            self._pending_stop = stop
            return NULL, b""
        self._observation, self._prior = observation, encoded
        return fact, encoded

    def _take_level(self, curriculum: Curriculum) -> None:
        """The level of the episode that begins."""
        told_from = self._episode - 1
        if self._late is not None and self._late.rewards:
            told_from = min(owed.stepped.episode for owed in self._late.rewards.values())
        if (given := curriculum.begin(self._episode, told_from)) is not None:
            self._inputs.append(given.name())

    def _await_episode(self, taken: Stepped) -> None:
        """Of an episode that is rewarded as a whole only the last step has a reward to wait for."""
        if taken.terminated or taken.truncated or self._done:
            self.last = taken._replace(closes_from=self._episode_first)
            self._episode_first = taken.step + 1
        else:
            self.awaiting, self._caused_by = None, keys.step(taken.step)

    @property
    def _done(self) -> bool:
        most = self.config.episodes_max
        return self._step >= self.config.max_steps or (
            most is not None and self._done_episodes >= most
        )

    @property
    def _ending(self) -> bool:
        """No step follows."""
        return self._pending_stop is not None or self._done

    def _end_if_done(self) -> Ended | None:
        if (stop := self._pending_stop) is not None:
            return self._end("failed", stop.code, str(stop))
        if not self._done:
            return None
        most = self.config.episodes_max
        by_episodes = most is not None and self._done_episodes >= most
        return self._end("completed", "episodes_max" if by_episodes else "max_steps", "")

    def _end(
        self, status: Literal["completed", "failed", "cancelled"], code: str, message: str
    ) -> Ended:
        inputs = self._take_inputs()
        steps, episodes = self._step, self._done_episodes
        chain = chain_end(self.chain, status, code, steps, episodes, inputs)
        self.awaiting = self._late = None
        if self._turns is not None:
            self._turns.answers = None
        self.ended = Ended(
            status, code, steps, episodes, inputs, chain, message[:MESSAGE_CHARS_MAX]
        )
        if status == "failed":
            # At once, not when the end is published: the sessions that come after it in this tick
            # need the files and the memory that it may hold.
            self._release_agent()
        return self.ended
