"""The object store: blobs named by the SHA-256 of their bytes, written once, verified on read."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from tenacity import (
    AsyncRetrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from dsec.platform.crash_points import reached
from dsec.platform.object_directory import Directory
from dsec.platform.object_errors import BlobDamaged, BlobNotFound, ObjectStoreError
from dsec.platform.object_listing import Listed
from dsec.platform.object_s3 import Bucket

__all__ = ["BlobDamaged", "BlobNotFound", "ObjectStore", "ObjectStoreError", "put_patiently"]

log = logging.getLogger(__name__)

PUT_WAIT_S_MAX = 600.0
PUT_PAUSE_S_MIN = 0.1
PUT_PAUSE_S_MAX = 5.0


class Backend(Protocol):
    """Where blobs lie. Names are relative paths; every method may raise `ObjectStoreError`."""

    @property
    def place(self) -> str:
        """Where it is, for people: never with credentials."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all, over what is there."""
        ...

    def write_if_absent(self, name: str, data: bytes) -> bool:
        """Whether it was absent, and is now written. One that is there and older than
        `REFRESH_AGE_S` counts as written now."""
        ...

    def read(self, name: str) -> bytes | None:
        """None where there is nothing under that name in a store that is there."""
        ...

    def delete(self, name: str) -> None:
        """Nothing lies there afterwards."""
        ...

    def listed(self) -> Iterator[Listed]:
        """All that lies there, in no order, other people's objects too."""
        ...

    def delete_if_older(self, name: str, before_s: float) -> bool:
        """Delete what was written before a time; what was put again since then stays."""
        ...


def backend_of(url: str, credentials: Mapping[str, str] | None = None) -> Backend:
    """What a URL stands for.

    Raises:
        ObjectStoreError: it is of no kind that is supported.
    """
    try:
        parsed = urlparse(url)
    except ValueError as error:
        raise ObjectStoreError("the object store's URL is none") from error
    if parsed.scheme == "s3":
        return Bucket(url, credentials)
    if parsed.scheme == "file" and (parsed.netloc or not parsed.path.startswith("/")):
        # `file://data/x` would be /x, and `file:x` another place in every process.
        raise ObjectStoreError("give the object store's directory as file:///path, from the root")
    if parsed.scheme != "file":
        shown = f"{parsed.scheme}://" if parsed.scheme else "that without a scheme"
        raise ObjectStoreError(
            f"object store {shown} is not supported: give a directory as file:///path, or "
            "s3://bucket/prefix?endpoint=URL"
        )
    return Directory(Path(unquote(parsed.path)))


class ObjectStore:
    """Blobs in a directory or a bucket, two levels deep by the head of their key."""

    def __init__(self, url: str, credentials: Mapping[str, str] | None = None) -> None:
        """A store; nothing is asked of it yet.

        Args:
            url: `file:///directory`, or `s3://...` as `dsec.platform.object_s3` has it.
            credentials: by the names of their variables; None: those of the environment.

        Raises:
            ObjectStoreError: the URL is of no kind that is supported, or credentials are missing.
        """
        self._backend = backend_of(url, credentials)

    def put(self, data: bytes) -> str:
        """Store `data`; the same bytes twice are one blob. Returns the key.

        Raises:
            ObjectStoreError: the store cannot be written.
        """
        key = hashlib.sha256(data).hexdigest()
        reached("put.before")
        self._backend.write_if_absent(_name(key), data)
        reached("put.after")
        return key

    def mend(self, data: bytes) -> None:
        """Write a blob over the damaged one that lies under its name.

        Raises:
            ObjectStoreError: the store cannot be written.
        """
        self._backend.write(_name(hashlib.sha256(data).hexdigest()), data)

    def get(self, key: str) -> bytes:
        """The bytes of a blob.

        Raises:
            BlobNotFound: it is not there.
            BlobDamaged: the bytes do not match the name.
            ObjectStoreError: the store is not there.
        """
        data = self._backend.read(_name(key))
        if data is None:
            raise BlobNotFound(f"blob {key[:12]} is not in {self._backend.place}")
        if hashlib.sha256(data).hexdigest() != key:
            raise BlobDamaged(f"blob {key[:12]} is damaged: its bytes do not match its name")
        return data

    def older(self, before_s: float) -> list[Listed]:
        """Blobs, and what was left on the way to one, that were written before a time.

        Raises:
            ObjectStoreError: the store cannot be listed.
        """
        return [
            one
            for one in self._backend.listed()
            if one.written_s < before_s and (one.key is not None or one.is_left)
        ]

    def collect(self, one: Listed, before_s: float) -> bool:
        """Delete what `older` named, unless it was put again since then.

        Raises:
            ObjectStoreError: the store is away.
        """
        return self._backend.delete_if_older(one.name, before_s)

    @property
    def place(self) -> str:
        """Where it is, for people: never with credentials."""
        return self._backend.place


def _name(key: str) -> str:
    if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
        raise ObjectStoreError(f"{key!r} is no blob key (64 hexadecimal digits)")
    return f"{key[:2]}/{key}"


async def put_patiently(store: ObjectStore, data: bytes) -> str:
    """Store `data`, again and again while the store is away. Returns the key.

    Raises:
        ObjectStoreError: it was away for `PUT_WAIT_S_MAX`.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(ObjectStoreError),
        wait=wait_random_exponential(multiplier=PUT_PAUSE_S_MIN, max=PUT_PAUSE_S_MAX),
        stop=stop_after_delay(PUT_WAIT_S_MAX),
        before_sleep=before_sleep_log(log, logging.WARNING),
        reraise=True,
    )
    key: str = await retrying(asyncio.to_thread, store.put, data)
    return key
