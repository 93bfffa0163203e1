"""User code hosted: the environment and the agent of a session, made, reset and given up.

The lowest of the session machine's four layers (see `machine.py`). Of the order of things, and of
the session's end, it knows nothing.
"""

from __future__ import annotations

from typing import Any

from dsec.session.adapters.gymnasium import GymnasiumAdapter
from dsec.session.agent_config import agent_config
from dsec.session.async_step import AsyncStep
from dsec.session.chance import Chance
from dsec.session.curriculum import OPTION, Curriculum
from dsec.session.encoding import ObservationEncoder, encode_info
from dsec.session.facts import reset_fact
from dsec.session.hooks import Hooks
from dsec.session.interposition import Interposition, PlainInterposition
from dsec.session.io import SessionConfig
from dsec.session.program import Determinism, Program
from dsec.session.raised import told
from dsec.session.seeds import derive
from dsec.session.stops import Stop, run_user, stop_of
from dsec.session.turns import Turns


class Hosting:
    """Environment and agent of one session, what they are called through, and what the environment
    returned last."""

    __slots__ = (
        "_agent",
        "_async",
        "_chance",
        "_curriculum",
        "_encode_observation",
        "_env",
        "_final",
        "_given",
        "_hooks",
        "_info",
        "_interposition",
        "_observation",
        "_prior",
        "_program",
        "_turns",
        "config",
    )

    def __init__(
        self, program: Program, config: SessionConfig, interposition: Interposition | None
    ) -> None:
        self._program = program
        self.config = config
        self._interposition: Interposition = interposition or PlainInterposition()
        self._chance = Chance(derive(config.seed, "chance", config.agent_stream))
        self._env: GymnasiumAdapter
        self._agent: Any = None
        self._given: dict[str, Any] = {}
        """What the agent was made with."""
        self._hooks = Hooks()
        self._turns = Turns.of(program.agent)
        """None where the agent may call no tools."""
        self._async = AsyncStep() if program.is_async else None
        level = config.curriculum_level
        self._curriculum = None if level is None else Curriculum(level)
        self._encode_observation = ObservationEncoder().encode
        self._observation: Any = None
        self._prior = b""
        """The canonical bytes of the observation at hand."""
        self._info: dict[str, Any] = {}
        self._final: Any = None
        """The last observation of an episode, until the agent was told of it."""

    @property
    def deterministic(self) -> bool:
        """Whether the agent is re-executed too (D2), or only the environment (D1)."""
        return self._program.agent.deterministic_mode

    @property
    def determinism(self) -> Determinism:
        """See `Program`."""
        return self._program.determinism

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

    def _release_agent(self) -> None:
        self._agent = None
        self._hooks.release()
        self._given = {}

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

    def _state_hash(self) -> bytes:
        try:
            return self._env.state_hash()
        except MemoryError:
            raise
        except BaseException as error:
            raise stop_of("env_raised", error) from error

    def close(self) -> None:
        """Give up the environment, the agent, and a decision that awaits a call. User code runs,
        their finalizers too unless something of the user's still refers to them; what it raises is
        not ours to keep."""
        self._interposition.enter(self._chance)
        try:
            told_of = self._close_parts()
            self._release_agent()
            if self._async is not None:
                self._async.release()
            self._observation = self._final = None
            self._info = told_of
            if hasattr(self, "_env"):
                del self._env
        finally:
            self._interposition.exit(self._chance)

    def _close_parts(self) -> dict[str, Any]:
        coroutine = None if self._async is None else self._async.coroutine
        told_of: dict[str, Any] = {}
        for part in (coroutine, getattr(self, "_env", None)):
            try:
                if part is not None:
                    part.close()
            except MemoryError:
                raise
            except BaseException as error:  # noqa: BLE001 - user code, after the session's end
                told_of = {"close": told(error)}
        return told_of
