"""Logs committed as files: what was once written must be read for ever.

A history is the rows of one session as the database gives them, bytes in hexadecimal, with the code
that ran. Its fold gives the hash in the file, whatever becomes of the code. Verification runs the
code too: it passes for all but the one that is non-deterministic on purpose, which it must flag at
the step the file names. Files are never edited; `history` makes new ones.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dsec.replay.fold import fold
from dsec.replay.verify import verify
from dsec.session.io import SessionConfig
from dsec.session.log_row import LogRow

FOLDER = Path(__file__).parent / "histories"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
BYTES = ("chain", "fact", "observation", "reset_observation", "extras")


def history(rows: list[LogRow], config: SessionConfig, **sources: Any) -> dict[str, Any]:
    """The content of a new file; `diverges_at` among the sources where verification must fail, and
    `lags` where the session's configuration says something of late inputs."""
    return {
        **sources,
        "seed": config.seed,
        "max_steps": config.max_steps,
        "chain": fold(rows).chain_hash,
        "reward_total": fold(rows).reward_total,
        "rows": [{name: _plain(v) for name, v in row._asdict().items()} for row in rows],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return str(value) if isinstance(value, (UUID, datetime)) else value


def rows_of(content: dict[str, Any]) -> list[LogRow]:
    """The rows of a file."""
    rows = []
    for row in content["rows"]:
        given = {k: bytes.fromhex(v) if k in BYTES and v is not None else v for k, v in row.items()}
        given["session_id"] = UUID(row["session_id"])
        given["event_time"] = datetime.fromisoformat(row["event_time"])
        rows.append(LogRow(**given))
    return rows


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", NAMES)
def test_a_history_still_folds_to_its_hash(name):
    content = read(name)
    state = fold(rows_of(content))
    assert state.intact
    assert state.chain_hash == content["chain"]
    assert state.reward_total == content["reward_total"]


@pytest.mark.parametrize("name", NAMES)
def test_a_history_still_verifies(name, made):
    content = read(name)
    sources = {key: content[key] for key in ("agent", "env", "reward", "tools") if key in content}
    one = made(**sources)
    config = SessionConfig(content["seed"], content["max_steps"], **content.get("lags", {}))
    verdict = verify(rows_of(content), one.program, config, one.scorer)
    if content.get("diverges_at") is None:
        assert verdict.ok, verdict.first_divergence
    else:
        first = verdict.first_divergence
        assert [first.step, first.field] == content["diverges_at"]


def test_a_history_is_read_as_it_was_written(cartpole, rows):
    content = json.loads(json.dumps(history(rows, SessionConfig(7, 40))))
    assert rows_of(content) == rows


def test_there_is_a_sound_history_and_a_non_deterministic_one():
    assert {read(name).get("diverges_at") is None for name in NAMES} == {True, False}
