"""The session machine: takes inputs, yields outputs, does no I/O.

The same machine runs live (inputs from the bus), after a crash (inputs from the log up to its
tail) and in verification (inputs from the log to the end). User code, agent and environment, runs
inside it and nowhere else.

    machine = SessionMachine(program, config)
    machine.start()              -> Started or Ended
    machine.step()               -> Stepped, Called or Ended
    machine.deliver(input)       -> Ended or None; repeated, stale and foreign inputs are ignored

After a step the machine waits for the input of that step (its reward, or the notice that there
will be none, or that it comes later: see `late.py`); `awaiting` says so. User code that raises ends
its session and nothing else; only `MemoryError` leaves the machine, since nobody can tell whose
memory it was.

Here is the order of things: what is called when, what is awaited, when it is over. Its parts have
modules of their own: what the agent decided (`decision.py`, `async_step.py`) and is told
(`hooks.py`), what the environment returned (`encoding.py`), what outputs say (`facts.py`), tool
turns (`turns.py`), late inputs (`late.py`), anchors (`anchors.py`), and what user code that fails
makes of the session (`stops.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, cast

from dsec.session.adapters.gymnasium import GymnasiumAdapter
from dsec.session.agent_config import agent_config
from dsec.session.anchors import Anchoring, OnAnchor, restorer
from dsec.session.async_step import AsyncStep
from dsec.session.chain import chain_end, chain_next, chain_start
from dsec.session.chance import Chance
from dsec.session.curriculum import OPTION, Curriculum
from dsec.session.decision import checked
from dsec.session.encoding import ObservationEncoder, encode_info, plain_info
from dsec.session.facts import EMPTY_LIST, EMPTY_MAP, NULL, listed, reset_fact, step_fact
from dsec.session.hooks import Hooks
from dsec.session.interposition import Interposition, PlainInterposition
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
    SessionConfig,
    Started,
    Stepped,
    step_cause,
)
from dsec.session.late import Late, LateResult, LateReward
from dsec.session.program import Determinism, Program
from dsec.session.raised import MESSAGE_CHARS_MAX, told, told_in_a_line
from dsec.session.seeds import derive
from dsec.session.state_anchor import WHOLE, StateAnchor
from dsec.session.stops import Stop, encoded, is_dict, run_user, short, stop_of
from dsec.session.tools import Answers, result_of
from dsec.session.turns import Turns
from dsec_contracts import keys

ROW_BYTES_MAX = 400_000
"""Action, info and extras of one step; observations may be larger, they travel as references."""


class SessionMachine:
    """One session. See the module's text."""

    __slots__ = (
        "_agent",
        "_anchors",
        "_async",
        "_caused_by",
        "_chance",
        "_curriculum",
        "_done_episodes",
        "_encode_observation",
        "_env",
        "_episode",
        "_episode_begun",
        "_episode_first",
        "_final",
        "_given",
        "_hooks",
        "_info",
        "_inputs",
        "_interposition",
        "_late",
        "_observation",
        "_pending_stop",
        "_per_episode",
        "_prior",
        "_program",
        "_step",
        "_turns",
        "awaiting",
        "chain",
        "config",
        "ended",
        "last",
        "on_anchor",
        "recorded_actions",
    )

    def __init__(
        self, program: Program, config: SessionConfig, interposition: Interposition | None = None
    ) -> None:
        self._program = program
        self.config = config
        self._interposition: Interposition = interposition or PlainInterposition()
        self._chance = Chance(derive(config.seed, "chance", config.agent_stream))
        self._env: GymnasiumAdapter
        self._agent: Any = None
        self._given: dict[str, Any] = {}
        """What the agent was made with."""
        self._anchors = Anchoring.of(program.agent.anchors)
        self._hooks = Hooks()
        self._turns = turns = Turns.of(program.agent)
        """None where the agent may call no tools."""
        self._async = AsyncStep() if program.is_async else None
        self._late: Late | None = None
        """Late inputs; None while there can be none."""
        if (turns is not None and turns.late_names) or config.lag_steps is not None:
            self._late = Late(config.lag_steps, config.reward_lag_steps_max)
        level = config.curriculum_level
        self._curriculum = None if level is None else Curriculum(level)
        self._step = 0
        self._episode = 0
        self._done_episodes = 0
        self._episode_begun = False
        self._observation: Any = None
        self._prior = b""
        self._info: dict[str, Any] = {}
        self._final: Any = None
        self._pending_stop: Stop | None = None
        self._per_episode = config.reward_per_episode
        self._episode_first = 0
        """The first step of the episode at hand; kept where that is rewarded as a whole."""
        self._inputs: list[bytes] = []
        self._caused_by = ""
        self._encode_observation = ObservationEncoder().encode
        self.chain: bytes | None = None
        self.awaiting: int | None = None
        """The step whose reward the session waits for; `AWAITS_RESULTS` while it waits for tools
        alone, `AWAITS_LATE` for late inputs."""
        self.ended: Ended | None = None
        self.last: Stepped | None = None
        """The step taken last: published again if nobody answers it."""
        self.recorded_actions: Callable[[int], Any] | None = None
        """For a D1 session that is re-executed: the action of a step, in place of the agent's."""
        self.on_anchor: OnAnchor | None = None
        """Called with every anchor, while it is taken."""

    # -- outputs -------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Environment steps taken."""
        return self._step

    @property
    def episodes(self) -> int:
        """Episodes that are over."""
        return self._done_episodes

    @property
    def deterministic(self) -> bool:
        """Whether the agent is re-executed too (D2), or only the environment (D1)."""
        return self._program.agent.deterministic_mode

    @property
    def determinism(self) -> Determinism:
        """See `Program`."""
        return self._program.determinism

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

    def start(self) -> Started | Ended:
        """Make environment and agent, reset, and give chain_0."""
        self._interposition.enter(self._chance)
        try:
            return self._start()
        except Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)

    def step(self) -> Stepped | Called | Ended:
        """Let the agent decide, and the environment step unless the agent wants tools first.

        Must not be called while an input is awaited or after the end.
        """
        if self.ended is not None or self.awaiting is not None or self.chain is None:
            raise RuntimeError("step() while the session waits, before start() or after its end")
        if self._pending_stop is not None:  # of a step that no reward was awaited for
            return cast(Ended, self._end_if_done())
        # Before the session's time goes on: it is told at the same moment whenever it came.
        if self._late is not None and (ended := self._tell_due(self._late)) is not None:
            return ended
        chance = self._chance
        chance.position = self._step
        self._interposition.enter(chance)
        try:
            turns = self._turns
            decision = self._decide()
            taken = self._act(decision) if turns is None else self._act_or_call(turns, decision)
            if self._late is not None:
                self._rest(self._late, taken)
            if self._anchors is not None and type(taken) is Stepped:
                self._take_anchor(self._anchors)
            return taken
        except Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(chance)

    def _take_anchor(self, anchors: Anchoring) -> None:
        """Take an anchor if one is due. The step before it happened, whatever comes of that."""
        try:
            anchors.after_step(self)
        except Stop as stop:
            self._pending_stop = stop

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

    def close(self) -> None:
        """Give up the environment, and a decision that awaits a call. User code runs; what it
        raises is not ours to keep."""
        coroutine = None if self._async is None else self._async.coroutine
        for part in (coroutine, getattr(self, "_env", None)):
            if part is None:
                continue
            self._interposition.enter(self._chance)
            try:
                part.close()
            except MemoryError:
                raise
            except BaseException as error:  # noqa: BLE001 - user code, after the session's end
                self._info = {"close": told(error)}
            finally:
                self._interposition.exit(self._chance)

    # -- inside --------------------------------------------------------------------------------

    def _start(self) -> Started:
        self._env = run_user("env_raised", self._program.make_env)
        observation, info = self._reset(0)
        run_user("agent_raised", self._make_agent)
        late_names = frozenset() if self._turns is None else self._turns.late_names
        if late_names and not self._hooks.hears_results:
            raise Stop(
                "agent_invalid",
                f"the agent has no on_tool_result, and declares {min(late_names)} with "
                "blocking: false: its results would reach nobody",
            )
        encoded = self._encode_observation(observation)
        reset = self._reset_fact(encoded, info, ROW_BYTES_MAX)
        self.chain = chain_start(reset)
        self._observation, self._prior = observation, encoded
        return Started(reset, self.chain, encoded)

    def _make_agent(self, anchor_id: str | None = None) -> None:
        """Make the agent and look up its hooks. All of it is user code, attributes included."""
        config = self.config
        self._given = agent_config(config, self._program.agent, self._env, anchor_id)
        # A copy: the agent may do with its configuration what it likes.
        self._bind(agent := self._program.agent_class(dict(self._given)))
        on_policy = getattr(agent, "on_policy", None) if config.policy_version else None
        if on_policy is not None:
            on_policy(config.policy_version, config.policy_state)

    def _bind(self, agent: Any) -> None:
        self._agent = agent
        may_call, may_await = self._turns is not None, self._async is not None
        self._hooks.bind(agent, may_call=may_call, may_await=may_await)

    def _reset(self, episode: int) -> tuple[Any, dict[str, Any]]:
        seed = derive(self.config.seed, "env", episode)
        curriculum = self._curriculum
        options = None if curriculum is None else {OPTION: curriculum.level}
        return run_user("env_raised", self._env.deterministic_reset, seed, options)  # type: ignore[no-any-return]

    def _reset_fact(self, observation: bytes, info: dict[str, Any], room_bytes: int) -> bytes:
        info_bytes = encode_info(info)
        if len(info_bytes) > room_bytes:
            raise Stop(
                "too_large",
                f"the info of a reset has {len(info_bytes)} bytes; there is room for {room_bytes}",
            )
        return reset_fact(self._state_hash(), observation, info_bytes)

    def _decide(self) -> Any:
        """The agent's dict for the current observation."""
        if not self._episode_begun:
            self._episode_begun = True
            self._hooks.begin_episode(self._episode)
        if self.recorded_actions is not None:
            return self.recorded_actions(self._step)
        try:
            if self._async is None:
                decision = self._agent.step(self._observation)
            else:
                decision = self._async.drive(self._agent, self._observation, self._turns)
        except MemoryError:
            raise
        except BaseException as error:
            raise stop_of("agent_raised", error) from error
        return decision

    def _ask_for_anchor(self, asked: StateAnchor) -> None:
        if asked.state is not WHOLE and restorer(self._agent) is None:
            raise Stop(
                "agent_invalid",
                "state_anchor holds a state, and the agent has no set_state(state) to take it back",
            )
        if self._anchors is None:
            self._anchors = Anchoring(self._program.agent.anchors)
        self._anchors.given = asked

    def _act_or_call(self, turns: Turns, decision: Any) -> Stepped | Called:
        """A step, a turn of tool calls, or a step together with one."""
        if not is_dict(decision):
            return self._act(decision)  # which says what is wrong with it
        step, turn = self._step, turns.turn
        rest, calls = turns.asked(decision, step)
        if not calls:
            return self._act(rest)
        if "action" in rest:
            self._act(rest)
            made = turns.beside(step, turn, calls, cast(bytes, self.chain))
            self._owe_results(turns, made)
            if self.awaiting is None and turns.answers is not None:
                self.awaiting = AWAITS_RESULTS
            self.last = cast(Stepped, self.last)._replace(called=made)
            return self.last
        chain = cast(bytes, self.chain)
        made = turns.alone(step, calls, rest, self._inputs, chain, self._caused_by)
        self._owe_results(turns, made)
        if turns.answers is not None:
            self.awaiting = AWAITS_RESULTS
        else:
            self._caused_by = keys.tool_call(made.step, made.turn)
        return made

    def _owe_results(self, turns: Turns, turn: Called) -> None:
        """Expect the answers to those calls of a turn that do not block."""
        if turns.late_names:
            cast(Late, self._late).owe_results(turn, turns.late_names)

    def _act(self, decision: Any) -> Stepped:
        try:
            action, extras, anchor = checked(decision)
            if anchor is not None:
                self._ask_for_anchor(anchor)
        except MemoryError:
            raise
        except BaseException as error:  # a subclass of dict, a value that has no truth
            raise stop_of("agent_invalid", error) from error
        if type(action) is int and 0 <= action < 24:
            action_bytes = bytes((action,))
        else:
            action_bytes = encoded("agent_invalid", "the action", action)
        try:
            result = self._env.step(action)
        except MemoryError:
            raise
        except BaseException as error:
            raise stop_of("env_raised", error) from error
        try:
            observation, env_reward, terminated, truncated, info = result
            env_reward = float(env_reward)
            terminated, truncated = bool(terminated), bool(truncated)
        except MemoryError:
            raise
        except BaseException as error:
            raise Stop("env_invalid", _no_five(result, error)) from error
        return self._record(
            action_bytes, observation, env_reward, terminated, truncated, info, extras
        )

    def _record(
        self,
        action: bytes,
        observation: Any,
        env_reward: float,
        terminated: bool,
        truncated: bool,
        info: Any,
        extras: bytes,
    ) -> Stepped:
        """The output of a step: its fact, its hash, and a reset where a new episode follows."""
        step, episode, prior = self._step, self._episode, self._prior
        encoded = self._encode_observation(observation)
        state = self._state_hash()
        if type(info) is not dict:
            info = plain_info(info)
        empty = type(info) is dict and not info
        info_bytes = EMPTY_MAP if empty else encode_info(info)
        if len(info_bytes) + len(action) + len(extras) > ROW_BYTES_MAX:
            raise Stop(
                "too_large",
                f"step {step}: action, info and extras have {len(action)}, {len(info_bytes)} and "
                f"{len(extras)} bytes; together they may have {ROW_BYTES_MAX}",
            )
        self._step = step + 1
        self._info = info
        self._observation, self._prior = observation, encoded
        reset, reset_observation = NULL, b""
        if terminated or truncated:
            self._done_episodes += 1
            if self._done:
                self._final = observation
            else:
                room = ROW_BYTES_MAX - len(info_bytes) - len(action) - len(extras)
                reset, reset_observation = self._next_episode(room)
        fact = step_fact(
            step,
            episode,
            self._take_inputs() if self._inputs else EMPTY_LIST,
            EMPTY_LIST if self._turns is None else self._turns.take_calls(),
            action,
            env_reward,
            terminated,
            truncated,
            info_bytes,
            state,
            encoded,
            reset,
        )
        self.chain = chain = chain_next(self.chain, fact)  # type: ignore[arg-type]
        self.awaiting = step
        self.last = Stepped(
            step,
            episode,
            env_reward,
            terminated,
            truncated,
            chain,
            fact,
            step_cause(step, self._caused_by),
            encoded,
            prior if self.config.wants_prior else b"",
            reset_observation,
            extras,
        )
        if self._per_episode:
            self._await_episode(self.last)
        return self.last

    def _await_episode(self, taken: Stepped) -> None:
        """Of an episode that is rewarded as a whole only the last step has a reward to wait for."""
        if taken.terminated or taken.truncated or self._done:
            self.last = taken._replace(closes_from=self._episode_first)
            self._episode_first = taken.step + 1
        else:
            self.awaiting, self._caused_by = None, keys.step(taken.step)

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

    def _take_inputs(self) -> bytes:
        inputs, self._inputs = self._inputs, []
        return listed(inputs)

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
            self._agent = None
            self._hooks.release()
            self._given = {}
        return self.ended

    def _state_hash(self) -> bytes:
        try:
            return self._env.state_hash()
        except MemoryError:
            raise
        except BaseException as error:
            raise stop_of("env_raised", error) from error


def _no_five(result: Any, error: BaseException) -> str:
    return (
        "step must return (observation, reward, terminated, truncated, info), with a number and "
        f"two truth values; it returned {short(result)}: {told_in_a_line(error)}"
    )
