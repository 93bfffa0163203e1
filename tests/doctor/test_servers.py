"""Servers as they are: real ones, well set and badly set, and none at all."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nats
import psycopg
import pytest
from click.testing import CliRunner

from dsec.cli.main import main
from dsec.doctor import bus, database
from dsec.doctor.finding import Unseen
from dsec.doctor.servers import Asked, Servers, find_servers
from dsec.platform.bus import Bus
from dsec.platform.bus.inspection import BusFacts
from dsec.platform.database_facts import database_facts
from dsec.platform.stack.nats_server import NatsServerOptions, configuration, nats_server_binary
from dsec.platform.stack.ports import free_port

PASSWORD = "pass-word"


class Server:
    """A nats-server of the test's own, with its monitoring port."""

    def __init__(self, folder: Path, *, jetstream: bool = True, more: str = "") -> None:
        self.options = NatsServerOptions(folder, folder / "log", free_port(), PASSWORD, "2m")
        self.monitor_url = f"http://127.0.0.1:{free_port()}"
        text = configuration(self.options)
        if not jetstream:
            text = text[: text.index("jetstream {")]
        folder.mkdir(exist_ok=True)
        path = folder / "nats-server.conf"
        path.write_text(f"{text}{more}\nhttp: {self.monitor_url.removeprefix('http://')}\n")
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [nats_server_binary(), "-c", path], stdout=log, stderr=log
            )

    def asked(self, **other: object) -> Asked:
        """Questions to it."""
        return Asked.of(replace(servers(self.options.directory), **other))

    def wait(self) -> None:
        """Until it answers."""
        for _ in range(1000):
            facts = bus.server(self.asked(nats_url=self.options.url))
            if facts.status == "ok" or "answers at" not in facts.sentence:
                return
            time.sleep(0.05)
        raise AssertionError(self.options.log_path.read_text())


def servers(state_dir: Path) -> Servers:
    """None at all."""
    return Servers(None, None, None, None, state_dir, False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A NATS server with JetStream that syncs every two minutes, as is the default."""
    made = Server(tmp_path / "nats")
    try:
        made.wait()
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.nats
async def test_a_server_and_its_stream(server: Server) -> None:
    import asyncio

    url = server.options.url
    asked = server.asked(nats_url=url)

    def fresh() -> Asked:
        return server.asked(nats_url=url)

    found = await asyncio.to_thread(bus.server, asked)
    assert (found.status, found.facts["jetstream"]) == ("ok", True)
    assert PASSWORD not in found.sentence + json.dumps(found.facts)
    assert (await asyncio.to_thread(bus.stream, asked)).status == "absent"
    assert (await asyncio.to_thread(bus.clock, asked)).status == "absent"
    connection = await Bus.connect(url, "test")
    await connection.ensure_stream()
    await connection.close()
    assert (await asyncio.to_thread(bus.stream, fresh())).status == "ok"
    drift = await asyncio.to_thread(bus.clock, fresh())
    assert drift.status == "ok", drift
    assert abs(drift.facts["drift_s"]) < 1
    nc = await nats.connect(url)
    js = nc.jetstream()
    config = (await js.stream_info("DSEC")).config
    config.duplicate_window = 7
    await js.update_stream(config)
    await nc.close()
    changed = await asyncio.to_thread(bus.stream, fresh())
    assert changed.status == "fail"
    assert set(changed.facts["different"]) == {"duplicate_window"}


@pytest.mark.nats
def test_how_it_syncs_is_told_where_it_can_be_seen(server: Server) -> None:
    url = server.options.url
    unseen = bus.sync(server.asked(nats_url=url))
    assert (unseen.status, "DSEC_NATS_MONITOR_URL" in unseen.advice) == ("absent", True)
    seen = bus.sync(server.asked(nats_url=url, nats_monitor_url=server.monitor_url))
    assert (seen.status, seen.facts["sync_interval_s"]) == ("warn", 120.0)
    wrong = bus.sync(server.asked(nats_url=url, nats_monitor_url="ftp://u:p_w@host"))
    assert (wrong.status, "p_w" in wrong.sentence) == ("fail", False)


@pytest.mark.parametrize(("told", "seconds"), [("1s", 1.0), ("always", 0.0), ("500ms", 0.5)])
def test_how_the_embedded_server_syncs(tmp_path: Path, told: str, seconds: float) -> None:
    options = NatsServerOptions(tmp_path / "nats", tmp_path / "log", 1, PASSWORD, told)
    options.directory.mkdir()
    options.config_path.write_text(configuration(options))
    asked = Asked.of(replace(servers(tmp_path), nats_url=options.url, nats_is_embedded=True))
    found = bus.sync(asked)
    assert (found.status, found.facts["sync_interval_s"]) == ("ok", seconds)


@pytest.mark.nats
def test_a_server_without_jetstream_is_a_failure(tmp_path: Path) -> None:
    made = Server(tmp_path / "bare", jetstream=False)
    try:
        made.wait()
        asked = made.asked(nats_url=made.options.url)
        assert (bus.server(asked).status, "-js" in bus.server(asked).advice) == ("fail", True)
        with pytest.raises(Unseen, match="no JetStream"):
            bus.stream(asked)
        refused = bus.server(made.asked(nats_url=made.options.url.replace(PASSWORD, "wr0ng")))
        assert refused.status == "fail"
        assert "wr0ng" not in refused.sentence
    finally:
        made.process.kill()
        made.process.wait()


def test_versions_and_limits_that_are_too_small() -> None:
    facts = BusFacts("2.9.0", 1 << 20, 1, "", None, None)
    old = Asked.of(replace(servers(Path()), nats_url="nats://host"))
    old.bus._ask = lambda: facts
    assert (bus.server(old).status, "too old" in bus.server(old).sentence) == ("fail", True)
    small = Asked.of(replace(servers(Path()), nats_url="nats://host"))
    small.bus._ask = lambda: replace(facts, version="2.11.0", max_payload_bytes=1000)
    assert bus.server(small).status == "warn"


@pytest.mark.postgres
def test_a_database(fresh_database_url: str) -> None:
    asked = Asked.of(replace(servers(Path()), database_url=fresh_database_url))
    found = database.server(asked)
    assert (found.status, found.facts["encoding"]) == ("ok", "UTF8")
    assert "for-tests-only" not in found.sentence + json.dumps(found.facts)
    assert database.durability(asked).status == "ok"
    assert database.timescaledb(asked).status == "absent"
    drift = database.clock(asked)
    assert (drift.status, abs(drift.facts["drift_s"]) < 1) == ("ok", True)


@pytest.mark.postgres
def test_a_database_that_may_lose_rows_is_a_failure(fresh_database_url: str) -> None:
    name = fresh_database_url.rpartition("/")[2]
    with psycopg.connect(fresh_database_url, autocommit=True) as connection:
        connection.execute(f'alter database "{name}" set synchronous_commit = off')  # type: ignore[arg-type]
    asked = Asked.of(replace(servers(Path()), database_url=fresh_database_url))
    found = database.durability(asked)
    assert found.status == "fail"
    assert "synchronous_commit" in found.sentence
    assert "fsync" not in found.sentence


@pytest.mark.postgres
def test_databases_that_cannot_hold_the_log(fresh_database_url: str) -> None:
    facts = database_facts(fresh_database_url)
    cases = {
        "too old": replace(facts, settings={**facts.settings, "server_version_num": "140010"}),
        "standby": replace(facts, in_recovery=True),
        "LATIN1": replace(facts, settings={**facts.settings, "server_encoding": "LATIN1"}),
        "make tables": replace(facts, may_create=False),
    }
    for told, case in cases.items():
        asked = Asked.of(replace(servers(Path()), database_url=fresh_database_url))
        asked.database._ask = lambda case=case: case
        found = database.server(asked)
        assert (found.status, told in found.sentence) == ("fail", True), found
    client = Asked.of(replace(servers(Path()), database_url=fresh_database_url))
    client.database._ask = lambda: replace(facts, may_create=False, has_log=True)
    assert database.server(client).status == "ok"


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("installed", "offered", "licence", "status", "told"),
    [
        ("2.19.3", "2.19.3", "apache", "ok", "without compression"),
        ("2.19.3", "2.19.3", "timescale", "ok", "community"),
        ("", "2.19.3", "", "absent", "offers"),
        ("", "", "", "absent", "natively"),
    ],
)
def test_timescaledb_and_its_licence(
    database_url: str, installed: str, offered: str, licence: str, status: str, told: str
) -> None:
    facts = database_facts(database_url)
    asked = Asked.of(replace(servers(Path()), database_url=database_url))
    asked.database._ask = lambda: replace(
        facts,
        settings={**facts.settings, "timescaledb.license": licence},
        timescaledb=installed,
        timescaledb_offered=offered,
    )
    found = database.timescaledb(asked)
    assert (found.status, told in found.sentence) == (status, True), found


def test_servers_that_are_away_fail_once_and_name_no_secret() -> None:
    port = free_port()
    given = replace(
        servers(Path()),
        nats_url=f"nats://u:s3cret@127.0.0.1:{port}",
        database_url=f"postgresql://u:s3cret@127.0.0.1:{port}/d",
    )
    asked = Asked.of(given)
    for check in (bus.server, database.server):
        found = check(asked)
        assert found.status == "fail"
        assert f"127.0.0.1:{port}" in found.sentence
        assert "s3cret" not in found.sentence
    for other in (bus.stream, bus.clock, database.durability, database.clock):
        with pytest.raises(Unseen, match="cannot be asked"):
            other(asked)
    wrong = Asked.of(replace(given, database_url="mysql://u:s3cret@h/d"))
    assert database.server(wrong).status == "fail"


def test_what_the_environment_gives_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL", "DSEC_OBJECT_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert find_servers(tmp_path, {}, None).urls() == []
    monkeypatch.setenv("DSEC_NATS_URL", "nats://host:1")
    found = find_servers(tmp_path, {"DSEC_NATS_URL": "nats://host:1"}, None)
    assert (found.nats_url, found.database_url) == ("nats://host:1", None)


# -- the command -------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("DSEC_DATABASE_URL", raising=False)
    monkeypatch.setenv("DSEC_NATS_URL", f"nats://u:s3cret@127.0.0.1:{free_port()}")
    ran = CliRunner().invoke(main, ["doctor", "--json"])
    told = json.loads(ran.stdout)
    assert (ran.exit_code, told["ok"]) == (1, False)
    by_name = {check["name"]: check for check in told["checks"]}
    assert by_name["nats"]["status"] == "fail"
    assert by_name["nats"]["advice"]
    assert by_name["database"]["status"] == "absent"
    assert by_name["determinism"]["status"] in ("ok", "warn")
    assert "s3cret" not in ran.output
    assert not (tmp_path / "state").exists(), "it changes nothing"
    people = CliRunner().invoke(main, ["doctor"])
    assert people.exit_code == 1
    assert "→ Start it, or correct DSEC_NATS_URL" in people.stdout
    assert "s3cret" not in people.output
