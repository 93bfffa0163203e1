"""The object store: one suite for every kind of it, and how long one that is away is waited for."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec.platform import objects
from dsec.platform.object_proof import prove
from dsec.platform.object_s3 import KEY, SECRET
from dsec.platform.objects import (
    BlobDamaged,
    BlobNotFound,
    ObjectStore,
    ObjectStoreError,
    backend_of,
    put_patiently,
)
from dsec.platform.stack.ports import free_port

NAMED = {KEY: "an-access-key", SECRET: "a-secret-that-nobody-reads"}

# -- what every kind does ----------------------------------------------------------------------


@pytest.mark.s3
def test_a_blob_is_written_once_and_verified(object_store_url: str) -> None:
    store, backend = ObjectStore(object_store_url), backend_of(object_store_url)
    key = store.put(b"state")
    assert key == hashlib.sha256(b"state").hexdigest()
    assert store.put(b"state") == key
    assert store.get(key) == b"state"
    backend.write(f"{key[:2]}/{key}", b"other")
    assert store.put(b"state") == key, "what is there is not written over"
    with pytest.raises(BlobDamaged, match=key[:12]):
        store.get(key)
    with pytest.raises(BlobNotFound):
        store.get("0" * 64)


@pytest.mark.s3
@pytest.mark.parametrize("size", [0, 1, 70_000, 5 << 20])
def test_bytes_of_any_number_come_back(object_store_url: str, size: int) -> None:
    store, data = ObjectStore(object_store_url), bytes(range(256)) * (size // 256 + 1)
    assert store.get(store.put(data[:size])) == data[:size]


@pytest.mark.s3
def test_of_several_racers_one_wins_and_all_read_the_same(object_store_url: str) -> None:
    backend = backend_of(object_store_url)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: backend.write_if_absent("aa/one", bytes([n])), range(8)))
    assert won.count(True) == 1
    assert backend.read("aa/one") == bytes([won.index(True)])


@pytest.mark.s3
def test_a_store_proves_itself_and_keeps_nothing_of_it(object_store_url: str) -> None:
    prove(backend_of(object_store_url))
    backend = backend_of(object_store_url)
    backend.delete("aa/never-there")
    assert backend.read("aa/never-there") is None


@pytest.mark.s3
def test_a_name_that_is_no_key_is_refused(object_store_url: str) -> None:
    for name in ("../../etc/passwd", "A" * 64, ""):
        with pytest.raises(ObjectStoreError, match="is no blob key"):
            ObjectStore(object_store_url).get(name)


# -- a bucket ----------------------------------------------------------------------------------


def _bucket_that_is_away() -> str:
    return f"s3://bucket/prefix?endpoint=http://127.0.0.1:{free_port()}"


def test_credentials_show_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = ObjectStore(_bucket_that_is_away(), NAMED)
    said = []
    for work in (lambda: store.put(b"state"), lambda: store.get("0" * 64)):
        with pytest.raises(ObjectStoreError, match="s3://bucket/prefix/: blob") as error:
            work()
        said.append(str(error.value))
    for secret in NAMED.values():
        assert secret not in "".join(said)
        assert secret not in repr(store)
    assert NAMED[SECRET] not in caplog.text


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://key:secret@bucket/prefix", "holds no credentials"),
        ("s3://bucket?endpoint=http://key:secret@host", "holds no credentials"),
        ("s3://bucket?endpoint=http://host&secret=1", "give the object store as"),
        ("s3:///prefix", "give the object store as"),
        ("s3://bucket?endpoint=host", "its endpoint or region is none"),
        ("s3://bucket?region=no%20where", "its endpoint or region is none"),
        ("s3://[bucket", "URL is none"),
        ("file://data/objects", "file:///path"),
        ("file:objects", "file:///path"),
        ("file:", "file:///path"),
        ("ftp://key:secret@bucket", "is not supported"),
        ("", "is not supported"),
    ],
)
def test_a_url_that_is_none_is_refused_without_being_repeated(url: str, told: str) -> None:
    with pytest.raises(ObjectStoreError, match=told) as error:
        ObjectStore(url, NAMED)
    assert "secret" not in str(error.value).replace(SECRET.lower(), "")


def test_a_bucket_without_credentials_says_where_they_belong() -> None:
    with pytest.raises(ObjectStoreError, match=f"needs {KEY} and {SECRET}"):
        ObjectStore("s3://bucket", {})


@pytest.mark.s3
def test_a_wrong_secret_and_a_missing_bucket_are_no_missing_blob(s3_url: str) -> None:
    wrong = ObjectStore(s3_url, NAMED)
    nowhere = ObjectStore(s3_url.replace("s3://anchors", "s3://absent"))
    for store in (wrong, nowhere):
        with pytest.raises(ObjectStoreError) as error:
            store.get("0" * 64)
        assert type(error.value) is ObjectStoreError, error.value


# -- a store that is away ----------------------------------------------------------------------


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


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # in place of a full disk
    try:
        with pytest.raises(ObjectStoreError, match="cannot be written"):
            ObjectStore(tmp_path.as_uri()).put(bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PUT_WAIT_S_MAX", 0.2)
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    with pytest.raises(ObjectStoreError, match="cannot be written"):
        await put_patiently(ObjectStore(nowhere.as_uri()), b"state")
