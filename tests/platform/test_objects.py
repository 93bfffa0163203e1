"""The object store, and how long it is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.platform import objects
from dsec.platform.objects import BlobNotFound, ObjectStore, ObjectStoreError, put_patiently


def test_a_blob_is_written_once_and_verified(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path.as_uri())
    key = store.put(b"state")
    assert store.put(b"state") == key
    assert store.get(key) == b"state"
    (tmp_path / key[:2] / key).write_bytes(b"other")
    with pytest.raises(ObjectStoreError, match=key[:12]):
        store.get(key)
    with pytest.raises(BlobNotFound):
        store.get("0" * 64)


async def test_a_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.write_text("not mounted yet")
    store = ObjectStore(mount.as_uri())
    with pytest.raises(ObjectStoreError):
        store.put(b"state")
    waiting = asyncio.create_task(put_patiently(store, b"state"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    mount.unlink()
    mount.mkdir()
    assert store.get(await asyncio.wait_for(waiting, 10)) == b"state"


async def test_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PUT_WAIT_S_MAX", 0.2)
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    with pytest.raises(ObjectStoreError, match="cannot be written"):
        await put_patiently(ObjectStore(nowhere.as_uri()), b"state")
