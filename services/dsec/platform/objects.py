"""The object store: blobs named by the SHA-256 of their bytes, written once, verified on read."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlparse

from tenacity import (
    AsyncRetrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

log = logging.getLogger(__name__)

PUT_WAIT_S_MAX = 600.0
PUT_PAUSE_S_MIN = 0.1
PUT_PAUSE_S_MAX = 5.0


class ObjectStoreError(Exception):
    """The store cannot do what was asked. Says which blob and why."""


class BlobNotFound(ObjectStoreError):
    """The store is there, and the blob is not."""


class ObjectStore:
    """Blobs in a directory (`file:///...`), two levels deep by the head of their key."""

    def __init__(self, url: str) -> None:
        parsed = urlparse(url)
        if parsed.scheme != "file" or not parsed.path:
            raise ObjectStoreError(
                f"object store {url!r} is not supported: give a directory as file:///path"
            )
        self._root = Path(unquote(parsed.path))

    def _path(self, key: str) -> Path:
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise ObjectStoreError(f"{key!r} is no blob key (64 hexadecimal digits)")
        return self._root / key[:2] / key

    def put(self, data: bytes) -> str:
        """Store `data`; the same bytes twice are one blob. Returns the key.

        Raises:
            ObjectStoreError: the directory cannot be written.
        """
        key = hashlib.sha256(data).hexdigest()
        path = self._path(key)
        if path.exists():
            return key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # Readers see the whole blob or none; a racer's rename puts the same bytes there.
            os.replace(file.name, path)
        except OSError as error:
            raise ObjectStoreError(f"blob {key[:12]} cannot be written: {error}") from error
        return key

    def get(self, key: str) -> bytes:
        """The bytes of a blob.

        Raises:
            BlobNotFound: it is not there.
            ObjectStoreError: the store is not there, or the bytes do not match the name.
        """
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError as error:
            # A directory that is not mounted has no blobs either, but it comes back.
            if self._root.is_dir():
                raise BlobNotFound(f"blob {key[:12]} is not in {self._root}") from error
            raise ObjectStoreError(f"the object store {self._root} is not there") from error
        except OSError as error:
            raise ObjectStoreError(f"blob {key[:12]} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != key:
            raise ObjectStoreError(f"blob {key[:12]} is damaged: its bytes do not match its name")
        return data


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
