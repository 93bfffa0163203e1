"""What a request for several sessions asks for: one fact a session, by the seeds' mode. Pure.

`increment` gives every session a seed of its own, `same` makes all of them equal, `same_env` holds
the environment's seed and varies only the agent's chance: what group-relative training compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, get_args
from uuid import UUID

from pydantic import ValidationError

from dsec.client.yaml_file import SpecFileError
from dsec.session.documents import SessionDocument
from dsec_contracts.session import SEED_MAX, RequestFact

SeedMode = Literal["increment", "same", "same_env"]
SEED_MODES: tuple[str, ...] = get_args(SeedMode)
SESSIONS_PER_REQUEST_MAX = 100_000


def request_facts(
    session: SessionDocument,
    hashes: tuple[str, str, str],
    ids: Sequence[UUID],
    now: datetime,
    *,
    seeds: str = "increment",
    seed: int | None = None,
    policy: str | None = None,
    group_id: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[RequestFact]:
    """The facts of `len(ids)` sessions of one document.

    Args:
        hashes: of the agent, environment and reward specs.
        seed, group_id: in place of the document's.
        labels: added to the document's.

    Raises:
        SpecFileError: a value cannot be requested; names the key.
    """
    if seeds not in SEED_MODES:
        raise SpecFileError(f"seeds: {seeds!r} must be one of {', '.join(SEED_MODES)}")
    if not 1 <= len(ids) <= SESSIONS_PER_REQUEST_MAX:
        raise SpecFileError(f"count: {len(ids)} must be from 1 to {SESSIONS_PER_REQUEST_MAX}")
    first = session.seed if seed is None else seed
    last = first + len(ids) - 1 if seeds == "increment" else first
    if not 0 <= first <= last <= SEED_MAX:
        raise SpecFileError(f"seed: {first} to {last} must lie from 0 to {SEED_MAX}")
    shared: dict[str, Any] = {
        "agent_spec": hashes[0],
        "env_spec": hashes[1],
        "reward_fn_hash": hashes[2],
        "max_steps": session.max_steps,
        "creation_timestamp": now,
        "policy": policy,
        "group_id": group_id or session.group_id,
        "priority": session.priority,
        "deadline": _deadline(session, now),
        "labels": {**session.labels, **(labels or {})},
        "lag_steps": session.lag_steps,
        "reward_lag_steps_max": session.reward_lag_steps_max,
        "curriculum_level": session.curriculum_level,
    }
    try:
        return [
            RequestFact(session_id=session_id, **shared, **_chance(seeds, first, n))
            for n, session_id in enumerate(ids)
        ]
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in item["loc"])
        raise SpecFileError(f"{key}: {item['msg']}") from error


def _chance(seeds: str, seed: int, n: int) -> dict[str, int]:
    if seeds == "increment":
        return {"seed": seed + n}
    if seeds == "same":
        return {"seed": seed}
    return {"seed": seed, "rollout_index": n, "agent_stream": n}


def _deadline(session: SessionDocument, now: datetime) -> datetime | None:
    if session.deadline_s is None:
        return None
    try:
        return now + timedelta(seconds=session.deadline_s)
    except OverflowError:
        raise SpecFileError(f"deadline_s: {session.deadline_s} is too far away") from None
