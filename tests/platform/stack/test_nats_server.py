"""The embedded NATS server: private, durable, configured as asked."""

from __future__ import annotations

from pathlib import Path

import nats
import nats.errors
import pytest

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

pytestmark = pytest.mark.nats


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
