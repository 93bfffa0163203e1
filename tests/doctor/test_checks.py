"""What single checks say of this machine, of damage, and of what would be wrong elsewhere."""

from __future__ import annotations

import json
import os
import platform
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from dsec.doctor import baseline, binaries, clock, gpu, machine, namespaces, place, store
from dsec.doctor.clock import Drift, drift_finding
from dsec.platform.object_directory import Directory
from dsec.platform.object_proof import ProofFailed, prove
from dsec.platform.stack.state import StackRecord, StateDir


def test_this_machine() -> None:
    for check in (machine.kernel, machine.python, machine.memory, machine.limits):
        finding = check()
        assert finding.status in ("ok", "warn"), finding
        assert finding.sentence.endswith(".")
    assert clock.synchronised().status in ("ok", "warn", "absent")
    assert binaries.nats_binary().facts["version"].startswith("2.")
    assert binaries.postgres_program().status == "ok"
    assert namespaces.namespaces(False).status in ("ok", "warn")


def test_an_old_c_library_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert (machine.kernel().status, "2.28" in machine.kernel().sentence) == ("fail", True)


def test_other_packages_than_pinned_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = ["numpy==1.0", "no-such-thing==2.0", "torch==9 ; extra == 'torch'", "dsec-contracts"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: pins)
    finding = machine.packages()
    assert finding.status == "fail", "one is missing"
    assert set(finding.facts["different"]) == {"numpy", "no-such-thing"}
    monkeypatch.setattr("importlib.metadata.requires", lambda name: pins[:1])
    assert machine.packages().status == "warn"


class _Memory(NamedTuple):
    total: int
    available: int


def test_little_memory_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: _Memory(1 << 30, 100 << 20))
    assert machine.memory().status == "fail"


def test_a_clock_that_is_off_is_told_with_what_is_known_of_it() -> None:
    assert drift_finding("X", None).status == "absent"
    assert drift_finding("X", Drift.between(10.0, 10.1, 10.2)).status == "ok"
    assert drift_finding("X", Drift.between(10.0, 12.0, 10.0)).status == "warn"
    assert drift_finding("X", Drift.between(10.0, 13.0, 14.0)).status == "ok", "within its error"
    late = drift_finding("X", Drift.between(100.0, 0.0, 100.0))
    assert late.status == "fail"
    assert "behind" in late.sentence


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = place.disk(tmp_path / "not" / "there" / "yet")
    assert found.facts["path"] == str(tmp_path)
    assert found.facts["sync_ms"] >= 0
    assert list(tmp_path.iterdir()) == [], "nothing is left"
    monkeypatch.setattr(place, "DISK_BYTES_MIN", 1 << 60)
    assert place.disk(tmp_path).status == "fail"


def test_ports_that_others_took_are_named(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        state.write(StackRecord(ports={"nats-server": other.getsockname()[1]}))
        finding = place.ports(tmp_path)
    assert finding.status == "warn"
    assert "nats-server" in finding.sentence
    assert place.ports(tmp_path).status == "ok"


@pytest.mark.parametrize(
    ("way", "given", "status"),
    [
        ({"namespace": True, "user_id": None, "error": ""}, False, "ok"),
        ({"namespace": False, "user_id": None, "error": ""}, False, "ok"),
        ({"namespace": False, "user_id": 65534, "error": ""}, False, "warn"),
        ({"namespace": False, "user_id": None, "error": "No way."}, False, "fail"),
        ({"namespace": False, "user_id": None, "error": "No way."}, True, "absent"),
    ],
)
def test_whom_postgres_runs_as(way: dict[str, Any], given: bool, status: str) -> None:
    assert namespaces.judge(way, given).status == status


def program(folder: Path, name: str, text: str) -> None:
    """An executable in a folder."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_binaries_that_are_old_or_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "nats_server_binary", lambda: tmp_path / "nats-server")
    assert binaries.nats_binary().status == "fail", "it is not there"
    program(tmp_path, "nats-server", "echo nats-server: v2.9.1")
    assert "2.9.1" in binaries.nats_binary().sentence
    assert binaries.nats_binary().status == "fail"
    program(tmp_path, "nats-server", "exit 127")
    assert "does not run" in binaries.nats_binary().sentence


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_torch", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if gpu.gpu().status == "ok":
        pytest.skip("this machine has one")
    assert gpu.gpu().status == "absent"
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA X, 550.1, 40960 MiB'")
    found = gpu.gpu()
    assert (found.status, "driver 550.1" in found.sentence) == ("ok", True)
    program(tmp_path, "nvidia-smi", "echo 'Driver/library version mismatch'; exit 18")
    found = gpu.gpu()
    assert (found.status, "mismatch" in found.sentence) == ("fail", True)
    program(tmp_path, "nvidia-smi", "exit 9")
    assert gpu.gpu().status == "fail"


# -- the object store --------------------------------------------------------------------------


def test_a_directory_proves_itself_and_keeps_nothing(tmp_path: Path) -> None:
    finding = store.object_store(tmp_path.as_uri(), tmp_path)
    assert finding.status == "ok", finding
    assert list(tmp_path.iterdir()) == []


class Overwriting(Directory):
    """Says "done" to a conditional write, as some stores do."""

    def write_if_absent(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True


class Boasting(Directory):
    """Says "done" to a conditional write, and does nothing."""

    def write_if_absent(self, name: str, data: bytes) -> bool:
        return True


class Lying(Directory):
    """Refuses a conditional write, and does it."""

    def write_if_absent(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return False


class Keeping(Directory):
    """Does not delete."""

    def delete(self, name: str) -> None: ...


class Garbling(Directory):
    """Gives other bytes than were written."""

    def read(self, name: str) -> bytes | None:
        found = super().read(name)
        return None if found is None else found[:-1]


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Overwriting, "conditional write"),
        (Boasting, "conditional write"),
        (Lying, "conditional write"),
        (Keeping, "delete"),
        (Garbling, "read"),
    ],
)
def test_a_store_that_breaks_a_promise_is_found_out(
    tmp_path: Path, kind: type[Directory], step: str
) -> None:
    with pytest.raises(ProofFailed) as caught:
        prove(kind(tmp_path))
    assert caught.value.step == step


def test_a_store_that_is_no_directory_is_a_failed_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = store.object_store((tmp_path / "file").as_uri(), tmp_path)
    assert (finding.status, finding.facts["step"]) == ("fail", "write")
    unknown = store.object_store("s3://key:secret@bucket", tmp_path)
    assert unknown.status in ("ok", "fail")
    assert "secret" not in unknown.sentence


# -- the baseline ------------------------------------------------------------------------------


def test_this_library_set_gives_the_committed_hashes() -> None:
    known = json.loads(baseline.BASELINE.read_text())["baselines"]
    finding = baseline.baseline()
    here = baseline.versions()
    if any(each["versions"] == here for each in known):
        assert finding.status == "ok", finding
    assert finding.status in ("ok", "warn"), finding


def run(chain: str, **versions: str) -> Mapping[str, Any]:
    """A run of one session."""
    return {"versions": {"numpy": "2", **versions}, "sessions": {"CartPole-v1": chain}}


def test_other_hashes_are_told_with_the_versions_that_differ() -> None:
    known = [run("aa"), run("bb", numpy="3")]
    assert baseline.compare(run("aa"), run("aa"), known).status == "ok"
    same = baseline.compare(run("cc"), run("cc"), known)
    assert (same.status, "same versions" in same.sentence) == ("fail", True)
    other = baseline.compare(run("cc", numpy="4"), run("cc", numpy="4"), known)
    assert (other.status, "numpy 4 (2)" in other.sentence) == ("warn", True)
    moved = baseline.compare(run("aa", numpy="4"), run("aa", numpy="4"), known)
    assert moved.status == "ok", "other versions that give the same are no trouble"


def test_a_machine_that_differs_from_itself_is_a_failure() -> None:
    finding = baseline.compare(run("aa"), run("ab"), [run("aa")])
    assert (finding.status, "CartPole-v1" in finding.sentence) == ("fail", True)


def test_nobody_who_may_not_write_gets_a_disk(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert place.disk(tmp_path).status == "fail"
