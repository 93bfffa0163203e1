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
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from struct import Struct
from typing import Any, Literal, Protocol, cast

from numpy import ndarray

from dsec.session import chance as chances
from dsec.session.adapters.gymnasium import EnvError, GymnasiumAdapter
from dsec.session.adapters.state import StateError
from dsec.session.anchors import Anchoring, OnAnchor, restorer
from dsec.session.awaited import Asked, offer_call
from dsec.session.chain import chain_end, chain_next, chain_start, digest16
from dsec.session.chance import Chance
from dsec.session.curriculum import OPTION, Curriculum
from dsec.session.io import (
    AWAITS_LATE,
    AWAITS_RESULTS,
    CANCEL,
    CURRICULUM,
    REWARD,
    REWARD_DEFERRED,
    REWARD_MISSING,
    TOOL_RESULT,
    Call,
    Called,
    Ended,
    Input,
    SessionConfig,
    Started,
    Stepped,
    called,
    reward_components,
    step_cause,
)
from dsec.session.late import Late, LateResult, LateReward
from dsec.session.program import Determinism, Program
from dsec.session.raised import MESSAGE_CHARS_MAX, is_ours, told, told_in_a_line, type_name
from dsec.session.seeds import derive
from dsec.session.state_anchor import WHOLE, state_anchor_of
from dsec.session.tools import Answers, CallsInvalid, CallsTooLarge, calls_of, result_of
from dsec_contracts import keys
from dsec_contracts.canonical import CanonicalError, encode, head

OWN_CODES = frozenset(
    ("agent_raised", "agent_invalid", "env_raised", "env_invalid", "too_large", "tool_turns_max")
)
"""The codes of failures that the machine itself finds, and finds again when it is re-executed.
Beside these only a fatal notice about a reward fails a session from within."""

ROW_BYTES_MAX = 400_000
"""Action, info and extras of one step; observations may be larger, they travel as references."""

_EMPTY_LIST = b"\x80"
_EMPTY_MAP = b"\xa0"
_NULL = b"\xf6"
_TRUE, _FALSE = b"\xf5", b"\xf4"
_HASH16 = b"\x50"
_STEP_HEAD = head(4, 13)
_FLOAT = Struct(">Bd").pack
_NAN = encode(float("nan"))
_KNOWN_KEYS = frozenset(
    ("action", "action_params", "provenance", "extras", "tool_calls", "state_anchor")
)


class Interposition(Protocol):
    """What stands between user code and the process's clock, chance and entropy."""

    def enter(self, chance: Chance) -> None:
        """User code of this session runs from now on."""

    def exit(self, chance: Chance) -> None:
        """User code stops running."""


class PlainInterposition:
    """Makes the session's chance the active one; whoever consults it sees it."""

    enter = staticmethod(chances.activate)
    exit = staticmethod(chances.deactivate)


class _Stop(Exception):
    """The session ends here: a failure with a code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SessionMachine:
    """One session. See the module's text."""

    __slots__ = (
        "_agent",
        "_anchors",
        "_answers",
        "_array_head",
        "_array_key",
        "_calls",
        "_caused_by",
        "_chance",
        "_curriculum",
        "_done_episodes",
        "_env",
        "_episode",
        "_episode_begun",
        "_final",
        "_given",
        "_info",
        "_inputs",
        "_interposition",
        "_late",
        "_late_tools",
        "_named",
        "_observation",
        "_on_episode_start",
        "_on_missing",
        "_on_reward",
        "_on_tool_result",
        "_pending_stop",
        "_prior",
        "_program",
        "_returned",
        "_step",
        "_suspended",
        "_tools",
        "_turn",
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
        self._on_episode_start: Callable[..., Any] | None = None
        self._on_reward: Callable[..., Any] | None = None
        self._on_missing: Callable[..., Any] | None = None
        self._on_tool_result: Callable[..., Any] | None = None
        self._tools: tuple[str, ...] | None = program.agent.tool_names() or None
        self._late_tools = program.agent.late_tool_names()
        """Those whose calls do not block."""
        self._late: Late | None = None
        """Late inputs; None while there can be none."""
        if self._late_tools or config.lag_steps is not None:
            self._late = Late(config.lag_steps, config.reward_lag_steps_max)
        level = config.curriculum_level
        self._curriculum = None if level is None else Curriculum(level)
        self._suspended: Any = None
        """The coroutine of `step` that awaits a call."""
        self._returned: Any = None
        """What that call came to."""
        self._turn = 0
        self._calls: list[bytes] = []
        """The calls since the last step, as the next one names them."""
        self._answers: Answers | None = None
        self._named = 0
        """How many of `_inputs` a turn has named already."""
        self._step = 0
        self._episode = 0
        self._done_episodes = 0
        self._episode_begun = False
        self._observation: Any = None
        self._prior = b""
        self._info: dict[str, Any] = {}
        self._final: Any = None
        self._pending_stop: _Stop | None = None
        self._inputs: list[bytes] = []
        self._caused_by = ""
        self._array_key: Any = None
        self._array_head = b""
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
        return None if self._answers is None else self._answers.called

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
        except _Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)

    def step(self) -> Stepped | Called | Ended:
        """Let the agent decide, and the environment step unless the agent wants tools first.

        Must not be called while an input is awaited or after the end.
        """
        if self.ended is not None or self.awaiting is not None or self.chain is None:
            raise RuntimeError("step() while the session waits, before start() or after its end")
        # Before the session's time goes on: it is told at the same moment whenever it came.
        if self._late is not None and (ended := self._tell_due(self._late)) is not None:
            return ended
        chance = self._chance
        chance.position = self._step
        self._interposition.enter(chance)
        try:
            decision = self._decide()
            taken = self._act(decision) if self._tools is None else self._act_or_call(decision)
            if self._late is not None:
                self._rest(self._late, taken)
            if self._anchors is not None and type(taken) is Stepped:
                self._take_anchor(self._anchors)
            return taken
        except _Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(chance)

    def _take_anchor(self, anchors: Anchoring) -> None:
        """Take an anchor if one is due. The step before it happened, whatever comes of that."""
        try:
            anchors.after_step(self)
        except _Stop as stop:
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
                self._tell_reward(given, cast(Stepped, self.last), self._info, self._final)
            elif given.kind == REWARD_MISSING:
                self._tell_missing(given)
            elif given.kind == REWARD_DEFERRED:
                self._defer()
        except _Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)
        self._final = None
        if self._late is not None:
            return self._settle(self._late)
        if self._answers is not None:
            self.awaiting = AWAITS_RESULTS
            return self._hear_due(self._answers)
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
        if self._answers is not None:
            self.awaiting = AWAITS_RESULTS
            return self._hear_due(self._answers)
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
                call_id, told = turn.calls[owed.index].id, result_of(given)
                hear = cast(Callable[..., Any], self._on_tool_result)
                self._user("agent_raised", hear, call_id, told)
            elif given.kind == REWARD:
                self._caused_by = keys.reward(owed.step)
                self._tell_reward(given, owed.stepped, owed.info, owed.final)
            else:
                self._caused_by = keys.reward_missing(owed.step)
                self._tell_missing(given)
        except _Stop as stop:
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
        told = self._user("env_raised", copy.deepcopy, (self._info, self._final))
        late.owe_reward(cast(Stepped, self.last), *told)

    def _rest(self, late: Late, taken: Stepped | Called) -> None:
        """After an output: what the session waits for, where not every reward is awaited at once.

        A failure here comes after the output, which happened.
        """
        if late.lag_steps is not None and type(taken) is Stepped:
            self._caused_by = keys.step(taken.step)
            try:
                self._owe_reward(late)
            except _Stop as stop:
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
                if self._suspended is not None:
                    self._returned = result_of(given)
                elif self._on_tool_result is not None:
                    self._user("agent_raised", self._on_tool_result, call_id, result_of(given))
        except _Stop as stop:
            return self._end("failed", stop.code, str(stop))
        finally:
            self._interposition.exit(self._chance)
        if not answers.complete:
            return None
        self._answers = self.awaiting = None
        self._caused_by = answers.last_key
        return self._end_if_done()

    def close(self) -> None:
        """Give up the environment, and a decision that awaits a call. User code runs; what it
        raises is not ours to keep."""
        for part in (self._suspended, getattr(self, "_env", None)):
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
        self._env = self._user("env_raised", self._program.make_env)
        observation, info = self._reset(0)
        self._user("agent_raised", self._make_agent)
        if self._late_tools and self._on_tool_result is None:
            raise _Stop(
                "agent_invalid",
                f"the agent has no on_tool_result, and declares {min(self._late_tools)} with "
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
        self._given = self._session_config(anchor_id)
        # A copy: the agent may do with its configuration what it likes.
        self._bind(agent := self._program.agent_class(dict(self._given)))
        on_policy = getattr(agent, "on_policy", None) if config.policy_version else None
        if on_policy is not None:
            on_policy(config.policy_version, config.policy_state)

    def _bind(self, agent: Any) -> None:
        self._agent = agent
        self._on_episode_start = getattr(agent, "on_episode_start", None)
        self._on_reward = getattr(agent, "on_reward", None)
        self._on_missing = getattr(agent, "on_reward_missing", None)
        if self._tools is not None:
            if self._program.is_async:
                offer_call(agent)
            self._on_tool_result = getattr(agent, "on_tool_result", None)

    def _session_config(self, anchor_id: str | None) -> dict[str, Any]:
        config, env = self.config, self._env
        stream, document = config.agent_stream, self._program.agent
        told = {} if config.curriculum_level is None else {OPTION: config.curriculum_level}
        return told | {
            "params": copy.deepcopy(document.params),
            "observation_space": env.observation_space,
            "action_space": env.agent_action_space(derive(config.seed, "action_space", stream)),
            "tools": [tool.model_dump(mode="python") for tool in document.tools],
            "resource_profile": dict(document.resource_profile),
            "max_steps": config.max_steps,
            "seed": derive(config.seed, "agent", stream),
            "anchor_id": anchor_id,
        }

    def _reset(self, episode: int) -> tuple[Any, dict[str, Any]]:
        seed = derive(self.config.seed, "env", episode)
        curriculum = self._curriculum
        options = None if curriculum is None else {OPTION: curriculum.level}
        return self._user("env_raised", self._env.deterministic_reset, seed, options)  # type: ignore[no-any-return]

    def _reset_fact(self, observation: bytes, info: dict[str, Any], room_bytes: int) -> bytes:
        info_bytes = self._encode_info(info)
        if len(info_bytes) > room_bytes:
            raise _Stop(
                "too_large",
                f"the info of a reset has {len(info_bytes)} bytes; there is room for {room_bytes}",
            )
        return b"".join(
            (
                b"\x83\x50",
                self._state_hash(),
                _HASH16,
                digest16(observation),
                info_bytes,
            )
        )

    def _user(self, code: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call user code; whatever it raises becomes the session's end."""
        try:
            return call(*args)
        except MemoryError:
            raise
        except BaseException as error:
            raise _stop(code, error) from error

    def _decide(self) -> Any:
        """The agent's dict for the current observation."""
        if not self._episode_begun:
            self._episode_begun = True
            if self._on_episode_start is not None:
                self._user("agent_raised", self._on_episode_start, self._episode)
        if self.recorded_actions is not None:
            return self.recorded_actions(self._step)
        try:
            if self._program.is_async:
                decision = self._drive()
            else:
                decision = self._agent.step(self._observation)
        except MemoryError:
            raise
        except BaseException as error:
            raise _stop("agent_raised", error) from error
        return decision

    def _drive(self) -> Any:
        """Run `async def step` until it has decided, or awaits a call: that is a tool turn."""
        coroutine, returned = self._suspended, self._returned
        self._suspended = self._returned = None
        if coroutine is None:
            coroutine = self._agent.step(self._observation)
        try:
            asked = coroutine.send(returned)
        except StopIteration as finished:
            return finished.value
        self._suspended = coroutine
        if type(asked) is not Asked:
            told = "step() awaited something other than the session's own calls"
        elif self._tools is None:
            told = "step() awaited call(), and the agent spec declares no `tools`"
        elif asked.name in self._late_tools:
            told = f"step() awaited {asked.name}, which is declared with blocking: false"
        else:
            return {"tool_calls": [{"name": asked.name, "arguments": asked.arguments}]}
        raise _Stop("agent_invalid", told)

    def _checked(self, decision: Any) -> tuple[Any, bytes]:
        """What the environment is given, and the canonical extras."""
        if type(decision) is not dict and _is_dict(decision):
            decision = dict(decision)
        if type(decision) is not dict or "action" not in decision:
            raise _Stop(
                "agent_invalid",
                f"step() must return a dict with `action`, not {_short(decision)}",
            )
        action = decision["action"]
        if len(decision) == 1:
            return action, b""
        for name in decision.keys() - _KNOWN_KEYS:
            raise _Stop(
                "agent_invalid", f"step() returned the key {_short(name)}, which is not known"
            )
        if decision.get("state_anchor") is not None:
            self._ask_for_anchor(decision["state_anchor"])
        if decision.get("tool_calls"):
            raise _Stop(
                "agent_invalid",
                "step() returned tool_calls, and the agent spec declares no `tools`",
            )
        if (params := decision.get("action_params")) is not None:
            action = {"action": action, "action_params": params}
        extras = {k: decision[k] for k in ("extras", "provenance") if decision.get(k) is not None}
        return action, _encoded("agent_invalid", "the extras", extras) if extras else b""

    def _ask_for_anchor(self, given: Any) -> None:
        try:
            asked = state_anchor_of(given)
        except ValueError as error:
            raise _Stop("agent_invalid", f"state_anchor: {error}") from error
        if asked is None:
            return
        if asked.state is not WHOLE and restorer(self._agent) is None:
            raise _Stop(
                "agent_invalid",
                "state_anchor holds a state, and the agent has no set_state(state) to take it back",
            )
        if self._anchors is None:
            self._anchors = Anchoring(self._program.agent.anchors)
        self._anchors.given = asked

    def _act_or_call(self, decision: Any) -> Stepped | Called:
        """A step, a turn of tool calls, or a step together with one."""
        if not _is_dict(decision):
            return self._act(decision)  # which says what is wrong with it
        step, turn = self._step, self._turn
        try:
            decision = dict(decision)
            calls = calls_of(decision, step, turn, self._tools or ())
        except MemoryError:
            raise
        except BaseException as error:  # no mapping, or one of the user's own class
            raise _stop("agent_invalid", error) from error
        decision.pop("tool_calls", None)
        if not calls:
            return self._act(decision)
        self._calls.extend([call.named() for call in calls])
        if "action" not in decision:
            return self._call(calls, decision)
        self._act(decision)
        turn_ = called(
            step, turn, _EMPTY_LIST, calls, cast(bytes, self.chain), keys.step(step).encode()
        )
        self._ask(turn_)
        self.last = cast(Stepped, self.last)._replace(called=turn_)
        return self.last

    def _call(self, calls: tuple[Call, ...], decision: dict[str, Any]) -> Called:
        """A turn in which the environment stands still."""
        most = self._program.agent.tool_turns_max
        if decision:
            raise _Stop(
                "agent_invalid",
                f"step() returned {_short(next(iter(decision)))} beside tool_calls and without an "
                "action; of a tool turn nothing else is recorded yet",
            )
        if self._turn >= most:
            raise _Stop(
                "tool_turns_max",
                f"step {self._step}: {most} tool turns without an action, which is tool_turns_max",
            )
        fresh = self._inputs[self._named :]
        self._named = len(self._inputs)
        turn = called(
            self._step,
            self._turn,
            head(4, len(fresh)) + b"".join(fresh),
            calls,
            cast(bytes, self.chain),
            step_cause(self._step, self._caused_by),
        )
        self._turn += 1
        self._ask(turn)
        if self._answers is not None:
            self.awaiting = AWAITS_RESULTS
        else:
            self._caused_by = keys.tool_call(turn.step, turn.turn)
        return turn

    def _ask(self, turn: Called) -> None:
        """Expect the answers to a turn: now those to calls that block, later the others."""
        self._answers = Answers.of(turn, self._late_tools)
        if self._late_tools:
            cast(Late, self._late).owe_results(turn, self._late_tools)

    def _take_calls(self) -> bytes:
        calls, self._calls = self._calls, []
        self._turn = self._named = 0
        return head(4, len(calls)) + b"".join(calls)

    def _act(self, decision: Any) -> Stepped:
        try:
            action, extras = self._checked(decision)
        except MemoryError:
            raise
        except BaseException as error:  # a subclass of dict, a value that has no truth
            raise _stop("agent_invalid", error) from error
        if type(action) is int and 0 <= action < 24:
            action_bytes = bytes((action,))
        else:
            action_bytes = _encoded("agent_invalid", "the action", action)
        try:
            result = self._env.step(action)
        except MemoryError:
            raise
        except BaseException as error:
            raise _stop("env_raised", error) from error
        try:
            observation, env_reward, terminated, truncated, info = result
            env_reward = float(env_reward)
            terminated, truncated = bool(terminated), bool(truncated)
        except MemoryError:
            raise
        except BaseException as error:
            raise _Stop("env_invalid", _no_five(result, error)) from error
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
            info = self._plain_info(info)
        empty = type(info) is dict and not info
        info_bytes = _EMPTY_MAP if empty else self._encode_info(info)
        if len(info_bytes) + len(action) + len(extras) > ROW_BYTES_MAX:
            raise _Stop(
                "too_large",
                f"step {step}: action, info and extras have {len(action)}, {len(info_bytes)} and "
                f"{len(extras)} bytes; together they may have {ROW_BYTES_MAX}",
            )
        self._step = step + 1
        self._info = info
        self._observation, self._prior = observation, encoded
        reset, reset_observation = _NULL, b""
        if terminated or truncated:
            self._done_episodes += 1
            if self._done:
                self._final = observation
            else:
                room = ROW_BYTES_MAX - len(info_bytes) - len(action) - len(extras)
                reset, reset_observation = self._next_episode(room)
        inputs = self._take_inputs()
        fact = b"".join(
            (
                _STEP_HEAD,
                head(0, step),
                head(0, episode),
                inputs,
                self._take_calls() if self._calls else _EMPTY_LIST,
                action,
                _NULL,
                _FLOAT(0xFB, env_reward) if env_reward == env_reward else _NAN,
                _TRUE if terminated else _FALSE,
                _TRUE if truncated else _FALSE,
                info_bytes,
                _HASH16,
                state,
                _HASH16,
                digest16(encoded),
                reset,
            )
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
        return self.last

    def _next_episode(self, room_bytes: int) -> tuple[bytes, bytes]:
        """Begin the next episode: the fact of its reset and the observation.

        A reset that fails ends the session, but the step before it happened: it is recorded, gets
        its reward, and the end comes after that.
        """
        try:
            # The reset may overwrite what the environment returned with the last step.
            self._final, self._info = self._user(
                "env_raised", copy.deepcopy, (self._observation, self._info)
            )
            self._episode += 1
            self._episode_begun = False
            if self._curriculum is not None:
                self._take_level(self._curriculum)
            observation, info = self._reset(self._episode)
            encoded = self._encode_observation(observation)
            fact = self._reset_fact(encoded, info, room_bytes)
        except _Stop as stop:
            self._pending_stop = stop
            return _NULL, b""
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
        inputs = self._inputs
        if not inputs:
            return _EMPTY_LIST
        self._inputs = []
        return head(4, len(inputs)) + b"".join(inputs)

    def _tell_reward(self, given: Input, last: Stepped, env_info: Any, final: Any) -> None:
        if self._on_reward is None:
            return
        told: dict[str, Any] = {
            "step": given.ordinal,
            "episode": last.episode,
            "terminated": last.terminated,
            "truncated": last.truncated,
            "components": reward_components(given.ordinal, given.fact),
            "final_observation": final,
        }
        if self._curriculum is not None:
            told[OPTION] = self._curriculum.of(last.episode)
        info = {**env_info, "dsec": told} if env_info else {"dsec": told}
        try:
            self._on_reward(given.value, last.terminated or last.truncated, info)
        except MemoryError:
            raise
        except BaseException as error:
            raise _stop("agent_raised", error) from error

    def _tell_missing(self, given: Input) -> None:
        if given.fatal:
            raise _Stop(given.code, given.message)
        if self._on_missing is not None:
            self._user("agent_raised", self._on_missing, given.ordinal, given.code)

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
        self.awaiting = self._answers = self._late = None
        self.ended = Ended(
            status, code, steps, episodes, inputs, chain, message[:MESSAGE_CHARS_MAX]
        )
        if status == "failed":
            # At once, not when the end is published: the sessions that come after it in this tick
            # need the files and the memory that it may hold.
            self._agent = self._on_episode_start = self._on_tool_result = None
            self._on_reward = self._on_missing = None
            self._given = {}
        return self.ended

    def _encode_observation(self, observation: Any) -> bytes:
        if type(observation) is ndarray:
            key = (observation.dtype, observation.shape)
            if key == self._array_key:
                data: bytes = observation.tobytes()
                return self._array_head + data
            if observation.dtype.byteorder in "<=|" and observation.dtype.kind in "biuf":
                body = observation.tobytes()
                encoded = encode(observation)
                self._array_key = key
                self._array_head = encoded[: len(encoded) - len(body)]
                return encoded
        return _encoded("env_invalid", "the observation", observation)

    def _encode_info(self, info: Any) -> bytes:
        if not _is_dict(info):
            raise _Stop("env_invalid", f"info must be a dict, not {_short(info)}")
        info = self._plain_info(info)
        return _encoded("env_invalid", "the info", info) if info else _EMPTY_MAP

    def _plain_info(self, info: Any) -> Any:
        """A subclass of dict is user code, at every question that it is asked."""
        if type(info) is not dict and _is_dict(info):
            return self._user("env_invalid", dict, info)
        return info

    def _state_hash(self) -> bytes:
        try:
            return self._env.state_hash()
        except MemoryError:
            raise
        except BaseException as error:
            raise _stop("env_raised", error) from error


def _stop(code: str, error: BaseException) -> _Stop:
    """The end that an error makes of a session: `code`, unless it is one of ours that has its own.
    What user code raises is user code's, whatever its class."""
    if not is_ours(error):
        return _Stop(code, told(error))
    match error:
        case _Stop():
            return error
        case EnvError():
            return _Stop(error.code, str(error))
        case StateError():
            return _Stop("env_invalid", str(error))
        case CallsTooLarge():
            return _Stop("too_large", str(error))
        case CallsInvalid():
            return _Stop("agent_invalid", str(error))
    return _Stop(code, told(error))


def _encoded(code: str, what: str, value: Any) -> bytes:
    """The canonical bytes of a value that user code gave."""
    try:
        return encode(value)
    except MemoryError:
        raise
    except BaseException as error:  # a mapping of the user's own class is user code
        if is_ours(error) and isinstance(error, CanonicalError):
            raise _Stop(code, f"{what} cannot be recorded: {error}") from error
        raise _stop(code, error) from error


def _no_five(result: Any, error: BaseException) -> str:
    return (
        "step must return (observation, reward, terminated, truncated, info), with a number and "
        f"two truth values; it returned {_short(result)}: {told_in_a_line(error)}"
    )


def _short(value: Any) -> str:
    if type(value) in (str, int, float, type(None)):
        return repr(value)[:80]
    if type(value) is tuple:
        return f"a tuple of {len(value)}"
    return type_name(value)


def _is_dict(value: Any) -> bool:
    """As `isinstance`, which asks the value itself what it is, and that is user code."""
    return issubclass(type(value), dict)
