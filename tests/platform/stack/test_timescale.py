"""TimescaleDB out of packages: where it comes from, how it is run, and what is said instead."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from dsec.platform.stack import Stack, StackError, StackOptions, debian, stack_status, timescale
from dsec.platform.stack.database_roles import OWNER
from dsec.platform.stack.debian import Distribution, PackageFetcher, mirrors_of, this_distribution
from dsec.platform.stack.identity import ProcessIdentity
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ChildProcess
from dsec.platform.stack.state import StateDir
from dsec.platform.stack.timescale import MARKER, package_for, timescale_programs

Eventually = Callable[[Callable[[], object]], Awaitable[None]]
NOWHERE = "http://127.0.0.1:1/debian/"
DEBIAN = Distribution("debian", "bookworm", "trixie", "main", Path("keys"))
UBUNTU = Distribution("ubuntu", "noble", "resolute", "main universe", Path("keys"))
DIES_WITH_PARENT = """
import os, sys
from pathlib import Path
from dsec.platform.stack.process import ChildProcess, ProcessSpec
spec = ProcessSpec("sleep", ("/bin/sleep", "99"), Path(sys.argv[1]), user_id=65534, root=Path("/"))
print(ChildProcess(spec).identity.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_mirrors_are_the_machines_own_and_nobody_elses() -> None:
    told = """\
http://some.mirror/debian/ bookworm main
http://other.mirror/debian/ bookworm main
http://some.mirror/debian/ bookworm-updates main
http://some.mirror/debian-security/ bookworm-security main
http://some.mirror/debian/ bookworm-backports main
http://vendor/linux/debian/ bookworm stable
http://vendor/apt/ bookworm main
"""
    assert mirrors_of(told, DEBIAN) == {
        "trixie": "http://some.mirror/debian/",
        "trixie-updates": "http://some.mirror/debian/",
        "trixie-security": "http://some.mirror/debian-security/",
    }
    told = """\
http://ppa/someone/ubuntu/ noble main
http://some.mirror/ubuntu/ noble main
http://some.mirror/ubuntu/ noble universe
http://security.mirror/ubuntu/ noble-security universe
"""
    assert mirrors_of(told, UBUNTU) == {
        "resolute": "http://some.mirror/ubuntu/",
        "resolute-security": "http://security.mirror/ubuntu/",
    }


def test_hooks_of_the_systems_apt_are_not_run_and_its_proxies_are_used(tmp_path: Path) -> None:
    system = """\
APT::Update::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";
Acquire::http::Proxy "http://proxy:3128";
Dir::State "var/lib/apt";
"""
    ours = PackageFetcher(tmp_path, tmp_path / "log", DEBIAN)._configuration(system)
    assert ours.splitlines()[0] == 'Acquire::http::Proxy "http://proxy:3128";'
    assert "Post-Invoke" not in ours
    assert 'Dir::Etc::parts "/dev/null";' in ours


def test_the_newest_postgresql_is_taken_unless_there_is_a_database(tmp_path: Path) -> None:
    names = [f"postgresql-{major}-timescaledb" for major in (9, 17, 18)]
    names.append("postgresql-19-repack")
    assert package_for(tmp_path, names) == "postgresql-18-timescaledb"
    (tmp_path / "PG_VERSION").write_text("17\n")
    assert package_for(tmp_path, names) == "postgresql-17-timescaledb"
    with pytest.raises(StackError, match="has no package postgresql-17-timescaledb"):
        package_for(tmp_path, names[2:])


@pytest.mark.parametrize(
    ("told", "missing", "said"),
    [
        ({"ID": "fedora", "PRETTY_NAME": "Fedora 44"}, "", "and this is Fedora 44: do that"),
        ({"ID": "debian"}, "apt-get", "apt-get is not on the PATH of this debian: do that"),
        ({"ID": "ubuntu"}, "", "install ubuntu-archive-keyring, or do that"),
    ],
)
def test_where_it_cannot_be_had_a_sentence_says_what_to_do_instead(
    told: dict[str, str], missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: told)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/bin/{tool}")
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    with pytest.raises(StackError, match=said):
        this_distribution("do that")


@pytest.mark.timescaledb
async def test_without_a_network_nothing_is_left_half_made(
    timescale_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian, "mirrors_of", lambda *_: {"trixie": NOWHERE})
    root = tmp_path / "root"
    with pytest.raises(StackError, match=r"or run on plain PostgreSQL: `dsec up`. .* apt-get ex"):
        await timescale_programs(root, tmp_path / "apt.log", print)
    assert not (root / MARKER).exists()
    # The compiler behind `jit` is three times as large as all the rest.
    assert not list(timescale_root.glob("**/libLLVM*"))
    # What is there already needs no network, and no apt-get.
    monkeypatch.setattr(timescale, "this_distribution", None)
    await timescale_programs(timescale_root, tmp_path / "apt.log", print)


@pytest.mark.timescaledb
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
async def test_where_namespaces_are_forbidden_root_changes_its_root(
    timescale_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timescale, "NAMESPACE_TOOL", "no-such-program")
    programs = await timescale_programs(timescale_root, tmp_path / "probe.log", print)
    directory = timescale_root / "another"
    server = PostgresOptions(directory, tmp_path / "log", free_port(), "x", True)
    child = ChildProcess(await prepare_postgres(server, programs))
    await child.wait_ready()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create extension timescaledb")
    assert Path(f"/proc/{child.identity.pid}/root").samefile(timescale_root)
    assert server.data_dir.stat().st_uid == Path(f"/proc/{child.identity.pid}").stat().st_uid != 0
    await child.stop()
    assert child.returncode == 0
    shutil.rmtree(directory)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(StackError, match="user namespace, which this machine forbids"):
        await timescale_programs(timescale_root, tmp_path / "probe.log", print)


def start_supervisor_of_sleep(log_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DIES_WITH_PARENT, str(log_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
async def test_a_process_with_another_root_and_user_dies_with_its_supervisor(
    tmp_path: Path, eventually: Eventually
) -> None:
    supervisor = start_supervisor_of_sleep(tmp_path / "log")
    assert supervisor.stdout is not None
    child = ProcessIdentity.of(int(supervisor.stdout.readline()))
    assert Path(f"/proc/{child.pid}").stat().st_uid == 65534
    supervisor.communicate()
    await eventually(lambda: not child.is_alive())


@pytest.fixture
def state_dir(timescale_root: Path, tmp_path: Path) -> Iterator[Path]:
    """A state directory in which TimescaleDB is unpacked already."""
    state, root = tmp_path / "state", tmp_path / "state" / "timescaledb"
    for part in ("usr", "etc", "dev"):
        shutil.copytree(timescale_root / part, root / part, symlinks=True, copy_function=os.link)
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / link).symlink_to(f"usr/{link}")
    (root / "tmp").mkdir()
    shutil.copy(timescale_root / MARKER, root)
    yield state
    shutil.rmtree(root)


@pytest.mark.timescaledb
@pytest.mark.stack
async def test_a_stack_with_timescaledb_keeps_it(
    state_dir: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.platform.stack.state.LEFTOVER_STOP_GRACE_S", 10.0)
    asked = StackOptions(state_dir, nats_url=nats_url, timescaledb=True)
    async with Stack(asked, on_progress=print) as stack:
        await stack.start_servers()
        with psycopg.connect(stack.database_url_of(OWNER), autocommit=True) as connection:
            connection.execute("create extension timescaledb; create table kept as select 42 as x")
        # As if the supervisor were gone and its record lost.
        (process,) = stack_status(state_dir).processes
        left = await StateDir(state_dir).end_leftovers(None)
        assert left == (f"postgres (pid {process.pid})",)
    not_asked = StackOptions(state_dir, nats_url=nats_url)
    async with Stack(not_asked, on_progress=print) as stack:
        endpoints = await stack.start_servers()
        with psycopg.connect(endpoints.database_url) as connection:
            assert connection.execute("select x from kept").fetchone() == (42,)


@pytest.mark.parametrize("url", [None, "postgresql://h/d"])
async def test_timescaledb_for_what_is_something_else_is_refused(
    tmp_path: Path, url: str | None
) -> None:
    (tmp_path / "postgres" / "data").mkdir(parents=True)
    said = "is in a plain PostgreSQL" if url is None else "give one of them"
    options = StackOptions(tmp_path, nats_url="nats://h", database_url=url, timescaledb=True)
    async with Stack(options, on_progress=print) as stack:
        with pytest.raises(StackError, match=said):
            await stack.start_servers()
