"""One session of the baseline: sampled actions, the environment's own reward, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from dsec.client.check import Sampler
from dsec.platform.interposition import interposition_of
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import SessionConfig
from dsec.session.local import local_program, run_in_memory
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

SESSION = UUID("01900000-0000-7000-8000-000000000000")
"""Identity enters no hash."""
_ENV_REWARD = STEP_FIELDS.index("env_reward")


class _Score(NamedTuple):
    value: float
    components: Mapping[str, tuple[float, float]]


class _EnvironmentsOwn:
    """Rewards a step with what its environment gave."""

    def score(self, step_fact: bytes, observation: bytes, next_observation: bytes) -> _Score:
        """See `ScorerLike`."""
        value = float(decode(step_fact)[_ENV_REWARD])
        return _Score(value, {"env": (value, 1.0)})


def chain_of(environment: str, seed: int, steps: int) -> str:
    """The last chain hash of a session of `steps` steps, in hexadecimal."""
    agent = AgentDocument(entry=f"{Sampler.__module__}:{Sampler.__name__}")
    program = local_program(agent, {}, EnvDocument(entry=f"gymnasium:{environment}"), {})
    config = SessionConfig(seed, steps)
    interposition = interposition_of(*program.namespaces)
    rows = run_in_memory(program, config, SESSION, _EnvironmentsOwn(), interposition=interposition)
    ended = rows[-1]
    if ended.chain is None or ended.step is not None or (steps and len(rows) < steps):
        raise RuntimeError(f"the session in {environment} did not run to its end")
    return ended.chain.hex()
