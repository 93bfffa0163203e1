"""`scheduler.config.yaml`: what is refused, and that the refusal names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.scheduler.settings import CONFIG_VARIABLE, RESERVED_KEYS, ConfigError, load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "scheduler.config.yaml"
    path.write_text(text)
    return path


def test_defaults_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    config = load_config()
    assert (config.placement, config.heartbeat_limit_s) == ("round_robin", 4.0)
    assert config.session_lifecycle.max_restarts == 16


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\nsession_lifecycle:\n")) == load_config(
        write(tmp_path, "")
    )


def test_the_file_is_found_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(write(tmp_path, "worker_deaths_max: 5")))
    assert load_config().worker_deaths_max == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("placment: round_robin", ["placment", "no known key", "heartbeat_limit_s", "placement"]),
        ("session_lifecycle: {max_restart: 3}", ["max_restart ", "max_restarts", "restart_wait_s"]),
        ("placement: reward_variance_aware", ["reward_variance_aware", "not implemented yet"]),
        ("placement: fair_share", ["fair_share", "not implemented yet"]),
        ("placement: random", ["random", "known are round_robin"]),
        ("worker_deaths_max: 0", ["worker_deaths_max"]),
        ("worker_deaths_max: many", ["worker_deaths_max"]),
        ("heartbeat_limit_s: .nan", ["heartbeat_limit_s"]),
        ("heartbeat_limit_s: 1.5", ["heartbeat_limit_s", "heartbeat_period_s"]),
        ("session_lifecycle: {max_restarts: -1}", ["session_lifecycle.max_restarts"]),
        ("session_lifecycle: 3", ["session_lifecycle", "mapping"]),
        ("curriculum: {lag_step: 3}", ["lag_step ", "lag_steps_high", "recover_s"]),
        ("curriculum: {lag_steps_low: 17}", ["lag_steps_low", "lag_steps_high"]),
        ("curriculum: {level_min: 3, level_max: 2}", ["level_min", "level_max"]),
        ("curriculum: {return_target: 0}", ["curriculum.return_target"]),
        ("curriculum_transition_threshold: 1.5", ["curriculum_transition_threshold"]),
        ("- placement", ["mapping"]),
        ("placement: [", ["no YAML"]),
        *[(f"{key}: 1", [key, "not implemented yet"]) for key in RESERVED_KEYS],
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    for word in [str(path), *words]:
        assert word in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load_config(tmp_path / "none.yaml")
