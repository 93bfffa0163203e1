"""From `state_anchor` to loadable in another process, on a directory and on an S3 server.

    python loadtests/anchors.py --samples 30 --json

A session's agent returns a `state_anchor` of so many random bytes with each step. Its lane
publishes the anchor, anchor-sync (a process of its own) stores it and says so, and a third process
that hears that reads the blob and checks it against its hash: then it is loadable. The clock starts
when the step begins. A restart finds the anchor in the log, which has it a commit of the recorder
later; that is not part of this.

Beside it, by turns in the same run, the bare thing: for S3 a put and a get through boto3, for the
directory a file written, synced and read, of as many bytes. The servers are the script's own.
`--json` prints, by store and size, `anchor_ms_p50`, `anchor_ms_p95`, `bare_ms_p50`, `bare_ms_p95`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import quantiles
from typing import Any

import uuid_utils
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the server that the tests start, too
from tests.seaweedfs import BUCKET, CREDENTIALS, in_environment, seaweedfs

from dsec.env_runtime.anchors import Outbox
from dsec.env_runtime.packing import Sender
from dsec.env_runtime.seats import Seat
from dsec.platform.bus import Bus
from dsec.platform.objects import ObjectStore, backend_of
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import reward_input
from dsec.session.local import local_program
from dsec.session.machine import SessionMachine
from dsec.session.program import session_config
from dsec_contracts import AnchorStored, encode
from dsec_contracts.session import PlacedFact, RequestFact

SIZES_BYTES = {"1kB": 1_000, "64kB": 64_000, "4MB": 4_000_000}
WARM_UP = 3
ANSWER_WAIT_S = 60.0
AGENT = """
import random
class Agent:
    def __init__(self, config):
        size = int(config["params"]["size"])
        self.steps, self.block = 0, random.Random(config["seed"]).randbytes(size - 8)
    def step(self, observation):
        self.steps += 1
        return {"action": 0, "state_anchor": self.steps.to_bytes(8, "big") + self.block}
    def set_state(self, state):
        pass
"""


def seat_of(size_bytes: int) -> Seat:
    """A session whose anchors have that size."""
    program = local_program(
        AgentDocument(entry="agent.py:Agent", params={"size": size_bytes}),
        {"agent.py": AGENT.encode()},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )
    session_id, none = uuid_utils.uuid7(), "0" * 64
    request = RequestFact.model_validate(
        {
            "session_id": str(session_id),
            "agent_spec": none,
            "env_spec": none,
            "reward_fn_hash": none,
            "seed": 7,
            "max_steps": 100_000,
            "creation_timestamp": "2026-01-01T00:00:00Z",
        }
    )
    machine = SessionMachine(program, session_config(request, program))
    machine.start()
    placed = PlacedFact(session_id=request.session_id, attempt=1, worker="w1", lane="w1-0")
    sender = Sender(request.session_id.bytes, 1, b"", none)
    return Seat(request, placed, 0, machine, 30.0, 4096, "reference", sender)


def read_on(nats_url: str, object_store_url: str, loaded: Queue[Any]) -> None:
    """The other process: hears of anchors, reads them, and says when it had which."""

    async def hear() -> None:
        store = ObjectStore(object_store_url)
        bus = await Bus.connect(nats_url, "reader")
        consumer = await bus.consumer(
            f"reader-{os.getpid()}",
            ["dsec.anchor.stored.*"],
            start_sequence=(await bus.stream_state()).last_sequence + 1,
            ack="none",
            inactive_s=60,
        )
        loaded.put("ready")
        while True:
            for message in await consumer.fetch(1, 5.0):
                event = message.event()
                assert isinstance(event, AnchorStored)
                store.get(event.fact.blob)  # which compares the bytes with the name
                loaded.put((str(event.fact.session_id), event.fact.position, time.time_ns()))

    uvloop.run(hear())


@contextmanager
def reader(nats_url: str, object_store_url: str) -> Iterator[Queue[Any]]:
    """Run `read_on` beside this process."""
    spawn = multiprocessing.get_context("spawn")
    loaded: Queue[Any] = spawn.Queue()
    process = spawn.Process(target=read_on, args=(nats_url, object_store_url, loaded), daemon=True)
    process.start()
    try:
        assert loaded.get(timeout=ANSWER_WAIT_S) == "ready"
        yield loaded
    finally:
        process.kill()
        process.join()


@contextmanager
def anchor_sync(nats_url: str, object_store_url: str) -> Iterator[None]:
    """Run the service beside this process."""
    env = os.environ | {
        "DSEC_NATS_URL": nats_url,
        "DSEC_OBJECT_STORE_URL": object_store_url,
        "DSEC_LOG_LEVEL": "WARNING",
    }
    process = subprocess.Popen([sys.executable, "-m", "dsec.anchor_sync"], env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def step_once(seat: Seat) -> None:
    """One step and its reward."""
    machine = seat.machine
    machine.step()
    assert machine.last is not None
    assert machine.ended is None, machine.ended
    step, cause = machine.last.step, machine.last.chain[:16]
    fact = encode([step, 1, 1.0, {"env": [1.0, 1.0]}, cause])
    machine.deliver(reward_input(step, 1.0, fact, cause))


async def one_anchor(seat: Seat, outbox: Outbox, loaded: Queue[Any]) -> float:
    """Milliseconds from the step to loadable elsewhere."""
    began_ns = time.time_ns()
    step_once(seat)
    outbox.release()
    want = str(seat.placed.session_id), seat.machine.steps
    while True:
        at_ns: int
        session_id, position, at_ns = await asyncio.to_thread(loaded.get, True, ANSWER_WAIT_S)
        if (session_id, position) == want:
            return (at_ns - began_ns) / 1e6


def bare_s3(url: str) -> Callable[[bytes], None]:
    """Put and get, as boto3 does them."""
    client: Any = getattr(backend_of(url), "_client")  # noqa: B009 - the same settings

    def put_and_get(data: bytes) -> None:
        key = f"bare/{time.time_ns()}"
        client.put_object(Bucket=BUCKET, Key=key, Body=data)
        assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == data

    return put_and_get


def bare_directory(folder: Path) -> Callable[[bytes], None]:
    """Write, sync and read a file."""

    def write_and_read(data: bytes) -> None:
        path = folder / f"bare-{time.time_ns()}"
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        assert path.read_bytes() == data

    return write_and_read


async def measure(
    nats_url: str, object_store_url: str, bare: Callable[[bytes], None], samples: int
) -> dict[str, dict[str, float]]:
    """Both, by turns, for every size."""
    bus = await Bus.connect(nats_url, "lane")
    await bus.ensure_stream()
    outbox = Outbox(bus, ObjectStore(object_store_url), "w1-0", "w1", lambda: None)
    publishing = asyncio.create_task(outbox.run())
    told = {}
    with anchor_sync(nats_url, object_store_url), reader(nats_url, object_store_url) as loaded:
        for name, size in SIZES_BYTES.items():
            seat = seat_of(size)
            seat.machine.on_anchor = lambda taken, seat=seat: outbox.take(seat, taken)
            anchor_ms, bare_ms = [], []
            for _ in range(WARM_UP + samples):
                anchor_ms.append(await one_anchor(seat, outbox, loaded))
                data, began = os.urandom(size), time.perf_counter()
                await asyncio.to_thread(bare, data)
                bare_ms.append((time.perf_counter() - began) * 1000)
            told[name] = {**shares("anchor", anchor_ms), **shares("bare", bare_ms)}
    publishing.cancel()
    await asyncio.wait([publishing])
    await bus.close()
    return told


def shares(name: str, milliseconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile, without the first ones."""
    cuts = quantiles(milliseconds[WARM_UP:], n=20, method="inclusive")
    return {f"{name}_ms_p50": round(cuts[9], 2), f"{name}_ms_p95": round(cuts[18], 2)}


async def run(samples: int) -> dict[str, dict[str, dict[str, float]]]:
    """Servers, then each store."""
    with tempfile.TemporaryDirectory() as name, in_environment(CREDENTIALS):
        folder = Path(name)
        (folder / "objects").mkdir()
        (folder / "weed").mkdir()
        options = NatsServerOptions(
            directory=folder / "nats",
            log_path=folder / "nats.log",
            port=free_port(),
            password="load",
        )
        s3, weed = seaweedfs(folder / "weed")
        servers = [ChildProcess(nats_server_process(options)), ChildProcess(weed)]
        try:
            for server in servers:
                await server.wait_ready()
            directory = (folder / "objects").as_uri()
            return {
                "directory": await measure(options.url, directory, bare_directory(folder), samples),
                "s3": await measure(options.url, s3.url, bare_s3(s3.url), samples),
            }
        finally:
            for server in servers:
                await server.stop()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=30, help="of each store and size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told = uvloop.run(run(options.samples))
    if options.json:
        print(json.dumps(told))
        return
    columns = ("anchor_ms_p50", "anchor_ms_p95", "bare_ms_p50", "bare_ms_p95")
    print(f"{'store':>10} {'size':>5}", *(f"{name:>13}" for name in columns))
    for store, sizes in told.items():
        for size, ms in sizes.items():
            print(f"{store:>10} {size:>5}", *(f"{ms[name]:>13.2f}" for name in columns))


if __name__ == "__main__":
    main()
