"""The state directory: one owner, whole files, and sentences where it cannot be had."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.platform.stack import StackError, default_state_dir, stack_status, state, stop_stack
from dsec.platform.stack.identity import own_identity
from dsec.platform.stack.state import ProcessRecord, StackRecord, StateDir


def own_record(**more: object) -> StackRecord:
    own = own_identity()
    entry = ProcessRecord(name="supervisor", pid=own.pid, create_time=own.create_time, log_path="")
    return StackRecord(supervisor=entry, **more)  # type: ignore[arg-type]


def test_the_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_STATE_DIR", "/somewhere")
    assert default_state_dir() == Path("/somewhere")
    monkeypatch.delenv("DSEC_STATE_DIR")
    assert default_state_dir() == Path.home() / ".local/share/dsec"


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "state"), StateDir(tmp_path / "state")
    first.open()
    with pytest.raises(StackError, match=r"already up on .*, held, and is just starting"):
        second.open()
    first.write(own_record())
    with pytest.raises(StackError, match=f"already up on .*, held by process {os.getpid()}: use"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_record_comes_back_as_it_was_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    record = own_record(ports={"nats-server": 4222})
    directory.write(record)
    assert directory.read() == (record, None)
    assert directory.record_path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["stack.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[]", b'{"version": 7}', b'{"x": 1}'])
def test_a_damaged_record_is_said_and_read_as_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stack.json").write_bytes(content)
    record, problem = StateDir(tmp_path).read()
    assert record is None
    assert problem is not None
    assert problem.endswith("stack.json is damaged, and what it said is lost.")
    assert stack_status(tmp_path).problem == problem


def test_a_directory_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text("2\n")
    with pytest.raises(StackError, match=r'written by another version .* format is "2"'):
        StateDir(tmp_path).open()


def test_the_password_is_made_once_and_private(tmp_path: Path) -> None:
    password = StateDir(tmp_path).password()
    assert StateDir(tmp_path).password() == password
    assert (tmp_path / "password").stat().st_mode & 0o777 == 0o600


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match=r"The path .*file/state cannot be used"):
        StateDir(tmp_path / "file" / "state").open()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StackError, match=f"This user may not write to {tmp_path}"):
        StateDir(tmp_path / "state").open()


def test_a_directory_that_is_read_only_is_named(small_disk: Callable[..., Path]) -> None:
    disk = small_disk(8, "ro")
    with pytest.raises(StackError, match=r"This user may not write to .*DSEC_STATE_DIR"):
        StateDir(disk / "state").open()


def test_a_nearly_full_disk_is_refused_before_anything_starts(
    small_disk: Callable[..., Path],
) -> None:
    disk = small_disk(8)
    with pytest.raises(StackError, match=r"nearly full \(\d MB free, 256 MB needed\)"):
        StateDir(disk / "state").open()


def test_a_disk_that_is_full_leaves_the_old_record(
    small_disk: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FREE_BYTES_MIN", 0)
    directory = StateDir(small_disk(1))
    directory.write(own_record())
    ballast = directory.path / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while os.statvfs(directory.path).f_bavail:
            file.write(bytes(4096))
    with pytest.raises(StackError, match=r"The disk that holds .* is full, so writing stack.json"):
        directory.write(own_record(ports={f"server-{i}": i for i in range(1000)}))
    assert directory.read() == (own_record(), None)
    ballast.unlink()
    directory.open()
    directory.close()


def test_a_write_that_fails_for_space_leaves_the_old_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = StateDir(tmp_path)
    directory.write(own_record())

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        StackError, match=r"is full, so writing stack\.json failed: free some space"
    ):
        directory.write(StackRecord())
    assert directory.read() == (own_record(), None)
    assert os.listdir(tmp_path) == ["stack.json"]


async def test_nothing_there_is_a_stopped_stack(tmp_path: Path) -> None:
    status = stack_status(tmp_path / "none")
    assert (status.state, status.problem, status.processes) == ("stopped", None, ())
    assert not (await stop_stack(tmp_path / "none", 1.0)).was_running
    assert not (tmp_path / "none").exists()
