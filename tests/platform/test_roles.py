"""Who may do what on the bus, tried on a real server: every event by every role."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors
import pytest

from dsec.platform.bus import Bus, BusError, NotPermitted, connection
from dsec.platform.bus.refusals import GuardedClient
from dsec.platform.bus.retry import Retry
from dsec.platform.nats_users import deploy_file, users, variable
from dsec.platform.roles import OPERATOR, ROLES, SERVICES_BUCKET, Role
from dsec.platform.stack.nats_server import (
    NatsServerOptions,
    nats_server_binary,
    nats_server_process,
)
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess, ProcessSpec
from dsec_contracts import subjects
from dsec_contracts.catalog import EVENTS

pytestmark = pytest.mark.nats

REFUSED_WITHIN_S = 2.0
BY_NAME = {role.name: role for role in ROLES}
OWN_KEY = "0192f0c1-2345-7abc-8def-0123456789ab"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServerOptions]:
    """A server with every user, and the stream on it."""
    folder = tmp_path_factory.mktemp("roles")
    options = NatsServerOptions(
        folder,
        folder / "log",
        free_port(),
        "for-tests-only",
        user_passwords={role.user: f"of-{role.name}" for role in ROLES},
    )
    child = ChildProcess(nats_server_process(options))
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(child.wait_ready())
        loop.run_until_complete(_prepare(options))
        yield options
    finally:
        loop.run_until_complete(child.stop())
        loop.close()


async def _prepare(options: NatsServerOptions) -> None:
    async with connected(options, OPERATOR) as bus:
        await bus.ensure_stream()
        for role in ROLES:
            for durable in role.durables:
                only = durable.only
                await bus.consumer(durable.name, [only] if only else ["dsec.x", "dsec.y"])


@asynccontextmanager
async def connected(options: NatsServerOptions, user: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(options.url_of(user), user)
    try:
        yield bus
    finally:
        await bus.close()


async def may_publish(bus: Bus, subject: str) -> bool:
    """Whether the server takes it: JetStream acknowledges, or the refusal comes at once."""
    try:
        async with asyncio.timeout(REFUSED_WITHIN_S):
            await bus.publish_raw(subject, b"{}", {})
    except NotPermitted:
        return False
    return True


async def may_call(bus: Bus, call: str, body: object = None) -> bool:
    """Whether a call of the JetStream API is let through, whatever its answer is."""
    data = b"" if body is None else json.dumps(body).encode()
    try:
        await bus._nc.request(f"$JS.API.{call}", data, timeout=REFUSED_WITHIN_S)
    except NotPermitted:
        return False
    return True


def test_every_event_has_a_publisher() -> None:
    published = {event for role in ROLES for event in role.events}
    assert published == set(EVENTS)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
async def test_a_role_publishes_its_own_events_and_no_others(
    server: NatsServerOptions, role: Role
) -> None:
    async with connected(server, role.user) as bus:
        for event in EVENTS:
            subject = subjects.subject(event.event_name(), OWN_KEY)
            if event.event_name() == "worker.heartbeat":  # not in the stream: nobody acknowledges
                continue
            assert await may_publish(bus, subject) == (event in role.events), (role.name, subject)
        for subject in (*_fences_and_dead(), "dsec.feedback.given.x"):
            allowed = subject in role.may_publish() or (
                subject.startswith("dsec.fence.") and role.name == "scheduler"
            )
            assert await may_publish(bus, subject) == allowed, (role.name, subject)


def _fences_and_dead() -> list[str]:
    dead = [subjects.dead_letter(durable.name) for r in ROLES for durable in r.durables]
    return [subjects.fence("w1"), *dead]


async def test_a_heartbeat_is_a_workers(server: NatsServerOptions) -> None:
    async with connected(server, OPERATOR) as hearing:
        heard: list[bytes] = []

        async def on_message(headers: object, data: bytes) -> None:
            heard.append(data)

        await hearing.listen("dsec.worker.heartbeat.*", on_message)
        for role in ROLES:
            async with connected(server, role.user) as bus:
                await bus._nc.publish("dsec.worker.heartbeat.w1", role.name.encode())
                await bus._guarded.heard_out(2)
        await hearing._nc.flush()
        assert heard == [b"env-runtime"]


STREAM_CALLS = {
    "STREAM.DELETE.DSEC": set[str](),
    "STREAM.MSG.DELETE.DSEC": set[str](),
    "STREAM.SNAPSHOT.DSEC": set[str](),
    "STREAM.RESTORE.DSEC": set[str](),
    "STREAM.PURGE.DSEC": {"recorder"},
    "STREAM.UPDATE.DSEC": {"recorder"},
    "STREAM.CREATE.DSEC": {"recorder"},
    "STREAM.CREATE.OTHER": set[str](),
    "STREAM.DELETE.KV_dsec_lease_scheduler": set[str](),
    "STREAM.PURGE.KV_dsec_lease_scheduler": set[str](),
    "STREAM.DELETE.KV_dsec_services": set[str](),
    "STREAM.PURGE.KV_dsec_services": set[str](),
    "STREAM.MSG.GET.KV_dsec_services": {"reward", "client"},
    "STREAM.INFO.DSEC": set(BY_NAME),
    "STREAM.MSG.GET.DSEC": {"recorder", "scheduler", "env-runtime", "tool", "client"},
    "CONSUMER.LIST.DSEC": {"recorder", "scheduler", "client"},
    "CONSUMER.CREATE.DSEC": set[str](),
    "CONSUMER.DURABLE.CREATE.DSEC.recorder": set[str](),
    "CONSUMER.PAUSE.DSEC.recorder": set[str](),
    "ACCOUNT.PURGE.$G": set[str](),
}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
async def test_calls_of_the_stream(server: NatsServerOptions, role: Role) -> None:
    nothing = {"purge": None, "filter": "dsec.no.such", "config": {"name": "wrong"}}
    async with connected(server, role.user) as bus:
        for call, allowed in STREAM_CALLS.items():
            assert await may_call(bus, call, nothing) == (role.name in allowed), (role.name, call)
    async with connected(server, OPERATOR) as bus:
        assert (await bus.stream_state()).messages >= 0  # it is still there


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
async def test_a_durable_is_its_owners_alone(server: NatsServerOptions, role: Role) -> None:
    async with connected(server, role.user) as bus:
        for owner, durable in [(one, durable) for one in ROLES for durable in one.durables]:
            own, name = owner is role, durable.name
            made_for = f".{durable.only}" if durable.only else ""
            for call in (
                f"CONSUMER.CREATE.DSEC.{name}{made_for}",
                f"CONSUMER.DELETE.DSEC.{name}",
                f"CONSUMER.MSG.NEXT.DSEC.{name}",
            ):
                # What is let through must not be done: `{}` creates nothing, an expired fetch
                # brings nothing, and only those that are refused are asked to delete.
                if own and "CREATE" not in call:
                    continue
                assert await may_call(bus, call, {}) == own, (role.name, call)
            await bus._nc.publish(f"$JS.ACK.DSEC.{name}.1.1.1.1.0", b"+ACK")
            await bus._guarded.heard_out(2)
            refused = f"$js.ack.dsec.{name}.1.1.1.1.0" in bus._guarded._refused
            assert refused == (not own), (role.name, name)
    async with connected(server, OPERATOR) as bus:
        found = {state.name for state in await bus.consumers()}
        assert found >= {durable.name for r in ROLES for durable in r.durables}


async def test_a_durable_is_made_for_its_own_subject_alone(server: NatsServerOptions) -> None:
    async with connected(server, "dsec-reward") as bus:
        await bus.consumer("reward", ["dsec.session.stepped.*"])
        with pytest.raises(NotPermitted):
            await bus.consumer("reward", ["dsec.session.requested.*"], ack_wait_s=1)
        with pytest.raises(NotPermitted):
            await bus.consumer(
                "reward", ["dsec.session.stepped.*", "dsec.session.requested.*"], ack_wait_s=1
            )


async def test_a_worker_makes_and_removes_consumers_of_its_own(server: NatsServerOptions) -> None:
    name = f"lane-w{uuid.uuid4().hex}-0"
    async with connected(server, "dsec-env-runtime") as bus:
        consumer = await bus.consumer(
            name, ["dsec.reward.scored.x", "dsec.reward.missing.x"], ack="none"
        )
        assert await consumer.fetch(1, 0.1) == []
        await bus.delete_consumer(name)
    async with connected(server, "dsec-reward") as bus:
        with pytest.raises(NotPermitted):
            await bus.consumer(name, ["dsec.reward.scored.x", "dsec.reward.missing.x"])


CALLS_BY_OTHERS = (
    "$JS.API.STREAM.PURGE.DSEC",
    "$JS.API.STREAM.DELETE.DSEC",
    "$JS.API.CONSUMER.DELETE.DSEC.recorder",
)


async def test_what_the_server_itself_sends_for_a_worker_is_no_call_and_no_event(
    server: NatsServerOptions,
) -> None:
    """It looks at no permissions then: not at where an answer goes, nor a consumer's messages."""
    events = ["dsec.session.started.*", "dsec.session.ended.*"]
    async with connected(server, OPERATOR) as bus:
        await bus.consumer("recorder", ["dsec.x", "dsec.y"])
        before = await bus.stream_state()
        async with connected(server, "dsec-env-runtime") as worker:
            for subject in (*CALLS_BY_OTHERS, "dsec.reward.scored.x", subjects.fence("w1")):
                name = f"lane-{uuid.uuid4().hex}"
                config = {"name": name, "deliver_subject": subject, "filter_subjects": events}
                body = {"stream_name": "DSEC", "config": config | {"ack_policy": "none"}}
                call = f"$JS.API.CONSUMER.CREATE.DSEC.{name}"
                told = await worker._nc.request(call, json.dumps(body).encode(), timeout=2)
                if subject.startswith("dsec."):
                    assert b"forms a cycle" in told.data, subject
            for subject in CALLS_BY_OTHERS:
                await worker._nc.publish("$JS.API.STREAM.INFO.DSEC", b"", reply=subject)
            await worker.publish_raw(subjects.subject("session.started", OWN_KEY), b"{}", {})
            await worker._nc.flush()
        after = await bus.stream_state()
        assert after.last_sequence == before.last_sequence + 1
        assert after.messages == before.messages + 1
        assert "recorder" in {state.name for state in await bus.consumers()}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
async def test_nobody_hears_anothers_answers(server: NatsServerOptions, role: Role) -> None:
    async def ignore(headers: object, data: bytes) -> None: ...

    async with connected(server, role.user) as bus:
        for other in ROLES:
            inbox = f"{other.inbox_prefix}.>"
            if other is role:
                await bus.listen(inbox, ignore)
                continue
            with pytest.raises(NotPermitted, match="subscribe to"):
                await bus.listen(inbox, ignore)
        for everything in (">", "*.>", "$JS.>", "*.*", "dsec.>"):
            if role.name == "client" and everything == "dsec.>":
                await bus.listen(everything, ignore)
                continue
            with pytest.raises(NotPermitted):
                await bus.listen(everything, ignore)


async def test_an_inbox_that_is_not_ones_own_is_said_and_does_not_hang(
    server: NatsServerOptions,
) -> None:
    client = GuardedClient()
    await client.connect(server.url_of("dsec-reward"), error_cb=client.on_error)
    bus = Bus(client, "reward with the inbox of a client")
    try:
        with pytest.raises(NotPermitted, match="subscribe to _inbox"):
            async with asyncio.timeout(REFUSED_WITHIN_S):
                await bus.stream_state()
    finally:
        await bus.close()


async def test_a_refused_fetch_is_said(server: NatsServerOptions) -> None:
    async with connected(server, OPERATOR) as bus:
        consumer = await bus.consumer("recorder", ["dsec.x", "dsec.y"])
        subject = consumer._sub._nms
    async with connected(server, "dsec-tool") as bus:
        theirs = await bus._js.pull_subscribe_bind("recorder", subjects.STREAM)
        consumer._sub = theirs
        assert theirs._nms == subject
        assert await consumer.fetch(1, 0.2) == []
        with pytest.raises(BusError, match="does not let this user publish to"):
            await consumer.fetch(1, 0.2)


async def test_the_lease_is_the_schedulers(server: NatsServerOptions) -> None:
    for role in ROLES:
        async with connected(server, role.user) as bus:
            if role.name == "scheduler":
                lease = await bus.lease("scheduler", "me", 2)
                assert await lease.renew()
                assert await lease.renew()
                await lease.release()
            else:
                with pytest.raises(NotPermitted):
                    await bus.lease("scheduler", "me", 2)


async def test_budgets_are_the_reward_services_and_clients_read_them(
    server: NatsServerOptions,
) -> None:
    async with connected(server, "dsec-reward") as bus:
        bucket = await bus.bucket(SERVICES_BUCKET)
        assert await bucket.change("a", b"1", (await bucket.get("a")).revision)
    for role in ROLES:
        if role.name == "reward":
            continue
        async with connected(server, role.user) as bus:
            with pytest.raises(NotPermitted):
                await bus.bucket(SERVICES_BUCKET)
            if role.name == "client":
                read = await bus.existing_bucket(SERVICES_BUCKET)
                assert read is not None
                assert (await read.get("a")).value == b"1"
                assert not await may_publish(bus, f"$KV.{SERVICES_BUCKET}.a")
            else:
                with pytest.raises(NotPermitted):
                    await bus.existing_bucket(SERVICES_BUCKET)


async def test_a_stream_is_awaited_by_those_who_may_not_make_it(
    server: NatsServerOptions,
) -> None:
    for role in ROLES:
        async with connected(server, role.user) as bus:
            await bus.await_stream()
            if role.name == "recorder":
                await bus.ensure_stream()
            else:
                with pytest.raises(NotPermitted):
                    await bus.ensure_stream()


async def test_a_password_opens_its_own_user_alone(server: NatsServerOptions) -> None:
    client = GuardedClient()
    with pytest.raises((nats.errors.Error, OSError)):
        await client.connect(
            server.url_of("dsec-reward").replace("dsec-reward", OPERATOR),
            error_cb=client.on_error,
            allow_reconnect=False,
            connect_timeout=1,
        )


def test_the_deploy_file_says_the_same() -> None:
    path = Path(__file__).parents[2] / "deploy" / "nats" / "authorization.conf"
    assert path.read_text() == deploy_file(), "write it anew: `just nats-users`"


async def test_the_deploy_file_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Included in a configuration, with the passwords in the environment."""
    port, environment = free_port(), {variable(user): f"pw-{user}" for user in users()}
    (tmp_path / "authorization.conf").write_text(deploy_file())
    config = tmp_path / "server.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{tmp_path}/store" }}\n'
        "include ./authorization.conf\n"
    )
    argv = (str(nats_server_binary()), "-c", str(config))
    child = ChildProcess(ProcessSpec("nats", argv, tmp_path / "log", env=environment))
    try:
        bus = await Bus.connect(f"nats://dsec:pw-dsec@127.0.0.1:{port}", "test")
        monkeypatch.setattr(connection, "CONNECTING", Retry(wait_s_max=0.5, pause_s_max=0.1))
        with pytest.raises(BusError, match="no stream DSEC: the recorder and `dsec up` make it"):
            await bus.await_stream()
        await bus.ensure_stream()
        await bus.await_stream()
        await bus.close()
        bus = await Bus.connect(f"nats://dsec-reward:pw-dsec-reward@127.0.0.1:{port}", "test")
        assert await may_publish(bus, "dsec.reward.scored.x")
        assert not await may_publish(bus, "dsec.session.stepped.x")
        await bus.close()
    finally:
        await child.stop()
