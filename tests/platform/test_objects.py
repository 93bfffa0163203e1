"""The object store: one suite for every kind of it, and how long one that is away is waited for."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlparse

import pytest

from dsec.platform import object_s3, objects
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


def _old(url: str, name: str) -> float:
    """A time before which this object was written, and after which whatever is written now: in a
    directory it is made an old one; a bucket keeps the server's time, to the second."""
    parsed = urlparse(url)
    if parsed.scheme == "file":
        os.utime(Path(parsed.path) / name, (1e9, 1e9))
        return 1e9 + 1
    time.sleep(1.1)
    return float(int(time.time()))


def _path(key: str) -> str:
    return f"{key[:2]}/{key}"


@pytest.mark.s3
def test_old_blobs_and_what_was_left_are_listed_and_nothing_of_others(
    object_store_url: str,
) -> None:
    store, backend = ObjectStore(object_store_url), backend_of(object_store_url)
    key = store.put(b"state")
    left = f".proof/{'0' * 32}"
    others = ("aa/tmp", "aa/notes.txt", f"bb/{'a' * 64}", "readme")
    for name in (left, *(name for name in others if "/" in name)):
        backend.write_if_absent(name, b"x")
    before = max(_old(object_store_url, name) for name in (_path(key), left))
    store.put(b"young")
    assert {one.name for one in store.older(before)} == {_path(key), left}
    (mine,) = [one for one in store.older(before) if one.name == _path(key)]
    assert (mine.key, mine.size_bytes, mine.is_left) == (key, 5, False)
    assert store.collect(mine, before)
    assert not store.collect(mine, before), "another collector was there"
    with pytest.raises(BlobNotFound):
        store.get(key)


@pytest.mark.s3
def test_what_is_put_again_is_young_again(
    object_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_s3, "REFRESH_AGE_S", 1.0)
    store = ObjectStore(object_store_url)
    key = store.put(b"state")
    before = _old(object_store_url, _path(key))
    (listed,) = store.older(before)
    store.put(b"state")
    assert not store.collect(listed, before)
    assert store.get(key) == b"state"
    assert store.older(before) == []


def test_a_name_outlives_a_power_failure_as_the_bytes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    key = ObjectStore(tmp_path.as_uri()).put(b"state")
    folder = tmp_path / key[:2]
    assert synced[0] == tmp_path, "the folder's own name"
    assert synced[1].parent == folder
    assert synced[2:] == [folder]
    backend_of(tmp_path.as_uri()).write(_path(key), b"other")
    assert synced[-1] == folder


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
        ("s3://No_Such/prefix", "DSEC_OBJECT_STORE_URL names the bucket 'No_Such'"),
        ("s3://my..bucket", "names the bucket 'my..bucket'"),
        ("s3://b%20b?endpoint=http://host", "names the bucket 'b%20b'"),
        ("s3://ab", "3 to 63 small letters"),
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


def test_other_servers_may_call_a_bucket_otherwise() -> None:
    assert ObjectStore("s3://My_Bucket?endpoint=http://127.0.0.1:1", NAMED).place


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
    assert store.get(await asyncio.wait_for(waiting, 60)) == b"state"


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
