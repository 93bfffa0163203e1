"""The embedded NATS server: private, durable, configured as asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import nats
import nats.errors
import pytest

from dsec.platform.stack import supervisor
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.nats_server import (
    NatsServerOptions,
    configuration,
    nats_server_process,
    server_info,
    threads,
)
from dsec.platform.stack.ports import LOOPBACK, free_port
from dsec.platform.stack.process import ChildProcess
from dsec.platform.stack.supervisor import SupervisedProcess

pytestmark = pytest.mark.nats
WITHIN_S = 60.0


def options(tmp_path: Path, **more: object) -> NatsServerOptions:
    return NatsServerOptions(
        directory=tmp_path / 'a "quoted" folder',
        log_path=tmp_path / "nats.log",
        port=free_port(),
        password="pass_word-1",
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("sync_interval", ["1s", "always", "250ms"])
async def test_what_was_published_survives_kill_9(tmp_path: Path, sync_interval: str) -> None:
    server = options(tmp_path, sync_interval=sync_interval)
    for expected in (1, 2):
        child = ChildProcess(nats_server_process(server))
        await child.wait_ready()
        client = await nats.connect(server.url)
        stream = client.jetstream()
        await stream.add_stream(name="TEST", subjects=["test.>"])
        assert (await stream.publish("test.a", b"x")).seq == expected
        await client.close()
        child.send_signal(child.spec.death_signal)
        await child.wait_exit()


async def test_a_full_disk_is_over_when_there_is_room_again(
    tmp_path: Path, small_disk: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_AFTER_S", 0.5)
    monkeypatch.setattr(supervisor, "AILMENT_PERIOD_S", 0.2)
    disk, said = small_disk(64), list[str]()
    server = NatsServerOptions(disk / "nats", tmp_path / "nats.log", free_port(), "password")
    process = SupervisedProcess(
        nats_server_process(server),
        restarts_max=2,
        on_change=lambda: None,
        on_progress=said.append,
    )
    await process.start()
    client = await nats.connect(server.url)
    stream = client.jetstream(timeout=2)
    await stream.add_stream(name="TEST", subjects=["test.>"], max_bytes=32 << 20)
    acknowledged = (await stream.publish("test.a", b"x")).seq
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            continue
    with pytest.raises(nats.errors.Error):  # noqa: PT012 - one of the next is refused
        for _ in range(100):
            acknowledged = (await stream.publish("test.a", bytes(64 << 10))).seq
    ballast.unlink()
    async with asyncio.timeout(WITHIN_S):
        while not process.restarts:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert "takes nothing since" in said[0]
    async with asyncio.timeout(WITHIN_S):
        while not client.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert (await stream.publish("test.a", b"x")).seq == acknowledged + 1
        await asyncio.sleep(1.5)
    assert process.restarts == 1, "what an earlier run said counts no more"
    await client.close()
    await process.stop()


async def test_a_stranger_on_this_machine_is_not_let_in(tmp_path: Path) -> None:
    server = options(tmp_path)
    child = ChildProcess(nats_server_process(server))
    await child.wait_ready()
    with pytest.raises(nats.errors.Error, match="Authorization"):
        await nats.connect(
            f"nats://{LOOPBACK}:{server.port}", allow_reconnect=False, max_reconnect_attempts=1
        )
    info = await server_info(LOOPBACK, server.port)
    assert info is not None
    assert info["max_payload"] == 1024 * 1024
    assert server.config_path.stat().st_mode & 0o777 == 0o600
    await child.stop()
    assert await server_info(LOOPBACK, server.port) is None


async def test_another_server_on_the_port_is_not_taken_for_ours(
    tmp_path: Path, nats_url: str
) -> None:
    port = int(nats_url.rsplit(":", 1)[1])
    server = NatsServerOptions(tmp_path, tmp_path / "nats.log", port, "other")
    child = ChildProcess(nats_server_process(server))
    with pytest.raises(StackError, match=r"nats-server exited with status 1; .*address already"):
        await child.wait_ready()


def test_a_sync_interval_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match='The sync interval "soon" of nats-server'):
        configuration(options(tmp_path, sync_interval="soon"))


def test_the_server_leaves_cores_to_the_services() -> None:
    assert [threads(cores) for cores in (1, 2, 3, 8)] == [1, 1, 1, 4]
