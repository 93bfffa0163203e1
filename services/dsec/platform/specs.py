"""Specs from the log and blobs from the object store, for services that are told only their names.

Two kinds of trouble are kept apart. A log or a store that is *away*, or a recorder that is behind,
comes back: whatever needs it is tried again for ever. A spec that a log does not have although it
has got to the position that names it, or a blob that a store which is up does not have, is
`Absent`; whoever can do without it gives it up with `Patience`, instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import ClassVar, Generic, Literal, TypeVar

from dsec.platform.bounded import Bounded
from dsec.platform.log import LogReader, SpecContent
from dsec.platform.objects import BlobNotFound, ObjectStore

T = TypeVar("T")
NAMES_MAX = 4096
"""What has been looked for in vain is remembered for so many names."""

AbsentCode = Literal["spec_not_found", "blob_not_found", "service_not_declared"]

SpecSource = Callable[[str, int], Awaitable[bytes]]
"""From a spec's hash, and the position of a message that names it, to its content. Raises `Absent`
where the log has got to that position and does not have it."""


class Absent(Exception):
    """Something is not where it has to be, and nothing that could be waited for is away."""

    code: ClassVar[AbsentCode]


class SpecMissing(Absent):
    """The log has passed the position that names a spec, and does not have the spec."""

    code = "spec_not_found"


class BlobMissing(Absent):
    """The object store does not have a blob, or none is configured."""

    code = "blob_not_found"


class Gone(Exception):
    """What was absent, and has been looked for long enough."""

    def __init__(self, absent: Absent) -> None:
        super().__init__(str(absent))
        self.code: AbsentCode = absent.code


class Patience:
    """How long each thing that is absent has been looked for, by this replica."""

    def __init__(self, absent_s_max: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._absent_s_max = absent_s_max
        self._clock = clock
        self._since: Bounded[str, float] = Bounded(NAMES_MAX)

    @contextlib.contextmanager
    def looking_for(self, name: str) -> Iterator[None]:
        """Look for a thing within this; its time begins when it is absent for the first time.

        Raises:
            Absent: as it was raised within, for as long as it is worth looking again.
            Gone: instead of that, once it has been absent for long enough.
        """
        try:
            yield
        except Absent as absent:
            if self._is_over(name):
                raise Gone(absent) from absent
            raise
        self._since.pop(name, None)

    def _is_over(self, name: str) -> bool:
        now = self._clock()
        if (since := self._since.get(name)) is None:
            since = now
            self._since.remember(name, now)
        return now - since >= self._absent_s_max


class KeptSpecs(Generic[T]):
    """Specs by their hashes, as a service reads them. What a hash names never changes, so what was
    read is kept, and what was used last is forgotten last."""

    def __init__(
        self,
        source: SpecSource,
        read: Callable[[str, bytes], T],
        *,
        patience: Patience,
        kept_max: int,
    ) -> None:
        """Prepare.

        Args:
            read: from a spec's hash and its content to what is kept of it.
        """
        self._source = source
        self._read = read
        self._patience = patience
        self._kept: Bounded[str, T] = Bounded(kept_max)

    async def get(self, spec_hash: str, position: int) -> T:
        """What a spec is read as.

        Args:
            position: of a message that names it.

        Raises:
            Absent: it is not there, but has not been looked for long enough.
            Gone: it is absent for good. Not kept: should it turn up, the next one has it.
            LogBehind, LogUnavailable, ObjectStoreError: nobody can say whether it is there.
        """
        found = self._kept.recall(spec_hash)
        if found is None:
            with self._patience.looking_for(spec_hash):
                content = await self._source(spec_hash, position)
            found = self._read(spec_hash, content)
            self._kept.remember(spec_hash, found)
        return found


async def spec_content(
    log: LogReader,
    objects: ObjectStore | None,
    what: str,
    spec_hash: str,
    position: int,
    wait_s: float,
    *,
    epoch: int | None = None,
) -> bytes:
    """A spec from the log; a large one from the object store that the log names.

    Args:
        what: kind of spec it is, for people.
        position: of a message that was published after the spec.
        wait_s: how long to wait for the recorder to come to `position`.
        epoch: the epoch that `position` counts in; None: the one that the log is in.

    Raises:
        SpecMissing, BlobMissing: the log has come to `position`, and it is not there.
        LogBehind, LogUnavailable, ObjectStoreError: nobody can say whether it is there.
    """
    found = await log.spec(spec_hash)
    if found is None:
        # It was published before what names it; the recorder may be behind.
        await log.wait_floor(position, wait_s, epoch=epoch)
        found = await log.spec(spec_hash)
    if found is None:
        raise SpecMissing(
            f"{what} spec {spec_hash} is not in the log, which has got to position {position}: "
            "register it, and request the session again"
        )
    return await registered_content(objects, found, what)


async def registered_content(objects: ObjectStore | None, spec: SpecContent, what: str) -> bytes:
    """The bytes of a spec that the log has, which are those that its hash names.

    Raises:
        SpecMissing: other bytes were registered under it.
        BlobMissing: its blob is not there.
        ObjectStoreError: nobody can say whether it is, or it is damaged.
    """
    content = spec.content
    if not content and spec.blob is not None:
        named = f"{what} spec {spec.spec_hash}"
        content = await asyncio.to_thread(blob_content, objects, spec.blob, named)
    if hashlib.sha256(content).hexdigest() != spec.spec_hash:
        # Whoever registered it named another blob: a hash pins what runs.
        raise SpecMissing(
            f"what was registered as {what} spec {spec.spec_hash} has another hash: "
            "register it again"
        )
    return content


def spec_source(
    log: LogReader, objects: ObjectStore | None, what: str, wait_s: float
) -> SpecSource:
    """`spec_content` for a service that needs one kind of spec."""

    async def content(spec_hash: str, position: int) -> bytes:
        return await spec_content(log, objects, what, spec_hash, position, wait_s)

    return content


def blob_content(objects: ObjectStore | None, key: str, what: str) -> bytes:
    """A blob. Blocks.

    Args:
        what: it is, for people.

    Raises:
        BlobMissing: the store does not have it, or there is none.
        ObjectStoreError: the store is away.
    """
    if objects is None:
        raise BlobMissing(
            f"{what} lies in an object store (blob {key[:12]}), and none is configured: set "
            "DSEC_OBJECT_STORE_URL"
        )
    try:
        return objects.get(key)
    except BlobNotFound as error:
        raise BlobMissing(f"{what}: {error}") from error
