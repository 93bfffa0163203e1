"""Whole episodes in columns, as trainers take them, from the rows of a session's log. Pure.

Nothing is made up and nothing left out: a reward that did not come is NaN and masked, a session
that failed yields its last, perhaps empty, episode with the failure's code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt

from dsec.session import log_row
from dsec.session.observations import resolve
from dsec_contracts.canonical import decode
from dsec_contracts.reward import REWARD_FIELDS
from dsec_contracts.step import STEP_FIELDS

COMPLETED = "completed"
Components = dict[str, tuple[float, float]]
_ACTION = STEP_FIELDS.index("action")
_REVISION = REWARD_FIELDS.index("revision")
_COMPONENTS = REWARD_FIELDS.index("components")
_SPECS = {"agent": "agent_spec", "env": "env_spec", "reward": "reward_fn_hash"}


class Row(log_row.Row, Protocol):
    """What is needed of a row of the log."""

    @property
    def extras(self) -> bytes | None: ...
    @property
    def policy(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of T steps.

    `observations` holds T + 1 entries, the reset's first; arrays of one shape are stacked to
    [T + 1, ...], dictionaries of them by key, anything else stays a list (with None where no
    observation was recorded). `status` is `completed` but for the last episode of a session that
    failed, was cancelled or was rejected; then `code` says why, and T may be 0.
    """

    session_id: UUID
    episode: int
    observations: Any
    actions: Any
    """[T], stacked like observations"""
    rewards: npt.NDArray[np.float64]
    """[T]; NaN where `mask` is False"""
    mask: npt.NDArray[np.bool_]
    """[T]; False where a reward is missing"""
    terminated: bool
    truncated: bool
    """Also True where the session was cut by `max_steps`."""
    final_observation: Any
    extras: Any
    """[T]; what the agent recorded beside its actions, stacked where every step has it"""
    policy_version: str | None
    seed: int
    status: str = COMPLETED
    code: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    components: list[Components | None] = field(default_factory=list)
    """[T]; of each reward, by name: its score and its weight. None where the reward is missing"""
    first_step: int = 0
    """The session's number of the episode's first step: steps count over a session's episodes."""
    chain_hash: str = ""
    """The session's last chain hash, in hexadecimal: which run this is from. Empty: none started"""
    group_id: str | None = None
    specs: dict[str, str] = field(default_factory=dict)
    """Hashes of the `agent`, `env` and `reward` specs; empty where the request is not logged."""


@dataclass(slots=True)
class _Open:
    """An episode that is being read."""

    number: int
    observations: list[Any]
    steps: list[Row] = field(default_factory=list)


def episodes_of(
    session_id: UUID, rows: Sequence[Row], get_blob: Callable[[str], bytes]
) -> Iterator[Episode]:
    """The episodes of a session that has ended, in their order.

    Args:
        rows: all rows of the session, in any order.
        get_blob: the bytes of a blob, for observations that were recorded by reference.

    Raises:
        ValueError: the log has a gap, or no request; names the step.
    """
    requested = next((row for row in rows if row.kind == log_row.REQUESTED), None)
    if requested is None:
        raise ValueError(f"session {session_id} has no request in the log")
    request = decode(requested.fact)
    rewards = {row.step: row for row in _by_revision(rows)}
    chain_hash = _last_chain(rows)
    ended: dict[str, Any] = next((decode(r.fact) for r in rows if r.kind == log_row.ENDED), {})
    status, code = ended.get("status", "running"), ended.get("code", "")

    def observed(recorded: bytes | None) -> Any:
        return decode(resolve(recorded, get_blob)) if recorded else None

    def finish(open_: _Open, *, whole: bool) -> Episode:
        episode = _episode(open_, rewards)
        cut = not whole and status == COMPLETED
        return dataclasses.replace(
            episode,
            session_id=session_id,
            truncated=episode.truncated or cut,
            policy_version=episode.policy_version or request.get("policy"),
            status=COMPLETED if whole else status,
            code="" if whole and status != COMPLETED else code,
            chain_hash=chain_hash,
            **_asked(request),
        )

    started = next((row for row in rows if row.kind == log_row.STARTED), None)
    current = _Open(0, [observed(started.observation)] if started is not None else [])
    for number, row in enumerate(_steps(rows)):
        if row.step != number:
            raise ValueError(f"session {session_id}: step {number} is not in the log")
        current.steps.append(row)
        current.observations.append(observed(row.observation))
        if row.terminated or row.truncated:
            yield finish(current, whole=True)
            current = _Open(current.number + 1, [observed(row.reset_observation)])
    # An empty rest is the border at which the session ended, unless it ended by a failure.
    if current.steps or status != COMPLETED:
        yield finish(current, whole=False)


def rejected_episode(session_id: UUID, code: str, rows: Sequence[Row] = ()) -> Episode:
    """What stands for a session that was refused before it ran.

    Args:
        rows: of the session; its request is read where it is logged.
    """
    empty = _episode(_Open(0, []), {})
    requested = next((row for row in rows if row.kind == log_row.REQUESTED), None)
    request = decode(requested.fact) if requested is not None else {}
    return dataclasses.replace(
        empty,
        session_id=session_id,
        status="rejected",
        code=code,
        policy_version=request.get("policy"),
        **_asked(request),
    )


def _asked(request: dict[str, Any]) -> dict[str, Any]:
    """What an episode has from the request of its session."""
    return {
        "seed": request.get("seed", 0),
        "labels": request.get("labels", {}),
        "group_id": request.get("group_id"),
        "specs": {name: request[key] for name, key in _SPECS.items() if key in request},
    }


def _last_chain(rows: Sequence[Row]) -> str:
    """The hash that a session's log ends with."""
    steps = _steps(rows)
    cold = {row.kind: row for row in rows if row.kind in (log_row.ENDED, log_row.STARTED)}
    last = (cold.get(log_row.ENDED), *steps[-1:], cold.get(log_row.STARTED))
    return next((row.chain.hex() for row in last if row is not None and row.chain), "")


def _steps(rows: Sequence[Row]) -> list[Row]:
    return sorted((r for r in rows if r.kind == log_row.STEPPED), key=lambda r: r.step or 0)


def _by_revision(rows: Sequence[Row]) -> list[Row]:
    """Rewards, so that the latest revision of a step comes last."""
    scored = [row for row in rows if row.kind == log_row.REWARD_SCORED]
    return sorted(scored, key=lambda row: int(decode(row.fact)[_REVISION])) if scored else []


def _episode(open_: _Open, rewards: dict[int | None, Row]) -> Episode:
    steps = open_.steps
    scored = [rewards.get(row.step) for row in steps]
    values = [None if row is None else row.value for row in scored]
    last = steps[-1] if steps else None
    observations = open_.observations
    return Episode(
        session_id=UUID(int=0),
        episode=open_.number,
        observations=stacked(observations),
        actions=stacked([decode(row.fact)[_ACTION] for row in steps]),
        rewards=np.array([np.nan if v is None else v for v in values], np.float64),
        mask=np.array([v is not None for v in values], np.bool_),
        terminated=bool(last is not None and last.terminated),
        truncated=bool(last is not None and last.truncated),
        final_observation=observations[-1] if observations else None,
        extras=stacked([_extras(row) for row in steps]),
        policy_version=(last.policy or None) if last is not None else None,
        seed=0,
        components=[_components(row) for row in scored],
        first_step=(steps[0].step or 0) if steps else 0,
    )


def _components(row: Row | None) -> Components | None:
    if row is None:
        return None
    found = decode(row.fact)[_COMPONENTS]
    return {name: (float(score), float(weight)) for name, (score, weight) in found.items()}


def _extras(row: Row) -> Any:
    return decode(row.extras).get("extras") if row.extras else None


def stacked(values: list[Any]) -> Any:
    """Values as one array where they have one shape and type; dictionaries by key; else a list."""
    if not values:
        return values
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        return values
    if kind is dict:
        # Put together by key, dictionaries without a key would no longer say how many they are.
        if not first or any(value.keys() != first.keys() for value in values):
            return values
        return {key: stacked([value[key] for value in values]) for key in first}
    if kind is np.ndarray:
        same = all(v.shape == first.shape and v.dtype == first.dtype for v in values)
        return np.stack(values) if same else values
    if kind in (bool, float) or isinstance(first, (np.number, np.bool_)):
        return np.array(values)
    if kind is int and all(-(2**63) <= value < 2**63 for value in values):
        return np.array(values, np.int64)
    return values
