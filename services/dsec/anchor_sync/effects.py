"""What is done to the object store: prove it, put a blob there, read it back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Literal, NamedTuple

from dsec.platform.cancellation import cancelled
from dsec.platform.object_proof import ProofFailed, prove
from dsec.platform.objects import (
    BlobDamaged,
    BlobNotFound,
    ObjectStore,
    ObjectStoreError,
    backend_of,
)
from dsec_contracts.anchor import AnchorCapturedCircumstance

log = logging.getLogger(__name__)

PROOF_PAUSE_S = 2.0
LostCode = Literal["not_captured", "blob_missing", "blob_damaged"]


class Stored(NamedTuple):
    """A blob that lies in the store, and was read back."""

    blob: str
    size_bytes: int


class Lost(NamedTuple):
    """A blob that will not be had."""

    code: LostCode
    message: str


async def proven(url: str, stop: asyncio.Event) -> bool:
    """Wait until the store does what blobs rely on. False: told to stop before that.

    Each failure is said in a sentence. Nothing is trusted to a store that fails: what sessions
    capture waits in the stream meanwhile.
    """
    while not stop.is_set() and not cancelled():
        backend = backend_of(url)
        try:
            await asyncio.to_thread(prove, backend)
        except ProofFailed as error:
            log.error(
                "the object store %s fails at its %s: %s. No anchor is stored before it does.",
                backend.place,
                error.step,
                error.reason,
            )
        else:
            return True
        try:
            async with asyncio.timeout(PROOF_PAUSE_S):
                await stop.wait()
        except TimeoutError:
            continue
    return False


def keep(store: ObjectStore, captured: AnchorCapturedCircumstance) -> Stored | Lost:
    """See that what was captured lies in the store, whole. Repeating it changes nothing.

    Raises:
        BlobNotFound: its worker put it into the store, and it is not there (yet).
        ObjectStoreError: the store is away.
    """
    if captured.blob is None:
        return Lost("not_captured", captured.error or "nothing was captured")
    if captured.data:
        if hashlib.sha256(captured.data).hexdigest() != captured.blob:
            return Lost("blob_damaged", "the bytes in the event do not match their hash")
        store.put(captured.data)
    try:
        size = len(store.get(captured.blob))
    except BlobNotFound as error:
        if captured.data:  # just written: the store will say so in a moment, or is none
            raise ObjectStoreError(f"{error}, although it was written") from error
        raise
    except BlobDamaged as error:
        if not captured.data:
            return Lost("blob_damaged", str(error))
        # Another anchor's blob is the same one, and was damaged since. The bytes at hand are whole.
        log.warning("%s: it is written anew", error)
        store.mend(captured.data)
        try:
            size = len(store.get(captured.blob))
        except BlobDamaged as again:
            return Lost("blob_damaged", str(again))
    return Stored(captured.blob, size)
