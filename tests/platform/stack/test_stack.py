"""The whole stack: up, killed in every way, up again with the same data, down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import psycopg
import pytest

from dsec.platform.bus import Bus, StreamOptions
from dsec.platform.migrations import migrate
from dsec.platform.nats_users import users
from dsec.platform.roles import OPERATOR
from dsec.platform.stack import (
    Endpoints,
    ServiceCommand,
    Stack,
    StackError,
    StackOptions,
    StackStatus,
    stack_status,
    state,
    stop_stack,
)
from dsec.platform.stack import stack as stack_module
from dsec.platform.stack.database_roles import OWNER
from dsec.platform.stack.identity import ProcessIdentity
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, owner_url, prepare_postgres
from dsec.platform.stack.process import ChildProcess
from dsec.platform.stack.state import StateDir

pytestmark = [pytest.mark.nats, pytest.mark.postgres, pytest.mark.stack]

Eventually = Callable[[Callable[[], object]], Awaitable[None]]
SLEEP = (sys.executable, "-c", "import time; time.sleep(99)")
DOWN_WITHIN_S = 60.0
CONNECTIONS_MAX = 100


def owner_of(state_dir: Path, endpoints: Endpoints) -> str:
    """The URL by which the database's owner reaches it."""
    return owner_url(endpoints.database_url, StateDir(state_dir).password())


async def publish(state_dir: Path, endpoints: Endpoints) -> int:
    """Publish one message and insert one row; return how many there are of both."""
    password = StateDir(state_dir).nats_passwords(users())[OPERATOR]
    url = f"nats://{OPERATOR}:{password}@{endpoints.nats_url.rpartition('@')[2]}"
    client = await nats.connect(url, connect_timeout=5)
    stream = client.jetstream()
    await stream.add_stream(name="TEST", subjects=["test.>"])
    seq = (await stream.publish("test.a", b"x")).seq
    await client.close()
    with psycopg.connect(owner_of(state_dir, endpoints)) as connection:
        connection.execute("create table if not exists test (x int)")
        connection.execute("insert into test values (1)")
        row = connection.execute("select count(*) from test").fetchone()
    assert row == (seq,)
    return seq


def pid_of(status: StackStatus, name: str) -> int:
    return next(process.pid for process in status.processes if process.name == name)


def nothing_left(status: StackStatus) -> bool:
    return not any(
        ProcessIdentity(process.pid, process.since).is_alive() for process in status.processes
    )


async def test_kill_9_of_the_supervisor_then_up_then_down(
    tmp_path: Path, start_supervisor: Callable[..., Any], eventually: Eventually
) -> None:
    state_dir = tmp_path / "state"
    first = start_supervisor(state_dir, *SLEEP)
    assert await publish(state_dir, first.endpoints) == 1
    status = stack_status(state_dir)
    assert (status.state, status.problem) == ("running", None)
    assert status.supervisor is not None
    assert status.supervisor.pid == first.process.pid
    assert [process.name for process in status.processes] == ["nats-server", "postgres", "service"]
    assert status.endpoints == first.endpoints

    with pytest.raises(StackError, match=f"already up on .* by process {first.process.pid}"):
        async with Stack(StackOptions(state_dir), on_progress=print) as stack:
            await stack.start_servers()
    assert stack_status(state_dir) == status

    first.kill()
    await eventually(lambda: nothing_left(status))
    after = stack_status(state_dir)
    assert after.state == "stopped"
    assert (
        after.problem
        == "The last run was not stopped in order: `dsec up` starts from what it left."
    )

    second = start_supervisor(state_dir, *SLEEP)
    assert second.endpoints == first.endpoints
    assert await publish(state_dir, second.endpoints) == 2
    running = stack_status(state_dir)
    result = await stop_stack(state_dir, DOWN_WITHIN_S)
    assert (result.was_running, result.killed, result.ended_leftovers) == (True, False, ())
    assert second.process.wait(DOWN_WITHIN_S) == 0
    assert nothing_left(running)
    assert stack_status(state_dir) == StackStatus(
        state="stopped",
        state_dir=state_dir,
        supervisor=None,
        endpoints=None,
        processes=(),
        problem=None,
    )


async def test_killed_servers_and_services_come_back_with_their_data(
    tmp_path: Path, eventually: Eventually
) -> None:
    said: list[str] = []
    options = StackOptions(tmp_path, services=(ServiceCommand("two", SLEEP, replicas=2),))
    async with Stack(options, on_progress=said.append) as stack:
        endpoints = await stack.start_servers()
        await stack.start_services({"OWN": "1"})
        assert await publish(tmp_path, endpoints) == 1
        status = stack_status(tmp_path)
        for name in ("nats-server", "postgres", "two-1"):
            os.kill(pid_of(status, name), signal.SIGKILL)
        await eventually(lambda: f"{'postgres'} was started again." in said)
        await eventually(lambda: "nats-server was started again." in said)
        await eventually(lambda: pid_of(stack_status(tmp_path), "two-1") != pid_of(status, "two-1"))
        assert await publish(tmp_path, endpoints) == 2
        now = stack_status(tmp_path)
        assert now.state == "running"
        assert pid_of(now, "two-0") == pid_of(status, "two-0")
        os.kill(os.getpid(), signal.SIGTERM)
        await stack.wait()
    assert nothing_left(now)
    assert any(text.startswith("nats-server was killed by SIGKILL; its log") for text in said)


async def test_a_service_is_told_where_everything_is(
    tmp_path: Path, nats_url: str, database_url: str, eventually: Eventually
) -> None:
    code = "import os,time;print([os.environ[n] for n in {!r}],flush=True);time.sleep(99)"
    names = ["OWN", "DSEC_NATS_URL", "DSEC_DATABASE_URL", "DSEC_OBJECT_STORE_URL"]
    service = ServiceCommand("tell", (sys.executable, "-c", code.format(names)))
    options = StackOptions(
        tmp_path, nats_url=nats_url, database_url=database_url, services=(service,)
    )
    async with Stack(options, on_progress=print) as stack:
        endpoints = await stack.start_servers()
        assert endpoints.object_store_url == f"file://{tmp_path}/objects"
        await stack.start_services({"OWN": "1"})
        log = tmp_path / "logs" / "tell.log"
        told = str(["1", nats_url, database_url, endpoints.object_store_url])
        await eventually(lambda: told in log.read_text())
        # Servers given by URL are neither started …
        assert [process.name for process in stack_status(tmp_path).processes] == ["tell"]
    # … nor stopped.
    await (await nats.connect(nats_url)).close()
    psycopg.connect(database_url).close()


STOPS_SLOWLY = """
import os, signal, socket, sys, time, urllib.parse
from pathlib import Path
mine, others = Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]]
def stop(*_):
    begin = time.monotonic()
    mine.touch()
    while time.monotonic() < begin + 5 and not all(other.exists() for other in others):
        time.sleep(0.01)
    time.sleep(0.1)
    url = urllib.parse.urlsplit(os.environ["DSEC_NATS_URL"])
    socket.create_connection((url.hostname, url.port)).close()
    print(begin, time.monotonic(), flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(99)
"""


async def test_services_stop_turn_by_turn_and_servers_after_them(
    tmp_path: Path, database_url: str, eventually: Eventually
) -> None:
    turns = {"last": 2, "one": 1, "other": 1, "first": 0}

    def command(name: str) -> tuple[str, ...]:
        """It waits for those of its turn, which are told to stop at the same time."""
        together = [other for other, turn in turns.items() if turn == turns[name]]
        stopping = [str(tmp_path / f"{other}.stops") for other in (name, *together)]
        return (sys.executable, "-c", STOPS_SLOWLY, *stopping)

    services = tuple(
        ServiceCommand(name, command(name), stop_turn=turn) for name, turn in turns.items()
    )
    logs = {name: tmp_path / "logs" / f"{name}.log" for name in turns}
    options = StackOptions(tmp_path, database_url=database_url, services=services)
    async with Stack(options, on_progress=print) as stack:
        await stack.start_servers()
        await stack.start_services({})
        await eventually(lambda: all("ready" in path.read_text() for path in logs.values()))
    # A service without the server that it needs to the end would have told of no times.
    begin, end = {}, {}
    for name, path in logs.items():
        begin[name], end[name] = map(float, path.read_text().split()[1:])
    assert end["first"] <= min(begin["one"], begin["other"])
    assert max(begin["one"], begin["other"]) < min(end["one"], end["other"]), "together"
    assert max(end["one"], end["other"]) <= begin["last"]


async def test_each_service_has_its_role_in_the_database(
    tmp_path: Path, nats_url: str, eventually: Eventually
) -> None:
    code = "import os,time;print(os.environ['DSEC_DATABASE_URL'],flush=True);time.sleep(99)"
    names = ("recorder", "env-runtime", "reward")
    services = tuple(ServiceCommand(name, (sys.executable, "-c", code)) for name in names)
    options = StackOptions(tmp_path, nats_url=nats_url, services=services)
    (tmp_path / "reader-password").write_text("of an earlier version")
    async with Stack(options, on_progress=print) as stack:
        endpoints = await stack.start_servers()
        migrate(stack.database_url_of(OWNER))
        await stack.start_services({})
        told = {"client": endpoints.database_url}
        for name in names:
            log = tmp_path / "logs" / f"{name}.log"
            await eventually(lambda log=log: log.read_text().endswith("\n"))
            told[name] = log.read_text().strip()
        assert {name: urlsplit(url).username for name, url in told.items()} == {
            "client": "dsec_client",
            "recorder": "dsec_recorder",
            "env-runtime": "dsec_worker",
            "reward": "dsec_reader",
        }
        assert len({urlsplit(url).password for url in told.values()}) == len(told)
        for name, url in told.items():
            with psycopg.connect(url, autocommit=True) as connection:
                assert connection.execute("select count(*) from event_log").fetchone() == (0,)
                call = "select event_log_partition('2031-01-01', 99)"
                if name == "recorder":
                    connection.execute(call)
                    connection.execute("insert into log_floor values (1, now(), 0, now())")
                    continue
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(call)
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(endpoints.database_url.rpartition("/")[0] + "/postgres")
        assert owner_of(tmp_path, endpoints) == stack.database_url_of(OWNER)
        _readers_take_every_connection(told["env-runtime"], told["recorder"])
    for path in tmp_path.rglob("*password*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not (tmp_path / "reader-password").exists()


def _readers_take_every_connection(reader_url: str, recorder_url: str) -> None:
    with contextlib.ExitStack() as held:
        said = ""
        for _ in range(CONNECTIONS_MAX + 1):
            try:
                held.enter_context(psycopg.connect(reader_url))
            except psycopg.OperationalError as error:
                said = str(error)
                break
        assert "reserved" in said
        psycopg.connect(recorder_url).close()


async def test_a_database_that_an_earlier_version_made_gets_the_roles(
    tmp_path: Path, nats_url: str
) -> None:
    """There the recorder and clients were the owner, and one role read."""
    directory = StateDir(tmp_path)
    directory.open()
    directory.close()
    before = PostgresOptions(
        directory.postgres_dir, directory.log_path("postgres"), free_port(), directory.password()
    )
    child = ChildProcess(await prepare_postgres(before))
    await child.wait_ready()
    migrate(before.url)
    with psycopg.connect(before.url) as owner:
        owner.execute("insert into log_floor values (1, now(), 41, now())")
        owner.execute("create role dsec_reader login password 'x'")
        owner.execute("grant usage on schema public to dsec_reader")
        owner.execute("grant select on all tables in schema public to dsec_reader")
    await child.stop()
    async with Stack(StackOptions(tmp_path, nats_url=nats_url), on_progress=print) as stack:
        endpoints = await stack.start_servers()
        migrate(stack.database_url_of(OWNER))
        await stack.start_services({})
        for user in ("dsec_recorder", "dsec_reader", "dsec_worker", "dsec_client"):
            with psycopg.connect(stack.database_url_of(user)) as connection:
                found = connection.execute("select sequence from log_floor").fetchone()
                assert found == (41,)
        with psycopg.connect(stack.database_url_of("dsec_recorder")) as recorder:
            recorder.execute("update log_floor set sequence = 42")
            recorder.execute("select event_log_partition('2031-01-01', 99)")
        assert endpoints.database_url == stack.database_url_of("dsec_client")


async def test_each_service_is_its_own_user_of_the_bus(
    tmp_path: Path, database_url: str, eventually: Eventually
) -> None:
    code = "import os,time;print(os.environ['DSEC_NATS_URL'],flush=True);time.sleep(99)"
    services = tuple(
        ServiceCommand(name, (sys.executable, "-c", code)) for name in ("reward", "tool", "other")
    )
    options = StackOptions(tmp_path, database_url=database_url, services=services)
    async with Stack(options, on_progress=print) as stack:
        await stack.start_servers()
        await stack.start_services({})
        logs = {name: tmp_path / "logs" / f"{name}.log" for name in ("reward", "tool", "other")}
        await eventually(lambda: all("nats:" in path.read_text() for path in logs.values()))
        urls = {name: urlsplit(path.read_text().strip()) for name, path in logs.items()}
    assert {name: url.username for name, url in urls.items()} == {
        "reward": "dsec-reward",
        "tool": "dsec-tool",
        "other": "dsec-client",
    }
    assert len({url.password for url in urls.values()}) == 3
    passwords = tmp_path / "nats-passwords.json"
    assert passwords.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "nats" / "nats-server.conf").stat().st_mode & 0o777 == 0o600
    passwords.write_text("{")  # damaged: made anew
    async with Stack(options, on_progress=print) as stack:
        await stack.start_servers()
        await (await nats.connect(stack.nats_url_of("dsec-tool"))).close()


async def test_a_busy_given_port_starts_nothing_and_a_damaged_record_is_no_obstacle(
    tmp_path: Path, database_url: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        options = StackOptions(tmp_path, database_url=database_url, nats_port=port)
        async with Stack(options, on_progress=print) as stack:
            with pytest.raises(StackError, match=f"Port {port} on 127.0.0.1, given for nats-serv"):
                await stack.start_servers()
    assert stack_status(tmp_path).state == "stopped"
    (tmp_path / "stack.json").write_text("{")
    said: list[str] = []
    async with Stack(options, on_progress=said.append) as stack:
        endpoints = await stack.start_servers()
        assert urlsplit(endpoints.nats_url).port == port
    assert said[0].endswith(
        "is damaged, and what it said is lost. Starting without it; the data are not touched."
    )


async def test_a_server_left_running_is_ended_though_the_record_is_lost(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = StackOptions(tmp_path, database_url=database_url)
    async with Stack(options, on_progress=print) as stack:
        await stack.start_servers()
        left = pid_of(stack_status(tmp_path), "nats-server")
        (tmp_path / "stack.json").write_text("{")
        directory = StateDir(tmp_path)
        # As if the supervisor were gone, on a system without a death signal.
        assert await directory.end_leftovers(None) == (f"nats-server (pid {left})",)


async def test_a_stop_signal_ends_a_start_that_is_under_way(tmp_path: Path) -> None:
    async with Stack(StackOptions(tmp_path), on_progress=print) as stack:
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGINT)
        with pytest.raises(StackError, match="asked to stop while it was starting"):
            await stack.start_servers()
    assert stack_status(tmp_path).state == "stopped"
    assert not (tmp_path / "postgres" / "data").exists()


async def test_a_supervisor_that_does_not_stop_is_killed(
    tmp_path: Path, start_supervisor: Callable[..., Any]
) -> None:
    supervisor = start_supervisor(tmp_path / "state", *SLEEP)
    status = stack_status(tmp_path / "state")
    supervisor.process.send_signal(signal.SIGSTOP)
    result = await stop_stack(tmp_path / "state", 0.2)
    assert (result.was_running, result.killed) == (True, True)
    assert nothing_left(status)
    assert stack_status(tmp_path / "state").supervisor is None


async def test_a_disk_that_fills_while_the_stack_is_up(
    small_disk: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FREE_BYTES_MIN", 0)
    monkeypatch.setattr(stack_module, "SERVER_RESTARTS_MAX", 2)
    state_dir = small_disk(128)
    ballast = state_dir / "ballast"
    options = StackOptions(state_dir)
    async with Stack(options, on_progress=print) as stack:
        assert await publish(state_dir, await stack.start_servers()) == 1
        with _until_it_is_full(), ballast.open("wb", buffering=0) as file:
            while os.statvfs(state_dir).f_bavail:
                file.write(bytes(4096))
        os.kill(pid_of(stack_status(state_dir), "postgres"), signal.SIGKILL)
        with pytest.raises(StackError, match=r"The disk that holds .* is full"):
            await asyncio.wait_for(stack.wait(), DOWN_WITHIN_S)
    ballast.unlink()
    async with Stack(options, on_progress=print) as stack:
        assert await publish(state_dir, await stack.start_servers()) == 2


@contextlib.contextmanager
def _until_it_is_full() -> Iterator[None]:
    """Somebody else may take the last block of a disk."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


async def test_several_nats_nodes_are_one_cluster(tmp_path: Path) -> None:
    options = StackOptions(tmp_path, nats_nodes=3, database_url="postgresql://127.0.0.1:1/none")
    async with Stack(options, on_progress=print) as stack:
        endpoints = await stack.start_servers()
        urls = [endpoints.nats_url, stack.nats_url_of(OPERATOR), stack.nats_url_of("dsec-reward")]
        places = [[one.rpartition("@")[2] for one in url.split(",")] for url in urls]
        assert len(set(places[0])) == 3
        assert places[1:] == [places[0]] * 2, "each user is told of all nodes"
        bus = await Bus.connect(urls[1], "test")
        await bus.ensure_stream(StreamOptions(max_bytes=256 << 20, replicas=3))
        assert (await bus.stream_state()).replicas == 3
        await bus.close()
        strays = {stray.pid for stray in StateDir(tmp_path)._strays()}
        assert len(strays) == 3, "a supervisor that lost its record would find them"
    assert not StateDir(tmp_path)._strays()
