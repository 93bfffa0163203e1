"""The seeds' modes: what sessions of one request share, and what they do not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import uuid_utils.compat

from dsec.client.requests import request_facts
from dsec.client.yaml_file import SpecFileError
from dsec.session.documents import SessionDocument
from dsec_contracts.session import RequestFact

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HASHES = ("a" * 64, "b" * 64, "c" * 64)


def facts(count: int, **how: Any) -> list[RequestFact]:
    """Facts of `count` sessions with seed 7."""
    document = SessionDocument(agent="a", env="e", seed=7, max_steps=5, labels={"a": "1"})
    ids: list[UUID] = [uuid_utils.compat.uuid7() for _ in range(count)]
    return request_facts(document, HASHES, ids, NOW, **how)


def without_id(fact: RequestFact) -> dict[str, Any]:
    """All but the id."""
    return fact.model_dump(exclude={"session_id"})


def test_increment_gives_each_a_seed() -> None:
    found = facts(3)
    assert [f.seed for f in found] == [7, 8, 9]
    assert all(f.agent_stream == 0 and f.rollout_index is None for f in found)


def test_same_differs_in_the_id_alone() -> None:
    found = facts(3, seeds="same")
    assert len({f.session_id for f in found}) == 3
    assert without_id(found[0]) == without_id(found[1]) == without_id(found[2])


def test_same_env_varies_the_agent_alone() -> None:
    found = facts(3, seeds="same_env", group_id="g")
    assert [(f.seed, f.rollout_index, f.agent_stream) for f in found] == [
        (7, 0, 0),
        (7, 1, 1),
        (7, 2, 2),
    ]
    assert {f.group_id for f in found} == {"g"}


def test_given_values_come_before_the_documents() -> None:
    (found,) = facts(1, seed=3, labels={"b": "2"}, policy="p@1")
    assert (found.seed, found.labels, found.policy) == (3, {"a": "1", "b": "2"}, "p@1")


def test_what_a_session_says_of_lags_is_requested_and_nothing_else() -> None:
    ids = [uuid_utils.compat.uuid7()]
    about: dict[str, Any] = {"agent": "a", "env": "e", "max_steps": 5}
    for told in ({}, {"lag_steps": 2}, {"reward_lag_steps_max": 9}, {"lag_steps": 3}):
        document = SessionDocument(**about, **told)
        [fact] = request_facts(document, HASHES, ids, NOW)
        dumped = fact.model_dump(mode="json")
        assert {k: v for k, v in dumped.items() if "lag_steps" in k} == told
    for wrong in ({"lag_steps": 0}, {"lag_steps": 4, "reward_lag_steps_max": 3}):
        with pytest.raises(ValueError, match="lag_steps"):
            SessionDocument(**about, **wrong)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"seeds": "other"}, "must be one of increment, same, same_env"),
        ({"seed": 2**63 - 1}, "must lie from 0"),
        ({"labels": {"a": "x" * 300}}, "labels"),
    ],
)
def test_what_cannot_be_requested(how: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecFileError, match=said):
        facts(2, **how)


def test_a_curriculum_level_is_requested_and_absent_where_there_is_none() -> None:
    ids = [uuid_utils.compat.uuid7()]
    document = SessionDocument(agent="a", env="e", max_steps=5, curriculum_level=0)
    assert request_facts(document, HASHES, ids, NOW)[0].curriculum_level == 0
    assert facts(1)[0].curriculum_level is None
    with pytest.raises(ValueError, match="curriculum_level"):
        SessionDocument(agent="a", env="e", max_steps=5, curriculum_level=-1)
