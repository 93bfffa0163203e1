"""What the handlers need of the world: specs from the log, and large observations."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_result,
    stop_after_delay,
    wait_random_exponential,
)

from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.reward.fact import ENV
from dsec.reward.score import RewardError, reward_document
from dsec.session.observations import resolve

SpecSource = Callable[[str], Awaitable[bytes | None]]
"""From a spec's hash to its content; None if it is not in the log yet."""


class SpecMissing(Exception):
    """A spec is not in the log yet. It was registered before its session, so it will be."""


class BlobMissing(Exception):
    """A large observation cannot be had: no object store is configured."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A reward spec as the service knows it: never its code, only whether there is any."""

    content: bytes
    is_env: bool
    error: RewardError | None = None


class Specs:
    """Specs by hash. What a hash names never changes, so they are kept."""

    def __init__(self, source: SpecSource, *, wait_s: float, kept_max: int) -> None:
        self._source = source
        self._wait_s = wait_s
        self._kept_max = kept_max
        self._kept: OrderedDict[str, Spec] = OrderedDict()

    async def get(self, spec_hash: str) -> Spec:
        """A spec.

        Raises:
            SpecMissing: it did not come into the log in time.
        """
        spec = self._kept.get(spec_hash)
        if spec is None:
            spec = self._kept[spec_hash] = _spec(await self._fetch(spec_hash))
        self._kept.move_to_end(spec_hash)
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)
        return spec

    async def _fetch(self, spec_hash: str) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda content: content is None),
            stop=stop_after_delay(self._wait_s),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            sleep=asyncio.sleep,
        )
        try:
            content: bytes = await retrying(self._source, spec_hash)
        except RetryError:
            raise SpecMissing(f"reward spec {spec_hash} is not in the log yet") from None
        return content


def _spec(content: bytes) -> Spec:
    try:
        document, _ = reward_document(content)
    except RewardError as error:
        return Spec(content, is_env=False, error=error)
    return Spec(content, is_env=document.entry == ENV)


def spec_source(log: LogReader, objects: ObjectStore | None) -> SpecSource:
    """Specs from the log; large ones from the object store that the log names."""

    async def content(spec_hash: str) -> bytes | None:
        found = await log.spec(spec_hash)
        if found is None:
            return None
        if found.blob is None:
            return found.content
        if objects is None:
            raise BlobMissing(f"reward spec {spec_hash} lies in an object store, and none is set")
        return await asyncio.to_thread(objects.get, found.blob)

    return content


def blob_source(objects: ObjectStore | None) -> Callable[[str], bytes]:
    """Where observations that are only referred to come from."""

    def get(key: str) -> bytes:
        if objects is None:
            raise BlobMissing(f"observation {key} lies in an object store, and none is set")
        return objects.get(key)

    return get


def resolved(recorded: bytes, get: Callable[[str], bytes]) -> bytes:
    """The canonical observation behind a recorded one."""
    return resolve(recorded, get) if recorded[:1] == b"\xa2" else recorded
