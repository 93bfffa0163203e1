"""What becomes of a captured anchor, whoever dies and whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from tests import seaweedfs
from tests.anchor_sync.conftest import SESSION, Rig, blob_of
from tests.otlp import Receiver

from dsec.platform.object_s3 import SECRET
from dsec.platform.objects import ObjectStore
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec.platform.telemetry.ids import anchor_span, placement_span
from dsec_contracts import AnchorLost, AnchorStored

pytestmark = [pytest.mark.nats]


@pytest.mark.s3
async def test_an_anchor_is_stored_verified_and_announced(rig: Rig, object_store_url: str) -> None:
    store = ObjectStore(object_store_url)
    large = blob_of(2, 4 << 20)
    staged = store.put(large)
    rig.start(object_store_url)
    await rig.capture(1)
    await rig.capture(2, blob=staged, size_bytes=len(large), data=b"")
    found = await rig.answered(1, 2)
    for position, data in ((1, blob_of(1)), (2, large)):
        event = found[position]
        assert isinstance(event, AnchorStored)
        assert (event.fact.session_id, event.fact.size_bytes) == (SESSION, len(data))
        assert store.get(event.fact.blob) == data
    await rig.settled()


@pytest.mark.s3
async def test_what_cannot_be_had_is_lost_and_said(rig: Rig, object_store_url: str) -> None:
    rig.start(object_store_url)
    await rig.capture(1, blob="0" * 64, data=b"")
    await rig.capture(2, data=b"other bytes")
    await rig.capture(3, blob=None, data=b"", error="the environment cannot be pickled")
    found = await rig.answered(1, 2, 3)
    told = {
        position: (event.fact.code, event.circumstance.message)
        for position, event in found.items()
        if isinstance(event, AnchorLost)
    }
    assert {position: code for position, (code, _) in told.items()} == {
        1: "blob_missing",
        2: "blob_damaged",
        3: "not_captured",
    }
    assert "is not in" in told[1][1]
    assert told[3][1] == "the environment cannot be pickled"
    await rig.settled()


async def test_what_the_store_has_damaged_is_written_anew_or_lost(rig: Rig, tmp_path: Path) -> None:
    store = tmp_path / "objects"
    keys = [ObjectStore(store.as_uri()).put(blob_of(position)) for position in (1, 2)]
    for key in keys:
        (store / key[:2] / key).write_bytes(b"rotten")
    rig.start(store.as_uri())
    await rig.capture(1)
    await rig.capture(2, data=b"", blob=keys[1])
    answers = await rig.answered(1, 2)
    # Equal sessions share their blobs: what one has whole, the others have again.
    assert isinstance(answers[1], AnchorStored)
    assert ObjectStore(store.as_uri()).get(keys[0]) == blob_of(1)
    lost = answers[2]
    assert isinstance(lost, AnchorLost)
    assert lost.fact.code == "blob_damaged"


async def test_killed_replicas_lose_nothing(rig: Rig, tmp_path: Path) -> None:
    store = (tmp_path / "objects").as_uri()
    count = 60
    for _ in range(2):
        rig.start(store)
    for position in range(1, count + 1):
        await rig.capture(position)
        if position % 20 == 0:
            rig.replicas[-2].send_signal(signal.SIGKILL)
            rig.start(store)
    found = await rig.answered(*range(1, count + 1))
    assert all(isinstance(event, AnchorStored) for event in found.values())
    for position, event in found.items():
        assert ObjectStore(store).get(event.fact.blob) == blob_of(position)  # type: ignore[union-attr]
    await rig.settled()


@pytest.mark.s3
@pytest.mark.long
async def test_a_store_away_for_20_s_loses_nothing(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "seaweedfs"
    folder.mkdir()
    server, spec = seaweedfs.seaweedfs(folder)
    with seaweedfs.in_environment(seaweedfs.CREDENTIALS):
        child = ChildProcess(spec)
        await child.wait_ready()
        try:
            rig.start(server.url)
            await rig.capture(1)
            await rig.answered(1)
            child.send_signal(signal.SIGKILL)
            await child.wait_exit()
            for position in range(2, 30):
                await rig.capture(position)
            await asyncio.sleep(20)
            assert len(rig.answers) == 1
            child = ChildProcess(spec)
            await child.wait_ready()
            found = await rig.answered(*range(1, 30))
            assert all(isinstance(event, AnchorStored) for event in found.values())
        finally:
            await child.stop()
        assert seaweedfs.CREDENTIALS[SECRET] not in rig.logs()


async def test_a_store_that_fails_its_proof_is_trusted_with_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    store = tmp_path / "file"
    store.write_text("no directory")
    rig.start(store.as_uri())
    await rig.capture(1)
    await rig.until(lambda: "fails at its write" in rig.logs())
    await asyncio.sleep(0.5)
    assert rig.answers == []
    store.unlink()
    assert isinstance((await rig.answered(1))[1], AnchorStored)


async def test_without_a_store_it_says_what_to_set(rig: Rig) -> None:
    process = rig.start("")
    assert await asyncio.to_thread(process.wait, 60) == 2
    assert "Set DSEC_OBJECT_STORE_URL" in rig.logs()
    with seaweedfs.in_environment(seaweedfs.CREDENTIALS):
        process = rig.start(f"s3://key:secret@bucket?endpoint=http://127.0.0.1:{free_port()}")
        assert await asyncio.to_thread(process.wait, 60) == 2
    assert "holds no credentials" in rig.logs()
    assert "key:secret" not in rig.logs()


async def test_a_stop_hands_back_what_is_not_done(rig: Rig, tmp_path: Path) -> None:
    store = (tmp_path / "objects").as_uri()
    process = rig.start(store)
    await rig.capture(1)
    await rig.answered(1)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0
    await rig.capture(2)
    rig.start(store)
    await rig.answered(2)


async def test_a_message_that_is_none_is_put_aside(rig: Rig, tmp_path: Path) -> None:
    rig.start((tmp_path / "objects").as_uri())
    await rig.bus.publish_raw(f"dsec.anchor.captured.{SESSION}", b"{}", {"ce-id": "x"})
    await rig.capture(1)
    await rig.answered(1)
    await rig.settled()
    assert "is put aside" in rig.logs()


async def test_an_anchor_is_a_span_of_its_session(rig: Rig, tmp_path: Path) -> None:
    receiver = Receiver()
    try:
        with seaweedfs.in_environment({"DSEC_OTLP_ENDPOINT": receiver.url}):
            rig.start((tmp_path / "objects").as_uri())
        await rig.capture(1, attempt=2)
        await rig.capture(2, attempt=2, blob=None, data=b"", error="no")
        await rig.answered(1, 2)
        await rig.until(lambda: len(receiver.spans) == 2)
        stored, lost = sorted(receiver.spans, key=lambda span: span.failed)
        for span, position in ((stored, 1), (lost, 2)):
            assert (span.service, span.name) == ("dsec-anchor-sync", "anchor")
            assert (span.trace_id, span.span_id) == anchor_span(SESSION, position)
            assert span.parent_id == placement_span(SESSION, 2).span_id
        assert (stored.failed, lost.failed) == (False, True)
    finally:
        receiver.close()
