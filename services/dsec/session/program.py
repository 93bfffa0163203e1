"""A program: the code and documents that the sessions of one pair of specs share.

Loading it is the first contact with user code: everything that goes wrong is a `ProgramError` with
a code and the field of the spec that is at fault.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsec.session.adapters.gymnasium import EnvError, GymnasiumAdapter, env_factory
from dsec.session.code import CodeNamespace
from dsec.session.code_errors import CodeError, telling
from dsec.session.documents import AgentDocument, EnvDocument, SpecError, unseal
from dsec.session.io import REWARD_LAG_STEPS_MAX, SessionConfig
from dsec_contracts.session import RequestFact

Determinism = Literal["D0", "D1", "D2"]
"""How much of a session can be executed again."""


class ProgramError(Exception):
    """A spec that cannot be run. `code` is the session's, `field` names the part of the spec."""

    def __init__(self, code: str, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.code = code
        self.field = field


@dataclass(frozen=True, slots=True)
class Program:
    """What runs: how to make the agent and the environment."""

    agent: AgentDocument
    env: EnvDocument
    agent_class: Any
    make_env: Callable[[], GymnasiumAdapter]
    is_async: bool
    namespaces: tuple[CodeNamespace, CodeNamespace]

    @property
    def determinism(self) -> Determinism:
        """What can be executed again: nothing (D0), the environment given the actions (D1), or the
        agent too (D2)."""
        if not self.env.deterministic_mode:
            return "D0"
        return "D2" if self.agent.deterministic_mode else "D1"


def load_program(
    agent_hash: str, agent_content: bytes, env_hash: str, env_content: bytes
) -> Program:
    """Load the code of an agent spec and an environment spec.

    Raises:
        ProgramError: `agent_load_failed`, `env_load_failed`, `unknown_environment` or
            `spec_invalid`.
    """
    try:
        agent, agent_files = unseal(agent_content, "agent")
    except SpecError as error:
        raise ProgramError("spec_invalid", "agent_spec", str(error)) from error
    if unsealed := [tool.ref for tool in agent.tools if not tool.is_sealed]:
        raise ProgramError(
            "spec_invalid",
            "agent_spec.tools",
            f"{unsealed[0]} is not the hash of a registered tool",
        )
    try:
        env, env_files = unseal(env_content, "env")
    except SpecError as error:
        raise ProgramError("spec_invalid", "env_spec", str(error)) from error
    agent_code = _code("agent_load_failed", "agent_spec.code", agent_hash, agent_files)
    env_code = _code("env_load_failed", "env_spec.code", env_hash, env_files)
    try:
        agent_class = agent_code.load(agent.entry)
        with telling("entry", agent_code.name):  # a class may make its attributes when asked
            step = getattr(agent_class, "step", None)
            has_step, is_async = callable(step), inspect.iscoroutinefunction(step)
    except CodeError as error:
        raise ProgramError("agent_load_failed", "agent_spec.entry", str(error)) from error
    if not has_step:
        raise ProgramError("agent_load_failed", "agent_spec.entry", f"{agent.entry} has no step()")
    try:
        make_env = env_factory(env.entry, env.kwargs, env_code)
    except CodeError as error:
        raise ProgramError("env_load_failed", "env_spec.entry", str(error)) from error
    except EnvError as error:
        raise ProgramError(error.code, "env_spec.entry", str(error)) from error
    return Program(
        agent,
        env,
        agent_class,
        make_env,
        is_async,
        (agent_code, env_code),
    )


def _code(code: str, field: str, spec_hash: str, files: Mapping[str, bytes]) -> CodeNamespace:
    # Whoever registers a spec names its files, as they like.
    try:
        return CodeNamespace(spec_hash, files)
    except CodeError as error:
        raise ProgramError(code, field, str(error)) from error


def session_config(
    request: RequestFact,
    program: Program,
    *,
    policy_state: Any = None,
    wants_prior: bool = False,
    reward_per_episode: bool = False,
) -> SessionConfig:
    """What a machine must know to run a request. `wants_prior` changes no output that is hashed."""
    return SessionConfig(
        seed=request.seed,
        max_steps=request.max_steps,
        agent_stream=request.agent_stream,
        episodes_max=program.env.episodes_max,
        policy_version=request.policy or "",
        policy_state=policy_state,
        wants_prior=wants_prior,
        reward_per_episode=reward_per_episode,
        lag_steps=request.lag_steps,
        reward_lag_steps_max=request.reward_lag_steps_max or REWARD_LAG_STEPS_MAX,
        curriculum_level=request.curriculum_level,
    )
