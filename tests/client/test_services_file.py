"""services.yaml: what is wrong in it is said by service and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.client.services_file import read_services
from dsec.client.yaml_file import SpecFileError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "services.yaml"
    path.write_text(text)
    return path


def test_a_file_of_two_services(tmp_path: Path) -> None:
    found = read_services(
        write(
            tmp_path,
            "inventory:\n  base_url: https://inventory.example.com/v1\n  qps_budget: 50\n"
            "  headers: {Authorization: 'Bearer ${INVENTORY_TOKEN}'}\n"
            "risk:\n  base_url: http://127.0.0.1:9\n  qps_budget: 1.5\n"
            "  retry: {attempts_max: 2}\n  batch: {path: /batch}\n",
        )
    )
    assert list(found) == ["inventory", "risk"]
    assert found["inventory"].secret_names() == ["INVENTORY_TOKEN"]
    assert found["inventory"].retryable_statuses == [429, 502, 503, 504]
    assert found["risk"].retry.attempts_max == 2
    assert found["risk"].batch is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: {qps_budget: 1}", "a.base_url is missing"),
        ("a: {base_url: 'ftp://x', qps_budget: 1}", "a.base_url"),
        ("a: {base_url: 'http://u:p@x', qps_budget: 1}", "a.base_url"),
        ("a: {base_url: 'http://x', qps_budget: 0.01}", "a.qps_budget"),
        ("a: {base_url: 'http://x', qps_budget: 1, qps: 3}", "a.qps is no known key"),
        (
            "a: {base_url: 'http://x', qps_budget: 1, retry: {attempts: 3}}",
            "a.retry.attempts is no known key; known keys are attempts_max",
        ),
        (
            "a: {base_url: 'http://x', qps_budget: 1, retry: {backoff_s_min: 9}}",
            "backoff_s_min is above backoff_s_max",
        ),
        ("a: {base_url: 'http://x', qps_budget: 1, headers: {X: '${no}'}}", "names no secret"),
        ("a: {base_url: 'http://x', qps_budget: 1, version: 3}", "a.version is no known key"),
        ("a b: {base_url: 'http://x', qps_budget: 1}", "'a b' names no service"),
        ("a: 3", "a: write its terms below it"),
        ("a: {}\na: {}", "twice"),
        ("[]", "mapping"),
        ("a: {base_url: 'http://[::1', qps_budget: 1}", "a cannot be asked"),
        ("a: {base_url: 'http://x:99999999', qps_budget: 1}", "a cannot be asked"),
        ('a: {base_url: "http://x", qps_budget: 1, headers: {X: "b\\nc"}}', "a cannot be asked"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SpecFileError) as caught:
        read_services(write(tmp_path, text))
    assert told in str(caught.value)
    assert "services.yaml" in str(caught.value)
