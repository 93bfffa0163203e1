"""What the handlers need of the world: specs from the log, and large observations.

Two kinds of trouble are kept apart. A log or a store that is *away*, or a recorder that is behind,
comes back: whatever needs it is tried again for ever. A spec that a log does not have although it
has got to the step that names it, or a blob that a store which is up does not have, is a *fact*;
after `reward_absent_s_max` of it the step's session is told so, instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

from dsec.platform.log import LogReader
from dsec.platform.objects import BlobNotFound, ObjectStore
from dsec.reward.components import Code
from dsec.reward.fact import ENV
from dsec.reward.score import RewardError, reward_document
from dsec.session.observations import resolve

SpecSource = Callable[[str, int], Awaitable[bytes]]
"""From a spec's hash, and the position of a step that names it, to its content. Raises `Absent`
where the log has got to that position and does not have it."""

NAMES_MAX = 4096
"""What has been looked for in vain is remembered for so many names."""


class Absent(Exception):
    """Something is not where it has to be, and nothing that could be waited for is away."""

    code: ClassVar[Code]


class SpecMissing(Absent):
    """The log has passed the step that names a spec, and does not have the spec."""

    code = "spec_not_found"


class BlobMissing(Absent):
    """The object store does not have a blob, or none is configured."""

    code = "blob_not_found"


class BlobGone(BlobMissing):
    """A blob that has been looked for long enough."""


class Lost(bytes):
    """In place of an observation whose blob is gone: why. The row that needs it has no reward."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A reward spec as the service knows it: never its code, only whether there is any."""

    content: bytes
    is_env: bool
    error: RewardError | None = None


class Patience:
    """How long each thing that is absent has been looked for, by this replica."""

    def __init__(self, absent_s_max: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._absent_s_max = absent_s_max
        self._clock = clock
        self._since: OrderedDict[str, float] = OrderedDict()

    def is_over(self, name: str) -> bool:
        """Note that a thing is absent, and say whether it has been for long enough."""
        now = self._clock()
        since = self._since.setdefault(name, now)
        while len(self._since) > NAMES_MAX:
            self._since.popitem(last=False)
        return now - since >= self._absent_s_max

    def found(self, name: str) -> None:
        """It is there after all."""
        self._since.pop(name, None)


class Specs:
    """Specs by hash. What a hash names never changes, so they are kept."""

    def __init__(self, source: SpecSource, *, patience: Patience, kept_max: int) -> None:
        self._source = source
        self._patience = patience
        self._kept_max = kept_max
        self._kept: OrderedDict[str, Spec] = OrderedDict()
        self.position = 0
        """Of the step that is being scored: one message is handled after the other."""

    async def get(self, spec_hash: str) -> Spec:
        """A spec; one that is absent for good has an error.

        Raises:
            Absent: it is not there, but has not been looked for long enough.
            LogBehind, LogUnavailable, ObjectStoreError: nobody can say whether it is there.
        """
        spec = self._kept.get(spec_hash)
        if spec is None:
            try:
                content = await self._source(spec_hash, self.position)
            except Absent as absent:
                if not self._patience.is_over(spec_hash):
                    raise
                # Not kept: should it turn up, the next session has it.
                return Spec(b"", is_env=False, error=RewardError(absent.code, str(absent)))
            self._patience.found(spec_hash)
            spec = self._kept[spec_hash] = _spec(content)
        self._kept.move_to_end(spec_hash)
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)
        return spec


def _spec(content: bytes) -> Spec:
    try:
        document, _ = reward_document(content)
    except RewardError as error:
        return Spec(content, is_env=False, error=error)
    return Spec(content, is_env=document.entry == ENV)


def spec_source(log: LogReader, objects: ObjectStore | None, behind_wait_s: float) -> SpecSource:
    """Specs from the log; large ones from the object store that the log names.

    Args:
        behind_wait_s: how long one look waits for the recorder to come to the step's position.
    """

    async def content(spec_hash: str, position: int) -> bytes:
        found = await log.spec(spec_hash)
        if found is None:
            # The scheduler saw it before it placed the session; the recorder may be behind.
            await log.wait_floor(position, behind_wait_s)
            found = await log.spec(spec_hash)
        if found is None:
            raise SpecMissing(
                f"reward spec {spec_hash} is not in the log, which has got to position {position}: "
                "register it, and request the session again"
            )
        if found.blob is None:
            return found.content
        return await asyncio.to_thread(_blob, objects, found.blob, f"reward spec {spec_hash}")

    return content


def blob_source(objects: ObjectStore | None, patience: Patience) -> Callable[[str], bytes]:
    """Where observations that are only referred to come from."""

    def get(key: str) -> bytes:
        try:
            data = _blob(objects, key, "an observation")
        except BlobMissing as missing:
            if patience.is_over(key):
                raise BlobGone(str(missing)) from missing
            raise
        patience.found(key)
        return data

    return get


def _blob(objects: ObjectStore | None, key: str, what: str) -> bytes:
    if objects is None:
        raise BlobMissing(
            f"{what} lies in an object store (blob {key[:12]}), and none is configured: set "
            "DSEC_OBJECT_STORE_URL"
        )
    try:
        return objects.get(key)
    except BlobNotFound as error:
        raise BlobMissing(f"{what}: {error}") from error


def resolved(recorded: bytes, get: Callable[[str], bytes]) -> bytes:
    """The canonical observation behind a recorded one; `Lost` where its blob is gone."""
    if recorded[:1] != b"\xa2":
        return recorded
    try:
        return resolve(recorded, get)
    except BlobGone as gone:
        return Lost(str(gone).encode())
