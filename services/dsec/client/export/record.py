"""An episode as every format tells it: names, elements and what is missing. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsec.client.episodes import Episode

_WITH_PARAMS = {"action", "action_params"}


def scalars(episode: Episode) -> dict[str, Any]:
    """What an episode has once, in the order of the columns."""
    return {
        "session_id": str(episode.session_id),
        "episode": episode.episode,
        "status": episode.status,
        "code": episode.code,
        "steps": len(episode.rewards),
        "first_step": episode.first_step,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "seed": episode.seed,
        "policy_version": episode.policy_version,
        "group_id": episode.group_id,
        "labels": episode.labels,
        "agent_spec": episode.specs.get("agent"),
        "env_spec": episode.specs.get("env"),
        "reward_spec": episode.specs.get("reward"),
        "chain_hash": episode.chain_hash,
    }


def elements(column: Any) -> list[Any]:
    """A column of an episode, step by step: what `stacked` put together, apart again."""
    if isinstance(column, dict):
        parts = {name: elements(part) for name, part in column.items()}
        count = len(next(iter(parts.values()), []))
        return [{name: part[n] for name, part in parts.items()} for n in range(count)]
    return list(column)


def rewards(episode: Episode) -> list[float | None]:
    """Rewards, None where one is missing."""
    pairs = zip(episode.rewards.tolist(), episode.mask.tolist(), strict=True)
    return [value if there else None for value, there in pairs]


def observation_mask(episode: Episode) -> list[bool]:
    """Which observations were recorded."""
    if isinstance(episode.observations, list):
        return [value is not None for value in episode.observations]
    return [True] * (len(episode.rewards) + 1)


def actions(episode: Episode) -> tuple[Any, Any]:
    """Actions and their parameters, [T] each; no parameters are None."""
    column = episode.actions
    if isinstance(column, dict):
        if column.keys() == _WITH_PARAMS:
            return column["action"], column["action_params"]
        return column, None
    if not isinstance(column, list) or not any(map(_has_params, column)):
        return column, None
    pairs = [(a["action"], a["action_params"]) if _has_params(a) else (a, None) for a in column]
    return [action for action, _ in pairs], [params for _, params in pairs]


def _has_params(action: Any) -> bool:
    return isinstance(action, dict) and action.keys() == _WITH_PARAMS


def missing_rewards(episode: Episode) -> int:
    """How many steps have none."""
    return int(np.count_nonzero(~episode.mask))
