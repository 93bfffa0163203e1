"""The bus on three real nodes: what a leader's death leaves as it was."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dsec.platform.bus import (
    Bus,
    BusError,
    Consumer,
    Lease,
    PublishRefused,
    StreamOptions,
    StreamState,
)
from dsec.platform.bus.publisher import Publisher
from dsec.platform.bus.retry import AWAY
from dsec.platform.clock import utc_now
from dsec.platform.nats_users import users, variable
from dsec.platform.roles import OPERATOR
from dsec.platform.stack.nats_server import (
    ClusterOptions,
    NatsServerOptions,
    nats_server_binary,
    nats_server_process,
)
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess, ProcessSpec
from dsec_contracts import RewardRescoreRequested, subjects
from dsec_contracts.reward import RescoreFact

pytestmark = pytest.mark.nats
NODES = 3
STREAM = StreamOptions(max_bytes=256 << 20, replicas=NODES)
LANES = 4
RESCORES_EACH = 25
CAUGHT_UP_S_MAX = 60.0
PASSWORD = "for-tests-only"


@dataclass
class Cluster:
    """Three nodes on loopback."""

    nodes: dict[str, NatsServerOptions]
    running: dict[str, ChildProcess] = field(default_factory=dict)

    def url(self, user: str = OPERATOR) -> str:
        """All nodes, for a user."""
        return ",".join(node.url_of(user) for node in self.nodes.values())

    async def start(self, name: str) -> None:
        self.running[name] = ChildProcess(nats_server_process(self.nodes[name]))
        await self.running[name].wait_ready()

    async def kill(self, name: str) -> None:
        child = self.running.pop(name)
        child.send_signal(signal.SIGKILL)
        await child.stop()

    async def stop(self) -> None:
        for child in self.running.values():
            await child.stop()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three nodes, each started just now."""
    ports = [free_port() for _ in range(NODES)]
    nodes = [
        NatsServerOptions(
            directory=tmp_path / f"node-{number}",
            log_path=tmp_path / f"node-{number}.log",
            port=free_port(),
            password=PASSWORD,
            user_passwords={user: PASSWORD for user in users() if user != OPERATOR},
            cluster=ClusterOptions(
                port, tuple(one for one in ports if one != port), "between-nodes"
            ),
        )
        for number, port in enumerate(ports)
    ]
    made = Cluster({node.server_name: node for node in nodes})
    try:
        for name in made.nodes:
            await made.start(name)
        yield made
    finally:
        await made.stop()


async def taken(lease: Lease) -> None:
    """Wait until a lease is ours: one that was just made, or moved, may have no leader yet."""
    async with asyncio.timeout(CAUGHT_UP_S_MAX):
        while not await lease.renew():  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def caught_up(bus: Bus) -> StreamState:
    """The stream's state, once it has a leader and every node has all of it."""
    async with asyncio.timeout(CAUGHT_UP_S_MAX):
        while True:
            with suppress(BusError, *AWAY):
                state = await bus.stream_state()
                if state.leader and not state.behind:
                    return state
            await asyncio.sleep(0.1)


async def led(bus: Bus) -> str:
    """The stream's leader, once whoever asks is connected to a node that lives."""
    while True:
        with suppress(BusError, *AWAY):
            if leader := (await bus.stream_state()).leader:
                return leader
        await asyncio.sleep(0.1)


async def nodes_of(bus: Bus, consumer: str) -> int:
    """How many nodes keep a consumer."""
    info = await bus._js.consumer_info("DSEC", consumer)
    return 1 + len((info.cluster and info.cluster.replicas) or [])


async def test_a_stream_is_kept_as_often_as_asked_for(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url(), "test")
    try:
        await bus.ensure_stream(StreamOptions(max_bytes=256 << 20))  # waits for the cluster
        await bus.consumer("before", ["dsec.>"])
        assert (await bus.stream_state()).replicas == 1, "who does not ask gets one"
        await bus.ensure_stream(STREAM)
        assert (await caught_up(bus)).replicas == NODES
        await bus.ensure_stream(StreamOptions(max_bytes=256 << 20))
        assert (await caught_up(bus)).replicas == NODES, "who does not ask changes nothing"
        # What hangs on the stream is kept as often: without it, the stream is of no use.
        await bus.consumer("after", ["dsec.>"])
        await bus.lease("scheduler", "me", 2)
        for name in ("before", "after"):
            async with asyncio.timeout(CAUGHT_UP_S_MAX):
                while await nodes_of(bus, name) < NODES:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        lease = await bus._js.stream_info("KV_dsec_lease_scheduler")
        assert lease.config.num_replicas == NODES
    finally:
        await bus.close()


async def test_a_lease_follows_a_stream_that_is_kept_more_often(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url(), "test")
    try:
        await bus.ensure_stream(StreamOptions(max_bytes=256 << 20))
        await taken(await bus.lease("scheduler", "me", 2))
        await bus.ensure_stream(STREAM)
    finally:
        await bus.close()
    scheduler = await Bus.connect(cluster.url("dsec-scheduler"), "test")
    try:
        lease = await scheduler.lease("scheduler", "me", 3)
        info = await scheduler._js.stream_info("KV_dsec_lease_scheduler")
        assert (info.config.num_replicas, info.config.max_age) == (NODES, 3)
        await taken(lease)
    finally:
        await scheduler.close()


async def test_lanes_of_one_worker_publish_at_once(cluster: Cluster) -> None:
    """A replicated stream takes no two publishes at a time that expect the same subject's sequence,
    and all of a worker expect that of its fence: what it answers then is no fence."""
    bus = await Bus.connect(cluster.url(), "test")
    try:
        await bus.ensure_stream(STREAM)

        async def publish(number: int, refusal: Any = "fenced") -> int:
            headers = {
                "Nats-Msg-Id": f"m{number}",
                "Nats-Expected-Last-Subject-Sequence": "0",
                "Nats-Expected-Last-Subject-Sequence-Subject": "dsec.fence.w",
            }
            subject = f"dsec.session.stepped.w-{number % LANES}"
            return await Publisher._send(bus, subject, b"x", headers, refusal)

        taken = await asyncio.gather(*map(publish, range(50)))
        assert sorted(taken) == list(range(1, 51))
        await bus.fence("w", "test")
        refused = await asyncio.gather(*map(publish, range(50, 60)), return_exceptions=True)
        assert {type(one) for one in refused} == {PublishRefused}
        # The same message twice at once: one of them waits and hears of the other.
        again = await asyncio.gather(
            bus.publish_raw("dsec.session.requested.x", b"", {"Nats-Msg-Id": "x"}),
            bus.publish_raw("dsec.session.requested.x", b"", {"Nats-Msg-Id": "x"}),
        )
        assert len(set(again)) == 1
    finally:
        await bus.close()


async def test_the_deploy_files_make_a_cluster(tmp_path: Path) -> None:
    deploy = Path(__file__).parents[2] / "deploy" / "nats"
    ports = [(free_port(), free_port()) for _ in range(NODES)]
    environment = {variable(user): PASSWORD for user in users()}
    environment["DSEC_NATS_PASSWORD_ROUTE"] = "between-nodes"
    for number, (_, port) in enumerate(ports, 1):
        route = f"nats://route:between-nodes@127.0.0.1:{port}"
        environment[f"DSEC_NATS_ROUTE_{number}"] = route
    nodes = [
        ChildProcess(
            ProcessSpec(
                "nats",
                (str(nats_server_binary()), "-c", str(deploy / "cluster.conf")),
                tmp_path / f"log-{number}",
                env={
                    **environment,
                    "DSEC_NATS_NODE": f"node-{number}",
                    "DSEC_NATS_LISTEN": f"127.0.0.1:{client}",
                    "DSEC_NATS_CLUSTER_LISTEN": f"127.0.0.1:{port}",
                    "DSEC_NATS_STORE": str(tmp_path / f"store-{number}"),
                },
            )
        )
        for number, (client, port) in enumerate(ports)
    ]
    url = ",".join(f"nats://dsec-recorder:{PASSWORD}@127.0.0.1:{client}" for client, _ in ports)
    try:
        bus = await Bus.connect(url, "test")
        await bus.ensure_stream(STREAM)
        state = await caught_up(bus)
        assert (state.replicas, state.leader.partition("-")[0]) == (NODES, "node")
        await bus.close()
    finally:
        for node in nodes:
            await node.stop()


@dataclass
class Load:
    """A worker whose lanes publish one after the other, each without a pause."""

    bus: Bus
    acked: dict[int, str] = field(default_factory=dict)
    """What was published, by the sequence that was acknowledged."""

    async def lane(self, lane: int) -> None:
        """Publish until fenced."""
        with suppress(PublishRefused):
            for number in itertools.count():
                body = f"{lane}.{number}"
                headers = {
                    "Nats-Msg-Id": body,
                    "Nats-Expected-Last-Subject-Sequence": "0",
                    "Nats-Expected-Last-Subject-Sequence-Subject": "dsec.fence.w",
                }
                subject = f"dsec.session.stepped.w-{lane}"
                sequence = await self.bus._send(subject, body.encode(), headers, "fenced")
                assert sequence not in self.acked
                self.acked[sequence] = body


async def read_all(consumer: Consumer, found: dict[int, str]) -> None:
    """Read and acknowledge for ever."""
    while True:
        try:
            messages = await consumer.fetch(100, 1.0)
        except AWAY:
            await asyncio.sleep(0.1)
            continue
        for message in messages:
            found[message.sequence] = message.data.decode()
            await message.ack()


@pytest.mark.long
async def test_the_leader_is_killed_under_load_twice(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url(), "load")
    watching = await Bus.connect(cluster.url(), "watching")
    await watching.ensure_stream(STREAM)
    heard: dict[int, str] = {}
    load = Load(bus)
    reading = asyncio.create_task(
        read_all(await watching.consumer("reader", ["dsec.session.stepped.*"]), heard)
    )
    lanes = [asyncio.create_task(load.lane(lane)) for lane in range(LANES)]
    try:
        for _ in range(2):
            leader = (await caught_up(watching)).leader
            before = len(load.acked)
            await cluster.kill(leader)
            async with asyncio.timeout(CAUGHT_UP_S_MAX):
                while len(load.acked) < before + 10 * LANES:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert not any(lane.done() for lane in lanes), "nobody was fenced"
            async with asyncio.timeout(CAUGHT_UP_S_MAX):
                assert await led(watching) != leader
            await cluster.start(leader)
        await caught_up(watching)
        fence = await watching.fence("w", "test")
        await asyncio.gather(*lanes)
        assert max(load.acked) < fence, "nothing of a fenced worker is taken"
        racers = [
            watching.publish_raw(
                "dsec.session.placed.x",
                str(n).encode(),
                {"Nats-Expected-Last-Subject-Sequence": "0", "Nats-Msg-Id": f"placed{n}"},
            )
            for n in range(5)
        ]
        outcomes = await asyncio.gather(*racers, return_exceptions=True)
        assert sorted(type(one).__name__ for one in outcomes) == ["PublishRefused"] * 4 + ["int"]
        async with asyncio.timeout(CAUGHT_UP_S_MAX):
            while len(heard) < len(load.acked):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert heard == load.acked, "what was acknowledged is there, once, where it was said"
    finally:
        for task in (reading, *lanes):
            task.cancel()
        await asyncio.wait([reading, *lanes])
        await bus.close()
        await watching.close()


async def test_of_all_who_expect_the_last_of_several_subjects_one_gets_in(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url(), "test")
    await bus.ensure_stream(STREAM)
    await caught_up(bus)
    asked = subjects.every(RewardRescoreRequested.event_name())
    behind: dict[int, int] = {}

    async def ask(n: int) -> None:
        """Publish some, each behind the last one there is."""
        client = await Bus.connect(cluster.url("dsec-client"), f"client-{n}")
        made = 0
        while made < RESCORES_EACH:
            last = await client.last_sequence(asked)
            with suppress(PublishRefused):
                behind[await request(client, n, made, last)] = last
                made += 1
        await client.close()

    async def request(client: Bus, n: int, made: int, last: int) -> int:
        session = UUID(f"0192f0c1-2345-7abc-8def-{n:06d}{made:06d}")
        fact = RescoreFact(session_id=session, revision=2, reward_fn_hash="0" * 64)
        return await client.publish(
            RewardRescoreRequested(fact=fact),
            session,
            source="test",
            time=utc_now(),
            event_id=f"{session}.{last}",
            expected_sequence=last,
            expected_of=asked,
        )

    async with asyncio.timeout(CAUGHT_UP_S_MAX):
        await asyncio.gather(*(ask(n) for n in range(LANES)))
    before = 0
    for sequence in sorted(behind):
        assert behind[sequence] == before
        before = sequence
    assert len(behind) == LANES * RESCORES_EACH
    await bus.close()
