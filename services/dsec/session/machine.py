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

It is one object in four layers, each of which knows those below it: the user's code (`hosting.py`),
how far the session is and when it is over (`course.py`), what it is told (`telling.py`) and here
what it does: start, decide, step. They are layers and not parts because a step costs a few
microseconds, and a part would have to be asked for its every field. What has a life of its own is
a part: what the agent decided (`decision.py`, `async_step.py`) and is told (`hooks.py`), what the
environment returned (`encoding.py`), what outputs say (`facts.py`), tool turns (`turns.py`), late
inputs (`late.py`), anchors (`anchors.py`), and what user code that fails makes of the session
(`stops.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from dsec.session.anchors import Anchoring, OnAnchor, restorer
from dsec.session.blame import raised_at
from dsec.session.chain import chain_next, chain_start
from dsec.session.decision import checked
from dsec.session.encoding import encode_info, plain_info
from dsec.session.facts import EMPTY_LIST, EMPTY_MAP, NULL, step_fact
from dsec.session.interposition import Interposition
from dsec.session.io import (
    AWAITS_RESULTS,
    Called,
    Ended,
    SessionConfig,
    Started,
    Stepped,
    step_cause,
)
from dsec.session.late import Late
from dsec.session.program import Program
from dsec.session.raised import told_in_a_line
from dsec.session.state_anchor import WHOLE, StateAnchor
from dsec.session.stops import Stop, encoded, is_dict, run_user, short, stop_of
from dsec.session.telling import Telling
from dsec.session.turns import Turns
from dsec_contracts import keys

ROW_BYTES_MAX = 400_000
"""Action, info and extras of one step; observations may be larger, they travel as references."""


class SessionMachine(Telling):
    """One session. See the module's text."""

    __slots__ = ("on_anchor", "recorded_actions")

    def __init__(
        self, program: Program, config: SessionConfig, interposition: Interposition | None = None
    ) -> None:
        super().__init__(program, config, interposition)
        self.recorded_actions: Callable[[int], Any] | None = None
        """For a D1 session that is re-executed: the action of a step, in place of the agent's."""
        self.on_anchor: OnAnchor | None = None
        """Called with every anchor, while it is taken."""

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
            raise raised_at(error, self._env.action_space, action_bytes) from error
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

    def _ask_for_anchor(self, asked: StateAnchor) -> None:
        if asked.state is not WHOLE and restorer(self._agent) is None:
            raise Stop(
                "agent_invalid",
                "state_anchor holds a state, and the agent has no set_state(state) to take it back",
            )
        if self._anchors is None:
            self._anchors = Anchoring(self._program.agent.anchors)
        self._anchors.given = asked

    def _take_anchor(self, anchors: Anchoring) -> None:
        """Take an anchor if one is due. The step before it happened, whatever comes of that."""
        try:
            anchors.after_step(self)
        except Stop as stop:
            self._pending_stop = stop


def _no_five(result: Any, error: BaseException) -> str:
    return (
        "step must return (observation, reward, terminated, truncated, info), with a number and "
        f"two truth values; it returned {short(result)}: {told_in_a_line(error)}"
    )
